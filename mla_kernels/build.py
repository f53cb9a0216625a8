"""Compiling the kernels: a CUDA toolkit found or brought, `load_inline`, a report of resources.

Two ways through the compiler:

* :func:`load` compiles ``csrc/`` inline with ``torch.utils.cpp_extension.load_inline`` and
  returns the Python module; the result is kept in a cache.
* :func:`report` compiles the same source to machine code for any architecture, on any
  machine, and reads what came out: registers, spills, shared memory, instructions. It needs
  no GPU.

``python -m mla_kernels.build --arch sm_120`` prints the report.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import importlib.util
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType

import torch

from .device import MAX_REGISTERS, SM120_SMEM_PER_BLOCK, local_gpu

CSRC = Path(__file__).parent / "csrc"

#: The oldest architecture the source compiles for: cp.async and bf16 mma.sync begin there.
MIN_ARCH = 80

#: What ``nvcc`` is always told. -O3 is nvcc's default for device code.
NVCC_FLAGS = ("-std=c++17", "-O3", "--expt-relaxed-constexpr")


class BuildError(RuntimeError):
    """The compiler, or something it needs, failed; the message says which and what to do."""


# -- toolkit ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Toolkit:
    """A CUDA compiler.

    Args:
        nvcc: path of the compiler.
        version: ``(major, minor)``.
        origin: ``"PyPI"``, ``"CUDA_HOME"``, ``"PATH"`` or ``"MLA_KERNELS_CUDA_HOME"``.
    """

    nvcc: Path
    version: tuple[int, int]
    origin: str

    @property
    def home(self) -> Path:
        return self.nvcc.parent.parent

    @functools.cached_property
    def architectures(self) -> tuple[str, ...]:
        """Targets this compiler knows, as ``sm_..``; letters such as the a of sm_120a are
        variants of these."""
        listed = subprocess.run([self.nvcc, "--list-gpu-code"], capture_output=True, text=True,
                                check=True).stdout
        return tuple(sorted(re.findall(r"sm_\d+", listed), key=lambda a: int(a[3:])))


def _toolkit_at(nvcc: Path, origin: str) -> Toolkit | None:
    try:
        text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=60,
                              check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"release (\d+)\.(\d+)", text)
    return Toolkit(nvcc, (int(found[1]), int(found[2])), origin) if found else None


def _candidates() -> Iterator[tuple[Path, str]]:
    # The packages cuda-toolkit[nvcc,cccl] unpack to nvidia/cu<major>/ beside torch's own.
    roots = dict.fromkeys(
        [sysconfig.get_paths()["purelib"], str(Path(torch.__file__).parent.parent), *sys.path])
    for root in roots:
        for nvcc in sorted(Path(root).glob("nvidia/cu[0-9]*/bin/nvcc"), reverse=True):
            yield nvcc, "PyPI"
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            yield Path(os.environ[variable]) / "bin/nvcc", "CUDA_HOME"
    on_path = shutil.which("nvcc")
    if on_path:
        # Resolved: a link in a folder of links has no include/ beside it.
        yield Path(on_path).resolve(), "PATH"
    yield Path("/usr/local/cuda/bin/nvcc"), "PATH"


def find_toolkit() -> Toolkit:
    """The CUDA compiler to use.

    ``MLA_KERNELS_CUDA_HOME`` decides when set. Otherwise the first of these whose major
    version is that of the installed torch: the compiler from PyPI (a dependency of this
    project), ``CUDA_HOME`` or ``CUDA_PATH``, ``nvcc`` on the path, ``/usr/local/cuda``.

    Raises:
        BuildError: none fits; the message lists what was found and how to get one.
    """
    chosen = os.environ.get("MLA_KERNELS_CUDA_HOME")
    if chosen:
        toolkit = _toolkit_at(Path(chosen) / "bin/nvcc", "MLA_KERNELS_CUDA_HOME")
        if toolkit is None:
            raise BuildError(f"MLA_KERNELS_CUDA_HOME is {chosen!r}, but {chosen}/bin/nvcc does not "
                             "run: unset it to use the compiler from PyPI, or correct it")
        return toolkit
    wanted = torch.version.cuda
    major = int(wanted.split(".")[0]) if wanted else None
    seen = []
    for path, origin in _candidates():
        toolkit = _toolkit_at(path, origin) if path.exists() else None
        if toolkit is None:
            continue
        if major is None or toolkit.version[0] == major:
            return toolkit
        seen.append("{} {}.{} ({})".format(path, *toolkit.version, origin))
    need = f"CUDA {major}.x, as torch {torch.__version__} was built for" if major else "CUDA"
    raise BuildError(
        f"no nvcc for {need}. Found: {', '.join(seen) or 'none'}. Install one with "
        f"`pip install 'cuda-toolkit[nvcc,cccl]{f'=={wanted}.*' if wanted else ''}'`, or set "
        "MLA_KERNELS_CUDA_HOME to a toolkit"
    )


def check_arch(arch: str, toolkit: Toolkit) -> str:
    """``arch`` itself if ``toolkit`` can compile for it.

    Args:
        arch: ``sm_120``, ``sm_120a``, ``sm_90``, ``sm_80`` or the like.

    Raises:
        ValueError: not of that form, older than sm_80, or unknown to this compiler.
    """
    match = re.fullmatch(r"sm_(\d{2,3})([af]?)", arch) if isinstance(arch, str) else None
    if not match:
        raise ValueError(f"arch must look like sm_120 or sm_90a; got {arch!r}")
    if int(match[1]) < MIN_ARCH:
        raise ValueError(f"arch must be sm_{MIN_ARCH} or later (cp.async, bf16 mma.sync); got "
                         f"{arch}")
    if match[2] and int(match[1]) < (90 if match[2] == "a" else 100):
        raise ValueError(f"arch {arch} does not exist: variants begin with sm_90a and sm_100f; "
                         f"use sm_{match[1]}")
    if f"sm_{match[1]}" not in toolkit.architectures:
        raise ValueError(
            f"arch {arch} is unknown to nvcc {toolkit.version[0]}.{toolkit.version[1]} "
            f"({toolkit.origin}), which knows {', '.join(toolkit.architectures)}"
        )
    return arch


def default_arch() -> str:
    """The local GPU's architecture, or sm_120 where there is none."""
    gpu = local_gpu()
    return gpu.arch if gpu else "sm_120"


def _gencode(arch: str) -> str:
    return f"-gencode=arch=compute_{arch[3:]},code={arch}"


# -- loading ------------------------------------------------------------------------------


def sources() -> dict[str, str]:
    """Every file of ``csrc/``, by name."""
    return {path.name: path.read_text() for path in sorted(CSRC.iterdir()) if path.is_file()}


def cache_dir() -> Path:
    """Where builds are kept: ``MLA_KERNELS_CACHE``, or ``mla_kernels`` in the user's cache."""
    own = os.environ.get("MLA_KERNELS_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(own) if own else Path(base) / "mla_kernels"


def _host_compiler() -> str:
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise BuildError(f"no host compiler: {compiler!r} is not on the path, and nvcc needs one. "
                         "Install g++ (`apt install g++`, or `conda install gxx`), or set CXX")
    return compiler


@contextlib.contextmanager
def _build_environment(toolkit: Toolkit) -> Iterator[ModuleType]:
    """torch's extension builder, told where the compiler and ninja are."""
    # Importing it without a GPU logs a warning about the CUDA_HOME it guessed, and the guess
    # is wrong for an nvcc from PyPI; so: quiet, and set explicitly.
    logger = logging.getLogger("torch.utils.cpp_extension")
    level = logger.level
    logger.setLevel(logging.ERROR)
    from torch.utils import cpp_extension

    bins = [str(toolkit.nvcc.parent)]
    # A kernel started from .venv/bin/jupyter does not have .venv/bin on its path.
    with contextlib.suppress(ImportError):
        import ninja

        bins.append(ninja.BIN_DIR)
    if shutil.which("ninja", path=os.pathsep.join([*bins, os.environ.get("PATH", "")])) is None:
        raise BuildError("no ninja, which torch builds extensions with: `pip install ninja`")
    before = {name: os.environ.get(name) for name in ("PATH", "CUDA_HOME")}
    home = cpp_extension.CUDA_HOME
    os.environ["PATH"] = os.pathsep.join([*bins, os.environ.get("PATH", "")])
    os.environ["CUDA_HOME"] = cpp_extension.CUDA_HOME = str(toolkit.home)
    try:
        yield cpp_extension
    finally:
        cpp_extension.CUDA_HOME = home
        logger.setLevel(level)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _link_flags(toolkit: Toolkit, folder: Path) -> list[str]:
    """What the linker needs to find ``-lcudart``: PyPI's CUDA has libcudart.so.13 alone, and
    a linker looks for libcudart.so."""
    for lib in (toolkit.home / "lib64", toolkit.home / "lib"):
        if (lib / "libcudart.so").exists():
            return [f"-L{lib}"]
    for lib in sorted(toolkit.home.glob("lib*/libcudart.so.*")):
        (folder / "libcudart.so").symlink_to(lib)
        return [f"-L{folder}"]
    raise BuildError(f"no libcudart.so in {toolkit.home}/lib or lib64; the package "
                     "nvidia-cuda-runtime brings it")


def build_key(arch: str, toolkit: Toolkit) -> str:
    """Names a build: equal keys mean equal binaries."""
    compiler = _host_compiler()
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    parts = [arch, str(toolkit.nvcc), repr(toolkit.version), torch.__version__, sys.version,
             version, *NVCC_FLAGS]
    for name, text in sources().items():
        parts += [name, text]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


_loaded: dict[str, ModuleType] = {}


@contextlib.contextmanager
def variant(constants: Mapping[str, str]) -> Iterator[None]:
    """While it lasts, everything here compiles and loads the sources with other values of some
    constants. Not for several threads at once.

    Args:
        constants: names of ``constexpr`` numbers in ``csrc/`` and expressions to put in their
            place; or any other text that occurs once, and its replacement.

    Raises:
        ValueError: a constant that is not defined exactly once.
    """
    global CSRC
    with tempfile.TemporaryDirectory(prefix="mla-variant-") as scratch:
        folder = shutil.copytree(CSRC, Path(scratch) / "csrc")
        for name, value in constants.items():
            pattern = (rf"(?<=constexpr )(\w+ {name} = )[^;,]+" if name.isidentifier() else
                       f"()({re.escape(name)})")
            texts = {p: p.read_text() for p in folder.glob("*.cuh")}
            places = [p for p, text in texts.items() for _ in re.finditer(pattern, text)]
            if len(places) != 1:
                raise ValueError(f"constant {name} must be defined once in csrc; it is "
                                 f"{len(places)} times")
            places[0].write_text(re.sub(pattern, lambda m, v=value: m[1] + v, texts[places[0]]))
        before, loaded = CSRC, dict(_loaded)
        CSRC = folder
        _loaded.clear()
        try:
            yield
        finally:
            CSRC = before
            _loaded.clear()
            _loaded.update(loaded)


def load(arch: str | None = None, *, verbose: bool = False) -> ModuleType:
    """The compiled kernels as a Python module, from the cache or freshly compiled inline.

    Args:
        arch: target; default :func:`default_arch`. Compiling for an architecture that is not
            the local GPU's works anywhere; launching does not.
        verbose: print the compiler's commands.

    Raises:
        ValueError: an architecture that the compiler does not know.
        BuildError: no compiler, or compilation failed; its output is in the message. Nothing
            half-built is left where a later call would find it: a build happens in a folder of
            its own, which takes its final name when complete.
    """
    arch = arch or default_arch()
    if arch in _loaded:
        return _loaded[arch]
    toolkit = find_toolkit()
    check_arch(arch, toolkit)
    key = build_key(arch, toolkit)
    name = f"mla_tree_verify_{key}"
    final = cache_dir() / f"{arch}-{key}"
    if not (final / f"{name}.so").exists():
        try:
            cache_dir().mkdir(parents=True, exist_ok=True)
            with open(cache_dir() / "lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not (final / f"{name}.so").exists():
                    _compile(name, arch, toolkit, final, verbose)
        except OSError as error:
            raise BuildError(f"cannot write the build cache {cache_dir()}: {error}. Set "
                             "MLA_KERNELS_CACHE to a folder that can be written") from error
    spec = importlib.util.spec_from_file_location(name, final / f"{name}.so")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    _loaded[arch] = module
    return module


def _compile(name: str, arch: str, toolkit: Toolkit, final: Path, verbose: bool) -> None:
    _host_compiler()
    folder = Path(tempfile.mkdtemp(prefix=f"{final.name}.building-", dir=final.parent))
    try:
        with _build_environment(toolkit) as cpp_extension:
            code = sources()
            cpp_extension.load_inline(
                name=name,
                cpp_sources=code["bindings.cpp"],
                cuda_sources=code["verify.cu"],
                # torch's headers would take the CUDA file from seconds to minutes.
                no_implicit_headers=True,
                # The word `arch` in here also keeps torch from adding targets of its own.
                extra_cuda_cflags=[*NVCC_FLAGS, _gencode(arch)],
                extra_cflags=["-std=c++17", "-O2"],
                extra_include_paths=[str(CSRC)],
                extra_ldflags=_link_flags(toolkit, folder),
                build_directory=str(folder),
                verbose=verbose,
            )
        shutil.rmtree(final, ignore_errors=True)
        os.rename(folder, final)
    except (RuntimeError, subprocess.CalledProcessError) as error:
        raise BuildError(f"compiling for {arch} with {toolkit.nvcc} failed:\n{error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# -- reporting ----------------------------------------------------------------------------

#: Instructions counted in a report, and what they are.
SASS_GROUPS = {
    "HMMA": "tensor-core multiplies",
    "LDSM": "ldmatrix",
    "UBLKCP": "bulk copies",
    "LDGSTS": "cp.async",
    "BAR": "block barriers",
    "MUFU": "exponentials and the like",
    "STS": "shared stores",
    "LDS": "shared loads",
    "LDL": "local loads (spills)",
    "STL": "local stores (spills)",
}


@dataclasses.dataclass(frozen=True)
class KernelReport:
    """What the compiler made of one kernel. Bytes are for each thread (spills) or block
    (shared memory); ``sass`` counts instructions in the program text, not as executed."""

    kernel: str
    dtype: str
    rows: int
    split: int | None
    arch: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    smem_bytes: int
    sass: dict[str, int]

    @property
    def problems(self) -> list[str]:
        """Which of the limits this kernel breaks; empty for a good one."""
        found = []
        if self.spill_bytes or self.sass.get("LDL", 0) or self.sass.get("STL", 0):
            found.append(f"{self.spill_bytes} bytes of spills")
        if self.smem_bytes > SM120_SMEM_PER_BLOCK:
            found.append(f"{self.smem_bytes:,} B of shared memory, over {SM120_SMEM_PER_BLOCK:,}")
        if self.registers > MAX_REGISTERS:
            found.append(f"{self.registers} registers")
        return found

    @property
    def name(self) -> str:
        split = f", {self.split} warps a fragment" if self.split else ""
        return f"{self.kernel}<{self.dtype}, {self.rows} rows{split}>"


def _identify(mangled: str) -> tuple[str, str, int, int | None] | None:
    found = re.search(r"(tree_verify|combine)I.*?VerifyConfigI(13__nv_bfloat16|6__half)Li(\d+)EEE"
                      r"(?:Li(\d+)E)?", mangled)
    if not found:
        return None
    dtype = "bf16" if "bfloat" in found[2] else "fp16"
    return found[1], dtype, int(found[3]), int(found[4]) if found[4] else None


def _disassembler() -> str | None:
    with contextlib.suppress(ImportError):
        import triton

        carried = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        if carried.exists():
            return str(carried)
    return shutil.which("cuobjdump")


def _run(command: Sequence[object], what: str) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{what} failed ({' '.join(map(str, command))}):\n"
                         f"{(done.stdout + done.stderr)[:8000]}")
    return done.stdout + done.stderr


def _dynamic_smem(toolkit: Toolkit, arch: str, folder: Path) -> dict[str, int]:
    """Shared memory that a launch asks for, by kernel and rows of a tile or warps a fragment:
    the source's own constants, read back from the compiler rather than repeated here."""
    probe = folder / "smem.cu"
    probe.write_text('#include "tree_verify.cuh"\nusing namespace mla;\n' + "".join(
        f"__device__ int smem_tree_verify_{m} = VerifyConfig<__half, {m}>::kSmemBytes;\n"
        for m in TILE_ROWS) + "".join(
        f"__device__ int smem_combine_{n} = Combine<VerifyConfig<__half, 16>, {n}>::kSmemBytes;\n"
        for n in COMBINE_SPLITS))
    out = folder / "smem.ptx"
    _run([toolkit.nvcc, *NVCC_FLAGS, "-I", CSRC, f"-arch=compute_{arch[3:]}", "-ptx", probe,
          "-o", out], "nvcc")
    text = out.read_text()        # zero is what PTX leaves out
    return {name: int(re.search(rf"smem_{name} = (\d+)", text)[1])
            if f"smem_{name} = " in text else 0
            for name in re.findall(r"smem_(\w+)", text)}


#: Query rows of the kernel's tile shapes; launch.cuh instantiates them.
TILE_ROWS = (16, 32, 64)

#: Warps that may share out a fragment's partial results in a combine; likewise.
COMBINE_SPLITS = (1, 4, 8)


def report(arch: str = "sm_120") -> list[KernelReport]:
    """Compiles every kernel for ``arch`` and reads its resources. Needs no GPU.

    Returns:
        One report a kernel. Without a disassembler (Triton brings one) ``sass`` is empty.

    Raises:
        ValueError, BuildError: as :func:`load`.
    """
    toolkit = find_toolkit()
    check_arch(arch, toolkit)
    _host_compiler()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cubin = folder / "verify.cubin"
        log = _run([toolkit.nvcc, *NVCC_FLAGS, "-I", CSRC, f"-arch={arch}", "-Xptxas", "-v",
                    "-cubin", CSRC / "verify.cu", "-o", cubin], "nvcc")
        smem = _dynamic_smem(toolkit, arch, folder)
        tool = _disassembler()
        sass = _count_sass(_run([tool, "-sass", cubin], "cuobjdump")) if tool else {}
    reports = []
    for block in log.split("Compiling entry function")[1:]:
        mangled = block.split("'")[1]
        known = _identify(mangled)
        if known is None:
            raise BuildError(f"a kernel with an unknown name came out of the compiler: {mangled}")
        kernel, dtype, rows, split = known

        def number(pattern: str, text: str = block) -> int:
            found = re.search(pattern, text)
            return int(found[1]) if found else 0

        dynamic = smem[f"{kernel}_{rows if kernel == 'tree_verify' else split}"]
        reports.append(KernelReport(
            kernel=kernel, dtype=dtype, rows=rows, split=split, arch=arch,
            registers=number(r"Used (\d+) registers"),
            spill_bytes=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
            stack_bytes=number(r"(\d+) bytes stack frame"),
            smem_bytes=number(r"(\d+) bytes smem") + dynamic,
            sass=sass.get(mangled, {}),
        ))
    reports.sort(key=lambda r: (r.kernel != "tree_verify", r.dtype, r.rows, r.split or 0))
    return reports


def _count_sass(text: str) -> dict[str, dict[str, int]]:
    counts: dict[str, dict[str, int]] = {}
    current: dict[str, int] = {}
    for line in text.splitlines():
        if "Function :" in line:
            current = counts.setdefault(line.split(":")[1].strip(),
                                        dict.fromkeys(SASS_GROUPS, 0) | {"total": 0})
            continue
        found = re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9]+)", line)
        if found:
            current["total"] += 1
            if found[1] in SASS_GROUPS:
                current[found[1]] += 1
    return counts


def format_report(reports: Sequence[KernelReport]) -> str:
    """The reports as a text table."""
    columns = ("registers", "spill B", "smem B", "HMMA", "LDSM", "UBLKCP", "BAR", "total")
    width = max(len(r.name) for r in reports)
    lines = [f"{'kernel':{width}}" + "".join(f"{c:>10}" for c in columns)]
    for r in reports:
        values = [r.registers, r.spill_bytes, f"{r.smem_bytes:,}"]
        values += [r.sass.get(c, "-") for c in columns[3:]]
        lines.append(f"{r.name:{width}}" + "".join(f"{v:>10}" for v in values))
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m mla_kernels.build",
        description="Compile the kernels for an architecture and report their resources; needs "
                    "no GPU.")
    parser.add_argument("--arch", action="append",
                        help="target, repeatable; default: the local GPU's, or sm_120")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.add_argument("--load", action="store_true",
                        help="also build and import the extension with load_inline")
    args = parser.parse_args(argv)
    bad = False
    for arch in args.arch or [default_arch()]:
        try:
            start = time.perf_counter()
            reports = report(arch)
            seconds = time.perf_counter() - start
            toolkit = find_toolkit()
        except (BuildError, ValueError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        if args.json:
            print(json.dumps([dataclasses.asdict(r) for r in reports], indent=1))
        else:
            print("{}: nvcc {}.{} ({}), {:.0f} s; compiled and read, not run".format(
                arch, *toolkit.version, toolkit.origin, seconds))
            print(format_report(reports))
        for r in reports:
            for problem in r.problems:
                print(f"{arch} {r.name}: {problem}", file=sys.stderr)
                bad = True
        if args.load:
            start = time.perf_counter()
            load(arch)
            print(f"{arch}: extension loaded in {time.perf_counter() - start:.1f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
