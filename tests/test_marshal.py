"""marshal: engines' metadata gives the batch that from_requests gives."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mla_kernels.batch import VerifyBatch
from mla_kernels.marshal import (
    MASK_MODES,
    StaticBatch,
    from_block_table,
    from_flashinfer,
    from_sglang,
    pack_tree_mask,
)


def draw(rng, largest=70):
    bs = int(rng.integers(1, 6))
    masks = [rng.random((n, n)) < 0.5 for n in rng.integers(1, largest + 1, size=bs)]
    lens = [0, 1, *rng.integers(0, 90, size=bs).tolist()][:bs]
    return masks, lens


@pytest.mark.parametrize("mode", MASK_MODES[:2])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_sglang(mode, dtype, index, rng):
    for _ in range(10):
        masks, lens = draw(rng)
        want = VerifyBatch.from_requests(masks, lens, [rng.integers(0, 99, n) for n in lens])
        flat, indptr = want.full_mask()
        if mode == "QLEN_ONLY":
            flat, indptr = torch.from_numpy(np.concatenate([m.ravel() for m in masks])), None
        flat = torch.cat([flat, torch.ones(9, dtype=torch.bool)]).to(dtype)  # a fixed buffer
        indices = torch.cat([want.kv_indices.long(), torch.full((4,), 7)])
        got = from_sglang(want.qo_indptr.to(index), want.kv_indptr, indices, flat, indptr,
                          num_tokens=want.num_tokens + 3, max_q_len=want.max_q_len,
                          max_kv_len=want.max_kv_len, mode=mode).validate()
        assert torch.equal(got.mask_bits[:-3], want.mask_bits) and not got.mask_bits[-3:].any()
        assert torch.equal(got.kv_lens, want.kv_lens)


@pytest.mark.parametrize("size", [8, 16, 32])
def test_bit_packed(size, rng):
    dtype = {8: np.uint8, 16: np.uint16, 32: np.uint32}[size]
    for _ in range(20):
        masks, lens = draw(rng, size)
        want = VerifyBatch.from_requests(masks, lens, [rng.integers(0, 99, n) for n in lens])
        words = [sum(int(seen) << j for j, seen in enumerate(row)) for m in masks for row in m]
        ones = np.iinfo(dtype).max  # what a fixed buffer holds past the end
        flat = torch.from_numpy(np.array([*words, ones, ones], dtype=dtype))
        got = from_sglang(want.qo_indptr, want.kv_indptr, want.kv_indices, flat, None,
                          num_tokens=want.num_tokens + 3, max_q_len=want.max_q_len,
                          max_kv_len=want.max_kv_len, mode="QLEN_ONLY_BITPACKING").validate()
        assert torch.equal(got.mask_bits[:-3], want.mask_bits) and not got.mask_bits[-3:].any()


def test_one_rule_for_the_bits_as_sglang_sets_them():
    """Node 2 is a child of node 0 beside node 1; 9 of 10 sees 0 alone: byte 1, bit 1."""
    masks = [np.eye(10, dtype=bool)]
    masks[0][:, 0] = True
    want = VerifyBatch.from_requests(masks, [0], [[]])
    as_bytes = [byte for i in range(10) for byte in ((1 | 1 << i) & 255, (1 | 1 << i) >> 8)]
    flat = torch.tensor(as_bytes, dtype=torch.uint8).view(torch.uint16)
    out = pack_tree_mask(flat, None, want.qo_indptr, want.kv_lens,
                         torch.empty_like(want.mask_bits), mode="QLEN_ONLY_BITPACKING")
    assert torch.equal(out, want.mask_bits)


def in_pool(rng, page_size):
    """A batch whose drafts follow their prefixes, and its table with 200 pages a request."""
    masks, lens = draw(rng)
    table = rng.permutation(len(lens) * 200).reshape(len(lens), 200)
    at = [np.arange(len(m)) + n for m, n in zip(masks, lens, strict=True)]
    slots = [table[b][p // page_size] * page_size + p % page_size for b, p in enumerate(at)]
    want = VerifyBatch.from_requests(masks, lens, table, page_size=page_size, draft_slots=slots)
    return want, table, want.kv_lens + want.qo_indptr.diff()


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("form", ["vllm", "flashinfer"])
def test_drafts_that_lie_in_the_pool(form, page_size, rng):
    want, table, seq = in_pool(rng, page_size)
    sizes = {"page_size": page_size, "max_q_len": want.max_q_len, "max_kv_len": want.max_kv_len}
    if form == "vllm":
        got = from_block_table(want.qo_indptr.long(), torch.from_numpy(table), seq,
                               want.mask_bits, **sizes)
    else:
        counts = [-(-n // page_size) for n in seq.tolist()]
        pages = np.concatenate([row[:n] for row, n in zip(table, counts, strict=True)])
        indptr = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)
        got = from_flashinfer(want.qo_indptr, indptr, torch.from_numpy(pages), seq,
                              want.mask_bits, **sizes)
    got.validate()
    assert torch.equal(got.draft_slots, want.draft_slots)
    for b in range(want.batch_size):
        assert torch.equal(got.prefix_slots(b), want.prefix_slots(b))
        assert torch.equal(got.draft_mask(b), want.draft_mask(b))


def test_a_mask_that_ends_early_hides_what_it_lacks():
    batch = VerifyBatch.from_requests([3, 3], [2, 4], [[0, 1], [2, 3, 4, 5]])
    flat, indptr = batch.full_mask()
    out = pack_tree_mask(flat[:-7], indptr, batch.qo_indptr, batch.kv_lens,
                         torch.empty_like(batch.mask_bits))
    assert torch.equal(out[:-1], batch.mask_bits[:-1]) and out[-1] == 0


@pytest.mark.parametrize(("change", "error", "message"), [
    ({"mode": "FULL"}, ValueError, "mode must be one of FULL_MASK, .*; got 'FULL'"),
    ({"custom_mask": torch.ones(17)}, TypeError,
     "custom_mask must be torch.bool or torch.uint8 for FULL_MASK; got torch.float32"),
    ({"mode": "QLEN_ONLY_BITPACKING"}, TypeError, "custom_mask must be torch.uint8 or .*uint32"),
    ({"custom_mask": torch.ones(5, 5).bool()}, ValueError, r"must be flat .*got \[5, 5\]"),
    ({"custom_mask": torch.ones(0).bool()}, ValueError, r"not empty; got \[0\]"),
    ({"mask_indptr": None}, ValueError, "mask_indptr must be given for FULL_MASK; got None"),
    ({"mask_indptr": torch.zeros(3)}, TypeError, "mask_indptr must be int32 or int64; got .*32"),
    ({"mask_indptr": torch.zeros(3, dtype=torch.int64, device="meta")}, ValueError,
     "mask_indptr is on meta, custom_mask on cpu"),
    ({"qo_indptr": torch.zeros(4).int()}, ValueError,
     r"qo_indptr must be \[bs \+ 1\] = \[3\]; got \[4\]"),
    ({"out": torch.zeros(5, 1)}, TypeError, r"out must be int32 \[num_tokens, words\]; got"),
    ({"out": torch.zeros(5).int()}, TypeError, r"out must be int32 .*got torch.int32 \[5\]"),
], ids=range(11))
def test_refused(change, error, message):
    batch = VerifyBatch.from_requests([2, 3], [1, 0], [[0], []])
    flat, indptr = batch.full_mask()
    out = torch.full((5, 1), 7, dtype=torch.int32)
    call = {"custom_mask": flat, "mask_indptr": indptr, "qo_indptr": batch.qo_indptr,
            "kv_lens": batch.kv_lens, "out": out}
    with pytest.raises(error, match=message):
        pack_tree_mask(**(call | change))
    assert (out == 7).all()


def test_a_block_table_of_other_requests_is_refused():
    batch = VerifyBatch.from_requests([2, 3], [1, 0], [[0], []])
    with pytest.raises(ValueError, match=r"block_table must be \[2, blocks\].*got \[3, 4\]"):
        from_block_table(batch.qo_indptr, torch.zeros(3, 4), batch.kv_lens, batch.mask_bits,
                         page_size=1, max_q_len=3, max_kv_len=1)


def test_mask_indptr_cut_to_the_batch_size_is_refused():
    batch = VerifyBatch.from_requests([2, 3], [1, 0], [[0], []])
    flat, indptr = batch.full_mask()
    with pytest.raises(ValueError, match=r"mask_indptr must be \[bs \+ 1\] = \[3\]; got \[2\]"):
        pack_tree_mask(flat, indptr[:2], batch.qo_indptr, batch.kv_lens,
                       torch.empty_like(batch.mask_bits))


class NothingNew(TorchDispatchMode):
    """Fails on an operation whose result is not in memory that it was given, and on one whose
    result depends on values: what a capture would have to allocate or to wait for."""

    READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "item")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs))
                 if isinstance(x, torch.Tensor)}
        assert not any(read in func.__name__ for read in self.READS), f"{func} reads"
        result = func(*args, **kwargs)
        for x in tree_leaves(result):
            assert not isinstance(x, torch.Tensor) or x.untyped_storage().data_ptr() in given, (
                f"{func} allocates {x.dtype} {list(x.shape)}")
        return result


@pytest.mark.parametrize("spoiled", [lambda: torch.zeros(1), lambda: torch.ones(3).sum().item(),
                                     lambda: torch.ones(3).diff(), lambda: torch.ones(3).int()])
def test_the_guard_sees_what_it_guards_against(spoiled):
    with NothingNew(), pytest.raises(AssertionError, match="allocates|reads"):
        spoiled()


@pytest.mark.parametrize("mode", MASK_MODES)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_sglang_into_a_static_batch(mode, index, rng):
    """Again and again into the same buffers, requests fewer than its capacity as padding."""
    static = StaticBatch(6, 200, 600, max_q_len=32, max_kv_len=90)
    pointers = [getattr(static.batch, name).data_ptr() for name in NAMES]
    for _ in range(10):
        masks, lens = draw(rng, 32)
        want = VerifyBatch.from_requests(masks, lens, [rng.integers(0, 99, n) for n in lens])
        flat, mask_indptr = want.full_mask()
        if mode == "QLEN_ONLY":
            flat = torch.from_numpy(np.concatenate([m.ravel() for m in masks]))
        if mode == "QLEN_ONLY_BITPACKING":
            flat = want.mask_bits[:, 0].contiguous().view(torch.uint32)
        more = 6 - want.batch_size

        def padded(indptr, more=more):
            return torch.cat([indptr, indptr[-1:].expand(more)]).to(index)

        arguments = (padded(want.qo_indptr), padded(want.kv_indptr), want.kv_indices.to(index),
                     flat, None if mode != "FULL_MASK" else padded(mask_indptr))
        with NothingNew():
            got = static.from_sglang(*arguments, mode=mode)
        got.validate()
        assert got is static.batch
        assert [getattr(got, name).data_ptr() for name in NAMES] == pointers
        for b in range(want.batch_size):
            assert torch.equal(got.prefix_slots(b), want.prefix_slots(b))
            assert torch.equal(got.draft_mask(b), want.draft_mask(b))
        assert not got.mask_bits[want.num_tokens:].any()


NAMES = ("qo_indptr", "kv_indptr", "kv_indices", "kv_lens", "mask_bits")


@pytest.mark.parametrize("form", ["vllm", "flashinfer"])
def test_pools_into_a_static_batch(form, rng):
    for _ in range(10):
        want, table, seq = in_pool(rng, 16)
        bs = want.batch_size
        static = StaticBatch(bs, want.num_tokens, bs * 200, page_size=16, in_pool=True,
                             max_q_len=want.max_q_len, max_kv_len=want.max_kv_len)
        if form == "vllm":
            arguments = want.qo_indptr, torch.from_numpy(table).int(), seq, want.mask_bits
            convert = static.from_block_table
        else:
            indptr = torch.arange(bs + 1) * 200
            arguments = (want.qo_indptr, indptr, torch.from_numpy(table.ravel()), seq,
                         want.mask_bits)
            convert = static.from_flashinfer
        with NothingNew():
            got = convert(*arguments)
        got.validate()
        assert torch.equal(got.draft_slots, want.draft_slots)
        for b in range(bs):
            assert torch.equal(got.prefix_slots(b), want.prefix_slots(b))
