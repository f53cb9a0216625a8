"""Pictures of the labs: data in, a matplotlib ``Figure`` out, in the style of
:mod:`mla_kernels.figures`."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
from IPython.display import Image
from matplotlib.figure import Figure

from ..figures import (
    COLOR,
    DPI,
    STYLE,
    WIDTH,
    _draw_mask,
    _draw_tree,
    _grid,
    _new_figure,
    _node_size,
    _note,
    _styled,
    _tint,
    bytes_text,
)
from ..tree import DraftTree


def png(figure: Figure) -> Image:
    """A figure as a picture to display, drawn once: notebooks draw a ``Figure`` twice, to trim
    its margins, and :func:`mla_kernels.figures._styled` once more, to lay it out."""
    data = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(data, format="png")
    return Image(data.getvalue(), format="png")


@matplotlib.rc_context(STYLE)
def tree_overview(one: DraftTree, masks: Mapping[str, int | None], *, title: str = "") -> Figure:
    """A tree, its nodes per depth, its ancestor mask, and what the mask costs.

    Args:
        masks: bytes of the mask by format; None where a format cannot hold this tree.
    """
    # Placed by hand: a layout that measures every text would take most of the time of a redraw.
    figure = Figure(figsize=(WIDTH, 5.6), dpi=DPI)
    left = figure.add_axes((0.055, 0.43, 0.36, 0.5))
    middle = figure.add_axes((0.425, 0.43, 0.085, 0.5))
    bar = figure.add_axes((0.535, 0.45, 0.013, 0.36))
    right = figure.add_axes((0.665, 0.42, 0.33, 0.49))
    bottom = figure.add_axes((0.27, 0.02, 0.62, 0.29))
    # As wide as its room, and no larger than a chain's is high.
    size, numbers = _node_size(one, 3.0)
    highest = 72 * 2.6 / (one.depth + 1)
    dots = _draw_tree(left, one, size=min(size, highest**2), numbers=numbers and highest > 13)
    left.set_ylabel("depth")
    left.yaxis.set_label_coords(-0.09, 0.5)
    left.set_title(title)
    counts = one.nodes_per_depth
    color = _tint(COLOR["latent"], 0.6)
    if len(counts) > 24:
        middle.stairs(counts, np.arange(len(counts) + 1) - 0.5, orientation="horizontal",
                      fill=True, color=color)
    else:
        middle.barh(range(len(counts)), counts, height=0.6, color=color)
        for depth, count in enumerate(counts):
            middle.annotate(str(count), (count, depth), xytext=(3, 0),
                            textcoords="offset points", va="center", fontsize=8.5)
    middle.set(ylim=left.get_ylim(), xlim=(0, 1.35 * max(counts)), xticks=[], yticks=[],
               xlabel="nodes per depth")
    for side in ("bottom", "left"):
        middle.spines[side].set_visible(False)
    if one.log_probs is not None:
        figure.colorbar(dots, cax=bar, ticks=[0, 0.01, 0.1, 0.25, 0.5, 1])
        bar.set_yticklabels(["0", "0.01", "0.1", "0.25", "0.5", "1"])
        bar.set_title("path's\nprobability", fontsize=9, fontweight="normal", loc="center", pad=6)
        bar.spines["outline"].set_visible(False)
    else:
        bar.remove()
    _draw_mask(right, one.ancestor_mask)
    step = 1 if len(one) <= 8 else 2 ** math.ceil(math.log2(len(one) / 8))
    right.set(xticks=range(0, len(one), step), yticks=range(0, len(one), step))
    right.set(xlabel="may attend to node j", ylabel="node i")

    known = [size for size in masks.values() if size is not None]
    low = min(known) / 4
    for y, size in enumerate(masks.values()):
        if size is None:
            bottom.text(low, y, "  not for this many nodes", va="center", fontsize=9,
                        color=COLOR["muted"])
            continue
        least = size == min(known)
        bottom.barh(y, size - low, left=low, height=0.62,
                    color=COLOR["latent"] if least else COLOR["faint"])
        bottom.annotate(bytes_text(size), (size, y), xytext=(6, 0), textcoords="offset points",
                        va="center", fontsize=9, fontweight="bold" if least else "normal")
    bottom.set_xscale("log")
    bottom.set_xlim(low, max(known) * (max(known) / low) ** 0.12)
    bottom.set_yticks(range(len(masks)), list(masks))
    bottom.invert_yaxis()
    bottom.tick_params(axis="y", length=0)
    bottom.set_xticks([])
    bottom.minorticks_off()
    for side in ("bottom", "left"):
        bottom.spines[side].set_visible(False)
    bottom.set_title("Bytes of the mask of one request (logarithmic)")
    return figure


@_styled
def budget(
    lines: Mapping[str, Sequence[tuple[int, float]]], plain: float, *, best: tuple[int, float],
    title: str = "", note: str = "",
) -> Figure:
    """Tokens a second against the node budget.

    Args:
        lines: for ``tree`` and ``chain`` the points (nodes, tokens a second).
        plain: tokens a second without speculation.
        best: the tree's best point, marked.
    """
    figure, ax = _new_figure(3.7)
    looks = {"tree": (COLOR["latent"], "-"), "chain": (COLOR["wrong"], (0, (5, 2)))}
    for name, points in lines.items():
        if points:
            color, dashes = looks[name]
            x, y = zip(*points, strict=True)
            ax.plot(x, y, color=color, linestyle=dashes, label=name,
                    marker="o" if len(points) < 12 else None)
    ax.axhline(plain, color=COLOR["muted"], linewidth=1.2, linestyle=(0, (1, 2)),
               label="no speculation")
    ax.plot(*best, "o", markersize=10, markerfacecolor="none", markeredgecolor=COLOR["ink"],
            markeredgewidth=1.6)
    ax.annotate(f"best tree: {best[0]} nodes, {best[1]:,.0f}/s", best, xytext=(0, 11),
                textcoords="offset points", ha="center", fontsize=9)
    ax.set_xscale("log", base=2)
    high = max(n for points in lines.values() for n, _ in points)
    ticks = [2**k for k in range(1, 11) if 2**k <= high]
    ax.set_xticks(ticks, [str(t) for t in ticks])
    ax.minorticks_off()
    top = max([plain, *(y for points in lines.values() for _, y in points)])
    ax.set(xlabel="nodes, the root included", ylabel="expected tokens a second",
           ylim=(0, 1.2 * top), title=title)
    ax.legend(loc="lower right", ncols=3)
    _grid(ax)
    if note:
        _note(ax, note, below=38)
    return figure


@_styled
def variants(results: Mapping[str, Mapping[str, object]]) -> Figure:
    """Registers, spills and shared memory of built variants, the first the one to compare with;
    and times, where there are any."""
    kinds = ["registers", "spills, B", "shared memory, B"]
    kinds += sorted({k for r in results.values() for k in r if k.startswith("us, ")})
    figure, axes = _new_figure(1.1 + 0.4 * len(results), 1, len(kinds), sharey=True)
    for ax, kind in zip(axes, kinds, strict=True):
        values = [float(r.get(kind, 0) or 0) for r in results.values()]
        top = max([*values, 1.0])
        for y, value in enumerate(values):
            bad = kind == "spills, B" and value
            ax.barh(y, value, height=0.6, color=COLOR["wrong"] if bad else (
                COLOR["latent"] if y else COLOR["faint"]))
            ax.annotate(f"{value:,.4g}" if value < 1000 else f"{value:,.0f}", (value, y),
                        xytext=(4, 0), textcoords="offset points", va="center", fontsize=9)
        ax.set(xlim=(0, 1.5 * top), xticks=[], xlabel=kind)
        ax.tick_params(axis="y", length=0)
        for side in ("bottom", "left"):
            ax.spines[side].set_visible(False)
    axes[0].set_yticks(range(len(results)), [n.replace(": ", ":\n") for n in results])
    axes[0].invert_yaxis()
    return figure
