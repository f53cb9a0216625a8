"""SGLang's Triton attention backend, with the verify of draft trees taken over."""

from __future__ import annotations

import torch
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

from .. import build
from ..evidence import evidence_for
from ..layout import KVLayout
from .fit import examine
from .settings import PREFIX, Settings, log
from .verify import TreeVerify


class MLAVerifyBackend(TritonAttnBackend):
    """Differs from its base in the function behind ``extend_attention_fwd`` alone."""

    tree_verify: TreeVerify

    def forward_extend(self, q, k, v, layer, forward_batch, *args, **kwargs):
        if not forward_batch.forward_mode.is_target_verify():
            return super().forward_extend(q, k, v, layer, forward_batch, *args, **kwargs)
        with self.tree_verify.serving(layer.layer_id):
            return super().forward_extend(q, k, v, layer, forward_batch, *args, **kwargs)

    def init_forward_metadata(self, forward_batch):
        if forward_batch.forward_mode.is_target_verify():
            self.tree_verify.next_step()
        return super().init_forward_metadata(forward_batch)

    # Before a graph's replay. A version has one of the two, and is not to see the other.

    if hasattr(TritonAttnBackend, "init_forward_metadata_replay_cuda_graph"):

        def init_forward_metadata_replay_cuda_graph(
                self, bs, req_pool_indices, seq_lens, seq_lens_sum, encoder_lens, forward_mode,
                *args, **kwargs):
            if forward_mode.is_target_verify():
                self.tree_verify.next_step()
            return super().init_forward_metadata_replay_cuda_graph(
                bs, req_pool_indices, seq_lens, seq_lens_sum, encoder_lens, forward_mode, *args,
                **kwargs)

    else:

        def init_forward_metadata_out_graph(self, forward_batch, in_capture=False):
            if forward_batch.forward_mode.is_target_verify() and not in_capture:
                self.tree_verify.next_step()
            return super().init_forward_metadata_out_graph(forward_batch, in_capture)


def take_over(backend: TritonAttnBackend, settings: Settings) -> TritonAttnBackend:
    """Makes a backend that SGLang has constructed an :class:`MLAVerifyBackend`, in place.

    Construction stays SGLang's, with whatever parameters a version gives it. Where anything
    does not fit, the backend comes back as it was, and the log says why.
    """
    fit = examine()
    if not fit.ok:
        log.error("%s", fit)
        return backend
    if type(backend) is not TritonAttnBackend or not getattr(backend, "use_mla", False):
        log.info("%s is left untouched: it is not the Triton backend of an MLA model",
                 type(backend).__name__)
        return backend
    device = torch.device(backend.device)
    try:
        layout = row_layout(backend, settings.row_order)
        if device.type == "cuda":  # now, and not at the first request
            capability = torch.cuda.get_device_capability(device)
            build.load("sm_{}{}".format(*capability))
        verify = TreeVerify(backend.extend_attention_fwd, layout, backend.max_context_len,
                            shadow_every=settings.shadow_every, device=device)
    except Exception as error:
        log.error("SGLang %s is left untouched: %s: %s", fit.version, type(error).__name__, error)
        return backend
    backend.tree_verify = verify
    backend.extend_attention_fwd = torch.compiler.disable(verify)
    backend.__class__ = MLAVerifyBackend
    if not fit.tried:
        log.warning("%s", fit)
    shadow = f", compared with SGLang's path every {settings.shadow_every} verify steps"
    log.info("SGLang %s: verify of draft trees runs through mla_kernels, rows %s (%s)%s",
             fit.version, layout.order,
             "asked of the pool" if settings.row_order == "probe" else f"{PREFIX}_ROW_ORDER",
             shadow if settings.shadow_every else "")
    return backend


def row_layout(backend: TritonAttnBackend, row_order: str) -> KVLayout:
    """
    Raises:
        WitnessesDisagree, OrderUnknown, ValueError: as :func:`mla_kernels.evidence.evidence_for`,
            which is asked when ``row_order`` is ``"probe"``.
    """
    pool = getattr(backend, "token_to_kv_pool", None)
    if pool is None:  # 0.5.12
        pool = backend.token_to_kv_pool_allocator.get_kvcache()
    if row_order == "probe":
        return evidence_for(pool)
    return KVLayout(row_order, pool.kv_lora_rank, pool.qk_rope_head_dim, pool.dtype)
