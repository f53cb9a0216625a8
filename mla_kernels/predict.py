"""What our kernel should take on a card that nobody has measured it on: a model, not data.

A block works through its share of the cache tile by tile. A tile keeps four things busy,

    memory   36,864 bytes, at the block's part of the card's bandwidth
    tensor   2 * rows * 32 * (576 + 512) flop, at one multiprocessor's ``mma.sync`` rate
    shared   wavefronts of 128 bytes through shared memory, one a clock, as Nsight Compute counts
             them (``data/profiles``)
    wait     a number of clocks for barriers, softmax and what nothing hides

and a call takes

    overhead + waves * (rows * row + tiles * max(memory / share, compute))
    compute = wait + max(tensor, shared) + serial * min(tensor, shared)

with the launch that :func:`mla_kernels.cuda.plan` chooses for the card. The five numbers of
:class:`Efficiency` are fitted to one H200's times; bandwidth, tensor rate, clock and
multiprocessors are the card's. One block runs on a multiprocessor at a time, on sm_120 as on the
H200: its 255 registers a thread and about 99 KB of shared memory leave no room for a second.

What can't be seen on an H200 is not in it: sm_120's L2, the clocks that it keeps under load, and
whether its tensor cores overlap with shared memory as the H200's do.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from . import cuda, measurements
from .device import H200, RTX_5090, RTX_PRO_6000, Ceiling

#: Bytes of a tile: 32 rows of 576 values in 16 bits.
TILE_BYTES = cuda.TILE_TOKENS * 576 * 2

#: Clocks in Hz: the H200's maximum as its driver names it; the others' boost clocks as published
#: by others than their maker: 2,617 MHz beside 24,064 shaders (188 multiprocessors) and 503.8
#: TFLOP/s dense bf16 at hmc-tech.com for the RTX PRO 6000 Blackwell; 2,407 MHz beside 170
#: multiprocessors and 1,792 GB/s in Linux Format, May 2025, for the GeForce RTX 5090. 512 dense
#: bf16 multiply-adds a clock and multiprocessor at these clocks give the tensor rates of
#: :mod:`mla_kernels.device` (half of them on a GeForce).
CLOCKS = {H200.name: 1.98e9, RTX_PRO_6000.name: 2.617e9, RTX_5090.name: 2.407e9}

#: The recorded profile of the kernel, see ``scripts/profile_rows.py``.
PROFILE = measurements.FOLDER.parent / "profiles" / "h200.json"

#: What a tile keeps busy, in words.
UNITS = {"memory": "device memory", "tensor": "tensor cores", "shared": "shared memory",
         "wait": "waits"}

#: The bound of a call that none of them is.
START = "start and merge"


@dataclasses.dataclass(frozen=True)
class Efficiency:
    """What is fitted.

    Args:
        overhead_us: of a call, whatever it does: two launches, the first indices and rows, the
            last merge.
        row_us: for a row of a block: its query read, its partial result written and merged.
        wait_clocks: of a tile, for what nothing hides.
        serial: how much of the shorter of tensor and shared-memory time comes on top of the
            longer: 0 where they overlap fully, 1 where they take turns.
        memory: share of the card's copy bandwidth that the kernel gets.
    """

    overhead_us: float
    row_us: float
    wait_clocks: float
    serial: float
    memory: float


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A modelled call, in microseconds.

    Args:
        start_us: what every call costs: launches, the first indices and rows.
        merge_us: what grows with the rows of a block and not with the context: queries read,
            partial results written and merged.
        prefix_us, draft_us: the tiles' time, dealt out by tokens.
        tile_us: by unit (:data:`UNITS`), what each would take alone for a tile; ``compute`` for
            what the last three take together.
    """

    start_us: float
    merge_us: float
    prefix_us: float
    draft_us: float
    tile_us: dict[str, float]

    @property
    def total_us(self) -> float:
        return self.start_us + self.merge_us + self.prefix_us + self.draft_us

    @property
    def bound(self) -> str:
        """What most of the call's time goes to: :data:`START`, or one of :data:`UNITS`' words;
        of what is behind ``compute`` the longest."""
        if self.start_us + self.merge_us > self.prefix_us + self.draft_us:
            return START
        if self.tile_us["memory"] >= self.tile_us["compute"]:
            return UNITS["memory"]
        return UNITS[max(("tensor", "shared", "wait"), key=self.tile_us.get)]


@functools.cache
def wavefronts(profile: Path = PROFILE) -> dict[int, float]:
    """Shared-memory wavefronts of a tile by the block's rows: the fewest among the profiled
    shapes, since those with many tiles a block show least of what its start adds."""
    recorded = json.loads(profile.read_text())
    found: dict[int, float] = {}
    for row in recorded["rows"]:
        batch, heads, nodes, context = map(int, row["shape"].split(","))
        launch = cuda.plan(heads, batch, nodes, nodes + context, recorded["sms"])
        tiles = batch * -(-(nodes + context) // cuda.TILE_TOKENS) * launch.row_tiles
        count = row["kernels"][0]["shared_wavefronts"] / tiles
        found[launch.rows] = min(count, found.get(launch.rows, count))
    return found


def _work(shapes: Sequence[Sequence[int]], card: Ceiling, clock: float) -> dict[str, np.ndarray]:
    """What the model needs of every shape on a card; times in microseconds."""
    counts = wavefronts()
    work: dict[str, list[float]] = {name: [] for name in (
        "rows", "waves", "tiles", "memory", "tensor", "shared")}
    for batch, heads, nodes, context in (map(int, shape) for shape in shapes):
        launch = cuda.plan(heads, batch, nodes, nodes + context, card.sms)
        tiles = batch * -(-(nodes + context) // cuda.TILE_TOKENS)
        blocks = launch.row_tiles * launch.groups
        waves = -(-blocks // card.sms)
        work["rows"].append(launch.rows)
        work["waves"].append(waves)
        work["tiles"].append(-(-tiles // launch.groups))
        # Row tiles that read the same cache rows at the same time read device memory once.
        streams = min(launch.groups, card.sms / min(launch.row_tiles, card.sms))
        work["memory"].append(1e6 * TILE_BYTES * streams / card.bandwidth)
        flops = 2 * launch.rows * cuda.TILE_TOKENS * (576 + 512)
        work["tensor"].append(1e6 * flops * card.sms / card.tensor)
        work["shared"].append(1e6 * counts[launch.rows] / clock)
    return {name: np.array(values, dtype=float) for name, values in work.items()}


def _times(work: dict, e: Sequence, clock: float) -> dict:
    """The formula above, of numpy arrays or of torch tensors."""
    overhead, row, wait, serial, memory = e
    low = work["tensor"] + work["shared"] - abs(work["tensor"] - work["shared"])
    high = work["tensor"] + work["shared"] + abs(work["tensor"] - work["shared"])
    wait_us = 1e6 * wait / clock
    compute = wait_us + high / 2 + serial * low / 2
    stream = work["memory"] / memory
    tile = (compute + stream + abs(compute - stream)) / 2
    return {"start": overhead, "merge": work["waves"] * work["rows"] * row,
            "loop": work["waves"] * work["tiles"] * tile, "memory": stream, "wait": wait_us,
            "compute": compute}


def calibrate(frame: pd.DataFrame, card: Ceiling = H200, *, serial: float | None = None
              ) -> Efficiency:
    """Fits the model to measured times of our kernel: least squares of the logarithms.

    Args:
        frame: rows of :mod:`mla_kernels.measurements`; those of other providers are left out.
        serial: holds :attr:`Efficiency.serial` there instead of fitting it. One card can hardly
            tell it from ``wait_clocks``: fits with 0 and with 1 say how far a prediction depends
            on that.

    Raises:
        ValueError: fewer than 10 rows of our kernel with a time.
    """
    rows = ours(frame)
    if len(rows) < 10:
        raise ValueError(f"calibrating needs at least 10 timed rows of our kernel; got {len(rows)}")
    clock = CLOCKS[card.name]
    work = {name: torch.from_numpy(values) for name, values in
            _work(rows[measurements.SHAPE].to_numpy(), card, clock).items()}
    target = torch.from_numpy(rows["latency_us"].to_numpy(dtype=float, copy=True)).log()
    # Logarithms keep the five positive; they start at plausible values.
    start = [8.0, 0.05, 200.0, 0.5, 0.8]
    logs = torch.tensor(start, dtype=torch.float64).log().requires_grad_()
    descent = torch.optim.LBFGS([logs], max_iter=500, tolerance_grad=1e-10,
                                line_search_fn="strong_wolfe")

    def values() -> list[torch.Tensor]:
        numbers = list(logs.exp())
        return numbers if serial is None else [*numbers[:3], torch.tensor(serial), numbers[4]]

    def loss() -> torch.Tensor:
        descent.zero_grad()
        times = _times(work, values(), clock)
        error = (((times["start"] + times["merge"] + times["loop"]).log() - target) ** 2).mean()
        error.backward()
        return error

    descent.step(loss)
    return Efficiency(*(float(value.detach()) for value in values()))


def ours(frame: pd.DataFrame) -> pd.DataFrame:
    """The timed rows of our kernel on trees."""
    rows = measurements.of_tree(frame)
    return rows[(rows["provider"] == "cuda") & (rows["status"] == "ok")]


def predict(shape: Sequence[int], card: Ceiling, efficiency: Efficiency) -> Prediction:
    """A call over equal requests, ``(batch_size, num_heads, num_nodes, context)``, on a card of
    :data:`CLOCKS`.

    Raises:
        ValueError: a card without a clock.
    """
    if card.name not in CLOCKS:
        raise ValueError(f"card must be one of {', '.join(CLOCKS)}; got {card.name}")
    clock = CLOCKS[card.name]
    work = _work([shape], card, clock)
    times = _times(work, dataclasses.astuple(efficiency), clock)
    loop = float(times["loop"][0])
    _, _, nodes, context = shape
    draft = loop * nodes / (nodes + context)
    tile = {"memory": float(times["memory"][0]), "tensor": float(work["tensor"][0]),
            "shared": float(work["shared"][0]), "wait": float(times["wait"]),
            "compute": float(times["compute"][0])}
    return Prediction(float(times["start"]), float(times["merge"][0]), loop - draft, draft, tile)


def held_out(frame: pd.DataFrame, *, folds: int = 5, batches: bool = False,
             card: Ceiling = H200) -> pd.DataFrame:
    """Predicts measured shapes by a model that has not seen them.

    Args:
        folds: the shapes are dealt into so many, and each is predicted from the others.
        batches: harder: only shapes of several requests, from those of one request alone.

    Returns:
        The shape's columns, ``latency_us`` (measured), ``modelled_us`` and ``error``, which is
        modelled / measured - 1.
    """
    rows = ours(frame).sort_values(measurements.SHAPE).reset_index(drop=True)
    parts = [rows["batch_size"] > 1] if batches else [rows.index % folds == i
                                                      for i in range(folds)]
    predicted = []
    for out in parts:
        efficiency = calibrate(rows[~out], card)
        some = rows.loc[out, [*measurements.SHAPE, "latency_us"]]
        predicted.append(some.assign(modelled_us=[
            predict(shape, card, efficiency).total_us
            for shape in some[measurements.SHAPE].to_numpy()]))
    table = pd.concat(predicted).sort_index()
    return table.assign(error=table["modelled_us"] / table["latency_us"] - 1)


def markdown_table(shapes: Sequence[Sequence[int]], efficiency: Efficiency) -> str:
    """A table of modelled microseconds on the cards of sm_120 for the README, with the bound of
    each."""
    lines = ["| requests, heads, nodes, context | " + " | ".join(
        f"{card.name}, **modelled** | bound" for card in (RTX_PRO_6000, RTX_5090)) + " |",
        "|---|" + "---:|---|" * 2]
    for shape in shapes:
        cells = []
        for card in (RTX_PRO_6000, RTX_5090):
            modelled = predict(shape, card, efficiency)
            cells += [f"{modelled.total_us:,.0f}", modelled.bound]
        lines.append(f"| {', '.join(f'{n:,}' for n in shape)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def errors_sentence(table: pd.DataFrame, batches: pd.DataFrame) -> str:
    """What the README says of :func:`held_out`, by folds and by batches."""
    folds, harder = table["error"].abs(), batches["error"].abs()
    return (f"On H200 shapes that it had not seen the model is {100 * folds.median():.1f} % off in "
            f"the median and {100 * folds.max():.0f} % at worst ({len(folds)} shapes); for "
            f"batches, from single requests alone, {100 * harder.median():.1f} % and "
            f"{100 * harder.max():.0f} %.")
