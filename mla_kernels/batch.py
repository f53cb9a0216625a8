"""A batch of verify requests as the arrays that kernels read.

Each request has a prefix in a paged cache and a draft of one or more nodes. Arrays are ragged:
request ``b`` owns the slice ``indptr[b]:indptr[b + 1]``, so every ``*_indptr`` has one entry
more than there are requests, starts at 0 and never decreases.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from .tree import MAX_NODES, DraftTree, pack_mask, unpack_mask

#: Page sizes that engines use and the kernels accept: powers of two, so that a page number
#: and the place in the page are a shift and a mask of the token's position.
PAGE_SIZES = tuple(2**i for i in range(11))

Draft = DraftTree | np.ndarray | torch.Tensor | int


@dataclasses.dataclass(frozen=True, eq=False)
class VerifyBatch:
    """What to verify, without the numbers themselves.

    The prefix of request ``b`` is ``kv_lens[b]`` tokens long and lies in pages
    ``kv_indices[kv_indptr[b]:kv_indptr[b + 1]]``: its token ``p`` is in pool slot
    ``kv_indices[kv_indptr[b] + p // page_size] * page_size + p % page_size``. As in SGLang's
    verify path, ``kv_indptr`` does **not** count the draft tokens. Those lie in the pool
    slots ``draft_slots`` or, when that is None, in a tensor of their own.

    All tensors are contiguous and on one device.

    Args:
        qo_indptr: ``[bs + 1]`` int32, draft tokens of each request.
        kv_indptr: ``[bs + 1]`` int32, pages of each prefix.
        kv_indices: ``[>= kv_indptr[-1]]`` int32, page numbers; may be over-allocated.
        kv_lens: ``[bs]`` int32, prefix lengths in tokens; 0 is allowed.
        mask_bits: ``[num_tokens, ceil(max_q_len / 32)]`` int32: bit ``j % 32`` of word
            ``j // 32`` in a token's row says that it sees draft token ``j`` of its request.
        draft_slots: ``[num_tokens]`` int32 pool slots of the draft tokens, or None.
        page_size: tokens in a page, a power of two up to 1024.
        max_q_len: largest draft, in tokens. A host number: kernels take their launch shape
            from it, so it is a capacity under CUDA graphs.
        max_kv_len: largest prefix, in tokens; a capacity likewise.

    Raises:
        TypeError, ValueError: shapes, dtypes, devices or host numbers that do not fit. Values
            inside the tensors are checked by :meth:`validate`, which reads them.
    """

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    kv_lens: torch.Tensor
    mask_bits: torch.Tensor
    draft_slots: torch.Tensor | None
    page_size: int
    max_q_len: int
    max_kv_len: int

    def __post_init__(self) -> None:
        for name in ("qo_indptr", "kv_indptr", "kv_indices", "kv_lens", "mask_bits",
                     "draft_slots"):
            tensor = getattr(self, name)
            if tensor is None and name == "draft_slots":
                continue
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"{name} must be a tensor; got {type(tensor).__name__}")
            if tensor.dtype != torch.int32:
                raise TypeError(f"{name} must be int32; got {tensor.dtype}")
            want = 2 if name == "mask_bits" else 1
            if tensor.dim() != want:
                raise ValueError(f"{name} must have {want} dimension(s); got {list(tensor.shape)}")
            if not tensor.is_contiguous():
                raise ValueError(f"{name} must be contiguous; got strides {tensor.stride()}")
            if tensor.device != self.qo_indptr.device:
                raise ValueError(
                    f"{name} is on {tensor.device}, qo_indptr on {self.qo_indptr.device}: all "
                    "must be on one device"
                )
        if self.kv_lens.numel() < 1:
            raise ValueError("kv_lens is empty: a batch has at least one request")
        want = self.kv_lens.numel() + 1
        for name in ("qo_indptr", "kv_indptr"):
            got = getattr(self, name).numel()
            if got != want:
                raise ValueError(
                    f"{name} must be [bs + 1] = [{want}], as kv_lens is [{want - 1}]; got [{got}]"
                )
        if self.draft_slots is not None and self.draft_slots.numel() != self.num_tokens:
            raise ValueError(
                f"draft_slots must be [num_tokens] = [{self.num_tokens}], as mask_bits has that "
                f"many rows; got [{self.draft_slots.numel()}]"
            )
        if self.page_size not in PAGE_SIZES:
            raise ValueError(f"page_size must be a power of two up to 1024; got {self.page_size}")
        if not 1 <= self.max_q_len <= MAX_NODES:
            raise ValueError(f"max_q_len must be in 1 .. {MAX_NODES}; got {self.max_q_len}")
        if self.max_kv_len < 0:
            raise ValueError(f"max_kv_len must be at least 0; got {self.max_kv_len}")
        if self.mask_bits.shape[1] * 32 < self.max_q_len:
            raise ValueError(
                f"mask_bits must have at least ceil(max_q_len / 32) = "
                f"{-(-self.max_q_len // 32)} words a row; got {self.mask_bits.shape[1]}"
            )

    # -- building -------------------------------------------------------------------------

    @classmethod
    def from_requests(
        cls,
        drafts: Sequence[Draft],
        prefix_lens: Sequence[int],
        pages: Sequence[Sequence[int] | np.ndarray | torch.Tensor],
        *,
        page_size: int = 1,
        draft_slots: Sequence[Sequence[int] | np.ndarray | torch.Tensor] | None = None,
        device: torch.device | str = "cpu",
    ) -> VerifyBatch:
        """Marshals requests.

        Args:
            drafts: for each request a :class:`DraftTree`, a ``[T, T]`` boolean matrix of what
                sees what, or a number ``T`` for a chain of that many tokens.
            prefix_lens: tokens already in the cache, for each request; 0 is allowed.
            pages: for each request its page numbers (slots, with ``page_size`` 1), at least
                ``ceil(prefix_len / page_size)`` of them; further ones are dropped.
            draft_slots: for each request the pool slots of its draft tokens; None when the
                draft rows come in a tensor of their own.

        Raises:
            TypeError, ValueError: naming the request and what it lacks.
        """
        bs = len(drafts)
        for name, value in (("prefix_lens", prefix_lens), ("pages", pages),
                            ("draft_slots", draft_slots)):
            if value is not None and len(value) != bs:
                raise ValueError(f"{name} must have one entry for each of {bs} drafts; got "
                                 f"{len(value)}")
        if bs == 0:
            raise ValueError("drafts is empty: a batch has at least one request")
        if page_size not in PAGE_SIZES:
            raise ValueError(f"page_size must be a power of two up to 1024; got {page_size}")

        masks = [_as_mask(draft, f"drafts[{b}]") for b, draft in enumerate(drafts)]
        q_lens = [len(mask) for mask in masks]
        max_q_len = max(q_lens)
        words = -(-max_q_len // 32)
        bits = np.zeros((sum(q_lens), words), dtype=np.uint32)
        row = 0
        for mask in masks:
            packed = pack_mask(mask)
            bits[row:row + len(mask), : packed.shape[1]] = packed
            row += len(mask)

        tables, counts, slots = [], [], []
        for b in range(bs):
            length = int(prefix_lens[b])
            if length < 0:
                raise ValueError(f"prefix_lens[{b}] must be at least 0; got {length}")
            table = _as_ids(pages[b], f"pages[{b}]")
            need = -(-length // page_size)
            if table.size < need:
                raise ValueError(
                    f"pages[{b}] must have at least {need} pages for {length} tokens at "
                    f"page_size {page_size}; got {table.size}"
                )
            tables.append(table[:need])
            counts.append(need)
            if draft_slots is not None:
                own = _as_ids(draft_slots[b], f"draft_slots[{b}]")
                if own.size != q_lens[b]:
                    raise ValueError(f"draft_slots[{b}] must have {q_lens[b]} slots, one a draft "
                                     f"token; got {own.size}")
                slots.append(own)

        def int32(values: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(values).astype(np.int32)).to(device)

        batch = cls(
            qo_indptr=int32(np.concatenate([[0], np.cumsum(q_lens)])),
            kv_indptr=int32(np.concatenate([[0], np.cumsum(counts)])),
            kv_indices=int32(np.concatenate(tables)),
            kv_lens=int32(np.asarray(prefix_lens, dtype=np.int64)),
            mask_bits=torch.from_numpy(bits.view(np.int32)).to(device),
            draft_slots=None if draft_slots is None else int32(np.concatenate(slots)),
            page_size=page_size,
            max_q_len=max_q_len,
            max_kv_len=int(max(prefix_lens)),
        )
        return batch

    # -- reading --------------------------------------------------------------------------

    @property
    def batch_size(self) -> int:
        return self.kv_lens.numel()

    @property
    def num_tokens(self) -> int:
        """Rows of q and of the output: draft tokens of all requests (their capacity)."""
        return self.mask_bits.shape[0]

    @property
    def device(self) -> torch.device:
        return self.qo_indptr.device

    def to(self, device: torch.device | str) -> VerifyBatch:
        moved = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for name, value in moved.items():
            if isinstance(value, torch.Tensor):
                moved[name] = value.to(device)
        return VerifyBatch(**moved)

    def prefix_slots(self, request: int) -> torch.Tensor:
        """Pool slots of one request's prefix, ``[kv_lens[request]]`` int64. Reads the device."""
        begin, end = self.kv_indptr[request:request + 2].tolist()
        position = torch.arange(int(self.kv_lens[request]), device=self.device)
        pages = self.kv_indices[begin:end].long()
        return pages[position // self.page_size] * self.page_size + position % self.page_size

    def draft_mask(self, request: int) -> torch.Tensor:
        """What sees what among one request's draft tokens, ``[T, T]`` bool. Reads the device."""
        begin, end = self.qo_indptr[request:request + 2].tolist()
        words = self.mask_bits[begin:end].cpu().numpy().view(np.uint32)
        return torch.from_numpy(unpack_mask(words, end - begin)).to(self.device)

    def full_mask(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The mask as engines with a FULL_MASK mode hold it.

        Returns:
            ``custom_mask``: flat bool, for each request its ``[T, prefix + T]`` matrix row by
            row, and ``mask_indptr``: ``[bs + 1]`` int64. Reads the device.
        """
        parts, sizes = [], [0]
        for b in range(self.batch_size):
            mask = self.draft_mask(b)
            prefix = torch.ones(len(mask), int(self.kv_lens[b]), dtype=torch.bool,
                                device=self.device)
            parts.append(torch.cat([prefix, mask], dim=1).reshape(-1))
            sizes.append(parts[-1].numel())
        indptr = torch.tensor(sizes, dtype=torch.int64, device=self.device).cumsum(0)
        return torch.cat(parts), indptr

    def validate(self, pool_slots: int | None = None) -> VerifyBatch:
        """Reads every array and checks it; for tests, notebooks and debugging. It
        synchronises with the device, so it has no place in a captured region.

        Args:
            pool_slots: rows in the pool, to check the slots against.

        Returns:
            The batch itself.

        Raises:
            ValueError: naming the array, the place and the value.
        """
        for name, total in (("qo_indptr", self.num_tokens), ("kv_indptr", self.kv_indices.numel())):
            indptr = getattr(self, name).tolist()
            if indptr[0] != 0:
                raise ValueError(f"{name} must start at 0; got {indptr[0]}")
            for b, (a, z) in enumerate(zip(indptr, indptr[1:], strict=False)):
                if z < a:
                    raise ValueError(f"{name} must not decrease; got {a} then {z} at request {b}")
            if indptr[-1] > total:
                raise ValueError(f"{name} ends at {indptr[-1]}, but there are only {total} entries")
        q_lens = self.qo_indptr.diff().tolist()
        kv_lens = self.kv_lens.tolist()
        pages = self.kv_indptr.diff().tolist()
        for b, (t, length, count) in enumerate(zip(q_lens, kv_lens, pages, strict=True)):
            if t > self.max_q_len:
                raise ValueError(f"request {b} has {t} draft tokens; max_q_len is {self.max_q_len}")
            if length < 0 or length > self.max_kv_len:
                raise ValueError(f"kv_lens[{b}] must be in 0 .. max_kv_len = {self.max_kv_len}; "
                                 f"got {length}")
            if count * self.page_size < length:
                raise ValueError(f"request {b} has {count} pages of {self.page_size} for "
                                 f"{length} tokens")
        limits = [("kv_indices", self.kv_indices[: int(self.kv_indptr[-1])], self.page_size)]
        if self.draft_slots is not None:
            limits.append(("draft_slots", self.draft_slots[: int(self.qo_indptr[-1])], 1))
        for name, ids, per in limits:
            if not ids.numel():
                continue
            low, high = int(ids.min()), int(ids.max())
            if low < 0:
                raise ValueError(f"{name} must be at least 0; got {low}")
            if pool_slots is not None and (high + 1) * per > pool_slots:
                raise ValueError(f"{name} reaches {high}, but the pool has {pool_slots} slots")
        return self


def _as_mask(draft: Draft, name: str) -> np.ndarray:
    if isinstance(draft, DraftTree):
        return draft.ancestor_mask
    if isinstance(draft, (int, np.integer)) and not isinstance(draft, bool):
        if not 1 <= draft <= MAX_NODES:
            raise ValueError(f"{name} must be in 1 .. {MAX_NODES} tokens; got {draft}")
        return np.tri(draft, dtype=bool)
    if isinstance(draft, torch.Tensor):
        draft = draft.cpu().numpy()
    if not isinstance(draft, np.ndarray):
        raise TypeError(f"{name} must be a DraftTree, a [T, T] boolean matrix or an int; got "
                        f"{type(draft).__name__}")
    if draft.dtype != bool:
        raise TypeError(f"{name} must be boolean; got {draft.dtype}")
    if draft.ndim != 2 or draft.shape[0] != draft.shape[1] or not 1 <= len(draft) <= MAX_NODES:
        raise ValueError(f"{name} must be [T, T] with T in 1 .. {MAX_NODES}; got "
                         f"{list(draft.shape)}")
    return draft


def _as_ids(values: Sequence[int] | np.ndarray | torch.Tensor, name: str) -> np.ndarray:
    if isinstance(values, torch.Tensor):
        values = values.cpu().numpy()
    array = np.asarray(values)
    if array.size == 0:
        return np.zeros(0, dtype=np.int64)
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{name} must be integers; got {array.dtype}")
    array = array.reshape(-1).astype(np.int64)
    if array.min() < 0 or array.max() > 2**31 - 1:
        raise ValueError(f"{name} must be in 0 .. 2**31 - 1; got {array.min()} .. {array.max()}")
    return array
