"""The second witness: a live buffer. What an engine's own code does to it is the evidence.

* The **writer**, the engine's function that takes the latent and the rope part separately,
  gets a row in which only one part is marked, and the buffer shows where the mark landed
  (:func:`order_of_buffer`). A function that takes the row already concatenated is no witness:
  it returns the caller's own order.
* The **reader**: a row of which every element is known is put into the buffer, and what the
  engine calls its value shows which of them it takes for latent (:func:`order_of_value`).

Both leave the buffer as it was, also when they raise. In a running process, call them between
two steps and on the stream that the engine uses; only the given slot is written.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..layout import ORDERS, KVLayout, Order, pool_rows
from .verdict import OrderUnknown

#: Put into a slot before each write: an element that still has it was not written.
_UNTOUCHED = -1.0
#: In a larger buffer, only slots this near to the written one, and the first and last, are
#: watched: a copy of a server's whole cache would not fit beside it.
_WATCH_ALL, _NEAR = 4096, 8
#: Elements are numbered in digits of this base, 1 to 8: every row dtype holds them exactly.
_BASE, _DIGITS = 8, 4


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
        slot: where to write. Slot 0 is reserved in some engines, and its writes are dropped.

    Raises:
        OrderUnknown: the write reached another slot or none, left part of the row as it was,
            or put the parts where neither order has them. The message says where they are.
        ValueError: a buffer that holds no plain rows of this width.
    """
    layout = KVLayout("latent_first", kv_lora_rank, qk_rope_head_dim)
    rows = pool_rows(buffer, layout, "buffer")
    kind = {"dtype": rows.dtype, "device": rows.device}

    with _scratch(rows, slot) as others_unchanged:
        def written(row: torch.Tensor, what: str) -> torch.Tensor:
            rows[slot] = _UNTOUCHED
            write(slot, *layout.split(row[None]))
            others_unchanged(what)
            result = rows[slot].double()
            _check_filled(result == _UNTOUCHED, what, slot)
            return result

        marks = {name: (written(row[0], f"a {name}-only row") != 0).cpu()
                 for name, row in zip(("latent", "rope"), layout.impulses(**kind), strict=True)}
        for order in ORDERS:
            candidate = dataclasses.replace(layout, order=order)
            if all(torch.equal(marks[s.name].nonzero().flatten(), torch.arange(s.start, s.stop))
                   for s in candidate.segments):
                break
        else:
            raise OrderUnknown(
                f"the latent part is at elements {_runs(marks['latent'])} and the rope part at "
                f"{_runs(marks['rope'])}: that is neither latent_first nor rope_first"
            )
        # The parts lie where this order has them. Inside each, nothing may be permuted.
        for digit in _digits(layout.row_dim, **kind):
            row, expected = written(digit, "a numbered row"), layout.convert(digit, candidate)
            if not torch.equal(row, expected.double()):
                at = int((row != expected.double()).nonzero()[0])
                raise OrderUnknown(f"the parts lie as in {order}, but their elements are "
                                   f"permuted, first at element {at}")
        return order


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
        buffer, slot: as in :func:`order_of_buffer`.

    Raises:
        OrderUnknown: the value is no slice of the row, or one that neither order has.
    """
    layout = KVLayout("latent_first", kv_lora_rank, qk_rope_head_dim)
    rows = pool_rows(buffer, layout, "buffer")
    digits = _digits(layout.row_dim, dtype=rows.dtype, device=rows.device)
    values = []
    with _scratch(rows, slot):
        for digit in digits:
            rows[slot] = digit
            values.append(read(slot).reshape(-1).double())
    for order in ORDERS:
        window = dataclasses.replace(layout, order=order).latent_slice
        if all(torch.equal(v, d[window].double()) for v, d in zip(values, digits, strict=True)):
            return order
    raise OrderUnknown(
        f"the engine's value of slot {slot} is {values[0].numel()} elements that are neither "
        f"0 .. {kv_lora_rank - 1} nor {qk_rope_head_dim} .. {layout.row_dim - 1} of the row"
    )


#: The scaled FP8 row of DSA, ``fp8_ds_mla`` and FlashMLA: 512 e4m3, 4 fp32 scales, 64 bf16.
SCALED_BYTES, _SCALED_LATENT, _GROUP = 656, 512, 128


def order_of_scaled_buffer(
    write: Callable[[int, torch.Tensor, torch.Tensor], Any],
    buffer: torch.Tensor,
    *,
    slot: int = 1,
) -> Order:
    """The same for rows of 656 bytes: latent in e4m3 with a scale for each 128, rope in bf16.

    Args:
        write: as in :func:`order_of_buffer`, given bf16 parts, which it quantizes itself.
        buffer: uint8, ``[slots, 656]``, ``[slots, 1, 656]`` or ``[pages, page_size, 656]``.

    Returns:
        ``"latent_first"`` for latent, scales, rope; ``"rope_first"`` for rope, latent, scales.

    Raises:
        OrderUnknown, ValueError: as there.
    """
    if (not isinstance(buffer, torch.Tensor) or buffer.dim() < 2
            or buffer.shape[-1] != SCALED_BYTES or buffer.dtype != torch.uint8):
        got = (f"{list(buffer.shape)} {buffer.dtype}" if isinstance(buffer, torch.Tensor)
               else type(buffer).__name__)
        raise ValueError(f"buffer must be uint8 [..., {SCALED_BYTES}], rows of 512 e4m3 + 4 fp32 "
                         f"scales + 64 bf16; got {got}")
    rows = buffer.view(-1, SCALED_BYTES)
    layout = KVLayout()
    places = {"latent_first": (0, 512, 528), "rope_first": (128, 640, 0)}

    with _scratch(rows, slot) as others_unchanged:
        fits = set(ORDERS)
        for digit in _digits(layout.row_dim, dtype=torch.bfloat16, device=rows.device):
            results = []
            for filler in (0x55, 0xAA):  # a byte that keeps both was not written
                rows[slot] = filler
                write(slot, *layout.split(digit[None]))
                others_unchanged("a numbered row")
                results.append(rows[slot].clone())
            _check_filled((results[0] == 0x55) & (results[1] == 0xAA), "a numbered row", slot)
            row, (latent, rope) = results[0], layout.split(digit)
            for order, (at, scales, rope_at) in places.items():
                codes = row[at:at + _SCALED_LATENT].view(torch.float8_e4m3fn).float()
                scale = row[scales:scales + 16].clone().view(torch.float32)
                stored = codes * scale.repeat_interleave(_GROUP)
                exact = torch.equal(row[rope_at:rope_at + 128].clone().view(torch.bfloat16), rope)
                # e4m3 is off by 1/16 at most, less than half of what lies between digits.
                if not (exact and torch.equal(stored.round(), latent.float())):
                    fits.discard(order)
    if len(fits) != 1:
        raise OrderUnknown("the 656 bytes are neither latent, scales, rope nor rope, latent, "
                           "scales")
    return fits.pop()


# -- details ------------------------------------------------------------------------------


@contextlib.contextmanager
def _scratch(rows: torch.Tensor, slot: int) -> Iterator[Callable[[str], None]]:
    """Restores ``slot`` in the end, and gives a check that its neighbours are unchanged; those
    are restored too."""
    if not 0 <= slot < len(rows):
        raise ValueError(f"slot must be in 0 .. {len(rows) - 1}; got {slot}")
    every = range(len(rows))
    if len(rows) > _WATCH_ALL:
        every = sorted({*every[:_NEAR], *every[-_NEAR:],
                        *every[max(slot - _NEAR, 0):slot + _NEAR + 1]})
    watched = torch.tensor(list(every), device=rows.device)
    # As bytes: a cache may hold NaN, which equals nothing, and not every dtype can be indexed.
    as_bytes = rows.view(torch.uint8)
    saved = as_bytes[watched]

    def others_unchanged(what: str) -> None:
        moved = (as_bytes[watched] != saved).any(dim=1) & (watched != slot)
        if moved.any():
            raise OrderUnknown(f"writing {what} to slot {slot} changed slot "
                               f"{int(watched[moved][0])} too: slots are not rows of this buffer")

    try:
        yield others_unchanged
    finally:
        as_bytes[watched] = saved


def _check_filled(left: torch.Tensor, what: str, slot: int) -> None:
    if left.all():
        raise OrderUnknown(f"writing {what} to slot {slot} left the slot as it was: the "
                           "writer writes elsewhere, or drops writes to this slot")
    if left.any():
        raise OrderUnknown(f"writing {what} to slot {slot} left elements {_runs(left)} as "
                           "they were: the writer does not fill the row")


def _digits(count: int, *, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Rows that number their elements together: each holds one digit of the number, 1 to 8."""
    numbers = torch.arange(count)
    return [(numbers // _BASE**i % _BASE + 1).float().to(device=device, dtype=dtype)
            for i in range(_DIGITS)]


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
