"""The search over launches: what is tried, and what is taken. Timing needs a GPU."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mla_kernels import autotune, build, cuda
from mla_kernels.workload import PRESETS, Shape


def random_shape(rng) -> Shape:
    return Shape(*(int(2 ** rng.uniform(0, top)) for top in (6, 7, 8, 17)))


def test_candidates_are_launches(rng):
    for _ in range(300):
        shape, sms = random_shape(rng), int(rng.integers(20, 200))
        plans = autotune.candidates(shape, sms)
        assert plans[0] == autotune.policy(shape, sms) and len(set(plans)) == len(plans)
        tiles = shape.batch_size * -(-(shape.context + shape.num_nodes) // cuda.TILE_TOKENS)
        for plan in plans:
            assert 1 <= plan.groups <= tiles and plan.rows in build.TILE_ROWS
            assert (plan.row_tiles - 1) * plan.rows < shape.num_heads * shape.num_nodes
        assert {plan.rows for plan in plans} == set(build.TILE_ROWS)


def test_the_fastest_right_one_is_taken(rng):
    shape, sms = random_shape(rng), 132
    plans = autotune.candidates(shape, sms)
    times = dict(zip(plans, rng.permutation(len(plans)) + 10.0, strict=True))
    wrong = plans[1:][int(rng.integers(len(plans) - 1))]
    times[wrong] = float("nan")
    result = autotune.tune(shape, sms, times.__getitem__)
    right = [p for p in plans if p != wrong]
    assert result["best_us"] == min(times[p] for p in right)
    assert times[cuda.LaunchPlan(**result["best"])] == result["best_us"]
    assert result["policy_us"] == times[plans[0]]
    assert (result["tried"], result["wrong"]) == (len(plans), 1)


def test_a_wrong_policy_is_no_result():
    with pytest.raises(RuntimeError, match="the policy's launch gives a wrong result"):
        autotune.tune(Shape(1, 8, 8, 1000), 132, lambda plan: float("nan"))


def test_without_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr(autotune, "local_gpu", lambda: None)
    assert autotune.main([]) == 2
    assert "no CUDA device here" in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted(autotune.FOLDER.glob("*.json")), ids=lambda p: p.stem)
def test_recorded_results(path):
    """Every target shape, no wrong launch, and plans that the policy still makes."""
    record = json.loads(path.read_text())
    assert record["gpu"] and record["commit"] and record["date"]
    assert {tuple(r["shape"]) for r in record["shapes"]} >= {
        (s.batch_size, s.num_heads, s.num_nodes, s.context) for s in PRESETS["spine"]}
    for r in record["shapes"]:
        assert r["wrong"] == 0 and r["best_us"] <= r["policy_us"], r
        assert np.isfinite([r["best_us"], r["policy_us"]]).all()
        policy = autotune.policy(Shape(*r["shape"]), record["sms"])
        assert cuda.LaunchPlan(**r["policy"]) == policy, "tuned for another policy: run it again"
