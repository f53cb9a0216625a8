"""Which order does this engine use? Asked of the engine itself, with marked rows.

A comment that says "latent first" is no evidence; what the engine's own code does to a buffer
is. Two witnesses are asked:

* the **writer**: the engine's function that takes the latent and the rope part separately gets
  a row in which only one part is marked, and the buffer shows where the mark landed
  (:func:`order_of_buffer`). A function that takes the row already concatenated is no witness:
  it returns the caller's own order.
* the **reader**: a row of 576 distinct numbers is put into the buffer, and what the engine
  calls its value shows which of them it takes for latent (:func:`order_of_value`).

:func:`sglang_pool_order` asks both of SGLang's ``MLATokenToKVPool``, on a CPU or a GPU;
:func:`sglang_finding` falls back on the recorded answer where SGLang is not installed::

    python -m mla_kernels.evidence             # ask, or show the record
    python -m mla_kernels.evidence --record    # ask, and write the record
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.util
import json
import platform
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .layout import ORDERS, KVLayout, Order, pool_rows

#: What asking SGLang gave, when and on what.
SGLANG_RECORD = Path(__file__).parent.parent / "data" / "evidence" / "sglang_mla_pool.json"

#: Put into a slot before each write: an element that still has it was not written.
_UNTOUCHED = -1.0


class OrderUnknown(ValueError):
    """The buffer fits neither order, or was not written as a row at all."""


def order_of_buffer(
    write: Callable[[int, torch.Tensor, torch.Tensor], Any],
    buffer: torch.Tensor,
    *,
    kv_lora_rank: int = 512,
    qk_rope_head_dim: int = 64,
    slot: int = 1,
) -> Order:
    """The order in which an engine's writer lays a row into its cache.

    Args:
        write: ``write(slot, latent, rope)`` stores one token through the engine's own writer;
            ``latent`` is ``[1, kv_lora_rank]`` and ``rope`` ``[1, qk_rope_head_dim]``, both of
            the buffer's dtype and on its device.
        buffer: the live cache, ``[slots, 576]``, ``[slots, 1, 576]`` or
            ``[pages, page_size, 576]``. It is as before when the function returns or raises.
        slot: where to write. Slot 0 is reserved in some engines.

    Raises:
        OrderUnknown: the write reached another slot or none, left part of the row as it was,
            or put the parts where neither order has them. The message says where they are.
        ValueError: a buffer that holds no plain rows of this width.
    """
    layout = KVLayout("latent_first", kv_lora_rank, qk_rope_head_dim)
    rows = pool_rows(buffer, layout, "buffer")
    _check_slot(slot, rows)
    saved = rows.clone()
    kind = {"dtype": rows.dtype, "device": rows.device}

    def written(latent: torch.Tensor, rope: torch.Tensor, what: str) -> torch.Tensor:
        rows[slot] = _UNTOUCHED
        write(slot, latent, rope)
        # Compared as bytes: a cache may hold NaN, which equals nothing.
        moved = (_as_bytes(rows) != _as_bytes(saved)).any(dim=1)
        moved[slot] = False
        if moved.any():
            others = moved.nonzero().flatten().tolist()
            raise OrderUnknown(f"writing {what} to slot {slot} changed slot {others[0]} too: slots "
                               "are not rows of this buffer")
        row = rows[slot].double()
        left = row == _UNTOUCHED
        if left.all():
            raise OrderUnknown(f"writing {what} to slot {slot} left the slot as it was: the "
                               "writer writes elsewhere")
        if left.any():
            raise OrderUnknown(f"writing {what} to slot {slot} left elements {_runs(left)} as "
                               "they were: the writer does not fill the row")
        return row

    try:
        marks = {}
        for name, row in zip(("latent", "rope"), layout.impulses(**kind), strict=True):
            marks[name] = written(*layout.split(row), f"a {name}-only row") != 0
        for order in ORDERS:
            candidate = KVLayout(order, kv_lora_rank, qk_rope_head_dim)
            if all(torch.equal(marks[s.name].nonzero().flatten().cpu(),
                               torch.arange(s.start, s.stop)) for s in candidate.segments):
                break
        else:
            raise OrderUnknown(
                f"the latent part is at elements {_runs(marks['latent'])} and the rope part at "
                f"{_runs(marks['rope'])}: that is neither latent_first nor rope_first"
            )
        # The parts lie where this order has them. Inside each, nothing may be permuted.
        if rows.dtype.itemsize > 1:
            ramp = _ramp(layout.row_dim, **kind)
            latent, rope = layout.split(ramp[None])
            row = written(latent, rope, "a ramp")
            expected = candidate.concat(latent, rope)[0].double()
            if not torch.equal(row, expected):
                at = int((row != expected).nonzero()[0])
                raise OrderUnknown(f"the parts lie as in {order}, but their elements are "
                                   f"permuted, first at element {at}")
        return order
    finally:
        rows.copy_(saved)


def order_of_value(
    read: Callable[[int], torch.Tensor],
    buffer: torch.Tensor,
    *,
    kv_lora_rank: int = 512,
    qk_rope_head_dim: int = 64,
    slot: int = 1,
) -> Order:
    """The order that an engine's reader assumes, from what it takes for the value.

    Args:
        read: ``read(slot)`` returns that token's value as the engine sees it,
            ``kv_lora_rank`` elements in any shape.
        buffer, slot: as in :func:`order_of_buffer`; two-byte elements or wider.

    Raises:
        OrderUnknown: the value is no slice of the row, or one that neither order has.
    """
    layout = KVLayout("latent_first", kv_lora_rank, qk_rope_head_dim)
    rows = pool_rows(buffer, layout, "buffer")
    _check_slot(slot, rows)
    if rows.dtype.itemsize < 2:
        raise ValueError(f"buffer must have elements of two bytes or more, so that all "
                         f"{layout.row_dim} can differ; got {rows.dtype}")
    saved = rows[slot].clone()
    ramp = _ramp(layout.row_dim, dtype=rows.dtype, device=rows.device)
    try:
        rows[slot] = ramp
        value = read(slot).reshape(-1).to(ramp.dtype).clone()
    finally:
        rows[slot] = saved
    for order in ORDERS:
        window = KVLayout(order, kv_lora_rank, qk_rope_head_dim).latent_slice
        if torch.equal(value, ramp[window]):
            return order
    raise OrderUnknown(
        f"the engine's value of slot {slot} is {value.numel()} elements that are neither "
        f"0 .. {kv_lora_rank - 1} nor {qk_rope_head_dim} .. {layout.row_dim - 1} of the row"
    )


@dataclasses.dataclass(frozen=True)
class Finding:
    """One engine's answer and how it was got.

    ``recorded`` is True when the answer was read from a file and not asked now; ``note`` then
    says why.
    """

    engine: str
    version: str
    order: Order
    writer: str
    reader: str
    buffer: str
    device: str
    date: str
    how: str
    versions: dict[str, str]
    recorded: bool = False
    note: str = ""

    def __str__(self) -> str:
        head = "recorded" if self.recorded else "asked now"
        lines = [
            ("writer", self.writer),
            ("reader", self.reader),
            ("buffer", f"{self.buffer}, on {self.device}"),
            ("how", self.how),
            ("with", ", ".join(f"{k} {v}" for k, v in self.versions.items())),
            ("note", self.note),
        ]
        text = [textwrap.fill(value, 88, initial_indent=f"  {name:8}", subsequent_indent=" " * 10)
                for name, value in lines if value]
        return "\n".join([f"{self.engine} {self.version}: {self.order}   ({head}, {self.date})",
                          *text])


def sglang_pool_order(device: torch.device | str | None = None) -> Finding:
    """Asks a real ``MLATokenToKVPool`` of the installed SGLang, one layer and a few slots.

    Args:
        device: default the GPU if there is one, as SGLang's writer is then a GPU kernel; on a
            machine without one SGLang takes its torch-native writer.

    Raises:
        ImportError: SGLang is not installed, or its import fails here.
        OrderUnknown: writer or reader fit neither order, or they disagree.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SGLang's import warns about absent GPUs
        import sglang
        from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
        from sglang.srt.runtime_context import get_parallel

    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    widths = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    pool = MLATokenToKVPool(size=8, page_size=1, dtype=torch.bfloat16, layer_num=1,
                            device=device.type, enable_memory_saver=False, **widths)

    class Layer:
        layer_id = 0

    def write(slot: int, latent: torch.Tensor, rope: torch.Tensor) -> None:
        pool.set_mla_kv_buffer(Layer, torch.tensor([slot], device=device), latent[:, None],
                               rope[:, None])

    def read(slot: int) -> torch.Tensor:
        return pool.get_value_buffer(0)[slot]

    buffer = pool.kv_buffer[0]
    # What a server states at its start: no decode context parallelism.
    with get_parallel().override(dcp_enabled=False, attn_dcp_size=1, attn_dcp_rank=0):
        order = order_of_buffer(write, buffer, **widths)
        assumed = order_of_value(read, buffer, **widths)
    if assumed != order:
        raise OrderUnknown(f"SGLang's writer is {order}, its reader {assumed}")
    return Finding(
        engine="SGLang", version=sglang.__version__, order=order,
        writer=f"MLATokenToKVPool.set_mla_kv_buffer: {order}",
        reader=f"MLATokenToKVPool.get_value_buffer: {assumed}",
        buffer=f"{list(buffer.shape)} {str(buffer.dtype).removeprefix('torch.')}",
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        date=datetime.date.today().isoformat(),
        how="rows with one part marked, given to the engine's own writer ("
            + ("a GPU kernel" if device.type == "cuda" else "the torch-native one for CPUs")
            + "); the value read from a row of 576 distinct numbers",
        versions={"torch": torch.__version__, "python": platform.python_version()},
    )


def recorded(path: Path = SGLANG_RECORD) -> Finding:
    """The answer stored at ``path``."""
    return Finding(**{**json.loads(path.read_text()), "recorded": True})


def sglang_finding() -> Finding:
    """SGLang's answer: asked now if it is installed, else the recorded one, which says so."""
    if not _installed("sglang"):
        why = "SGLang is not installed here, so nothing was asked now"
    else:
        try:
            return sglang_pool_order()
        except OrderUnknown:
            raise  # an answer, and one to look into
        except Exception as error:  # another version's pool, or an installation that lacks parts
            why = f"SGLang is installed, but could not be asked: {type(error).__name__}: {error}"
    return dataclasses.replace(recorded(), note=why)


# -- details ------------------------------------------------------------------------------


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _check_slot(slot: int, rows: torch.Tensor) -> None:
    if not 0 <= slot < len(rows):
        raise ValueError(f"slot must be in 0 .. {len(rows) - 1}; got {slot}")


def _as_bytes(rows: torch.Tensor) -> torch.Tensor:
    return rows.contiguous().view(torch.uint8)


def _ramp(count: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """``count`` distinct numbers that bf16 and everything wider hold exactly: neighbouring
    bf16 values from 1 upwards."""
    bits = torch.arange(count, dtype=torch.int16) + torch.ones(1, dtype=torch.bfloat16).view(
        torch.int16)
    return bits.view(torch.bfloat16).to(device=device, dtype=dtype)


def _runs(where: torch.Tensor) -> str:
    """A boolean vector as text: ``0 .. 511`` or ``0, 2, 4 and 30 more``."""
    found = where.nonzero().flatten().tolist()
    runs: list[list[int]] = []
    for i in found:
        if runs and runs[-1][1] == i - 1:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    text = [str(a) if a == z else f"{a} .. {z}" for a, z in runs[:3]]
    more = f" and {len(runs) - 3} more runs" if len(runs) > 3 else ""
    return (", ".join(text) or "none") + more


def main() -> None:
    parser = argparse.ArgumentParser(description="Which row order does SGLang's MLA pool use?")
    parser.add_argument("--record", action="store_true", help=f"write {SGLANG_RECORD}")
    if not parser.parse_args().record:
        print(sglang_finding())
        return
    finding = sglang_pool_order()
    fields = dataclasses.asdict(finding)
    del fields["recorded"], fields["note"]
    SGLANG_RECORD.parent.mkdir(parents=True, exist_ok=True)
    SGLANG_RECORD.write_text(json.dumps(fields, indent=2) + "\n")
    print(finding)


if __name__ == "__main__":
    main()
