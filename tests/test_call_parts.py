"""The script that times calls without a prefix, on the CPU with times that are given."""

import json
import types

import call_parts
import numpy as np
import pytest

from mla_kernels import bench
from mla_kernels.reference import verify_attention_reference
from mla_kernels.workload import PRESETS, Shape, make_workload


@pytest.fixture
def cpu(monkeypatch):
    def prepare(work):
        def call(region):
            out, lse = verify_attention_reference(
                *work.layout.split(work.q[region]), work.pool, work.batches[region],
                sm_scale=work.sm_scale)
            work.out.copy_(out)
            work.lse.copy_(lse)
        return call

    monkeypatch.setattr(call_parts, "make_workload",
                        lambda shape: make_workload(shape, "cpu", l2_bytes=0))
    monkeypatch.setattr(call_parts, "local_gpu", lambda: object())
    monkeypatch.setattr(bench, "PROVIDERS", {"cuda": types.SimpleNamespace(prepare=prepare)})
    monkeypatch.setattr(bench, "time_graph", lambda work, call, seconds: np.array(
        [1.0, 2.0, 9.0]) + work.shape.context + 100 * work.shape.num_nodes)


def test_with_and_without_a_prefix(cpu, monkeypatch, tmp_path):
    monkeypatch.setattr(call_parts, "PRESETS", {"spine": (Shape(1, 2, 3, 40), Shape(2, 3, 1, 17))})
    out = tmp_path / "parts.json"
    assert call_parts.main(["--out", str(out)]) == 0
    record = json.loads(out.read_text())
    assert [(r["shape"], r["whole_us"], r["draft_us"]) for r in record["rows"]] == [
        ("1,2,3,40", 342, 302), ("2,3,1,17", 119, 102)]
    assert all(0 < r["error"] < 3e-3 for r in record["rows"]) and "commit" in record


def test_without_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(call_parts, "local_gpu", lambda: None)
    assert call_parts.main(["--out", "nowhere.json"]) == 2
    assert "no CUDA device here" in capsys.readouterr().err


def test_recorded(pytestconfig):
    paths = sorted((pytestconfig.rootpath / "data" / "parts").glob("*.json"))
    if not paths:
        pytest.skip("nothing recorded in data/parts")
    for record in (json.loads(path.read_text()) for path in paths):
        assert record["gpu"] and record["commit"] and record["date"]
        assert [Shape.parse(r["shape"]) for r in record["rows"]] == list(PRESETS["spine"])
        for row in record["rows"]:
            assert 0 < row["draft_us"] < row["whole_us"] and row["error"] < 5e-3
