"""bench: shapes, workloads and errors. Times need a GPU; everything before them does not."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from mla_kernels import bench, measurements
from mla_kernels.attention import verify_attention
from mla_kernels.bench import PRESETS, Shape, error_of, make_workload
from mla_kernels.device import Ceiling
from mla_kernels.peers import Provider, Unavailable
from mla_kernels.workload import MODEL_BATCHES, MODEL_FLOPS, MODEL_HEADS, MODEL_NODES, TREES

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
    assert [s for s in PRESETS["spine"]] == [Shape.parse(t) for t in (
        "1,8,8,16384 1,8,16,16384 1,8,64,16384 1,8,64,131072 8,8,1,16384 8,8,8,16384 32,8,8,4096 "
        "8,8,16,16384 8,8,64,16384 16,8,32,8192 1,64,8,16384 1,12,8,16384 4,128,4,8192").split()]
    for name, heads in MODEL_HEADS.items():
        assert {s.num_heads for s in PRESETS[name]} == {heads // tp for tp in (1, 2, 4, 8)}
        assert {(s.batch_size, s.context) for s in PRESETS[name]} == set(MODEL_BATCHES)
        cross = {Shape(b, heads // tp, t, c) for b, c in MODEL_BATCHES for t in MODEL_NODES
                 for tp in (1, 2, 4, 8)}
        left_out = cross - set(PRESETS[name])
        assert all(2 * 1088 * s.batch_size * s.num_heads * s.num_nodes
                   * (s.context + s.num_nodes) > MODEL_FLOPS for s in left_out)
        assert set(PRESETS[name]) < cross or not left_out
        assert len(left_out) <= 2
    assert set(PRESETS["grid"]) == {s for shapes in PRESETS.values() for s in shapes}
    contexts, batches = ({pair[i] for pair in MODEL_BATCHES} for i in (1, 0))
    assert {1024, 131072} <= contexts and {1, 64} <= batches
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


def test_kinds_of_tree_have_the_same_inputs():
    works = {tree: on_cpu(Shape(2, 3, 6, 20), tree=tree) for tree in TREES}
    one, other = works["3-ary"], works["chain"]
    assert torch.equal(one.pool, other.pool) and torch.equal(one.q[0], other.q[0])
    assert torch.equal(one.slots(1), other.slots(1))
    masks = {tree: work.batches[0].draft_mask(1) for tree, work in works.items()}
    assert torch.equal(masks["chain"], torch.ones(6, 6, dtype=bool).tril())
    assert masks["3-ary"].sum(1).tolist() == [1, 2, 2, 2, 3, 3]


def test_slots_are_the_prefix_then_the_drafts():
    work = on_cpu(Shape(3, 2, 4, 33))
    for region, batch in enumerate(work.batches):
        for b, slots in enumerate(work.slots(region)):
            assert torch.equal(slots[:33].long(), batch.prefix_slots(b))
            assert torch.equal(slots[33:], batch.draft_slots[4 * b:4 * b + 4])


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


def test_an_output_may_be_returned(work):
    def returns(region):
        reference_call(work)(region)
        out = work.out.clone()
        work.out.fill_(torch.nan)
        return out

    assert 0 < error_of(work, returns) < 3e-3


def test_providers():
    assert {"cuda", "triton_split", "triton_serial"} <= bench.PROVIDERS.keys()
    names = measurements.NAMES | measurements.PEER_NAMES
    assert bench.PROVIDERS.keys() == names.keys()
    assert set(bench.DEFAULT) == bench.PROVIDERS.keys() - {"flex_attention"}
    # What chain-only peers are compared with is measured on the same chain.
    for name in ("cuda", "triton_split"):
        assert set(bench.PROVIDERS[name].trees) == set(TREES)


def test_builds_run_all_and_do_not_raise():
    built = []

    def broken():
        built.append("broken")
        raise RuntimeError("no nvcc")

    bench.build_all([Provider(None, build=broken), Provider(None),
                     Provider(None, build=lambda: built.append("other"))])
    assert sorted(built) == ["broken", "other"]


# -- a run --------------------------------------------------------------------------------


@pytest.fixture
def cpu(monkeypatch):
    """Measuring on the CPU: small regions, and times that are given."""
    monkeypatch.setattr(bench, "make_workload",
                        lambda shape, tree, seed: on_cpu(shape, tree=tree, seed=seed))
    monkeypatch.setattr(bench, "time_graph", lambda work, call, seconds: np.array([3., 2., 4.]))


def raising(error):
    def prepare(work):
        raise error
    return prepare


def wrong(work):
    def call(region):
        reference_call(work)(region)
        work.out.mul_(1.1)
    return call


class OutOfResources(Exception):
    pass


class Stopped(BaseException):
    """Not an error of the provider's, as Ctrl-C is none."""


ORIGIN = {"gpu": "a GPU", "arch": "sm_00", "sms": 1, "driver": "1.0", "cuda": "13.0"}


def test_measuring_records_what_became_of_each(cpu, capsys):
    providers = {
        "missing": Provider(raising(Unavailable("not installed: pip install it"))),
        "broken": Provider(raising(IndexError("list index\nout of range"))),
        "large": Provider(raising(OutOfResources("shared memory, Required: 294912"))),
        "full": Provider(raising(torch.OutOfMemoryError("tried to allocate 80 GiB"))),
        "wrong": Provider(wrong),
        "chain only": Provider(reference_call, trees=("chain",)),
        "reference": Provider(reference_call, trees=("3-ary", "chain")),
    }
    ceiling = Ceiling("a GPU", "sm_00", 1, 1e9, 1e12, "here")
    frame = bench.measure([Shape(1, 2, 3, 20)], providers, ceiling=ceiling, **ORIGIN)
    rows = frame.set_index(["tree", "provider"])
    assert len(rows) == 9
    assert rows["status"].to_dict() == {
        ("3-ary", "missing"): "unavailable", ("3-ary", "broken"): "failed",
        ("3-ary", "large"): "unavailable", ("3-ary", "full"): "unavailable",
        ("3-ary", "wrong"): "wrong",
        ("3-ary", "chain only"): "unavailable", ("3-ary", "reference"): "ok",
        ("chain", "chain only"): "ok", ("chain", "reference"): "ok"}
    notes = rows["note"].loc["3-ary"]
    assert notes["missing"] == "not installed: pip install it"
    assert notes["broken"] == "IndexError: list index out of range"
    assert notes["large"] == "OutOfResources: shared memory, Required: 294912"
    assert "no tree mask" in notes["chain only"]
    assert notes["full"] == "OutOfMemoryError: tried to allocate 80 GiB"
    assert rows["latency_us"].isna().sum() == 6
    assert rows.loc[("3-ary", "wrong"), "error"] == pytest.approx(0.1, rel=0.1)
    there = rows.loc[("3-ary", "reference")]
    assert there["latency_us"] == 3 and 2 <= there["p10_us"] <= 3 <= there["p90_us"] <= 4
    assert there["error"] < 3e-3 and there["regions"] == 2 and there["replays"] == 3
    assert pd.isna(there["note"])
    # By hand: 2 * 1 * 2 heads * 3 nodes * 23 rows * (576 + 512) flop in 3 us.
    assert there["tflops"] == pytest.approx(2 * 2 * 3 * 23 * 1088 / 3e-6 / 1e12)
    moved = (23 * 576 + 3 * 2 * 1088) * 2
    assert there["gbps"] == pytest.approx(moved / 3e-6 / 1e9)
    # Copying at 1 GB/s would take longer than multiplying at 1 TFLOP/s.
    assert there["ceiling_percent"] == pytest.approx(100 * moved / 1e9 / 3e-6)
    assert there["version"] == f"torch {torch.__version__}"
    measurements.validate(frame)
    told = capsys.readouterr().err
    assert "missing unavailable: not installed" in told and "in prepare" in told


def test_what_a_provider_chose_is_recorded(cpu):
    def prepare(work):
        call = reference_call(work)
        call.note = "blocks: its own choice"
        return call

    frame = bench.measure([Shape(1, 2, 3, 20)], {"reference": Provider(prepare)}, **ORIGIN)
    assert frame["status"].tolist() == ["ok"] and frame["note"].tolist() == [
        "blocks: its own choice"]
    measurements.validate(frame)


def test_a_run_goes_on_where_it_stopped(cpu, tmp_path):
    path = tmp_path / "folder" / "run.csv"
    shapes = [Shape(1, 2, 3, 20), Shape(2, 2, 1, 24)]
    calls = []

    def counted(work):
        if len(calls) == 3:
            raise Stopped
        calls.append((work.shape, work.tree))
        return reference_call(work)

    providers = {"counted": Provider(counted, trees=("3-ary", "chain")),
                 "missing": Provider(raising(Unavailable("why")))}
    origin = {**ORIGIN, "commit": "0012345"}

    def go(earlier=None):
        return bench.measure(shapes, providers, earlier=earlier, **origin,
                             save=lambda frame: bench._write(path, frame))

    with pytest.raises(Stopped):
        go()
    stopped = measurements.load(path)
    assert len(stopped) == 5 and not list(path.parent.glob("*.part"))
    calls.clear()
    whole = go(stopped)
    assert calls == [(shapes[1], "chain")]
    again = measurements.load(path)
    assert len(again) == len(whole) == 6
    assert again["status"].value_counts().to_dict() == {"ok": 4, "unavailable": 2}
    assert again["commit"].unique().tolist() == ["0012345"]


def test_a_file_of_another_run_is_refused(cpu, tmp_path, monkeypatch):
    path = tmp_path / "run.csv"
    assert bench._earlier(path, retry=False) is None
    providers = {"missing": Provider(raising(Unavailable("why"))),
                 "reference": Provider(reference_call)}
    here = {**bench.provenance(), **ORIGIN}
    bench._write(path, bench.measure([Shape(1, 2, 3, 20)], providers, **ORIGIN))
    monkeypatch.setattr(bench, "provenance", lambda: {**here, "date": "2099-01-01"})
    assert len(bench._earlier(path, retry=False)) == 2
    assert bench._earlier(path, retry=True)["provider"].tolist() == ["reference"]
    monkeypatch.setattr(bench, "provenance", lambda: {**here, "commit": "another"})
    with pytest.raises(ValueError, match="is of commit .*, and this is another"):
        bench._earlier(path, retry=False)


def test_a_broken_context_ends_the_run(cpu, monkeypatch):
    saved = []
    providers = {"illegal": Provider(raising(RuntimeError("an illegal memory access"))),
                 "reference": Provider(reference_call)}
    monkeypatch.setattr(bench, "_context_lost", lambda: True)
    with pytest.raises(bench.ContextLost, match="illegal broke the CUDA context on B 1.*access"):
        bench.measure([Shape(1, 2, 3, 20)], providers, save=saved.append, **ORIGIN)
    assert saved[-1]["provider"].tolist() == ["illegal"]
    assert saved[-1]["status"].tolist() == ["failed"]


def test_inputs_that_do_not_fit(cpu, monkeypatch):
    def full(shape, tree, seed):
        raise torch.OutOfMemoryError("tried to allocate 80 GiB")

    monkeypatch.setattr(bench, "make_workload", full)
    frame = bench.measure([Shape(1, 2, 3, 20)], {"reference": Provider(reference_call)}, **ORIGIN)
    assert frame["status"].tolist() == ["unavailable"] and "80 GiB" in frame["note"][0]


# -- the command --------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_command_line_without_a_gpu():
    done = subprocess.run([sys.executable, "-W", "error", "-m", "mla_kernels.bench", "--preset",
                           "small"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == ("error: no CUDA device here; recorded measurements are in "
                           "data/measurements\n")


def test_command_line_from_file_to_table(cpu, tmp_path, monkeypatch, capsys):
    """All of it but the GPU, twice: the second time nothing is left to do."""
    from mla_kernels import ceilings

    measured = []

    def counted(work):
        measured.append(work.tree)
        return reference_call(work)

    monkeypatch.setattr(bench, "local_gpu", lambda: object())
    monkeypatch.setattr(bench, "PROVIDERS", {
        "cuda": Provider(counted, trees=("3-ary", "chain")),
        "flashmla": Provider(raising(Unavailable("no such GPU")), trees=("chain",))})
    monkeypatch.setattr(bench, "DEFAULT", ("cuda", "flashmla"))
    monkeypatch.setattr(ceilings, "measure", lambda: Ceiling("a GPU", "sm_00", 1, 1e9, 1e12, ""))
    real = bench.provenance()
    monkeypatch.setattr(bench, "provenance", lambda: {**real, **ORIGIN})
    out = tmp_path / "run.csv"
    arguments = ["--shape", "1,2,3,20", "--shape", "1,2,1,9", "--out", str(out)]
    for _ in range(2):
        assert bench.main(arguments) == 0
        told = capsys.readouterr()
        assert told.out.count("flashmla") == 4 and "ceiling_percent" in told.out
        assert "copy 0.00 TB/s, mma.sync 1 TFLOP/s" in told.err
    assert measured == ["3-ary", "chain"] * 2
    frame = measurements.load(out)
    assert set(frame["arguments"]) == {" ".join(arguments)}
    monkeypatch.setattr(bench, "provenance", lambda: {**real, **ORIGIN, "gpu": "another GPU"})
    assert bench.main(arguments) == 2
    assert "run.csv is of gpu a GPU, and this is another GPU" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.slow
def test_command_line_on_a_gpu(tmp_path, capsys):
    out = tmp_path / "times.csv"
    assert bench.main(["--shape", "1,8,8,512", "--provider", "cuda", "--provider",
                       "triton_split", "--seconds", "0.02", "--out", str(out)]) == 0
    frame = pd.read_csv(out)
    assert list(frame["provider"]) == 2 * ["cuda", "triton_split"]
    assert list(frame["tree"]) == ["3-ary", "3-ary", "chain", "chain"]
    assert (frame["latency_us"] > 0).all() and (frame["error"] < 5e-3).all()
    assert "latency_us" in capsys.readouterr().out
