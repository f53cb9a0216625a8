"""reference: the oracle against plain Python, and absorption against MLA as it is defined."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from mla_kernels.batch import VerifyBatch
from mla_kernels.layout import ORDERS, KVLayout
from mla_kernels.reference import (
    MLAWeights,
    attend,
    mla_unabsorbed,
    relative_error,
    verify_attention_reference,
)
from mla_kernels.tree import DraftTree, chain

BOTH = pytest.mark.parametrize("order", ORDERS)
#: Two float64 computations of the same sums in another order.
TIGHT = 1e-12


# -- plain Python -------------------------------------------------------------------------


def softmax_row(query, keys, values, scale, cap=0.0):
    """One head of one token over the rows that it sees, number by number."""
    if not keys:
        return None, -math.inf
    logits = []
    for key in keys:
        logit = scale * math.fsum(a * b for a, b in zip(query, key, strict=True))
        logits.append(cap * math.tanh(logit / cap) if cap else logit)
    peak = max(logits)
    weights = [math.exp(x - peak) for x in logits]
    total = math.fsum(weights)
    out = [math.fsum(w * v[d] for w, v in zip(weights, values, strict=True)) / total
           for d in range(len(values[0]))]
    return out, peak + math.log(total)


@dataclasses.dataclass
class Case:
    """Random inputs of a small model, and their meaning spelled out token by token."""

    layout: KVLayout
    drafts: list
    masks: list[np.ndarray]
    lens: list[int]
    tables: list[np.ndarray]
    slots: list[np.ndarray] | None
    page_size: int
    pool: torch.Tensor
    draft_kv: torch.Tensor | None
    q_latent: torch.Tensor
    q_rope: torch.Tensor
    sm_scale: float

    @property
    def batch(self) -> VerifyBatch:
        return VerifyBatch.from_requests(
            self.drafts, self.lens, self.tables, page_size=self.page_size, draft_slots=self.slots
        ).validate(self.pool.shape[0])

    def oracle(self, **changes) -> tuple[torch.Tensor, torch.Tensor]:
        given = {"sm_scale": self.sm_scale, "layout": self.layout, "draft_kv": self.draft_kv,
                 **changes}
        return verify_attention_reference(self.q_latent, self.q_rope, given.pop("pool", self.pool),
                                          given.pop("batch", self.batch), **given)

    def prefix(self, b: int) -> list[int]:
        page = self.page_size
        return [int(self.tables[b][p // page]) * page + p % page for p in range(self.lens[b])]

    def used_slots(self) -> set[int]:
        used = {s for b in range(len(self.lens)) for s in self.prefix(b)}
        return used | {int(s) for own in self.slots or () for s in own}

    def plain(self, k_scale=1.0, v_scale=1.0, logit_cap=0.0):
        """The same by loops over Python numbers, without the package's layout or batch."""
        rank, rope = self.layout.kv_lora_rank, self.layout.qk_rope_head_dim
        first = self.layout.order == "latent_first"

        def parts(row: torch.Tensor) -> tuple[list[float], list[float]]:
            row = row.double().tolist()
            return (row[:rank], row[rank:]) if first else (row[rope:], row[:rope])

        pool = self.pool.reshape(-1, rank + rope)
        out, lse, token = [], [], 0
        for b, mask in enumerate(self.masks):
            before = [parts(pool[s]) for s in self.prefix(b)]
            rows = (self.draft_kv[token:token + len(mask)] if self.slots is None
                    else [pool[int(s)] for s in self.slots[b]])
            own = [parts(r) for r in rows]
            for i in range(len(mask)):
                seen = before + [own[j] for j in range(len(mask)) if mask[i][j]]
                keys = [[k_scale * x for x in la + ro] for la, ro in seen]
                values = [[v_scale * x for x in la] for la, _ in seen]
                heads = []
                for h in range(self.q_latent.shape[1]):
                    query = (self.q_latent[token, h].double().tolist()
                             + self.q_rope[token, h].double().tolist())
                    heads.append(softmax_row(query, keys, values, self.sm_scale, logit_cap))
                out.append([o if o is not None else [0.0] * rank for o, _ in heads])
                lse.append([x for _, x in heads])
                token += 1
        return (torch.tensor(out, dtype=torch.float64), torch.tensor(lse, dtype=torch.float64))


def random_case(rng: np.random.Generator, order: str, page_size: int = 1, *,
                dtype: torch.dtype = torch.float64, in_pool: bool | None = None,
                heads: int | None = None, widths: tuple[int, int] | None = None) -> Case:
    rank, rope = widths or (int(rng.integers(5, 12)), int(rng.integers(1, 5)))
    heads = int(rng.integers(1, 4)) if heads is None else heads
    in_pool = bool(rng.random() < 0.5) if in_pool is None else in_pool
    drafts, masks, lens = [], [], []
    for _ in range(int(rng.integers(1, 5))):
        n = int(rng.integers(1, 9))
        tree = DraftTree([-1] + [int(rng.integers(0, i)) for i in range(1, n)])
        if rng.random() < 0.3:
            drafts.append(rng.random((n, n)) < 0.5)
            masks.append(drafts[-1])
        else:
            drafts.append(tree)
            masks.append(tree.ancestor_mask)
        lens.append(int(rng.integers(1, 30)) if not lens or rng.random() < 0.8 else 0)
    counts = [-(-n // page_size) for n in lens]
    tokens = sum(len(m) for m in masks)
    total = sum(counts) + tokens + 3  # pages, every one used at most once, some not at all
    shuffled = rng.permutation(total)
    tables = np.split(shuffled[:sum(counts)], np.cumsum(counts)[:-1])
    slots = None
    if in_pool:
        ends = np.cumsum([len(m) for m in masks])[:-1]
        slots = np.split(shuffled[sum(counts):sum(counts) + tokens] * page_size, ends)

    def normal(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.normal(size=shape)).to(dtype)

    return Case(
        KVLayout(order, rank, rope), drafts, masks, lens, tables, slots, page_size,
        normal(total * page_size, rank + rope), None if in_pool else normal(tokens, rank + rope),
        normal(tokens, heads, rank), normal(tokens, heads, rope), float(rng.uniform(0.05, 0.8)),
    )


def close(case: Case, want, got, tolerance: float = TIGHT) -> None:
    assert got[0].dtype == got[1].dtype == torch.float64
    assert got[0].shape == want[0].shape and got[1].shape == want[1].shape
    assert relative_error(got[0], want[0]) < tolerance
    assert torch.equal(got[1].isinf(), want[1].isinf())
    seen = ~want[1].isinf()
    torch.testing.assert_close(got[1][seen], want[1][seen], rtol=tolerance, atol=tolerance)


# -- verify_attention_reference -----------------------------------------------------------


@BOTH
@pytest.mark.parametrize("in_pool", [False, True], ids=["draft_kv", "draft_slots"])
@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_against_plain_python(order, in_pool, page_size, rng):
    for _ in range(4):
        case = random_case(rng, order, page_size, in_pool=in_pool)
        close(case, case.plain(), case.oracle())


@BOTH
def test_scales_and_cap_against_plain_python(order, rng):
    for _ in range(4):
        case = random_case(rng, order)
        how = {"k_scale": float(rng.uniform(0.2, 3)), "v_scale": float(rng.uniform(0.2, 3)),
               "logit_cap": float(rng.uniform(0.3, 5))}
        for name in how:
            close(case, case.plain(**{name: how[name]}), case.oracle(**{name: how[name]}))
        close(case, case.plain(**how), case.oracle(**how))
        # A cap far above every logit is no cap.
        close(case, case.oracle(), case.oracle(logit_cap=1e9), 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32,
                                   torch.float8_e4m3fn])
def test_stored_in_fewer_bits(dtype, rng):
    """Whatever the cache is stored in, the arithmetic is float64."""
    case = random_case(rng, "latent_first", in_pool=False)
    case.pool, case.draft_kv = case.pool.to(dtype), case.draft_kv.to(dtype)
    close(case, case.plain(), case.oracle())


@BOTH
def test_pool_shapes_mean_the_same(order, rng):
    case = random_case(rng, order, 4)
    out, lse = case.oracle()
    slots, width = case.pool.shape
    wider = torch.full((slots, width + 7), torch.nan, dtype=torch.float64)
    wider[:, 3:3 + width] = case.pool
    for pool in (case.pool[:, None], case.pool.view(-1, 4, width), wider[:, 3:3 + width],
                 wider.view(-1, 4, width + 7)[..., 3:3 + width]):
        got = case.oracle(pool=pool)
        assert torch.equal(got[0], out) and torch.equal(got[1], lse)


def test_the_order_makes_no_difference_when_it_is_told(rng):
    case = random_case(rng, "latent_first")
    there = case.layout.swapped
    got = case.oracle(
        layout=there, pool=case.layout.convert(case.pool, there),
        draft_kv=None if case.draft_kv is None else case.layout.convert(case.draft_kv, there),
    )
    want = case.oracle()
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@BOTH
def test_the_wrong_order_is_silent_and_far_off(order, rng):
    """Finite numbers, none near the right ones: the failure that the workbook is about."""
    for _ in range(5):
        case = random_case(rng, order, widths=(512, 64), heads=2)
        case.sm_scale = 192**-0.5
        right, _ = case.oracle()
        wrong, lse = case.oracle(layout=case.layout.swapped)
        assert wrong.isfinite().all() and not lse.isnan().any()
        assert relative_error(wrong, right) > 0.5


@BOTH
def test_the_score_alone_does_not_notice_the_order(order, rng):
    """A query in the row's own order gives the right scores whatever both are called; only
    the value moves."""
    case = random_case(rng, order, widths=(512, 64), heads=2)
    row = case.layout.concat(case.q_latent, case.q_rope)
    right, lse = case.oracle()
    case.q_latent, case.q_rope = case.layout.swapped.split(row)
    wrong, lse_too = case.oracle(layout=case.layout.swapped)
    torch.testing.assert_close(lse_too, lse, rtol=1e-10, atol=1e-10)
    assert relative_error(wrong, right) > 0.3


@BOTH
@pytest.mark.parametrize("in_pool", [False, True], ids=["draft_kv", "draft_slots"])
def test_rows_that_nobody_references_have_no_influence(order, in_pool, rng):
    for junk in (math.nan, math.inf, -math.inf):
        case = random_case(rng, order, 4, in_pool=in_pool)
        out, lse = case.oracle()
        others = [s for s in range(len(case.pool)) if s not in case.used_slots()]
        assert others
        case.pool[others] = junk
        got = case.oracle()
        assert torch.equal(got[0], out) and torch.equal(got[1], lse)


@pytest.mark.parametrize("junk", [math.nan, math.inf])
def test_a_draft_row_that_nobody_sees_has_no_influence(junk, rng):
    mask = np.tri(5, dtype=bool)
    mask[:, 2] = False  # node 2 is not even seen by itself
    case = random_case(rng, "rope_first", in_pool=False)
    case.drafts, case.masks, case.lens = [mask], [mask], case.lens[:1]
    case.tables = case.tables[:1]
    case.draft_kv = torch.from_numpy(rng.normal(size=(5, case.layout.row_dim)))
    case.q_latent = torch.from_numpy(rng.normal(size=(5, 2, case.layout.kv_lora_rank)))
    case.q_rope = torch.from_numpy(rng.normal(size=(5, 2, case.layout.qk_rope_head_dim)))
    out, lse = case.oracle()
    case.draft_kv[2] = junk
    got = case.oracle()
    assert torch.equal(got[0], out) and torch.equal(got[1], lse)
    close(case, case.plain(), got)


def test_a_token_that_sees_nothing_gives_zero(rng):
    mask = np.tri(4, dtype=bool)
    mask[1] = False
    case = random_case(rng, "latent_first", in_pool=False)
    case.drafts, case.masks, case.lens = [mask, np.zeros((2, 2), bool)], [mask] * 2, [0, 0]
    case.tables = [[], []]
    rank, rope = case.layout.kv_lora_rank, case.layout.qk_rope_head_dim
    case.draft_kv = torch.from_numpy(rng.normal(size=(6, rank + rope)))
    case.q_latent = torch.from_numpy(rng.normal(size=(6, 3, rank)))
    case.q_rope = torch.from_numpy(rng.normal(size=(6, 3, rope)))
    out, lse = case.oracle()
    blind = [1, 4, 5]
    assert torch.equal(out[blind], torch.zeros(3, 3, rank, dtype=torch.float64))
    assert (lse[blind] == -torch.inf).all()
    seeing = [0, 2, 3]
    assert out[seeing].ne(0).all() and lse[seeing].isfinite().all()


def test_tokens_of_no_request_are_nan(rng):
    """Rows past the last request's, as padding leaves them, have no meaning and say so; a
    request without draft tokens is passed over."""
    case = random_case(rng, "latent_first", in_pool=False)
    batch = VerifyBatch.from_requests([3, 2], [4, 6], [range(4), range(4, 10)])
    batch = dataclasses.replace(batch, qo_indptr=torch.tensor([0, 3, 3], dtype=torch.int32))
    rank, rope = case.layout.kv_lora_rank, case.layout.qk_rope_head_dim
    q_latent = torch.from_numpy(rng.normal(size=(5, 2, rank)))
    q_rope = torch.from_numpy(rng.normal(size=(5, 2, rope)))
    pool = torch.from_numpy(rng.normal(size=(10, rank + rope)))
    drafts = torch.from_numpy(rng.normal(size=(5, rank + rope)))
    kind = {"sm_scale": 0.3, "layout": case.layout}
    out, lse = verify_attention_reference(q_latent, q_rope, pool, batch, draft_kv=drafts, **kind)
    assert out[3:].isnan().all() and lse[3:].isnan().all()
    alone = VerifyBatch.from_requests([3], [4], [range(4)])
    want = verify_attention_reference(q_latent[:3], q_rope[:3], pool, alone, draft_kv=drafts[:3],
                                      **kind)
    assert torch.equal(out[:3], want[0]) and torch.equal(lse[:3], want[1])


@BOTH
def test_a_node_gets_what_its_path_alone_would_give(order, rng):
    """What a tree is for: each node's result is that of the chain from the root to it, and
    that of a plain decode step after its ancestors have entered the cache."""
    for _ in range(3):
        n = int(rng.integers(2, 20))
        tree = DraftTree([-1] + [int(rng.integers(0, i)) for i in range(1, n)])
        length = int(rng.integers(0, 20))
        layout = KVLayout(order, 9, 4)
        pool = torch.from_numpy(rng.normal(size=(length + n, 13)))
        q_latent = torch.from_numpy(rng.normal(size=(n, 2, 9)))
        q_rope = torch.from_numpy(rng.normal(size=(n, 2, 4)))
        at = rng.permutation(length + n)
        prefix, own = at[:length], at[length:]

        def run(nodes, draft, prefix, slots, layout=layout, pool=pool, q=(q_latent, q_rope)):
            batch = VerifyBatch.from_requests([draft], [len(prefix)], [prefix],
                                              draft_slots=[slots])
            return verify_attention_reference(q[0][nodes], q[1][nodes], pool, batch,
                                              sm_scale=0.4, layout=layout)

        out, lse = run(list(range(n)), tree, prefix, own)
        for node in range(n):
            path = tree.path(node)
            line = run(path, chain(len(path)), prefix, own[path])
            step = run([node], 1, np.concatenate([prefix, own[path[:-1]]]), own[[node]])
            for got in (line, step):
                assert relative_error(got[0][-1], out[node]) < TIGHT
                torch.testing.assert_close(got[1][-1], lse[node], rtol=TIGHT, atol=TIGHT)


# -- absorption ---------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [1, 3, 16])
@BOTH
def test_absorbed_equals_unabsorbed(order, heads, rng):
    """Moving W_UK to the query and W_UV to the output changes nothing but the work."""
    for _ in range(3):
        rank, rope, nope, v_dim = (int(x) for x in rng.integers(2, 40, size=4))
        weights = MLAWeights(torch.from_numpy(rng.normal(size=(heads, nope, rank))),
                             torch.from_numpy(rng.normal(size=(heads, v_dim, rank))))
        case = random_case(rng, order, in_pool=False, heads=heads, widths=(rank, rope))
        q_nope = torch.from_numpy(rng.normal(size=(*case.q_latent.shape[:2], nope)))
        case.q_latent = weights.absorb_query(q_nope)
        case.sm_scale = (nope + rope) ** -0.5
        got = weights.project_output(case.oracle()[0])
        token = 0
        for b, mask in enumerate(case.masks):
            rows = torch.cat([case.pool[case.prefix(b)], case.draft_kv[token:token + len(mask)]])
            visible = torch.cat([torch.ones(len(mask), case.lens[b], dtype=torch.bool),
                                 torch.from_numpy(np.array(mask))], dim=1)
            here = slice(token, token + len(mask))
            want = mla_unabsorbed(q_nope[here], case.q_rope[here], case.layout.latent(rows),
                                  case.layout.rope(rows), weights, visible,
                                  sm_scale=case.sm_scale)
            assert want.shape == (len(mask), heads, v_dim)
            assert relative_error(got[here], want) < TIGHT
            token += len(mask)


def test_unabsorbed_against_plain_python(rng):
    heads, rank, rope, nope, v_dim, tokens, rows = 2, 7, 3, 5, 4, 3, 6
    shapes = [(tokens, heads, nope), (tokens, heads, rope), (rows, rank), (rows, rope),
              (heads, nope, rank), (heads, v_dim, rank)]
    q_nope, q_rope, latent, rotary, w_uk, w_uv = (
        torch.from_numpy(rng.normal(size=s)) for s in shapes)
    visible = torch.from_numpy(rng.random((tokens, rows)) < 0.6)
    visible[0] = False
    got = mla_unabsorbed(q_nope, q_rope, latent, rotary, MLAWeights(w_uk, w_uv), visible,
                         sm_scale=0.37)
    for t in range(tokens):
        seen = [r for r in range(rows) if visible[t, r]]
        for h in range(heads):
            keys = [[sum(w_uk[h, k, r].item() * latent[j, r].item() for r in range(rank))
                     for k in range(nope)] + rotary[j].tolist() for j in seen]
            values = [[sum(w_uv[h, v, r].item() * latent[j, r].item() for r in range(rank))
                       for v in range(v_dim)] for j in seen]
            query = q_nope[t, h].tolist() + q_rope[t, h].tolist()
            want, _ = softmax_row(query, keys, values, 0.37)
            np.testing.assert_allclose(got[t, h], want or [0.0] * v_dim, rtol=1e-10, atol=1e-12)


# -- attend -------------------------------------------------------------------------------


def test_attend_is_stable_for_large_logits(rng):
    """Logits of thousands overflow exp unless the row's maximum is taken out first."""
    q = torch.from_numpy(rng.normal(size=(2, 1, 8))) * 1e3
    keys = torch.from_numpy(rng.normal(size=(5, 8))) * 1e3
    values = torch.from_numpy(rng.normal(size=(5, 3)))
    out, lse = attend(q, keys, values, torch.ones(2, 5, dtype=torch.bool), sm_scale=1.0)
    for t in range(2):
        want, want_lse = softmax_row(q[t, 0].tolist(), keys.tolist(), values.tolist(), 1.0)
        np.testing.assert_allclose(out[t, 0], want, rtol=1e-9)
        assert lse[t, 0].item() == pytest.approx(want_lse, rel=1e-12)


def test_attend_with_no_rows_at_all():
    out, lse = attend(torch.ones(3, 2, 8), torch.ones(0, 8), torch.ones(0, 5),
                      torch.ones(3, 0, dtype=torch.bool), sm_scale=1.0)
    assert out.shape == (3, 2, 5) and out.dtype == torch.float64 and not out.any()
    assert (lse == -torch.inf).all() and lse.shape == (3, 2)


@pytest.mark.parametrize("junk", [math.nan, math.inf])
def test_what_one_token_does_not_see_has_no_influence_on_it(junk, rng):
    """Though another token sees it, and is spoiled by it."""
    q = torch.from_numpy(rng.normal(size=(2, 2, 8)))
    keys = torch.from_numpy(rng.normal(size=(6, 8)))
    visible = torch.ones(2, 6, dtype=torch.bool)
    visible[0, 3] = False
    out, lse = attend(q, keys, keys[:, :5], visible, sm_scale=0.5)
    keys[3] = junk
    spoiled, spoiled_lse = attend(q, keys, keys[:, :5], visible, sm_scale=0.5)
    torch.testing.assert_close(spoiled[0], out[0], rtol=TIGHT, atol=TIGHT)
    torch.testing.assert_close(spoiled_lse[0], lse[0], rtol=TIGHT, atol=TIGHT)
    assert not spoiled[1].isfinite().all()


def test_infinite_values_reach_whoever_sees_them(rng):
    """In each column by themselves, as the sum of products says."""
    q = torch.from_numpy(rng.normal(size=(3, 2, 8)))
    keys = torch.from_numpy(rng.normal(size=(6, 8)))
    values = torch.from_numpy(rng.normal(size=(6, 4)))
    visible = torch.ones(3, 6, dtype=torch.bool)
    visible[0, 2], visible[1, 4] = False, False
    out, lse = attend(q, keys, values, visible, sm_scale=0.5)
    values[2, 0], values[4, 0], values[4, 1] = math.inf, -math.inf, math.nan
    spoiled, same_lse = attend(q, keys, values, visible, sm_scale=0.5)
    assert torch.equal(same_lse, lse)
    assert (spoiled[0, :, 0] == -math.inf).all() and (spoiled[1, :, 0] == math.inf).all()
    assert spoiled[2, :, 0].isnan().all()  # inf - inf
    assert spoiled[[0, 2], :, 1].isnan().all()
    torch.testing.assert_close(spoiled[1, :, 1:], out[1, :, 1:], rtol=TIGHT, atol=TIGHT)
    torch.testing.assert_close(spoiled[:, :, 2:], out[:, :, 2:], rtol=TIGHT, atol=TIGHT)


# -- relative_error -----------------------------------------------------------------------


def test_relative_error_is_a_ratio_of_norms(rng):
    a, b = rng.normal(size=(2, 4, 5, 6))
    want = math.sqrt(((a - b) ** 2).sum() / (b**2).sum())
    have = relative_error(torch.from_numpy(a), torch.from_numpy(b))
    assert have == pytest.approx(want, rel=1e-12)
    assert relative_error(torch.from_numpy(a * 8), torch.from_numpy(b * 8)) == pytest.approx(want)
    assert relative_error(torch.from_numpy(b), torch.from_numpy(b)) == 0
    low = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    assert relative_error(low, torch.tensor([1.0, 2.5])) == pytest.approx(0.5 / math.hypot(1, 2.5))


def test_relative_error_lets_no_nan_pass():
    inf, nan = math.inf, math.nan
    for out, expected in [([nan, 1], [0, 1]), ([0, 1], [nan, 1]), ([nan, 1], [nan, 1]),
                          ([inf, 1], [0, 1]), ([0, 1], [-inf, 1]), ([inf, 1], [-inf, 1])]:
        assert relative_error(torch.tensor(out), torch.tensor(expected)) == inf, (out, expected)
    # Infinities in the same places are what `lse` of blind rows has, and are left out.
    assert relative_error(torch.tensor([-inf, 3.0]), torch.tensor([-inf, 4.0])) == 0.25
    assert relative_error(torch.tensor([-inf]), torch.tensor([-inf])) == 0


def test_relative_error_of_nothing_expected():
    assert relative_error(torch.tensor([3.0, 4.0]), torch.zeros(2)) == 5.0
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0.0
    with pytest.raises(ValueError, match=r"out is \[2\], expected \[3\]"):
        relative_error(torch.zeros(2), torch.zeros(3))
