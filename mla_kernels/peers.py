"""Other people's attention on the benchmark's inputs: one adapter a kernel.

Each brings a workload into the form that its kernel reads and returns a function that runs one
region's call. What an engine would do once a step, or once a request, is done before: metadata,
plans, pages. What it would do in every layer's call is in the call, and so is in the time.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
import re
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

import torch

from .workload import Shape, Workload, make_workload

#: Runs one region's call. The result is in the workload's ``out`` (and ``lse``), or is returned
#: where a kernel allocates it itself. An attribute ``note``, if there is one, is recorded.
Call = Callable[[int], "torch.Tensor | None"]

Prepare = Callable[[Workload], Call]


class Unavailable(RuntimeError):
    """A provider cannot run here, or not on this shape; the message says why."""


@dataclasses.dataclass(frozen=True)
class Provider:
    """Something to measure.

    Args:
        prepare: from a workload to its call; raises :class:`Unavailable`.
        package: the packages whose versions belong to a result.
        trees: which of :data:`mla_kernels.workload.TREES` it is measured on.
        build: compiles what takes long, before anything is measured.
    """

    prepare: Prepare
    package: Sequence[str] = ("torch",)
    trees: Sequence[str] = ("3-ary",)
    build: Callable[[], object] | None = None

    @property
    def version(self) -> str:
        """``"sglang 0.5.23"``; of what has been imported by now."""
        return ", ".join(f"{name} {found}" for name in self.package
                         if (found := _version(name)))


#: Distributions of packages that go by another name.
DISTRIBUTIONS = {"flashinfer": "flashinfer-python", "flash_mla": "sgl-flash-mla"}


def _version(package: str) -> str | None:
    found = getattr(sys.modules.get(package), "__version__", None)
    if found is None:
        try:
            found = importlib.metadata.version(DISTRIBUTIONS.get(package, package))
        except importlib.metadata.PackageNotFoundError:
            return None
    return str(found)


def _import(module: str, *older: str) -> ModuleType:
    """The first of these modules that there is."""
    reason: ImportError | None = None
    for name in (module, *older):
        try:
            return importlib.import_module(name)
        except ImportError as error:
            reason = reason or error
    raise Unavailable(f"{module.partition('.')[0]} is not importable: {reason}")


def capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


# -- SGLang -------------------------------------------------------------------------------


def _sglang(name: str) -> ModuleType:
    """A file of SGLang's Triton kernels."""
    return _import(f"sglang.kernels.ops.attention.{name}",
                   f"sglang.srt.layers.attention.triton_ops.{name}")


def _drafts(work: Workload) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The draft rows of every region as SGLang's backend has them at hand: ``k_extend``
    ``[num_tokens, 1, 576]`` and ``v_extend`` ``[num_tokens, 1, 512]``, contiguous."""
    rows = [work.pool[batch.draft_slots.long()][:, None] for batch in work.batches]
    return [(k, work.layout.latent(k).contiguous()) for k in rows]


def _extend(work: Workload, kernel: Callable[..., None], **options) -> Call:
    """`extend_attention_fwd` as SGLang's Triton backend calls it for a draft tree: FULL_MASK
    with the prefix skipped, drafts as tensors of their own."""
    if work.layout.order != "latent_first":
        raise Unavailable("SGLang's rows are latent first")
    buffer = work.pool[:, None]
    drafts = _drafts(work)
    masks = [batch.full_mask() for batch in work.batches]
    indices = [batch.kv_indices.long() for batch in work.batches]
    out = options.pop("out", work.out)

    def call(region: int) -> None:
        batch, (k, v), (mask, mask_indptr) = work.batches[region], drafts[region], masks[region]
        kernel(work.q[region], k, v, out, buffer, work.layout.latent(buffer), batch.qo_indptr,
               batch.kv_indptr, indices[region], mask, True, mask_indptr, work.shape.num_nodes,
               1.0, 1.0, sm_scale=work.sm_scale, **options)

    return call


def sglang_extend(work: Workload) -> Call:
    """SGLang's only tree verify for MLA, with its own choice of blocks."""
    return _extend(work, _sglang("extend_attention").extend_attention_fwd)


def sglang_extend_sm12x(work: Workload) -> Call:
    """The same with the blocks that it takes on sm_12x, on another GPU."""
    module = _sglang("extend_attention")
    here = getattr(module, "CUDA_CAPABILITY", None)
    if here is None:
        raise Unavailable("this SGLang does not choose its blocks by CUDA_CAPABILITY")
    if here[0] == 12:
        raise Unavailable("these are sglang_extend's own blocks on this GPU")
    inner = _extend(work, module.extend_attention_fwd)

    def call(region: int) -> None:
        module.CUDA_CAPABILITY = (12, 0)
        try:
            inner(region)
        finally:
            module.CUDA_CAPABILITY = here

    return call


#: `verify_mla`'s second kernel holds a product [nodes, nodes, 1024] in the registers of 128
#: threads, nodes rounded up to a power of two: 2,048 values a thread at 16 nodes, 8,192 at 32,
#: and more elements than Triton allows in a tensor (2**20) at 64.
SGLANG_VERIFY_NODES = 16


def sglang_verify(work: Workload) -> Call:
    """SGLang's split-KV verify for chains (`verify_shared_kv_fwd` of `verify_mla`)."""
    module = _sglang("verify_mla")
    nodes = work.shape.num_nodes
    if nodes > SGLANG_VERIFY_NODES:
        raise Unavailable(f"not tried above {SGLANG_VERIFY_NODES} nodes: its combine kernel keeps "
                          "nodes x nodes x 1,024 values in registers")
    # Its buffers stay in a table, by heads and nodes.
    getattr(module, "_VMLA_CACHE", {}).clear()
    buffer = work.pool[:, None]
    drafts = _drafts(work)
    indices = [batch.kv_indices.long() for batch in work.batches]

    def call(region: int) -> None:
        batch, (k, v) = work.batches[region], drafts[region]
        ran = module.verify_shared_kv_fwd(
            work.q[region], k, v, work.out, buffer, work.layout.latent(buffer), batch.qo_indptr,
            batch.kv_indptr, indices[region], None, True, None, nodes, 1.0, 1.0, work.sm_scale)
        if not ran:
            raise Unavailable("its can_handle() refuses this call")

    return call


def sglang_decode(work: Workload) -> Call:
    """SGLang's decode kernel: one token a request, which counts as part of the cache. Splits
    as its Triton backend chooses them."""
    shape, device = work.shape, work.pool.device
    if shape.num_nodes != 1:
        raise Unavailable("it takes one token a request")
    decode = _sglang("decode_attention").decode_attention_fwd
    choose = _sglang("metadata").get_num_kv_splits_triton
    sms = _multiprocessors(device)
    # _mla_decode_kv_splits_cap for a model whose context length is beyond 32 x this.
    most = 1 << (sms - 1).bit_length()
    tokens = shape.context + 1
    kv_indptr = torch.arange(shape.batch_size + 1, dtype=torch.int32, device=device) * tokens
    indices = [work.slots(region).reshape(-1).long() for region in range(work.regions)]
    splits = torch.empty(shape.batch_size, dtype=torch.int32, device=device)
    choose[(1,)](splits, torch.full_like(splits, tokens), shape.batch_size, 1, shape.num_heads,
                 1, most, sms, MAX_NUM_SEQ=256)
    partial = torch.empty(shape.batch_size, shape.num_heads, most, 512, device=device)
    partial_lse = torch.empty(shape.batch_size, shape.num_heads, most, device=device)
    buffer = work.pool[:, None]
    dependent = capability(device)[0] >= 9

    def call(region: int) -> None:
        decode(work.q[region], buffer, work.layout.latent(buffer), work.out, kv_indptr,
               indices[region], partial, partial_lse, splits, most, work.sm_scale, 1.0, 1.0,
               has_mla=True, use_pdl=dependent)

    return call


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


# -- FlashInfer ---------------------------------------------------------------------------

#: Bytes of FlashInfer's workspace; 128 MiB is what its documentation recommends.
FLASHINFER_WORKSPACE = 128 * 2**20


def _flashinfer_runs(work: Workload, backend: str, *, drafts: bool, causal: bool, lse: bool
                     ) -> list[Callable[..., object]]:
    """For each region the planned `run` of FlashInfer's MLA wrapper, over the whole request or
    (not ``drafts``) over its prefix."""
    module = _import("flashinfer.mla")
    if not hasattr(module, "MLAPlanMetadata"):
        raise Unavailable("it needs FlashInfer 0.7 or newer")
    if work.layout.order != "latent_first":
        raise Unavailable("one buffer of rows must be latent first for FlashInfer")
    shape, device = work.shape, work.pool.device
    tokens = shape.context + (shape.num_nodes if drafts else 0)
    int32 = {"dtype": torch.int32, "device": device}
    kv_indptr = torch.arange(shape.batch_size + 1, **int32) * tokens
    kv_lens = torch.full((shape.batch_size,), tokens, **int32)
    space = torch.empty(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=device)
    rows = work.pool[:, None]  # pages of one token
    runs = []
    for region, batch in enumerate(work.batches):
        wrapper = module.BatchMLAPagedAttentionWrapper(space, backend=backend)
        slots = work.slots(region)[:, :tokens].reshape(-1)
        try:
            wrapper.plan(
                metadata=module.MLAPlanMetadata.csr(batch.qo_indptr, kv_indptr, slots, kv_lens),
                num_heads=shape.num_heads, head_dim_ckv=512, head_dim_kpe=64, page_size=1,
                causal=causal, sm_scale=work.sm_scale, q_data_type=work.pool.dtype,
                kv_data_type=work.pool.dtype, lse_mode="basee" if lse else "none")
        except ValueError as error:
            raise Unavailable(f"its plan() refuses: {error}") from error
        runs.append(functools.partial(wrapper.run, query=work.q[region], kv_cache=rows))
    return runs


def flashinfer(backend: str) -> Prepare:
    """FlashInfer's MLA, ``"fa2"`` (mma.sync) or ``"fa3"`` (wgmma): no mask but the causal one."""
    def prepare(work: Workload) -> Call:
        runs = _flashinfer_runs(work, backend, drafts=True, causal=True, lse=False)

        def call(region: int) -> None:
            runs[region](out=work.out)

        return call

    return prepare


def build_flashinfer(backend: str) -> None:
    """Has FlashInfer compile a backend, which it does in its first plan."""
    flashinfer(backend)(make_workload(Shape(1, 8, 1, 64), tree="chain", l2_bytes=0))


def prefix_suffix(backend: str) -> Prepare:
    """What one would build today for trees: the prefix by a backend of FlashInfer without a mask,
    the drafts by SGLang's extend kernel with the tree mask and without the prefix, the two merged
    by their log-sum-exp with SGLang's kernel."""
    def prepare(work: Workload) -> Call:
        prefix, prefix_lse = torch.empty_like(work.out), torch.empty_like(work.lse)
        suffix, suffix_lse = torch.empty_like(work.out), torch.empty_like(work.lse)
        merge = _sglang("merge_state").merge_state_triton
        masked = _extend(work, _sglang("extend_attention").extend_attention_fwd, out=suffix,
                         lse_extend=suffix_lse, skip_prefix=True)
        runs = _flashinfer_runs(work, backend, drafts=False, causal=False, lse=True)

        def call(region: int) -> None:
            runs[region](out=prefix, lse=prefix_lse, return_lse=True, return_lse_base_on_e=True)
            masked(region)
            merge(prefix, prefix_lse, suffix, suffix_lse, work.out, work.lse)

        return call

    return prepare


# -- FlashMLA -----------------------------------------------------------------------------


def paged(work: Workload, page_size: int, *, seed: int = 0
          ) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The same rows in pages, drafts behind the prefix, pages in random order.

    Returns:
        The pool ``[pages, page_size, 576]``, zero where no token lies, and for each region its
        block table ``[batch_size, pages of a request]`` int32.
    """
    shape, pool = work.shape, work.pool
    tokens = shape.context + shape.num_nodes
    a_request = -(-tokens // page_size)
    generator = torch.Generator().manual_seed(seed)
    count = work.regions * shape.batch_size * a_request
    tables = torch.randperm(count, generator=generator).to(torch.int32).to(pool.device)
    tables = tables.view(work.regions, shape.batch_size, a_request)
    pages = pool.new_zeros(count, page_size, 576)
    position = torch.arange(tokens, device=pool.device)
    for region, table in enumerate(tables):
        slots = table.long()[:, position // page_size] * page_size + position % page_size
        pages.view(-1, 576)[slots.view(-1)] = pool[work.slots(region).view(-1).long()]
    return pages, list(tables)


def flashmla(work: Workload) -> Call:
    """FlashMLA's dense decode (wgmma, pages of 64), causal over the drafts."""
    module = _import("flash_mla")
    shape, device = work.shape, work.pool.device
    major, minor = capability(device)
    if major != 9:
        raise Unavailable(f"its dense decode kernel is compiled for sm_90a; this is sm_{major}"
                          f"{minor}")
    pages, tables = paged(work, 64)
    pages = pages[:, :, None]
    lens = torch.full((shape.batch_size,), shape.context + shape.num_nodes, dtype=torch.int32,
                      device=device)
    q = [q.view(shape.batch_size, shape.num_nodes, *q.shape[1:]) for q in work.q]
    # Filled in the first call, the same for all regions.
    schedule = module.get_mla_metadata()[0]

    def call(region: int) -> torch.Tensor:
        out, _ = module.flash_mla_with_kvcache(
            q[region], pages, tables[region], lens, 512, schedule,
            softmax_scale=work.sm_scale, causal=True, use_legacy=True)
        return out.view(work.out.shape)

    return call


# -- PyTorch ------------------------------------------------------------------------------


def _gather(work: Workload) -> Callable[[int], torch.Tensor]:
    """A function that copies a region's rows together, ``[batch_size, 1, tokens, 576]``."""
    shape = work.shape
    slots = [work.slots(region).view(-1) for region in range(work.regions)]
    dense = work.pool.new_empty(slots[0].numel(), 576)

    def gather(region: int) -> torch.Tensor:
        torch.index_select(work.pool, 0, slots[region], out=dense)
        return dense.view(shape.batch_size, 1, -1, 576)

    return gather


def sdpa(work: Workload) -> Call:
    """`scaled_dot_product_attention` with the tree as an additive mask. All heads and nodes of
    a request are rows of one matrix, as they share every key. Gathering the rows from the pool
    is part of the call: it has no page table."""
    shape, gather = work.shape, _gather(work)
    rows, tokens = shape.num_nodes * shape.num_heads, shape.context + shape.num_nodes
    # Rows of a multiple of 16 elements: any other mask it would copy in every call.
    bias = work.pool.new_zeros(1, 1, rows, -(-tokens // 16) * 16)[..., :tokens]
    tree = work.batches[0].draft_mask(0).repeat_interleave(shape.num_heads, 0)
    bias[..., shape.context:].masked_fill_(~tree, -torch.inf)
    bias = bias.expand(shape.batch_size, -1, -1, -1)

    def call(region: int) -> torch.Tensor:
        kv = gather(region)
        out = torch.nn.functional.scaled_dot_product_attention(
            work.q[region].view(shape.batch_size, 1, rows, 576), kv, kv[..., :512],
            attn_mask=bias, scale=work.sm_scale)
        return out.reshape(work.out.shape)

    return call


def compiled_flex() -> Callable[..., torch.Tensor]:
    """FlexAttention compiled for the next shape alone: where shapes are left open it takes its
    kernel for prefill for few queries too."""
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.reset()
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


#: What FlexAttention is asked for, in order, until a kernel fits in shared memory, as it rounds
#: 576 up to 1,024: its own choice, fewer keys a block, and without its split-KV kernel (for less
#: than 128 rows), whose blocks hold all rows.
FLEX_OPTIONS = tuple({**blocks, **({"num_stages": 1, "num_warps": 8} if blocks else {})}
                     for blocks in (
    {}, {"BLOCK_N": 32}, {"BLOCK_N": 16},
    {"BLOCK_M": 32, "BLOCK_N": 32, "FORCE_USE_FLEX_ATTENTION": True},
    {"BLOCK_M": 16, "BLOCK_N": 16, "FORCE_USE_FLEX_ATTENTION": True}))


def _shared_memory(error: str) -> str:
    """What a compiler's error says of its reason, without the advice around it."""
    text = " ".join(error.split())
    found = re.search(r"out of resource.*?Hardware limit: ?\d+", text)
    return found[0] if found else text[:200]


def flex_attention(work: Workload) -> Call:
    """FlexAttention with the tree as a mask function, gathering like :func:`sdpa`."""
    from torch.nn.attention.flex_attention import create_block_mask

    shape, gather = work.shape, _gather(work)
    heads, context = shape.num_heads, shape.context
    rows = shape.num_nodes * heads
    tree = work.batches[0].draft_mask(0)

    def visible(b, h, row, column):
        return (column < context) | tree[row // heads, (column - context).clamp(min=0)]

    mask = create_block_mask(visible, None, None, rows, context + shape.num_nodes,
                             device=work.pool.device)
    reasons = []
    for options in FLEX_OPTIONS:
        attend = compiled_flex()

        def call(region: int, attend=attend, options=options) -> torch.Tensor:
            kv = gather(region)
            out = attend(work.q[region].view(shape.batch_size, 1, rows, 576), kv, kv[..., :512],
                         block_mask=mask, scale=work.sm_scale, kernel_options=dict(options))
            return out.reshape(work.out.shape)

        try:
            call(0)
        except Exception as error:
            reasons.append(_shared_memory(str(error)))
        else:
            call.note = "blocks: " + (", ".join(f"{k} {v}" for k, v in options.items())
                                      or "its own choice")
            return call
    raise Unavailable(f"none of {len(reasons)} choices of blocks ran; its own: {reasons[0]}")


CHAIN = ("chain",)

#: Peers by the name that appears in recorded data.
PEERS: dict[str, Provider] = {
    "sglang_extend": Provider(sglang_extend, ("sglang",)),
    "sglang_extend_sm12x": Provider(sglang_extend_sm12x, ("sglang",)),
    "sglang_verify": Provider(sglang_verify, ("sglang",), CHAIN),
    "sglang_decode": Provider(sglang_decode, ("sglang",), CHAIN),
    "flashinfer_fa2": Provider(flashinfer("fa2"), ("flashinfer",), CHAIN,
                               functools.partial(build_flashinfer, "fa2")),
    "flashinfer_fa3": Provider(flashinfer("fa3"), ("flashinfer",), CHAIN,
                               functools.partial(build_flashinfer, "fa3")),
    "flashmla": Provider(flashmla, ("flash_mla",), CHAIN),
    "prefix_suffix_fa2": Provider(prefix_suffix("fa2"), ("flashinfer", "sglang")),
    "prefix_suffix_fa3": Provider(prefix_suffix("fa3"), ("flashinfer", "sglang")),
    "sdpa": Provider(sdpa),
    "flex_attention": Provider(flex_attention),
}
