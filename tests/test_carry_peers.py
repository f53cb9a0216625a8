"""carry_peers: which files are taken along, on a made-up tree of packages."""

import subprocess
import sys
from pathlib import Path

import carry_peers
import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def carry():
    return carry_peers


def write(folder, **files):
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        yield path


def test_includes_are_followed_whatever_their_conditions(carry, tmp_path):
    root, deep, beside, other, std, unused = write(
        tmp_path,
        src__root_DOT_cu='#include <a/deep.h>\n  #  include "beside.h"\n#if 0\n#include <other.h>\n'
                         '#endif\n#include <vector>\n// #include <unused.h>\n',
        inc1__a__deep_DOT_h="#include CUDA_STD_HEADER(utility)\n#include <a/deep.h>\n",
        src__beside_DOT_h="", inc2__other_DOT_h="", inc2__cuda__std__utility="",
        inc2__unused_DOT_h="")
    found = list(carry.reached([root], [tmp_path / "inc1", tmp_path / "inc2"]))
    assert sorted(found) == sorted([root, deep, beside, other, std])


@pytest.fixture
def packages(carry, tmp_path):
    folder = tmp_path / "unpacked"
    package = folder / "flashinfer"
    kernels = folder / "sglang/kernels/ops/attention"
    for path, text in {
        **{kernels / f"{name}.py": "from sglang.srt.environ import envs\n"
                                   "from sglang.srt.utils import is_cuda, is_hip\n"
                                   "state = is_cuda(), is_hip(), envs.ANYTHING.get()\n"
           for name in carry.SGLANG_KERNELS},
        kernels / "__init__.py": "import everything\n",
        kernels / "another.py": "", package / "__init__.py": "import everything\n",
        package / "version.py": '__version__ = "1.2.3"\n', package / "mla/__init__.py": "",
        package / "fused_moe/large.py": "", package / "data/csrc/batch_mla_run.cu":
            "#include <mla.cuh>\n", package / "data/include/mla.cuh": "",
        package / "data/csrc/batch_prefill.cu": "",
        **{folder / carry.FLASHINFER_INCLUDES[0] / name: "" for name in carry.CUDA_REACHES},
        folder / "tvm_ffi/__init__.py": "", folder / "flash_mla/cuda.abi3.so": "",
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_what_is_carried_imports_alone(carry, packages, tmp_path):
    dest = tmp_path / "dest"
    size = carry.carry(packages, dest)
    assert size == sum(p.stat().st_size for p in dest.rglob("*") if p.is_file()) > 0
    have = {str(p.relative_to(dest)) for p in dest.rglob("*") if p.is_file()}
    assert {"flashinfer/data/csrc/batch_mla_run.cu", "flashinfer/data/include/mla.cuh",
            "flash_mla/cuda.abi3.so"} <= have
    assert not [name for name in have if "fused_moe" in name or "batch_prefill" in name
                or "another" in name]
    code = ("import flashinfer.mla, sglang; print(flashinfer.__version__, sglang.__version__)\n"
            + "".join(f"from sglang.kernels.ops.attention import {name}; print({name}.state)\n"
                      for name in carry.SGLANG_KERNELS))
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True,
                          cwd=tmp_path, env={"PYTHONPATH": str(dest)})
    assert done.returncode == 0, done.stderr
    first, *states = done.stdout.splitlines()
    assert first == f"1.2.3 {carry.SGLANG}" and set(states) == {"(True, False, False)"}


def test_an_existing_folder_is_left_alone(carry, tmp_path, capsys):
    assert carry.main([str(tmp_path)]) == 2
    assert "is there already" in capsys.readouterr().err


def test_it_says_when_there_are_no_wheels(carry, tmp_path, monkeypatch, capsys):
    def fail(*args):
        raise subprocess.CalledProcessError(1, "pip")

    monkeypatch.setattr(carry, "fetch", fail)
    assert carry.main([str(tmp_path / "new")]) == 1
    assert "pip could not fetch" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
