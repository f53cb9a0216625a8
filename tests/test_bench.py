"""bench: shapes, workloads and errors. Times need a GPU; everything before them does not."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from mla_kernels import bench
from mla_kernels.attention import verify_attention
from mla_kernels.bench import PRESETS, Shape, error_of, make_workload

ROOT = Path(__file__).parent.parent
ROW = 576 * 2


def on_cpu(shape, **changes):
    return make_workload(shape, "cpu", **{"l2_bytes": 0, **changes})


# -- shapes -------------------------------------------------------------------------------


def test_shapes_as_text():
    assert Shape.parse("8,12,64,16384") == Shape(batch_size=8, num_heads=12, num_nodes=64,
                                                 context=16384)
    assert Shape.parse(" 1, 8, 4, 0") == Shape(1, 8, 4, 0)
    assert str(Shape(1, 8, 4, 256)) == "B 1, H 8, T 4, L 256"


@pytest.mark.parametrize("text", ["", "8,8,64", "8,8,64,16384,1", "8,8,64,16k", "8 8 64 16384",
                                  "1,2,3,4.5"])
def test_shapes_that_are_not(text):
    with pytest.raises(ValueError, match=r"a shape must look like 8,8,64,16384 \(B,H,T,L\); got "
                                         + repr(text)):
        Shape.parse(text)


def test_presets():
    assert {"spine", "context", "nodes", "heads", "small"} <= PRESETS.keys()
    for name, shapes in PRESETS.items():
        assert shapes and len(set(shapes)) == len(shapes), name
        for s in shapes:
            assert s.batch_size >= 1 and 1 <= s.num_heads <= 128, s
            assert 1 <= s.num_nodes <= 1024 and s.context >= 1, s
            # Four regions fit beside one another on a card of 80 GB.
            assert 4 * s.batch_size * (s.context + s.num_nodes) * ROW < 40e9, s
            assert s.batch_size * (s.context + s.num_nodes) < 2**31, s
    for name, swept in (("context", "context"), ("nodes", "num_nodes"), ("heads", "num_heads")):
        fixed = {f.name for f in dataclasses.fields(Shape)} - {swept}
        values = {}
        for s in PRESETS[name]:
            key = tuple(getattr(s, f) for f in sorted(fixed))
            values.setdefault(key, []).append(getattr(s, swept))
        assert all(len(v) >= 4 and v == sorted(v) for v in values.values()), name


# -- workloads ----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [Shape(1, 3, 5, 40), Shape(3, 2, 4, 33), Shape(2, 1, 1, 1)],
                         ids=str)
def test_regions_are_apart_and_cover_the_pool(shape):
    work = on_cpu(shape)
    taken = []
    for batch in work.batches:
        batch.validate(len(work.pool))
        assert batch.page_size == 1 and batch.batch_size == shape.batch_size
        assert batch.kv_lens.tolist() == [shape.context] * shape.batch_size
        assert batch.qo_indptr.diff().tolist() == [shape.num_nodes] * shape.batch_size
        for b in range(shape.batch_size):
            taken.append(batch.prefix_slots(b))
        taken.append(batch.draft_slots.long())
    taken = torch.cat(taken)
    assert torch.equal(taken.sort().values, torch.arange(len(work.pool)))
    # Scattered: a region is no run of the pool.
    if len(work.pool) > 50:
        first = work.batches[0].prefix_slots(0)
        assert (first.diff() == 1).float().mean() < 0.2


def test_inputs_of_a_workload():
    shape = Shape(2, 3, 5, 40)
    work = on_cpu(shape, dtype=torch.float16)
    assert work.regions == len(work.q) == 2 and work.shape == shape
    assert work.pool.dtype == work.out.dtype == torch.float16 and work.lse.dtype == torch.float32
    assert work.pool.isfinite().all() and abs(work.pool.float().std() - 1) < 0.1
    assert work.out.shape == (10, 3, 512) and work.lse.shape == (10, 3)
    assert work.out.isnan().all() and work.lse.isnan().all()
    assert all(q.shape == (10, 3, 576) for q in work.q)
    assert not torch.equal(work.q[0], work.q[1])
    mask = work.batches[0].draft_mask(0)
    assert mask.sum(1).tolist() == [1, 2, 2, 2, 3]  # a ternary tree
    assert work.sm_scale == 192**-0.5


def test_a_seed_gives_one_workload():
    one, two, other = (on_cpu(Shape(1, 2, 3, 20), seed=s) for s in (5, 5, 6))
    assert torch.equal(one.pool, two.pool) and torch.equal(one.q[1], two.q[1])
    assert torch.equal(one.batches[1].kv_indices, two.batches[1].kv_indices)
    assert not torch.equal(one.pool, other.pool)
    assert not torch.equal(one.batches[0].kv_indices, other.batches[0].kv_indices)


@pytest.mark.parametrize("l2_bytes, regions", [
    (0, 2), (1, 2), (45 * ROW, 2), (46 * ROW, 3), (90 * ROW, 4), (10**9, 128)])
def test_regions_exceed_the_cache_twice(l2_bytes, regions):
    work = on_cpu(Shape(1, 1, 5, 40), l2_bytes=l2_bytes)
    assert work.regions == regions
    assert regions == 128 or work.pool.numel() * 2 >= 2 * l2_bytes


# -- errors -------------------------------------------------------------------------------


@pytest.fixture
def work():
    return on_cpu(Shape(2, 2, 5, 30))


def reference_call(work):
    def call(region):
        verify_attention(work.q[region], work.pool, work.batches[region], sm_scale=work.sm_scale,
                         layout=work.layout, out=work.out, lse=work.lse, backend="reference")
    return call


def test_error_of_a_right_provider(work):
    assert 0 < error_of(work, reference_call(work)) < 3e-3  # bf16's rounding of the result
    call = bench._through_verify_attention("reference")(work)
    assert 0 < error_of(work, call) < 3e-3


def test_error_of_wrong_providers(work):
    right = reference_call(work)

    def off(region):
        right(region)
        work.out.mul_(1.1)

    def lse_off(region):
        right(region)
        work.lse.add_(0.5)

    def other_region(region):
        right(1 - region)

    def part(region):
        right(region)
        work.out[-1] = torch.nan

    assert error_of(work, off) == pytest.approx(0.1, rel=0.1)
    assert error_of(work, lse_off) > 0.05
    assert error_of(work, other_region) > 0.5
    # What was there before does not count: the outputs are poisoned first.
    right(0)
    assert error_of(work, lambda region: None) == float("inf")
    assert error_of(work, part) == float("inf")


def test_providers():
    assert {"cuda", "triton_split", "triton_serial"} <= bench.PROVIDERS.keys()


def test_measuring_notes_what_cannot_run(monkeypatch):
    """A provider that is not there leaves a row with its reason, and no time."""
    def missing(work):
        raise bench.Unavailable("not installed: pip install it")

    monkeypatch.setattr(bench, "make_workload", lambda shape, seed: on_cpu(shape, seed=seed))
    monkeypatch.setattr(bench, "time_graph", lambda work, call, seconds: np.array([3., 2., 4.]))
    shape = Shape(1, 2, 3, 20)
    frame = bench.measure([shape], {"missing": missing, "reference": reference_call})
    assert list(frame["provider"]) == ["missing", "reference"]
    absent, there = frame.iloc[0], frame.iloc[1]
    assert absent["note"] == "not installed: pip install it" and np.isnan(absent["latency_us"])
    assert there["latency_us"] == 3 and 2 <= there["p10_us"] <= 3 <= there["p90_us"] <= 4
    assert there["error"] < 3e-3 and there["regions"] == 2
    # By hand: 2 * 1 * 2 heads * 3 nodes * 23 rows * (576 + 512) flop in 3 us.
    assert there["tflops"] == pytest.approx(2 * 2 * 3 * 23 * 1088 / 3e-6 / 1e12)
    assert there["gbps"] == pytest.approx((23 * 576 + 3 * 2 * 1088) * 2 / 3e-6 / 1e9)
    assert {"torch", "date", "gpu", "commit"} <= set(frame.columns)


# -- the command --------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_command_line_without_a_gpu():
    done = subprocess.run([sys.executable, "-W", "error", "-m", "mla_kernels.bench", "--preset",
                           "small"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == ("error: no CUDA device here; recorded measurements are in "
                           "data/measurements\n")


@pytest.mark.gpu
@pytest.mark.slow
def test_command_line_on_a_gpu(tmp_path, capsys):
    import pandas as pd

    out = tmp_path / "times.csv"
    assert bench.main(["--shape", "1,8,8,512", "--provider", "cuda", "--provider",
                       "triton_split", "--seconds", "0.02", "--out", str(out)]) == 0
    frame = pd.read_csv(out)
    assert list(frame["provider"]) == ["cuda", "triton_split"]
    assert (frame["latency_us"] > 0).all() and (frame["error"] < 5e-3).all()
    assert "latency_us" in capsys.readouterr().out
