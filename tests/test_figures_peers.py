"""Do the pictures of the peers show the recorded data, each kernel on its own kind of draft?"""

import dataclasses

import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from mla_kernels import figures_peers, figures_predict, figures_speed, measurements, predict
from mla_kernels.bench import PRESETS
from mla_kernels.device import H200, attention_bytes, attention_flops
from mla_kernels.workload import MODEL_HEADS

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
        if "wgmma" not in measurements.PEER_NAMES.get(who, ""):
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


def grid_run(run, times):
    """A run whose trees have these times, by provider and shape."""
    row = run[(run["provider"] == "cuda") & (run["status"] == "ok")].iloc[0].to_dict()
    return pd.DataFrame([row | dict(zip(measurements.SHAPE, shape, strict=True))
                         | {"provider": who, "latency_us": us, "tree": "3-ary"}
                         for (who, shape), us in times.items()])


def cells(figure):
    """Texts by panel's title, and the words of row and column."""
    found = {}
    for ax in figure.axes:
        rows = [t.get_text() for t in figure.axes[0].get_yticklabels()]
        columns = [t.get_text().replace("\n", " ") for t in ax.get_xticklabels()]
        for text in ax.texts:
            j, i = map(round, text.xy)
            found[ax.get_title(loc="left") or ax.get_title(), rows[i], columns[j]] = text
    return found


def test_the_best_of_the_others_over_ours(run):
    rng = np.random.default_rng()
    shapes = [dataclasses.astuple(s) for name in MODEL_HEADS for s in PRESETS[name]]
    whos = ("cuda", "sglang_extend", "prefix_suffix_fa2", "prefix_suffix_fa3")
    known = {(who, s): float(rng.uniform(20, 90)) for s in shapes for who in whos}
    frame = grid_run(run, known)
    for left_out in ((), ("prefix_suffix_fa3",)):
        rivals = [r for r in measurements.TREE_RIVALS if r not in left_out]
        found = cells(figures_peers.against_the_best(frame, rivals=rivals, title="t"))
        assert len(found) == len(set(shapes))
        for batch, heads, nodes, context in shapes:
            s = (batch, heads, nodes, context)
            ratio = min(known[w, s] for w in whos[1:] if w in rivals) / known["cuda", s]
            text = found[f"{nodes} nodes", str(heads), f"{batch} × {context // 1024}k"]
            assert text.get_text() == f"{ratio:.2f}"
            assert (text.get_fontweight() == "bold") == (ratio < 1)
    with pytest.raises(ValueError, match="none of the models' shapes"):
        figures_peers.against_the_best(grid_run(run, {("cuda", (7, 7, 7, 7)): 1.0}))


def recorded_parts():
    """What a profile and a run without prefixes would record."""
    rng = np.random.default_rng()
    profile = {"commit": "abc", "rows": [], "gpu": "G"}
    parts = {"commit": "abc", "rows": [], "gpu": "G", "date": "2026-01-02"}
    for s in SPINE:
        text = ",".join(map(str, s))
        whole = float(rng.uniform(20, 500))
        parts["rows"].append({"shape": text, "whole_us": whole,
                              "draft_us": whole * rng.uniform(0.1, 0.8)})
        profile["rows"].append({"shape": text, "kernels": [
            {"us": whole}, {"us": whole * rng.uniform(0.02, 0.5)}]})
    return parts, profile


def test_parts_of_a_call_add_up():
    parts, profile = recorded_parts()
    (ax,) = figures_peers.measured_parts(parts, profile).axes
    widths = [bar.get_width() for bar in ax.patches]
    lines = [n.get_xdata() for n in ax.lines if len(n.get_xdata())]
    for i, (row, kernels) in enumerate(zip(parts["rows"], profile["rows"], strict=True)):
        assert sum(widths[2 * i:2 * i + 2]) == pytest.approx(100)
        assert widths[2 * i] == pytest.approx(100 * row["draft_us"] / row["whole_us"])
        assert lines[i][1] - lines[i][0] == pytest.approx(
            100 * kernels["kernels"][1]["us"] / row["whole_us"])
    with pytest.raises(ValueError, match="was not profiled"):
        figures_peers.measured_parts(parts, profile | {"rows": profile["rows"][1:]})


def drawings(run):
    e = predict.calibrate(run)
    yield figures_peers.roofline(run, SPINE, title="t")
    yield figures_peers.beside_peers(run, SPINE, title="t")
    yield figures_peers.nodes_at_contexts(run, title="t")
    yield figures_peers.linear_cost(run)
    yield figures_peers.against_the_best(run, title="t")
    yield figures_peers.measured_parts(*recorded_parts(), title="t")
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
