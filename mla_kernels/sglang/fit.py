"""Does the installed SGLang have what we take hold of? Asked of its code, not of its version."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType

from .verify import NEUTRAL, POSITIONAL

#: Versions whose signatures were compared. Others are served if theirs fit, with a warning.
TRIED = ("0.5.12", "0.5.16", "0.5.23")

REGISTRY = "sglang.srt.layers.attention.attention_registry"
BACKEND = "sglang.srt.layers.attention.triton_backend"
MODES = "sglang.srt.model_executor.forward_batch_info"

#: The module of SGLang's verify kernel, newest first.
KERNELS = ("sglang.kernels.ops.attention.extend_attention",
           "sglang.srt.layers.attention.triton_ops.extend_attention")

#: Methods of the backend that we extend, with the parameters that we rely on. Of the two that
#: prepare a graph's replay, a version has one.
FORWARD = ("self", "q", "k", "v", "layer", "forward_batch")
METADATA = ("self", "forward_batch")
REPLAY = {"init_forward_metadata_out_graph": ("self", "forward_batch", "in_capture"),
          "init_forward_metadata_replay_cuda_graph": (
              "self", "bs", "req_pool_indices", "seq_lens", "seq_lens_sum", "encoder_lens",
              "forward_mode")}


@dataclasses.dataclass(frozen=True)
class Fit:
    """
    Args:
        version: of SGLang; empty where it is not installed.
        problems: what does not fit; nothing is touched unless this is empty.
    """

    version: str
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems

    @property
    def tried(self) -> bool:
        return self.version in TRIED

    def __str__(self) -> str:
        if not self.version:
            return "SGLang is not installed here"
        if self.problems:
            return "\n  ".join([f"SGLang {self.version} does not fit, and is left untouched:",
                                *self.problems])
        return f"SGLang {self.version} fits" + (
            "" if self.tried else f", though it is none of the versions tried ({', '.join(TRIED)})"
                                  ": run it in shadow mode first")


def examine() -> Fit:
    """Imports SGLang's attention modules and compares signatures."""
    if importlib.util.find_spec("sglang") is None:
        return Fit("", ("SGLang is not installed here",))
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:  # a source tree on the path
        version = "of unknown version"
    try:
        modules = [importlib.import_module(name) for name in (REGISTRY, BACKEND, MODES)]
        return Fit(version, tuple(_problems(*modules, _kernels())))
    except Exception as error:  # whatever another version's import may raise
        return Fit(version, (f"{type(error).__name__} while asking it: {error}",))


def _kernels() -> ModuleType:
    for name in KERNELS[:-1]:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    return importlib.import_module(KERNELS[-1])


def _problems(registry: ModuleType, triton: ModuleType, modes: ModuleType,
              kernels: ModuleType) -> Iterator[str]:
    if not callable(getattr(registry, "ATTENTION_BACKENDS", {}).get("triton")):
        yield f"{REGISTRY} has no ATTENTION_BACKENDS['triton']"
    if not hasattr(getattr(modes, "ForwardMode", None), "is_target_verify"):
        yield f"{MODES} has no ForwardMode.is_target_verify"
    yield from _differs(kernels, "extend_attention_fwd", POSITIONAL)
    known = {*POSITIONAL, *NEUTRAL, "logit_cap"}
    function = getattr(kernels, "extend_attention_fwd", None)
    if function is not None:
        extra = [p.name for p in inspect.signature(function).parameters.values()
                 if p.name not in known and p.default is p.empty]
        if extra:
            yield f"extend_attention_fwd also needs {', '.join(extra)}"
    backend = getattr(triton, "TritonAttnBackend", None)
    if backend is None:
        yield f"{BACKEND} has no TritonAttnBackend"
        return
    yield from _differs(backend, "forward_extend", FORWARD)
    yield from _differs(backend, "init_forward_metadata", METADATA)
    if not any(name in vars(backend) for name in REPLAY):
        yield f"TritonAttnBackend has none of {', '.join(REPLAY)}"
    for name in REPLAY:
        if name in vars(backend):
            yield from _differs(backend, name, REPLAY[name])
    # From 0.5.20 or so on by way of another method.
    names = [getattr(vars(backend).get(method), "__code__", None) for method in (
        "forward_extend", "_forward_extend_kernel")]
    called = [set(code.co_names) if code else set() for code in names]
    if "extend_attention_fwd" not in called[0] | (
            called[1] if "_forward_extend_kernel" in called[0] else set()):
        yield "TritonAttnBackend.forward_extend does not call self.extend_attention_fwd"


def _differs(owner: object, name: str, wanted: tuple[str, ...]) -> Iterator[str]:
    function: Callable | None = vars(owner).get(name)  # a base class's would be another method
    where = f"{getattr(owner, '__name__', owner)}.{name}"
    if not callable(function):
        yield f"{where} is not there"
        return
    has = tuple(inspect.signature(function).parameters)
    if has[:len(wanted)] != wanted:
        yield f"{where} must begin ({', '.join(wanted)}); it has ({', '.join(has)})"
