"""Adapters of peers, each against a stand-in that computes in float64 from the arguments that the
real kernel would get: a wrong offset, length, mask or scale is a wrong result."""

from __future__ import annotations

import dataclasses
import importlib.machinery
import sys
import types

import numpy as np
import pytest
import torch

from mla_kernels import peers
from mla_kernels.bench import error_of
from mla_kernels.peers import PEERS, Unavailable
from mla_kernels.reference import attend
from mla_kernels.workload import Shape, make_workload

#: bf16's rounding of the result; merging rounds twice.
RIGHT = 4e-3


@pytest.fixture
def some_work(rng):
    """A function that draws a workload."""
    def draw(tree, *, nodes=None, context=None):
        shape = Shape(int(rng.integers(1, 4)), int(rng.integers(1, 14)),
                      nodes or int(rng.integers(2, 12)), context or int(rng.integers(30, 200)))
        return make_workload(shape, "cpu", tree=tree, seed=int(rng.integers(2**31)), l2_bytes=0)

    return draw


def all_regions(work, call):
    """The largest error over the regions, each against its own oracle."""
    return max(
        error_of(dataclasses.replace(work, q=[work.q[r]], batches=[work.batches[r]]),
                 lambda _, r=r: call(r)) for r in range(work.regions))


def install(monkeypatch, **modules):
    """Modules by dotted name (two underscores for a dot), and the packages above them."""
    for name, members in modules.items():
        parts = name.split("__")
        for i in range(1, len(parts) + 1):
            dotted = ".".join(parts[:i])
            if dotted not in sys.modules or i == len(parts):
                module = types.ModuleType(dotted)
                module.__path__ = []
                module.__spec__ = importlib.machinery.ModuleSpec(dotted, None, is_package=True)
                monkeypatch.setitem(sys.modules, dotted, module)
        vars(sys.modules[".".join(parts)]).update(members)


def sglang(monkeypatch, **files):
    install(monkeypatch, sglang={"__version__": "0.0.1"},
            **{f"sglang__kernels__ops__attention__{k}": v for k, v in files.items()})


@pytest.fixture(autouse=True)
def device(monkeypatch):
    """A GPU of an architecture and size that a test may change."""
    gpu = types.SimpleNamespace(capability=(9, 0), sms=132)
    monkeypatch.setattr(peers, "capability", lambda device: gpu.capability)
    monkeypatch.setattr(peers, "_multiprocessors", lambda device: gpu.sms)
    return gpu


# -- stand-ins ----------------------------------------------------------------------------


def extend_attention_fwd(q, k, v, o, k_buffer, v_buffer, qo_indptr, kv_indptr, kv_indices, mask,
                         is_causal, mask_indptr, max_len_extend, k_scale, v_scale, sm_scale=None,
                         lse_extend=None, skip_prefix=False):
    assert is_causal and (k_scale, v_scale) == (1.0, 1.0) and kv_indices.dtype == torch.int64
    assert k.shape[1:] == (1, 576) and v.shape[1:] == (1, 512) and k_buffer.shape[1:] == (1, 576)
    for b in range(len(qo_indptr) - 1):
        begin, end = qo_indptr[b:b + 2].tolist()
        slots = kv_indices[kv_indptr[b]:kv_indptr[b + 1]]
        nodes, prefix = end - begin, len(slots)
        assert nodes <= max_len_extend
        tree = mask[mask_indptr[b]:mask_indptr[b + 1]].view(nodes, prefix + nodes)[:, prefix:]
        keys, values, seen = k[begin:end, 0], v[begin:end, 0], tree & torch.ones_like(tree).tril()
        if not skip_prefix:
            keys = torch.cat([k_buffer[slots, 0], keys])
            values = torch.cat([v_buffer[slots, 0], values])
            seen = torch.cat([seen.new_ones(nodes, prefix), seen], 1)
        out, lse = attend(q[begin:end], keys, values, seen, sm_scale=sm_scale)
        o[begin:end] = out.to(o.dtype)
        if lse_extend is not None:
            lse_extend[begin:end] = lse.float()


def verify_shared_kv_fwd(q, k, v, o, k_buffer, v_buffer, qo_indptr, kv_indptr, kv_indices, mask,
                         is_causal, mask_indptr, max_len_extend, k_scale, v_scale, sm_scale):
    nodes = max_len_extend
    bs = len(qo_indptr) - 1
    assert v.is_contiguous() and mask is None and len(q) == bs * nodes
    full = torch.cat([torch.ones(nodes, int(n) + nodes, dtype=bool).reshape(-1)
                      for n in kv_indptr.diff()])
    sizes = torch.tensor([0, *((kv_indptr.diff() + nodes) * nodes).tolist()]).cumsum(0)
    extend_attention_fwd(q, k, v, o, k_buffer, v_buffer, qo_indptr, kv_indptr, kv_indices, full,
                         is_causal, sizes, nodes, k_scale, v_scale, sm_scale)
    return True


class NumSplits:
    """`get_num_kv_splits_triton[grid](...)`."""

    def __getitem__(self, grid):
        def launch(splits, lens, requests, group, heads, kv_heads, most, sms, MAX_NUM_SEQ):
            assert grid == (1,) and group == kv_heads == 1 and requests == len(lens)
            assert requests <= MAX_NUM_SEQ and most >= sms and most & (most - 1) == 0
            splits.copy_(lens.clamp(max=most))
        return launch


def decode_attention_fwd(q, k_buffer, v_buffer, o, kv_indptr, kv_indices, logits, lses, splits,
                         most, sm_scale, k_scale, v_scale, has_mla, use_pdl):
    assert has_mla and most == logits.shape[2] == lses.shape[2] and (splits > 0).all()
    assert logits.shape == (*q.shape[:2], most, 512) and lses.dtype == torch.float32
    for b in range(len(q)):
        slots = kv_indices[kv_indptr[b]:kv_indptr[b + 1]]
        out, _ = attend(q[b:b + 1], k_buffer[slots, 0], v_buffer[slots, 0],
                        torch.ones(1, len(slots), dtype=bool), sm_scale=sm_scale)
        o[b] = out[0].to(o.dtype)


def merge_state_triton(a, a_lse, b, b_lse, out, lse):
    both = torch.logaddexp(a_lse, b_lse)
    out.copy_(a * (a_lse - both).exp()[..., None] + b * (b_lse - both).exp()[..., None])
    lse.copy_(both)


class Metadata:
    @classmethod
    def csr(cls, qo_indptr, kv_indptr, kv_indices, kv_len_arr):
        for tensor in (qo_indptr, kv_indptr, kv_indices, kv_len_arr):
            assert tensor.dtype == torch.int32 and tensor.dim() == 1 and tensor.is_contiguous()
        assert kv_indptr[-1] == len(kv_indices)
        return qo_indptr, kv_indptr, kv_indices, kv_len_arr


class Wrapper:
    """FlashInfer's: causal means that the last query sees all ``kv_len`` tokens."""

    planned: list[str] = []

    def __init__(self, workspace, backend):
        assert workspace.dtype == torch.uint8 and workspace.numel() >= 2**27
        self.planned.append(backend)

    def plan(self, *, metadata, num_heads, head_dim_ckv, head_dim_kpe, page_size, causal, sm_scale,
             q_data_type, kv_data_type, lse_mode):
        if self.planned[-1] == "refused":
            raise ValueError("needs 150000 shared-memory bytes per block")
        assert (head_dim_ckv, head_dim_kpe, page_size) == (512, 64, 1)
        self.__dict__.update(locals())

    def run(self, *, query, kv_cache, out, lse=None, return_lse=False, return_lse_base_on_e=False):
        assert return_lse == (self.lse_mode != "none") and query.shape[1] == self.num_heads
        assert kv_cache.shape[1:] == (1, 576)
        qo_indptr, kv_indptr, kv_indices, kv_len = self.metadata
        for b, n in enumerate(kv_len.tolist()):
            begin, end = qo_indptr[b:b + 2].tolist()
            rows = kv_cache[kv_indices[kv_indptr[b]:kv_indptr[b] + n].long(), 0]
            seen = torch.ones(end - begin, n, dtype=bool)
            if self.causal:
                seen = seen.tril(n - (end - begin))
            result, logsum = attend(query[begin:end], rows, rows[:, :512], seen,
                                    sm_scale=self.sm_scale)
            out[begin:end] = result.to(out.dtype)
            if return_lse:
                lse[begin:end] = (logsum if return_lse_base_on_e else logsum / np.log(2)).float()


FLASHINFER = {"MLAPlanMetadata": Metadata, "BatchMLAPagedAttentionWrapper": Wrapper}


def flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, head_dim_v, schedule,
                           num_splits=None, softmax_scale=None, causal=False, use_legacy=False):
    assert use_legacy and head_dim_v == 512 and k_cache.shape[1:] == (64, 1, 576)
    assert block_table.dtype == cache_seqlens.dtype == torch.int32
    outs = []
    for b, n in enumerate(cache_seqlens.tolist()):
        rows = k_cache[block_table[b].long()].reshape(-1, 576)[:n]
        seen = torch.ones(q.shape[1], n, dtype=bool)
        outs.append(attend(q[b], rows, rows[:, :512], seen.tril(n - q.shape[1]) if causal else seen,
                           sm_scale=softmax_scale)[0])
    return torch.stack(outs).to(q.dtype), None


# -- adapters -----------------------------------------------------------------------------


def test_sglang_extend(monkeypatch, some_work):
    sglang(monkeypatch, extend_attention={"extend_attention_fwd": extend_attention_fwd})
    work = some_work("3-ary")
    assert all_regions(work, peers.sglang_extend(work)) < RIGHT
    assert PEERS["sglang_extend"].version == "sglang 0.0.1"


def test_sglang_extend_with_other_blocks(monkeypatch, some_work):
    seen = []

    def fwd(*args, **options):
        seen.append(module.CUDA_CAPABILITY)
        extend_attention_fwd(*args, **options)

    sglang(monkeypatch, extend_attention={"extend_attention_fwd": fwd, "CUDA_CAPABILITY": (9, 0)})
    module = sys.modules["sglang.kernels.ops.attention.extend_attention"]
    work = some_work("3-ary")
    assert all_regions(work, peers.sglang_extend_sm12x(work)) < RIGHT
    assert set(seen) == {(12, 0)} and module.CUDA_CAPABILITY == (9, 0)
    module.CUDA_CAPABILITY = (12, 1)
    with pytest.raises(Unavailable, match="own blocks on this GPU"):
        peers.sglang_extend_sm12x(work)
    del module.CUDA_CAPABILITY
    with pytest.raises(Unavailable, match="CUDA_CAPABILITY"):
        peers.sglang_extend_sm12x(work)


def test_sglang_verify(monkeypatch, some_work):
    cache = {"old": "buffers"}
    sglang(monkeypatch, verify_mla={"verify_shared_kv_fwd": verify_shared_kv_fwd,
                                    "_VMLA_CACHE": cache})
    work = some_work("chain")
    assert all_regions(work, peers.sglang_verify(work)) < RIGHT
    assert not cache
    with pytest.raises(Unavailable, match="not tried above 16 nodes"):
        peers.sglang_verify(some_work("chain", nodes=17))
    sglang(monkeypatch, verify_mla={"verify_shared_kv_fwd": lambda *args: False})
    with pytest.raises(Unavailable, match="refuses"):
        peers.sglang_verify(work)(0)


@pytest.mark.parametrize("sms", [12, 128, 132])
def test_sglang_decode(monkeypatch, device, sms, some_work):
    device.sms = sms
    sglang(monkeypatch, decode_attention={"decode_attention_fwd": decode_attention_fwd},
           metadata={"get_num_kv_splits_triton": NumSplits()})
    work = some_work("chain", nodes=1)
    assert all_regions(work, peers.sglang_decode(work)) < RIGHT
    with pytest.raises(Unavailable, match="one token"):
        peers.sglang_decode(some_work("chain", nodes=2))


@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_flashinfer(monkeypatch, backend, some_work):
    install(monkeypatch, flashinfer__mla=FLASHINFER)
    work = some_work("chain")
    assert all_regions(work, PEERS[f"flashinfer_{backend}"].prepare(work)) < RIGHT
    assert Wrapper.planned[-1] == backend


def test_flashinfer_says_why_not(monkeypatch, some_work):
    install(monkeypatch, flashinfer__mla=FLASHINFER)
    work = some_work("chain")
    with pytest.raises(Unavailable, match=r"plan\(\) refuses: needs 150000 shared"):
        peers.flashinfer("refused")(work)
    install(monkeypatch, flashinfer__mla={"BatchMLAPagedAttentionWrapper": Wrapper})
    with pytest.raises(Unavailable, match="0.7 or newer"):
        peers.flashinfer("fa2")(work)


@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_prefix_and_suffix(monkeypatch, backend, some_work):
    install(monkeypatch, flashinfer__mla=FLASHINFER)
    sglang(monkeypatch, extend_attention={"extend_attention_fwd": extend_attention_fwd},
           merge_state={"merge_state_triton": merge_state_triton})
    work = some_work("3-ary")
    assert all_regions(work, PEERS[f"prefix_suffix_{backend}"].prepare(work)) < RIGHT
    assert Wrapper.planned[-1] == backend
    assert not work.lse.isnan().any()


def test_pages_hold_the_same_rows(some_work):
    work = some_work("chain", context=150)
    pages, tables = peers.paged(work, 64)
    taken = torch.cat([t.reshape(-1) for t in tables])
    assert torch.equal(taken.sort().values, torch.arange(len(pages), dtype=torch.int32))
    for region, table in enumerate(tables):
        for slots, row in zip(work.slots(region), table, strict=True):
            rows = pages[row.long()].reshape(-1, 576)
            assert torch.equal(rows[:len(slots)], work.pool[slots.long()])
            assert (rows[len(slots):] == 0).all()


def test_flashmla(monkeypatch, device, some_work):
    install(monkeypatch, flash_mla={"flash_mla_with_kvcache": flash_mla_with_kvcache,
                                    "get_mla_metadata": lambda: (object(), None)})
    work = some_work("chain")
    assert all_regions(work, peers.flashmla(work)) < RIGHT
    device.capability = (12, 0)
    with pytest.raises(Unavailable, match="compiled for sm_90a; this is sm_120"):
        peers.flashmla(work)


def test_sdpa(some_work):
    work = some_work("3-ary")
    assert all_regions(work, peers.sdpa(work)) < 2 * RIGHT


@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
def test_flex_attention(monkeypatch, some_work):
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(peers, "compiled_flex", lambda: flex_attention)
    work = some_work("3-ary")
    assert all_regions(work, peers.flex_attention(work)) < 2 * RIGHT


def test_flex_attention_takes_the_first_blocks_that_fit(monkeypatch, some_work):
    work, asked = some_work("3-ary"), []

    def attend(q, k, v, *, block_mask, scale, kernel_options):
        asked.append(kernel_options)
        if len(asked) <= refused:
            raise RuntimeError("LoweringException: No valid triton configs. out of resource: "
                               "triton_tem_0\n Required: 294912 Hardware limit:232448 Reducing "
                               "block sizes may help.")
        mask = block_mask.mask_mod
        rows, columns = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
        seen = mask(0, 0, rows, columns)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, scale=scale)

    monkeypatch.setattr(peers, "compiled_flex", lambda: attend)
    refused = 2
    assert all_regions(work, peers.flex_attention(work)) < 2 * RIGHT
    assert [dict(o) for o in peers.FLEX_OPTIONS[:3]] == asked[:3] and asked[0] == {}
    assert all(o == asked[2] for o in asked[3:])
    asked.clear()
    refused = 0
    assert peers.flex_attention(work).note == "blocks: its own choice"
    asked.clear()
    refused = 1
    assert peers.flex_attention(work).note == "blocks: BLOCK_N 32, num_stages 1, num_warps 8"
    asked.clear()
    refused = len(peers.FLEX_OPTIONS)
    with pytest.raises(Unavailable, match="its own: out of resource: triton_tem_0 Required: 294912 "
                                          "Hardware limit:232448$"):
        peers.flex_attention(work)


@pytest.mark.parametrize("name", sorted(PEERS.keys() - {"sdpa", "flex_attention"}))
def test_what_is_not_installed_says_so(monkeypatch, name, some_work):
    for package in PEERS[name].package:
        for module in [m for m in sys.modules if m.split(".")[0] == package]:
            monkeypatch.delitem(sys.modules, module)
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(Unavailable, match="is not importable"):
        PEERS[name].prepare(some_work("chain", nodes=1))


def test_trees_only_for_those_with_a_mask():
    masked = {n for n, p in PEERS.items() if "3-ary" in p.trees}
    assert masked == {"sglang_extend", "sglang_extend_sm12x", "prefix_suffix_fa2",
                      "prefix_suffix_fa3", "sdpa", "flex_attention"}
    assert all(p.trees == ("chain",) for n, p in PEERS.items() if n not in masked)
