"""The CUDA kernel behind `verify_attention`: its launch plan, and the call."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator

import torch

from . import build, schedule
from .batch import VerifyBatch
from .layout import KVLayout

#: Cache rows of a tile: kTokens of tree_verify.cuh.
TILE_TOKENS = 32

#: Dimensions that the kernel is compiled for (kv_layout.cuh).
KV_LORA_RANK, QK_ROPE_HEAD_DIM = 512, 64

DTYPES = (torch.bfloat16, torch.float16)

#: Microseconds until a block has its first tile and after its last, and for a tile, by rows: what
#: version 9 takes on an H200, rounded. Only their ratios matter. On sm_120, where tensor cores
#: are slower against memory, the ratios may be others: `mla_kernels.autotune` says.
START_US = {16: 9.0, 32: 10.0, 64: 12.0}
TILE_US = {16: 1.2, 32: 1.6, 64: 2.2}

#: Work groups of a launch: more than four waves of any GPU's blocks would be.
MAX_GROUPS = 1024


@dataclasses.dataclass(frozen=True)
class LaunchPlan:
    """How a launch is laid out; a function of capacities and the GPU, never of lengths.

    Args:
        rows: query rows (draft token, head) a block owns: 16, 32 or 64.
        row_tiles: blocks needed for the largest request's rows.
        groups: work groups that the KV tiles of the batch are shared out to, evenly. The grid
            is ``row_tiles * groups`` blocks.
        combine_split: warps that share out the partial results of one output fragment.
        chunks: 0, or for a batch-invariant launch the most chunks that the batch can have. They
            are shared out in the place of tiles.
    """

    rows: int
    row_tiles: int
    groups: int
    combine_split: int
    chunks: int = 0

    @property
    def batch_invariant(self) -> bool:
        return self.chunks > 0

    @property
    def partials(self) -> int:
        """Partial row tiles the workspace holds: at most two a block, none for one group;
        batch-invariant, one a chunk."""
        if self.batch_invariant:
            return self.chunks * self.row_tiles
        return 2 * self.groups * self.row_tiles if self.groups > 1 else 0

    @property
    def partial_out_bytes(self) -> int:
        return self.partials * self.rows * KV_LORA_RANK * 2

    @property
    def workspace_bytes(self) -> int:
        """Bytes of workspace: partial outputs in 16 bits, then their fp32 log-sum-exps."""
        return self.partial_out_bytes + self.partials * self.rows * 4


@functools.lru_cache(maxsize=4096)
def plan(
    num_heads: int,
    batch_size: int,
    max_q_len: int,
    max_kv_len: int,
    sms: int,
    *,
    rows: int | None = None,
    groups: int | None = None,
    combine_split: int | None = None,
    batch_invariant: bool = False,
) -> LaunchPlan:
    """Chooses a launch from capacities: of every tile and one to four waves of blocks, the one
    that should take the least time,

        waves * (START_US[rows] + ceil(tiles / groups) * TILE_US[rows])

    so that small problems take small tiles (more blocks, each quicker to start) and large ones
    the largest (a second row tile is another pass over the cache), and an uneven number of row
    tiles takes another wave only where that pays for its start.

    Args:
        sms: multiprocessors of the GPU.
        rows, groups, combine_split: override the choice.
        batch_invariant: lay it out so that the bits of a request's result depend on nothing but
            the request: 64 rows a tile whatever the largest draft, chunks of
            :func:`mla_kernels.schedule.chunk_tiles`, 8 warps a fragment to merge them.

    Raises:
        ValueError: ``rows`` or ``combine_split`` is not compiled, or ``groups`` is not in
            1 .. 1024 or so many that its product with the batch's tiles does not fit the 32 bits
            in which the device computes shares (never below a billion cache rows).
    """
    if rows is not None and rows not in build.TILE_ROWS:
        raise ValueError(f"rows must be one of {build.TILE_ROWS}; got {rows}")
    tiles = -(-(max_kv_len + max_q_len) // TILE_TOKENS)
    chunks = batch_size * schedule.most_chunks(tiles) if batch_invariant else 0
    units = chunks or batch_size * tiles
    most_groups = min(MAX_GROUPS, (2**32 - 1) // (units + 1))
    if groups is not None and not 1 <= groups <= most_groups:
        raise ValueError(f"groups must be in 1 .. {most_groups}; got {groups}")
    if batch_invariant:
        rows, combine_split = rows or build.TILE_ROWS[-1], build.COMBINE_SPLITS[-1]

    best = math.inf
    for r in build.TILE_ROWS if rows is None else (rows,):
        r_tiles = -(-num_heads * max_q_len // r)
        for g in _group_counts(r_tiles, units, batch_size, sms) if groups is None else (groups,):
            g = min(g, most_groups)
            waves = -(-r_tiles * g // sms)
            cost = waves * (START_US[r] + -(-units // g) * TILE_US[r])
            if cost < best:
                best, launch = cost, (r, r_tiles, g)
    rows, row_tiles, groups = launch
    fragments = batch_size * row_tiles * (rows // 16) * (KV_LORA_RANK // 16)
    if combine_split is None:
        combine_split = _combine_split(fragments, -(-groups // batch_size), sms)
    elif combine_split not in build.COMBINE_SPLITS:
        raise ValueError(f"combine_split must be one of {build.COMBINE_SPLITS}; got "
                         f"{combine_split}")
    return LaunchPlan(rows, row_tiles, groups, combine_split, chunks)


def _group_counts(row_tiles: int, units: int, batch_size: int, sms: int) -> Iterator[int]:
    """Work groups that fill one to four waves of blocks."""
    for waves in range(1, 5):
        groups = max(1, min(waves * sms // row_tiles, units))
        # Shares that end where requests end leave less to merge: worth a few idle blocks.
        aligned = groups // batch_size * batch_size
        yield aligned if aligned >= 0.95 * groups else groups


def _combine_split(fragments: int, partials: int, sms: int) -> int:
    """Warps that share out a fragment's partial results: the number that makes a warp wait for
    memory least often. More warps a fragment mean fewer partials each, and fewer fragments at
    once. combine.cuh says how many partials a warp asks for at a time (``kAhead``) and how many
    blocks of 8 warps a multiprocessor holds."""
    def waits(split: int) -> int:
        ahead, blocks = (8, 2) if split == 1 else (24, 1)
        rounds = -(-fragments * split // (8 * blocks * sms))
        return rounds * -(-partials // (split * ahead))

    return min(build.COMBINE_SPLITS, key=waits)


@functools.cache
def _device(index: int) -> tuple[int, str, bool]:
    """``(multiprocessors, architecture, has programmatic dependent launch)``."""
    p = torch.cuda.get_device_properties(index)
    return p.multi_processor_count, f"sm_{p.major}{p.minor}", p.major >= 9


def plan_for(batch: VerifyBatch, num_heads: int, device: torch.device, **overrides) -> LaunchPlan:
    """:func:`plan` for a batch on its GPU, with the overrides of :func:`launch_as`."""
    overrides = _forced | overrides
    sms, _, _ = _device(device.index if device.index is not None else torch.cuda.current_device())
    return plan(num_heads, batch.batch_size, batch.max_q_len, batch.max_kv_len, sms, **overrides)


#: Overrides that hold inside :func:`launch_as`.
_forced: dict[str, int] = {}


def overrides() -> dict[str, int]:
    """What :func:`launch_as` holds now."""
    return dict(_forced)


@contextlib.contextmanager
def launch_as(**overrides: int) -> Iterator[None]:
    """Inside, every launch of this process is planned with these overrides of :func:`plan`:
    ``rows``, ``groups``, ``combine_split``. For checks and tuning."""
    before = dict(_forced)
    _forced.update(overrides)
    try:
        yield
    finally:
        _forced.clear()
        _forced.update(before)


def not_compiled_for(q_latent: torch.Tensor, q_rope: torch.Tensor) -> str | None:
    """Which dtype or widths of these queries the source has no kernel for, or None."""
    if q_latent.dtype not in DTYPES:
        return f"it is compiled for bfloat16 and float16, not {q_latent.dtype}"
    widths = (q_latent.shape[-1], q_rope.shape[-1])
    if widths != (KV_LORA_RANK, QK_ROPE_HEAD_DIM):
        return f"it is compiled for rows of 512 + 64, not {widths[0]} + {widths[1]}"
    return None


def why_not(q_latent: torch.Tensor, q_rope: torch.Tensor) -> str | None:
    """What keeps this kernel from taking these queries, or None."""
    if q_latent.device.type != "cuda":
        return f"it runs on a CUDA device, and the tensors are on {q_latent.device}"
    if reason := not_compiled_for(q_latent, q_rope):
        return reason
    if torch.cuda.get_device_capability(q_latent.device) < (8, 0):
        return "it needs compute capability 8.0 or later"
    return None


def named_tensors(
    q_latent: torch.Tensor, q_rope: torch.Tensor, rows: torch.Tensor,
    draft_kv: torch.Tensor | None, batch: VerifyBatch, out: torch.Tensor, lse: torch.Tensor,
    workspace: torch.Tensor,
) -> dict[str, torch.Tensor | None]:
    """A call's tensors by their names in ``VerifyParams``; None for a null pointer."""
    in_pool = batch.draft_slots is not None
    return {
        "q_latent": q_latent, "q_rope": q_rope, "kv_pool": rows,
        "draft_kv": None if in_pool else draft_kv, "draft_slots": batch.draft_slots,
        "qo_indptr": batch.qo_indptr, "kv_indptr": batch.kv_indptr,
        "kv_indices": batch.kv_indices, "kv_lens": batch.kv_lens, "mask_bits": batch.mask_bits,
        "out": out, "lse": lse, "partial_out": workspace,
    }


def fill(
    p, tensors: dict[str, torch.Tensor | None], batch: VerifyBatch, launch: LaunchPlan, *,
    layout: KVLayout, sm_scale: float, k_scale: float, v_scale: float, logit_cap: float,
) -> None:
    """Fills in ``VerifyParams`` (params.h): :func:`named_tensors`, their strides, numbers."""
    for name, tensor in tensors.items():
        setattr(p, name, 0 if tensor is None else tensor.data_ptr())
    p.partial_lse = p.partial_out + launch.partial_out_bytes
    p.mask_words = batch.mask_bits.shape[1]
    q_latent, q_rope = tensors["q_latent"], tensors["q_rope"]
    size = q_latent.element_size()
    p.q_latent_token_stride, p.q_latent_head_stride = (size * s for s in q_latent.stride()[:2])
    p.q_rope_token_stride, p.q_rope_head_stride = (size * s for s in q_rope.stride()[:2])
    p.kv_row_stride = size * tensors["kv_pool"].stride(0)
    p.draft_row_stride = 0 if tensors["draft_kv"] is None else size * tensors["draft_kv"].stride(0)
    p.num_heads, p.batch_size = q_latent.shape[1], batch.batch_size
    p.page_shift = batch.page_size.bit_length() - 1
    p.latent_offset = size * layout.latent_offset
    p.groups, p.row_tiles = launch.groups, launch.row_tiles
    p.batch_invariant = launch.batch_invariant
    p.logit_scale, p.logit_cap, p.value_scale = sm_scale * k_scale, logit_cap, v_scale


def verify_attention_cuda(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    rows: torch.Tensor,
    draft_kv: torch.Tensor | None,
    batch: VerifyBatch,
    *,
    layout: KVLayout,
    sm_scale: float,
    k_scale: float,
    v_scale: float,
    logit_cap: float,
    out: torch.Tensor,
    lse: torch.Tensor,
    workspace: torch.Tensor | None = None,
    batch_invariant: bool = False,
    launch: LaunchPlan | None = None,
) -> None:
    """Runs the kernel on checked arguments; see :func:`mla_kernels.verify_attention`.

    Args:
        q_latent: ``[num_tokens, H, 512]``; q_rope: ``[num_tokens, H, 64]``; any token and head
            strides of whole 16 bytes.
        rows: ``[slots, 576]``; draft_kv: ``[num_tokens, 576]`` or None.
        out: ``[num_tokens, H, 512]`` contiguous; lse: ``[num_tokens, H]`` fp32 contiguous.
        workspace: uint8, at least ``launch.workspace_bytes``, 16-byte aligned; allocated when
            None. Nothing in it outlives the call.
        batch_invariant: as :func:`plan`; a ``launch`` that is given says so itself.
        launch: default :func:`plan_for`.
    """
    device = q_latent.device
    index = device.index if device.index is not None else torch.cuda.current_device()
    _, arch, dependent = _device(index)
    num_heads = q_latent.shape[1]
    if launch is None:
        launch = plan_for(batch, num_heads, device, batch_invariant=batch_invariant)
    need = launch.workspace_bytes
    if workspace is None:
        workspace = torch.empty(need, dtype=torch.uint8, device=device)
    elif workspace.numel() < need:
        raise ValueError(f"workspace must have at least {need:,} bytes; got "
                         f"{workspace.numel():,}")
    module = build.load(arch)
    p = module.VerifyParams()
    tensors = named_tensors(q_latent, q_rope, rows, draft_kv, batch, out, lse, workspace)
    fill(p, tensors, batch, launch, layout=layout, sm_scale=sm_scale, k_scale=k_scale,
         v_scale=v_scale, logit_cap=logit_cap)
    with torch.cuda.device(index):
        module.tree_verify(
            p, rows=launch.rows, half=q_latent.dtype == torch.float16,
            dependent=dependent, combine_split=launch.combine_split,
            stream=torch.cuda.current_stream(index).cuda_stream,
        )
