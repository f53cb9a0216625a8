"""The float64 oracle: what `verify_attention` means, and why absorbed MLA may be computed so.

Nothing here is fast. Every other implementation is compared with this one.
"""

from __future__ import annotations

import dataclasses

import torch

from .batch import VerifyBatch
from .layout import KVLayout, pool_rows


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    *,
    sm_scale: float,
    logit_cap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Masked attention of one request in float64, all heads sharing one key and value.

    Args:
        q: ``[T, H, D]``; keys: ``[N, D]``; values: ``[N, V]``; visible: ``[T, N]`` bool.
        logit_cap: 0, or the cap ``c`` in ``c * tanh(logit / c)`` (Gemma 2's soft cap).

    Returns:
        ``out`` ``[T, H, V]`` and ``lse`` ``[T, H]`` float64, the natural log of the sum of
        exponentials. A token that sees nothing gives 0 and -inf. What a token does not see has
        no influence on it, be it NaN.
    """
    q, keys, values = q.double(), keys.double(), values.double()
    # Rows that nobody sees may hold anything; 0 * NaN would spread it.
    used = visible.any(0)
    keys, values, visible = keys[used], values[used], visible[:, used]
    logits = torch.einsum("thd,nd->thn", q, keys) * sm_scale
    if logit_cap:
        logits = logit_cap * torch.tanh(logits / logit_cap)
    logits = logits.masked_fill(~visible[:, None, :], -torch.inf)
    if logits.shape[-1] == 0:
        shape = (*q.shape[:2], values.shape[-1])
        return q.new_zeros(shape), q.new_full(q.shape[:2], -torch.inf)
    lse = torch.logsumexp(logits, dim=-1)
    weights = torch.exp(logits - torch.where(lse.isinf(), 0.0, lse)[..., None])
    # A row may hold NaN that some tokens see and others do not: 0 * NaN would spread it.
    broken = ~values.isfinite().all(-1)
    out = torch.einsum("thn,nv->thv", weights, values.masked_fill(broken[:, None], 0.0))
    for n in broken.nonzero()[:, 0]:
        sees = visible[:, n]
        out[sees] += weights[sees][:, :, n, None] * values[n]
    return out, lse


def verify_attention_reference(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    kv_pool: torch.Tensor,
    batch: VerifyBatch,
    *,
    sm_scale: float,
    layout: KVLayout = KVLayout.LATENT_FIRST,
    draft_kv: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    logit_cap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The oracle of :func:`mla_kernels.verify_attention`, request by request in float64.

    Args:
        q_latent: ``[num_tokens, H, kv_lora_rank]``, queries with ``W_UK`` absorbed.
        q_rope: ``[num_tokens, H, qk_rope_head_dim]``, rotated queries.
        kv_pool, batch, layout, draft_kv, scales: as there.

    Returns:
        ``out`` ``[num_tokens, H, kv_lora_rank]`` and ``lse`` ``[num_tokens, H]``, float64.
        Tokens that belong to no request are NaN in both: they have no meaning.
    """
    rows = pool_rows(kv_pool, layout)
    shape = q_latent.shape[:2]
    kind = {"dtype": torch.float64, "device": q_latent.device}
    out = torch.full((*shape, layout.kv_lora_rank), torch.nan, **kind)
    lse = torch.full(shape, torch.nan, **kind)
    # One order for the dot product, whatever the cache's: [latent, rope].
    q = torch.cat([q_latent, q_rope], dim=-1)
    for b in range(batch.batch_size):
        begin, end = batch.qo_indptr[b:b + 2].tolist()
        if begin == end:
            continue
        drafts = (draft_kv[begin:end] if batch.draft_slots is None
                  else rows[batch.draft_slots[begin:end].long()])
        kv = torch.cat([rows[batch.prefix_slots(b)], drafts])
        latent, rope = layout.split(kv)
        mask = batch.draft_mask(b)
        prefix = mask.new_ones(len(mask), len(kv) - len(mask))
        out[begin:end], lse[begin:end] = attend(
            q[begin:end], torch.cat([latent, rope], dim=-1).double() * k_scale,
            latent.double() * v_scale, torch.cat([prefix, mask], dim=1),
            sm_scale=sm_scale, logit_cap=logit_cap,
        )
    return out, lse


@dataclasses.dataclass(frozen=True)
class MLAWeights:
    """The per-head projections that absorption moves around, for one layer.

    Args:
        w_uk: ``[H, qk_nope_head_dim, kv_lora_rank]``, latent to the head's un-rotated key.
        w_uv: ``[H, v_head_dim, kv_lora_rank]``, latent to the head's value.
    """

    w_uk: torch.Tensor
    w_uv: torch.Tensor

    def absorb_query(self, q_nope: torch.Tensor) -> torch.Tensor:
        """``[T, H, qk_nope_head_dim]`` to ``[T, H, kv_lora_rank]``: ``W_UK`` applied to the
        query once, instead of to every key of the cache."""
        return torch.einsum("thn,hnr->thr", q_nope, self.w_uk)

    def project_output(self, latent_out: torch.Tensor) -> torch.Tensor:
        """``[T, H, kv_lora_rank]`` to ``[T, H, v_head_dim]``: ``W_UV`` applied to the
        attention's result once, instead of to every value of the cache."""
        return torch.einsum("thr,hvr->thv", latent_out, self.w_uv)


def mla_unabsorbed(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor,
    weights: MLAWeights,
    visible: torch.Tensor,
    *,
    sm_scale: float,
) -> torch.Tensor:
    """MLA as its paper defines it (arXiv 2405.04434, section 2.1): every head expands the
    latent into its own keys and values and attends to those.

    Args:
        q_nope: ``[T, H, qk_nope_head_dim]``; q_rope: ``[T, H, qk_rope_head_dim]``.
        latent: ``[N, kv_lora_rank]``; rope: ``[N, qk_rope_head_dim]``, shared by all heads.
        visible: ``[T, N]`` bool.

    Returns:
        ``[T, H, v_head_dim]`` float64.
    """
    q = torch.cat([q_nope, q_rope], dim=-1).double()
    keys = torch.einsum("nr,hkr->hnk", latent.double(), weights.w_uk.double())
    values = torch.einsum("nr,hvr->hnv", latent.double(), weights.w_uv.double())
    heads = []
    for h in range(q.shape[1]):
        k = torch.cat([keys[h], rope.double()], dim=-1)
        out, _ = attend(q[:, h:h + 1], k, values[h], visible, sm_scale=sm_scale)
        heads.append(out)
    return torch.cat(heads, dim=1)


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """``||out - expected|| / ||expected||`` over all elements, in float64.

    Infinities must stand in the same places and are then left out; a NaN on either side, or
    an infinity on one, gives ``inf``, so that no comparison passes with one.
    """
    out = out.double()
    expected = expected.double().to(out.device)
    if out.shape != expected.shape:
        raise ValueError(f"out is {list(out.shape)}, expected {list(expected.shape)}")
    if out.isnan().any() or expected.isnan().any():
        return float("inf")
    infinite = expected.isinf()
    if not torch.equal(out[infinite], expected[infinite]) or out[~infinite].isinf().any():
        return float("inf")
    difference = torch.linalg.vector_norm(out[~infinite] - expected[~infinite])
    norm = torch.linalg.vector_norm(expected[~infinite])
    return float(difference / norm) if norm > 0 else float(difference)
