"""Pictures of recorded measurements: data from :mod:`mla_kernels.measurements` in, a matplotlib
``Figure`` out, in the style of :mod:`mla_kernels.figures`."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from .device import H200, Ceiling, attention_bytes, attention_flops
from .figures import COLOR, MARKERS, SERIES, _grid, _label_ends, _new_figure, _styled
from .measurements import NAMES, SHAPE, origin, speedups, sweep

#: One colour and marker a provider, the same in every picture.
PROVIDER_STYLE = {name: (SERIES[i], MARKERS[i]) for i, name in enumerate(NAMES)}


def _counts(ax: Axes, axis: str, values: Sequence[int]) -> None:
    """Ticks at the measured counts, as 512, 16k, 128k."""
    one = ax.xaxis if axis == "x" else ax.yaxis
    one.set_ticks(list(values))
    one.set_major_formatter(FuncFormatter(
        lambda v, _: f"{v / 1024:.0f}k" if v >= 1024 and v % 1024 == 0 else f"{v:.0f}"))
    one.set_minor_locator(NullLocator())
    one.set_minor_formatter(NullFormatter())


def _plain(ax: Axes, suffix: str = "") -> None:
    """Numbers on a log y axis, more than powers of ten where there is room for few of those."""
    low, high = ax.get_ylim()
    if high < 50 * low:
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,g}{suffix}"))
    ax.yaxis.set_minor_formatter(NullFormatter())


def _origin(figure: Figure, frame: pd.DataFrame) -> None:
    """Where the numbers come from, in small print along the foot of the figure."""
    figure.supxlabel(origin(frame) + ".", x=0.01, ha="left", fontsize=8.5, color=COLOR["muted"])


def _legend_above(ax: Axes) -> None:
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2)
    ax.set_title(ax.get_title(loc="left"), loc="left", pad=26)


def _finish(figure: Figure, ax: Axes, frame: pd.DataFrame, values: Sequence[int],
            ends: Sequence[tuple[float, float, str, str]], suffix: str = "") -> None:
    """Grid, ticks at the measured ``values``, the lines' names at their ends, the origin."""
    _grid(ax, "both")
    _counts(ax, "x", values)
    _plain(ax, suffix)
    ax.margins(x=0.03)
    ax.autoscale_view()
    _label_ends(ax, ends)
    _origin(figure, frame)


def _shape_text(shape: Sequence[int]) -> str:
    requests, heads, nodes, context = (int(n) for n in shape)
    return (f"{requests} request{'s' if requests > 1 else ''} × {context // 1024}k, {heads} heads, "
            f"{nodes} node{'s' if nodes > 1 else ''}")


@_styled
def latency(
    frame: pd.DataFrame,
    along: str,
    *,
    ceiling: Ceiling | None = H200,
    title: str = "",
    **fixed: int,
) -> Figure:
    """Time of a verify call against context or nodes, one line a provider that was measured on
    two shapes or more.

    Args:
        frame: a run of :mod:`mla_kernels.measurements`.
        along: ``"context"`` or ``"num_nodes"``, the column along the x axis.
        ceiling: draws the floor of this card under the lines: the larger of the least bytes
            over its bandwidth and the flops over its ``mma.sync`` rate. Computed, hence
            dashed.
        fixed: the other columns of the shape.

    Raises:
        ValueError: the run has no rows for these shapes.
    """
    figure, ax = _new_figure(4.4)
    ends = []
    values: set[int] = set()
    for provider in NAMES:
        rows = sweep(frame, along, provider, **fixed)
        if len(rows) < 2:  # a point is no line
            continue
        color, marker = PROVIDER_STYLE[provider]
        ax.plot(rows[along], rows["latency_us"], color=color, marker=marker)
        ax.fill_between(rows[along], rows["p10_us"], rows["p90_us"], color=color, alpha=0.2)
        ends.append((rows[along].iloc[-1], rows["latency_us"].iloc[-1], NAMES[provider], color))
        values |= set(rows[along].astype(int))
    if not values:
        raise ValueError(f"no measurements along {along} with {fixed}")
    ax.set(xscale="log", yscale="log", title=title, ylabel="time of a call, µs",
           xlabel="tokens of context" if along == "context" else "nodes of the draft tree")
    if ceiling:
        line = []
        for value in sorted(values):
            shape = {**fixed, along: value}
            counts = [shape[c] for c in SHAPE]
            line.append(1e6 * ceiling.floor(attention_flops(*counts), attention_bytes(*counts)))
        ax.plot(sorted(values), line, color=COLOR["muted"], linestyle=(0, (4, 3)), linewidth=1.5)
        ends.append((max(values), line[-1], "floor of the card (computed)", COLOR["muted"]))
    _finish(figure, ax, frame, sorted(values), ends)
    return figure


@_styled
def speedup_over_context(
    frame: pd.DataFrame,
    *,
    baseline: str = "sglang_extend",
    provider: str = "cuda",
    num_nodes: Sequence[int] = (8, 16, 64),
    batch_size: int = 1,
    num_heads: int = 8,
    title: str = "",
) -> Figure:
    """How many times faster a provider is than a baseline, over context, a line for each tree
    size.

    Raises:
        ValueError: a provider that the run does not have, or no common shapes.
    """
    table = speedups(frame, provider, baseline)
    table = table[(table["batch_size"] == batch_size) & (table["num_heads"] == num_heads)]
    figure, ax = _new_figure(4.0)
    ends = []
    values: set[int] = set()
    for i, nodes in enumerate(num_nodes):
        rows = table[table["num_nodes"] == nodes].sort_values("context")
        if rows.empty:
            continue
        ax.plot(rows["context"], rows["speedup"], color=SERIES[i], marker=MARKERS[i])
        ends.append((rows["context"].iloc[-1], rows["speedup"].iloc[-1], f"{nodes} nodes",
                     SERIES[i]))
        values |= set(rows["context"].astype(int))
    if not values:
        raise ValueError(f"no shapes with batch_size {batch_size}, num_heads {num_heads} and "
                         f"num_nodes in {list(num_nodes)} in this run")
    ax.axhline(1, color=COLOR["muted"], linewidth=1)
    ax.set(xscale="log", yscale="log", xlabel="tokens of context",
           ylabel=f"times faster than\n{NAMES[baseline]}", title=title)
    _finish(figure, ax, frame, sorted(values), ends, suffix="×")
    return figure


@_styled
def speedup_bars(
    frame: pd.DataFrame,
    shapes: Sequence[Sequence[int]],
    *,
    provider: str = "cuda",
    baselines: Sequence[str] = ("triton_split", "sglang_extend"),
    title: str = "",
) -> Figure:
    """Speed-ups over baselines for single shapes, as points on a log axis with the times
    beside them.

    Args:
        shapes: ``(batch_size, num_heads, num_nodes, context)`` each.

    Raises:
        ValueError: a provider or a shape that the run does not have.
    """
    tables = {b: speedups(frame, provider, b).set_index(SHAPE) for b in baselines}
    figure, ax = _new_figure(0.36 * len(shapes) + 1.6)
    top = 1.0
    for y, shape in enumerate(map(tuple, shapes)):
        for i, baseline in enumerate(baselines):
            if shape not in tables[baseline].index:
                raise ValueError(f"shape {shape} is not in this run for {provider} and {baseline}")
            row = tables[baseline].loc[shape]
            color, marker = PROVIDER_STYLE[baseline]
            ax.plot([1, row["speedup"]], [y + 0.16 * (2 * i - 1)] * 2, color=color, linewidth=2)
            ax.plot(row["speedup"], y + 0.16 * (2 * i - 1), color=color, marker=marker)
            ax.annotate(f"{row['speedup']:.1f}×" if row["speedup"] < 10
                        else f"{row['speedup']:.0f}×", (row["speedup"], y + 0.16 * (2 * i - 1)),
                        xytext=(7, 0), textcoords="offset points", va="center", fontsize=8.5,
                        color=color)
            top = max(top, row["speedup"])
    ax.axvline(1, color=COLOR["muted"], linewidth=1)
    ax.set_yticks(range(len(shapes)), [
        f"{_shape_text(s)}: {tables[baselines[0]].loc[tuple(s), 'latency_us']:,.0f} µs"
        for s in shapes])
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.set(xscale="log", xlim=(0.9, top * 1.6), ylim=(len(shapes) - 0.4, -0.6), title=title,
           xlabel=f"times that {NAMES[provider]} is faster (its time is beside the shape)")
    ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}×"))
    ax.xaxis.set_minor_formatter(NullFormatter())
    _grid(ax, "x")
    for baseline in baselines:
        color, marker = PROVIDER_STYLE[baseline]
        ax.plot([], [], color=color, marker=marker, label=f"than {NAMES[baseline]}")
    _legend_above(ax)
    _origin(figure, frame)
    return figure


@_styled
def share_of_ceiling(frame: pd.DataFrame, shapes: Sequence[Sequence[int]], *,
                     provider: str = "cuda", ceiling: Ceiling = H200, title: str = "") -> Figure:
    """How near a provider is to the two ceilings of the card, for single shapes: bytes moved at
    least over its bandwidth, flops over its ``mma.sync`` rate, both as a share of the time
    taken.

    Raises:
        ValueError: a shape that the run does not have.
    """
    rows = frame[frame["provider"] == provider].set_index(SHAPE)
    figure, ax = _new_figure(0.36 * len(shapes) + 1.6)
    for y, shape in enumerate(map(tuple, shapes)):
        if shape not in rows.index:
            raise ValueError(f"shape {shape} is not in this run for {provider}")
        row = rows.loc[shape]
        memory = 1e9 * row["gbps"] / ceiling.bandwidth
        tensor = 1e12 * row["tflops"] / ceiling.tensor
        for share, offset, color in ((memory, -0.18, SERIES[0]), (tensor, 0.18, SERIES[1])):
            ax.barh(y + offset, 100 * share, height=0.32, color=color)
            ax.annotate(f"{100 * share:.0f} %", (100 * share, y + offset), xytext=(4, 0),
                        textcoords="offset points", va="center", fontsize=8.5)
    ax.set_yticks(range(len(shapes)), [_shape_text(s) for s in shapes])
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.set(xlim=(0, 100), ylim=(len(shapes) - 0.4, -0.6), title=title,
           xlabel="share of the card's measured ceiling, %")
    _grid(ax, "x")
    for color, text in ((SERIES[0], f"device memory, {ceiling.bandwidth / 1e12:.2f} TB/s"),
                        (SERIES[1], f"mma.sync bf16, {ceiling.tensor / 1e12:.0f} TFLOP/s")):
        ax.barh([np.nan], [np.nan], color=color, label=text)
    _legend_above(ax)
    _origin(figure, frame)
    return figure


@_styled
def version_ladder(
    versions: pd.DataFrame, shapes: Sequence[Sequence[int]], *, ceiling: Ceiling = H200,
    title: str = "",
) -> Figure:
    """Times of a kernel's versions, a row a version and a panel a shape. What was not kept is
    hollow; the dashed line is the card's floor, which is computed (see :func:`latency`).

    Args:
        versions: as ``measurements.VERSIONS`` holds it.
        shapes: ``(batch_size, num_heads, num_nodes, context)``, one a panel.

    Raises:
        ValueError: no version was timed at a shape.
    """
    names = versions.drop_duplicates("version").set_index("version")["change"]
    figure, axes = _new_figure(0.9 + 0.5 * len(names), 1, len(shapes))
    for i, (ax, shape) in enumerate(zip(np.atleast_1d(axes), shapes, strict=True)):
        rows = versions[(versions[SHAPE] == list(shape)).all(axis=1)]
        if rows.empty:
            raise ValueError(f"no version was timed at {tuple(shape)}")
        y = [list(names.index).index(v) for v in rows["version"]]
        kept = rows["kept"].to_numpy()
        ax.plot(rows["latency_us"][kept], np.array(y)[kept], color=SERIES[0], zorder=1)
        for x, at, ok in zip(rows["latency_us"], y, kept, strict=True):
            ax.plot(x, at, "o", color=SERIES[0], markerfacecolor=SERIES[0] if ok else "white")
            ax.annotate(f"{x:g}", (x, at), xytext=(7, 0), textcoords="offset points", va="center",
                        fontsize=9)
        floor = 1e6 * ceiling.floor(attention_flops(*shape), attention_bytes(*shape))
        ax.axvline(floor, color=COLOR["muted"], linestyle="--", linewidth=1)
        ax.annotate(f"floor {floor:.3g}", (floor, -0.6), xytext=(4, 0), fontsize=8.5,
                    textcoords="offset points", va="center", color=COLOR["muted"])
        ax.set(xlim=(0, 1.2 * rows["latency_us"].max()), ylim=(len(names) - 0.5, -1),
               xlabel="time of a call, µs", title=_shape_text(shape))
        ax.set_yticks(range(len(names)), [
            textwrap.fill(f"{v} {change}", 40) for v, change in names.items()] if i == 0 else [])
        ax.tick_params(axis="y", length=0, labelsize=8.5)
        _grid(ax, "x")
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    return figure
