"""What ``scripts/record_graphs.py`` recorded, and pictures of it: records in, a matplotlib
``Figure`` out."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure

from .figures import COLOR, SERIES, _grid, _new_figure, _styled


def origin(record: Mapping) -> str:
    """Card, versions, commit and date, on one line."""
    return (f"{record['gpu']}, driver {record['driver']}, torch {record['torch']}, commit "
            f"{record['commit']}, {record['date']}")


@_styled
def eager_against_replay(record: Mapping) -> Figure:
    """Microseconds a call by shape: launched from Python, and replayed.

    Args:
        record: as :func:`load` returns it.
    """
    return _pairs(record, [("from Python", "default", "eager_us"),
                           ("graph replay", "default", "replay_us")],
                  "Time of a call, launched from Python and replayed")


@_styled
def invariant_cost(record: Mapping) -> Figure:
    """Microseconds a replayed call by shape, as default and batch-invariant."""
    return _pairs(record, [("default", "default", "replay_us"),
                           ("batch-invariant", "batch_invariant", "replay_us")],
                  "What the same bits in any batch cost")


def _pairs(record: Mapping, series: list[tuple[str, str, str]], title: str) -> Figure:
    rows = record["shapes"]
    figure, ax = _new_figure(1.6 + 0.42 * len(rows))
    values = [[row[mode][key] for _, mode, key in series] for row in rows]
    for y, (first, second) in enumerate(values):
        ax.plot([first, second], [y, y], color=COLOR["muted"], linewidth=1.5, zorder=1)
        ax.annotate(f"× {second / first:.2f}", (max(first, second), y), xytext=(10, 0),
                    textcoords="offset points", va="center", fontsize=9, color=COLOR["ink"])
    for i, (name, _, _) in enumerate(series):
        ax.scatter([v[i] for v in values], range(len(rows)), color=SERIES[i], marker="os"[i],
                   s=46, label=name, zorder=2)
    ax.set_yticks(range(len(rows)), [
        "{} × {} heads × {} nodes, {:,} tokens".format(*map(int, row["shape"].split(",")))
        for row in rows])
    ax.invert_yaxis()
    ax.set_xscale("log")
    low, high = (f(x for v in values for x in v) for f in (min, max))
    ax.set_xlim(low / 1.3, high * 1.9)
    ticks = [t * 10**e for e in range(7) for t in (1, 2, 5) if low / 1.3 < t * 10**e < high * 1.9]
    ax.set_xticks(ticks, [f"{t:,}" for t in ticks])
    ax.minorticks_off()
    ax.set_xlabel("microseconds a call; beside it, the second over the first")
    ax.set_title(title, loc="left", pad=26)
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2)
    _grid(ax, "x")
    figure.supxlabel(origin(record) + ".", x=0.01, ha="left", fontsize=8.5, color=COLOR["muted"])
    return figure
