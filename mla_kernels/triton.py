"""Tree-verify MLA attention in Triton: our best one, and a serial one in the engines' manner.

Both kernels compute what :func:`mla_kernels.reference.verify_attention_reference` computes.

``split``
    All heads and draft tokens of a request are rows of one matrix, as they share every cache
    row (row ``t * H + h``). A program takes ``block_m`` of them and a run of cache tiles; the
    runs are dealt out so that each program gets about the same number of tiles, however uneven
    the prefixes, and a second kernel merges the runs of a request by their log-sum-exp. A
    cache row is read once: its latent is the key and, transposed, the value.
``serial``
    One program for a request, a head and a block of draft tokens, walking the whole prefix
    alone, with keys and values loaded apart: the shape of SGLang's ``extend_attention_fwd``,
    its only tree-capable path for MLA, and our own code. On an H200 it takes about 0.72 of the
    time of SGLang's, which is what speed-ups are measured against.

Without a GPU the kernels run in Triton's interpreter, slowly, in fp16 and fp32. The choice is
made once, when this module is imported: ``TRITON_INTERPRET`` decides where it is set (``1``
interprets, ``0`` compiles), else ``torch.cuda.is_available()``. See :data:`INTERPRETED`.

The file is called like the package it uses: run it with ``python -m``, not by its path, or
``import triton`` finds this file.
"""

import contextlib
import dataclasses
import inspect
import math
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from .batch import VerifyBatch
from .layout import KVLayout

#: Whether the kernels run in Triton's interpreter, on CPU tensors, or are compiled for a GPU.
INTERPRETED: bool = (
    os.environ["TRITON_INTERPRET"].lower() in ("1", "true", "yes", "on", "y")
    if os.environ.get("TRITON_INTERPRET")
    else not torch.cuda.is_available()
)

#: Shared memory that a block may have on sm_120, in bytes; the tightest limit we build for.
SM120_SHARED_MEMORY = 101_376

LOG2E = math.log2(math.e)

#: Kernel arguments that change from batch to batch. Triton compiles a variant of its own for
#: integers that are 1 or divisible by 16; for these it would do so in the middle of somebody's
#: timing or graph capture, and gain nothing.
CAPACITIES = ("mask_words", "batch_size", "workers", "padded_rows")


def _jit(fn: Any) -> Any:
    """``triton.jit``, which looks at ``TRITON_INTERPRET`` at this moment and never again. The
    variable is put back afterwards: other kernels of this process, and its children, decide
    for themselves."""
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1" if INTERPRETED else "0"
    try:
        return triton.jit(fn, do_not_specialize=[
            name for name in inspect.signature(fn).parameters if name in CAPACITIES])
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before


# tl.sum, tl.max and tl.cumsum are themselves @triton.jit functions: when triton was imported
# for compilation (by torch, say) and these kernels are interpreted, they cannot be called.
# The builtins below them can, in both worlds, given the same combine functions, which are also
# the ones that the interpreter recognises and hands to NumPy.
_add = tl.standard._sum_combine
_larger = tl.standard._elementwise_max
_smaller = tl.standard._elementwise_min


if INTERPRETED:
    def _bound(x: Any) -> int:
        """A loop bound as a number. Triton 3.6 converts it in a way that NumPy 2.4 refuses."""
        return x if isinstance(x, int) else int(x.handle.data.item())
else:
    @_jit
    def _bound(x):
        return x


# -- what both kernels share ---------------------------------------------------------------


@_jit
def _base2_scores(q_latent, q_rope, k_latent_t, k_rope_t, scale, cap, HAS_CAP: tl.constexpr):
    """Logits times log2(e), ``[M, N]`` fp32, of ``[M, 512]``, ``[M, 64]``, ``[512, N]`` and
    ``[64, N]``. ``scale`` and ``cap`` as :func:`_scale_and_cap` gives them."""
    # "ieee" concerns fp32 operands alone: the default would round them to TF32.
    s = tl.dot(q_latent, k_latent_t, input_precision="ieee")
    s = tl.dot(q_rope, k_rope_t, s, input_precision="ieee")
    s = s * scale
    if HAS_CAP:
        # tanh(|s|) without an exponential that overflows: e = exp(-2|s|), (1 - e) / (1 + e).
        # Near 0 the difference loses its digits, and the series has them: s - s^3 / 3 is off by
        # less than 2 s^5 / 15, 1e-8 of s at the seam.
        a = tl.abs(s)
        e = tl.exp2(a * -2.8853900817779268)
        t = tl.where(a < 0.016, a - a * a * a * (1.0 / 3.0), (1.0 - e) / (1.0 + e))
        s = tl.where(s < 0, -t, t) * cap
    return s


@_jit
def _softmax_step(s, visible, m, l):
    """One step of the online softmax in base 2: ``s``, ``visible`` ``[M, N]``, running
    maximum ``m`` and sum ``l`` ``[M]``. Returns the tile's weights, the factor by which what
    was accumulated shrinks, and the new ``m`` and ``l``."""
    s = tl.where(visible, s, float("-inf"))
    m_new = tl.maximum(m, tl.reduce(s, 1, _larger))
    # A row that has seen nothing has m = -inf, and -inf - -inf is NaN.
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s - m_safe[:, None])
    shrink = tl.exp2(m - m_safe)
    return p, shrink, m_new, l * shrink + tl.reduce(p, 1, _add)


@_jit
def _base2_lse(m, l):
    """Base-2 log-sum-exp of a finished softmax, ``[M]``; -inf where nothing was seen."""
    nothing = l == 0.0
    return tl.where(nothing, float("-inf"), m + tl.log2(tl.where(nothing, 1.0, l)))


@_jit
def _prefix_slots(kv_indices, first_page, n, ok, PAGE_SIZE: tl.constexpr):
    """Pool slots, int64, of prefix tokens ``n`` ``[N]`` of the request whose pages begin at
    ``kv_indices[first_page]``; 0 where not ``ok``."""
    page = tl.load(kv_indices + first_page + n // PAGE_SIZE, mask=ok, other=0)
    return page.to(tl.int64) * PAGE_SIZE + n % PAGE_SIZE


@_jit
def _draft_visibility(mask_bits, mask_words, tokens, row_ok, j, q_len):
    """Which of draft tokens ``j`` ``[N]`` the rows of tokens ``tokens`` ``[M]`` (counted over
    the whole batch) see, ``[M, N]`` bool, and which of them any row sees, ``[N]`` bool. The
    rest are not even loaded, so that what they hold cannot matter: 0 * NaN would."""
    ok = row_ok[:, None] & (j < q_len)[None, :]
    at = tokens.to(tl.int64)[:, None] * mask_words + (j // 32)[None, :]
    bits = (tl.load(mask_bits + at, mask=ok, other=0) >> (j % 32)[None, :]) & 1
    return bits != 0, tl.reduce(bits, 0, _larger) != 0


# -- split ---------------------------------------------------------------------------------


@_jit
def _assign(worker, qo_indptr, kv_lens, batch_size, workers,
            BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr):
    """Which run of which request is ``worker``'s.

    All tiles of all requests are cut into runs of at most ``chunk`` tiles, none of which spans
    two requests; ``chunk`` is (nearly) the smallest with which there are no more runs than
    workers. Every program works this out anew from the batch's lengths, which costs less than
    a kernel that does it once.

    Returns ``request``, ``part`` (the run's place in the request), ``parts`` (runs the request
    has; 0: nothing to do for this worker), ``chunk``.
    """
    b = tl.arange(0, BLOCK_B)
    ok = b < batch_size
    q_lens = (tl.load(qo_indptr + b + 1, mask=ok, other=0)
              - tl.load(qo_indptr + b, mask=ok, other=0))
    lens = tl.load(kv_lens + b, mask=ok, other=0)
    tiles = (lens + BLOCK_N - 1) // BLOCK_N + (q_lens + BLOCK_N - 1) // BLOCK_N
    tiles = tl.where(q_lens > 0, tiles, 0)
    total = tl.reduce(tiles, 0, _add)
    # Bounds: fewer tiles a run than an even share cannot suffice. A request's last run may be
    # short, so `batch_size` workers may be wasted, but no more; and the longest request in one
    # run always suffices, since there are at least as many workers as requests.
    low = tl.maximum((total + workers - 1) // workers, 1)
    spare = tl.maximum(workers - batch_size, 1)
    high = tl.minimum(tl.reduce(tiles, 0, _larger), (total + spare - 1) // spare)
    high = tl.maximum(high, low)
    # Sixteen candidates between the bounds, both included, and the first that suffices. (A
    # bisection would find the very smallest. But Triton 3.8 forgets the alignment of pointers
    # in a kernel with another loop before, and then loads the cache two bytes at a time.)
    candidates = low + ((high - low) * tl.arange(0, 16) + 14) // 15
    needed = tl.reduce((tiles[None, :] + candidates[:, None] - 1) // candidates[:, None], 1, _add)
    chunk = tl.reduce(tl.where(needed <= workers, candidates, high), 0, _smaller)
    runs = (tiles + chunk - 1) // chunk
    ends = tl.associative_scan(runs, 0, _add)
    before = ends <= worker
    request = tl.reduce(before.to(tl.int32), 0, _add)
    first = tl.reduce(tl.where(before, ends, 0), 0, _larger)
    parts = tl.reduce(tl.where(b == request, runs, 0), 0, _add)
    return request, worker - first, parts, chunk


@_jit
def _split_kernel(
    q_latent, q_rope, rows, draft_kv,  # [num_tokens, H, R], [.., H, D], [slots, R + D], likewise
    qo_indptr, kv_indptr, kv_indices, kv_lens, mask_bits, draft_slots,
    out, lse,                          # [num_tokens, H, R], [num_tokens, H]
    runs_of, part_out, part_lse,       # [bs, 2], [workers, padded rows, R], [workers, padded rows]
    q_latent_stride_t, q_latent_stride_h, q_rope_stride_t, q_rope_stride_h,
    rows_stride, draft_stride,
    mask_words, batch_size, workers,
    scale, cap, v_scale,
    H: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
    LATENT_OFFSET: tl.constexpr, ROPE_OFFSET: tl.constexpr, PAGE_SIZE: tl.constexpr,
    HAS_CAP: tl.constexpr, SPLIT: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):
    # Row blocks vary fastest, so that programs that read the same run are resident together
    # and all but one of them find it in L2.
    row_block = tl.program_id(0)
    worker = tl.program_id(1)
    if SPLIT:
        request, part, parts, chunk = _assign(worker, qo_indptr, kv_lens, batch_size, workers,
                                              BLOCK_B, BLOCK_N)
        if parts == 0:
            return
    else:
        request = worker
    begin = tl.load(qo_indptr + request)
    q_len = tl.load(qo_indptr + request + 1) - begin
    if row_block * BLOCK_M >= q_len * H:
        return
    kv_len = tl.load(kv_lens + request)
    first_page = tl.load(kv_indptr + request)
    prefix_tiles = (kv_len + BLOCK_N - 1) // BLOCK_N
    tiles = prefix_tiles + (q_len + BLOCK_N - 1) // BLOCK_N
    if SPLIT:
        if (part == 0) & (row_block == 0):
            tl.store(runs_of + request * 2, worker)
            tl.store(runs_of + request * 2 + 1, parts)
        tile_begin = part * chunk
        tile_end = tl.minimum(tile_begin + chunk, tiles)
    else:
        tile_begin = 0
        tile_end = tiles

    r = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    row_ok = r < q_len * H
    token = begin + r // H
    head = r % H
    d = tl.arange(0, R)
    e = tl.arange(0, D)
    n_in_tile = tl.arange(0, BLOCK_N)
    at = token.to(tl.int64) * q_latent_stride_t + head * q_latent_stride_h
    q = tl.load(q_latent + at[:, None] + d[None, :], mask=row_ok[:, None], other=0.0)
    at = token.to(tl.int64) * q_rope_stride_t + head * q_rope_stride_h
    q_r = tl.load(q_rope + at[:, None] + e[None, :], mask=row_ok[:, None], other=0.0)

    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l = tl.full((BLOCK_M,), 0.0, tl.float32)
    acc = tl.full((BLOCK_M, R), 0.0, tl.float32)

    for tile in tl.range(_bound(tile_begin), _bound(tl.minimum(tile_end, prefix_tiles)),
                         num_stages=STAGES):
        n = tile * BLOCK_N + n_in_tile
        ok = n < kv_len
        row = rows + _prefix_slots(kv_indices, first_page, n, ok, PAGE_SIZE) * rows_stride
        kv = tl.load(row[:, None] + LATENT_OFFSET + d[None, :], mask=ok[:, None], other=0.0)
        k_r = tl.load(row[:, None] + ROPE_OFFSET + e[None, :], mask=ok[:, None], other=0.0)
        s = _base2_scores(q, q_r, tl.trans(kv), tl.trans(k_r), scale, cap, HAS_CAP)
        p, shrink, m, l = _softmax_step(s, ok[None, :], m, l)
        acc = tl.dot(p.to(kv.dtype), kv, acc * shrink[:, None], input_precision="ieee")

    # The drafts are few; two stages keep their loop within the shared memory of the first one.
    for tile in tl.range(_bound(tl.maximum(tile_begin, prefix_tiles)), _bound(tile_end),
                         num_stages=2):
        j = (tile - prefix_tiles) * BLOCK_N + n_in_tile
        visible, ok = _draft_visibility(mask_bits, mask_words, token, row_ok, j, q_len)
        if draft_kv is None:
            slot = tl.load(draft_slots + begin + j, mask=ok, other=0)
            row = rows + slot.to(tl.int64) * rows_stride
        else:
            row = draft_kv + (begin + j).to(tl.int64) * draft_stride
        kv = tl.load(row[:, None] + LATENT_OFFSET + d[None, :], mask=ok[:, None], other=0.0)
        k_r = tl.load(row[:, None] + ROPE_OFFSET + e[None, :], mask=ok[:, None], other=0.0)
        s = _base2_scores(q, q_r, tl.trans(kv), tl.trans(k_r), scale, cap, HAS_CAP)
        p, shrink, m, l = _softmax_step(s, visible, m, l)
        acc = tl.dot(p.to(kv.dtype), kv, acc * shrink[:, None], input_precision="ieee")

    acc = acc * (v_scale / tl.where(l == 0.0, 1.0, l))[:, None]
    base2 = _base2_lse(m, l)
    # Out is contiguous, so a request's rows t * H + h follow one another there too.
    own = begin.to(tl.int64) * H + r
    if SPLIT:
        if parts > 1:
            own = (worker * tl.num_programs(0)).to(tl.int64) * BLOCK_M + r
            # Padding rows are written too: zeros that nobody reads, in place of a mask.
            tl.store(part_out + own[:, None] * R + d[None, :], acc.to(part_out.dtype.element_ty))
            tl.store(part_lse + own, base2)
        else:
            tl.store(out + own[:, None] * R + d[None, :], acc.to(out.dtype.element_ty),
                     mask=row_ok[:, None])
            tl.store(lse + own, base2 * 0.6931471805599453, mask=row_ok)
    else:
        tl.store(out + own[:, None] * R + d[None, :], acc.to(out.dtype.element_ty),
                 mask=row_ok[:, None])
        tl.store(lse + own, base2 * 0.6931471805599453, mask=row_ok)


@_jit
def _combine_kernel(
    qo_indptr, runs_of, part_out, part_lse, out, lse, padded_rows,
    H: tl.constexpr, R: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """Merges the runs of a request: one program a row and ``BLOCK_D`` of its values."""
    r = tl.program_id(0)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    request = tl.program_id(2)
    begin = tl.load(qo_indptr + request)
    q_len = tl.load(qo_indptr + request + 1) - begin
    if r >= q_len * H:
        return
    first = tl.load(runs_of + request * 2)
    parts = tl.load(runs_of + request * 2 + 1)
    if parts <= 1:  # written by its only worker
        return
    m = float("-inf")
    l = 0.0
    acc = tl.full((BLOCK_D,), 0.0, tl.float32)
    for s0 in tl.range(0, _bound(parts), BLOCK_S):
        s = s0 + tl.arange(0, BLOCK_S)
        ok = s < parts
        at = (first + s).to(tl.int64) * padded_rows + r
        base2 = tl.load(part_lse + at, mask=ok, other=float("-inf"))
        part = tl.load(part_out + at[:, None] * R + d[None, :], mask=ok[:, None], other=0.0)
        m_new = tl.maximum(m, tl.reduce(base2, 0, _larger))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        weight = tl.exp2(base2 - m_safe)
        shrink = tl.exp2(m - m_safe)
        acc = acc * shrink + tl.reduce(part.to(tl.float32) * weight[:, None], 0, _add)
        l = l * shrink + tl.reduce(weight, 0, _add)
        m = m_new
    own = begin.to(tl.int64) * H + r
    tl.store(out + own * R + d, (acc / tl.where(l == 0.0, 1.0, l)).to(out.dtype.element_ty))
    if tl.program_id(1) == 0:
        tl.store(lse + own, _base2_lse(m, l) * 0.6931471805599453)


# -- serial --------------------------------------------------------------------------------


@_jit
def _serial_kernel(
    q_latent, q_rope, rows, draft_kv,
    qo_indptr, kv_indptr, kv_indices, kv_lens, mask_bits, draft_slots,
    out, lse,
    q_latent_stride_t, q_latent_stride_h, q_rope_stride_t, q_rope_stride_h,
    rows_stride, draft_stride, mask_words,
    scale, cap, v_scale,
    H: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
    LATENT_OFFSET: tl.constexpr, ROPE_OFFSET: tl.constexpr, PAGE_SIZE: tl.constexpr,
    HAS_CAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):
    request = tl.program_id(0)
    head = tl.program_id(1)
    begin = tl.load(qo_indptr + request)
    q_len = tl.load(qo_indptr + request + 1) - begin
    t = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    if tl.program_id(2) * BLOCK_M >= q_len:
        return
    kv_len = tl.load(kv_lens + request)
    first_page = tl.load(kv_indptr + request)
    row_ok = t < q_len
    token = begin + t
    d = tl.arange(0, R)
    e = tl.arange(0, D)
    n_in_tile = tl.arange(0, BLOCK_N)
    at = token.to(tl.int64) * q_latent_stride_t + head * q_latent_stride_h
    q = tl.load(q_latent + at[:, None] + d[None, :], mask=row_ok[:, None], other=0.0)
    at = token.to(tl.int64) * q_rope_stride_t + head * q_rope_stride_h
    q_r = tl.load(q_rope + at[:, None] + e[None, :], mask=row_ok[:, None], other=0.0)

    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l = tl.full((BLOCK_M,), 0.0, tl.float32)
    acc = tl.full((BLOCK_M, R), 0.0, tl.float32)

    # Keys [R, N] and values [N, R] are loaded apart although they are the same numbers, as a
    # kernel must that takes K and V as two tensors.
    for tile in tl.range(0, _bound((kv_len + BLOCK_N - 1) // BLOCK_N), num_stages=STAGES):
        n = tile * BLOCK_N + n_in_tile
        ok = n < kv_len
        row = rows + _prefix_slots(kv_indices, first_page, n, ok, PAGE_SIZE) * rows_stride
        k_t = tl.load(row[None, :] + LATENT_OFFSET + d[:, None], mask=ok[None, :], other=0.0)
        k_rt = tl.load(row[None, :] + ROPE_OFFSET + e[:, None], mask=ok[None, :], other=0.0)
        s = _base2_scores(q, q_r, k_t, k_rt, scale, cap, HAS_CAP)
        p, shrink, m, l = _softmax_step(s, ok[None, :], m, l)
        v = tl.load(row[:, None] + LATENT_OFFSET + d[None, :], mask=ok[:, None], other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")

    for tile in tl.range(0, _bound((q_len + BLOCK_N - 1) // BLOCK_N), num_stages=STAGES):
        j = tile * BLOCK_N + n_in_tile
        visible, ok = _draft_visibility(mask_bits, mask_words, token, row_ok, j, q_len)
        if draft_kv is None:
            slot = tl.load(draft_slots + begin + j, mask=ok, other=0)
            row = rows + slot.to(tl.int64) * rows_stride
        else:
            row = draft_kv + (begin + j).to(tl.int64) * draft_stride
        k_t = tl.load(row[None, :] + LATENT_OFFSET + d[:, None], mask=ok[None, :], other=0.0)
        k_rt = tl.load(row[None, :] + ROPE_OFFSET + e[:, None], mask=ok[None, :], other=0.0)
        s = _base2_scores(q, q_r, k_t, k_rt, scale, cap, HAS_CAP)
        p, shrink, m, l = _softmax_step(s, visible, m, l)
        v = tl.load(row[:, None] + LATENT_OFFSET + d[None, :], mask=ok[:, None], other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")

    acc = acc * (v_scale / tl.where(l == 0.0, 1.0, l))[:, None]
    own = token.to(tl.int64) * H + head
    tl.store(out + own[:, None] * R + d[None, :], acc.to(out.dtype.element_ty),
             mask=row_ok[:, None])
    tl.store(lse + own, _base2_lse(m, l) * 0.6931471805599453, mask=row_ok)


# -- configurations ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class SerialConfig:
    """Block sizes of the serial kernel.

    Args:
        block_m: draft tokens of one head in a program; a power of two, at least 16.
        block_n: cache tokens in a tile; likewise.
        num_warps, num_stages: as Triton means them.
    """

    block_m: int = 32
    block_n: int = 32
    num_warps: int = 8
    num_stages: int = 1

    def __post_init__(self) -> None:
        _check_blocks(self)

    def __str__(self) -> str:
        return _label(self)


@dataclasses.dataclass(frozen=True)
class SplitConfig:
    """Block sizes of the split kernel, and how finely it splits.

    Args:
        block_m: rows (head and draft token pairs) in a program; a power of two, at least 16.
        block_n: cache tokens in a tile; likewise.
        num_warps: they share out a tile's columns, 8 to a warp at least, so more warps than
            ``block_n / 8`` repeat one another's work on the scores.
        num_stages: at least 2. The slots are one load and the rows they point to another, and
            Triton gives half of the stages to each: 2 to 4 stages make one buffer of rows, 5
            or 6 make two, 7 or 8 three (:attr:`buffers`).
        programs_per_sm: programs wanted on each SM; the tiles are dealt out accordingly.
        partial_dtype: how the results of a request's runs wait to be merged: ``"fp32"``, or
            ``"input"`` for the 16-bit type of the queries, half the traffic and a rounding
            more.
        workers: programs that share the batch for each row block, in place of the number that
            :func:`split_workers` works out; at least the batch size.
    """

    block_m: int = 16
    block_n: int = 64
    num_warps: int = 8
    num_stages: int = 3
    programs_per_sm: int = 1
    partial_dtype: Literal["fp32", "input"] = "fp32"
    workers: int | None = None

    def __post_init__(self) -> None:
        _check_blocks(self)
        if self.num_stages < 2:
            raise ValueError(f"num_stages must be at least 2; got {self.num_stages}")
        if self.programs_per_sm < 1:
            raise ValueError(f"programs_per_sm must be at least 1; got {self.programs_per_sm}")
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"workers must be at least 1; got {self.workers}")
        if self.partial_dtype not in ("fp32", "input"):
            raise ValueError(f"partial_dtype must be fp32 or input; got {self.partial_dtype!r}")

    def __str__(self) -> str:
        return _label(self)

    @property
    def buffers(self) -> int:
        """Tiles of cache rows in shared memory at a time."""
        return max(1, (self.num_stages - 1) // 2)

    def shared_memory(self, layout: KVLayout = KVLayout.LATENT_FIRST, itemsize: int = 2) -> int:
        """Bytes of shared memory that the compiled kernel needs, as found by compiling many
        configurations (Triton 3.6 and 3.8). It holds for mma.sync: for all on sm_120, and for
        less than 64 rows on sm_90; wgmma, from 64 rows on there, takes up to 64 KB more."""
        row = layout.row_dim * itemsize
        tile = self.block_m * self.block_n
        # Beside queries and cache rows: the weights, on their way from one warp to all others,
        # and each buffer's slots in the two thread layouts of latent and rope.
        prefix = ((self.block_m + self.buffers * self.block_n) * row + tile * itemsize
                  + 2 * self.buffers * self.block_n * 4)
        # The loop over the drafts has one buffer and a mask word for each row and token.
        drafts = (self.block_m + self.block_n) * row + tile * 4
        return max(prefix, drafts)


Config = SerialConfig | SplitConfig


def _check_blocks(config: Config) -> None:
    for name in ("block_m", "block_n"):
        value = getattr(config, name)
        if value < 16 or value & (value - 1):
            raise ValueError(f"{name} must be a power of two, at least 16; got {value}")
    if config.num_warps not in (1, 2, 4, 8, 16):
        raise ValueError(f"num_warps must be 1, 2, 4, 8 or 16; got {config.num_warps}")


def _label(config: Config) -> str:
    return (f"M{config.block_m} N{config.block_n} {config.num_warps} warps "
            f"{config.num_stages} stages")


def default_serial_config(arch: int = 120) -> SerialConfig:
    """SGLang's choice (0.5.23) for a 576-wide head: blocks (32, 64) on sm_9x, (32, 32) on
    sm_12x, 8 warps, no pipelining.

    Args:
        arch: compute capability as a number, such as 90 or 120.
    """
    return SerialConfig(block_n=64 if arch // 10 == 9 else 32)


def split_candidates(
    shared_memory: int = SM120_SHARED_MEMORY, layout: KVLayout = KVLayout.LATENT_FIRST,
    itemsize: int = 2,
) -> list[SplitConfig]:
    """The configurations worth timing that fit in ``shared_memory`` bytes, for each shape the
    deepest pipeline first. 64 rows are left out: they spill, on 8 warps about 100 bytes a
    thread on sm_120 and 600 or more on sm_90, where Triton takes wgmma for them."""
    found = []
    for block_m, num_warps in ((16, 4), (16, 8), (32, 4), (32, 8)):
        for block_n in (64, 32, 16):
            for num_stages in (7, 5, 3):
                config = SplitConfig(block_m, block_n, num_warps, num_stages)
                if config.shared_memory(layout, itemsize) <= shared_memory:
                    found.append(config)
    return found


def default_split_config(
    shared_memory: int = SM120_SHARED_MEMORY, layout: KVLayout = KVLayout.LATENT_FIRST,
    itemsize: int = 2,
) -> SplitConfig:
    """The configuration to use when none is given.

    Args:
        shared_memory: bytes that a block may have.
        itemsize: bytes of one element of the queries and the cache.

    Returns:
        16 rows and tiles of 64 tokens on 8 warps with one buffer: of nine candidates timed on an
        H200 under sm_120's shared memory, the fastest at 8, 64 and 512 rows a request (the
        runner-up was 3 to 15 % behind). What does not fit in ``shared_memory`` gets tiles of 32
        tokens on 4 warps, then loses the second buffer, then half the tile.
    """
    for block_n, num_warps, num_stages in ((64, 8, 3), (32, 4, 5), (32, 4, 3), (16, 4, 5),
                                           (16, 4, 3)):
        config = SplitConfig(16, block_n, num_warps, num_stages)
        need = config.shared_memory(layout, itemsize)
        if need <= shared_memory:
            # Each block also costs the SM 1 KB that CUDA keeps; two hide each other's waits.
            together = min(2, (shared_memory + 1024) // (need + 1024))
            return dataclasses.replace(config, programs_per_sm=together)
    raise ValueError(
        f"shared_memory: {shared_memory} bytes hold no 16 rows and one tile of 16 tokens of "
        f"{layout.row_dim} * {itemsize} bytes, which need {need}"
    )


# -- launching -----------------------------------------------------------------------------


def split_workers(
    batch_size: int, max_q_len: int, max_kv_len: int, num_heads: int, config: SplitConfig,
    num_sms: int,
) -> int:
    """Programs among which the split kernel deals out the batch's tiles, for each row block.
    A function of capacities alone, so that a captured graph stays right when lengths change.

    Returns:
        ``batch_size`` when there are so many requests and row blocks that splitting is not
        needed, and then nothing is merged; more otherwise.
    """
    if config.workers is not None:
        if config.workers < batch_size:
            raise ValueError(f"workers must be at least the batch size, {batch_size}; got "
                             f"{config.workers}")
        return config.workers
    row_blocks = -(-max_q_len * num_heads // config.block_m)
    seats = num_sms * config.programs_per_sm
    # A run of fewer than two tiles is mostly start-up and merging.
    tiles = -(-max_kv_len // config.block_n) + -(-max_q_len // config.block_n)
    most = max(batch_size, batch_size * (tiles // 2))
    for waves in range(1, 5):
        workers = waves * seats // row_blocks
        # The largest number that fills the seats; more waves if whole requests or whole row
        # blocks would leave too many of them empty.
        if workers >= batch_size and workers * row_blocks >= 0.8 * waves * seats:
            return min(workers, most)
    return min(max(batch_size, seats // row_blocks), most)


def split_workspace_bytes(
    batch_size: int, max_q_len: int, max_kv_len: int, num_heads: int, *,
    config: SplitConfig, num_sms: int, layout: KVLayout = KVLayout.LATENT_FIRST,
    itemsize: int = 2,
) -> int:
    """Bytes of workspace for a batch of these capacities; 0 when nothing is split.

    Args:
        max_q_len, max_kv_len: largest draft and prefix, in tokens.
        itemsize: bytes of one element of the queries; counts only with
            ``partial_dtype="input"``.
    """
    workers = split_workers(batch_size, max_q_len, max_kv_len, num_heads, config, num_sms)
    if workers == batch_size:
        return 0
    rows = -(-max_q_len * num_heads // config.block_m) * config.block_m
    size = 4 if config.partial_dtype == "fp32" else itemsize
    return (_aligned(batch_size * 8) + _aligned(workers * rows * 4)
            + workers * rows * layout.kv_lora_rank * size)


def workspace_bytes(
    batch: VerifyBatch, num_heads: int, *, layout: KVLayout = KVLayout.LATENT_FIRST,
    dtype: torch.dtype = torch.bfloat16, kernel: str = "split", config: Config | None = None,
) -> int:
    """Bytes of workspace that :func:`verify_attention_triton` needs for ``batch`` on its
    device with the same ``kernel`` and ``config``."""
    if kernel == "serial":
        return 0
    config = config or device_config("split", batch.device, layout, dtype)
    return split_workspace_bytes(
        batch.batch_size, batch.max_q_len, batch.max_kv_len, num_heads, config=config,
        num_sms=_num_sms(batch.device), layout=layout, itemsize=dtype.itemsize)


def device_config(
    kernel: str, device: torch.device | str, layout: KVLayout = KVLayout.LATENT_FIRST,
    dtype: torch.dtype = torch.bfloat16,
) -> Config:
    """The default configuration of ``kernel`` on ``device``; on a CPU, sm_120's."""
    if torch.device(device).type != "cuda":
        if kernel == "serial":
            return default_serial_config()
        return default_split_config(layout=layout, itemsize=dtype.itemsize)
    properties = torch.cuda.get_device_properties(device)
    if kernel == "serial":
        return default_serial_config(properties.major * 10 + properties.minor)
    limit = getattr(properties, "shared_memory_per_block_optin", SM120_SHARED_MEMORY)
    return default_split_config(limit, layout, dtype.itemsize)


def verify_attention_triton(
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
    kernel: Literal["split", "serial"] = "split",
    workspace: torch.Tensor | None = None,
    config: Config | None = None,
) -> None:
    """Tree-verify attention in Triton, written to ``out`` and ``lse``.

    For callers that have checked their arguments, above all
    :func:`mla_kernels.verify_attention`; here only what these kernels cannot do is refused.
    Safe to capture in a CUDA graph once it has run with the same shapes (the first run
    compiles), if a workspace is given.

    Args:
        q_latent, q_rope: ``[num_tokens, H, kv_lora_rank]`` and ``[num_tokens, H,
            qk_rope_head_dim]``, any token and head stride, last stride 1; bf16 or fp16 on a
            GPU, fp16 or fp32 in the interpreter.
        rows: ``[slots, row_dim]`` as :func:`mla_kernels.layout.pool_rows` gives them, any row
            stride, dtype of the queries. Slots that the batch does not name are never read.
        draft_kv: ``[num_tokens, row_dim]``, last stride 1, or None: then
            ``batch.draft_slots``.
        sm_scale, k_scale: multiply the logits. v_scale: multiplies ``out``.
        logit_cap: 0, or ``c`` in ``c * tanh(logit / c)``.
        out: ``[num_tokens, H, kv_lora_rank]`` contiguous, in a floating type.
        lse: ``[num_tokens, H]`` contiguous fp32, natural log. Tokens of no request
            (``qo_indptr[-1]`` and beyond) are left as they were in both.
        kernel: ``"split"`` or ``"serial"``.
        workspace: contiguous, on the same device, 16-byte aligned, of
            :func:`workspace_bytes` bytes or more, any dtype; needs no initialisation and may
            be used again by the next call on the same stream. None allocates one.
        config: a :class:`SplitConfig` or :class:`SerialConfig`; None takes
            :func:`device_config`'s.

    Raises:
        ValueError: widths that are no powers of two, a dtype that the kernels (or, for bf16,
            the interpreter) cannot handle, an unknown kernel, or a workspace that is too
            small.
        TypeError: a ``config`` of the other kernel.
        RuntimeError: CPU tensors for compiled kernels.
    """
    R, D = layout.kv_lora_rank, layout.qk_rope_head_dim
    for name, width in (("kv_lora_rank", R), ("qk_rope_head_dim", D)):
        # 16 is the least depth of a matrix product in Triton.
        if width < 16 or width & (width - 1):
            raise ValueError(f"{name} must be a power of two, at least 16, for Triton's blocks; "
                             f"got {width}")
    _check_dtypes(q_latent, rows)
    kinds = {"split": SplitConfig, "serial": SerialConfig}
    if kernel not in kinds:
        raise ValueError(f"kernel must be split or serial; got {kernel!r}")
    if config is None:
        config = device_config(kernel, q_latent.device, layout, q_latent.dtype)
    elif not isinstance(config, kinds[kernel]):
        raise TypeError(f"config must be a {kinds[kernel].__name__} for kernel {kernel!r}; got "
                        f"{type(config).__name__}")
    num_heads = q_latent.shape[1]
    if q_latent.shape[0] == 0 or num_heads == 0:
        return
    scale, cap = _scale_and_cap(sm_scale * k_scale, logit_cap)
    common = {
        "q_latent": q_latent, "q_rope": q_rope, "rows": rows, "draft_kv": draft_kv,
        "qo_indptr": batch.qo_indptr, "kv_indptr": batch.kv_indptr,
        "kv_indices": batch.kv_indices, "kv_lens": batch.kv_lens, "mask_bits": batch.mask_bits,
        "draft_slots": batch.draft_slots, "out": out, "lse": lse,
        "q_latent_stride_t": q_latent.stride(0), "q_latent_stride_h": q_latent.stride(1),
        "q_rope_stride_t": q_rope.stride(0), "q_rope_stride_h": q_rope.stride(1),
        "rows_stride": rows.stride(0),
        "draft_stride": 0 if draft_kv is None else draft_kv.stride(0),
        "mask_words": batch.mask_bits.shape[1],
        "scale": scale, "cap": cap, "v_scale": float(v_scale),
        "H": num_heads, "R": R, "D": D, "LATENT_OFFSET": layout.latent_offset,
        "ROPE_OFFSET": layout.rope_offset, "PAGE_SIZE": batch.page_size,
        "HAS_CAP": logit_cap != 0, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n,
        "STAGES": config.num_stages,
        "num_warps": config.num_warps, "num_stages": config.num_stages,
    }
    device = torch.cuda.device(q_latent.device) if q_latent.is_cuda else contextlib.nullcontext()
    with device:
        if kernel == "serial":
            blocks = -(-batch.max_q_len // config.block_m)
            _serial_kernel[(batch.batch_size, num_heads, blocks)](**common)
        else:
            _launch_split(common, batch, num_heads, config, layout, workspace)


def _launch_split(
    common: dict[str, Any], batch: VerifyBatch, num_heads: int, config: SplitConfig,
    layout: KVLayout, workspace: torch.Tensor | None,
) -> None:
    q, out, lse = common["q_latent"], common["out"], common["lse"]
    R = layout.kv_lora_rank
    workers = split_workers(batch.batch_size, batch.max_q_len, batch.max_kv_len, num_heads,
                            config, _num_sms(q.device))
    split = workers > batch.batch_size
    row_blocks = -(-batch.max_q_len * num_heads // config.block_m)
    padded_rows = row_blocks * config.block_m
    runs_of = part_out = part_lse = None
    if split:
        dtype = torch.float32 if config.partial_dtype == "fp32" else q.dtype
        sizes = (_aligned(batch.batch_size * 8), _aligned(workers * padded_rows * 4),
                 workers * padded_rows * R * dtype.itemsize)
        if workspace is None:
            workspace = torch.empty(sum(sizes), dtype=torch.uint8, device=q.device)
        runs_of, part_lse, part_out = (
            part.view(kind) for part, kind in
            zip(_workspace_parts(workspace, sizes), (torch.int32, torch.float32, dtype),
                strict=True))
    _split_kernel[(row_blocks, workers)](
        **common, runs_of=runs_of, part_out=part_out, part_lse=part_lse,
        batch_size=batch.batch_size, workers=workers, SPLIT=split,
        BLOCK_B=max(16, triton.next_power_of_2(batch.batch_size)))
    if split:
        width = min(R, 128)
        _combine_kernel[(batch.max_q_len * num_heads, R // width, batch.batch_size)](
            qo_indptr=batch.qo_indptr, runs_of=runs_of, part_out=part_out, part_lse=part_lse,
            out=out, lse=lse, padded_rows=padded_rows, H=num_heads, R=R, BLOCK_S=16,
            BLOCK_D=width, num_warps=4)


def _workspace_parts(workspace: torch.Tensor, sizes: tuple[int, ...]) -> list[torch.Tensor]:
    """Consecutive byte ranges of ``workspace``; all but the last of ``sizes`` are aligned."""
    if not workspace.is_contiguous() or workspace.data_ptr() % 16:
        raise ValueError("workspace must be contiguous and begin at a multiple of 16 bytes")
    flat = workspace.view(-1).view(torch.uint8)
    if flat.numel() < sum(sizes):
        raise ValueError(f"workspace must have at least {sum(sizes)} bytes (workspace_bytes() "
                         f"says how many); got {flat.numel()}")
    return list(flat[:sum(sizes)].split(list(sizes)))


def _check_dtypes(q: torch.Tensor, rows: torch.Tensor) -> None:
    if rows.dtype != q.dtype:
        raise ValueError(f"rows must have the queries' dtype {q.dtype}; got {rows.dtype}")
    if INTERPRETED:
        if q.dtype == torch.bfloat16:
            raise ValueError(
                "q is bfloat16, and Triton's interpreter multiplies bfloat16 matrices wrongly "
                "(it takes their bits for integers): use float16 or float32 without a GPU"
            )
        known = (torch.float16, torch.float32)
    else:
        if not q.is_cuda:
            raise RuntimeError(
                f"q is on {q.device}, but these kernels were compiled for a GPU when the module "
                "was imported: move the tensors there, or start Python with TRITON_INTERPRET=1"
            )
        known = (torch.bfloat16, torch.float16)
    if q.dtype not in known:
        where = "in Triton's interpreter" if INTERPRETED else "on a GPU"
        names = " or ".join(str(d).removeprefix("torch.") for d in known)
        raise ValueError(f"q must be {names} {where}; got {q.dtype}")


def _scale_and_cap(scale: float, logit_cap: float) -> tuple[float, float]:
    """``scale`` and ``cap`` of :func:`_base2_scores`. Without a cap, the logits' scale takes
    in log2(e); with one it makes tanh's argument, and the cap takes in log2(e)."""
    if logit_cap:
        return float(scale / logit_cap), float(logit_cap * LOG2E)
    return float(scale * LOG2E), 0.0


def _num_sms(device: torch.device) -> int:
    # In the interpreter any number will do; 8 makes it split, without splitting hairs.
    if device.type != "cuda":
        return 8
    return torch.cuda.get_device_properties(device).multi_processor_count


def _aligned(size: int) -> int:
    return -(-size // 16) * 16


# -- looking at what Triton makes of it ------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class CompiledResources:
    """What a compiled kernel takes of an SM.

    Args:
        shared_memory: bytes a block.
        registers: 32-bit registers a thread; None where there is no ``cuobjdump``.
        stack: bytes of local memory a thread, which is where spilled registers go; likewise.
    """

    shared_memory: int
    registers: int | None
    stack: int | None


def compiled_resources(
    config: Config, arch: int = 120, *, layout: KVLayout = KVLayout.LATENT_FIRST,
    num_heads: int = 8, page_size: int = 1, dtype: Literal["bf16", "fp16"] = "bf16",
    in_pool: bool = True, logit_cap: bool = False, split: bool = True,
) -> CompiledResources:
    """Compiles the kernel of ``config`` for compute capability ``arch``; needs no GPU.

    Args:
        arch: such as 90 or 120.
        in_pool: draft tokens lie in the pool (``draft_slots``), not in ``draft_kv``.
        split: for the split kernel, with more workers than requests.

    Raises:
        RuntimeError: this process interprets its kernels (:data:`INTERPRETED`); start Python
            with ``TRITON_INTERPRET=0``.
    """
    if INTERPRETED:
        raise RuntimeError("the kernels of this process are interpreted: start Python with "
                           "TRITON_INTERPRET=0 to compile them")
    constants: dict[str, Any] = {
        "H": num_heads, "R": layout.kv_lora_rank, "D": layout.qk_rope_head_dim,
        "LATENT_OFFSET": layout.latent_offset, "ROPE_OFFSET": layout.rope_offset,
        "PAGE_SIZE": page_size, "HAS_CAP": logit_cap, "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n, "STAGES": config.num_stages,
        ("draft_kv" if in_pool else "draft_slots"): None,
    }
    kernel = _serial_kernel
    if isinstance(config, SplitConfig):
        kernel = _split_kernel
        constants |= {"SPLIT": split, "BLOCK_B": 16}
        if not split:
            constants |= {"runs_of": None, "part_out": None, "part_lse": None}
    half = isinstance(config, SplitConfig) and config.partial_dtype == "input"
    return _compile(kernel, constants, arch, dtype, dtype if half else "fp32",
                    num_warps=config.num_warps, num_stages=config.num_stages)


def _compile(kernel: Any, constants: dict[str, Any], arch: int, dtype: str, part_dtype: str,
             **options: int) -> CompiledResources:
    types = dict.fromkeys(("q_latent", "q_rope", "rows", "draft_kv", "out"), f"*{dtype}")
    types |= dict.fromkeys(("qo_indptr", "kv_indptr", "kv_indices", "kv_lens", "mask_bits",
                            "draft_slots", "runs_of"), "*i32")
    types |= {"lse": "*fp32", "part_lse": "*fp32", "part_out": f"*{part_dtype}"}
    types |= dict.fromkeys(("scale", "cap", "v_scale"), "fp32")
    signature = {name: "constexpr" if name in constants else types.get(name, "i32")
                 for name in kernel.arg_names}
    # What Triton finds at a real call: tensors and strides that are multiples of 16.
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(signature)
               if signature[name].startswith("*") or "stride" in name}
    source = triton.compiler.ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    registers = stack = None
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if tool.exists():
        with tempfile.TemporaryDirectory() as folder:
            cubin = Path(folder) / "kernel.cubin"
            cubin.write_bytes(compiled.asm["cubin"])
            text = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True,
                                  check=True).stdout
        if usage := re.search(r"REG:(\d+) STACK:(\d+)", text):
            registers, stack = int(usage[1]), int(usage[2])
    return CompiledResources(compiled.metadata.shared, registers, stack)
