"""Pictures of the small language model, in the style of :mod:`mla_kernels.figures`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from .figures import COLOR, _grid, _new_figure, _styled, acceptance_curves


@_styled
def right_and_wrong(orders: Mapping[str, Mapping[str, Mapping[str, Any]]], *,
                    title: str = "") -> Figure:
    """Bits a byte and tokens a step, for rows that are read in their own order and in the other.

    Args:
        orders: by the order in which rows are written, then ``"right"`` and ``"wrong"``:
            ``bits_per_byte`` and ``acceptance_length``.
    """
    figure, axes = _new_figure(2.9, 1, 2, sharey=True)
    names = [order.replace("_", " ") for order in orders]
    for ax, (key, label) in zip(axes, (("bits_per_byte", "bits a byte, less is better"),
                                       ("acceptance_length", "tokens a step, more is better")),
                                strict=True):
        for i, way in enumerate(("right", "wrong")):
            values = [ways[way][key] for ways in orders.values()]
            places = [j + 0.2 * (2 * i - 1) for j in range(len(values))]
            ax.barh(places, values, 0.36, color=COLOR[way], hatch="//" if i else None,
                    edgecolor="white", label=f"read in the {'other' if i else 'same'} order")
            for y, value in zip(places, values, strict=True):
                ax.annotate(f"{value:.2f}", (value, y), (4, 0), textcoords="offset points",
                            va="center", fontsize=9)
        ax.set_xlabel(label)
        ax.set_xlim(0, 1.15 * max(w[k][key] for w in orders.values() for k in w))
        _grid(ax, "x")
    axes[0].set_yticks(range(len(names)), [f"written\n{name}" for name in names])
    axes[0].invert_yaxis()
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2)
    if title:
        figure.suptitle(title, x=0.01, ha="left", weight="bold", fontsize=11)
    return figure


def acceptance(record: Mapping[str, Any], *, title: str = "") -> Figure:
    """Measured tokens a verify step against the nodes of the tree, a line for each family."""
    rows = record["acceptance"]
    families = list(dict.fromkeys(row["family"] for row in rows))[::-1]
    nodes = sorted({row["nodes"] for row in rows})
    lengths = {f: [next(r["acceptance_length"] for r in rows
                        if (r["family"], r["nodes"]) == (f, n)) for n in nodes] for f in families}
    figure = acceptance_curves(nodes, lengths, ylabel="tokens a step, measured",
                               limit=record["config"]["num_draft_heads"] + 1)
    if title:
        figure.axes[0].set_title(title)
    return figure
