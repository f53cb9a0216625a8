"""batch: marshalling against plain loops, and what is refused, by message."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from mla_kernels.batch import PAGE_SIZES, VerifyBatch
from mla_kernels.tree import DraftTree, chain, kary

PAGED = pytest.mark.parametrize("page_size", [1, 16, 64, 256])
TENSORS = ("qo_indptr", "kv_indptr", "kv_indices", "kv_lens", "mask_bits", "draft_slots")


def random_draft(rng: np.random.Generator, kind: str, size: int) -> Any:
    if kind == "chain":
        return size
    if kind == "tree":
        return DraftTree([-1] + [int(rng.integers(0, i)) for i in range(1, size)])
    mask = rng.random((size, size)) < rng.random()  # any matrix, not only a tree's
    return torch.from_numpy(mask) if kind == "tensor" else mask


def visible(draft: Any) -> list[list[bool]]:
    """What sees what, by a walk up the parents or from the matrix itself."""
    if isinstance(draft, int):
        return [[j <= i for j in range(draft)] for i in range(draft)]
    if isinstance(draft, DraftTree):
        rows = []
        for i in range(len(draft)):
            up = [i]
            while draft.parents[up[-1]] >= 0:
                up.append(int(draft.parents[up[-1]]))
            rows.append([j in up for j in range(len(draft))])
        return rows
    return [[bool(v) for v in row] for row in draft]


@dataclasses.dataclass
class Requests:
    drafts: list[Any]
    prefix_lens: list[int]
    pages: list[np.ndarray]
    slots: list[np.ndarray] | None
    page_size: int

    def batch(self, **changes: Any) -> VerifyBatch:
        given = {"page_size": self.page_size, "draft_slots": self.slots, **changes}
        return VerifyBatch.from_requests(self.drafts, self.prefix_lens, self.pages, **given)


def random_requests(rng: np.random.Generator, page_size: int, *, bs: int | None = None,
                    in_pool: bool | None = None, largest: int = 70) -> Requests:
    """Ragged requests over pages that are shuffled, now and then shared (a common prefix),
    and sometimes more than a request needs."""
    bs = int(rng.integers(1, 7)) if bs is None else bs
    kinds = rng.choice(["chain", "tree", "matrix", "tensor"], size=bs)
    drafts = [random_draft(rng, str(k), int(rng.integers(1, largest + 1))) for k in kinds]
    lens = rng.integers(0, 5 * page_size + 40, size=bs)
    lens[rng.random(bs) < 0.2] = 0
    lens[rng.random(bs) < 0.2] //= page_size
    lens[rng.random(bs) < 0.2] *= page_size  # exactly full pages
    pages = [rng.integers(0, 10_000, size=-(-int(n) // page_size) + int(rng.integers(0, 3)))
             for n in lens]
    slots = None
    if rng.random() < 0.5 if in_pool is None else in_pool:
        slots = [rng.integers(0, 2**31, size=len(visible(d))) for d in drafts]
    return Requests(drafts, lens.tolist(), pages, slots, page_size)


# -- marshalling --------------------------------------------------------------------------


@PAGED
def test_marshalling_against_loops(page_size, rng):
    for _ in range(15):
        requests = random_requests(rng, page_size)
        batch = requests.batch()
        assert batch.validate() is batch
        for name in TENSORS:
            tensor = getattr(batch, name)
            if tensor is not None:
                assert tensor.dtype == torch.int32 and tensor.is_contiguous()
        masks = [visible(d) for d in requests.drafts]
        q_lens = [len(m) for m in masks]
        assert batch.batch_size == len(masks)
        assert batch.num_tokens == sum(q_lens)
        assert batch.page_size == page_size
        assert batch.max_q_len == max(q_lens)
        assert batch.max_kv_len == max(requests.prefix_lens)
        assert batch.kv_lens.tolist() == requests.prefix_lens

        q, kv, indices, slots = [0], [0], [], []
        for b, length in enumerate(requests.prefix_lens):
            q.append(q[-1] + q_lens[b])
            count = 0
            while count * page_size < length:
                indices.append(int(requests.pages[b][count]))
                count += 1
            kv.append(kv[-1] + count)
            if requests.slots is not None:
                slots.extend(requests.slots[b].tolist())
        assert batch.qo_indptr.tolist() == q
        assert batch.kv_indptr.tolist() == kv
        assert batch.kv_indices.tolist() == indices
        if requests.slots is None:
            assert batch.draft_slots is None
        else:
            assert batch.draft_slots.tolist() == slots

        words = -(-max(q_lens) // 32)
        assert batch.mask_bits.shape == (sum(q_lens), words)
        rows = [row for mask in masks for row in mask]
        for have, row in zip(batch.mask_bits.tolist(), rows, strict=True):
            bits = sum(int(seen) << j for j, seen in enumerate(row))
            assert sum((word & 0xFFFFFFFF) << (32 * k) for k, word in enumerate(have)) == bits


@PAGED
def test_reading_back_gives_what_was_put_in(page_size, rng):
    for _ in range(10):
        requests = random_requests(rng, page_size)
        batch = requests.batch()
        for b, draft in enumerate(requests.drafts):
            mask = batch.draft_mask(b)
            assert mask.dtype == torch.bool and mask.tolist() == visible(draft)
            slots = batch.prefix_slots(b)
            assert slots.dtype == torch.int64
            assert slots.tolist() == [
                int(requests.pages[b][p // page_size]) * page_size + p % page_size
                for p in range(requests.prefix_lens[b])
            ]


@PAGED
def test_full_mask_against_loops(page_size, rng):
    requests = random_requests(rng, page_size)
    flat, indptr = requests.batch().full_mask()
    want, ends = [], [0]
    for draft, length in zip(requests.drafts, requests.prefix_lens, strict=True):
        for row in visible(draft):
            want += [True] * length + row
        ends.append(len(want))
    assert flat.dtype == torch.bool and flat.tolist() == want
    assert indptr.dtype == torch.int64 and indptr.tolist() == ends


def test_a_tree_a_matrix_and_a_number_say_the_same(rng):
    n = int(rng.integers(1, 100))
    forms = [n, chain(n), np.tri(n, dtype=bool), torch.ones(n, n, dtype=torch.bool).tril()]
    batches = [VerifyBatch.from_requests([f], [3], [[9, 8, 7]]) for f in forms]
    for other in batches[1:]:
        assert torch.equal(other.mask_bits, batches[0].mask_bits)


def test_pages_in_any_form(rng):
    pages = rng.integers(0, 1000, size=20)
    forms = [pages, pages.tolist(), torch.from_numpy(pages), torch.from_numpy(pages).int(),
             pages.astype(np.uint16)]
    for form in forms:
        batch = VerifyBatch.from_requests([2], [20], [form])
        assert batch.kv_indices.tolist() == pages.tolist()


def test_slots_beyond_32_bits():
    """Page numbers are 32-bit; the slots they stand for need not be."""
    last = 2**31 - 1
    batch = VerifyBatch.from_requests([1], [300], [[last, last - 5]], page_size=256)
    slots = batch.prefix_slots(0)
    assert slots[0] == last * 256 and slots[-1] == (last - 5) * 256 + 43


def test_the_largest_draft():
    batch = VerifyBatch.from_requests([kary(3, 1024), 1], [0, 0], [[], []]).validate()
    assert batch.mask_bits.shape == (1025, 32)
    assert batch.mask_bits[1024].tolist() == [1] + [0] * 31
    assert batch.draft_mask(0).sum(1).tolist() == (kary(3, 1024).depths + 1).tolist()


def test_nothing_in_the_cache():
    batch = VerifyBatch.from_requests([2, 3], [0, 0], [[], [4]], page_size=16).validate()
    assert batch.kv_indices.numel() == 0 and batch.kv_indptr.tolist() == [0, 0, 0]
    assert batch.prefix_slots(1).numel() == 0 and batch.max_kv_len == 0


def test_to_moves_every_tensor(rng):
    for in_pool in (False, True):
        batch = random_requests(rng, 16, in_pool=in_pool).batch()
        moved = batch.to("meta")
        for field in dataclasses.fields(batch):
            old, new = getattr(batch, field.name), getattr(moved, field.name)
            if isinstance(old, torch.Tensor):
                assert new.device.type == "meta" and new.shape == old.shape
            else:
                assert new == old
        assert moved.device.type == "meta" and batch.device.type == "cpu"


def test_over_allocated_arrays_are_fine(rng):
    """Engines hand over buffers of fixed capacity; what lies past the ends is not read."""
    requests = random_requests(rng, 64, in_pool=True)
    batch = requests.batch()
    junk = torch.full((50,), -7, dtype=torch.int32)
    larger = dataclasses.replace(
        batch, kv_indices=torch.cat([batch.kv_indices, junk]),
        mask_bits=torch.cat([batch.mask_bits, junk[:, None].expand(-1, batch.mask_bits.shape[1])]),
        draft_slots=torch.cat([batch.draft_slots, junk]), max_q_len=batch.max_q_len,
        max_kv_len=batch.max_kv_len + 1000,
    ).validate()
    assert larger.num_tokens == batch.num_tokens + 50
    for b in range(batch.batch_size):
        assert torch.equal(larger.prefix_slots(b), batch.prefix_slots(b))
        assert torch.equal(larger.draft_mask(b), batch.draft_mask(b))
    # More words than the largest draft needs, likewise.
    wide = torch.cat([batch.mask_bits, torch.full_like(batch.mask_bits, -1)], dim=1)
    wide = dataclasses.replace(batch, mask_bits=wide)
    assert torch.equal(wide.draft_mask(0), batch.draft_mask(0))


# -- refused requests ---------------------------------------------------------------------


@pytest.mark.parametrize(("arguments", "error", "message"), [
    (([], [], []), ValueError, "drafts is empty: a batch has at least one request"),
    (([1, 2], [3], [[0] * 3] * 2), ValueError, "prefix_lens must have one entry for each of 2 "
                                               "drafts; got 1"),
    (([1], [1], [[0], [1]]), ValueError, "pages must have one entry for each of 1 drafts; got 2"),
    (([1, 1], [1, -1], [[0], [0]]), ValueError, r"prefix_lens\[1\] must be at least 0; got -1"),
    (([1, 1], [1, 3], [[0], [0, 1]]), ValueError, r"pages\[1\] must have at least 3 pages for 3 "
                                                  "tokens at page_size 1; got 2"),
    (([1], [1], [[-1]]), ValueError, r"pages\[0\] must be in 0 .. 2\*\*31 - 1; got -1 .. -1"),
    (([1], [1], [[2**31]]), ValueError, r"pages\[0\] must be in 0 .. 2\*\*31 - 1; got 2147483648"),
    (([1], [1], [[0.5]]), TypeError, r"pages\[0\] must be integers; got float64"),
    (([0], [1], [[0]]), ValueError, r"drafts\[0\] must be in 1 .. 1024 tokens; got 0"),
    (([1, 1025], [1, 1], [[0], [0]]), ValueError, r"drafts\[1\] must be in 1 .. 1024 tokens; got "
                                                  "1025"),
    (([True], [1], [[0]]), TypeError, r"drafts\[0\] must be a DraftTree, a \[T, T\] boolean matrix "
                                      "or an int; got bool"),
    ((["3"], [1], [[0]]), TypeError, r"drafts\[0\] must be a DraftTree.*got str"),
    (([np.ones((2, 2))], [1], [[0]]), TypeError, r"drafts\[0\] must be boolean; got float64"),
    (([torch.ones(2, 2).int()], [1], [[0]]), TypeError, r"drafts\[0\] must be boolean; got int32"),
    (([np.ones((2, 3), bool)], [1], [[0]]), ValueError, r"drafts\[0\] must be \[T, T\] with T in "
                                                        r"1 .. 1024; got \[2, 3\]"),
    (([np.ones((0, 0), bool)], [1], [[0]]), ValueError, r"got \[0, 0\]"),
    (([np.ones(4, bool)], [1], [[0]]), ValueError, r"got \[4\]"),
    (([np.ones((1025, 1025), bool)], [1], [[0]]), ValueError, r"got \[1025, 1025\]"),
], ids=range(18))
def test_refused_requests(arguments, error, message):
    with pytest.raises(error, match=message):
        VerifyBatch.from_requests(*arguments)


def test_refused_page_counts(rng):
    for page_size in PAGE_SIZES:
        length = int(rng.integers(page_size + 1, 5 * page_size + 2))
        need = -(-length // page_size)
        VerifyBatch.from_requests([1], [length], [range(need)], page_size=page_size).validate()
        with pytest.raises(ValueError, match=rf"pages\[0\] must have at least {need} pages for "
                                             rf"{length} tokens at page_size {page_size}; got "
                                             f"{need - 1}"):
            VerifyBatch.from_requests([1], [length], [range(need - 1)], page_size=page_size)
    for page_size in (0, -1, 3, 24, 2048):
        with pytest.raises(ValueError, match="page_size must be a power of two up to 1024; got "
                                             f"{page_size}"):
            VerifyBatch.from_requests([1], [1], [[0]], page_size=page_size)


def test_refused_draft_slots():
    with pytest.raises(ValueError, match=r"draft_slots\[1\] must have 2 slots, one a draft token; "
                                         "got 3"):
        VerifyBatch.from_requests([1, 2], [0, 0], [[], []], draft_slots=[[7], [8, 9, 10]])
    with pytest.raises(ValueError, match="draft_slots must have one entry for each of 2 drafts; "
                                         "got 1"):
        VerifyBatch.from_requests([1, 2], [0, 0], [[], []], draft_slots=[[7]])
    with pytest.raises(ValueError, match=r"draft_slots\[0\] must be in 0 .. 2\*\*31 - 1; got -1"):
        VerifyBatch.from_requests([1], [0], [[]], draft_slots=[[-1]])


# -- refused batches ----------------------------------------------------------------------


@pytest.fixture
def batch() -> VerifyBatch:
    """Three requests: 2, 5 and 3 draft tokens, 5, 0 and 9 cached ones, pages of 4."""
    return VerifyBatch.from_requests(
        [2, kary(2, 5), 3], [5, 0, 9], [[7, 3], [], [1, 0, 5]], page_size=4,
        draft_slots=[[40, 41], [50, 51, 52, 53, 54], [60, 61, 62]],
    )


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_indptr_cut_to_the_batch_size_is_refused(batch):
    """The slip that engines make: `indptr[:bs]` where `[:bs + 1]` was meant."""
    for name in ("qo_indptr", "kv_indptr"):
        with pytest.raises(ValueError, match=rf"{name} must be \[bs \+ 1\] = \[4\], as kv_lens is "
                                             r"\[3\]; got \[3\]"):
            dataclasses.replace(batch, **{name: getattr(batch, name)[:3]})
    with pytest.raises(ValueError, match=r"qo_indptr must be \[bs \+ 1\] = \[3\], as kv_lens is "
                                         r"\[2\]; got \[4\]"):
        dataclasses.replace(batch, kv_lens=batch.kv_lens[:2])


@pytest.mark.parametrize("name", TENSORS)
def test_refused_tensors(name, batch):
    good = getattr(batch, name)
    with pytest.raises(TypeError, match=f"{name} must be a tensor; got list"):
        dataclasses.replace(batch, **{name: good.tolist()})
    if name != "draft_slots":
        with pytest.raises(TypeError, match=f"{name} must be a tensor; got NoneType"):
            dataclasses.replace(batch, **{name: None})
    with pytest.raises(TypeError, match=f"{name} must be int32; got torch.int64"):
        dataclasses.replace(batch, **{name: good.long()})
    dims = good.dim()
    with pytest.raises(ValueError, match=rf"{name} must have {dims} dimension\(s\); got "):
        dataclasses.replace(batch, **{name: good[None]})
    spread = good.repeat_interleave(2, dim=-1)[..., ::2]
    with pytest.raises(ValueError, match=rf"{name} must be contiguous; got strides \(2,"):
        dataclasses.replace(batch, **{name: spread})
    if name != "qo_indptr":
        with pytest.raises(ValueError, match=f"{name} is on meta, qo_indptr on cpu: all must be "
                                             "on one device"):
            dataclasses.replace(batch, **{name: good.to("meta")})


@pytest.mark.parametrize(("changes", "message"), [
    ({"kv_lens": int32()}, "kv_lens is empty: a batch has at least one request"),
    ({"draft_slots": int32(1, 2, 3)}, r"draft_slots must be \[num_tokens\] = \[10\], as mask_bits "
                                      r"has that many rows; got \[3\]"),
    ({"page_size": 3}, "page_size must be a power of two up to 1024; got 3"),
    ({"page_size": 2048}, "page_size must be a power of two up to 1024; got 2048"),
    ({"page_size": 0}, "page_size must be a power of two up to 1024; got 0"),
    ({"max_q_len": 0}, "max_q_len must be in 1 .. 1024; got 0"),
    ({"max_q_len": 1025}, "max_q_len must be in 1 .. 1024; got 1025"),
    ({"max_q_len": 33}, r"mask_bits must have at least ceil\(max_q_len / 32\) = 2 words a row; "
                        "got 1"),
    ({"max_kv_len": -1}, "max_kv_len must be at least 0; got -1"),
], ids=lambda v: "-".join(v) if isinstance(v, dict) else "")
def test_refused_batches(changes, message, batch):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(batch, **changes)


@pytest.mark.parametrize(("changes", "message"), [
    ({"qo_indptr": int32(1, 2, 7, 10)}, "qo_indptr must start at 0; got 1"),
    ({"qo_indptr": int32(0, 2, 1, 10)}, "qo_indptr must not decrease; got 2 then 1 at request 1"),
    ({"qo_indptr": int32(0, 2, 7, 11)}, "qo_indptr ends at 11, but there are only 10 entries"),
    ({"kv_indptr": int32(-1, 2, 2, 5)}, "kv_indptr must start at 0; got -1"),
    ({"kv_indptr": int32(0, 2, 5, 4)}, "kv_indptr must not decrease; got 5 then 4 at request 2"),
    ({"kv_indptr": int32(0, 2, 2, 6)}, "kv_indptr ends at 6, but there are only 5 entries"),
    ({"max_q_len": 4}, "request 1 has 5 draft tokens; max_q_len is 4"),
    ({"max_kv_len": 8}, r"kv_lens\[2\] must be in 0 .. max_kv_len = 8; got 9"),
    ({"kv_lens": int32(5, -1, 9)}, r"kv_lens\[1\] must be in 0 .. max_kv_len = 9; got -1"),
    ({"kv_lens": int32(9, 0, 9)}, "request 0 has 2 pages of 4 for 9 tokens"),
    ({"page_size": 1}, "request 0 has 2 pages of 1 for 5 tokens"),
    ({"kv_indices": int32(7, 3, 1, -1, 5)}, "kv_indices must be at least 0; got -1"),
    ({"draft_slots": int32(*range(-3, 7))}, "draft_slots must be at least 0; got -3"),
], ids=lambda v: "-".join(v) if isinstance(v, dict) else "")
def test_validate_names_what_is_wrong(changes, message, batch):
    broken = dataclasses.replace(batch, **changes)  # shapes are right, so this passes
    with pytest.raises(ValueError, match=message):
        broken.validate()


def test_validate_against_the_pool(batch):
    batch.validate(pool_slots=63)  # slot 62 is the last one that a draft token has
    with pytest.raises(ValueError, match="draft_slots reaches 62, but the pool has 62 slots"):
        batch.validate(pool_slots=62)
    prefix = dataclasses.replace(batch, draft_slots=None)
    prefix.validate(pool_slots=32)  # page 7 holds slots 28 .. 31
    with pytest.raises(ValueError, match="kv_indices reaches 7, but the pool has 31 slots"):
        prefix.validate(pool_slots=31)


def test_a_chain_may_be_a_numpy_integer():
    for kind in (np.int32, np.int64, np.uint8):
        batch = VerifyBatch.from_requests([kind(3)], [kind(2)], [[0, 1]])
        assert batch.draft_mask(0).tolist() == np.tri(3, dtype=bool).tolist()
    with pytest.raises(TypeError, match=r"drafts\[0\] must be a DraftTree, .*; got bool"):
        VerifyBatch.from_requests([np.bool_(True)], [0], [[]])
