"""Pictures: data in, a matplotlib ``Figure`` out.

Nothing here touches pyplot, so a figure lives exactly as long as somebody holds it: calling a
function twice draws nothing twice, and a widget may call it as often as it likes. Nothing here
computes a result either; the rooms above do that.

The first part is the common style. A picture is a function under :func:`_styled` that starts
with :func:`_new_figure`; its colours come from :data:`COLOR` when the thing has a fixed one
(latent is blue in every notebook), from :data:`SERIES` otherwise.
"""

from __future__ import annotations

import functools
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import LinearSegmentedColormap, ListedColormap, PowerNorm, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from .batch import VerifyBatch
from .build import KernelReport
from .layout import KVLayout
from .schedule import Share
from .synthetic import HeapStep
from .tree import DraftTree

# -- style --------------------------------------------------------------------------------

#: Inches and dots per inch: 1,032 pixels, which a notebook shows scaled down to its column.
WIDTH, DPI = 8.6, 120

#: Colours with a meaning, from Okabe and Ito's palette for all kinds of colour vision.
COLOR = {
    "latent": "#0072B2",
    "rope": "#E69F00",
    "right": "#009E73",
    "wrong": "#D55E00",
    "ink": "#1f2328",
    "muted": "#646c76",
    "faint": "#c9ced6",
    "grid": "#e6e9ed",
    "paper": "#ffffff",
}

#: Colours of series without a meaning of their own, in this order.
SERIES = ("#0072B2", "#D55E00", "#009E73", "#AA4499", "#646c76", "#7a5c00", "#56B4E9")

#: One marker a series, so that lines stay apart in grey print too.
MARKERS = ("o", "s", "^", "D", "v", "P", "X")

STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so it is the same everywhere
    "font.size": 10,
    "text.color": COLOR["ink"],
    "axes.edgecolor": COLOR["muted"],
    "axes.labelcolor": COLOR["ink"],
    "axes.labelsize": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": False,
    "axes.axisbelow": True,
    "axes.prop_cycle": matplotlib.cycler(color=SERIES),
    "grid.color": COLOR["grid"],
    "grid.linewidth": 0.8,
    "xtick.color": COLOR["muted"],
    "ytick.color": COLOR["muted"],
    "xtick.labelcolor": COLOR["ink"],
    "ytick.labelcolor": COLOR["ink"],
    "xtick.labelsize": 9.5,
    "ytick.labelsize": 9.5,
    "lines.linewidth": 2,
    "lines.markersize": 5,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "figure.facecolor": COLOR["paper"],
    "axes.facecolor": COLOR["paper"],
    "savefig.facecolor": COLOR["paper"],
    "hatch.linewidth": 0.8,
}

P = ParamSpec("P")


def _styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Runs ``draw`` under :data:`STYLE` and lays the figure out there, so that ticks, which
    matplotlib makes late, have the style too and the caller's settings stay as they were."""

    @functools.wraps(draw)
    def styled(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with matplotlib.rc_context(STYLE):
            figure = draw(*args, **kwargs)
            figure.draw_without_rendering()
        return figure

    return styled


def _new_figure(
    height: float = 3.2, nrows: int = 1, ncols: int = 1, *, width: float = WIDTH, **subplots: Any
) -> tuple[Figure, Any]:
    """A figure that no pyplot knows of, and its axes (one, or an array as from ``subplots``).

    Args:
        height, width: inches.
        subplots: passed to ``Figure.subplots``: ``sharey``, ``width_ratios`` and so on.
    """
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    return figure, figure.subplots(nrows, ncols, **subplots)


def _grid(ax: Axes, axis: str = "y") -> None:
    ax.grid(True, axis=axis)
    ax.tick_params(axis=axis, length=0)


def _bare(ax: Axes) -> None:
    """Only the drawing: no frame, no ticks."""
    ax.set_xticks([])
    ax.set_yticks([])
    for spine in ax.spines.values():
        spine.set_visible(False)


def _note(ax: Axes, text: str, *, below: float = 0.0) -> None:
    """A line of small print under an axes: what the numbers are and where they come from.
    ``below`` is the distance from the axes in points, past tick labels and axis label."""
    ax.annotate(text, (0, 0), xycoords="axes fraction", xytext=(0, -below),
                textcoords="offset points", ha="left", va="top", fontsize=8.5,
                color=COLOR["muted"])


def _label_ends(
    ax: Axes, labels: Iterable[tuple[float, float, str, str]], *, dx: float = 6, size: float = 9.5
) -> None:
    """Names lines where they end, instead of in a legend. Call it after the axis limits and
    scales are set.

    Args:
        labels: ``(x, y, text, colour)`` of each line's last point; texts that would overlap
            are pushed apart vertically.
        dx: points between the line's end and its name.
    """
    labels = list(labels)
    if not labels:
        return
    figure = ax.get_figure()
    points = figure.get_figheight() * 72 * ax.get_position().height
    gap = size * 1.3 / points
    to_axes = ax.transData + ax.transAxes.inverted()
    at = [to_axes.transform((x, y)) for x, y, _, _ in labels]
    order = sorted(range(len(labels)), key=lambda i: at[i][1])
    heights: list[float] = []
    for i in order:
        heights.append(max(at[i][1], heights[-1] + gap) if heights else at[i][1])
    # Pushed up beyond the top: slide the whole stack down as far as it needs.
    for k in range(len(heights) - 1, -1, -1):
        limit = 1.02 if k == len(heights) - 1 else heights[k + 1] - gap
        heights[k] = min(heights[k], limit)
    for i, y in zip(order, heights, strict=True):
        ax.annotate(labels[i][2], (at[i][0], y), xycoords="axes fraction", xytext=(dx, 0),
                    textcoords="offset points", va="center", ha="left", fontsize=size,
                    color=labels[i][3], annotation_clip=False)


def bytes_text(count: float) -> str:
    """A number of bytes for reading: ``1,152 B``, ``70.3 kB``, ``33.6 MB`` (1 kB = 1,000 B)."""
    if abs(count) < 10_000:
        return f"{count:,.0f} B"
    for unit in ("kB", "MB", "GB"):
        count /= 1000
        if abs(count) < 999.5:
            return f"{count:.3g} {unit}"
    return f"{count / 1000:.3g} TB"


def _tint(color: str, strength: float) -> tuple[float, float, float]:
    """``color`` mixed with white; 1 is the colour itself, 0 is white."""
    return tuple(1 - strength * (1 - channel) for channel in to_rgb(color))


#: Probabilities, from pale to dark; the pale end is still visible on white.
PROBABILITY = LinearSegmentedColormap.from_list(
    "probability", [_tint(COLOR["latent"], 0.12), COLOR["latent"], "#00304d"]
)


def _text_on(color: Any) -> str:
    """Ink or white, whichever can be read on ``color``."""
    r, g, b = to_rgb(color)
    return COLOR["ink"] if 0.299 * r + 0.587 * g + 0.114 * b > 0.52 else "white"


# -- the row and its two orders -------------------------------------------------------------


@_styled
def cache_bars(sizes: Mapping[str, float], *, title: str = "", note: str = "") -> Figure:
    """Bytes in the cache for one token, a bar each, with how many times the smallest it is."""
    figure, ax = _new_figure(0.55 + 0.42 * len(sizes) + (0.3 if note else 0))
    smallest = min(sizes.values())
    for y, size in enumerate(sizes.values()):
        least = size == smallest
        ax.barh(y, size, height=0.62, color=COLOR["latent"] if least else COLOR["faint"])
        times = "" if least else f"   {size / smallest:.3g}×"
        ax.annotate(bytes_text(size) + times, (size, y), xytext=(6, 0),
                    textcoords="offset points", va="center",
                    fontweight="bold" if least else "normal")
    ax.set_yticks(range(len(sizes)), list(sizes))
    ax.invert_yaxis()
    ax.tick_params(axis="y", length=0)
    ax.set_xticks([])
    for side in ("bottom", "left"):
        ax.spines[side].set_visible(False)
    ax.set_xlim(0, max(sizes.values()) * 1.24)
    ax.set_title(title)
    if note:
        _note(ax, note, below=4)
    return figure


def _row_bar(ax: Axes, layout: KVLayout, y: float, height: float = 0.5) -> None:
    """One row to scale: parts as boxes, element offsets above, byte offsets below."""
    for segment in layout.segments:
        color = COLOR[segment.name]
        ax.add_patch(Rectangle((segment.start, y), segment.size, height, facecolor=color,
                               edgecolor="white", linewidth=1.5))
        wide = segment.size > layout.row_dim / 4
        name = f"{segment.name}   {segment.size} elements" if wide else (
            f"{segment.name}\n{segment.size}")
        ax.text((segment.start + segment.stop) / 2, y + height / 2, name, ha="center",
                va="center", color=_text_on(color), fontsize=11 if wide else 9.5)
    for at in (0, layout.segments[0].stop, layout.row_dim):
        ax.text(at, y + height + 0.06, f"{at}", ha="center", va="bottom", fontsize=9)
        ax.plot([at, at], [y + height, y + height + 0.05], color=COLOR["muted"], linewidth=0.8)
        if layout.dtype is not None:
            ax.text(at, y - 0.07, bytes_text(at * layout.itemsize), ha="center", va="top",
                    fontsize=9, color=COLOR["muted"])
            ax.plot([at, at], [y - 0.05, y], color=COLOR["muted"], linewidth=0.8)


@_styled
def row_ruler(layouts: Sequence[KVLayout], names: Sequence[str] | None = None) -> Figure:
    """Cache rows drawn to scale, one under the other. Offsets are in elements above a row and,
    for layouts with a dtype, in bytes below it."""
    names = names or [layout.order for layout in layouts]
    figure, ax = _new_figure(0.35 + 1.25 * len(layouts))
    widest = max(layout.row_dim for layout in layouts)
    step = 1.35
    for i, (layout, name) in enumerate(zip(layouts, names, strict=True)):
        y = -i * step
        _row_bar(ax, layout, y)
        ax.text(0, y + 0.86, name, fontweight="bold", fontsize=10.5, ha="left", va="bottom")
        kind = "" if layout.dtype is None else str(layout.dtype).removeprefix("torch.")
        unit = "above: elements" + (f"   below: bytes ({kind})" if kind else "")
        ax.text(widest, y + 0.86, "" if i else unit, fontsize=8.5, ha="right", va="bottom",
                color=COLOR["muted"])
    ax.set_xlim(-0.03 * widest, 1.03 * widest)
    ax.set_ylim(-(len(layouts) - 1) * step - 0.35, 1.15)
    _bare(ax)
    return figure


@_styled
def wrong_window(layout: KVLayout) -> Figure:
    """A row of ``layout``, and what a reader who believes in the other order takes from it."""
    figure, ax = _new_figure(2.55)
    ax.text(0, 1.68, f"Stored {layout.order}, read as {layout.swapped.order}: the value",
            fontweight="bold", fontsize=11, va="bottom")
    _row_bar(ax, layout, 0.75)
    window, latent = layout.swapped.latent_slice, layout.latent_slice
    shared = (max(window.start, latent.start), min(window.stop, latent.stop))
    alien = ((shared[1], window.stop) if window.stop > latent.stop
             else (window.start, shared[0]))
    missed = ((latent.start, shared[0]) if latent.start < window.start
              else (shared[1], latent.stop))
    y, height = 0.0, 0.34
    for (start, stop), part, hatch in ((shared, "latent", None), (alien, "rope", "///")):
        ax.add_patch(Rectangle((start, y), stop - start, height, facecolor=_tint(COLOR[part], 0.35),
                               edgecolor=COLOR["wrong"], linewidth=1.4, hatch=hatch))
    ax.add_patch(Rectangle((missed[0], y), missed[1] - missed[0], height, facecolor="none",
                           edgecolor=COLOR["muted"], linewidth=1, linestyle=(0, (3, 3))))
    shift = abs(window.start - latent.start)
    middle = y + height / 2
    ax.text(sum(shared) / 2, middle, f"{shared[1] - shared[0]} latent values, each {shift} places "
            "from where it belongs", ha="center", va="center", fontsize=10)
    for (start, stop), text in ((alien, "rope values\ntaken for latent"),
                                (missed, "latent values\nnever read")):
        ax.text((start + stop) / 2, y - 0.06, f"{stop - start} {text}", ha="center", va="top",
                fontsize=9, linespacing=1.1)
    ax.set_xlim(-0.05 * layout.row_dim, 1.05 * layout.row_dim)
    ax.set_ylim(-0.52, 1.95)
    _bare(ax)
    return figure


@_styled
def agreement(
    first: torch.Tensor, second: torch.Tensor, labels: tuple[str, str], *, epsilon: float
) -> Figure:
    """Two computations of the same numbers: one against the other, and how far apart they are.

    Args:
        epsilon: spacing of the floating-point numbers at 1, drawn as a line to compare with.
    """
    a, b = (np.asarray(t.double().cpu()).reshape(-1) for t in (first, second))
    figure, (left, right) = _new_figure(2.9, 1, 2, width_ratios=(1, 1.5))
    limit = 1.08 * max(abs(a).max(), abs(b).max())
    left.plot([-limit, limit], [-limit, limit], color=COLOR["faint"], linewidth=1)
    left.plot(a, b, ".", color=COLOR["latent"], markersize=3, alpha=0.6)
    left.set(xlim=(-limit, limit), ylim=(-limit, limit), xlabel=labels[0], ylabel=labels[1],
             title="Every output value")
    left.set_aspect("equal")
    difference = np.abs(a - b)
    exact = int((difference == 0).sum())
    found = difference[difference > 0]
    if found.size:
        low = math.floor(np.log10(found.min()) * 2) / 2
        high = max(math.ceil(np.log10(found.max())), math.log10(epsilon) + 0.5)
        right.hist(found, bins=np.logspace(low, high, 40), color=COLOR["latent"])
        right.set_xscale("log")
        right.axvline(epsilon, color=COLOR["wrong"], linewidth=1.5)
        right.annotate(f"spacing of float64\nat 1: {epsilon:.2g}",
                       (epsilon, 0.97), xycoords=("data", "axes fraction"), xytext=(6, 0),
                       textcoords="offset points", ha="left", va="top", fontsize=9,
                       color=COLOR["wrong"])
        right.set_xlim(10**low, 10 ** (high + 0.4))
        right.set_ylim(top=1.2 * right.get_ylim()[1])  # the notes above stay clear of the bars
    right.set(xlabel="absolute difference", ylabel="output values", title="How far apart")
    if exact:
        right.annotate(f"{exact} more are equal to the last bit", (0, 1.0),
                       xycoords="axes fraction", xytext=(4, -2), textcoords="offset points",
                       fontsize=8.5, color=COLOR["muted"], va="top")
    _grid(right)
    return figure


#: How the cases of ``synthetic.MISREADINGS`` are written in pictures.
CASE_TEXT = {
    "right": "right order",
    "value": "value from the wrong slice",
    "scores": "query in the wrong order",
    "both": "both wrong",
}
CASE_COLOR = {"right": COLOR["right"], "value": COLOR["wrong"], "scores": SERIES[3],
              "both": COLOR["latent"]}


@_styled
def misreadings(outputs: Mapping[str, torch.Tensor], errors: Mapping[str, float]) -> Figure:
    """What each misreading gives, to the eye and to a norm: the distribution of the output's
    values with the right one in outline behind, and the relative error.

    Args:
        outputs, errors: by the names of ``synthetic.MISREADINGS``, as
            ``synthetic.misreadings`` returns them.
    """
    figure, (left, right) = _new_figure(3.5, 1, 2, sharey=True, width_ratios=(2.1, 1))
    values = {name: np.asarray(out.double().cpu()).reshape(-1) for name, out in outputs.items()}
    finite = np.concatenate([v[np.isfinite(v)] for v in values.values()])
    limit = max(float(np.quantile(np.abs(finite), 0.998)), 1e-12)
    edges = np.linspace(-limit, limit, 61)
    counts = {name: np.histogram(v, edges)[0].astype(float) for name, v in values.items()}
    top = max(c.max() for c in counts.values())
    centers = (edges[1:] + edges[:-1]) / 2
    for y, name in enumerate(reversed(list(outputs))):
        color = CASE_COLOR[name]
        left.fill_between(centers, y, y + 0.8 * counts[name] / top, color=_tint(color, 0.55),
                          edgecolor=color, linewidth=1.2)
        left.plot(centers, y + 0.8 * counts["right"] / top, color=COLOR["ink"], linewidth=0.9,
                  linestyle=(0, (2, 2)))
        lost = int((~np.isfinite(values[name])).sum())
        text = f"std {values[name].std():.2f}\n" + (f"{lost} NaN or inf" if lost else "no NaN")
        left.annotate(text, (0.99, y + 0.42), xycoords=("axes fraction", "data"), ha="right",
                      va="center", fontsize=9, linespacing=1.2)
        error = errors[name]
        right.barh(y + 0.4, error, height=0.5, color=color)
        right.annotate(f"{error:.2f}" if error else "0", (error, y + 0.4), xytext=(5, 0),
                       textcoords="offset points", va="center", fontweight="bold")
    left.set_yticks([i + 0.4 for i in range(len(outputs))],
                    [CASE_TEXT[n] for n in reversed(list(outputs))])
    left.tick_params(axis="y", length=0)
    right.tick_params(axis="y", length=0)
    left.set(xlim=(-limit, limit * 1.25), ylim=(-0.05, len(outputs)), xlabel="output value",
             title="Distribution of the outputs (dotted: the right one)")
    ticks = left.get_xticks()
    left.set_xticks(ticks[np.abs(ticks) <= limit])
    right.set(xlim=(0, max(1.8, 1.2 * max(errors.values()))), title="Relative error",
              xlabel="‖output − right‖ / ‖right‖")
    right.axvline(1, color=COLOR["muted"], linewidth=0.8, linestyle=(0, (2, 2)))
    for ax in (left, right):
        ax.spines["left"].set_visible(False)
    return figure


@_styled
def misreading_curves(
    sharpness: Sequence[float], errors: Mapping[str, Mapping[str, Sequence[float]]]
) -> Figure:
    """Relative error of each misreading against how sharp attention is; a panel for each entry
    of ``errors``, whose key is the panel's title."""
    figure, axes = _new_figure(3.2, 1, len(errors), sharey=True)
    axes = np.atleast_1d(axes)
    top = max(max(line) for panel in errors.values() for line in panel.values())
    for ax, (title, panel) in zip(axes, errors.items(), strict=True):
        for (name, line), marker in zip(panel.items(), MARKERS, strict=False):
            ax.plot(sharpness, line, color=CASE_COLOR[name], marker=marker)
        ax.axhline(1, color=COLOR["muted"], linewidth=0.8, linestyle=(0, (2, 2)))
        ax.set(title=title, xlabel="standard deviation of the logits", ylim=(0, 1.12 * top),
               xlim=(min(sharpness), max(sharpness)))
        _grid(ax)
    axes[0].set_ylabel("relative error")
    figure.draw_without_rendering()
    _label_ends(axes[-1], [(sharpness[-1], line[-1], CASE_TEXT[name], CASE_COLOR[name])
                           for name, line in list(errors.values())[-1].items()])
    return figure


@_styled
def shifted(
    right: torch.Tensor, wrong: torch.Tensor, shift: int, *, channels: int = 160
) -> Figure:
    """One head's output, right above and misread below, as strips of coloured values.

    Args:
        right, wrong: ``[V]``; the first ``channels`` values of each are shown.
        shift: channels by which ``wrong`` is expected to lie to the left; slanted lines join
            the values that should then be equal.
    """
    a, b = (np.asarray(t.double().cpu()).reshape(-1)[:channels] for t in (right, wrong))
    figure, ax = _new_figure(1.9)
    limit = float(np.quantile(np.abs(a), 0.98)) or 1.0
    for values, y in ((a, 1.0), (b, 0.0)):
        ax.imshow(values[None], aspect="auto", extent=(0, channels, y, y + 0.42), cmap="PuOr",
                  vmin=-limit, vmax=limit, interpolation="nearest")
    for at in range(shift, channels + 1, 16):
        ax.plot([at, at - shift], [0.98, 0.44], color=COLOR["muted"], linewidth=0.8)
    for text, y in (("right", 1.21), ("misread", 0.21)):
        ax.text(-0.012 * channels, y, text, ha="right", va="center")
    for at in range(0, channels + 1, 32):
        ax.text(at, -0.06, str(at), ha="center", va="top", fontsize=9)
    ax.text(channels / 2, -0.42, "output channel of head 0", ha="center", va="center")
    ax.set(xlim=(-0.1 * channels, 1.01 * channels), ylim=(-0.55, 1.45))
    _bare(ax)
    return figure


# -- draft trees --------------------------------------------------------------------------


def _spread(tree: DraftTree) -> np.ndarray:
    """Horizontal places of the nodes: leaves at equal distances, parents above their middle."""
    x = np.zeros(len(tree))
    next_leaf = 0
    stack: list[tuple[int, bool]] = [(0, False)]
    while stack:
        node, done = stack.pop()
        kids = tree.children[node]
        if not kids:
            x[node] = next_leaf
            next_leaf += 1
        elif done:
            x[node] = (x[kids[0]] + x[kids[-1]]) / 2
        else:
            stack.append((node, True))
            stack.extend((kid, False) for kid in reversed(kids))
    return x


_PROBABILITY_NORM = PowerNorm(0.5, 0, 1)


def _draw_tree(ax: Axes, tree: DraftTree, *, size: float, numbers: bool,
               path: Sequence[int] = ()) -> Any:
    """Draws ``tree`` and returns the artist that a colour bar can be made of."""
    x, y = _spread(tree), tree.depths
    on_path = set(path)
    edges = [[(x[p], y[p]), (x[i], y[i])] for i, p in enumerate(tree.parents) if p >= 0]
    bold = [i in on_path and p in on_path for i, p in enumerate(tree.parents) if p >= 0]
    ax.add_collection(LineCollection(
        edges, colors=[COLOR["wrong"] if b else COLOR["faint"] for b in bold],
        linewidths=[2.2 if b else 1 for b in bold], zorder=1))
    if tree.log_probs is None:
        shade = np.full(len(tree), 0.25)
    else:
        shade = np.exp(tree.log_probs)
    dots = ax.scatter(x, y, s=size, c=shade, cmap=PROBABILITY, norm=_PROBABILITY_NORM, zorder=2,
                      linewidths=[1.8 if i in on_path else 0.6 for i in range(len(tree))],
                      edgecolors=[COLOR["wrong"] if i in on_path else COLOR["latent"]
                                  for i in range(len(tree))])
    if numbers:
        for i in range(len(tree)):
            ax.text(x[i], y[i], str(i), ha="center", va="center_baseline", fontsize=8, zorder=3,
                    color=_text_on(PROBABILITY(_PROBABILITY_NORM(shade[i]))[:3]))
    margin = max(0.6, 0.04 * x.max())
    ax.set_xlim(x.min() - margin, x.max() + margin)
    ax.set_ylim(max(tree.depth, 1) + 0.55, -0.55)
    ax.set_xticks([])
    ax.set_yticks(range(0, tree.depth + 1, max(1, -(-tree.depth // 16))))
    ax.tick_params(axis="y", length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)
    return dots


def _node_size(tree: DraftTree, width: float) -> tuple[float, bool]:
    """Marker area and whether numbers fit, for a tree drawn ``width`` inches wide."""
    space = 72 * width / max(len(tree.leaves), 1)
    diameter = min(17.0, max(2.5, 0.8 * space))
    return diameter**2, diameter > 13


@_styled
def tree(one: DraftTree, *, title: str = "", path: Sequence[int] = ()) -> Figure:
    """A draft tree, its root on top.

    Args:
        path: nodes to mark, with the edges between them.
    """
    figure, ax = _new_figure(max(1.6, 0.55 * one.depth + 1.2))
    size, numbers = _node_size(one, 7)
    dots = _draw_tree(ax, one, size=size, numbers=numbers, path=path)
    ax.set_ylabel("depth")
    ax.set_title(title)
    if one.log_probs is not None:
        _probability_bar(figure, dots, ax)
    return figure


def _probability_bar(figure: Figure, dots: Any, axes: Any) -> None:
    bar = figure.colorbar(dots, ax=axes, shrink=0.85, aspect=18, pad=0.02,
                          ticks=[0, 0.01, 0.1, 0.25, 0.5, 1])
    bar.ax.set_yticklabels(["0", "0.01", "0.1", "0.25", "0.5", "1"])
    bar.set_label("probability of the path")
    bar.outline.set_visible(False)


@_styled
def forest(trees: Mapping[str, DraftTree]) -> Figure:
    """Trees side by side on one depth scale, each with its expected acceptance length."""
    deepest = max(t.depth for t in trees.values())
    widths = [max(1.5, len(t.leaves) ** 0.5) for t in trees.values()]
    figure, axes = _new_figure(0.38 * deepest + 1.5, 1, len(trees), width_ratios=widths)
    axes = np.atleast_1d(axes)
    for ax, (name, one), share in zip(axes, trees.items(), widths, strict=True):
        size, _ = _node_size(one, 6.5 * share / sum(widths))
        dots = _draw_tree(ax, one, size=min(size, 100), numbers=False)
        ax.set_ylim(deepest + 0.5, -0.5)
        ax.set_yticks(range(deepest + 1))
        ax.set_title(name, loc="center", fontsize=10.5)
        if ax is not axes[0]:
            ax.set_yticklabels([])
        length = "" if one.log_probs is None else f"\n{one.acceptance_length:.2f} tokens a step"
        ax.set_xlabel(f"{len(one)} nodes{length}", labelpad=8)
    axes[0].set_ylabel("depth")
    if all(t.log_probs is not None for t in trees.values()):
        _probability_bar(figure, dots, list(axes))
    return figure


_MASK_COLORS = ListedColormap([_tint(COLOR["faint"], 0.25), _tint(COLOR["faint"], 0.75),
                               COLOR["latent"], "#00304d"])


def _draw_mask(ax: Axes, mask: np.ndarray) -> None:
    n = len(mask)
    kind = np.where(np.tri(n, dtype=bool), 1, 0)
    kind[mask] = 2
    kind[np.eye(n, dtype=bool) & mask] = 3
    ax.imshow(kind, cmap=_MASK_COLORS, vmin=0, vmax=3, interpolation="nearest")
    if n <= 48:
        for edge in np.arange(n + 1) - 0.5:
            ax.axhline(edge, color="white", linewidth=0.8)
            ax.axvline(edge, color="white", linewidth=0.8)
    step = 1 if n <= 20 else 2 ** math.ceil(math.log2(n / 16))
    ax.set_xticks(range(0, n, step))
    ax.set_yticks(range(0, n, step))
    ax.tick_params(length=0, labelsize=8.5)
    ax.xaxis.tick_top()
    ax.xaxis.set_label_position("top")
    for spine in ax.spines.values():
        spine.set_visible(False)


@_styled
def tree_and_mask(one: DraftTree, *, title: str = "", path: Sequence[int] = ()) -> Figure:
    """A tree, its ancestor mask, and, up to 32 nodes, the mask's words."""
    words = len(one) <= 32
    figure, (left, right) = _new_figure(3.9, 1, 2, width_ratios=(1.15, 1))
    size, numbers = _node_size(one, 3.6)
    _draw_tree(left, one, size=size, numbers=numbers, path=path)
    left.set_ylabel("depth")
    left.set_title(title)
    mask = one.ancestor_mask
    _draw_mask(right, mask)
    right.set(xlabel="may attend to node j", ylabel="node i")
    if words:
        step = 1 if len(one) <= 20 else 2
        for i, (word,) in enumerate(one.packed_mask):
            if i % step == 0:
                right.text(len(one) - 0.2, i, f"0x{word:08x}", va="center", ha="left",
                           fontsize=8, family="DejaVu Sans Mono",
                           color=COLOR["wrong"] if i in path else COLOR["ink"])
    return figure


@_styled
def heap(steps: Sequence[HeapStep]) -> Figure:
    """DDTree's heap at each pop: what waits (hollow), what is popped (filled), and the
    acceptance length that results."""
    figure, (top, bottom) = _new_figure(4.3, 2, 1, sharex=True, height_ratios=(2.6, 1))
    deepest = max(len(step.popped[0]) for step in steps)
    shade = {d: PROBABILITY(0.25 + 0.75 * d / deepest) for d in range(1, deepest + 1)}
    for i, step in enumerate(steps, start=1):
        path, probability = step.popped
        others = [p for other, p in step.waiting.items() if other != path]
        top.plot([i] * len(others), others, "o", markerfacecolor="white",
                 markeredgecolor=COLOR["muted"], markeredgewidth=0.9, markersize=5)
        top.plot(i, probability, "o", color=shade[len(path)], markersize=9)
        text = ("" if max(path) < 10 else ".").join(map(str, path))
        top.annotate(text, (i, probability), xytext=(0, 8), textcoords="offset points",
                     ha="center", va="bottom", fontsize=9, family="DejaVu Sans Mono")
    top.set_yscale("log")
    low = min(p for step in steps for p in step.waiting.values())
    top.set(ylabel="probability of the path", ylim=(low * 0.7, 1.6),
            title="Each step pops the most probable path that waits (label: its ranks)")
    ticks = [t for t in (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1) if t >= low * 0.7]
    top.set_yticks(ticks, [f"{t:g}" for t in ticks])
    top.minorticks_off()
    lengths = 1 + np.cumsum([step.popped[1] for step in steps])
    places = range(1, len(steps) + 1)
    bottom.bar(places, lengths, color=_tint(COLOR["right"], 0.5), width=0.72)
    for i, length in zip(places, lengths, strict=True):
        bottom.annotate(f"{length:.2f}", (i, length), xytext=(0, 2), textcoords="offset points",
                        ha="center", va="bottom", fontsize=8.5)
    bottom.set(xlabel="pop", ylabel="tokens a step", xticks=list(places),
               ylim=(0, 1.25 * lengths[-1]), xlim=(0.4, len(steps) + 0.6))
    _grid(top)
    bottom.tick_params(axis="x", length=0)
    return figure


@_styled
def acceptance_curves(
    nodes: Sequence[int], lengths: Mapping[str, Sequence[float]], *, limit: float | None = None,
    note: str = "", ylabel: str = "expected tokens a step",
) -> Figure:
    """Acceptance length against the number of nodes, a line for each family.

    Args:
        limit: a length that no tree can exceed, drawn as a line.
        ylabel: says whether the lengths are expected or measured.
    """
    figure, ax = _new_figure(3.6)
    # The first line lies on top where lines coincide.
    for i, (name, line) in enumerate(lengths.items()):
        ax.plot(nodes, line, color=SERIES[i % len(SERIES)], marker=MARKERS[i % len(MARKERS)],
                label=name, zorder=4 - 0.1 * i)
    ax.set_xscale("log", base=2)
    ax.set_xticks(nodes, [str(n) for n in nodes])
    ax.minorticks_off()
    top = max(max(line) for line in lengths.values())
    if limit is not None:
        ax.axhline(limit, color=COLOR["muted"], linewidth=0.8, linestyle=(0, (2, 2)))
        ax.annotate(f"block of {limit:g}: no step yields more", (nodes[0], limit), xytext=(8, 4),
                    textcoords="offset points", fontsize=9, color=COLOR["muted"])
        top = max(top, limit)
    ax.set(xlabel="nodes in the tree, the root included", ylabel=ylabel,
           xlim=(nodes[0], nodes[-1]), ylim=(0.8, top * 1.08))
    _grid(ax)
    if note:
        _note(ax, note, below=36)
    figure.draw_without_rendering()
    _label_ends(ax, [(nodes[-1], line[-1], name, color)
                     for (name, line), color in zip(lengths.items(), SERIES, strict=False)])
    return figure


# -- batches ------------------------------------------------------------------------------


def _boxes(ax: Axes, y: float, texts: Sequence[str], colors: Sequence[Any], *, x: float = 0,
           hatches: Sequence[str | None] | None = None, width: float = 1) -> None:
    for i, (text, color) in enumerate(zip(texts, colors, strict=True)):
        ax.add_patch(Rectangle((x + i * width, y), width, 0.8, facecolor=color, edgecolor="white",
                               linewidth=1.2, hatch=hatches[i] if hatches else None))
        ax.text(x + (i + 0.5) * width, y + 0.38, text, ha="center", va="center", fontsize=8.5,
                color=_text_on(color))


@_styled
def batch_strips(batch: VerifyBatch, pool_slots: int, *, per_line: int = 24) -> Figure:
    """A small batch: where its tokens lie in the pool, and the arrays that say so.

    In the pool, each request has a colour; numbers are positions in its sequence, and hatched
    cells are draft tokens. Pages are set apart by gaps.
    """
    size = batch.page_size
    hue = [_tint(c, 0.55) for c in (COLOR["latent"], COLOR["rope"], COLOR["right"], SERIES[3],
                                    SERIES[4], SERIES[1])]
    color = [hue[b % len(hue)] for b in range(batch.batch_size)]
    empty = _tint(COLOR["faint"], 0.35)
    owner: dict[int, tuple[int, int, bool]] = {}
    qo, kv = batch.qo_indptr.tolist(), batch.kv_indptr.tolist()
    lens, pages = batch.kv_lens.tolist(), batch.kv_indices.tolist()
    for b in range(batch.batch_size):
        for position, slot in enumerate(batch.prefix_slots(b).tolist()):
            owner[slot] = (b, position, False)
        if batch.draft_slots is not None:
            depths = batch.draft_mask(b).sum(1).tolist()
            for slot, depth in zip(batch.draft_slots[qo[b]:qo[b + 1]].tolist(), depths,
                                   strict=True):
                owner[slot] = (b, lens[b] + depth - 1, True)

    per_line = max(size, per_line // size * size)
    lines = -(-pool_slots // per_line)
    arrays: list[tuple[str, list[str], list[Any]]] = [
        ("kv_lens", [str(n) for n in lens], color),
        ("qo_indptr", [str(n) for n in qo], [*color, empty]),
        ("kv_indptr", [str(n) for n in kv], [*color, empty]),
        ("kv_indices", [str(n) for n in pages[: kv[-1]]],
         [color[b] for b in range(batch.batch_size) for _ in range(kv[b + 1] - kv[b])]),
    ]
    tokens = [b for b in range(batch.batch_size) for _ in range(qo[b + 1] - qo[b])]
    if batch.draft_slots is not None:
        arrays.append(("draft_slots", [str(n) for n in batch.draft_slots.tolist()[: qo[-1]]],
                       [color[b] for b in tokens]))
    if batch.mask_bits.shape[1] == 1:
        arrays.append(("mask_bits (hex)", [f"{word & 0xffffffff:x}" for (word,) in
                                     batch.mask_bits.tolist()[: qo[-1]]],
                       [color[b] for b in tokens]))
    longest = max(per_line + 0.3 * (per_line / size - 1), *(len(a[1]) for a in arrays))
    rows = lines * 1.15 + 1.0 + len(arrays)
    figure, ax = _new_figure(0.31 * rows + 0.3)
    y = 0.0
    left = -0.15 * longest
    for line in range(lines):
        for cell in range(line * per_line, min((line + 1) * per_line, pool_slots)):
            place = cell - line * per_line
            x = place + 0.3 * (place // size) if size > 1 else place
            b, position, draft = owner.get(cell, (-1, 0, False))
            _boxes(ax, y, ["" if b < 0 else str(position)], [empty if b < 0 else color[b]], x=x,
                   hatches=["////" if draft else None])
        name = "pool" if line == 0 else ""
        ax.text(left, y + 0.4, name, va="center", ha="left", fontweight="bold")
        first = f"page {line * per_line // size}" if size > 1 else f"slot {line * per_line}"
        ax.text(-0.25, y + 0.4, first, va="center", ha="right", fontsize=8.5,
                color=COLOR["muted"])
        y -= 1.15
    y -= 0.25
    ax.text(left, y + 0.55, "arrays", va="center", ha="left", fontweight="bold")
    for b in range(batch.batch_size):
        _boxes(ax, y + 0.12, [f"request {b}"], [color[b]], x=b * 3.6, width=3.4)
    ax.text(batch.batch_size * 3.6 + 0.2, y + 0.52, "pool: position in the request's sequence; "
            "hatched: draft token", va="center", ha="left", fontsize=8.5, color=COLOR["muted"])
    for name, texts, colors in arrays:
        y -= 1.0
        ax.text(-0.25, y + 0.4, name, va="center", ha="right", fontsize=9,
                family="DejaVu Sans Mono")
        _boxes(ax, y, texts, colors)
    ax.set(xlim=(left, longest + 0.2), ylim=(y - 0.1, 1.0))
    _bare(ax)
    return figure


@_styled
def mask_bytes(
    nodes: Sequence[int], sizes: Mapping[str, Sequence[float]], *,
    marks: Sequence[tuple[float, float]] = (), title: str = "",
) -> Figure:
    """Bytes of one request's mask against its nodes, a line for each way to store it.

    Args:
        marks: points ``(nodes, bytes)`` to name with their size.
    """
    figure, ax = _new_figure(3.6)
    for (name, line), color, marker in zip(sizes.items(), SERIES, MARKERS, strict=False):
        ax.plot(nodes, line, color=color, marker=marker, label=name)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(nodes, [str(n) for n in nodes])
    decades = [10.0**k for k in range(0, 10, 2)]
    ax.set_yticks(decades, [bytes_text(d) for d in decades])
    ax.minorticks_off()
    low = min(min(line) for line in sizes.values())
    high = max(max(line) for line in sizes.values())
    ax.set(xlabel="nodes in the tree", ylabel="bytes of one request's mask",
           xlim=(nodes[0], nodes[-1]), ylim=(low / 2, high * 3), title=title)
    for x, size in marks:
        ax.plot(x, size, "o", markersize=9, markerfacecolor="none",
                markeredgecolor=COLOR["ink"], markeredgewidth=1.2)
        ax.annotate(f"{x:g} nodes: {bytes_text(size)}", (x, size), xytext=(-8, 7),
                    textcoords="offset points", ha="right", va="bottom", fontsize=9)
    _grid(ax)
    figure.draw_without_rendering()
    _label_ends(ax, [(nodes[-1], line[-1], name, color)
                     for (name, line), color in zip(sizes.items(), SERIES, strict=False)])
    return figure


# -- the workbook -------------------------------------------------------------------------


@_styled
def marks(
    rows: Mapping[str, Mapping[str, str]], *, columns: Sequence[str], title: str = "",
    note: str = "",
) -> Figure:
    """A table of marks: which rows have which columns.

    Args:
        rows: for each row its columns, with how: ``"yes"`` (a filled dot), ``"part"`` (a ring)
            or ``"no"`` (a cross); a column that a row does not name stays empty.
        columns: in order.
    """
    longest = max(len(c) for c in columns)
    figure, ax = _new_figure(0.7 + 0.36 * len(rows) + (0.2 if longest > 12 else 0)
                             + (0.25 if title else 0) + (0.3 if note else 0))
    look = {"yes": ("o", COLOR["right"], COLOR["right"]), "part": ("o", "white", COLOR["right"]),
            "no": ("x", COLOR["wrong"], COLOR["wrong"])}
    for y, marked in enumerate(rows.values()):
        if y % 2 == 0:
            ax.axhspan(y - 0.5, y + 0.5, color=_tint(COLOR["faint"], 0.25), linewidth=0)
        for x, column in enumerate(columns):
            if how := marked.get(column):
                marker, face, edge = look[how]
                ax.plot(x, y, marker, markersize=9 if marker == "o" else 7,
                        markerfacecolor=face, markeredgecolor=edge, markeredgewidth=2)
    ax.set_yticks(range(len(rows)), list(rows))
    ax.set_xticks(range(len(columns)), list(columns))
    ax.xaxis.tick_top()
    ax.tick_params(length=0)
    ax.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(rows) - 0.5, -0.5))
    for spine in ax.spines.values():
        spine.set_visible(False)
    ax.set_title(title)
    if note:
        _note(ax, note, below=6)
    return figure


# -- the kernel ---------------------------------------------------------------------------

#: Regions of a block's shared memory, in a fixed order of colours.
_REGION_COLORS = (COLOR["latent"], COLOR["rope"], COLOR["right"], SERIES[3], SERIES[5],
                  SERIES[6], SERIES[4])


def _limit_line(ax: Axes, limit: float, text: str) -> None:
    """A vertical line that values must stay left of, named on top."""
    ax.axvline(limit, color=COLOR["wrong"], linewidth=1.5)
    ax.annotate(text, (limit, 1), xycoords=("data", "axes fraction"), xytext=(0, 4),
                textcoords="offset points", ha="right", va="bottom", fontsize=9,
                color=COLOR["wrong"])


@_styled
def smem_budget(
    shapes: Mapping[str, Mapping[str, int]], limit: int, *, title: str = ""
) -> Figure:
    """What a block's shared memory is spent on, a stacked bar for each tile shape.

    Args:
        shapes: for each tile shape the bytes of its regions, in order.
        limit: bytes that a block may have.
    """
    names = list(dict.fromkeys(name for parts in shapes.values() for name in parts))
    color = dict(zip(names, _REGION_COLORS, strict=False))
    figure, ax = _new_figure(1.35 + 0.52 * len(shapes))
    shown: dict[str, Any] = {}
    for y, parts in enumerate(shapes.values()):
        left = 0
        for name, size in parts.items():
            if not size:
                continue
            bar = ax.barh(y, size, left=left, height=0.6, color=color[name], edgecolor="white",
                          linewidth=0.6)
            # Slivers would only draw their white edges.
            if size < limit / 300:
                bar[0].set_edgecolor(color[name])
            else:
                shown.setdefault(name, bar)
            if size > limit / 8:
                ax.text(left + size / 2, y, f"{name}  {size:,} B", ha="center", va="center",
                        color=_text_on(color[name]), fontsize=9.5)
            elif size > limit / 25:
                ax.text(left + size / 2, y, f"{size:,}", ha="center", va="center",
                        color=_text_on(color[name]), fontsize=8)
            left += size
        ax.annotate(f"{left:,} B\n{limit - left:,} to spare", (limit, y), xytext=(8, 0),
                    textcoords="offset points", va="center", fontsize=9, linespacing=1.25)
    ax.set_yticks(range(len(shapes)), list(shapes))
    ax.invert_yaxis()
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.set_xlim(0, limit * 1.16)
    ticks = range(0, limit + 1, 16384)
    ax.set_xticks(ticks, [f"{t // 1024}" for t in ticks])
    ax.set_xlabel("KiB of shared memory in a block")
    _limit_line(ax, limit, f"limit of sm_120: {limit:,} B")
    ax.set_title(title, pad=20)
    ax.legend(list(shown.values()), list(shown), loc="upper center",
              bbox_to_anchor=(0.5, -0.32), ncols=len(shown), handlelength=1,
              columnspacing=1.4)
    return figure


@_styled
def resources(
    reports: Sequence[KernelReport], *, smem_limit: int, register_limit: int, title: str = ""
) -> Figure:
    """Registers and shared memory of each kernel against what a target allows."""
    figure, (left, right) = _new_figure(0.95 + 0.36 * len(reports) + (0.3 if title else 0), 1, 2,
                                        sharey=True)
    for ax, values, limit, name, unit in (
            (left, [r.registers for r in reports], register_limit, "registers a thread", ""),
            (right, [r.smem_bytes for r in reports], smem_limit, "shared memory a block", " B")):
        for y, (value, report) in enumerate(zip(values, reports, strict=True)):
            over = value > limit or (ax is left and report.spill_bytes)
            color = COLOR["wrong"] if over else (
                COLOR["latent"] if report.kernel == "tree_verify" else COLOR["faint"])
            ax.barh(y, value, height=0.62, color=color)
            text = f"{value:,}{unit}" + (
                f", {report.spill_bytes} B spilled" if ax is left and report.spill_bytes else "")
            inside = value > 0.6 * limit
            ax.annotate(text, (value, y), xytext=(-6 if inside else 6, 0),
                        textcoords="offset points", va="center", ha="right" if inside else "left",
                        color=_text_on(color) if inside else COLOR["ink"], fontsize=9.5)
        _limit_line(ax, limit, f"limit: {limit:,}{unit}")
        ax.set_xlim(0, limit * 1.04)
        ax.set_xticks([])
        ax.set_xlabel(name)
        ax.tick_params(axis="y", length=0)
        for side in ("bottom", "left"):
            ax.spines[side].set_visible(False)
    left.set_yticks(range(len(reports)), [_short_name(r) for r in reports])
    left.invert_yaxis()
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    return figure


def _short_name(report: KernelReport) -> str:
    split = f", {report.split} warp{'s' if report.split > 1 else ''}" if report.split else ""
    return f"{report.kernel}, {report.dtype}, {report.rows} rows{split}"


@_styled
def instruction_mix(
    reports: Sequence[KernelReport], names: Mapping[str, str], *, title: str = ""
) -> Figure:
    """How many instructions of each kind stand in the machine code of each kernel.

    Args:
        reports: kernels to compare; a bar each in every group.
        names: SASS mnemonics and what they are, for the groups.
    """
    kinds = [k for k in names if any(k in r.sass for r in reports)]
    figure, ax = _new_figure(3.0)
    width = 0.8 / max(len(reports), 1)
    top = max((r.sass.get(k, 0) for r in reports for k in kinds), default=1) or 1
    for i, report in enumerate(reports):
        places = [x - 0.4 + (i + 0.5) * width for x in range(len(kinds))]
        counts = [report.sass.get(k, 0) for k in kinds]
        total = report.sass.get("total")
        ax.bar(places, counts, width=0.92 * width, color=SERIES[i % len(SERIES)],
               label=f"{report.rows} rows" + (f" ({total:,} in all)" if total else ""))
        for x, count in zip(places, counts, strict=True):
            ax.annotate(str(count), (x, count), xytext=(0, 2), textcoords="offset points",
                        ha="center", va="bottom", fontsize=8,
                        color=COLOR["ink"] if count else COLOR["muted"])
    ax.set_xticks(range(len(kinds)), [k + "\n" + textwrap.fill(names[k], 13) for k in kinds],
                  fontsize=8)
    ax.tick_params(axis="x", length=0)
    ax.set(ylim=(0, 1.25 * top), ylabel="instructions in the program",
           xlim=(-0.5, max(len(kinds), 1) - 0.5), title=title)
    ax.legend(loc="upper left", ncols=len(reports))
    _grid(ax)
    return figure


@_styled
def warp_roles(config: Mapping[str, int], layout: KVLayout, *, title: str = "") -> Figure:
    """One tile in shared memory, and which warps read which part of it: once as keys, for the
    scores, and once as values.

    Args:
        config: one tile shape's constants, as ``source.constants`` returns them.
        layout: order of the row.
    """
    tokens, rows = config["kTokens"], config["kTeamRows"]
    teams, warps = config["kTeams"], config["kTeamWarps"]
    parts = tokens // config["kTeamTokens"]  # of the tokens: one, or one for each team
    width = layout.row_dim
    figure, (top, bottom) = _new_figure(4.3, 2, 1)
    colors = (COLOR["right"], COLOR["rope"], SERIES[3], SERIES[6])

    def cell(ax: Axes, part: int, warp: int, x: float, w: float, base: str) -> None:
        color = _tint(base, 0.3 if part % 2 else 0.5)
        y, h = part * tokens / parts, tokens / parts
        ax.add_patch(Rectangle((x, y), w, h, facecolor=color, edgecolor="white", linewidth=1.5))
        own = [warp + warps * team for team in (range(teams) if parts == 1 else [part])]
        who = f"warp {own[0]}" if len(own) == 1 else "warps " + " and ".join(map(str, own))
        each = f"{rows} query rows" + ("" if len(own) == 1 else " each")
        ax.text(x + w / 2, y + h / 2, f"{who}\n{each}", ha="center", va="center", fontsize=9,
                color=_text_on(color), linespacing=1.3)

    latent, rope = layout.latent_slice, layout.rope_slice
    for part in range(parts):
        for warp in range(warps):
            cell(top, part, warp, warp * width / warps, width / warps, colors[warp % 4])
            step = layout.kv_lora_rank / warps
            cell(bottom, part, warp, latent.start + warp * step, step, COLOR["latent"])
    bottom.add_patch(Rectangle((rope.start, 0), rope.stop - rope.start, tokens, hatch="////",
                               facecolor="white", edgecolor=COLOR["faint"], linewidth=1.2))
    bottom.text((rope.start + rope.stop) / 2, tokens / 2, "not\nread", ha="center", va="center",
                fontsize=9, bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5})
    edges = sorted({0, layout.segments[0].stop, width})
    for ax, name in ((top, f"As keys, S = Q Kᵀ: all {width} values of a row"),
                     (bottom, f"As values, O += P V: the {layout.kv_lora_rank} of the latent")):
        ax.set(xlim=(-2, width + 2), ylim=(tokens, 0), title=name)
        ax.set_xticks(edges if ax is bottom else sorted({*edges, *(
            round(w * width / warps) for w in range(warps + 1))}))
        ax.set_yticks([0, tokens])
        ax.set_ylabel("cache rows")
        ax.tick_params(length=0)
        for spine in ax.spines.values():
            spine.set_visible(False)
    bottom.set_xlabel("element of the row")
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    return figure


_GROUP_COLORS = tuple(_tint(c, 0.6) for c in (
    COLOR["latent"], COLOR["rope"], COLOR["right"], SERIES[3], SERIES[6], SERIES[5]))


@_styled
def shares(
    tiles: Sequence[int], shared: Sequence[Share], *, names: Sequence[str] | None = None,
    title: str = "",
) -> Figure:
    """How the tiles of a batch are shared out: a bar for each request, a colour and a number
    for each work group. A share with a stripe below leaves a partial result; the stripe's shade
    is the slot that it goes to.

    Args:
        tiles: of each request.
        shared: as ``schedule.share_out`` returns it.
        names: of the requests.
    """
    names = names or [f"request {b}" for b in range(len(tiles))]
    figure, ax = _new_figure(1.25 + 0.42 * len(tiles))
    longest = max(max(tiles, default=1), 1)
    for share in shared:
        color = _GROUP_COLORS[share.group % len(_GROUP_COLORS)]
        ax.add_patch(Rectangle((share.begin, share.request - 0.36), share.tiles, 0.72,
                               facecolor=color, edgecolor="white", linewidth=1.5))
        if share.partial:
            ax.add_patch(Rectangle((share.begin, share.request + 0.2), share.tiles, 0.16,
                                   facecolor=COLOR["ink"] if share.slot else COLOR["muted"],
                                   edgecolor="white", linewidth=1.5))
        if share.tiles > longest / 45:
            ax.text(share.begin + share.tiles / 2, share.request - (0.08 if share.partial else 0),
                    str(share.group), ha="center", va="center_baseline", fontsize=9,
                    color=_text_on(color))
    for b, count in enumerate(tiles):
        pieces = [s for s in shared if s.request == b]
        merged = f"{len(pieces)} to merge" if len(pieces) > 1 else (
            "whole" if pieces else "no work")
        ax.annotate(f"{count} tile{'' if count == 1 else 's'}, {merged}", (count, b),
                    xytext=(8, 0), textcoords="offset points", va="center", fontsize=9)
    ax.set_yticks(range(len(tiles)), names)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.set(xlim=(0, longest * 1.25), ylim=(len(tiles) - 0.5, -0.5), title=title,
           xlabel="tile of the request")
    ax.set_xticks([t for t in ax.get_xticks() if 0 <= t <= longest])
    handles = [Rectangle((0, 0), 1, 1, facecolor=COLOR["muted"]),
               Rectangle((0, 0), 1, 1, facecolor=COLOR["ink"])]
    ax.legend(handles, ["partial result in the group's slot 0", "in its slot 1"],
              loc="upper right", bbox_to_anchor=(1, -0.12 - 0.25 / max(len(tiles), 1)), ncols=2,
              handlelength=1.4, handleheight=0.4, columnspacing=1.4)
    return figure


@_styled
def error_margins(
    worst: Mapping[str, float], tolerance: Mapping[str, float], names: Mapping[str, str], *,
    title: str = "", note: str = "",
) -> Figure:
    """The worst errors of a check, each against its tolerance.

    Args:
        worst, tolerance: by the same keys.
        names: keys and what they are called, in order.
    """
    figure, ax = _new_figure(0.75 + 0.45 * len(names) + (0.25 if title else 0)
                             + (0.3 if note else 0))
    finite = [v for v in worst.values() if 0 < v < math.inf]
    low = 10 ** math.floor(math.log10(min([*finite, *tolerance.values()])) - 0.3)
    high = max([*tolerance.values(), *finite])
    for y, key in enumerate(names):
        value, limit = worst[key], tolerance[key]
        good = value <= limit
        end = min(max(value, low), high)
        ax.plot([low, end], [y, y], color=COLOR["right"] if good else COLOR["wrong"],
                linewidth=9, solid_capstyle="butt")
        ax.plot([limit, limit], [y - 0.32, y + 0.32], color=COLOR["wrong"], linewidth=2)
        text = f"worst {value:.2g}, allowed {limit:.2g}" + ("" if good else ": failed")
        ax.annotate(text, (max(limit, end), y), xytext=(8, 0), textcoords="offset points",
                    va="center", fontsize=9.5)
    ax.set_xscale("log")
    ax.minorticks_off()
    ax.set_yticks(range(len(names)), list(names.values()))
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.set(xlim=(low, high * (high / low) ** 0.6), ylim=(len(names) - 0.5, -0.5),
           xlabel="error (logarithmic)", title=title)
    ax.set_xticks([10.0**k for k in range(round(math.log10(low)), math.ceil(math.log10(high)))])
    _grid(ax, "x")
    if note:
        _note(ax, note, below=36)
    return figure
