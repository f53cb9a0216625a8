"""Pictures of :mod:`mla_kernels.predict`: what is modelled is hatched or dashed, and says so.
And what a faster attention makes of a decode step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, NullFormatter

from .device import H200, RTX_5090, RTX_PRO_6000, Ceiling, attention_bytes, attention_flops
from .figures import (
    COLOR,
    SERIES,
    _grid,
    _label_ends,
    _new_figure,
    _styled,
    _text_on,
)
from .figures_speed import _counts, _origin, _shape_text
from .measurements import SHAPE, origin
from .predict import START, UNITS, Efficiency, ours, predict

#: Colours of what bounds a call.
BOUND = dict(zip((START, *UNITS.values()),
                 (COLOR["muted"], *SERIES[:4]), strict=True))

HATCH = "////"

#: Parts of a modelled call with their colours.
PARTS = {"start_us": ("start", COLOR["muted"]),
         "merge_us": ("queries, partials, merge", SERIES[2]),
         "prefix_us": ("tiles of the prefix", SERIES[0]),
         "draft_us": ("tiles of the draft", SERIES[1])}


def _modelled(figure: Figure, frame: pd.DataFrame) -> None:
    figure.supxlabel(f"Modelled, from rates of the card and a fit to the run below.\n"
                     f"{origin(frame)}.", x=0.01, ha="left", fontsize=8.5, color=COLOR["muted"])


@_styled
def held_out(table: pd.DataFrame, frame: pd.DataFrame, *, title: str = "") -> Figure:
    """Modelled over measured time, for shapes that the model had not seen.

    Args:
        table: of :func:`mla_kernels.predict.held_out`.
        frame: the run that it was made from, for the origin.
    """
    figure, ax = _new_figure(3.6)
    rows = table["num_heads"] * table["num_nodes"]
    for some, color, marker, label in (
            (rows <= 64, SERIES[0], "o", "up to 64 rows"),
            (rows > 64, SERIES[1], "s", "more rows")):
        ax.plot(table["latency_us"][some], 1 + table["error"][some], linestyle="", color=color,
                marker=marker, markerfacecolor="none", markeredgewidth=1.5, label=label)
    ax.axhline(1, color=COLOR["ink"], linewidth=1)
    ax.axhspan(0.9, 1.1, color=COLOR["grid"], zorder=0)
    ax.annotate("within 10 %", (1, 1.1), xycoords=("axes fraction", "data"), xytext=(-4, -4),
                textcoords="offset points", ha="right", va="top", color=COLOR["muted"],
                fontsize=9)
    worst = table["error"].abs().max()
    ax.set(xscale="log", ylim=(1 - 1.3 * max(worst, 0.15), 1 + 1.3 * max(worst, 0.15)),
           xlabel="measured time, µs", ylabel="modelled / measured",
           title=title or (f"{len(table)} held-out shapes: error {100 * worst:.0f} % at worst, "
                           f"{100 * table['error'].abs().median():.1f} % in the median"))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,g}"))
    _grid(ax, "both")
    ax.legend(loc="upper right")
    _origin(figure, frame)
    return figure


@_styled
def cards(frame: pd.DataFrame, shapes: Sequence[Sequence[int]], efficiency: Efficiency, *,
          title: str = "") -> Figure:
    """Our kernel on three cards: measured on the H200 (full bars), modelled for two of sm_120
    (hatched, in panels of their own). Colour: what the model says bounds the call. The tick in a
    bar is the card's floor, computed.

    Raises:
        ValueError: a shape that was not measured.
    """
    measured = ours(frame).set_index(SHAPE)["latency_us"]
    figure, axes = _new_figure(0.36 * len(shapes) + 2.1, 1, 3, sharey=True, sharex=True)
    seen: dict[str, None] = {}
    top = 0.0
    for ax, card in zip(axes, (H200, RTX_PRO_6000, RTX_5090), strict=True):
        for y, shape in enumerate(map(tuple, shapes)):
            if shape not in measured.index:
                raise ValueError(f"shape {shape} is not in this run")
            modelled = predict(shape, card, efficiency)
            time = measured.loc[shape] if card is H200 else modelled.total_us
            color = BOUND[modelled.bound]
            seen[modelled.bound] = None
            ax.barh(y, time, height=0.62, edgecolor=color, linewidth=1,
                    **({"color": color} if card is H200 else
                       {"facecolor": "white", "hatch": HATCH}))
            floor = 1e6 * card.floor(attention_flops(*shape), attention_bytes(*shape))
            ax.plot([floor] * 2, [y - 0.42, y + 0.42], color=COLOR["ink"], linewidth=2)
            ax.annotate(f"{time:,.0f}", (time, y), xytext=(4, 0), textcoords="offset points",
                        va="center", fontsize=8.5)
            top = max(top, time)
        ax.set_title(f"{card.name}\n{'measured' if card is H200 else 'modelled'}",
                     fontsize=9.5)
        ax.tick_params(axis="y", length=0)
        _grid(ax, "x")
    axes[0].set(xscale="log", xlim=(3, 2.6 * top), ylim=(len(shapes) - 0.4, -0.6))
    axes[0].set_yticks(range(len(shapes)), [_shape_text(s) for s in shapes], fontsize=8.5)
    axes[0].xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,g}"))
    axes[0].xaxis.set_minor_formatter(NullFormatter())
    axes[1].set_xlabel("time of a call, µs (log)")
    handles = [Patch(color=BOUND[b], label=b) for b in BOUND if b in seen]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles),
                  title="bound, says the model:", title_fontsize=9, fontsize=9)
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    _modelled(figure, frame)
    return figure


@_styled
def breakdown(frame: pd.DataFrame, shapes: Sequence[Sequence[int]], efficiency: Efficiency,
              card: Ceiling = H200, *, title: str = "") -> Figure:
    """What a modelled call spends where, in percent; :class:`mla_kernels.predict.Prediction` says
    how each part is derived. All hatched; on the H200 the mark is the measured time over the
    modelled one."""
    measured = ours(frame).set_index(SHAPE)["latency_us"]
    figure, ax = _new_figure(0.34 * len(shapes) + 1.7)
    for y, shape in enumerate(map(tuple, shapes)):
        modelled = predict(shape, card, efficiency)
        begin = 0.0
        for field, (_, color) in PARTS.items():
            width = 100 * getattr(modelled, field) / modelled.total_us
            ax.barh(y, width, left=begin, height=0.62, facecolor="white", edgecolor=color,
                    hatch=HATCH, linewidth=1)
            begin += width
        ax.annotate(f"{modelled.total_us:,.0f} µs", (1, y), xycoords=("axes fraction", "data"),
                    xytext=(4, 0), textcoords="offset points", va="center", fontsize=9)
        if card is H200 and shape in measured.index:
            ax.plot(100 * measured.loc[shape] / modelled.total_us, y, marker="d",
                    color=COLOR["ink"], linestyle="", markersize=7)
    ax.set_yticks(range(len(shapes)), [_shape_text(s) for s in shapes])
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.set(xlim=(0, 112 if card is H200 else 100), ylim=(len(shapes) - 0.4, -0.6), title=title,
           xlabel="share of the modelled time, %")
    _grid(ax, "x")
    handles = [Patch(facecolor="white", edgecolor=color, hatch=HATCH, label=text)
               for text, color in PARTS.values()]
    if card is H200:
        handles.append(ax.plot([], [], marker="d", color=COLOR["ink"], linestyle="",
                               label="measured")[0])
    ax.legend(handles=handles, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(handles),
              borderaxespad=0.2, fontsize=8.5)
    ax.set_title(ax.get_title(loc="left"), loc="left", pad=26)
    _modelled(figure, frame)
    return figure


@_styled
def heads_by_nodes(frame: pd.DataFrame, efficiency: Efficiency, card: Ceiling = H200, *,
                   context: int = 16384, heads: Sequence[int] = (4, 8, 16, 32, 64, 128),
                   nodes: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128, 256),
                   title: str = "") -> Figure:
    """Microseconds of a call of one request, heads down and nodes across: measured where this
    card was (plain, framed, bold), modelled elsewhere (hatched)."""
    rows = ours(frame)
    here = rows[(rows["gpu"] == card.name) & (rows["batch_size"] == 1)
                & (rows["context"] == context)]
    measured = here.set_index(["num_heads", "num_nodes"])["latency_us"]
    times = np.array([[measured.get((h, n), predict((1, h, n, context), card,
                                                    efficiency).total_us)
                       for n in nodes] for h in heads])
    figure, ax = _new_figure(4.2)
    image = ax.imshow(times, cmap="cividis_r", norm=LogNorm(times.min(), times.max()),
                      aspect="auto")
    for i, h in enumerate(heads):
        for j, n in enumerate(nodes):
            known = (h, n) in measured.index
            text = _text_on(image.cmap(image.norm(times[i, j])))
            if not known:
                ax.add_patch(Rectangle((j - 0.5, i - 0.5), 1, 1, fill=False, hatch="//",
                                       edgecolor=text, alpha=0.3, linewidth=0))
            else:
                ax.add_patch(Rectangle((j - 0.46, i - 0.46), 0.92, 0.92, fill=False,
                                       edgecolor=text, linewidth=1.5))
            ax.annotate(f"{times[i, j]:,.0f}", (j, i), ha="center", va="center", color=text,
                        fontsize=9.5, fontweight="bold" if known else "normal")
    ax.set_xticks(range(len(nodes)), nodes)
    ax.set_yticks(range(len(heads)), heads)
    ax.tick_params(length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)
    framed = "framed: measured; hatched: modelled" if len(measured) else "all modelled"
    ax.set(xlabel="nodes of the draft tree", ylabel="heads",
           title=title or f"{card.name}, one request × {context // 1024}k, µs ({framed})")
    _modelled(figure, frame)
    return figure


@_styled
def decode_step(factors: Sequence[float], share: float, *, title: str = "") -> Figure:
    """How many times faster a decode step gets when its attention does (Amdahl's law): a line
    for each factor, named with its value at one share. Computed; the share of attention is the
    reader's to measure.

    Args:
        factors: how many times faster attention becomes.
        share: attention's part of the step before, in 0 .. 0.95.

    Raises:
        ValueError: a factor that is not positive, or a share out of its range.
    """
    if any(f <= 0 for f in factors):
        raise ValueError(f"factors must be positive; got {list(factors)}")
    if not 0 <= share <= 0.95:
        raise ValueError(f"share must be in 0 .. 0.95; got {share}")
    figure, ax = _new_figure(3.8)
    x = np.linspace(0, 0.95, 200)
    ends = []
    for factor, color in zip([*factors, np.inf], [*SERIES[:len(factors)], COLOR["muted"]],
                             strict=True):
        y, at = 1 / (1 - x + x / factor), 1 / (1 - share + share / factor)
        ax.plot(100 * x, y, color=color, linestyle=(0, (6, 2)))
        ax.plot(100 * share, at, "o", color=color)
        name = f"{factor:.3g}× attention" if np.isfinite(factor) else "free attention"
        ends.append((95, y[-1], f"{name}: {at:.2f}×", color))
    ax.axvline(100 * share, color=COLOR["muted"], linewidth=1)
    ax.set(yscale="log", xlim=(0, 95), title=title or f"The step at {100 * share:.0f} % attention",
           xlabel="attention's share of the step before, %", ylabel="speed-up of the step")
    _counts(ax, "y", (1, 2, 5, 10, 20))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}×"))
    _grid(ax, "both")
    _label_ends(ax, ends)
    return figure
