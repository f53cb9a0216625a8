"""Pictures of evidence: findings and comparisons from :mod:`mla_kernels.evidence` in, a
matplotlib ``Figure`` out, in the style of :mod:`mla_kernels.figures`."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from .evidence.engines import EngineRecord
from .evidence.numeric import ROUNDINGS, Comparison
from .figures import COLOR, _grid, _new_figure, _styled, _text_on
from .layout import KVLayout


@_styled
def findings_ruler(records: Sequence[EngineRecord], layout: KVLayout) -> Figure:
    """The byte ruler, a row for each engine version, with the line of code that says it.

    Args:
        layout: widths and dtype of the rows; its order is not used.
    """
    figure, ax = _new_figure(1.05 + 0.5 * len(records))
    for y, record in enumerate(records):
        order = KVLayout(record.order, layout.kv_lora_rank, layout.qk_rope_head_dim)
        for part in order.segments:
            color = COLOR[part.name]
            ax.add_patch(Rectangle((part.start, y - 0.22), part.size, 0.4, facecolor=color,
                                   edgecolor="white", linewidth=1.2))
            ax.text((part.start + part.stop) / 2, y - 0.02, part.name, ha="center", va="center",
                    fontsize=9, color=_text_on(color))
        ax.text(0, y + 0.22, f"{record.how}: {record.place}", fontsize=8, va="top",
                color=COLOR["muted"])
    ax.set_yticks(range(len(records)), [f"{r.engine} {r.version}".replace(" in ", "\nin ")
                                        for r in records])
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(len(records) - 0.4, -0.5)
    at = sorted({0, layout.qk_rope_head_dim, layout.kv_lora_rank, layout.row_dim})
    ax.set_xlim(-2, layout.row_dim + 2)
    ax.set_xticks(at, [f"{v}" for v in at])
    ax.set_xlabel("element of the row")
    above = ax.secondary_xaxis("top")
    above.set_xticks(at, [f"{v * layout.itemsize:,}" for v in at])
    above.set_xlabel(f"byte, {str(layout.dtype).removeprefix('torch.')}")
    for side in ("left", "bottom"):
        ax.spines[side].set_visible(False)
    above.spines["top"].set_visible(False)
    return figure


@_styled
def hypotheses(comparison: Comparison, *, title: str = "", most: int = 12) -> Figure:
    """The error of each hypothesis, best first, against what rounding explains.

    Args:
        most: how many of the best to draw.
    """
    shown = comparison.errors[:most]
    fitting = comparison.fitting
    figure, ax = _new_figure(1.35 + 0.25 * len(shown))
    # An exact hypothesis has error 0, which a log axis doesn't have.
    floor = comparison.unit / 1000
    for y, (hypothesis, error) in enumerate(shown):
        color = COLOR["right" if hypothesis in fitting else "wrong"]
        ax.plot([floor, max(error, floor)], [y, y], color=color, linewidth=1.2, alpha=0.5)
        ax.plot(max(error, floor), y, "o" if hypothesis in fitting else "X", color=color,
                markersize=7)
    ax.axvspan(floor / 3, ROUNDINGS * comparison.unit, color=COLOR["grid"], zorder=0)
    ax.set_xscale("log")
    ax.set_xlim(floor / 2, max(3 * max(e for _, e in shown), 10 * comparison.unit))
    ax.set_yticks(range(len(shown)), [comparison.describe(h) for h, _ in shown], fontsize=8.5)
    ax.set_ylim(len(shown) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    _grid(ax, "x")
    ax.set_xlabel("relative error of the outputs; grey: rounding")
    marks = [Line2D([], [], linestyle="", marker=m, markersize=7, color=COLOR[c], label=text)
             for m, c, text in (("o", "right", "reproduces the outputs"),
                                ("X", "wrong", "does not"))]
    ax.legend(handles=marks, loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2)
    ax.set_title(title, pad=26)
    return figure
