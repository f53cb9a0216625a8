"""A checked mode: what an engine's buffers hold, looked at on the device.

:meth:`VerifyBatch.validate` reads everything on the host. Here each rule is a tensor operation
that leaves the number of its violations in a flag, so that a call may check its metadata without
a synchronisation, and the host asks once, when it wants to know. It allocates: off by default,
and never on under capture.
"""

from __future__ import annotations

import torch

from .batch import VerifyBatch

#: Each rule, and what is broken where it does not hold.
RULES = {
    "qo_indptr starts": "qo_indptr must start at 0",
    "qo_indptr decreases": "qo_indptr must not decrease",
    "qo_indptr ends": "qo_indptr must end within num_tokens = {num_tokens}",
    "kv_indptr starts": "kv_indptr must start at 0",
    "kv_indptr decreases": "kv_indptr must not decrease",
    "kv_indptr ends": "kv_indptr must end within the {num_pages} entries of kv_indices",
    "too many nodes": "a request must have at most max_q_len = {max_q_len} draft tokens",
    "kv_lens": "kv_lens must be in 0 .. max_kv_len = {max_kv_len}",
    "too few pages": "kv_indptr must give each request pages for its kv_lens",
    "kv_indices": "kv_indices must be pages of a pool of {pool_slots} slots",
    "draft_slots": "draft_slots must be slots of a pool of {pool_slots} slots",
    "mask_indptr": "mask_indptr must start at 0, not decrease and leave each request as many "
                   "entries as its mask has",
    "custom_mask": "custom_mask must have mask_indptr[-1] entries; it has {mask_entries}",
}


def violations(
    batch: VerifyBatch, pool_slots: int, *, custom_mask: torch.Tensor | None = None,
    mask_indptr: torch.Tensor | None = None,
) -> torch.Tensor:
    """How often each of :data:`RULES` is broken, ``[len(RULES)]`` int64 on the batch's device,
    without a look at it from the host.

    Args:
        pool_slots: rows in the pool.
        custom_mask, mask_indptr: a FULL_MASK as the engine holds it, if it has one.
    """
    bad = dict.fromkeys(RULES, batch.qo_indptr.new_zeros((), dtype=torch.int64))
    for name, entries in (("qo_indptr", batch.num_tokens),
                          ("kv_indptr", batch.kv_indices.numel())):
        indptr = getattr(batch, name)
        bad[f"{name} starts"] = indptr[0] != 0
        bad[f"{name} decreases"] = (indptr.diff() < 0).sum()
        bad[f"{name} ends"] = indptr[-1] > entries
    nodes, lens = batch.qo_indptr.diff().long(), batch.kv_lens.long()
    bad["too many nodes"] = (nodes > batch.max_q_len).sum()
    bad["kv_lens"] = ((lens < 0) | (lens > batch.max_kv_len)).sum()
    bad["too few pages"] = (batch.kv_indptr.diff().long() * batch.page_size < lens).sum()
    for name, ids, used, most in (
            ("kv_indices", batch.kv_indices, batch.kv_indptr[-1], pool_slots // batch.page_size),
            ("draft_slots", batch.draft_slots, batch.qo_indptr[-1], pool_slots)):
        if ids is not None:
            place = torch.arange(ids.numel(), device=ids.device)
            bad[name] = (((ids < 0) | (ids >= most)) & (place < used)).sum()
    if mask_indptr is not None:
        sizes = mask_indptr.diff()
        bad["mask_indptr"] = (mask_indptr[0] != 0) + (sizes < nodes * (lens + nodes)).sum()
        if custom_mask is not None:
            bad["custom_mask"] = mask_indptr[-1] > custom_mask.numel()
    return torch.stack([count.long() for count in bad.values()])


def check_batch(
    batch: VerifyBatch, pool_slots: int, *, custom_mask: torch.Tensor | None = None,
    mask_indptr: torch.Tensor | None = None,
) -> VerifyBatch:
    """Asks the device once, and raises with all rules that are broken.

    Raises:
        ValueError: naming each array, what it must be, and at how many places it is not.
        RuntimeError: under capture, where the host must not ask.
    """
    if batch.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("check_batch reads the device and cannot be captured: call it before "
                           "the capture or between replays, or capture `violations`")
    counts = violations(batch, pool_slots, custom_mask=custom_mask,
                        mask_indptr=mask_indptr).tolist()
    given = {"num_tokens": batch.num_tokens, "num_pages": batch.kv_indices.numel(),
             "max_q_len": batch.max_q_len, "max_kv_len": batch.max_kv_len,
             "pool_slots": pool_slots,
             "mask_entries": custom_mask.numel() if custom_mask is not None else 0}
    broken = [f"{RULES[name].format(**given)} (broken at {count} place{'s' * (count > 1)})"
              for name, count in zip(RULES, counts, strict=True) if count]
    if broken:
        raise ValueError("; ".join(broken))
    return batch
