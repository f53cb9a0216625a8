"""Pictures of what holds the kernel: records of ``scripts/kernel_limits.py`` and
``scripts/profile_rows.py`` in, a matplotlib ``Figure`` out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from .figures import COLOR, SERIES, _grid, _new_figure, _styled, _text_on

#: Units of the card as a profile names them, and as a picture does.
UNITS = {"tensor_percent": "tensor\ncores", "shared_percent": "shared\nmemory",
         "issue_percent": "issue\nslots", "l2_percent": "L2", "dram_percent": "device\nmemory"}

#: Reasons to wait, in Nsight Compute's words, by what they mean here.
WAITS = {
    "the instruction before": ("wait",),
    "shared memory": ("short_scoreboard", "mio_throttle"),
    "device memory, L2": ("long_scoreboard", "lg_throttle"),
    "busy tensor cores": ("math_pipe_throttle",),
    "another warp": ("barrier", "membar", "sleeping"),
    "nothing: issued, or could be": ("selected", "not_selected", "dispatch_stall"),
    "instructions": ("no_instruction", "branch_resolving"),
}


def _where(figure: Figure, record: Mapping[str, Any], what: str) -> None:
    figure.supxlabel(f"{what} on {record['gpu']}, driver {record['driver']}, CUDA "
                     f"{record['cuda']}, commit {record['commit'][:7]}, {record['date']}.",
                     x=0.01, ha="left", fontsize=8.5, color=COLOR["muted"])


@_styled
def cost_of_rows(limits: Mapping[str, Any]) -> Figure:
    """Time against query rows, for every T and H of the sweep: a dot each. The grey line is
    proportional to the row tiles."""
    sweep = pd.DataFrame(limits["sweep"])
    rows = sweep["heads"] * sweep["nodes"]
    figure, ax = _new_figure(height=3.8)
    large = sweep["row_tiles"] >= 132
    a_tile = float(np.median(sweep["us"][large] / sweep["row_tiles"][large]))
    x = np.geomspace(64, rows.max())
    ax.plot(x, a_tile * x / 64, color=COLOR["muted"], lw=1, zorder=1)
    for color, (name, some) in zip(SERIES, {
            "up to 8 nodes": sweep["nodes"] <= 8,
            "9 to 64": (sweep["nodes"] > 8) & (sweep["nodes"] <= 64),
            "65 to 1,024": sweep["nodes"] > 64}.items(), strict=False):
        ax.scatter(rows[some], sweep["us"][some], s=16, color=color, label=name, zorder=2,
                   linewidths=0)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    _grid(ax, "both")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,g}"))
        axis.set_minor_formatter(NullFormatter())
    ax.set_xlabel("query rows: heads × nodes")
    ax.set_ylabel("microseconds")
    ax.legend(loc="upper left")
    ax.set_title(f"{limits['cache_rows']:,} cache rows, any number of heads and nodes",
                 loc="left")
    _where(figure, limits, "Measured")
    return figure


def _shape_name(text: str) -> str:
    requests, heads, nodes, context = map(int, text.split(","))
    return f"{requests} × {context // 1024}k, {heads} heads, {nodes} node{'s' * (nodes > 1)}"


@_styled
def busy_units(profiles: Mapping[str, Any]) -> Figure:
    """How much of the time each unit of the card was busy in the verify kernel, by shape."""
    rows = profiles["rows"]
    values = np.array([[row["kernels"][0][unit] for unit in UNITS] for row in rows])
    figure, ax = _new_figure(height=0.6 + 0.31 * len(rows))
    image = ax.imshow(values, cmap="Blues", vmin=0, vmax=100, aspect="auto")
    for (i, j), value in np.ndenumerate(values):
        ax.text(j, i, f"{value:.0f} %", ha="center", va="center",
                color=_text_on(image.cmap(image.norm(value))))
    ax.set_xticks(range(len(UNITS)), UNITS.values())
    ax.xaxis.tick_top()
    ax.set_yticks(range(len(rows)), [_shape_name(row["shape"]) for row in rows])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    _where(figure, profiles, "Counted by Nsight Compute")
    return figure


def waits(profiles: Mapping[str, Any]) -> pd.DataFrame:
    """What warps of the verify kernel waited for, in percent of their time, by shape."""
    table = {}
    for row in profiles["rows"]:
        found = row["kernels"][0]["waits_percent"]
        table[_shape_name(row["shape"])] = {
            name: round(sum(found.get(n, 0.0) for n in names), 1) for name, names in WAITS.items()}
    return pd.DataFrame.from_dict(table, orient="index")
