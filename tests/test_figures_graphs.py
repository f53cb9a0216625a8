"""figures_graphs: what is drawn is what was recorded, and nothing while nothing was."""


import pytest
from matplotlib.colors import to_hex

from mla_kernels import figures_graphs as graphs
from mla_kernels.figures import SERIES


@pytest.fixture
def record(rng):
    """Made up, for the test alone."""
    shapes = [{"shape": shape, **{mode: {
        "eager_us": float(rng.uniform(60, 90)), "replay_us": float(rng.uniform(8, 600))}
        for mode in ("default", "batch_invariant")}} for shape in ("1,8,8,4096", "8,8,64,16384")]
    return {"shapes": shapes, "gpu": "GPU", "driver": "1", "torch": "2", "commit": "c",
            "date": "today"}


@pytest.mark.parametrize(("draw", "picks"), [
    (graphs.eager_against_replay, [("default", "eager_us"), ("default", "replay_us")]),
    (graphs.invariant_cost, [("default", "replay_us"), ("batch_invariant", "replay_us")]),
])
def test_points_are_the_record(record, draw, picks):
    figure = draw(record)
    (ax,) = figure.axes
    for i, (points, (mode, key)) in enumerate(zip(ax.collections, picks, strict=True)):
        assert [x for x, _ in points.get_offsets()] == [r[mode][key] for r in record["shapes"]]
        assert to_hex(points.get_facecolor()[0]) == to_hex(SERIES[i])
    first, second = (record["shapes"][0][mode][key] for mode, key in picks)
    assert ax.texts[0].get_text() == f"× {second / first:.2f}"
    assert "microseconds" in ax.get_xlabel() and "GPU, driver 1" in figure.get_supxlabel()


