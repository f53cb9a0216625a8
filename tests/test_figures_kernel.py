"""Do the pictures of the notebooks 00 and 03 show what they are given?"""

import math

import matplotlib
import matplotlib.pyplot
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from mla_kernels import figures, schedule
from mla_kernels.build import SASS_GROUPS, KernelReport
from mla_kernels.layout import KVLayout

LIMIT = 101_376
CONFIG = {"kTokens": 32, "kTeams": 2, "kTeamWarps": 4, "kTeamRows": 16, "kTeamTokens": 16}
PARTS = {"cache rows": 74_752, "scores S": 10_240, "probabilities P": 2_560, "queries Q": 0,
         "barriers": 64}
TILES = [37, 2, 0, 61, 12]
SHARES = schedule.share_out(TILES, 9)
ERRORS = {"out": 0.003, "row": 0.005, "lse": 4e-5}
ALLOWED = {"out": 0.005, "row": 0.02, "lse": 0.002}
NAMES = {"out": "a case", "row": "a single row", "lse": "log-sum-exp"}


def report(kernel="tree_verify", rows=64, split=None, **changes):
    values = {"registers": 255, "spill_bytes": 0, "stack_bytes": 0, "smem_bytes": 100_696,
              "sass": {**dict.fromkeys(SASS_GROUPS, 7), "total": 5_656}} | changes
    return KernelReport(kernel, "bf16", rows, split, "sm_120", **values)


REPORTS = [report(rows=16, registers=190, sass={**dict.fromkeys(SASS_GROUPS, 3), "total": 4_728}),
           report(), report("combine", split=1, registers=64, smem_bytes=32_768)]

DRAW = {
    "marks": lambda: figures.marks({"a": {"x": "yes", "y": "no"}, "b": {"y": "part"}, "c": {}},
                                   columns=["x", "y", "z\nand more"], title="t", note="n"),
    "smem_budget": lambda: figures.smem_budget({"32 rows": PARTS, "16 rows": {"cache rows": 9}},
                                               LIMIT, title="t"),
    "resources": lambda: figures.resources(REPORTS, smem_limit=LIMIT, register_limit=255),
    "resources with a title": lambda: figures.resources(
        [report(spill_bytes=88)], smem_limit=LIMIT, register_limit=255, title="t"),
    "instruction_mix": lambda: figures.instruction_mix(REPORTS, SASS_GROUPS, title="t"),
    "instruction_mix of nothing": lambda: figures.instruction_mix([report(sass={})], SASS_GROUPS),
    "warp_roles": lambda: figures.warp_roles(CONFIG, KVLayout.LATENT_FIRST, title="t"),
    "warp_roles of 64": lambda: figures.warp_roles(CONFIG | {"kTeamRows": 32, "kTeamTokens": 32},
                                                   KVLayout.ROPE_FIRST),
    "shares": lambda: figures.shares(TILES, SHARES, title="t"),
    "shares of one": lambda: figures.shares([1], schedule.share_out([1], 4)),
    "shares of many": lambda: figures.shares([500] * 12, schedule.share_out([500] * 12, 188)),
    "error_margins": lambda: figures.error_margins(ERRORS, ALLOWED, NAMES, title="t", note="n"),
    "error_margins failed": lambda: figures.error_margins(
        ERRORS | {"row": math.inf, "lse": 0.0}, ALLOWED, NAMES),
}


def texts(figure):
    return [t.get_text() for t in figure.findobj(matplotlib.text.Text) if t.get_text()]


@pytest.mark.parametrize("name", DRAW)
def test_a_figure_within_its_frame_and_nothing_left_behind(name):
    settings = dict(matplotlib.rcParams)
    figure = DRAW[name]()
    assert isinstance(figure, Figure) and figure.get_figwidth() == figures.WIDTH
    assert matplotlib.pyplot.get_fignums() == [] and dict(matplotlib.rcParams) == settings
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    extent = figure.get_tightbbox(canvas.get_renderer())
    slack = 0.03  # inches
    assert extent.x0 >= -slack and extent.x1 <= figure.get_figwidth() + slack
    assert extent.y0 >= -slack and extent.y1 <= figure.get_figheight() + slack
    for text in figure.findobj(matplotlib.text.Text):
        assert not text.get_text() or text.get_fontsize() >= 8, text.get_text()


def test_marks_stand_in_their_cells():
    (ax,) = DRAW["marks"]().axes
    places = {(int(line.get_xdata()[0]), int(line.get_ydata()[0])): line.get_marker()
              for line in ax.lines}
    assert places == {(0, 0): "o", (1, 0): "x", (1, 1): "o"}
    assert [t.get_text() for t in ax.get_yticklabels()] == ["a", "b", "c"]


def test_budget_bars_add_up_and_say_what_is_left():
    figure = DRAW["smem_budget"]()
    (ax,) = figure.axes
    ends = [p.get_x() + p.get_width() for p in ax.patches if round(p.get_y() + 0.3) == 0]
    assert max(ends) == sum(PARTS.values())
    assert f"{sum(PARTS.values()):,} B\n{LIMIT - sum(PARTS.values()):,} to spare" in texts(figure)
    assert "limit of sm_120: 101,376 B" in texts(figure)
    # What is too thin to see is not in the legend.
    assert [t.get_text() for t in ax.get_legend().get_texts()] == [
        "cache rows", "scores S", "probabilities P"]


def test_resources_show_numbers_and_mark_spills():
    shown = texts(DRAW["resources"]())
    assert {"190", "255", "64", "100,696 B", "32,768 B", "tree_verify, bf16, 16 rows",
            "combine, bf16, 64 rows, 1 warp", "limit: 255"} <= set(shown)
    figure = DRAW["resources with a title"]()
    assert "255, 88 B spilled" in texts(figure)
    wrong = matplotlib.colors.to_rgba(figures.COLOR["wrong"])
    assert [p.get_facecolor() == wrong for ax in figure.axes for p in ax.patches] == [True, False]


def test_instruction_bars_have_the_counts():
    figure = DRAW["instruction_mix"]()
    (ax,) = figure.axes
    assert [p.get_height() for p in ax.patches[: len(SASS_GROUPS)]] == [3] * len(SASS_GROUPS)
    assert "16 rows (4,728 in all)" in texts(figure)
    assert any(t.startswith("HMMA\ntensor-core") for t in texts(figure))


@pytest.mark.parametrize("tokens", [16, 32])
@pytest.mark.parametrize("layout", [KVLayout.LATENT_FIRST, KVLayout.ROPE_FIRST])
def test_warps_cover_the_tile_once_as_keys_and_the_latent_once_as_values(tokens, layout):
    figure = figures.warp_roles(CONFIG | {"kTeamRows": 32, "kTeamTokens": tokens}, layout)
    top, bottom = figure.axes
    assert sum(p.get_width() * p.get_height() for p in top.patches) == 576 * 32
    assert len(top.patches) == 4 * 32 // tokens
    who = ([f"warp {w}\n32 query rows" for w in range(8)] if tokens == 16 else
           [f"warps {w} and {w + 4}\n32 query rows each" for w in range(4)])
    shown = [t for t in texts(figure) if t.startswith("warp")]
    assert sorted(shown) == sorted(2 * who)
    latent = [p for p in bottom.patches if not p.get_hatch()]
    (rope,) = [p for p in bottom.patches if p.get_hatch()]
    assert min(p.get_x() for p in latent) == layout.latent_slice.start
    assert sum(p.get_width() * p.get_height() for p in latent) == 512 * 32
    assert len(latent) == 4 * 32 // tokens
    assert (rope.get_x(), rope.get_width()) == (layout.rope_slice.start, 64)


def test_shares_are_drawn_where_they_are():
    figure = DRAW["shares"]()
    (ax,) = figure.axes
    bars = [p for p in ax.patches if p.get_height() > 0.5]
    assert sorted((round(p.get_y() + 0.36), p.get_x(), p.get_width()) for p in bars) == sorted(
        (s.request, s.begin, s.tiles) for s in SHARES)
    stripes = [p for p in ax.patches if p.get_height() < 0.5]
    assert len(stripes) == sum(s.partial for s in SHARES)
    assert {"37 tiles, 3 to merge", "0 tiles, no work", "2 tiles, whole"} <= set(texts(figure))


def test_error_bars_end_at_the_error_and_failures_are_marked():
    figure = DRAW["error_margins"]()
    (ax,) = figure.axes
    assert "worst 0.003, allowed 0.005" in texts(figure)
    assert [line.get_xdata()[-1] for line in ax.lines[::2]] == list(ERRORS.values())
    assert sum("failed" in t for t in texts(DRAW["error_margins failed"]())) == 1
