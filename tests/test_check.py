"""check: what the random cases cover, and what the comparison lets through."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
import torch

from mla_kernels import build, check
from mla_kernels.batch import VerifyBatch
from mla_kernels.check import Case, Errors, compare, random_case, random_tree
from mla_kernels.layout import KVLayout, pool_rows

SMALL = {"max_heads": 4, "max_nodes": 12, "max_requests": 4, "max_prefix": 200}


def same(a, b):
    """Equal to the bit, NaN included, tensors and what holds them."""
    if isinstance(a, torch.Tensor):
        return (a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype
                and torch.equal(*(x.reshape(-1).clone(memory_format=torch.contiguous_format).view(
                    torch.uint8) for x in (a, b))))
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, VerifyBatch):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    return a == b


# -- cases --------------------------------------------------------------------------------


def test_a_seed_gives_one_case(seed):
    for draw in range(5):
        one, two = (random_case(seed + draw, **SMALL) for _ in range(2))
        assert one.seed == seed + draw and one.text == two.text
        assert one.arguments.keys() == two.arguments.keys()
        for name in one.arguments:
            assert same(one.arguments[name], two.arguments[name]), name
    other = random_case(seed + 1000, **SMALL)
    assert not same(one.arguments["kv_pool"], other.arguments["kv_pool"])


@pytest.fixture(scope="module")
def many():
    first = int(np.random.SeedSequence().entropy % 2**31)
    print(f"seeds from {first}")
    return [random_case(first + i, **SMALL) for i in range(250)]


def test_cases_cover(many):
    """Over 250 seeds everything that a kernel may do wrong is met."""
    seen = {name: 0 for name in (
        "q in two", "q strided", "pool wide", "pool in pages", "pool [slots, 1, 576]", "scaled",
        "capped", "padded", "no prefix", "ragged", "in pool", "apart",
        "unreferenced NaN")}
    orders, dtypes, pages, heads = set(), set(), set(), set()
    for case in many:
        a = case.arguments
        batch, pool, q = a["batch"], a["kv_pool"], a["q"]
        orders.add(a["layout"].order)
        latent = q[0] if isinstance(q, tuple) else q
        dtypes.add(latent.dtype)
        pages.add(batch.page_size)
        heads.add(latent.shape[1])
        rows = pool_rows(pool, a["layout"])
        own = int(batch.qo_indptr[-1])
        lens = batch.kv_lens.tolist()
        for name, here in {
            "q in two": isinstance(q, tuple),
            "q strided": not latent.is_contiguous() and not isinstance(q, tuple),
            "pool wide": rows.stride(0) > 576,
            "pool in pages": pool.dim() == 3 and pool.shape[1] > 1,
            "pool [slots, 1, 576]": pool.dim() == 3 and pool.shape[1] == 1,
            "scaled": "k_scale" in a, "capped": "logit_cap" in a,
            "padded": batch.num_tokens > own,
            "no prefix": 0 in lens, "ragged": len(set(lens)) > 1,
            "in pool": batch.draft_slots is not None and a["draft_kv"] is None,
            "apart": batch.draft_slots is None and a["draft_kv"] is not None,
            "unreferenced NaN": rows.isnan().any(),
        }.items():
            seen[name] += bool(here)
    assert orders == {"latent_first", "rope_first"}
    assert dtypes == {torch.bfloat16, torch.float16}
    assert pages == {1, 16, 64, 256} and heads == {1, 2, 3, 4}
    assert all(seen.values()), seen


def test_some_rows_see_nothing(seed):
    """Rare, one case in fifty or so, as it takes a draft without prefix and an odd mask."""
    for draw in range(1000):
        case = random_case(seed + draw, max_heads=1, max_prefix=1, max_nodes=12)
        batch = case.arguments["batch"]
        if any(n == 0 and not batch.draft_mask(b).any(1).all()
               for b, n in enumerate(batch.kv_lens.tolist())):
            out, lse = case.exact()
            assert (out[lse.isneginf()] == 0).all() and lse.isneginf().any()
            return
    pytest.fail("no row that sees nothing in 1000 cases")


def test_what_is_not_referenced_is_nan_and_what_is_is_not(many):
    for case in many[:60]:
        a = case.arguments
        batch = a["batch"]
        rows = pool_rows(a["kv_pool"], a["layout"])
        used = [batch.prefix_slots(b) for b in range(batch.batch_size)]
        if batch.draft_slots is not None:
            used.append(batch.draft_slots[: int(batch.qo_indptr[-1])].long())
        used = torch.cat(used)
        assert len(used.unique()) == len(used), "two tokens in one slot"
        free = torch.ones(len(rows), dtype=torch.bool)
        free[used] = False
        assert rows[used].isfinite().all() and rows[free].isnan().all()
        if rows.stride(0) > 576:  # and the rest of a wider row
            beside = rows.as_strided((len(rows), rows.stride(0) - 576), (rows.stride(0), 1), 576)
            assert beside.isnan().all()


def test_plain_cases(seed):
    for draw in range(40):
        a = random_case(seed + draw, plain=True, **SMALL).arguments
        assert not {"k_scale", "v_scale", "logit_cap"} & a.keys()
        assert pool_rows(a["kv_pool"], a["layout"]).is_contiguous()


def test_sizes_are_kept_to(seed):
    big = {"nodes": 0, "requests": 0, "prefix": 0}
    for draw in range(60):
        batch = random_case(seed + draw, max_heads=2, max_nodes=5, max_requests=2, max_prefix=40,
                            page_sizes=(16,), dtypes=(torch.float32,)).arguments["batch"]
        assert batch.page_size == 16
        big = {"nodes": max(big["nodes"], batch.max_q_len),
               "requests": max(big["requests"], batch.batch_size),
               "prefix": max(big["prefix"], batch.max_kv_len)}
    assert big["nodes"] <= 8 and big["requests"] == 2 and big["prefix"] <= 40


def test_random_trees(rng):
    kinds = set()
    for _ in range(60):
        nodes = int(rng.integers(1, 40))
        draft = random_tree(rng, nodes)
        assert len(draft) == nodes
        kinds.add(type(draft).__name__)
    assert kinds == {"DraftTree", "ndarray"}


# -- the comparison -----------------------------------------------------------------------


@pytest.fixture
def case(generator):
    """Two requests, the second's only draft seeing nothing; two padded tokens at the end."""
    mask = np.zeros((1, 1), dtype=bool)
    batch = VerifyBatch.from_requests([3, mask], [9, 0], [range(9), []])
    batch = dataclasses.replace(
        batch, mask_bits=torch.cat([batch.mask_bits, batch.mask_bits.new_zeros(2, 1)]))
    return Case(0, "made by hand", {
        "q": torch.randn(6, 2, 576, generator=generator).half(),
        "kv_pool": torch.randn(9, 576, generator=generator).half(), "batch": batch,
        "layout": KVLayout.ROPE_FIRST, "sm_scale": 192**-0.5,
        "draft_kv": torch.randn(6, 576, generator=generator).half()})


@pytest.fixture
def right(case):
    out, lse = case.exact()
    assert out[4:].isnan().all() and lse[3].isneginf().all()
    return out.half(), lse.float()


def test_the_right_result_passes(case, right):
    errors = compare(case, *right)
    assert errors.passed and 0 < errors.out < 1e-3 and errors.row < 1e-3 and errors.lse < 1e-5
    assert errors.padding
    for backend in ("reference", "auto"):
        assert check.run(case, backend).passed


def spoil(what, at, value):
    def apply(out, lse):
        (out if what == "out" else lse)[at] = value
    return apply


@pytest.mark.parametrize("change, broken", [
    (spoil("out", (0, 1, 511), math.nan), {"out", "row"}),
    (spoil("out", (2, 0, 0), math.inf), {"out", "row"}),
    (spoil("out", (3, 1, 7), math.nan), {"out", "row"}),
    (spoil("out", (3, 1, 7), 1.0), {"out", "row"}),
    (spoil("lse", (1, 1), math.nan), {"lse"}),
    (spoil("lse", (1, 1), -math.inf), {"lse"}),
    (spoil("lse", (1, 0), math.inf), {"lse"}),
    (spoil("lse", (3, 0), 0.0), {"lse"}),
    (spoil("out", (4, 0, 0), 0.0), {"padding"}),
    (spoil("out", (5, 1, 511), 3.0), {"padding"}),
    (spoil("lse", (5, 1), 0.0), {"padding"}),
    (lambda out, lse: out.mul_(1 + 2 * check.OUT_TOLERANCE), {"out"}),
    (lambda out, lse: out[1, 0].mul_(1 + 3 * check.ROW_TOLERANCE), {"out", "row"}),
    (lambda out, lse: lse.add_(2 * check.LSE_TOLERANCE), {"lse"}),
    (lambda out, lse: out[:2].copy_(out[[1, 0]]), {"out", "row"}),
    (lambda out, lse: out[:4].zero_(), {"out", "row"}),
], ids=["NaN", "inf", "NaN of an empty row", "empty row not 0", "lse NaN", "lse -inf", "lse +inf",
        "lse of an empty row", "padding zeroed", "padding written", "padding's lse", "all off",
        "one row off", "lse off", "rows swapped", "nothing"])
def test_a_wrong_result_does_not(case, right, change, broken):
    out, lse = right
    change(out, lse)
    errors = compare(case, out, lse)
    assert not errors.passed
    limits = {"out": check.OUT_TOLERANCE, "row": check.ROW_TOLERANCE, "lse": check.LSE_TOLERANCE}
    over = {name for name, limit in limits.items() if not getattr(errors, name) <= limit}
    if not errors.padding:
        over.add("padding")
    assert over == broken, errors


def test_a_result_of_the_wrong_order_does_not(case):
    """The failure that gives no NaN."""
    exact = case.exact()
    case.arguments["layout"] = KVLayout.LATENT_FIRST
    out, lse = case.exact()
    case.arguments["layout"] = KVLayout.ROPE_FIRST
    assert compare(case, exact[0].half(), exact[1].float()).passed
    assert not compare(case, out.half(), lse.float()).passed


def test_errors_pass_at_the_limits():
    limits = Errors(check.OUT_TOLERANCE, check.ROW_TOLERANCE, check.LSE_TOLERANCE, True)
    assert limits.passed
    for name in ("out", "row", "lse"):
        for value in (1.001 * getattr(limits, name), math.inf, math.nan):
            assert not dataclasses.replace(limits, **{name: value}).passed
    assert not dataclasses.replace(limits, padding=False).passed


def test_exact_takes_any_form_of_q(case):
    out, lse = case.exact()
    case.arguments["q"] = case.arguments["layout"].split(case.arguments["q"])
    for got, want in zip(case.exact(), (out, lse), strict=True):
        assert torch.equal(got.nan_to_num(), want.nan_to_num())
    assert out.dtype == lse.dtype == torch.float64


# -- the command --------------------------------------------------------------------------


def test_command_line(tmp_path, capsys, seed):
    out = tmp_path / "summary.json"
    assert check.main(["--cases", "3", "--seed", str(seed), "--max-nodes", "6", "--device", "cpu",
                       "--backend", "reference", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "3 of 3 cases passed on CPU with reference: worst relative error" in text
    summary = json.loads(out.read_text())
    assert (summary["cases"], summary["failed"], summary["first_seed"]) == (3, 0, seed)
    assert summary["backend"] == ["reference"] and summary["device"] == "CPU"
    assert summary["failures"] == [] and summary["torch"] == torch.__version__
    assert 0 < summary["worst"]["out"] <= summary["tolerance"]["out"] == 5e-3


def test_command_line_reports_failures(tmp_path, capsys, seed, monkeypatch):
    real = check.random_case
    monkeypatch.setattr(check, "random_case", lambda seed, **k: real(seed, **{**k, **SMALL}))
    monkeypatch.setattr(check, "OUT_TOLERANCE", 1e-9)
    out = tmp_path / "summary.json"
    assert check.main(["--cases", "2", "--seed", str(seed), "--device", "cpu",
                       "--out", str(out)]) == 1
    text = capsys.readouterr().out
    assert f"FAILED seed {seed}: Errors(" in text and "0 of 2 cases passed" in text
    summary = json.loads(out.read_text())
    assert summary["failed"] == 2
    assert [failure["seed"] for failure in summary["failures"]] == [seed, seed + 1]
    assert summary["failures"][0]["case"] == real(seed, **{"max_nodes": 128, **SMALL}).text


def test_random_plans_cover_every_configuration(seed, capsys):
    plans = [check.random_plan(seed + i) for i in range(300)]
    assert {(p["rows"], p["combine_split"]) for p in plans} == {
        (rows, split) for rows in build.TILE_ROWS for split in build.COMBINE_SPLITS}
    assert min(p["groups"] for p in plans) <= 2 and max(p["groups"] for p in plans) > 100
    assert check.random_plan(seed) == plans[0]
    assert check.main(["--every-plan", "--backend", "reference"]) == 2
    assert "--every-plan is of --backend cuda" in capsys.readouterr().err
