"""Every bad input is named: what was given and what it must be, and nothing is written.

The table of `verify_attention` is REFUSED in test_attention.py, which runs it; builds that fail
half-way, for want of a compiler or of room are in test_build.py. Here is what engines hand over.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from test_attention import REFUSED

from mla_kernels import build
from mla_kernels.attention import verify_attention
from mla_kernels.batch import VerifyBatch
from mla_kernels.checked import RULES, check_batch, violations
from mla_kernels.cuda import plan
from mla_kernels.graphs import capture
from mla_kernels.layout import KVLayout
from mla_kernels.marshal import StaticBatch, from_block_table, from_flashinfer, from_sglang
from mla_kernels.tree import DraftTree

BUDGET = build.SM120_SMEM_PER_BLOCK


def batch(**changes):
    b = VerifyBatch.from_requests([2, 3], [1, 4], [[5], [1, 2, 3, 4]])
    return dataclasses.replace(b, **changes)


def requests(drafts=(2, 3), lens=(1, 2), pages=((0,), (1, 2)), **how):
    return VerifyBatch.from_requests(list(drafts), list(lens), [list(p) for p in pages], **how)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def sglang(**changes):
    """A request of 2 nodes after 3 tokens and one of 3 after 2, as SGLang holds them."""
    b = VerifyBatch.from_requests([2, 3], [3, 2], [[0, 1, 2], [3, 4]])
    flat, indptr = b.full_mask()
    call = {"qo_indptr": b.qo_indptr, "kv_indptr": b.kv_indptr, "kv_indices": b.kv_indices.long(),
            "custom_mask": flat, "mask_indptr": indptr, "num_tokens": 5, "max_q_len": 3,
            "max_kv_len": 3}
    return from_sglang(**(call | changes))


def static(**changes):
    b = VerifyBatch.from_requests([2, 3], [3, 2], [[0, 1, 2], [3, 4]])
    flat, indptr = b.full_mask()
    held = StaticBatch(2, 5, 6, max_q_len=3, max_kv_len=3, in_pool=changes.pop("in_pool", False))
    call = {"qo_indptr": b.qo_indptr, "kv_indptr": b.kv_indptr, "kv_indices": b.kv_indices,
            "custom_mask": flat, "mask_indptr": indptr}
    held.from_sglang(**(call | changes))


def flashinfer(**changes):
    call = {"qo_indptr": ints(0, 2), "kv_indptr": ints(0, 5), "kv_indices": ints(4, 3, 2, 1, 0),
            "kv_lens": ints(5), "mask_bits": torch.zeros(2, 1, dtype=torch.int32)}
    return from_flashinfer(**(call | changes), page_size=1, max_q_len=2, max_kv_len=3)


def table(**changes):
    call = {"qo_indptr": ints(0, 2), "block_table": ints(4, 3, 2, 1, 0)[None],
            "seq_lens": ints(5), "mask_bits": torch.zeros(2, 1, dtype=torch.int32)}
    return from_block_table(**(call | changes), page_size=1, max_q_len=2, max_kv_len=3)


def checked(slots=6, flat=None, indptr=None, **changes):
    return check_batch(batch(**changes), slots, custom_mask=flat, mask_indptr=indptr)


MASK = torch.ones(27, dtype=torch.bool)      # of `batch()`: 2 x 3 and 3 x 7 entries

#: name: (call, exception, its message as a pattern)
BAD = {
    # -- trees
    "a parent of itself": (lambda: DraftTree([-1, 0, 2]), ValueError,
                           r"parents\[2\] must be in 0 .. 1 .*; got itself"),
    "a cycle": (lambda: DraftTree([-1, 2, 1]), ValueError,
                r"parents\[1\] must be in 0 .. 0 \(a parent comes before its child\); got 2"),
    "two roots": (lambda: DraftTree([-1, 0, -1]), ValueError, r"parents\[2\] must be in 0 .. 1"),
    "no root": (lambda: DraftTree([0, 0]), ValueError, r"parents\[0\] must be -1 .*; got 0"),
    "no nodes": (lambda: DraftTree([]), (TypeError, ValueError), "parents must be"),
    "parents of floats": (lambda: DraftTree([-1.0, 0.0]), TypeError,
                          "parents must be integers; got dtype float64"),
    "too many nodes": (lambda: DraftTree([-1, *range(1024)]), ValueError,
                       "parents has 1025 nodes; at most 1024 are supported"),
    "too long a chain": (lambda: requests((1025,), (0,), ((),)), ValueError,
                         r"drafts\[0\] must be in 1 .. 1024 tokens; got 1025"),
    "a mask that is not square": (lambda: requests((np.ones((2, 3), bool), 1)), ValueError,
                                  r"drafts\[0\] must be \[T, T\] .*; got \[2, 3\]"),
    "a mask of numbers": (lambda: requests((np.ones((2, 2)), 1)), TypeError,
                          r"drafts\[0\] must be boolean; got float64"),
    # -- requests
    "no requests": (lambda: requests((), (), ()), ValueError, "drafts is empty"),
    "a prefix too few": (lambda: requests(lens=(1,)), ValueError,
                         "prefix_lens must have one entry for each of 2 drafts; got 1"),
    "a negative prefix": (lambda: requests(lens=(-1, 2)), ValueError,
                          r"prefix_lens\[0\] must be at least 0; got -1"),
    "a page too few": (lambda: requests(pages=((0,), (1,))), ValueError,
                       r"pages\[1\] must have at least 2 pages for 2 tokens .*; got 1"),
    "pages of 48": (lambda: requests(page_size=48), ValueError,
                    "page_size must be a power of two up to 1024; got 48"),
    "a negative page": (lambda: requests(pages=((-1,), (1, 2))), ValueError,
                        r"pages\[0\] must be in 0 .. 2\*\*31 - 1; got -1"),
    # -- a batch's arrays
    "kv_indices None": (lambda: batch(kv_indices=None), TypeError,
                        "kv_indices must be a tensor; got NoneType"),
    "kv_indices of 64 bits": (lambda: batch(kv_indices=torch.zeros(5, dtype=torch.int64)),
                              TypeError, "kv_indices must be int32; got torch.int64"),
    "qo_indptr cut to [:bs]": (lambda: batch(qo_indptr=ints(0, 2)), ValueError,
                               r"qo_indptr must be \[bs \+ 1\] = \[3\], as kv_lens is \[2\]; "
                               r"got \[2\]"),
    "kv_indptr cut to [:bs]": (lambda: batch(kv_indptr=ints(0, 1)), ValueError,
                               r"kv_indptr must be \[bs \+ 1\] = \[3\]"),
    "kv_indices strided": (lambda: batch(kv_indices=torch.zeros(10, dtype=torch.int32)[::2]),
                           ValueError, r"kv_indices must be contiguous; got strides \(2,\)"),
    "arrays on two devices": (lambda: batch(kv_lens=ints(1, 4).to("meta")), ValueError,
                              "kv_lens is on meta, qo_indptr on cpu"),
    "mask_bits too narrow": (lambda: batch(max_q_len=40), ValueError,
                             "mask_bits must have at least .* = 2 words a row; got 1"),
    "max_q_len 1025": (lambda: batch(max_q_len=1025), ValueError,
                       "max_q_len must be in 1 .. 1024; got 1025"),
    # -- SGLang's metadata
    "mask_indptr cut to [:bs]": (lambda: sglang(mask_indptr=torch.tensor([0, 10])), ValueError,
                                 r"mask_indptr must be \[bs \+ 1\] = \[3\]; got \[2\]"),
    "mask_indptr None": (lambda: sglang(mask_indptr=None), ValueError,
                         "mask_indptr must be given for FULL_MASK; got None"),
    "mask_indptr of floats": (lambda: sglang(mask_indptr=torch.zeros(3)), TypeError,
                              "mask_indptr must be int32 or int64; got torch.float32"),
    "custom_mask None": (lambda: sglang(custom_mask=None), TypeError,
                         "custom_mask must be a tensor; got NoneType"),
    "custom_mask of floats": (lambda: sglang(custom_mask=torch.ones(25)), TypeError,
                              "custom_mask must be torch.bool or torch.uint8 for FULL_MASK"),
    "custom_mask a matrix": (lambda: sglang(custom_mask=torch.ones(5, 5).bool()), ValueError,
                             r"custom_mask must be flat and not empty; got \[5, 5\]"),
    "custom_mask elsewhere": (lambda: sglang(custom_mask=torch.ones(25, device="meta").bool()),
                              ValueError, "qo_indptr is on cpu, custom_mask on meta"),
    "mask mode unknown": (lambda: sglang(mode="CAUSAL"), ValueError,
                          "mode must be one of FULL_MASK, .*; got 'CAUSAL'"),
    "SGLang's kv_indices None": (lambda: static(kv_indices=None), TypeError,
                                 "kv_indices must be a tensor; got NoneType"),
    "qo_indptr a request short": (lambda: sglang(qo_indptr=ints(0, 2)), ValueError,
                                  r"qo_indptr must be \[bs \+ 1\] = \[3\]; got \[2\]"),
    "qo_indptr of bytes": (lambda: sglang(qo_indptr=torch.zeros(3, dtype=torch.uint8)), TypeError,
                           "qo_indptr must be int32 or int64; got torch.uint8"),
    "kv_indices of floats": (lambda: static(kv_indices=torch.zeros(5)), TypeError,
                             "kv_indices must be int32 or int64; got torch.float32"),
    "more pages than capacity": (lambda: static(kv_indices=ints(*range(7))), ValueError,
                                 "kv_indices must have at most num_pages = 6 entries; got 7"),
    "drafts in the pool": (lambda: static(in_pool=True), ValueError,
                           "in_pool must be False for SGLang's metadata"),
    "no capacity": (lambda: StaticBatch(0, 5, 6, max_q_len=3, max_kv_len=3), ValueError,
                    "batch_size must be at least 1; got 0"),
    # -- FlashInfer's and vLLM's
    "kv_lens of other requests": (lambda: flashinfer(kv_lens=ints(5, 5)), ValueError,
                                  r"qo_indptr must be \[bs \+ 1\] = \[3\]; got \[2\]"),
    "packed mask of bytes": (lambda: flashinfer(mask_bits=torch.zeros(2, 1, dtype=torch.uint8)),
                             ValueError, r"mask_bits must be int32 \[2, 1\]; got torch.uint8"),
    "a block table of two requests": (lambda: table(block_table=ints(1, 2, 3)[:, None]),
                                      ValueError, r"block_table must be \[1, blocks\].*\[3, 1\]"),
    "a block table of floats": (lambda: table(block_table=torch.zeros(1, 5)), TypeError,
                                "block_table must be int32 or int64; got torch.float32"),
    # -- values, on the device
    "qo_indptr from 1": (lambda: checked(qo_indptr=ints(1, 2, 5)), ValueError,
                         "qo_indptr must start at 0"),
    "kv_indptr from 1": (lambda: checked(kv_indptr=ints(1, 2, 5)), ValueError,
                         "kv_indptr must start at 0"),
    "qo_indptr decreases": (lambda: checked(qo_indptr=ints(0, 3, 2)), ValueError,
                            r"qo_indptr must not decrease \(broken at 1 place\)"),
    "kv_indptr decreases": (lambda: checked(kv_indptr=ints(0, 5, 4), kv_lens=ints(1, 0)),
                            ValueError, "kv_indptr must not decrease"),
    "qo_indptr too far": (lambda: checked(qo_indptr=ints(0, 3, 6)), ValueError,
                          "qo_indptr must end within num_tokens = 5"),
    "kv_indptr too far": (lambda: checked(kv_indptr=ints(0, 1, 6)), ValueError,
                          "kv_indptr must end within the 5 entries of kv_indices"),
    "more nodes than max_q_len": (lambda: checked(qo_indptr=ints(0, 1, 5)), ValueError,
                                  "at most max_q_len = 3 draft tokens"),
    "a length past max_kv_len": (lambda: checked(kv_lens=ints(1, 5)), ValueError,
                                 "kv_lens must be in 0 .. max_kv_len = 4"),
    "a negative length": (lambda: checked(kv_lens=ints(-1, 4)), ValueError, "kv_lens must be in 0"),
    "a length past its pages": (lambda: checked(kv_lens=ints(2, 4)), ValueError,
                                "kv_indptr must give each request pages for its kv_lens"),
    "an index past the pool": (lambda: checked(slots=5), ValueError,
                               r"kv_indices must be pages of a pool of 5 slots"),
    "an index below the pool": (lambda: checked(kv_indices=ints(5, 1, -2, 3, -4)), ValueError,
                                r"kv_indices must be .* \(broken at 2 places\)"),
    "a draft slot past the pool": (lambda: checked(draft_slots=ints(0, 1, 2, 3, 6)), ValueError,
                                   "draft_slots must be slots of a pool of 6 slots"),
    "a mask shorter than its indptr": (
        lambda: checked(flat=MASK[:-1], indptr=torch.tensor([0, 6, 27])), ValueError,
        r"custom_mask must have mask_indptr\[-1\] entries; it has 26"),
    "mask_indptr from 1": (lambda: checked(flat=MASK, indptr=torch.tensor([1, 7, 28])), ValueError,
                           "mask_indptr must start at 0"),
    "mask_indptr of other lengths": (
        lambda: checked(flat=MASK, indptr=torch.tensor([0, 4, 27])), ValueError,
        "mask_indptr must .* leave each request as many"),
    # -- launches and builds
    "rows not compiled": (lambda: plan(8, 1, 8, 1000, 132, rows=24), ValueError,
                          r"rows must be one of \(16, 32, 64\); got 24"),
    "no groups": (lambda: plan(8, 1, 8, 1000, 132, groups=0), ValueError, "groups must be in 1 .."),
    "arch without a form": (lambda: build.load("blackwell"), ValueError,
                            "arch must look like sm_120 or sm_90a; got 'blackwell'"),
    "arch too old": (lambda: build.load("sm_75"), ValueError, "arch must be sm_80 or later"),
    "arch that does not exist": (lambda: build.load("sm_80a"), ValueError,
                                 "arch sm_80a does not exist"),
    "a capture without a GPU": (lambda: capture(lambda: None), RuntimeError,
                                "capture needs a CUDA device"),
}


@pytest.mark.parametrize("name", BAD)
def test_refused(name):
    call, error, message = BAD[name]
    if name == "a capture without a GPU" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(error, match=message):
        call()


def test_there_are_enough():
    assert len(BAD) >= 60 and len(REFUSED) >= 60


def test_what_is_good_passes():
    """The calls that the table spoils, as they are."""
    assert checked(flat=MASK, indptr=torch.tensor([0, 6, 27]))
    assert sglang().validate() and flashinfer().validate() and table().validate()
    assert requests().validate()
    static()
    assert violations(batch(), 6).tolist() == [0] * len(RULES)


def test_a_static_batch_is_left_alone_by_what_is_refused():
    good = VerifyBatch.from_requests([2, 3], [3, 2], [[0, 1, 2], [3, 4]])
    flat, indptr = good.full_mask()
    held = StaticBatch(2, 5, 6, max_q_len=3, max_kv_len=3)
    held.from_sglang(good.qo_indptr, good.kv_indptr, good.kv_indices, flat, indptr)
    arrays = [getattr(held.batch, name) for name in ("qo_indptr", "kv_indptr", "kv_indices",
                                                     "kv_lens", "mask_bits")]
    before = [x.clone() for x in arrays]
    call = {"qo_indptr": good.qo_indptr, "kv_indptr": good.kv_indptr + 1,
            "kv_indices": good.kv_indices + 1, "custom_mask": ~flat, "mask_indptr": indptr}
    for change in ({"mask_indptr": indptr[:-1]}, {"kv_indices": torch.arange(9)},
                   {"custom_mask": flat.float()}, {"qo_indptr": good.qo_indptr[:-1]},
                   {"kv_indptr": good.kv_indptr.float()}, {"mode": "NONE"}):
        with pytest.raises((TypeError, ValueError)):
            held.from_sglang(**(call | change))
        assert all(torch.equal(a, b) for a, b in zip(arrays, before, strict=True)), change


@pytest.mark.parametrize("change", [
    {"kv_indices": ints(5, 1, 2, 3, 99)}, {"kv_indptr": ints(1, 2, 5)}, {"kv_lens": ints(1, 9)},
    {"qo_indptr": ints(0, 4, 3)},
], ids=lambda c: next(iter(c)))
def test_a_checked_call_writes_nothing(monkeypatch, generator, change):
    """What the host's checks cannot see is refused before anything runs."""
    pool = torch.randn(6, 576, generator=generator).half()
    call = {"q": torch.randn(5, 2, 576, generator=generator).half(), "kv_pool": pool,
            "draft_kv": torch.randn(5, 576, generator=generator).half(), "sm_scale": 0.07,
            "layout": KVLayout.LATENT_FIRST, "backend": "reference"}
    out, lse = torch.full((5, 2, 512), 7.0).half(), torch.full((5, 2), 7.0)
    monkeypatch.setenv("MLA_KERNELS_CHECKED", "1")
    with pytest.raises(ValueError, match=f"{next(iter(change))} must"):
        verify_attention(**call, batch=batch(**change), out=out, lse=lse)
    assert (out == 7).all() and (lse == 7).all()
    verify_attention(**call, batch=batch(), out=out, lse=lse)
    assert (out != 7).any()


def test_checks_are_off_by_default(monkeypatch, generator):
    """An index that is past the pool only where nothing reads it is then not noticed."""
    pool = torch.randn(6, 576, generator=generator).half()
    spare = batch(kv_lens=ints(1, 3), kv_indices=ints(5, 1, 2, 3, 99))
    call = {"q": torch.randn(5, 2, 576, generator=generator).half(), "kv_pool": pool,
            "draft_kv": torch.randn(5, 576, generator=generator).half(), "sm_scale": 0.07,
            "layout": KVLayout.LATENT_FIRST, "batch": spare, "backend": "triton"}
    monkeypatch.setenv("MLA_KERNELS_CHECKED", "1")
    with pytest.raises(ValueError, match="kv_indices must be pages"):
        verify_attention(**call)
    monkeypatch.delenv("MLA_KERNELS_CHECKED")
    if not torch.cuda.is_available():
        assert verify_attention(**call)[0].isfinite().all()


def test_the_largest_shared_memory_of_a_block():
    """101,376 bytes are accepted, 16 more refused."""
    report = build.KernelReport("tree_verify", "bf16", 64, None, "sm_120", 255, 0, 0, BUDGET, {})
    assert not report.problems
    over = dataclasses.replace(report, smem_bytes=BUDGET + 16)
    assert over.problems == ["101,392 B of shared memory, over 101,376"]
