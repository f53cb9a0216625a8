"""Do the pictures of the peers show the recorded data, each kernel on its own kind of draft?"""

import dataclasses

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from mla_kernels import figures_peers, figures_predict, figures_speed, measurements, predict
from mla_kernels.bench import PRESETS
from mla_kernels.device import H200, attention_bytes, attention_flops

SPINE = [dataclasses.astuple(s) for s in PRESETS["spine"]]


@pytest.fixture(scope="module")
def run():
    return measurements.latest("H200", tree=None)


def times(run, provider, tree):
    rows = run[(run["provider"] == provider) & (run["tree"] == tree) & (run["status"] == "ok")]
    return rows.set_index(measurements.SHAPE)["latency_us"]


def test_roofline_has_every_point_below_the_roof_it_belongs_to(run):
    (ax,) = figures_peers.roofline(run, SPINE).axes
    for who, (color, marker, tree) in figures_peers.WHO.items():
        (line,) = [n for n in ax.lines if n.get_marker() == marker and n.get_color() == color]
        known = times(run, who, tree)
        want = sorted((attention_flops(*s) / attention_bytes(*s),
                       attention_flops(*s) / known.loc[s] / 1e6) for s in SPINE if s in known)
        assert np.allclose(sorted(zip(*line.get_data(), strict=True)), want, rtol=1e-4)
        if "wgmma" not in measurements.PEER_NAMES.get(who, "") and who != "prefix_suffix":
            for x, y in want:
                assert y * 1e12 < min(x * H200.bandwidth, H200.tensor)
    with pytest.raises(ValueError, match="none of these shapes"):
        figures_peers.roofline(run, [(7, 7, 7, 1024)])


def test_multiples_compare_trees_with_trees_and_chains_with_chains(run):
    (ax,) = figures_peers.beside_peers(run, SPINE).axes
    for who, (color, marker, tree) in figures_peers.WHO.items():
        if who == "cuda":
            continue
        points = {round(float(n.get_ydata()[0])): float(n.get_xdata()[0]) for n in ax.lines
                  if n.get_marker() == marker and n.get_color() == color}
        theirs, mine = times(run, who, tree), times(run, "cuda", tree)
        want = {y: theirs.loc[s] / mine.loc[s] for y, s in enumerate(SPINE) if s in theirs}
        assert points == pytest.approx(want) and len(want) > 5
    with pytest.raises(ValueError, match="not in this run for cuda"):
        figures_peers.beside_peers(run, [(7, 7, 7, 1024)])


def test_chains_are_hollow(run):
    (ax,) = figures_peers.roofline(run, SPINE).axes
    for line in ax.lines:
        kinds = [tree for _, marker, tree in figures_peers.WHO.values()
                 if marker == line.get_marker()]
        if kinds:
            assert (line.get_markerfacecolor() == "white") == (kinds == ["chain"])


def test_nodes_turn_where_the_floors_do(run):
    figure = figures_peers.nodes_at_contexts(run, (4096, 65536))
    (ax,) = figure.axes
    solid = [n for n in ax.lines if n.get_linestyle() == "-"]
    assert len(solid) == 2
    rows = measurements.sweep(run, "num_nodes", "cuda", batch_size=1, num_heads=8, context=65536)
    assert list(solid[1].get_ydata()) == list(rows["latency_us"])
    (turn,) = [n.get_xdata()[0] for n in ax.lines if n.get_linestyle() == ":"]
    for nodes, memory in ((0.8 * turn, True), (1.25 * turn, False)):
        shape = (1, 8, nodes, 10**7)
        assert (attention_bytes(*shape) / H200.bandwidth
                > attention_flops(*shape) / H200.tensor) == memory
    with pytest.raises(ValueError, match="no measurements along num_nodes"):
        figures_peers.nodes_at_contexts(run, (777,))


def test_lines_fit_their_points(run):
    left, right = figures_peers.linear_cost(run).axes
    dots = [n for n in left.lines if n.get_linestyle() == "None"]
    lines = [n for n in left.lines if n.get_linestyle() == "-"]
    for points, line in zip(dots, lines, strict=True):
        assert np.allclose(points.get_ydata()[-1], line.get_ydata()[-1], rtol=0.03)
    rows = predict.ours(run)
    rows = rows[(rows["batch_size"] == 1) & (rows["context"] == 16384)]
    drawn = sum(len(n.get_xdata()) for n in right.lines if n.get_linestyle() == "None")
    assert drawn == len(rows[(rows["num_heads"] == 8) | rows["num_nodes"].isin([8, 64])])


def drawings(run):
    e = predict.calibrate(run)
    yield figures_peers.roofline(run, SPINE, title="t")
    yield figures_peers.beside_peers(run, SPINE, title="t")
    yield figures_peers.nodes_at_contexts(run, title="t")
    yield figures_peers.linear_cost(run)
    yield figures_speed.speedup_over_context(run, title="t")
    yield figures_predict.held_out(predict.held_out(run, batches=True), run)
    yield figures_predict.cards(run, SPINE, e, title="t")
    yield figures_predict.breakdown(run, SPINE, e, title="t")
    yield figures_predict.heads_by_nodes(run, e)
    yield figures_predict.decode_step([2, 30], 0.3)


def test_nothing_reaches_beyond_the_figure_and_text_can_be_read(run):
    for figure in drawings(run):
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        extent = figure.get_tightbbox(canvas.get_renderer())
        assert extent.x0 >= -0.05 and extent.x1 <= figure.get_figwidth() + 0.05
        assert extent.y0 >= -0.05 and extent.y1 <= figure.get_figheight() + 0.05
        for text in figure.findobj(Text):
            assert not text.get_text() or text.get_fontsize() >= 8, text.get_text()
        words = " ".join(t.get_text() for t in figure.findobj(Text))
        assert "µs" in words or "TFLOP/s" in words or "×" in words or "%" in words
