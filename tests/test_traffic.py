"""What a call moves, as the emulator counts it, is an exact function of its shape; and it agrees
with what Nsight Compute counted on an H200."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from mla_kernels import build, emulated, figures_traffic, traffic
from mla_kernels.workload import Shape

ROOT = Path(__file__).parent.parent

#: Tensor instructions of a tile of 32 cache rows, by query rows: 36 steps of 16 along the 576
#: dimensions for 4 x 8 scores, and 2 of 16 tokens for 64 x 8 output columns, a 16-row group each.
MMA = {rows: rows // 16 * (36 * 4 + 2 * 64) for rows in build.TILE_ROWS}

#: Where wavefronts are more than the least, and why that is so.
EXPLAINED = {
    "walk": "all lanes read the same words of a block's share; 16 bytes a lane count as four",
    "accumulate": "all lanes read the same four flags",
    "queries_to_fragments": "Q on its way to registers, once a segment: two lanes a bank",
    "copy_begin": "eight lanes write the same address; 8 bytes a lane count as two",
    "row_lse": "four lanes read one row's statistics, 8 bytes a lane, once a segment",
    "store": "a row's statistics, 8 bytes a lane, once a segment",
}


def shape_of(rows, context, requests=1):
    return {16: Shape(requests, 8, 2, context), 32: Shape(requests, 4, 8, context),
            64: Shape(requests, 8, 8, context)}[rows]


@pytest.fixture(scope="module", params=build.TILE_ROWS)
def counted(request):
    rows = request.param
    found = traffic.count(shape_of(rows, 1000), sms=8)
    if found.plan.rows != rows:
        pytest.fail(f"the policy takes {found.plan.rows} rows")
    return found


def tiles(found):
    return found.shape.batch_size * -(-(found.shape.context + found.shape.num_nodes) // 32)


def test_tensor_instructions(counted):
    assert counted.tensor_instructions == (
        MMA[counted.plan.rows] * counted.plan.row_tiles * tiles(counted))


def test_every_cache_row_is_copied_once(counted):
    """Whole rows of 1,152 bytes, whole tiles, once a row tile."""
    assert sum(counted.copied.values()) == tiles(counted) * 32 * 1152 * counted.plan.row_tiles
    assert set(counted.copied) == {"kv_pool"}
    assert 1152 <= counted.cache_bytes_per_row < 1152 * 1.05


def test_no_bank_conflicts_in_the_loop(counted):
    """All of ldmatrix, the scores, their exchange, the probabilities: none. What is left is
    explained, and small."""
    sites = counted.sites
    matrices = sites[sites["what"] == "ldmatrix"]
    assert len(matrices) >= 5 and (matrices["wavefronts"] == matrices["least"]).all()
    shared = sites[sites["what"].isin(traffic.SHARED)]
    worse = shared[shared["wavefronts"] > shared["least"]]
    assert set(worse["function"]) <= set(EXPLAINED)
    loop = shared[shared["function"].isin(["scores", "read_mail", "softmax"])]
    assert len(loop) >= 6 and (loop["wavefronts"] == loop["least"]).all()


def test_sectors(counted):
    """A row begins on a sector, but its place in shared memory is 16 bytes further in each row:
    half of the rows have 9 sectors cut by the copy engine's pieces of 128 bytes."""
    copies = counted.sites[counted.sites["what"] == "bulk copy"]
    rows = int(copies["instructions"].sum())
    assert int(copies["needed"].sum()) == rows * 36
    assert int(copies["sectors"].sum()) == rows * 36 + rows // 2 * 9


def test_conflicts_are_seen(tmp_path, monkeypatch):
    """Rows of a multiple of 128 bytes: eight rows of an ldmatrix in the same banks."""
    for name, text in build.sources().items():
        text = text.replace("kRowStride = kRowBytes + 16", "kRowStride = kRowBytes")
        text = text.replace(
            'static_assert(kRowStride / 4 % 32 == 4, "rows must be 4 banks apart");', "")
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(build, "CSRC", tmp_path)
    found = traffic.count(shape_of(64, 100), sms=2)
    loop = found.sites[(found.sites["what"] == "ldmatrix")
                       & found.sites["function"].isin(["scores"])]
    assert (loop["wavefronts"] == 8 * loop["least"]).all()


def test_more_requests_more_of_everything():
    one, three = (traffic.count(shape_of(16, 300, n), sms=4) for n in (1, 3))
    assert three.tensor_instructions == 3 * one.tensor_instructions
    assert sum(three.copied.values()) == 3 * sum(one.copied.values())


def test_counting_changes_nothing_and_ends(counted):
    again = traffic.count(counted.shape, sms=8)
    assert again.sites.equals(counted.sites)
    with emulated.counting() as nothing:
        pass
    assert nothing.text == ""


def test_the_report(capsys):
    assert traffic.main(["--shape", "1,4,2,64", "--sms", "2"]) == 0
    text = capsys.readouterr().out
    assert "tensor instructions" in text and "tree_verify.cuh:" in text


def test_the_picture(counted):
    figure = figures_traffic.where_it_goes(counted)
    assert isinstance(figure, Figure)
    labels = {t.get_text() for t in figure.axes[0].get_yticklabels()}
    assert {"scores", "accumulate"} <= labels
    assert "counted by the emulator" in figure.get_supxlabel()


# -- beside Nsight Compute ----------------------------------------------------------------


@pytest.mark.parametrize("path", sorted((ROOT / "data/emulated").glob("*.json")),
                         ids=lambda p: p.stem)
def test_agrees_with_nsight_compute(path):
    record = json.loads(path.read_text())
    profiles = json.loads((ROOT / record["profiles"]).read_text())
    measured = {row["shape"]: row["kernels"][0] for row in profiles["rows"]}
    assert {row["shape"] for row in record["rows"]} >= {"8,8,1,16384"}
    for row in record["rows"]:
        for name in ("tensor_instructions", "shared_wavefronts", "l2_read_sectors"):
            assert row[name]["nsight_compute"] == measured[row["shape"]][name]
        assert row["tensor_instructions"]["emulator"] == (
            row["tensor_instructions"]["nsight_compute"]), row["shape"]
        wavefronts = row["shared_wavefronts"]
        assert 0.92 <= wavefronts["emulator"] / wavefronts["nsight_compute"] <= 1.0
        sectors = row["l2_read_sectors"]
        # Blocks that read the same Q at the same time share what L2 is asked for; with eight
        # requests that is little.
        most = 1.05 if row["shape"].startswith("8,") else 1.35
        assert 0.97 <= sectors["emulator"] / sectors["nsight_compute"] <= most
