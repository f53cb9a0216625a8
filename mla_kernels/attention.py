"""`verify_attention`: one meaning, checked once, for every backend."""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import torch

from . import cuda, emulated
from .batch import VerifyBatch
from .checked import check_batch
from .layout import KVLayout, pool_rows
from .reference import verify_attention_reference

Query = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

BACKENDS = ("auto", "cuda", "triton", "emulated", "reference")


def verify_attention(
    q: Query,
    kv_pool: torch.Tensor,
    batch: VerifyBatch,
    *,
    sm_scale: float,
    layout: KVLayout = KVLayout.LATENT_FIRST,
    draft_kv: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    logit_cap: float = 0.0,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    backend: str = "auto",
    batch_invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a batch of draft trees over a paged MLA cache, in absorbed form.

    Every draft token sees its request's whole prefix and, among the draft tokens, those that
    its mask row names (its ancestors and itself, for a tree). Keys are whole cache rows, the
    value is their latent part, and all heads share them.

    Args:
        q: ``[num_tokens, H, row_dim]`` in the cache row's own order, or a pair ``(q_latent
            [num_tokens, H, kv_lora_rank], q_rope [num_tokens, H, qk_rope_head_dim])``. bf16 or
            fp16 (fp32 on the CPU); any token and head strides of whole 16 bytes.
        kv_pool: ``[slots, row_dim]``, ``[slots, 1, row_dim]`` or ``[pages, page_size,
            row_dim]``, same dtype as ``q``; may be a view of something wider. Slots that the
            batch does not name may hold anything. Those it names must be finite: the fast
            backends multiply what a token does not see by 0, and 0 times NaN is NaN.
        batch: who attends to what, on the same device.
        sm_scale: factor of the logits. For DeepSeek and Kimi models ``(128 + 64) ** -0.5``
            times the square of YaRN's ``mscale``; never ``576 ** -0.5``.
        layout: the order of a row.
        draft_kv: ``[num_tokens, row_dim]``, rows of the draft tokens, needed exactly when
            ``batch.draft_slots`` is None.
        k_scale, v_scale: factors of keys and values, for caches that were scaled when written.
        logit_cap: 0, or ``c`` in ``c * tanh(logit / c)``.
        out: ``[num_tokens, H, kv_lora_rank]`` contiguous, dtype of ``q``; allocated when None.
        lse: ``[num_tokens, H]`` fp32 contiguous; allocated when None.
        workspace: uint8 for the backend's partial results, see :func:`workspace_bytes`;
            allocated when None. Pass ``out``, ``lse`` and ``workspace`` to call without
            allocating, as under CUDA graph capture.
        backend: ``"cuda"``, ``"triton"``, ``"reference"`` (float64), or ``"auto"``: the first
            of these that can. ``"emulated"`` runs the CUDA kernel on the CPU, see
            :mod:`mla_kernels.emulated`.
        batch_invariant: the bits of a request's result depend on that request alone, not on
            what else is in the batch or on its capacities. Only ``"cuda"``, ``"emulated"`` and
            ``"reference"`` can; costs time and workspace. Without it, a call with the same
            inputs still gives the same bits every time.

    Returns:
        ``(out, lse)``; ``lse`` is the natural log of the sum of exponentials. A token that
        sees nothing gives 0 and -inf. Tokens past ``batch.qo_indptr[-1]`` (padding) are left
        as they were, which is 0 where this call allocated.

    Raises:
        TypeError, ValueError: naming the argument, what it got and what it must be, before
            anything is launched. Values inside index tensors are read only where the
            environment has ``MLA_KERNELS_CHECKED=1``, and never under capture: see
            :func:`mla_kernels.checked.check_batch`, which then runs first.
    """
    if not isinstance(layout, KVLayout):
        raise TypeError(f"layout must be a KVLayout; got {layout!r}")
    if not isinstance(batch, VerifyBatch):
        raise TypeError(f"batch must be a VerifyBatch; got {type(batch).__name__}")
    q_latent, q_rope = _split_query(q, layout)
    rows = pool_rows(kv_pool, layout)
    num_tokens, num_heads = q_latent.shape[:2]
    if num_tokens != batch.num_tokens:
        raise ValueError(f"q must have batch.num_tokens = {batch.num_tokens} tokens; got "
                         f"{num_tokens}")
    if kv_pool.dim() == 3 and kv_pool.shape[1] not in (1, batch.page_size):
        raise ValueError(f"kv_pool has pages of {kv_pool.shape[1]} tokens, batch.page_size is "
                         f"{batch.page_size}")
    _check_same(rows, "kv_pool", q_latent)
    _check_strides(rows, "kv_pool")
    if batch.device != q_latent.device:
        raise ValueError(f"batch is on {batch.device}, q on {q_latent.device}")
    if (draft_kv is None) == (batch.draft_slots is None):
        raise ValueError(
            "draft_kv must be given, since batch.draft_slots is None" if draft_kv is None else
            "draft_kv must be None, since batch.draft_slots says where the draft rows are"
        )
    if draft_kv is not None:
        if not isinstance(draft_kv, torch.Tensor):
            raise TypeError(f"draft_kv must be a tensor; got {type(draft_kv).__name__}")
        if draft_kv.dim() == 3 and draft_kv.shape[1] == 1:
            draft_kv = draft_kv[:, 0]
        layout.check_rows(draft_kv, "draft_kv")
        if draft_kv.shape[:-1] != (num_tokens,):
            raise ValueError(f"draft_kv must be [{num_tokens}, {layout.row_dim}]; got "
                             f"{list(draft_kv.shape)}")
        _check_same(draft_kv, "draft_kv", q_latent)
        _check_strides(draft_kv, "draft_kv")
    for name, value in (("sm_scale", sm_scale), ("k_scale", k_scale), ("v_scale", v_scale),
                        ("logit_cap", logit_cap)):
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise TypeError(f"{name} must be a number; got {value!r}")
        if not math.isfinite(value):
            raise ValueError(f"{name} must be finite; got {value}")
    if logit_cap < 0:
        raise ValueError(f"logit_cap must be at least 0; got {logit_cap}")
    if not isinstance(batch_invariant, bool):
        raise TypeError(f"batch_invariant must be a bool; got {batch_invariant!r}")

    shape = (num_tokens, num_heads, layout.kv_lora_rank)
    if out is None:
        out = torch.zeros(shape, dtype=q_latent.dtype, device=q_latent.device)
    else:
        _check_result(out, "out", shape, q_latent.dtype, q_latent.device)
    if lse is None:
        lse = torch.zeros(shape[:2], dtype=torch.float32, device=q_latent.device)
    else:
        _check_result(lse, "lse", shape[:2], torch.float32, q_latent.device)
    backend = choose_backend(q_latent, q_rope, backend)
    if batch_invariant and backend == "triton":
        raise ValueError("backend 'triton' cannot run this call: it is not batch-invariant; pass "
                         "batch_invariant=False, or backend 'cuda' or 'reference'")
    need = workspace_bytes(batch, num_heads, backend, layout=layout, dtype=q_latent.dtype,
                           batch_invariant=batch_invariant)
    if workspace is None:
        workspace = torch.empty(need, dtype=torch.uint8, device=q_latent.device)
    else:
        if not isinstance(workspace, torch.Tensor):
            raise TypeError(f"workspace must be a tensor; got {type(workspace).__name__}")
        if workspace.dtype != torch.uint8 or workspace.dim() != 1:
            raise TypeError(f"workspace must be uint8 [bytes]; got {workspace.dtype} "
                            f"{list(workspace.shape)}")
        if workspace.device != q_latent.device:
            raise ValueError(f"workspace is on {workspace.device}, q on {q_latent.device}")
        if not workspace.is_contiguous():
            raise ValueError(f"workspace must be contiguous; got strides {workspace.stride()}")
        if workspace.numel() < need:
            raise ValueError(f"workspace must have at least {need:,} bytes; got "
                             f"{workspace.numel():,}")
    _verify_attention_op(
        q_latent, q_rope, rows, draft_kv, batch.qo_indptr, batch.kv_indptr, batch.kv_indices,
        batch.kv_lens, batch.mask_bits, batch.draft_slots, batch.page_size, batch.max_q_len,
        batch.max_kv_len, layout.order, float(sm_scale), float(k_scale), float(v_scale),
        float(logit_cap), backend, out, lse, workspace, batch_invariant,
    )
    return out, lse


def workspace_bytes(
    batch: VerifyBatch, num_heads: int, backend: str, *,
    layout: KVLayout = KVLayout.LATENT_FIRST, dtype: torch.dtype = torch.bfloat16,
    batch_invariant: bool = False,
) -> int:
    """Bytes of ``workspace`` that a call with this batch's capacities needs.

    Args:
        backend: ``"cuda"``, ``"triton"`` or ``"reference"``, as :func:`choose_backend` says.
        layout: the order and widths of a row; dtype: of the queries.
        batch_invariant: as the call will be.
    """
    if backend == "cuda":
        return cuda.plan_for(batch, num_heads, batch.device,
                             batch_invariant=batch_invariant).workspace_bytes
    if backend == "emulated":
        return emulated.plan_for(batch, num_heads,
                                 batch_invariant=batch_invariant).workspace_bytes
    if backend == "triton":
        from . import triton

        return triton.workspace_bytes(batch, num_heads, layout=layout, dtype=dtype)
    return 0


def choose_backend(q_latent: torch.Tensor, q_rope: torch.Tensor, backend: str = "auto") -> str:
    """The backend that will run; ``"auto"`` takes the first of cuda, triton (on a GPU) and
    reference that can.

    Raises:
        ValueError: an unknown name, or a named backend that cannot, with the reason.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}; got {backend!r}")
    reason = cuda.why_not(q_latent, q_rope)
    if backend == "cuda" and reason:
        raise ValueError(f"backend 'cuda' cannot run this call: {reason}")
    if backend == "emulated" and (missing := emulated.why_not(q_latent, q_rope)):
        raise ValueError(f"backend 'emulated' cannot run this call: {missing}")
    if backend == "triton" and q_latent.dtype == torch.float64:
        raise ValueError("backend 'triton' cannot run this call: it takes bfloat16 and float16, "
                         "in the interpreter float16 and float32, not torch.float64")
    if backend != "auto":
        return backend
    if reason is None:
        return "cuda"
    return "triton" if q_latent.device.type == "cuda" else "reference"


# -- the operator -------------------------------------------------------------------------


@torch.library.custom_op("mla_kernels::verify_attention", mutates_args=("out", "lse", "workspace"))
def _verify_attention_op(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    rows: torch.Tensor,
    draft_kv: torch.Tensor | None,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_lens: torch.Tensor,
    mask_bits: torch.Tensor,
    draft_slots: torch.Tensor | None,
    page_size: int,
    max_q_len: int,
    max_kv_len: int,
    order: str,
    sm_scale: float,
    k_scale: float,
    v_scale: float,
    logit_cap: float,
    backend: str,
    out: torch.Tensor,
    lse: torch.Tensor,
    workspace: torch.Tensor,
    batch_invariant: bool = False,
) -> None:
    _check_addresses(q_latent=q_latent, q_rope=q_rope, kv_pool=rows, draft_kv=draft_kv, out=out,
                     workspace=workspace)
    batch = VerifyBatch(qo_indptr, kv_indptr, kv_indices, kv_lens, mask_bits, draft_slots,
                        page_size, max_q_len, max_kv_len)
    layout = KVLayout(order, q_latent.shape[-1], q_rope.shape[-1])
    if _checked(q_latent.device):
        check_batch(batch, rows.shape[0])
    # The reference works on one request at a time in any case.
    how = {"batch_invariant": True} if batch_invariant and backend != "reference" else {}
    _RUN[backend](
        q_latent, q_rope, rows, draft_kv, batch, layout=layout, sm_scale=sm_scale,
        k_scale=k_scale, v_scale=v_scale, logit_cap=logit_cap, out=out, lse=lse,
        workspace=workspace, **how,
    )


@_verify_attention_op.register_fake
def _(*args: object, **kwargs: object) -> None:
    """Under torch.compile: results are arguments, so there is nothing to describe."""


def _run_reference(q_latent, q_rope, rows, draft_kv, batch, *, out, lse, workspace, **meaning):
    exact, exact_lse = verify_attention_reference(q_latent, q_rope, rows, batch,
                                                  draft_kv=draft_kv, **meaning)
    used = int(batch.qo_indptr[-1])
    out[:used] = exact[:used].to(out.dtype)
    lse[:used] = exact_lse[:used].float()


def _run_triton(*args, **kwargs):
    # Imported late: it settles whether Triton interprets or compiles.
    from .triton import verify_attention_triton

    verify_attention_triton(*args, **kwargs)


_RUN: dict[str, Callable[..., None]] = {
    "cuda": cuda.verify_attention_cuda,
    "triton": _run_triton,
    "emulated": emulated.verify_attention_emulated,
    "reference": _run_reference,
}


# -- checks -------------------------------------------------------------------------------


def _checked(device: torch.device) -> bool:
    if os.environ.get("MLA_KERNELS_CHECKED") != "1":
        return False
    return device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def _split_query(q: Query, layout: KVLayout) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(q, torch.Tensor):
        if q.dim() != 3 or q.shape[-1] != layout.row_dim:
            raise ValueError(f"q must be [num_tokens, H, {layout.row_dim}]; got {list(q.shape)}")
        parts = q[..., layout.latent_slice], q[..., layout.rope_slice]
    elif isinstance(q, (tuple, list)) and len(q) == 2 and all(
            isinstance(part, torch.Tensor) for part in q):
        parts = tuple(q)
        for name, part, width in (("q_latent", parts[0], layout.kv_lora_rank),
                                  ("q_rope", parts[1], layout.qk_rope_head_dim)):
            if part.dim() != 3 or part.shape[-1] != width:
                raise ValueError(f"{name} must be [num_tokens, H, {width}]; got "
                                 f"{list(part.shape)}")
        if parts[0].shape[:2] != parts[1].shape[:2]:
            raise ValueError(f"q_latent is {list(parts[0].shape)}, q_rope "
                             f"{list(parts[1].shape)}: tokens and heads must agree")
        _check_same(parts[1], "q_rope", parts[0])
    else:
        raise TypeError("q must be a tensor or a pair (q_latent, q_rope) of tensors; got "
                        f"{type(q).__name__}")
    if not 1 <= parts[0].shape[1] <= 128:
        raise ValueError(f"q must have 1 .. 128 heads; got {parts[0].shape[1]}")
    if parts[0].dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        raise TypeError(f"q must be bfloat16, float16 or, on the CPU, float32 or float64; got "
                        f"{parts[0].dtype}")
    for name, part in zip(("q_latent", "q_rope"), parts, strict=True):
        _check_strides(part, name)
    return parts


def _check_same(tensor: torch.Tensor, name: str, q: torch.Tensor) -> None:
    if tensor.dtype != q.dtype:
        raise TypeError(f"{name} must be {q.dtype}, as q is; got {tensor.dtype}")
    if tensor.device != q.device:
        raise ValueError(f"{name} is on {tensor.device}, q on {q.device}")


def _check_strides(tensor: torch.Tensor, name: str) -> None:
    """Rows must be copied in 16-byte pieces."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} must be contiguous in its last dimension; got strides "
                         f"{tensor.stride()}")
    size = tensor.element_size()
    for dim, stride in enumerate(tensor.stride()[:-1]):
        if tensor.shape[dim] > 1 and stride * size % 16:
            raise ValueError(f"{name} must have strides of whole 16 bytes; dimension {dim} has "
                             f"{stride * size} bytes")


def _check_addresses(**tensors: torch.Tensor | None) -> None:
    """Called in the operator: while torch.compile traces, tensors have no address."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device.type == "cuda" and tensor.data_ptr() % 16:
            raise ValueError(f"{name} must begin at a multiple of 16 bytes; its address is "
                             f"{tensor.data_ptr() % 16} past one")


def _check_result(tensor: torch.Tensor, name: str, shape: tuple[int, ...], dtype: torch.dtype,
                  device: torch.device) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor; got {type(tensor).__name__}")
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name} must be {list(shape)}; got {list(tensor.shape)}")
    if tensor.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}; got {tensor.dtype}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, q on {device}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous; got strides {tensor.stride()}")
