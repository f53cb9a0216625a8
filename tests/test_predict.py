"""Does the model follow from its parts, hold on shapes it has not seen, and stay labelled?"""

import dataclasses
import json

import numpy as np
import pandas as pd
import pytest

from mla_kernels import cuda, figures_predict, measurements, predict
from mla_kernels.bench import PRESETS
from mla_kernels.device import (
    H200,
    RTX_5090,
    RTX_PRO_6000,
    Ceiling,
    attention_bytes,
    attention_flops,
)

SPINE = [dataclasses.astuple(s) for s in PRESETS["spine"]]


@pytest.fixture(scope="module")
def run():
    return measurements.latest("H200")


@pytest.fixture(scope="module")
def efficiency(run):
    return predict.calibrate(run)


@pytest.fixture(scope="module")
def table(run):
    return predict.held_out(run)


def some_shapes(count):
    rng = np.random.default_rng()
    return [(int(rng.integers(1, 33)), int(rng.choice([4, 8, 12, 16, 64, 128])),
             int(rng.integers(1, 257)), int(rng.integers(256, 65536))) for _ in range(count)]


def synthetic(run, truth, shapes):
    """A run whose times are the model's own."""
    row = run[run["provider"] == "cuda"].iloc[0]
    frame = pd.DataFrame([row] * len(shapes)).reset_index(drop=True)
    frame[measurements.SHAPE] = shapes
    return frame.assign(status="ok", tree="3-ary", latency_us=[
        predict.predict(s, H200, truth).total_us for s in shapes])


def test_calibration_finds_the_numbers_that_made_the_data(run):
    truth = predict.Efficiency(6.0, 0.08, 900.0, 0.4, 0.7)
    shapes = sorted(set(some_shapes(120)) | set(SPINE))
    found = predict.calibrate(synthetic(run, truth, shapes))
    for shape in some_shapes(20):
        want = predict.predict(shape, H200, truth).total_us
        assert predict.predict(shape, H200, found).total_us == pytest.approx(want, rel=0.03)
    held = predict.calibrate(synthetic(run, truth, shapes), serial=0.25)
    assert held.serial == pytest.approx(0.25)


@pytest.mark.parametrize("shape", [(8, 8, 8, 16384), (8, 8, 1, 16384)])
def test_a_call_by_hand(shape):
    """One wave, one row tile: written out again from the module's first lines."""
    e = predict.Efficiency(5.0, 0.1, 1000.0, 0.25, 0.8)
    launch = cuda.plan(8, 8, shape[2], 16384 + shape[2], 132)
    assert launch.row_tiles == 1 and launch.groups <= 132
    tiles = -(-8 * 513 // launch.groups)
    memory = 1e6 * 36_864 * launch.groups / 4.23e12 / 0.8
    tensor = 1e6 * 2 * launch.rows * 32 * 1088 * 132 / 637e12
    shared = 1e6 * predict.wavefronts()[launch.rows] / 1.98e9
    compute = 1e9 / 1.98e9 + max(tensor, shared) + 0.25 * min(tensor, shared)
    want = 5.0 + 0.1 * launch.rows + tiles * max(memory, compute)
    assert predict.predict(shape, H200, e).total_us == pytest.approx(want)


def test_wavefronts_are_the_profiles_own():
    recorded = json.loads(predict.PROFILE.read_text())
    counts = predict.wavefronts()
    assert set(counts) <= {16, 32, 64} and 64 in counts
    assert counts[16] < counts[32] < counts[64]
    # No shape of the profile has less traffic than the model gives it.
    for row in recorded["rows"]:
        batch, heads, nodes, context = map(int, row["shape"].split(","))
        launch = cuda.plan(heads, batch, nodes, nodes + context, recorded["sms"])
        tiles = batch * -(-(nodes + context) // 32) * launch.row_tiles
        # The launch assumed is the one profiled: 17 instructions of 4,096 flop a row and tile.
        assert row["kernels"][0]["tensor_instructions"] == pytest.approx(
            17 * launch.rows * tiles, rel=1e-3), row["shape"]
        assert row["kernels"][0]["shared_wavefronts"] >= 0.999 * counts[launch.rows] * tiles


def test_held_out_shapes_are_predicted(run, table):
    """The notebook and the README state these errors."""
    assert len(table) == len(predict.ours(run))
    assert table["error"].abs().median() < 0.05
    assert table["error"].abs().max() < 0.35
    assert np.allclose(table["error"], table["modelled_us"] / table["latency_us"] - 1)
    batches = predict.held_out(run, batches=True)
    assert (batches["batch_size"] > 1).all() and batches["error"].abs().max() < 0.25


def test_held_out_shapes_are_not_seen(run):
    """A shape's own time must not change what is predicted for it."""
    frame = run.copy()
    mine = frame.index[(frame["provider"] == "cuda") & (frame["status"] == "ok")]
    at = np.random.default_rng().choice(mine)
    shape = tuple(frame.loc[at, measurements.SHAPE])
    frame.loc[at, "latency_us"] *= 3
    before, after = (predict.held_out(f).set_index(measurements.SHAPE)["modelled_us"]
                     for f in (run, frame))
    assert after.loc[shape] == pytest.approx(before.loc[shape], rel=1e-6)
    assert not np.allclose(before, after, rtol=1e-4)


@pytest.mark.parametrize("card", [H200, RTX_PRO_6000, RTX_5090], ids=lambda c: c.name)
def test_no_prediction_beats_the_card(card, efficiency):
    for shape in [*SPINE, *some_shapes(60)]:
        modelled = predict.predict(shape, card, efficiency)
        floor = 1e6 * card.floor(attention_flops(*shape), attention_bytes(*shape))
        assert modelled.total_us > floor, shape
        assert modelled.bound in figures_predict.BOUND
        parts = [getattr(modelled, field) for field in figures_predict.PARTS]
        assert sum(parts) == pytest.approx(modelled.total_us) and min(parts) > 0


def test_bounds_turn_where_they_should(efficiency):
    assert predict.predict((8, 8, 1, 16384), RTX_PRO_6000, efficiency).bound == "device memory"
    assert predict.predict((8, 8, 64, 16384), RTX_5090, efficiency).bound == "tensor cores"
    assert predict.predict((1, 8, 1, 256), RTX_5090, efficiency).bound == "start and merge"


def test_refusals(run, efficiency):
    other = Ceiling("A card", "sm_120", 10, 1e12, 1e14, "made up")
    with pytest.raises(ValueError, match="card must be one of NVIDIA H200.*got A card"):
        predict.predict(SPINE[0], other, efficiency)
    few = run[run["provider"] == "cuda"].head(5)
    with pytest.raises(ValueError, match="at least 10 timed rows of our kernel; got 5"):
        predict.calibrate(few)
    with pytest.raises(ValueError, match="not in this run"):
        figures_predict.cards(run, [(7, 7, 7, 1024)], efficiency)
    with pytest.raises(ValueError, match="share must be in 0 .. 0.95; got 1.5"):
        figures_predict.decode_step([2], 1.5)
    with pytest.raises(ValueError, match="factors must be positive"):
        figures_predict.decode_step([0], 0.5)


# -- pictures -----------------------------------------------------------------------------


def test_modelled_bars_are_hatched_and_measured_ones_are_not(run, efficiency):
    figure = figures_predict.cards(run, SPINE, efficiency)
    measured, *modelled = figure.axes
    times = predict.ours(run).set_index(measurements.SHAPE)["latency_us"]
    assert [bar.get_width() for bar in measured.patches] == [times.loc[s] for s in SPINE]
    assert not any(bar.get_hatch() for bar in measured.patches)
    assert "measured" in measured.get_title(loc="left")
    for ax, card in zip(modelled, (RTX_PRO_6000, RTX_5090), strict=True):
        assert all(bar.get_hatch() for bar in ax.patches)
        assert [bar.get_width() for bar in ax.patches] == [
            predict.predict(s, card, efficiency).total_us for s in SPINE]
        assert "modelled" in ax.get_title(loc="left")


def test_parts_make_a_whole(run, efficiency):
    (ax,) = figures_predict.breakdown(run, SPINE, efficiency).axes
    assert all(bar.get_hatch() for bar in ax.patches)
    ends = {}
    for bar in ax.patches:
        y = round(bar.get_y() + bar.get_height() / 2)
        ends[y] = max(ends.get(y, 0), bar.get_x() + bar.get_width())
    assert len(ends) == len(SPINE) and np.allclose(list(ends.values()), 100)


def test_heat_map_frames_what_was_measured(run, efficiency):
    measured = predict.ours(run)
    measured = measured[(measured["batch_size"] == 1) & (measured["context"] == 16384)]
    for card, count in ((H200, 18), (RTX_PRO_6000, 0)):
        (ax,) = figures_predict.heads_by_nodes(run, efficiency, card).axes
        framed = [p for p in ax.patches if not p.get_hatch()]
        hatched = [p for p in ax.patches if p.get_hatch()]
        shown = np.asarray(ax.images[0].get_array())
        assert len(framed) + len(hatched) == shown.size == 54
        inside = measured[measured["num_heads"].isin([4, 8, 16, 32, 64, 128])]
        assert len(framed) == (len(inside) if card is H200 else count)
    bold = [t for t in figures_predict.heads_by_nodes(run, efficiency).axes[0].texts
            if t.get_fontweight() == "bold"]
    cells = {(r.num_heads, r.num_nodes): f"{r.latency_us:,.0f}" for r in inside.itertuples()}
    heads, nodes = (4, 8, 16, 32, 64, 128), (1, 2, 4, 8, 16, 32, 64, 128, 256)
    assert {(heads[int(t.xy[1])], nodes[int(t.xy[0])]): t.get_text() for t in bold} == cells


def test_a_step_gains_what_amdahl_says():
    factor, share = np.random.default_rng().uniform([1.5, 0.3], [10, 0.9])
    (ax,) = figures_predict.decode_step([factor], share).axes
    mine, free = 1 / (1 - share + share / factor), 1 / (1 - share)
    assert [t.get_text() for t in ax.texts] == [f"{factor:.3g}× attention: {mine:.2f}×",
                                                f"free attention: {free:.2f}×"]
    curves = [line for line in ax.lines if len(line.get_xdata()) > 2]
    for line, want in zip(curves, (mine, free), strict=True):
        assert line.get_linestyle() != "-"
        assert np.interp(100 * share, *line.get_data()) == pytest.approx(want, rel=1e-3)


def test_held_out_picture_states_the_errors(run, table):
    (ax,) = figures_predict.held_out(table, run).axes
    title = ax.get_title(loc="left")
    assert f"{100 * table['error'].abs().max():.0f} % at worst" in title
    assert f"{100 * table['error'].abs().median():.1f} % in the median" in title
    points = sum(len(line.get_xdata()) for line in ax.lines if line.get_marker() in ("o", "s"))
    assert points == len(table)
