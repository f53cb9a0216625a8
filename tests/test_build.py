"""build: the toolkit, what the compiler makes of the kernels, and what a failed build leaves."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from mla_kernels import build
from mla_kernels.build import BuildError, KernelReport, Toolkit
from mla_kernels.device import SM120_SMEM_PER_BLOCK

ROOT = Path(__file__).parent.parent
ARCHES = ("sm_120", "sm_120a", "sm_90", "sm_80")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A build cache of the test's own, and no memory of builds loaded before."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("MLA_KERNELS_CACHE", str(folder))
    monkeypatch.setattr(build, "_loaded", {})
    return folder


def copy_csrc(tmp_path, monkeypatch, file=None, old="", new=""):
    """Makes the build use a copy of csrc/, changed in one place."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    for name, text in build.sources().items():
        if name == file:
            assert text.count(old) == 1, f"{text.count(old)} places of {name} have: {old}"
            text = text.replace(old, new)
        (folder / name).write_text(text)
    monkeypatch.setattr(build, "CSRC", folder)
    return folder


def fake_nvcc(folder, version="12.4", codes=("sm_80", "sm_90")):
    """A compiler that knows what it is, and no more."""
    path = folder / "bin/nvcc"
    path.parent.mkdir(parents=True)
    path.write_text(f"""#!/bin/sh
case $1 in
--version) echo 'Cuda compilation tools, release {version}, V1' ;;
--list-gpu-code) echo {' '.join(codes)} ;;
esac
""")
    path.chmod(0o755)
    return path


# -- toolkit ------------------------------------------------------------------------------


@pytest.fixture
def no_override(monkeypatch):
    monkeypatch.delenv("MLA_KERNELS_CUDA_HOME", raising=False)


@pytest.mark.skipif(not torch.version.cuda, reason="torch without CUDA: any compiler will do")
def test_toolkit_from_pypi(no_override):
    toolkit = build.find_toolkit()
    assert toolkit.origin == "PyPI" and toolkit.nvcc.is_file()
    assert toolkit.version[0] == int(torch.version.cuda.split(".")[0])
    assert toolkit.nvcc == toolkit.home / "bin/nvcc"
    assert {"sm_80", "sm_90", "sm_120"} <= set(toolkit.architectures)
    numbers = [int(a[3:]) for a in toolkit.architectures]
    assert numbers == sorted(numbers)


def test_toolkit_chosen_by_hand(monkeypatch, tmp_path):
    nvcc = fake_nvcc(tmp_path / "mine")
    monkeypatch.setenv("MLA_KERNELS_CUDA_HOME", str(tmp_path / "mine"))
    # Of whatever version: who chooses is believed.
    assert build.find_toolkit() == Toolkit(nvcc, (12, 4), "MLA_KERNELS_CUDA_HOME")
    monkeypatch.setenv("MLA_KERNELS_CUDA_HOME", "/nowhere/cuda")
    with pytest.raises(BuildError, match="MLA_KERNELS_CUDA_HOME is '/nowhere/cuda', but /nowhere/"
                                         "cuda/bin/nvcc does not run: unset it"):
        build.find_toolkit()


def test_no_toolkit(no_override, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(build, "_candidates", lambda: iter([]))
    with pytest.raises(BuildError) as caught:
        build.find_toolkit()
    message = str(caught.value)
    assert "no nvcc for CUDA 13.x, as torch" in message and "Found: none." in message
    assert "pip install 'cuda-toolkit[nvcc,cccl]==13.0.*'" in message
    assert "MLA_KERNELS_CUDA_HOME" in message
    old, broken = fake_nvcc(tmp_path / "old"), tmp_path / "broken"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    candidates = [(tmp_path / "absent", "PATH"), (broken, "PATH"), (old, "CUDA_HOME")]
    monkeypatch.setattr(build, "_candidates", lambda: iter(candidates))
    with pytest.raises(BuildError, match=re.escape(f"Found: {old} 12.4 (CUDA_HOME).")):
        build.find_toolkit()
    # The first that fits is taken.
    new = fake_nvcc(tmp_path / "new", "13.2")
    monkeypatch.setattr(build, "_candidates", lambda: iter([*candidates, (new, "CUDA_HOME")]))
    assert build.find_toolkit() == Toolkit(new, (13, 2), "CUDA_HOME")


def test_candidates(monkeypatch, tmp_path):
    """PyPI's before the environment's, and a link on the path is followed home."""
    nvcc = fake_nvcc(tmp_path / "cuda")
    (tmp_path / "links").mkdir()
    (tmp_path / "links/nvcc").symlink_to(nvcc)
    site = tmp_path / "site"
    fake_nvcc(site / "nvidia/cu13")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", str(tmp_path / "links"), prepend=os.pathsep)
    found = list(build._candidates())
    pypi = found.index((site / "nvidia/cu13/bin/nvcc", "PyPI"))
    home = found.index((tmp_path / "home/bin/nvcc", "CUDA_HOME"))
    assert pypi < home < found.index((nvcc, "PATH"))


@pytest.mark.parametrize("arch, message", [
    ("sm_1", "arch must look like sm_120 or sm_90a; got 'sm_1'"),
    ("120", "arch must look like sm_120 or sm_90a; got '120'"),
    ("sm_120b", "arch must look like sm_120 or sm_90a; got 'sm_120b'"),
    ("compute_120", "arch must look like sm_120 or sm_90a; got 'compute_120'"),
    ("sm_120 -lineinfo", "arch must look like"),
    ("", "arch must look like sm_120 or sm_90a; got ''"),
    (120, "arch must look like sm_120 or sm_90a; got 120"),
    (None, "arch must look like sm_120 or sm_90a; got None"),
    ("sm_75", "arch must be sm_80 or later \\(cp.async, bf16 mma.sync\\); got sm_75"),
    ("sm_80a", "arch sm_80a does not exist: .*; use sm_80"),
    ("sm_90f", "arch sm_90f does not exist: .*; use sm_90"),
    ("sm_999", r"arch sm_999 is unknown to nvcc \d+\.\d+ \(.*\), which knows .*sm_90.*sm_120"),
    ("sm_81", "arch sm_81 is unknown to nvcc"),
], ids=str)
def test_bad_arch(arch, message):
    with pytest.raises(ValueError, match=message):
        build.check_arch(arch, build.find_toolkit())


def test_compiler_too_old_for_the_arch(tmp_path):
    old = Toolkit(fake_nvcc(tmp_path / "old"), (12, 4), "PATH")
    assert build.check_arch("sm_90a", old) == "sm_90a"
    for arch in ("sm_120", "sm_120a"):
        with pytest.raises(ValueError, match=f"arch {arch} is unknown to nvcc 12.4 \\(PATH\\), "
                                             "which knows sm_80, sm_90"):
            build.check_arch(arch, old)


@pytest.mark.parametrize("arch", [*ARCHES, "sm_121", "sm_100f", "sm_90a"])
def test_good_arch(arch):
    assert build.check_arch(arch, build.find_toolkit()) == arch


# -- what the compiler made ---------------------------------------------------------------


@pytest.fixture(scope="module")
def compiled():
    """For an architecture, its reports and the SASS they were counted in; compiled once."""
    done = {}

    def of(arch):
        if arch not in done:
            texts = []
            count = build._count_sass
            build._count_sass = lambda text: texts.append(text) or count(text)
            try:
                reports = build.report(arch)
            finally:
                build._count_sass = count
            done[arch] = reports, "".join(texts)
        return done[arch]

    return of


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHES)
def test_resources(compiled, arch):
    reports, sass = compiled(arch)
    verify = [r for r in reports if r.kernel == "tree_verify"]
    combine = [r for r in reports if r.kernel == "combine"]
    both = {(dtype, rows) for dtype in ("bf16", "fp16") for rows in build.TILE_ROWS}
    assert {(r.dtype, r.rows) for r in verify} == both and len(verify) == len(both)
    assert {(r.dtype, r.rows, r.split) for r in combine} == {
        (*kind, split) for kind in both for split in (1, 4, 8)}
    for r in reports:
        assert r.arch == arch and r.problems == [], (r.name, r.problems)
        assert r.spill_bytes == r.stack_bytes == 0, r.name
        assert 16 <= r.registers <= 255, r.name
        assert 0 <= r.smem_bytes <= 101_376, r.name
        assert (r.smem_bytes > 0) == (r.kernel == "tree_verify" or r.split > 1), r.name
        assert r.sass["LDL"] == r.sass["STL"] == 0, r.name
        assert r.sass["total"] > 100
        assert (r.sass["HMMA"] > 0) == (r.kernel == "tree_verify"), r.name
    for r in verify:
        # Both products of a tile of 32 rows, in pieces of 16 x 8 x 16 shared out to 8 warps.
        scores = 32 // 8 * (r.rows // 16) * (576 // 16) // 8
        values = 512 // 8 * (r.rows // 16) * (32 // 16) // 8
        if arch == "sm_80" and r.rows == 64:
            values //= 2  # there a loop over the tile's two times 16 rows: half of the lines
        assert r.sass["HMMA"] == scores + values, r.name
        copies = "LDGSTS" if arch == "sm_80" else "UBLKCP"  # sm_80 has no bulk copies
        assert r.sass[copies] > 0 and r.sass["LDSM"] > 0
        # One block an SM: all 255 registers for each of 256 threads.
        assert r.registers * 256 <= 65_536
    # Nothing that sm_120 lacks, under the names that the disassembler has for wgmma, tcgen05
    # and setmaxnreg.
    assert "HMMA" in sass
    for name in ("HGMMA", "WARPGROUP", "UTCHMMA", "UTCQMMA", "UTCCP", "UTCBAR", "LDTM", "STTM",
                 "USETMAXREG"):
        assert name not in sass


@pytest.mark.slow
def test_both_dtypes_cost_the_same(compiled):
    by_dtype = {dtype: [dataclasses.replace(r, dtype="") for r in compiled("sm_120")[0]
                        if r.dtype == dtype] for dtype in ("bf16", "fp16")}
    for bf16, fp16 in zip(by_dtype["bf16"], by_dtype["fp16"], strict=True):
        assert (bf16.smem_bytes, bf16.sass["HMMA"]) == (fp16.smem_bytes, fp16.sass["HMMA"])


GOOD = KernelReport("tree_verify", "bf16", 64, None, "sm_120", 255, 0, 0, 101_376,
                    {"HMMA": 136, "LDL": 0, "STL": 0})


@pytest.mark.parametrize("changes, problems", [
    ({}, []),
    ({"smem_bytes": 101_392}, ["101,392 B of shared memory, over 101,376"]),
    ({"spill_bytes": 12}, ["12 bytes of spills"]),
    ({"sass": {"LDL": 3}}, ["0 bytes of spills"]),
    ({"sass": {"STL": 1}}, ["0 bytes of spills"]),
    ({"registers": 256}, ["256 registers"]),
    ({"registers": 300, "spill_bytes": 8, "smem_bytes": 200_000},
     ["8 bytes of spills", "200,000 B of shared memory, over 101,376", "300 registers"]),
    ({"sass": {}}, []),
], ids=str)
def test_problems(changes, problems):
    assert SM120_SMEM_PER_BLOCK == 101_376
    assert dataclasses.replace(GOOD, **changes).problems == problems


def test_names_and_table():
    combine = dataclasses.replace(GOOD, kernel="combine", split=8, sass={}, smem_bytes=1024)
    assert GOOD.name == "tree_verify<bf16, 64 rows>"
    assert combine.name == "combine<bf16, 64 rows, 8 warps a fragment>"
    header, first, second = build.format_report([GOOD, combine]).splitlines()
    assert header.split() == ["kernel", "registers", "spill", "B", "smem", "B", "HMMA", "LDSM",
                              "UBLKCP", "BAR", "total"]
    assert first.split("rows>")[1].split() == ["255", "0", "101,376", "136"] + ["-"] * 4
    assert second.split("fragment>")[1].split() == ["255", "0", "1,024"] + ["-"] * 5


def test_counting_instructions():
    text = """
		Function : _ZN3mla11tree_verify
	.headerflags	@"EF_CUDA_SM120"
        /*0000*/                   LDC R1, c[0x0][0x37c] ;                 /* 0x0000df00ff017b82 */
                                                                           /* 0x000fe20000000800 */
        /*0010*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;   /* 0x0 */
        /*0020*/              @!P0 HMMA.16816.F32.BF16 R4, R8, R12, R4 ;   /* 0x0 */
        /*0030*/              @UP1 STL [R1], R4 ;                          /* 0x0 */
        /*12340*/                  LDS.128 R4, [R5] ;                      /* 0x0 */
		Function : other
        /*0000*/                   EXIT ;                                  /* 0x0 */
"""
    counts = build._count_sass(text)
    assert counts.keys() == {"_ZN3mla11tree_verify", "other"}
    found = counts["_ZN3mla11tree_verify"]
    assert {k: v for k, v in found.items() if v} == {"total": 5, "HMMA": 2, "STL": 1, "LDS": 1}
    assert {k: v for k, v in counts["other"].items() if v} == {"total": 1}


@pytest.mark.slow
def test_over_the_budget_does_not_compile(tmp_path, monkeypatch):
    copy_csrc(tmp_path, monkeypatch, "kv_layout.cuh", "kRowStride = kRowBytes + 16;",
              "kRowStride = kRowBytes + 144;")
    with pytest.raises(BuildError, match="over the shared memory of an sm_120 block"):
        build.report("sm_120")


def run_module(*arguments, **environment):
    return subprocess.run([sys.executable, "-W", "error", "-m", "mla_kernels.build", *arguments],
                          capture_output=True, text=True, cwd=ROOT,
                          env={**os.environ, **environment})


@pytest.mark.slow
def test_command_line():
    done = run_module("--arch", "sm_120")
    assert done.returncode == 0 and done.stderr == ""
    title, header, *rows = done.stdout.splitlines()
    assert re.fullmatch(r"sm_120: nvcc \d+\.\d+ \(.*\), \d+ s; compiled and read, not run", title)
    assert header.split()[1:8] == ["registers", "spill", "B", "smem", "B", "HMMA", "LDSM"]
    assert len(rows) == 24
    for row in rows:
        name, numbers = row.split(">")
        registers, spills, smem, hmma = numbers.replace(",", "").split()[:4]
        assert int(registers) <= 255 and int(spills) == 0 and int(smem) <= 101_376
        assert (int(hmma) > 0) == name.startswith("tree_verify")


@pytest.mark.parametrize("arguments, environment, message", [
    (["--arch", "sm_1"], {}, "error: arch must look like sm_120 or sm_90a; got 'sm_1'"),
    (["--arch", "sm_70"], {}, "error: arch must be sm_80 or later (cp.async, bf16 mma.sync); "
                              "got sm_70"),
    ([], {"MLA_KERNELS_CUDA_HOME": "/nowhere"},
     "error: MLA_KERNELS_CUDA_HOME is '/nowhere', but /nowhere/bin/nvcc does not run: unset it "
     "to use the compiler from PyPI, or correct it"),
    (["--arch", "sm_120"], {"CXX": "no-such-compiler"},
     "error: no host compiler: 'no-such-compiler' is not on the path, and nvcc needs one. Install "
     "g++ (`apt install g++`, or `conda install gxx`), or set CXX"),
], ids=["form", "old", "toolkit", "host"])
def test_command_line_refuses(arguments, environment, message):
    done = run_module(*arguments, **environment)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == message + "\n"


# -- loading ------------------------------------------------------------------------------


@pytest.mark.slow
def test_cold_build_then_from_the_cache(cache):
    start = time.perf_counter()
    module = build.load("sm_120")
    assert time.perf_counter() - start < 60
    assert callable(module.tree_verify)
    params = module.VerifyParams()
    assert params.q_latent == 0 and params.num_heads == 0  # zeroed
    params.q_latent, params.kv_row_stride, params.logit_scale = 2**63 + 16, 2**40, 0.5
    assert (params.q_latent, params.kv_row_stride, params.logit_scale) == (2**63 + 16, 2**40, 0.5)
    with pytest.raises(AttributeError):
        params.no_such_field = 1
    assert build.load("sm_120") is module
    folders = [path for path in cache.iterdir() if path.is_dir()]
    assert len(folders) == 1 and folders[0].name.startswith("sm_120-")

    # Another process takes it as it is, without a compiler.
    code = """
import subprocess, sys, time
from mla_kernels import build
def never(*arguments):
    raise AssertionError("compiled again")
build._compile = never
real = subprocess.run
def only_asked(command, *arguments, **keywords):
    assert command[1] in ("--version", "--list-gpu-code"), command
    return real(command, *arguments, **keywords)
subprocess.run = only_asked
start = time.perf_counter()
module = build.load("sm_120")
print(time.perf_counter() - start, hasattr(module, "tree_verify"), module.__file__)
assert "torch.utils.cpp_extension" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True,
                          text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    seconds, loaded, file = done.stdout.split()
    assert float(seconds) < 5 and loaded == "True"
    assert Path(file) == folders[0] / f"{module.__name__}.so"


@pytest.mark.slow
def test_a_failed_compilation_leaves_nothing(cache, tmp_path, monkeypatch):
    copy_csrc(tmp_path, monkeypatch, "params.h", "#pragma once",
              "#pragma once\n#error this cannot be compiled")
    environment = dict(os.environ)
    for _ in range(2):
        with pytest.raises(BuildError) as caught:
            build.load("sm_120")
        assert "compiling for sm_120 with" in str(caught.value)
        assert "this cannot be compiled" in str(caught.value)
        assert [path.name for path in cache.iterdir()] == ["lock"]
        assert build._loaded == {} and dict(os.environ) == environment


class Compiled(Exception):
    """Stands for a compilation that was begun."""


def begin_compiling(*arguments):
    raise Compiled


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupted_build_leaves_nothing(cache, monkeypatch, error):
    from torch.utils import cpp_extension

    def interrupted(*, name, build_directory, **keywords):
        Path(build_directory, f"{name}.so").write_bytes(b"half of a library")
        raise error

    monkeypatch.setattr(cpp_extension, "load_inline", interrupted)
    with pytest.raises(error):
        build.load("sm_120")
    assert [path.name for path in cache.iterdir()] == ["lock"]
    # Nor is the lock still held.
    monkeypatch.setattr(build, "_compile", begin_compiling)
    with pytest.raises(Compiled):
        build.load("sm_120")


def test_what_a_killed_build_left_is_not_taken(cache, monkeypatch):
    key = build.build_key("sm_120", build.find_toolkit())
    for name in (f"sm_120-{key}.building-x1y2", f"sm_120-{key}"):
        (cache / name).mkdir(parents=True)
        (cache / name / "main.o").write_bytes(b"junk")
    (cache / f"sm_120-{key}.building-x1y2" / f"mla_tree_verify_{key}.so").write_bytes(b"junk")
    monkeypatch.setattr(build, "_compile", begin_compiling)
    with pytest.raises(Compiled):
        build.load("sm_120")


def test_the_key_names_everything(tmp_path, monkeypatch):
    toolkit = build.find_toolkit()
    key = build.build_key("sm_120", toolkit)
    assert re.fullmatch("[0-9a-f]{16}", key)
    assert build.build_key("sm_120", toolkit) == key
    others = [build.build_key("sm_120a", toolkit),
              build.build_key("sm_120", dataclasses.replace(toolkit, version=(99, 0)))]
    with monkeypatch.context() as patch:
        patch.setattr(build, "NVCC_FLAGS", (*build.NVCC_FLAGS, "-lineinfo"))
        others.append(build.build_key("sm_120", toolkit))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "0.0.1")
        others.append(build.build_key("sm_120", toolkit))
    folder = copy_csrc(tmp_path, monkeypatch)
    assert build.build_key("sm_120", toolkit) == key  # by content, not by place
    for path in sorted(folder.iterdir()):
        before = path.read_text()
        path.write_text(before + " ")
        others.append(build.build_key("sm_120", toolkit))
        path.write_text(before)
    (folder / "extra.cuh").write_text("")
    others.append(build.build_key("sm_120", toolkit))
    assert len({key, *others}) == len(others) + 1


def test_a_cache_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "cache"
    monkeypatch.setenv("MLA_KERNELS_CACHE", str(folder))
    monkeypatch.setattr(build, "_loaded", {})
    with pytest.raises(BuildError, match=f"cannot write the build cache {folder}: .*Set "
                                         "MLA_KERNELS_CACHE to a folder that can be written"):
        build.load("sm_120")


def test_a_full_disk(cache, monkeypatch):
    def full(**keywords):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(build.tempfile, "mkdtemp", full)
    with pytest.raises(BuildError, match="No space left on device.*Set MLA_KERNELS_CACHE"):
        build.load("sm_120")


def test_cache_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("MLA_KERNELS_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert build.cache_dir() == tmp_path / "own"
    monkeypatch.delenv("MLA_KERNELS_CACHE")
    assert build.cache_dir() == tmp_path / "xdg/mla_kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert build.cache_dir() == tmp_path / ".cache/mla_kernels"


def test_a_compiler_installed_later_is_found(cache, monkeypatch):
    """In the same process: a failure is not remembered."""
    monkeypatch.setattr(build, "_compile", begin_compiling)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match="no host compiler: 'no-such-compiler' is not on the path"
                                         ".*apt install g\\+\\+.*or set CXX"):
        build.load("sm_120")
    monkeypatch.delenv("CXX")
    with pytest.raises(Compiled):
        build.load("sm_120")


def test_no_host_compiler_for_a_report(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    which = build.shutil.which
    monkeypatch.setattr(build.shutil, "which",
                        lambda name, **k: None if name == "g++" else which(name, **k))
    with pytest.raises(BuildError, match="no host compiler: 'g\\+\\+' is not on the path"):
        build.report("sm_120")


def test_no_ninja(cache, monkeypatch):
    monkeypatch.setitem(sys.modules, "ninja", None)  # importing it raises ImportError
    which = build.shutil.which
    monkeypatch.setattr(build.shutil, "which",
                        lambda name, **k: None if name == "ninja" else which(name, **k))
    with pytest.raises(BuildError, match="no ninja, which torch builds extensions with: `pip "
                                         "install ninja`"):
        build.load("sm_120")
    assert [path.name for path in cache.iterdir()] == ["lock"]


def test_ninja_need_not_be_on_the_path(monkeypatch):
    """A Jupyter kernel started by its full path does not have .venv/bin on it."""
    pytest.importorskip("ninja")
    monkeypatch.setenv("PATH", "/usr/nothing")
    with build._build_environment(build.find_toolkit()):
        assert build.shutil.which("ninja") and build.shutil.which("nvcc")
        assert os.environ["CUDA_HOME"] == str(build.find_toolkit().home)
    assert os.environ["PATH"] == "/usr/nothing"


def test_bad_arch_for_loading(cache):
    with pytest.raises(ValueError, match="arch sm_999 is unknown to nvcc"):
        build.load("sm_999")
    assert not cache.exists()


def test_default_arch(monkeypatch):
    monkeypatch.setattr(build, "local_gpu", lambda: None)
    assert build.default_arch() == "sm_120"
    monkeypatch.setattr(build, "local_gpu", lambda: type("GPU", (), {"arch": "sm_90"}))
    assert build.default_arch() == "sm_90"


def test_no_libcudart(tmp_path):
    toolkit = Toolkit(tmp_path / "bin/nvcc", (13, 0), "PATH")
    with pytest.raises(BuildError, match="no libcudart.so in .*nvidia-cuda-runtime"):
        build._link_flags(toolkit, tmp_path)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libcudart.so.13").write_text("")
    folder = tmp_path / "build"
    folder.mkdir()
    assert build._link_flags(toolkit, folder) == [f"-L{folder}"]
    assert (folder / "libcudart.so").resolve() == tmp_path / "lib/libcudart.so.13"
    (tmp_path / "lib/libcudart.so").write_text("")
    assert build._link_flags(toolkit, folder) == [f"-L{tmp_path / 'lib'}"]
