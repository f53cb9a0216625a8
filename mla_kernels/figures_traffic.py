"""A picture of what a call moves: a :class:`mla_kernels.traffic.Traffic` in, a matplotlib
``Figure`` out."""

from __future__ import annotations

from matplotlib.figure import Figure

from .figures import COLOR, SERIES, _grid, _new_figure, _styled
from .traffic import Traffic

#: What a function of the source does, for who has not read it.
PURPOSE = {
    "scores": "scores: K from shared memory, parts of S sent",
    "read_mail": "read_mail: parts of S received",
    "softmax": "softmax: P written",
    "accumulate": "accumulate: P and V from shared memory",
    "queries_to_fragments": "queries_to_fragments: Q to registers, once",
    "walk": "walk: what a block knows of its share",
    "store": "store: results, once",
}


@_styled
def where_it_goes(traffic: Traffic, *, least: float = 0.005) -> Figure:
    """Shared-memory wavefronts by function of the source, what bank conflicts and broadcasts add
    in another colour. Functions with less than the share ``least`` are left out."""
    table = traffic.by_function()
    table = table[table["wavefronts"] >= least * table["wavefronts"].sum()][::-1]
    figure, ax = _new_figure(height=0.9 + 0.32 * len(table))
    ax.barh(range(len(table)), table["least"], color=SERIES[0], label="needed")
    extra = table["wavefronts"] - table["least"]
    ax.barh(range(len(table)), extra, left=table["least"], color=SERIES[1],
            label="added by conflicts and broadcasts")
    whole = traffic.shared_wavefronts
    for i, value in enumerate(table["wavefronts"]):
        ax.annotate(f"{100 * value / whole:.0f} %", (value, i), xytext=(4, 0),
                    textcoords="offset points", va="center", color=COLOR["muted"])
    ax.set_yticks(range(len(table)), [name for name in table.index])
    ax.set_xlabel("wavefronts of shared memory")
    ax.margins(x=0.1)
    _grid(ax, "x")
    ax.legend(loc="lower right")
    ax.set_title(f"{traffic.shape}: {whole:,} wavefronts", loc="left")
    figure.supxlabel(
        f"Computed here: counted by the emulator, no GPU; {traffic.plan.rows} query rows a tile, "
        f"{traffic.plan.groups * traffic.plan.row_tiles} blocks.", x=0.01, ha="left",
        fontsize=8.5, color=COLOR["muted"])
    return figure
