"""SGLang's ``MLATokenToKVPool``, asked in all three of its row formats, and the record of it."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.metadata
import importlib.util
import inspect
import json
import platform
import textwrap
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from ..layout import KVLayout, Order
from . import numeric, source, tree
from .live import SCALED_BYTES, order_of_buffer, order_of_scaled_buffer, order_of_value
from .verdict import OrderUnknown, Testimony, Verdict, WitnessesDisagree, judge

#: What asking SGLang gave, when and on what.
SGLANG_RECORD = Path(__file__).parents[2] / "data" / "evidence" / "sglang_mla_pool.json"

_WIDTHS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
#: The pool's arguments for each row format.
FORMATS: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": torch.bfloat16},
    "fp8": {"dtype": torch.float8_e4m3fn},
    "scaled": {"dtype": torch.float8_e4m3fn, "use_dsa": True,
               "override_kv_cache_dim": SCALED_BYTES},
}


def make_pool(row_format: str = "bf16", *, device: torch.device | str = "cpu",
              pool_class: type | None = None) -> Any:
    """A real pool of the installed SGLang: one layer, a few slots.

    Args:
        row_format: ``"bf16"``, ``"fp8"`` (576 e4m3, stored as uint8) or ``"scaled"`` (656 bytes).
        pool_class: a subclass to make instead.

    Raises:
        ImportError: SGLang is not installed, or its import fails here.
    """
    if row_format not in FORMATS:
        raise ValueError(f"row_format must be one of {', '.join(FORMATS)}; got {row_format!r}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SGLang's import warns about absent GPUs
        from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
    return (pool_class or MLATokenToKVPool)(
        size=8, page_size=1, layer_num=1, device=torch.device(device).type,
        enable_memory_saver=False, **_WIDTHS, **FORMATS[row_format])


def ask_pool(pool: Any, *, slot: int | None = None) -> Testimony:
    """The live witness of a pool with SGLang's methods, in a script or in a running server.

    Args:
        pool: has ``kv_buffer``, ``set_mla_kv_buffer``, ``get_value_buffer``, ``dtype``,
            ``kv_lora_rank`` and ``qk_rope_head_dim``. Its first layer is asked.
        slot: a scratch slot, restored afterwards. By default 0, the one that padded tokens
            write to; where the pool drops those writes, 1.

    Raises:
        WitnessesDisagree: writer and reader have different orders.
        OrderUnknown: they fit neither.
        TypeError, ValueError: no such pool, or rows of another width than it states.
    """
    lacks = [n for n in ("kv_buffer", "set_mla_kv_buffer", "get_value_buffer", "dtype",
                         *_WIDTHS) if not hasattr(pool, n)]
    if lacks:
        raise TypeError(f"pool must be an MLA pool with SGLang's methods; {type(pool).__name__} "
                        f"lacks {', '.join(lacks)}. For another engine, give its writer and "
                        "buffer to order_of_buffer")
    widths = {name: getattr(pool, name) for name in _WIDTHS}
    buffer, layer_id = pool.kv_buffer[0], getattr(pool, "start_layer", 0) or 0
    scaled = buffer.dtype == torch.uint8 and buffer.shape[-1] == SCALED_BYTES

    class Layer:
        pass

    Layer.layer_id = layer_id

    def write(at: int, latent: torch.Tensor, rope: torch.Tensor) -> None:
        pool.set_mla_kv_buffer(Layer, torch.tensor([at], device=buffer.device), latent[:, None],
                               rope[:, None])

    def read(at: int) -> torch.Tensor:
        return pool.get_value_buffer(layer_id).flatten(0, -2)[at]

    def ask(at: int) -> tuple[Order, Order | None]:
        if scaled:
            return order_of_scaled_buffer(write, buffer, slot=at), None
        rows = buffer.view(pool.dtype) if buffer.dtype == torch.uint8 else buffer
        return (order_of_buffer(write, rows, slot=at, **widths),
                order_of_value(read, rows, slot=at, **widths))

    with _parallel_state(), _kernels_on(buffer.device):
        try:
            writer, reader = ask(0 if slot is None else slot)
        except OrderUnknown as error:
            if slot is not None or "left the slot as it was" not in str(error):
                raise
            writer, reader = ask(1)
    what = (f"{type(pool).__name__}, {list(buffer.shape)} "
            f"{str(buffer.dtype).removeprefix('torch.')}, on {buffer.device.type}")
    if reader not in (None, writer):
        raise WitnessesDisagree(f"{what}: the writer set_mla_kv_buffer is {writer}, the reader "
                                f"get_value_buffer is {reader}")
    reads = "" if scaled else f", reader get_value_buffer: {reader}"
    return Testimony("live buffer", writer, (f"{what}: writer set_mla_kv_buffer: {writer}{reads}",))


def ask_installed(device: torch.device | str = "cpu") -> Testimony:
    """The live witness of the installed SGLang: a pool of each row format.

    Raises:
        ImportError: SGLang is not installed, or its import fails here.
        OrderUnknown: as :func:`ask_pool`.
    """
    asked = [ask_pool(make_pool(name, device=device)) for name in FORMATS]
    order = judge("SGLang", sglang_version(), asked).order
    return Testimony("live buffer", order, tuple(line for t in asked for line in t.says))


def read_pool_class(pool: Any) -> Testimony:
    """The source witness of a pool's own class, wherever it and its bases are defined."""
    cls = type(pool)
    try:
        path = Path(inspect.getsourcefile(cls) or "")
        path.read_bytes()
    except (OSError, TypeError):
        return Testimony("source", None, (f"the file of class {cls.__name__} cannot be read",))
    files = tree.installed("sglang") if is_installed("sglang") else tree.folder(path)
    try:
        name = path.relative_to(Path(files.origin).parent).as_posix()
    except ValueError:
        name = path.name
    files.files.setdefault(name, path.read_bytes)
    found = source.class_sites(files, name, cls.__name__, source.ENTRIES["sglang"])
    return source.testify(files, found=found)


def verdict_for(pool: Any, *, slot: int | None = None,
                captured: Mapping[str, Any] | None = None) -> Verdict:
    """Source, live buffer and, given ``captured`` tensors (arguments of
    :func:`~.numeric.compare`), numbers, asked about one pool.

    Raises:
        WitnessesDisagree, OrderUnknown, TypeError, ValueError: as the witnesses raise.
    """
    testimonies = [ask_pool(pool, slot=slot), read_pool_class(pool)]
    if captured is not None:
        widths = {name: getattr(pool, name) for name in _WIDTHS}
        testimonies.append(numeric.compare(**{**widths, **captured}).testimony())
    return judge(type(pool).__name__, sglang_version(), testimonies)


def evidence_for(pool: Any, *, slot: int | None = None,
                 captured: Mapping[str, Any] | None = None) -> KVLayout:
    """The layout of a live pool, as :func:`~mla_kernels.attention.verify_attention` takes it.

    Args: as :func:`verdict_for`.

    Raises:
        WitnessesDisagree: two witnesses name different orders; the message shows both.
        OrderUnknown: a witness found neither order.
        ValueError: rows of 656 bytes, which are no plain rows and have no ``KVLayout``.
    """
    verdict = verdict_for(pool, slot=slot, captured=captured)
    if pool.kv_buffer[0].shape[-1] == SCALED_BYTES:
        raise ValueError(
            f"pool has rows of {SCALED_BYTES} bytes, {verdict.order} with scales between the "
            "parts: no KVLayout describes them, and verify_attention does not take them")
    return KVLayout(verdict.order, pool.kv_lora_rank, pool.qk_rope_head_dim, pool.dtype)


@contextlib.contextmanager
def _parallel_state() -> Iterator[None]:
    """In a server, its own state; elsewhere what a server without decode context parallelism
    states at its start. Versions before that feature have no such state."""
    try:
        from sglang.srt.runtime_context import get_parallel
    except ImportError:
        yield
        return
    parallel = get_parallel()
    try:
        stated = parallel.attn_dcp_size is not None
    except Exception:
        stated = False
    with contextlib.nullcontext() if stated else parallel.override(
            dcp_enabled=False, attn_dcp_size=1, attn_dcp_rank=0):
        yield


@contextlib.contextmanager
def _kernels_on(device: torch.device) -> Iterator[None]:
    """On a CPU, the engine's Triton kernels (the scaled row's quantizer is one, whatever the
    platform) run in Triton's interpreter: the same program, without a GPU."""
    if device.type != "cpu":
        yield
        return
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    def run(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
        return InterpretedFunction(self.fn)[grid](*args, **kwargs)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:  # one kernel calls another
        return InterpretedFunction(self.fn)(*args, **kwargs)

    with mock.patch.multiple(JITFunction, run=run, __call__=call):
        yield


# -- the record ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Finding:
    """One engine's answer and how it was got.

    ``recorded`` is True when the answer was read from a file and not asked now; ``note`` then
    says why.
    """

    engine: str
    version: str
    order: Order
    pools: tuple[str, ...]
    device: str
    date: str
    how: str
    versions: dict[str, str]
    recorded: bool = False
    note: str = ""

    def __str__(self) -> str:
        head = "recorded" if self.recorded else "asked now"
        lines = [
            *(("pool", pool) for pool in self.pools),
            ("how", self.how),
            ("with", ", ".join(f"{k} {v}" for k, v in self.versions.items())),
            ("note", self.note),
        ]
        text = [textwrap.fill(value, 88, initial_indent=f"  {name:8}", subsequent_indent=" " * 10)
                for name, value in lines if value]
        return "\n".join([f"{self.engine} {self.version}: {self.order}   ({head}, {self.date})",
                          *text])


def sglang_pool_order(device: torch.device | str | None = None) -> Finding:
    """Asks a real ``MLATokenToKVPool`` of the installed SGLang in each row format.

    Args:
        device: default the GPU if there is one, as SGLang's writer is then a GPU kernel; on a
            machine without one SGLang takes its torch-native writer.

    Raises:
        ImportError: SGLang is not installed, or its import fails here.
        OrderUnknown: writer or reader fit neither order, or they disagree.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    asked = ask_installed(device)
    return Finding(
        engine="SGLang", version=sglang_version(), order=asked.order, pools=asked.says,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        date=datetime.date.today().isoformat(),
        how="rows with one part marked, then rows of numbered elements, given to the engine's "
            "own writer (" + ("a GPU kernel" if device.type == "cuda" else
                              "the torch-native one for CPUs")
            + "); the value read from rows of numbered elements",
        versions={"torch": torch.__version__, "python": platform.python_version()},
    )


def recorded(path: Path = SGLANG_RECORD) -> Finding:
    """The answer stored at ``path``."""
    found = json.loads(path.read_text())
    return Finding(**{**found, "pools": tuple(found["pools"]), "recorded": True})


def record(finding: Finding, path: Path = SGLANG_RECORD) -> None:
    """Writes what was asked now."""
    fields = dataclasses.asdict(finding)
    del fields["recorded"], fields["note"]
    path.write_text(json.dumps(fields, indent=2) + "\n")


def sglang_finding() -> Finding:
    """SGLang's answer: asked now if it is installed, else the recorded one, which says so."""
    if not is_installed("sglang"):
        why = "SGLang is not installed here, so nothing was asked now"
    else:
        try:
            return sglang_pool_order()
        except OrderUnknown:
            raise  # an answer, and one to look into
        except Exception as error:  # another version's pool, or an installation that lacks parts
            why = f"SGLang is installed, but could not be asked: {type(error).__name__}: {error}"
    return dataclasses.replace(recorded(), note=why)


def sglang_version() -> str:
    return importlib.metadata.version("sglang") if is_installed("sglang") else ""


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
