"""Ragged batches and trees of any shape: engines' metadata, the reference and the Triton
interpreter against the definition, with examples that shrink."""

import numpy as np
import pytest
import torch

from mla_kernels import triton as triton_room
from mla_kernels.attention import BACKENDS, verify_attention
from mla_kernels.batch import VerifyBatch
from mla_kernels.layout import KVLayout
from mla_kernels.marshal import from_sglang
from mla_kernels.tree import DraftTree

hypothesis = pytest.importorskip("hypothesis", reason="needs hypothesis (the test extra)")
st = hypothesis.strategies

#: Fewer examples than the default: the interpreter takes about 10 ms a tile. No deadline, as
#: the first example compiles; no data base of examples in the working folder.
settings = hypothesis.settings(max_examples=25, deadline=None, database=None,
                               suppress_health_check=list(hypothesis.HealthCheck))


@st.composite
def drafts(draw, largest):
    parents = [-1]
    for i in range(1, draw(st.integers(1, largest))):
        parents.append(draw(st.integers(0, i - 1)))
    if draw(st.booleans()):
        return DraftTree(parents)
    n = len(parents)
    row = st.lists(st.booleans(), min_size=n, max_size=n)
    return np.array(draw(st.lists(row, min_size=n, max_size=n)), dtype=bool)


@st.composite
def batches(draw, largest=40, longest=70):
    trees = draw(st.lists(drafts(largest), min_size=1, max_size=4))
    lens = [draw(st.integers(0, longest)) for _ in trees]
    page_size = draw(st.sampled_from([1, 4, 16]))
    need = [-(-n // page_size) for n in lens]
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    pages = np.split(rng.permutation(sum(need) + 2)[: sum(need)], np.cumsum(need)[:-1])
    batch = VerifyBatch.from_requests(trees, lens, pages, page_size=page_size)
    return batch, (sum(need) + 2) * page_size


@settings
@hypothesis.given(batches(), st.booleans(), st.sampled_from([torch.int32, torch.int64]))
def test_masks_survive_the_engines_form(drawn, as_bytes, index):
    batch, _ = drawn
    flat, indptr = batch.full_mask()
    slots = torch.cat([batch.prefix_slots(b) for b in range(batch.batch_size)])
    lens = torch.cat([batch.kv_lens.new_zeros(1), batch.kv_lens]).cumsum(0, dtype=torch.int32)
    got = from_sglang(batch.qo_indptr.to(index), lens, slots,
                      flat.to(torch.uint8) if as_bytes else flat, indptr.to(index),
                      num_tokens=batch.num_tokens, max_q_len=batch.max_q_len,
                      max_kv_len=batch.max_kv_len).validate()
    assert torch.equal(got.mask_bits, batch.mask_bits)
    for b in range(batch.batch_size):
        assert torch.equal(got.prefix_slots(b), batch.prefix_slots(b))


def softmax_by_hand(q, rows, seen, scale):
    """Attention of one query over the rows it sees, one number at a time."""
    scores = [scale * float(q @ row) for row, see in zip(rows, seen, strict=True) if see]
    if not scores:
        return torch.zeros(512), -np.inf
    weights = np.exp(np.array(scores) - max(scores))
    values = torch.stack([row[:512] for row, see in zip(rows, seen, strict=True) if see])
    return torch.from_numpy(weights / weights.sum()) @ values, max(scores) + np.log(weights.sum())


@settings
@hypothesis.given(batches(largest=6, longest=12), st.integers(0, 2**31), st.integers(1, 3))
def test_backends_against_the_definition(drawn, seed, heads):
    batch, slots = drawn
    generator = torch.Generator().manual_seed(seed)
    pool = torch.full((slots, 576), torch.nan, dtype=torch.float16)
    for b in range(batch.batch_size):
        own = batch.prefix_slots(b)
        pool[own] = torch.randn(len(own), 576, generator=generator).half()
    q = torch.randn(batch.num_tokens, heads, 576, generator=generator).half()
    draft_kv = torch.randn(batch.num_tokens, 576, generator=generator).half()
    call = {"q": q, "kv_pool": pool, "batch": batch, "sm_scale": 192**-0.5, "draft_kv": draft_kv,
            "layout": KVLayout.LATENT_FIRST}
    backends = ["reference"] + ["triton"] * triton_room.INTERPRETED
    backends += ["emulated"] * ("emulated" in BACKENDS)
    results = {name: verify_attention(**call, backend=name) for name in backends}
    for b in range(batch.batch_size):
        begin, end = batch.qo_indptr[b:b + 2].tolist()
        rows = torch.cat([pool[batch.prefix_slots(b)], draft_kv[begin:end]]).double()
        mask = batch.draft_mask(b).tolist()
        for i in range(begin, end):
            seen = [True] * int(batch.kv_lens[b]) + mask[i - begin]
            want, want_lse = softmax_by_hand(q[i, 0].double(), rows, seen, 192**-0.5)
            for name, (out, lse) in results.items():
                # fp16 has 11 bits; a value is below 6, and rounds once (twice, in Triton).
                assert torch.allclose(out[i, 0].double(), want.double(), atol=1e-2), name
                assert np.isclose(float(lse[i, 0]), want_lse, atol=2e-3), name


@hypothesis.settings(settings, max_examples=10)
@hypothesis.given(batches(largest=9, longest=600), st.integers(0, 2**31), st.sampled_from(
    ["reference", "emulated"]))
def test_batch_invariant(drawn, seed, backend):
    """A request alone has the bits that it has among others."""
    hypothesis.assume(backend in BACKENDS)
    whole, slots = drawn
    generator = torch.Generator().manual_seed(seed)
    pool = torch.randn(slots, 576, generator=generator).half()
    q = torch.randn(whole.num_tokens, 4, 576, generator=generator).half()
    draft_kv = torch.randn(whole.num_tokens, 576, generator=generator).half()
    call = {"kv_pool": pool, "sm_scale": 192**-0.5, "backend": backend, "batch_invariant": True}
    out, lse = verify_attention(q, batch=whole, draft_kv=draft_kv, **call)
    for b in range(whole.batch_size):
        begin, end = whole.qo_indptr[b:b + 2].tolist()
        first, last = whole.kv_indptr[b:b + 2].tolist()
        own = VerifyBatch.from_requests(
            [whole.draft_mask(b)], [int(whole.kv_lens[b])], [whole.kv_indices[first:last]],
            page_size=whole.page_size)
        alone = verify_attention(q[begin:end], batch=own, draft_kv=draft_kv[begin:end], **call)
        assert torch.equal(alone[0].view(torch.int16), out[begin:end].view(torch.int16))
        assert torch.equal(alone[1].view(torch.int32), lse[begin:end].view(torch.int32))
