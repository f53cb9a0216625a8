"""SGLang 0.5.12 or 0.5.16, first on the path, with our hook: one verify step on a CPU by its own
path and by ours. A script, run by with_sglang_engine.py; sglang_on_cpu.py has the newest version.
"""

import contextlib
import os
from types import SimpleNamespace
from unittest import mock

import torch
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.attention import attention_registry, triton_backend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from mla_kernels.evidence.sglang import _kernels_on
from mla_kernels.sglang.fit import examine
from mla_kernels.sglang.hook import activate
from mla_kernels.sglang.settings import Settings

HEADS, NODES, CONTEXT, LENGTHS = 4, 8, 64, (5, 17)


def server_state():
    """What a server would have set, by version."""
    stack = contextlib.ExitStack()
    if hasattr(triton_backend, "get_attention_tp_size"):  # 0.5.12
        stack.enter_context(mock.patch.object(triton_backend, "get_attention_tp_size", lambda: 1))
    else:
        from sglang.srt.runtime_context import get_parallel

        names = ("hybrid_gdn_config", "kimi_linear_config", "linear_attn_model_spec")
        stack.enter_context(mock.patch.multiple(
            triton_backend, cuda_graph_fully_disabled=lambda: False,
            **{name: lambda config: None for name in names}))
        stack.enter_context(get_parallel().override(
            dcp_enabled=False, attn_dcp_size=1, attn_dcp_rank=0, attn_tp_size=1))
    stack.enter_context(_kernels_on(torch.device("cpu")))
    return stack


def make_runner(pool, req_to_token):
    arguments = SimpleNamespace(
        speculative_num_draft_tokens=NODES, speculative_num_steps=3, speculative_eagle_topk=4,
        triton_attention_num_kv_splits=8, triton_attention_split_tile_size=None,
        chunked_prefill_size=8192, enable_deterministic_inference=False,
        disable_cuda_graph=False)
    config = SimpleNamespace(
        attention_arch=AttentionArch.MLA, is_encoder_decoder=False, hf_config=None,
        num_attention_heads=HEADS, get_num_kv_heads=lambda *args: 1, v_head_dim=128,
        swa_v_head_dim=128, head_dim=576, context_len=CONTEXT)
    return SimpleNamespace(
        model_config=config, server_args=arguments, device="cpu", gpu_id=0, page_size=1,
        is_draft_worker=False, sliding_window_size=None, token_to_kv_pool=pool,
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool),
        req_to_token_pool=SimpleNamespace(size=4, req_to_token=req_to_token),
        hybrid_gdn_config=None, kimi_linear_config=None, linear_attn_model_spec=None)


def make_batch(pool, req_to_token):
    lens, rows = torch.tensor(LENGTHS), torch.tensor([1, 2])
    mask = []
    for length in LENGTHS:
        tree = torch.rand(NODES, NODES).gt(0.5).tril() | torch.eye(NODES, dtype=torch.bool)
        mask.append(torch.cat([torch.ones(NODES, length, dtype=torch.bool), tree], 1).flatten())
    slots = [req_to_token[r, n:n + NODES] for r, n in zip(rows, lens, strict=True)]
    return SimpleNamespace(
        batch_size=2, req_pool_indices=rows, seq_lens=lens, seq_lens_sum=sum(LENGTHS),
        seq_lens_cpu=lens, forward_mode=ForwardMode.TARGET_VERIFY, positions=None,
        spec_info=SimpleNamespace(custom_mask=torch.cat(mask), draft_token_num=NODES),
        out_cache_loc=torch.cat(slots).long(), encoder_lens=None, token_to_kv_pool=pool)


def prepare(backend, batch, mode):
    """The metadata of a step: eager, or a capture's and then a replay's."""
    b = batch
    if mode == "eager":
        backend.init_forward_metadata(b)
    elif hasattr(backend, "init_forward_metadata_replay_cuda_graph"):
        state = (b.seq_lens, None, b.forward_mode, b.spec_info)
        backend.init_forward_metadata_capture_cuda_graph(2, 2 * NODES, b.req_pool_indices, *state)
        backend.init_forward_metadata_replay_cuda_graph(
            2, b.req_pool_indices, b.seq_lens, b.seq_lens_sum, *state[1:], b.seq_lens_cpu)
    else:
        backend.init_forward_metadata_out_graph(b, in_capture=True)
        backend.init_forward_metadata_out_graph(b)


def main():
    fit = examine()
    assert fit.ok and fit.tried, fit
    pool = MLATokenToKVPool(
        size=4 * CONTEXT, page_size=1, dtype=torch.float32, kv_lora_rank=512, qk_rope_head_dim=64,
        layer_num=1, device="cpu", enable_memory_saver=False)
    pool.kv_buffer[0].normal_()
    slots = torch.randperm(4 * CONTEXT).add(1).view(4, CONTEXT).int()
    req_to_token = torch.cat([torch.zeros(1, CONTEXT, dtype=torch.int32), slots])
    layer = SimpleNamespace(
        layer_id=0, tp_q_head_num=HEADS, tp_k_head_num=1, qk_head_dim=576, v_head_dim=512,
        scaling=192**-0.5, logit_cap=0.0, logit_capping_method="tanh", k_scale=None, v_scale=None,
        sliding_window_size=-1, is_cross_attention=False, attn_type=AttentionType.DECODER,
        xai_temperature_len=-1)
    q, k = torch.randn(2 * NODES, HEADS * 576), torch.randn(2 * NODES, 1, 576)
    backends = attention_registry.ATTENTION_BACKENDS
    with server_state():
        runner, batch = make_runner(pool, req_to_token), make_batch(pool, req_to_token)
        theirs = backends["triton"](runner)
        os.environ |= Settings(on=True, shadow_every=2).as_environment()
        activate()
        ours = backends["triton"](runner)
        assert (type(theirs).__name__, type(ours).__name__) == (
            "TritonAttnBackend", "MLAVerifyBackend")
        for mode in ("eager", "graph"):
            outs = []
            for backend in (theirs, ours):
                if mode == "graph":
                    backend.init_cuda_graph_state(4, 4 * NODES)
                prepare(backend, batch, mode)
                outs.append(backend.forward_extend(q, k, k[..., :512], layer, batch))
            torch.testing.assert_close(*outs, atol=1e-5, rtol=1e-5)
        serve = ours.tree_verify
        assert not serve.stopped and not serve._said and serve.shadow.step == 2
    print(fit)


if __name__ == "__main__":
    main()
