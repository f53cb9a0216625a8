"""Metadata that engines hold, as a `VerifyBatch`.

Every step is a tensor operation on the device of its inputs: no host reads, no look at values.
So all of it may be captured in a CUDA graph, whose replays then convert what the engine's
buffers hold by then; temporaries come from the graph's own memory. Bounds that only values
could tell are for :meth:`VerifyBatch.validate`.
"""

from __future__ import annotations

import torch

from .batch import VerifyBatch

#: SGLang's `TreeMaskMode`: each request's ``[T, prefix + T]`` matrix, its ``[T, T]`` matrix, or
#: a word for each token with bit ``j`` for the draft token ``j``.
MASK_MODES = ("FULL_MASK", "QLEN_ONLY", "QLEN_ONLY_BITPACKING")

#: Word sizes of the third, as in SGLang: the smallest that holds all draft tokens.
PACKED_DTYPES = (torch.uint8, torch.uint16, torch.uint32)


def pack_tree_mask(
    custom_mask: torch.Tensor, mask_indptr: torch.Tensor | None, qo_indptr: torch.Tensor,
    kv_lens: torch.Tensor, out: torch.Tensor, *, mode: str = "FULL_MASK",
) -> torch.Tensor:
    """Packs an engine's flat mask to the words of ``VerifyBatch.mask_bits``.

    Args:
        custom_mask: flat, request after request, in one of :data:`MASK_MODES`. Bool or uint8;
            uint8, uint16 or uint32 for QLEN_ONLY_BITPACKING. May be over-allocated.
        mask_indptr: ``[bs + 1]`` int32 or int64, needed for FULL_MASK.
        qo_indptr: ``[bs + 1]`` int32 or int64; kv_lens: ``[bs]`` prefix lengths.
        out: ``[num_tokens, words]`` int32, written whole; 0 for padded tokens and for what
            lies past the end of ``custom_mask``.

    Raises:
        TypeError, ValueError: dtypes, shapes or a mode that do not fit.
    """
    if mode not in MASK_MODES:
        raise ValueError(f"mode must be one of {', '.join(MASK_MODES)}; got {mode!r}")
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
    qo = qo_indptr.long()
    nodes = qo.diff()
    if mode == "FULL_MASK":
        if mask_indptr is None:
            raise ValueError("mask_indptr must be given for FULL_MASK; got None")
        _check_indptr("mask_indptr", mask_indptr, bs)
        starts, prefix = mask_indptr[:-1].long(), kv_lens.long()
    elif mode == "QLEN_ONLY_BITPACKING":
        return _copy_packed(custom_mask, qo, out)
    else:
        starts, prefix = (nodes * nodes).cumsum(0) - nodes * nodes, torch.zeros_like(nodes)
    token, request, row = _rows(qo, out.shape[0])
    column = torch.arange(out.shape[1] * 32, device=out.device)
    at = starts[request] + row * (prefix + nodes)[request] + prefix[request]
    at = at[:, None] + column
    real = (column < nodes[request][:, None]) & (token < qo[-1])[:, None]
    real &= (at >= 0) & (at < custom_mask.numel())
    seen = custom_mask[torch.where(real, at, 0)].bool() & real
    words = seen.view(out.shape[0], -1, 32).long() << torch.arange(32, device=out.device)
    return out.copy_(words.sum(-1).to(torch.int32))


def _copy_packed(packed: torch.Tensor, qo: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    signed = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[packed.element_size()]
    token, request, _ = _rows(qo, out.shape[0])
    words = packed.view(signed)[token.clamp(max=packed.numel() - 1)].long()
    # Bits of a 16-bit word that its sign has spread go with all others past the last node.
    words &= (1 << qo.diff()[request].clamp(max=32)) - 1
    words *= (token < qo[-1]) & (token < packed.numel())
    out.zero_()
    out[:, 0] = words.to(torch.int32)
    return out


def from_sglang(
    qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_indices: torch.Tensor,
    custom_mask: torch.Tensor, mask_indptr: torch.Tensor | None, *, num_tokens: int,
    max_q_len: int, max_kv_len: int, mode: str = "FULL_MASK",
) -> VerifyBatch:
    """SGLang's verify metadata, page size 1: ``kv_indptr`` without draft tokens, whose rows
    come as ``draft_kv``. See :func:`pack_tree_mask` for the mask."""
    bs = kv_indptr.numel() - 1
    _check_indptr("kv_indptr", kv_indptr, bs)
    _check_indptr("qo_indptr", qo_indptr, bs)
    lens = kv_indptr.diff().to(torch.int32)
    bits = torch.empty(num_tokens, -(-max_q_len // 32), dtype=torch.int32, device=lens.device)
    pack_tree_mask(custom_mask, mask_indptr, qo_indptr, lens, bits, mode=mode)
    return VerifyBatch(qo_indptr.to(torch.int32), kv_indptr.to(torch.int32),
                       kv_indices.to(torch.int32), lens, bits, None, 1, max_q_len, max_kv_len)


def from_flashinfer(
    qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_indices: torch.Tensor,
    kv_lens: torch.Tensor, mask_bits: torch.Tensor, *, page_size: int, max_q_len: int,
    max_kv_len: int,
) -> VerifyBatch:
    """FlashInfer's metadata: pages ``kv_indptr`` ``[bs + 1]`` and lengths ``kv_lens`` ``[bs]``
    count the draft tokens, which lie in the pool. ``max_kv_len`` is of prefixes."""
    _check_indptr("kv_indptr", kv_indptr, kv_lens.numel())
    return _with_drafts(qo_indptr, kv_indptr, kv_indices, kv_lens, mask_bits, page_size,
                        max_q_len, max_kv_len)


def from_block_table(
    qo_indptr: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor,
    mask_bits: torch.Tensor, *, page_size: int, max_q_len: int, max_kv_len: int,
) -> VerifyBatch:
    """vLLM's metadata: ``block_table`` ``[bs, blocks]`` and ``seq_lens`` ``[bs]`` that count
    the draft tokens, which lie in the pool."""
    bs = seq_lens.numel()
    if block_table.dim() != 2 or block_table.shape[0] != bs:
        raise ValueError(f"block_table must be [{bs}, blocks], as seq_lens is [{bs}]; got "
                         f"{list(block_table.shape)}")
    width = block_table.shape[1]
    indptr = torch.arange(bs + 1, device=block_table.device) * width
    return _with_drafts(qo_indptr, indptr, block_table.reshape(-1), seq_lens, mask_bits,
                        page_size, max_q_len, max_kv_len)


def _with_drafts(qo_indptr, kv_indptr, kv_indices, seq_lens, mask_bits, page_size, max_q_len,
                 max_kv_len) -> VerifyBatch:
    _check_indptr("qo_indptr", qo_indptr, seq_lens.numel())
    qo = qo_indptr.long()
    lens = seq_lens.long() - qo.diff()
    _, request, row = _rows(qo, mask_bits.shape[0])
    position = lens[request] + row
    at = kv_indptr.long()[request] + position // page_size
    page = kv_indices.long()[at.clamp(0, kv_indices.numel() - 1)]
    slots = page * page_size + position % page_size
    return VerifyBatch(qo.to(torch.int32), kv_indptr.to(torch.int32), kv_indices.to(torch.int32),
                       lens.to(torch.int32), mask_bits, slots.to(torch.int32), page_size,
                       max_q_len, max_kv_len)


def _rows(qo: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, ...]:
    token = torch.arange(num_tokens, device=qo.device)
    ends = qo[1:].contiguous()
    request = torch.searchsorted(ends, token, right=True).clamp(max=ends.numel() - 1)
    return token, request, token - qo[request]


def _check_indptr(name: str, indptr: torch.Tensor, bs: int) -> None:
    if indptr.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 or int64; got {indptr.dtype}")
    if tuple(indptr.shape) != (bs + 1,):
        raise ValueError(f"{name} must be [bs + 1] = [{bs + 1}]; got {list(indptr.shape)}")
