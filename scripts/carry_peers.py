"""Gathers the peers of the benchmark into a folder, for a GPU machine without a network.

    python scripts/carry_peers.py build/peers
    PYTHONPATH=build/peers python -m mla_kernels.bench --out FILE     # over there

Only what the measured calls need: SGLang's files of Triton kernels under a skeleton of its
package, FlashInfer's MLA modules with the headers that their sources reach (they are compiled
over there, with that machine's nvcc and ninja), FlashMLA's wheel whole. The versions are those of
:data:`WHEELS`. The other machine must have torch.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from wheels import command, download

SGLANG, FLASHINFER, FLASHMLA = "0.5.23", "0.7.2", "1.0.0"

#: What pip is asked for; no dependencies, as torch is there and most others are not needed.
WHEELS = (f"sglang=={SGLANG}", f"flashinfer-python=={FLASHINFER}", f"sgl-flash-mla=={FLASHMLA}",
          "apache-tvm-ffi>=0.1.11,<0.2", "packaging", "requests", "urllib3", "idna", "certifi",
          "charset-normalizer", "nvidia-ml-py", "filelock", "jinja2", "markupsafe")

SGLANG_KERNELS = ("decode_attention", "extend_attention", "merge_state", "metadata", "score_mod",
                  "verify_mla", "verify_splitkv")

#: The kernels ask these two modules about the platform and for switches, nothing more.
SGLANG_STUBS = {
    "sglang/__init__.py": f'__version__ = "{SGLANG}"\n',
    "sglang/srt/utils.py": "def is_cuda():\n    return True\n\n\n"
                           "def __getattr__(name):\n    return lambda *args: False\n",
    "sglang/srt/environ.py": "class _Switch:\n    def get(self):\n        return False\n\n\n"
                             "class _Switches:\n    def __getattr__(self, name):\n"
                             "        return _Switch()\n\n\nenvs = _Switches()\n",
}

#: Folders of FlashInfer's package that importing ``flashinfer.mla`` reaches.
FLASHINFER_FOLDERS = ("autotuner", "cudnn", "cute_dsl", "cutile", "jit", "mla", "quantization",
                      "trace")

#: FlashInfer's own include folders, in the order of its compiler flags.
FLASHINFER_INCLUDES = ("flashinfer/data/cccl/libcudacxx/include", "tvm_ffi/include",
                       "flashinfer/data/include", "flashinfer/data/csrc",
                       "flashinfer/data/cutlass/include",
                       "flashinfer/data/cutlass/tools/util/include")

#: Headers among these that CUDA's own headers include.
CUDA_REACHES = ("cuda/atomic", "cuda/std/functional", "cuda/std/type_traits", "nv/target")

INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"]+)[>"]', re.M)

#: How CUTLASS includes the standard library of libcudacxx.
STD_HEADER = re.compile(rb"^[ \t]*#[ \t]*include[ \t]+CUDA_STD_HEADER\((\w+)\)", re.M)


def fetch(folder: Path, python: str) -> None:
    """Unpacks the wheels for Linux on x86-64 into ``folder``."""
    with tempfile.TemporaryDirectory() as wheels:
        for wheel in download(Path(wheels), python, *WHEELS):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)


def reached(roots: Sequence[Path], includes: Sequence[Path]) -> Iterator[Path]:
    """Files that ``roots`` include, at any depth, as far as they lie in ``includes`` or beside
    the file that names them; conditions are not looked at, so it is all that any target could
    need."""
    seen, waiting = set(), list(roots)
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        yield path
        text = path.read_bytes()
        names = INCLUDE.findall(text) + [b"cuda/std/" + n for n in STD_HEADER.findall(text)]
        for name in names:
            for folder in (path.parent, *includes):
                found = folder / name.decode()
                if found.is_file():
                    waiting.append(found.resolve())
                    break


def carried(folder: Path) -> Iterator[Path]:
    """Which of the unpacked files are needed."""
    for name in SGLANG_KERNELS:
        yield folder / f"sglang/kernels/ops/attention/{name}.py"
    package = folder / "flashinfer"
    yield from package.glob("*.py")
    for name in FLASHINFER_FOLDERS:
        yield from (package / name).rglob("*.py")
    sources = list((package / "data/csrc").glob("batch_mla*"))
    includes = [folder / name for name in FLASHINFER_INCLUDES]
    sources += [includes[0] / name for name in CUDA_REACHES]
    yield from reached(sources, includes)
    yield from (folder / "tvm_ffi").rglob("*.py")
    yield from (folder / "tvm_ffi").glob("core*.so")
    yield from (folder / "tvm_ffi/lib").glob("*.so")
    yield from (p for p in (folder / "tvm_ffi/include").rglob("*") if p.is_file())
    for name in ("flash_mla", "packaging", "requests", "urllib3", "idna", "certifi",
                 "charset_normalizer", "filelock", "jinja2", "markupsafe"):
        yield from (p for p in (folder / name).rglob("*") if p.is_file())
    yield from folder.glob("pynvml.py")
    for wheel in ("apache_tvm_ffi", "flashinfer_python", "sgl_flash_mla", "sglang"):
        yield from folder.glob(f"{wheel}-*.dist-info/METADATA")


def carry(folder: Path, dest: Path) -> int:
    """Copies what is needed from ``folder`` to ``dest`` and adds the skeletons; returns the
    bytes there."""
    for path in dict.fromkeys(carried(folder)):
        target = dest / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    stubs = dict(SGLANG_STUBS)
    # FlashInfer's own imports all of its kernels.
    stubs["flashinfer/__init__.py"] = "from .version import __version__\n"
    for name, text in stubs.items():
        (dest / name).parent.mkdir(parents=True, exist_ok=True)
        (dest / name).write_text(text)
    for package in ("sglang/kernels", "sglang/kernels/ops", "sglang/kernels/ops/attention",
                    "sglang/srt"):
        (dest / package / "__init__.py").touch()
    return sum(p.stat().st_size for p in dest.rglob("*") if p.is_file())


def gather(dest: Path, python: str) -> int:
    """Fetches the wheels and copies what is needed of them; returns the bytes."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch).resolve()
        fetch(folder, python)
        return carry(folder, dest)


def main(argv: Sequence[str] | None = None) -> int:
    return command(__doc__.partition("\n")[0], argv, gather)


if __name__ == "__main__":
    sys.exit(main())
