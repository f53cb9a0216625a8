"""Gathers a real SGLang engine into a folder, for a GPU machine without a network.

    python scripts/carry_engine.py build/engine
    python scripts/engine_run.py --carried build/engine --out FILE     # over there

The other machine must have the torch that this SGLang pins, with what usually comes with it. Of
`sglang-kernel`, whose wheel is 380 MB, only the operators of sm_90 are taken; attention kernels
that are not measured stay behind. What a text-only run imports and never uses has a stand-in
in ``engine_run.py``. Two archives, 50 MB together, and the names and versions of what is in them.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from wheels import command, download

SGLANG, SGLANG_KERNEL = "0.5.16", "0.4.5"

#: What pip is asked for, without dependencies: torch is there, and most others are not needed.
#: Versions are named where SGLang pins them.
WHEELS = (
    f"sglang=={SGLANG}", "flashinfer-python==0.6.14", "transformers==5.12.1",
    "tokenizers==0.22.2", "apache-tvm-ffi==0.1.11", "openai==2.6.1", "torch_memory_saver",
    "pydantic", "typing-inspection", "typing-extensions", "annotated-doc", "annotated-types",
    "fastapi", "starlette", "uvicorn", "watchfiles", "websockets", "python-multipart",
    "opentelemetry-api", "orjson", "msgspec", "pyzmq", "pybase64", "partial_json_parser",
    "setproctitle", "compressed-tensors", "loguru", "dill", "gguf", "jiter", "sniffio", "distro",
    "interegular", "soundfile", "cffi", "jsonschema", "jsonschema-specifications", "referencing",
    "rpds-py", "docstring-parser", "easydict", "diskcache", "nest_asyncio", "traitlets",
    "prometheus-client", "httpx", "httpcore", "h11", "anyio", "idna", "einops", "tabulate",
    "nvidia-ml-py", "smg-grpc-servicer")

#: Of sglang-kernel's wheel; SGLang checks the version that the dist-info names.
KERNEL_PARTS = re.compile(r"sgl_kernel/(?!sm100/|flash_ops|flashmla_ops|infllm_ops)|.*\.dist-info/")

def exact_need(wheel: Path, name: str) -> str:
    """``name==version`` as a wheel requires it."""
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        text = archive.read(metadata).decode()
    return re.search(rf"^Requires-Dist: ({name}==[\w.]+)", text, re.M)[1]


def unpack(wheels: Sequence[Path], folder: Path, wanted: re.Pattern | None = None) -> None:
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [name for name in archive.namelist()
                                        if wanted is None or wanted.match(name)])


def pack(folder: Path, archive: Path) -> int:
    """Packs a folder's content; returns the archive's bytes."""
    with tarfile.open(archive, "w:xz", preset=6) as tar:
        for path in sorted(folder.iterdir()):
            tar.add(path, path.name)
    return archive.stat().st_size


def gather(dest: Path, python: str) -> int:
    """Fetches the wheels and writes the archives; returns their bytes."""
    with tempfile.TemporaryDirectory() as scratch:
        wheels, site, kernel = (Path(scratch) / n for n in ("wheels", "site", "kernel"))
        wheels.mkdir()
        got = download(wheels, python, *WHEELS)
        pydantic = next(p for p in got if p.name.startswith("pydantic-"))
        got += download(wheels, python, exact_need(pydantic, "pydantic-core"))
        kernels = download(wheels, python, f"sglang-kernel=={SGLANG_KERNEL}")
        unpack(got, site)
        unpack(kernels, kernel, KERNEL_PARTS)
        for data in site.glob("*.data"):  # scripts and headers that pip would put elsewhere
            for lib in (*data.glob("purelib/*"), *data.glob("platlib/*")):
                shutil.move(lib, site / lib.name)
            shutil.rmtree(data)
        dest.mkdir(parents=True)
        size = pack(site, dest / "site.tar.xz") + pack(kernel, dest / "kernel.tar.xz")
        versions = dict(w.name.split("-")[:2] for w in (*got, *kernels))
        (dest / "versions.json").write_text(json.dumps(versions, indent=2) + "\n")
        return size


def main(argv: Sequence[str] | None = None) -> int:
    return command(__doc__.partition("\n")[0], argv, gather)


if __name__ == "__main__":
    sys.exit(main())
