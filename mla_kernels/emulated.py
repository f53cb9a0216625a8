"""The kernels on the CPU: the source of ``csrc/``, compiled by the host's compiler.

``csrc/emulated/`` holds what the kernels use of a GPU: one fiber a thread, warps that meet for
``ldmatrix`` and ``mma``, barriers, copies that land only when they are waited for. A block's
reads of shared memory that nobody wrote, or whose copy is still in flight, accesses outside
shared memory or outside the call's tensors, misaligned ones, and threads that wait for what
will not come raise :class:`Fault` with the line of the source.

Modelled: results, the order that barriers impose, and the faults above. Not modelled: time,
memory ordering between blocks, races that no order of execution here brings out (a barrier too
few is seen only where it makes a thread read what is not there yet), accesses through plain
pointers of the source, and rounding inside the tensor cores: products are exact, and sums are
rounded to fp32 one by one.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import torch

from . import build, cuda
from .batch import VerifyBatch
from .cuda import LaunchPlan, plan
from .layout import KVLayout

#: The host's side of the kernels' primitives.
HOST = Path(__file__).parent / "csrc/emulated"

#: Multiprocessors that a launch is planned for: few, so that small batches share them.
SMS = 4

#: The kernels take the paths that they take on sm_120.
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-fno-gnu-unique", "-Wno-unknown-pragmas", "-I.",
         "-D__CUDA_ARCH__=1200")


class Fault(RuntimeError):
    """A kernel did something that a GPU would not have answered well; the message says what,
    and at which line."""


def sources() -> dict[str, str]:
    """The kernels' files with the host's in their place where both have one. Shared memory of
    a size given at launch is declared in a way of CUDA's own, which is rewritten."""
    texts = build.sources()
    texts |= {path.name: path.read_text() for path in sorted(HOST.iterdir())}
    for name, text in texts.items():
        texts[name] = re.sub(
            r"extern __shared__ (?:__align__\(\d+\) )?([\w ]+?) (\w+)\[\];",
            r"#define \2 (static_cast<\1*>(emulated::dynamic_shared()))", text)
    return texts


#: Compiled as files of their own; the rest are headers, or Python's way in.
SOURCES = ("verify.cu", "runtime.cpp", "counts.cpp")

_loaded: dict[str, ModuleType] = {}


def load(*, verbose: bool = False) -> ModuleType:
    """The kernels of ``build.CSRC`` as a Python module, from the cache or freshly compiled.

    ``MLA_KERNELS_SANITIZE=address,undefined`` in the environment compiles them with these
    sanitizers of the host's compiler; start Python with :func:`sanitizer_environment` then.

    Raises:
        build.BuildError: no compiler, or compilation failed.
    """
    compiler = build._host_compiler()
    sanitize = os.environ.get("MLA_KERNELS_SANITIZE", "")
    flags = (*FLAGS, *((f"-fsanitize={sanitize}", "-fno-sanitize-recover=all", "-g", "-O1")
                       if sanitize else ()))
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    texts = sources()
    parts = ["emulated", torch.__version__, sys.version, version, *flags,
             *(part for item in texts.items() for part in item)]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    if key in _loaded:
        return _loaded[key]
    name = f"mla_emulated_{key}"
    final = build.cache_dir() / f"emulated-{key}"
    try:
        build.cache_dir().mkdir(parents=True, exist_ok=True)
        with open(build.cache_dir() / "lock-emulated", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (final / f"{name}.so").exists():
                _compile(name, compiler, flags, texts, final, verbose)
    except OSError as error:
        raise build.BuildError(f"cannot write the build cache {build.cache_dir()}: {error}. Set "
                               "MLA_KERNELS_CACHE to a folder that can be written") from error
    spec = importlib.util.spec_from_file_location(name, final / f"{name}.so")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.library = ctypes.CDLL(str(final / f"{name}.so"))
    module.library.emulated_buffer.argtypes = [ctypes.c_char_p, ctypes.c_uint64, ctypes.c_uint64]
    _loaded[key] = module
    return module


def sanitizer_environment() -> dict[str, str] | None:
    """What a Python needs in its environment to load a build with AddressSanitizer and
    UndefinedBehaviorSanitizer: their libraries before all others, no search for leaks (Python's
    own), and :func:`load`'s flag. None where the compiler has no such library."""
    found = [subprocess.run([build._host_compiler(), f"-print-file-name={name}"],
                            capture_output=True, text=True).stdout.strip()
             for name in ("libasan.so", "libstdc++.so")]
    if not all(map(os.path.isabs, found)):
        return None
    return {"LD_PRELOAD": " ".join(found), "ASAN_OPTIONS": "detect_leaks=0",
            "MLA_KERNELS_SANITIZE": "address,undefined"}


def _compile(name: str, compiler: str, flags: Sequence[str], texts: dict[str, str], final: Path,
             verbose: bool) -> None:
    from torch.utils import cpp_extension

    folder = Path(tempfile.mkdtemp(prefix=f"{final.name}.building-", dir=final.parent))
    try:
        for file, text in texts.items():
            (folder / file).write_text(text)

        def object_of(source: str) -> None:
            build._run(["env", "-C", folder, compiler, *flags, "-x", "c++", "-c", source, "-o",
                        f"{source}.o"], compiler)

        with ThreadPoolExecutor() as pool:
            list(pool.map(object_of, SOURCES))
        with _ninja_on_path():
            cpp_extension.load_inline(
                name=name, cpp_sources=texts["bindings.cpp"], no_implicit_headers=True,
                extra_cflags=["-std=c++17", "-O2"], extra_include_paths=[str(folder)],
                extra_ldflags=[*(str(folder / f"{source}.o") for source in SOURCES),
                               *(f for f in flags if f.startswith("-fsanitize"))],
                build_directory=str(folder), verbose=verbose)
        shutil.rmtree(final, ignore_errors=True)
        os.rename(folder, final)
    except RuntimeError as error:
        raise build.BuildError(f"compiling for the CPU failed:\n{error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _ninja_on_path:
    def __enter__(self) -> None:
        self.before = os.environ.get("PATH", "")
        try:
            import ninja
        except ImportError:
            return
        os.environ["PATH"] = os.pathsep.join([ninja.BIN_DIR, self.before])

    def __exit__(self, *exception: object) -> None:
        os.environ["PATH"] = self.before


@dataclasses.dataclass
class Counts:
    """What :func:`counting` counted, once it is over: lines as in ``csrc/emulated/counts.h``."""

    text: str = ""


@contextlib.contextmanager
def counting() -> Iterator[Counts]:
    """Counts what the calls inside move. They take about twice as long."""
    library, counts = load().library, Counts()
    library.emulated_counts.restype = ctypes.c_char_p
    library.emulated_count(1)
    try:
        yield counts
        counts.text = library.emulated_counts().decode()
    finally:
        library.emulated_count(0)


def plan_for(batch: VerifyBatch, num_heads: int, **overrides) -> LaunchPlan:
    """:func:`mla_kernels.cuda.plan` for :data:`SMS` multiprocessors."""
    overrides = cuda.overrides() | overrides
    return plan(num_heads, batch.batch_size, batch.max_q_len, batch.max_kv_len, SMS, **overrides)


def why_not(q_latent: torch.Tensor, q_rope: torch.Tensor) -> str | None:
    """What keeps this backend from taking these queries, or None."""
    if q_latent.device.type != "cpu":
        return f"it runs on the CPU, and the tensors are on {q_latent.device}"
    return cuda.not_compiled_for(q_latent, q_rope)


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element past its last."""
    if not tensor.numel():
        return 0
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def verify_attention_emulated(
    q_latent: torch.Tensor, q_rope: torch.Tensor, rows: torch.Tensor,
    draft_kv: torch.Tensor | None, batch: VerifyBatch, *, layout: KVLayout, sm_scale: float,
    k_scale: float, v_scale: float, logit_cap: float, out: torch.Tensor, lse: torch.Tensor,
    workspace: torch.Tensor | None = None, batch_invariant: bool = False,
    launch: LaunchPlan | None = None,
) -> None:
    """As :func:`mla_kernels.cuda.verify_attention_cuda`, on CPU tensors.

    Raises:
        Fault: the kernel did something wrong.
    """
    if launch is None:
        launch = plan_for(batch, q_latent.shape[1], batch_invariant=batch_invariant)
    if workspace is None:
        workspace = torch.empty(launch.workspace_bytes, dtype=torch.uint8)
    workspace.fill_(0xFF)  # NaN: nothing may be read from it that was not written before
    module = load()
    p = module.VerifyParams()
    tensors = cuda.named_tensors(q_latent, q_rope, rows, draft_kv, batch, out, lse, workspace)
    register = module.library.emulated_buffer
    register(None, 0, 0)
    for name, tensor in tensors.items():
        if tensor is not None:
            register(name.encode(), tensor.data_ptr(), _extent(tensor))
    cuda.fill(p, tensors, batch, launch, layout=layout, sm_scale=sm_scale, k_scale=k_scale,
              v_scale=v_scale, logit_cap=logit_cap)
    try:
        module.tree_verify(p, rows=launch.rows, half=q_latent.dtype == torch.float16,
                           dependent=True, combine_split=launch.combine_split, stream=0)
    except RuntimeError as error:
        raise Fault(str(error)) from None
