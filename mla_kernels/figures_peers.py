"""Pictures of our kernel among others on one card: recorded measurements in, a matplotlib
``Figure`` out, in the style of :mod:`mla_kernels.figures_speed`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, NullFormatter

from .device import H200, Ceiling, attention_bytes, attention_flops
from .figures import COLOR, MARKERS, SERIES, _grid, _label_ends, _new_figure, _styled, _text_on
from .figures_speed import _counts, _origin, _plain, _shape_text
from .measurements import (
    NAMES,
    PEER_NAMES,
    SHAPE,
    TREE_RIVALS,
    best_of_others,
    of_tree,
    sweep,
)
from .workload import MODEL_BATCHES, MODEL_HEADS, MODEL_NODES

#: Who is in these pictures, with colour, marker and the kind of draft that it was measured on.
#: Hollow markers are chains: those kernels have no tree mask.
WHO = {
    "cuda": (SERIES[0], "o", "3-ary"),
    "triton_split": (SERIES[1], "s", "3-ary"),
    "sglang_extend": (SERIES[3], "v", "3-ary"),
    "prefix_suffix_fa2": (SERIES[2], "^", "3-ary"),
    "prefix_suffix_fa3": (SERIES[2], "<", "3-ary"),
    "flashinfer_fa2": (SERIES[6], "D", "chain"),
    "flashinfer_fa3": (SERIES[4], "P", "chain"),
    "flashmla": (SERIES[5], "X", "chain"),
}


def _rows(frame: pd.DataFrame, provider: str, shapes: Sequence[Sequence[int]]) -> pd.DataFrame:
    """A provider's timed rows on its kind of draft, for these shapes."""
    rows = of_tree(frame, WHO[provider][2])
    rows = rows[(rows["provider"] == provider) & (rows["status"] == "ok")]
    wanted = {tuple(map(int, shape)) for shape in shapes}
    return rows[np.array([tuple(s) in wanted for s in rows[SHAPE].to_numpy()], dtype=bool)]


def _key(ax: Axes, frame: pd.DataFrame, shapes: Sequence[Sequence[int]]) -> None:
    """Who is who, above the axes in two columns, and the title above that."""
    names = NAMES | PEER_NAMES
    handles = [Line2D([], [], color=color, marker=marker, linestyle="", label=names[who],
                      markerfacecolor=color if tree == "3-ary" else "white")
               for who, (color, marker, tree) in WHO.items() if len(_rows(frame, who, shapes))]
    ax.legend(handles=handles, loc="lower right", bbox_to_anchor=(1, 1), ncols=2,
              borderaxespad=0.2, fontsize=8.5)
    ax.set_title(ax.get_title(loc="left"), loc="left", pad=12 + 13.5 * -(-len(handles) // 2))


@_styled
def roofline(frame: pd.DataFrame, shapes: Sequence[Sequence[int]], *, ceiling: Ceiling = H200,
             title: str = "") -> Figure:
    """Arithmetic a second over arithmetic a byte, a point for each shape and kernel, below what
    the card's memory and its ``mma.sync`` allow. Kernels that use wgmma have a higher roof.

    Args:
        frame: a run of :mod:`mla_kernels.measurements`, of all kinds of tree.
        shapes: ``(batch_size, num_heads, num_nodes, context)`` each.

    Raises:
        ValueError: none of the shapes is in the run.
    """
    figure, ax = _new_figure(5.4)
    intensities: list[float] = []
    for who, (color, marker, tree) in WHO.items():
        rows = _rows(frame, who, shapes)
        x = [attention_flops(*s) / attention_bytes(*s) for s in rows[SHAPE].to_numpy()]
        ax.plot(x, rows["tflops"], linestyle="", marker=marker, color=color, alpha=0.9,
                markersize=6.5, markeredgewidth=1.5,
                markerfacecolor=color if tree == "3-ary" else "white")
        intensities += x
    if not intensities:
        raise ValueError("none of these shapes is in this run")
    x = np.geomspace(min(intensities) / 1.5, max(intensities) * 1.5)
    roof = np.minimum(x * ceiling.bandwidth, ceiling.tensor) / 1e12
    ax.plot(x, roof, color=COLOR["ink"], linewidth=1.5)
    ax.set(xscale="log", yscale="log", xlim=(x[0], x[-1]), title=title,
           xlabel="arithmetic intensity, flop a byte (least bytes)", ylabel="TFLOP/s")
    ax.set_ylim(top=2.5 * roof[-1])
    ax.annotate(f"memory, {ceiling.bandwidth / 1e12:.2f} TB/s", (x[0], roof[13]), xytext=(6, 0),
                textcoords="offset points", color=COLOR["muted"], fontsize=9)
    ax.annotate(f"mma.sync, {ceiling.tensor / 1e12:.0f} TFLOP/s", (ceiling.ridge, roof[-1]),
                xytext=(4, 5), textcoords="offset points", color=COLOR["muted"], fontsize=9)
    _grid(ax, "both")
    _plain(ax)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,g}"))
    ax.xaxis.set_minor_formatter(NullFormatter())
    _key(ax, frame, shapes)
    _origin(figure, frame)
    return figure


@_styled
def beside_peers(frame: pd.DataFrame, shapes: Sequence[Sequence[int]], *,
                 title: str = "") -> Figure:
    """Times of every kernel as a multiple of ours on the same shape and kind of draft: right of
    1 ours is faster.

    Args:
        frame: as for :func:`roofline`.

    Raises:
        ValueError: a shape that ours was not measured on.
    """
    figure, ax = _new_figure(0.33 * len(shapes) + 2.0)
    for y, shape in enumerate(map(tuple, shapes)):
        for who, (color, marker, tree) in WHO.items():
            rows = _rows(frame, who, [shape])
            if who == "cuda":
                if rows.empty:
                    raise ValueError(f"shape {shape} is not in this run for cuda")
                continue
            own = of_tree(frame, tree)
            own = own[(own["provider"] == "cuda") & (own[SHAPE] == list(shape)).all(axis=1)]
            if len(rows) and len(own):
                ax.plot(rows["latency_us"].iloc[0] / own["latency_us"].iloc[0], y, linestyle="",
                        marker=marker, color=color, markersize=7, markeredgewidth=1.5,
                        markerfacecolor=color if tree == "3-ary" else "white")
    ax.axvline(1, color=SERIES[0], linewidth=2)
    ours = of_tree(frame)
    ours = ours[ours["provider"] == "cuda"].set_index(SHAPE)["latency_us"]
    ax.set_yticks(range(len(shapes)),
                  [f"{_shape_text(s)}: {ours.loc[tuple(s)]:,.0f} µs" for s in shapes])
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.set(xscale="log", ylim=(len(shapes) - 0.4, -0.6), title=title,
           xlabel="time of a call, as a multiple of our CUDA kernel's (beside the shape)")
    ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}×"))
    ax.xaxis.set_minor_formatter(NullFormatter())
    _grid(ax, "both")
    _key(ax, frame, shapes)
    _origin(figure, frame)
    return figure


@_styled
def against_the_best(frame: pd.DataFrame, *, rivals: Sequence[str] = TREE_RIVALS,
                     title: str = "") -> Figure:
    """Everything the models' presets have: the time of the fastest of ``rivals`` on a tree, as a
    multiple of our CUDA kernel's; heads down, requests and context across, a panel for each size
    of tree. Above 1 ours is faster. An empty cell is a shape that is in no preset.

    Raises:
        ValueError: none of these shapes was measured.
    """
    known = best_of_others(frame, rivals)
    heads = sorted({h // tp for h in MODEL_HEADS.values() for tp in (1, 2, 4, 8)})
    columns = sorted(MODEL_BATCHES)
    grid = np.array([[[known.get((batch, h, nodes, context), np.nan)
                       for batch, context in columns] for h in heads] for nodes in MODEL_NODES])
    if np.isnan(grid).all():
        raise ValueError("none of the models' shapes is in this run")
    # As far from 1 to either side, so that the middle of the colours is a draw.
    most = max(np.nanmax(grid), 1 / np.nanmin(grid), 2)
    figure, axes = _new_figure(0.3 * len(heads) + 2.0, 1, len(MODEL_NODES), sharey=True)
    for ax, nodes, ratios in zip(axes, MODEL_NODES, grid, strict=True):
        image = ax.imshow(ratios, cmap="PuOr", norm=LogNorm(1 / most, most), aspect="auto")
        for (i, j), ratio in np.ndenumerate(ratios):
            if not np.isnan(ratio):
                ax.annotate(f"{ratio:.2f}" if ratio < 9.95 else f"{ratio:.0f}", (j, i),
                            ha="center", va="center", fontsize=8.5,
                            color=_text_on(image.cmap(image.norm(ratio))),
                            fontweight="bold" if ratio < 1 else "normal")
        ax.set_xticks(range(len(columns)), [f"{b} ×\n{c // 1024}k" for b, c in columns],
                      fontsize=8.5)
        ax.tick_params(length=0)
        for spine in ax.spines.values():
            spine.set_visible(False)
        ax.set_title(f"{nodes} nodes", fontsize=9.5)
        ax.set_xlabel("requests × context")
    axes[0].set_yticks(range(len(heads)), heads)
    axes[0].set_ylabel("heads")
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    _origin(figure, frame)
    return figure


@_styled
def measured_parts(parts: dict, profile: dict, *, title: str = "") -> Figure:
    """A call of our kernel with its prefix and without, in percent of the whole call; the bracket
    is the merge kernel alone under Nsight Compute, without the overlap that it has in a graph.

    Args:
        parts: what ``scripts/call_parts.py`` records.
        profile: what ``scripts/profile_rows.py`` records.

    Raises:
        ValueError: a shape that was not profiled.
    """
    merges = {row["shape"]: row["kernels"][1]["us"] for row in profile["rows"]}
    missing = [row["shape"] for row in parts["rows"] if row["shape"] not in merges]
    if missing:
        raise ValueError(f"shape {missing[0]} was not profiled")
    figure, ax = _new_figure(0.34 * len(parts["rows"]) + 1.7)
    for y, row in enumerate(parts["rows"]):
        draft = 100 * row["draft_us"] / row["whole_us"]
        merge = 100 * merges[row["shape"]] / row["whole_us"]
        ax.barh(y, draft, height=0.62, color=SERIES[1])
        ax.barh(y, 100 - draft, left=draft, height=0.62, color=SERIES[0])
        ax.plot([100 - merge, 100], [y + 0.42] * 2, color=COLOR["ink"], linewidth=2.5)
        ax.annotate(f"{row['whole_us']:,.0f} µs", (1, y), xycoords=("axes fraction", "data"),
                    xytext=(4, 0), textcoords="offset points", va="center", fontsize=9)
    ax.set_yticks(range(len(parts["rows"])),
                  [_shape_text(row["shape"].split(",")) for row in parts["rows"]])
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.set(xlim=(0, 100), ylim=(len(parts["rows"]) - 0.4, -0.6), title=title,
           xlabel="share of the measured call, %")
    _grid(ax, "x")
    handles = [Patch(color=SERIES[1], label="without a prefix: start, draft, merge of one run"),
               Patch(color=SERIES[0], label="what the prefix adds"),
               Line2D([], [], color=COLOR["ink"], linewidth=2.5, label="merge kernel alone")]
    ax.legend(handles=handles, loc="lower right", bbox_to_anchor=(1, 1), ncols=3,
              borderaxespad=0.2, fontsize=8.5)
    ax.set_title(ax.get_title(loc="left"), loc="left", pad=26)
    figure.supxlabel(f"Measured on {parts['gpu']}, {parts['date']}, commit {parts['commit']}; the "
                     f"merge alone by Nsight Compute, commit {profile['commit']}.", x=0.01,
                     ha="left", fontsize=8.5, color=COLOR["muted"])
    return figure


@_styled
def nodes_at_contexts(frame: pd.DataFrame, contexts: Sequence[int] = (4096, 16384, 65536), *,
                      batch_size: int = 1, num_heads: int = 8, ceiling: Ceiling = H200,
                      title: str = "") -> Figure:
    """Time of our kernel against nodes, a line a context, over the card's floors (computed, so
    dashed): flat while memory is the bound, rising once arithmetic is. The dotted line is where
    the floors turn.

    Raises:
        ValueError: a context without measurements.
    """
    figure, ax = _new_figure(4.4)
    ends, values = [], set()
    for i, context in enumerate(contexts):
        fixed = {"batch_size": batch_size, "num_heads": num_heads, "context": context}
        rows = sweep(frame, "num_nodes", "cuda", **fixed)
        if rows.empty:
            raise ValueError(f"no measurements along num_nodes with {fixed}")
        nodes = rows["num_nodes"].astype(int).tolist()
        ax.plot(nodes, rows["latency_us"], color=SERIES[i], marker=MARKERS[i])
        floor = [1e6 * ceiling.floor(attention_flops(batch_size, num_heads, n, context),
                                     attention_bytes(batch_size, num_heads, n, context))
                 for n in nodes]
        ax.plot(nodes, floor, color=SERIES[i], linestyle=(0, (4, 3)), linewidth=1.3)
        ends.append((nodes[-1], rows["latency_us"].iloc[-1], f"{context // 1024}k", SERIES[i]))
        values |= set(nodes)
    # Each node of every head reads a cache row: flop a byte grow in proportion to both.
    turn = ceiling.ridge / (2 * (576 + 512) / (2 * 576)) / num_heads
    ax.axvline(turn, color=COLOR["muted"], linestyle=":", linewidth=1.3)
    ax.set(xscale="log", yscale="log", title=title, ylabel="time of a call, µs",
           xlabel="nodes of the draft tree")
    _grid(ax, "both")
    _counts(ax, "x", sorted(values))
    ax.margins(x=0.03)
    ax.autoscale_view()
    _plain(ax)
    ax.annotate(f"floors turn at {turn:.0f} nodes:\nmemory left, arithmetic right",
                (turn, 1), xycoords=("data", "axes fraction"), xytext=(-5, -4),
                textcoords="offset points", ha="right", va="top", fontsize=9,
                color=COLOR["muted"])
    _label_ends(ax, ends)
    _origin(figure, frame)
    return figure


@_styled
def linear_cost(frame: pd.DataFrame, *, context: int = 16384, title: str = "") -> Figure:
    """Our kernel's time on linear axes: left against context, right against rows, where heads and
    nodes are told apart by the marker alone. The lines are fitted to the points.

    Raises:
        ValueError: fewer than two points for a line.
    """
    figure, (left, right) = _new_figure(3.9, 1, 2)
    for i, nodes in enumerate((8, 16, 64)):
        rows = sweep(frame, "context", "cuda", batch_size=1, num_heads=8, num_nodes=nodes)
        x, y = rows["context"] / 1024, rows["latency_us"]
        slope, start = _line(x, y)
        left.plot(x, y, linestyle="", marker=MARKERS[i], color=SERIES[i],
                  label=f"{8 * nodes} rows: {start:.0f} µs + {slope:.2g} µs a 1k tokens")
        left.plot(x, start + slope * x, color=SERIES[i], linewidth=1.3)
    left.set(xlabel="context, 1,024 tokens", ylabel="time of a call, µs", ylim=(0, None),
             xlim=(0, None), title=title or "One request")
    _grid(left, "both")
    left.legend(loc="upper left", fontsize=8.5)

    rows = of_tree(frame)
    rows = rows[(rows["provider"] == "cuda") & (rows["context"] == context)
                & (rows["batch_size"] == 1) & rows["latency_us"].notna()]
    count = rows["num_heads"] * rows["num_nodes"]
    slope, start = _line(count, rows["latency_us"])
    for some, marker, color, fixed, varied in (
            (rows["num_heads"] == 8, "o", SERIES[0], "8 heads", "num_nodes"),
            ((rows["num_heads"] != 8) & (rows["num_nodes"] == 8), "s", SERIES[1], "8 nodes",
             "num_heads"),
            ((rows["num_heads"] != 8) & (rows["num_nodes"] == 64), "^", SERIES[2], "64 nodes",
             "num_heads")):
        over = rows.loc[some, varied]
        right.plot(count[some], rows["latency_us"][some], linestyle="", marker=marker,
                   color=color, markerfacecolor="none", markeredgewidth=1.5,
                   label=f"{fixed}, {over.min()} to {over.max()} {varied.removeprefix('num_')}")
    ends = np.array([0, count.max()])
    right.plot(ends, start + slope * ends, color=COLOR["muted"], linewidth=1.3, zorder=0)
    right.set(xlabel="rows: heads × nodes", ylim=(0, None), xlim=(0, None),
              title=f"{context // 1024}k context: {64 * slope:.1f} µs for 64 rows")
    for axis in (right.xaxis, right.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}"))
    _grid(right, "both")
    right.legend(loc="upper left", fontsize=8.5)
    _origin(figure, frame)
    return figure


def _line(x: pd.Series, y: pd.Series) -> tuple[float, float]:
    """Slope and start of the least-squares line."""
    if len(x) < 2:
        raise ValueError("a line needs at least two measurements")
    slope, start = np.polyfit(x.to_numpy(dtype=float), y.to_numpy(dtype=float), 1)
    return float(slope), float(start)
