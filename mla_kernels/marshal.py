"""Metadata that engines hold, as a `VerifyBatch`.

:class:`StaticBatch` has a batch and all scratch of fixed capacity, and writes into them: every
step is a tensor operation on the device with a place for its result, so that a call allocates
nothing, reads nothing on the host and may be captured in a CUDA graph, whose replays then convert
what the engine's buffers hold by then. (One exception: QLEN_ONLY needs a running sum, for which
torch takes temporary storage from its caching allocator, under capture from the graph's own
memory.) The functions make a `StaticBatch` for one call. Bounds that only values could tell are
for :meth:`VerifyBatch.validate` and :mod:`mla_kernels.checked`.
"""

from __future__ import annotations

import torch

from .batch import VerifyBatch

#: SGLang's `TreeMaskMode`: each request's ``[T, prefix + T]`` matrix, its ``[T, T]`` matrix, or
#: a word for each token with bit ``j`` for the draft token ``j``.
MASK_MODES = ("FULL_MASK", "QLEN_ONLY", "QLEN_ONLY_BITPACKING")

#: Word sizes of the third, as in SGLang: the smallest that holds all draft tokens.
PACKED_DTYPES = (torch.uint8, torch.uint16, torch.uint32)


class _Scratch:
    """Room for what :func:`pack_tree_mask` and the slots of drafts are computed through."""

    def __init__(self, bs: int, num_tokens: int, words: int, device: torch.device):
        def int64(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self.sizes = bs, num_tokens, words
        self.token = torch.arange(num_tokens, device=device)
        self.column = torch.arange(words * 32, device=device)
        self.power = torch.ones(32, dtype=torch.int64, device=device) << self.column[:32]
        self.qo, self.nodes, self.starts = int64(bs + 1), int64(bs), int64(bs)
        self.prefix, self.length = int64(bs), int64(bs)
        self.request, self.row = int64(num_tokens), int64(num_tokens)
        self.a, self.b, self.narrow = int64(num_tokens), int64(num_tokens), int64(num_tokens).int()
        self.padded = torch.zeros(num_tokens, dtype=torch.bool, device=device)
        self.at = int64(num_tokens, words * 32)
        self.bytes = self.at.to(torch.uint8)
        self.hidden, self.also = self.bytes.bool(), self.bytes.bool()
        self.seen = self.bytes.bool()
        self.word, self.sum = int64(num_tokens, words, 32), int64(num_tokens, words)

    def rows(self, qo_indptr: torch.Tensor) -> None:
        """The request of each token, its row in it, and which tokens belong to none."""
        self.qo.copy_(qo_indptr)
        torch.sub(self.qo[1:], self.qo[:-1], out=self.nodes)
        torch.searchsorted(self.qo[1:], self.token, right=True, out=self.request)
        self.request.clamp_(max=self.nodes.numel() - 1)
        torch.index_select(self.qo, 0, self.request, out=self.row)
        torch.sub(self.token, self.row, out=self.row)
        torch.ge(self.token, self.qo[-1:], out=self.padded)


def pack_tree_mask(
    custom_mask: torch.Tensor, mask_indptr: torch.Tensor | None, qo_indptr: torch.Tensor,
    kv_lens: torch.Tensor, out: torch.Tensor, *, mode: str = "FULL_MASK",
    scratch: _Scratch | None = None,
) -> torch.Tensor:
    """Packs an engine's flat mask to the words of ``VerifyBatch.mask_bits``.

    Args:
        custom_mask: flat, request after request, in one of :data:`MASK_MODES`. Bool or uint8;
            uint8, uint16 or uint32 for QLEN_ONLY_BITPACKING. May be over-allocated.
        mask_indptr: ``[bs + 1]`` int32 or int64, needed for FULL_MASK.
        qo_indptr: ``[bs + 1]`` int32 or int64; kv_lens: ``[bs]`` prefix lengths.
        out: ``[num_tokens, words]`` int32, written whole; 0 for padded tokens and for what
            lies past the end of ``custom_mask``.
        scratch: a :class:`StaticBatch`'s; made anew when None.

    Raises:
        TypeError, ValueError: dtypes, shapes or a mode that do not fit.
    """
    if mode not in MASK_MODES:
        raise ValueError(f"mode must be one of {', '.join(MASK_MODES)}; got {mode!r}")
    for name, tensor in (("custom_mask", custom_mask), ("qo_indptr", qo_indptr),
                         ("mask_indptr", mask_indptr), ("kv_lens", kv_lens), ("out", out)):
        if not isinstance(tensor, torch.Tensor) and (name, tensor) != ("mask_indptr", None):
            raise TypeError(f"{name} must be a tensor; got {type(tensor).__name__}")
    dtypes = PACKED_DTYPES if mode == "QLEN_ONLY_BITPACKING" else (torch.bool, torch.uint8)
    if custom_mask.dtype not in dtypes:
        raise TypeError(f"custom_mask must be {' or '.join(map(str, dtypes))} for {mode}; got "
                        f"{custom_mask.dtype}")
    if custom_mask.dim() != 1 or not custom_mask.numel():
        raise ValueError(f"custom_mask must be flat and not empty; got {list(custom_mask.shape)}")
    for name, tensor in (("qo_indptr", qo_indptr), ("mask_indptr", mask_indptr),
                         ("kv_lens", kv_lens), ("out", out)):
        if tensor is not None and tensor.device != custom_mask.device:
            raise ValueError(f"{name} is on {tensor.device}, custom_mask on {custom_mask.device}")
    if out.dtype != torch.int32 or out.dim() != 2:
        raise TypeError(f"out must be int32 [num_tokens, words]; got {out.dtype} "
                        f"{list(out.shape)}")
    bs = kv_lens.numel()
    _check_indptr("qo_indptr", qo_indptr, bs)
    if mode == "FULL_MASK":
        if mask_indptr is None:
            raise ValueError("mask_indptr must be given for FULL_MASK; got None")
        _check_indptr("mask_indptr", mask_indptr, bs)
    s = scratch or _Scratch(bs, *out.shape, out.device)
    if s.sizes != (bs, *out.shape):
        raise ValueError(f"scratch is for (bs, num_tokens, words) = {s.sizes}; got "
                         f"{(bs, *out.shape)}")
    s.rows(qo_indptr)
    if mode == "QLEN_ONLY_BITPACKING":
        return _copy_packed(custom_mask, s, out)
    if mode == "FULL_MASK":
        s.starts.copy_(mask_indptr[:-1])
        s.prefix.copy_(kv_lens)
    else:
        torch.mul(s.nodes, s.nodes, out=s.length)
        torch.cumsum(s.length, 0, out=s.starts)
        s.starts.sub_(s.length)
        s.prefix.zero_()
    # Where a token's row begins among the mask's entries, at its first draft column ...
    torch.add(s.prefix, s.nodes, out=s.length)
    torch.index_select(s.length, 0, s.request, out=s.a)
    s.a.mul_(s.row)
    for part in (s.starts, s.prefix):
        s.a.add_(torch.index_select(part, 0, s.request, out=s.b))
    # ... and each of its columns. What is none of its request's, or not there, is hidden.
    torch.add(s.a[:, None], s.column, out=s.at)
    torch.index_select(s.nodes, 0, s.request, out=s.b)
    torch.ge(s.column, s.b[:, None], out=s.hidden)
    s.hidden.logical_or_(s.padded[:, None])
    s.hidden.logical_or_(torch.lt(s.at, 0, out=s.also))
    s.hidden.logical_or_(torch.ge(s.at, custom_mask.numel(), out=s.also))
    s.at.masked_fill_(s.hidden, 0)
    torch.index_select(custom_mask.view(torch.uint8), 0, s.at.view(-1), out=s.bytes.view(-1))
    torch.ne(s.bytes, 0, out=s.seen)
    s.seen.masked_fill_(s.hidden, False)
    s.word.copy_(s.seen.view(s.word.shape)).mul_(s.power)
    return out.copy_(torch.sum(s.word, -1, out=s.sum))


def _copy_packed(packed: torch.Tensor, s: _Scratch, out: torch.Tensor) -> torch.Tensor:
    # As numbers without a sign; torch selects from none of 16 bits or more.
    size = packed.element_size()
    s.sum.zero_()
    words = s.sum[:, 0]
    last = packed.numel() - 1
    torch.gt(s.token, last, out=s.also[:, 0])
    s.padded.logical_or_(s.also[:, 0])
    for byte in range(size):  # little-endian
        torch.clamp(s.token, max=last, out=s.a).mul_(size).add_(byte)
        part = s.bytes.view(-1)[: s.a.numel()]
        torch.index_select(packed.view(torch.uint8), 0, s.a, out=part)
        words.add_(s.b.copy_(part).mul_(1 << 8 * byte))
    # Bits past a request's last node.
    torch.index_select(s.nodes, 0, s.request, out=s.b).clamp_(max=32)
    s.a.fill_(1)
    words.bitwise_and_(torch.bitwise_left_shift(s.a, s.b, out=s.a).sub_(1))
    words.masked_fill_(s.padded, 0)
    return out.copy_(s.sum)


class StaticBatch:
    """A batch at capacity, and conversions into it that allocate nothing.

    What a batch holds by then is less than its capacity: requests past the last are given no
    tokens by an ``*_indptr`` that stays where it is.

    Args:
        batch_size: requests; num_tokens: draft tokens of all of them.
        num_pages: entries of ``kv_indices``, over-allocation of the engine's buffer included.
        page_size, max_q_len, max_kv_len: as in :class:`VerifyBatch`.
        in_pool: the draft tokens lie in the pool, in ``batch.draft_slots``.

    Attributes:
        batch: the :class:`VerifyBatch`, the same tensors always.
    """

    def __init__(
        self, batch_size: int, num_tokens: int, num_pages: int, *, max_q_len: int,
        max_kv_len: int, page_size: int = 1, in_pool: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        for name, value in (("batch_size", batch_size), ("num_tokens", num_tokens)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1; got {value}")

        def int32(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        words = max(1, -(-max_q_len // 32))
        self.batch = VerifyBatch(
            int32(batch_size + 1), int32(batch_size + 1), int32(max(num_pages, 1)),
            int32(batch_size), int32(num_tokens, words), int32(num_tokens) if in_pool else None,
            page_size, max_q_len, max_kv_len)
        self._scratch = _Scratch(batch_size, num_tokens, words, self.batch.device)
        self._indptr = torch.arange(batch_size + 1, device=device)
        self._table = torch.zeros_like(self._indptr)

    def from_sglang(
        self, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_indices: torch.Tensor,
        custom_mask: torch.Tensor, mask_indptr: torch.Tensor | None, *, mode: str = "FULL_MASK",
    ) -> VerifyBatch:
        """See the function :func:`from_sglang`; the host sizes of the arguments must fit."""
        b, s = self.batch, self._scratch
        if b.draft_slots is not None:
            raise ValueError("in_pool must be False for SGLang's metadata: its draft rows come as "
                             "draft_kv")
        self._check(qo_indptr=qo_indptr, kv_indptr=kv_indptr, kv_indices=kv_indices)
        # What may be refused comes before what is written.
        pack_tree_mask(custom_mask, mask_indptr, qo_indptr, self._lens(kv_indptr), b.mask_bits,
                       mode=mode, scratch=s)
        b.kv_lens.copy_(self._lens(kv_indptr))
        b.qo_indptr.copy_(qo_indptr)
        b.kv_indptr.copy_(kv_indptr)
        b.kv_indices[: kv_indices.numel()].copy_(kv_indices)
        return b

    def from_flashinfer(
        self, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_indices: torch.Tensor,
        kv_lens: torch.Tensor, mask_bits: torch.Tensor,
    ) -> VerifyBatch:
        """See the function :func:`from_flashinfer`."""
        self._check(qo_indptr=qo_indptr, kv_indptr=kv_indptr, kv_indices=kv_indices)
        return self._with_drafts(qo_indptr, kv_indptr, kv_indices, kv_lens, mask_bits)

    def from_block_table(
        self, qo_indptr: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor,
        mask_bits: torch.Tensor,
    ) -> VerifyBatch:
        """See the function :func:`from_block_table`."""
        bs = self.batch.batch_size
        if block_table.dim() != 2 or block_table.shape[0] != bs:
            raise ValueError(f"block_table must be [{bs}, blocks], as seq_lens is [{bs}]; got "
                             f"{list(block_table.shape)}")
        self._check(qo_indptr=qo_indptr, block_table=block_table)
        indptr = torch.mul(self._indptr, block_table.shape[1], out=self._table)
        return self._with_drafts(qo_indptr, indptr, block_table, seq_lens, mask_bits)

    def _with_drafts(self, qo_indptr, kv_indptr, pages, seq_lens, mask_bits) -> VerifyBatch:
        b, s = self.batch, self._scratch
        if b.draft_slots is None:
            raise ValueError("in_pool must be True for metadata that counts the draft tokens")
        if seq_lens.shape != b.kv_lens.shape:
            raise ValueError(f"kv_lens must be {list(b.kv_lens.shape)}; got "
                             f"{list(seq_lens.shape)}")
        if mask_bits.shape != b.mask_bits.shape or mask_bits.dtype != torch.int32:
            raise ValueError(f"mask_bits must be int32 {list(b.mask_bits.shape)}; got "
                             f"{mask_bits.dtype} {list(mask_bits.shape)}")
        b.mask_bits.copy_(mask_bits)
        b.kv_indices[: pages.numel()].view(pages.shape).copy_(pages)
        b.kv_indptr.copy_(kv_indptr)
        b.qo_indptr.copy_(qo_indptr)
        s.rows(qo_indptr)
        s.length.copy_(seq_lens).sub_(s.nodes)
        b.kv_lens.copy_(s.length)
        position = torch.index_select(s.length, 0, s.request, out=s.a).add_(s.row)
        at = torch.floor_divide(position, b.page_size, out=s.b)
        s.qo.copy_(kv_indptr)
        at.add_(torch.index_select(s.qo, 0, s.request, out=s.row))
        at.clamp_(0, b.kv_indices.numel() - 1)
        page = s.row.copy_(torch.index_select(b.kv_indices, 0, at, out=s.narrow))
        position.remainder_(b.page_size)
        b.draft_slots.copy_(page.mul_(b.page_size).add_(position))
        return b

    def _lens(self, kv_indptr: torch.Tensor) -> torch.Tensor:
        self._table.copy_(kv_indptr)
        return torch.sub(self._table[1:], self._table[:-1], out=self._scratch.length)

    def _check(self, **tensors: torch.Tensor) -> None:
        b = self.batch
        for name, tensor in tensors.items():
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"{name} must be a tensor; got {type(tensor).__name__}")
            if tensor.device != b.device:
                raise ValueError(f"{name} is on {tensor.device}, the batch on {b.device}")
            if name.endswith("indptr"):
                _check_indptr(name, tensor, b.batch_size)
            elif tensor.dtype not in (torch.int32, torch.int64):
                raise TypeError(f"{name} must be int32 or int64; got {tensor.dtype}")
            elif tensor.numel() > b.kv_indices.numel():
                raise ValueError(f"{name} must have at most num_pages = {b.kv_indices.numel():,} "
                                 f"entries; got {tensor.numel():,}")


def from_sglang(
    qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_indices: torch.Tensor,
    custom_mask: torch.Tensor, mask_indptr: torch.Tensor | None, *, num_tokens: int,
    max_q_len: int, max_kv_len: int, mode: str = "FULL_MASK",
) -> VerifyBatch:
    """SGLang's verify metadata, page size 1: ``kv_indptr`` without draft tokens, whose rows
    come as ``draft_kv``. See :func:`pack_tree_mask` for the mask."""
    static = StaticBatch(kv_indptr.numel() - 1, num_tokens, kv_indices.numel(),
                         max_q_len=max_q_len, max_kv_len=max_kv_len, device=kv_indptr.device)
    return static.from_sglang(qo_indptr, kv_indptr, kv_indices, custom_mask, mask_indptr,
                              mode=mode)


def from_flashinfer(
    qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_indices: torch.Tensor,
    kv_lens: torch.Tensor, mask_bits: torch.Tensor, *, page_size: int, max_q_len: int,
    max_kv_len: int,
) -> VerifyBatch:
    """FlashInfer's metadata: pages ``kv_indptr`` ``[bs + 1]`` and lengths ``kv_lens`` ``[bs]``
    count the draft tokens, which lie in the pool. ``max_kv_len`` is of prefixes."""
    static = StaticBatch(kv_lens.numel(), mask_bits.shape[0], kv_indices.numel(),
                         page_size=page_size, max_q_len=max_q_len, max_kv_len=max_kv_len,
                         in_pool=True, device=kv_lens.device)
    return static.from_flashinfer(qo_indptr, kv_indptr, kv_indices, kv_lens, mask_bits)


def from_block_table(
    qo_indptr: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor,
    mask_bits: torch.Tensor, *, page_size: int, max_q_len: int, max_kv_len: int,
) -> VerifyBatch:
    """vLLM's metadata: ``block_table`` ``[bs, blocks]`` and ``seq_lens`` ``[bs]`` that count
    the draft tokens, which lie in the pool."""
    static = StaticBatch(seq_lens.numel(), mask_bits.shape[0], block_table.numel(),
                         page_size=page_size, max_q_len=max_q_len, max_kv_len=max_kv_len,
                         in_pool=True, device=seq_lens.device)
    return static.from_block_table(qo_indptr, block_table, seq_lens, mask_bits)


def _check_indptr(name: str, indptr: torch.Tensor, bs: int) -> None:
    if indptr.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 or int64; got {indptr.dtype}")
    if tuple(indptr.shape) != (bs + 1,):
        raise ValueError(f"{name} must be [bs + 1] = [{bs + 1}]; got {list(indptr.shape)}")
