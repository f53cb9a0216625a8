"""SGLang's own Triton backend on a machine without a GPU, as its model runner would make it.

Its constructor, metadata and tree builder run as they are, its Triton kernels in Triton's
interpreter. What stands in for a server is its state: the runner's attributes and the settings
that it would have published.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from sglang.kernels.ops.speculative import spec_tree
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.attention import attention_registry, triton_backend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.eagle_utils import build_tree_kernel_efficient

from mla_kernels.evidence.sglang import _kernels_on

HEADS, LAYERS, SM_SCALE = 4, 2, 192**-0.5


class Server:
    """A runner and the settings around it.

    Args:
        nodes: draft tokens of a request; max_bs, context_len: capacities.
    """

    def __init__(self, nodes: int, rng: np.random.Generator, *, max_bs: int = 4,
                 context_len: int = 64, dtype: torch.dtype = torch.float32) -> None:
        self.nodes, self.rng, self.max_bs, self.context_len = nodes, rng, max_bs, context_len
        self.generator = torch.Generator().manual_seed(int(rng.integers(2**31)))
        slots = max_bs * context_len
        self.pool = MLATokenToKVPool(
            size=slots, page_size=1, dtype=dtype, kv_lora_rank=512, qk_rope_head_dim=64,
            layer_num=LAYERS, device="cpu", enable_memory_saver=False)
        # Slot 0 is what padded requests point at.
        ids = rng.permutation(np.arange(1, slots + 1)).reshape(max_bs, context_len)
        self.req_to_token = torch.from_numpy(np.ascontiguousarray(ids)).to(torch.int32)
        self.req_to_token = torch.cat([torch.zeros(1, context_len, dtype=torch.int32),
                                       self.req_to_token])

    def settings(self) -> contextlib.ExitStack:
        spec = SimpleNamespace(speculative_num_draft_tokens=self.nodes, speculative_num_steps=3,
                               speculative_eagle_topk=4)
        kernel = SimpleNamespace(enable_lean_attention=False, triton_attention_num_kv_splits=8,
                                 triton_attention_split_tile_size=None)
        execution = SimpleNamespace(
            kernel=kernel, dllm=SimpleNamespace(dllm_algorithm=None),
            deterministic=SimpleNamespace(enable_deterministic_inference=False))
        stack = contextlib.ExitStack()
        stack.enter_context(mock.patch.multiple(
            triton_backend, get_spec=lambda: spec, get_exec=lambda: execution,
            get_schedule=lambda: SimpleNamespace(chunked_prefill_size=8192),
            cuda_graph_fully_disabled=lambda: False, mambaish_config=lambda config: None,
            check_cuda_graph_backend=lambda *args: False))
        stack.enter_context(get_parallel().override(
            dcp_enabled=False, attn_dcp_size=1, attn_dcp_rank=0, attn_tp_size=1))
        stack.enter_context(_kernels_on(torch.device("cpu")))
        return stack

    def runner(self) -> SimpleNamespace:
        config = SimpleNamespace(
            attention_arch=AttentionArch.MLA, is_encoder_decoder=False, hf_config=None,
            get_max_num_attention_heads=lambda: HEADS, get_num_kv_heads=lambda *args: 1,
            qk_nope_head_dim=128, qk_rope_head_dim=64, kv_lora_rank=512, v_head_dim=128,
            swa_v_head_dim=128, head_dim=576, context_len=self.context_len)
        allocator = SimpleNamespace()
        return SimpleNamespace(
            model_config=config, device="cpu", gpu_id=0, page_size=1, is_draft_worker=False,
            sliding_window_size=None, token_to_kv_pool=self.pool, kv_cache_dtype=self.pool.dtype,
            token_to_kv_pool_allocator=allocator,
            req_to_token_pool=SimpleNamespace(size=self.max_bs, req_to_token=self.req_to_token),
            decode_num_tokens_per_req=lambda: self.nodes,
            kv_index_translator=KVIndexTranslator(
                req_to_token=self.req_to_token, token_to_kv_pool_allocator=allocator,
                token_to_kv_pool=self.pool, page_size=1, device="cpu"))

    def backend(self):
        """What the registry's factory makes: SGLang's, or ours where the hook is active."""
        return attention_registry.ATTENTION_BACKENDS["triton"](self.runner())

    def trees(self, seq_lens: torch.Tensor, buffer: torch.Tensor | None = None) -> torch.Tensor:
        """Masks of random EAGLE trees, by SGLang's builder. (Its CUDA kernel has a Triton twin
        for other GPUs; that one runs here.)"""
        bs, nodes, topk, steps = len(seq_lens), self.nodes, 4, 3
        # Scores' candidates, step by step: topk, then topk children of each of topk parents.
        total = topk + (steps - 1) * topk * topk
        parents = torch.tensor([[-1, *range(topk * (1 + topk * (steps - 2)))]] * bs)
        picked = [self._grow(total, topk) for _ in range(bs)]
        tokens = torch.zeros(bs, nodes - 1, dtype=torch.long)
        with mock.patch.object(spec_tree, "_is_cpu", False), \
                mock.patch.object(spec_tree, "_is_xpu", True):
            return build_tree_kernel_efficient(
                torch.zeros(bs, dtype=torch.long), parents, torch.tensor(picked), tokens,
                seq_lens, int(seq_lens.sum()), topk, steps, nodes, tree_mask_buf=buffer)[0]

    def _grow(self, total: int, topk: int) -> list[int]:
        """Indices of drawn candidates, parents before children."""
        chosen: list[int] = []
        while len(chosen) < self.nodes - 1:
            at = int(self.rng.integers(total))
            # Candidate `at` of step s > 1 hangs below candidate (at - topk) // topk.
            if at not in chosen and (at < topk or (at - topk) // topk in chosen):
                chosen.append(at)
        return sorted(chosen)

    def batch(self, seq_lens: list[int], *, padded: int = 0,
              buffer: torch.Tensor | None = None, mask: bool = True) -> SimpleNamespace:
        """A verify batch: requests of these lengths, then padded ones as a graph's are."""
        lens = torch.tensor(seq_lens + [1] * padded, dtype=torch.int64)
        bs = len(lens)
        rows = torch.tensor([*range(1, len(seq_lens) + 1), *[0] * padded])
        custom_mask = self.trees(lens, buffer) if mask else None
        spec_info = SimpleNamespace(custom_mask=custom_mask, num_tokens_per_req=self.nodes,
                                    draft_token_num=self.nodes)
        slots = [self.req_to_token[r, n:n + self.nodes] if r else torch.zeros(self.nodes)
                 for r, n in zip(rows.tolist(), lens.tolist(), strict=True)]
        return SimpleNamespace(
            batch_size=bs, req_pool_indices=rows, seq_lens=lens, seq_lens_sum=int(lens.sum()),
            seq_lens_cpu=lens, forward_mode=ForwardMode.TARGET_VERIFY, spec_info=spec_info,
            out_cache_loc=torch.cat(slots).long(), kv_loc_plan=None, encoder_lens=None,
            positions=None, mha_one_shot=False, attn_attend_prefix_cache=False,
            out_cache_loc_is_physical=False, dcp_kv_mask=None,
            extend_seq_lens_cpu=None, extend_prefix_lens=None)

    def fill_pool(self) -> None:
        for buffer in self.pool.kv_buffer:
            buffer.normal_(generator=self.generator)

    def tensors(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v of a layer, absorbed."""
        q = torch.randn(num_tokens, HEADS * 576, generator=self.generator)
        k = torch.randn(num_tokens, 1, 576, generator=self.generator)
        q, k = q.to(self.pool.dtype), k.to(self.pool.dtype)
        return q, k, k[..., :512]


def layer(index: int = 0, **changes: object) -> SimpleNamespace:
    """What a backend reads of a RadixAttention."""
    return SimpleNamespace(**{
        "layer_id": index, "tp_q_head_num": HEADS, "tp_k_head_num": 1, "qk_head_dim": 576,
        "v_head_dim": 512, "scaling": SM_SCALE, "logit_cap": 0.0,
        "logit_capping_method": "tanh", "k_scale": None, "v_scale": None,
        "sliding_window_size": -1, "is_cross_attention": False, "attn_type": AttentionType.DECODER,
        "xai_temperature_len": -1} | changes)
