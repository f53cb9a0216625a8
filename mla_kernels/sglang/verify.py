"""Stands where SGLang's Triton backend calls its `extend_attention_fwd`.

Between a model's layer and that call the backend has saved the new rows, chosen the metadata
and cut the output: all of it stays SGLang's. The call itself goes to
:func:`mla_kernels.verify_attention` while a draft is verified, and to SGLang's function
otherwise, or where ours cannot serve, which one log line says once.

Nothing here imports SGLang.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..attention import verify_attention
from ..batch import VerifyBatch
from ..check import ROW_TOLERANCE
from ..layout import KVLayout
from ..marshal import from_sglang
from ..tree import MAX_NODES
from .settings import log

#: The parameters that SGLang passes by position, from 0.5.12 to 0.5.23.
POSITIONAL = (
    "q_extend", "k_extend", "v_extend", "o_extend", "k_buffer", "v_buffer", "qo_indptr",
    "kv_indptr", "kv_indices", "custom_mask", "is_causal", "mask_indptr", "max_len_extend",
    "k_scale", "v_scale", "sm_scale")

#: Keywords it adds, with the values under which they change nothing.
NEUTRAL = {"sliding_window_size": -1, "sinks": None, "window_kv_offsets": None,
           "xai_temperature_len": -1, "score_mod": None, "aux_tensors": None}

#: Keywords that tune SGLang's kernel and have no part in the result.
TUNING = ("page_size", "extend_seq_lens_cpu")

#: Two results for one row in 16 bits may differ by twice what each may differ from the truth.
SHADOW_TOLERANCE = 2 * ROW_TOLERANCE


class TreeVerify:
    """
    Args:
        extend: SGLang's function, which serves whatever this does not.
        layout: the order of the pool's rows.
        max_context_len: tokens of the longest sequence, draft included.
        shadow_every: see :class:`~.settings.Settings`.

    Attributes:
        stopped: why SGLang serves everything from now on; empty while we serve.
    """

    def __init__(self, extend: Callable[..., None], layout: KVLayout, max_context_len: int, *,
                 shadow_every: int = 0, device: torch.device | str = "cpu") -> None:
        self.extend, self.layout, self.max_context_len = extend, layout, max_context_len
        self.stopped = ""
        self.shadow = Shadow(shadow_every, device) if shadow_every else None
        self._layer: int | None = None
        self._last_layer = 0
        self._key: tuple | None = None
        self._batch: VerifyBatch
        self._said: set[str] = set()

    @contextlib.contextmanager
    def serving(self, layer: int) -> Iterator[None]:
        """Calls within are the verify call of this layer."""
        self._layer = layer
        try:
            yield
        finally:
            self._layer = None

    def next_step(self) -> None:
        """The metadata of another verify step is being prepared, outside any graph."""
        if self.shadow is not None:
            self.shadow.next_step()
            if self.shadow.mismatch and not self.stopped:
                self.stop(self.shadow.mismatch)

    def stop(self, reason: str) -> None:
        self.stopped = reason
        log.error("SGLang's own path serves verify from here on: %s", reason)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        layer = self._layer
        if layer is None or self.stopped:
            return self.extend(*args, **kwargs)
        try:
            call = dict(zip(POSITIONAL, args, strict=False))
            reason = self.why_not(call, kwargs) if len(args) == len(POSITIONAL) else (
                f"it came with {len(args)} positional arguments, not {len(POSITIONAL)}")
            if reason is None:
                return self._serve(layer, call, args, kwargs)
            if reason not in self._said:
                self._said.add(reason)
                log.info("SGLang's own path serves verify of layer %d and its like: %s", layer,
                         reason)
        except Exception as error:
            self.stop(f"{type(error).__name__} at layer {layer}: {error}")
        return self.extend(*args, **kwargs)

    def why_not(self, call: dict[str, Any], kwargs: dict[str, Any]) -> str | None:
        """What keeps us from serving this call, or None. Looks at no values on the device."""
        q, k, v, rows = (call[n] for n in ("q_extend", "k_extend", "v_extend", "k_buffer"))
        widths = (q.shape[-1], k.shape[-1], v.shape[-1])
        if widths != (self.layout.row_dim, self.layout.row_dim, self.layout.kv_lora_rank):
            return "heads of {}, {} and {} are not absorbed MLA".format(*widths)
        if k.shape[1] != 1:
            return f"there are {k.shape[1]} key heads, and absorbed MLA has one"
        if rows.dtype != q.dtype:
            return f"the cache holds {rows.dtype}, the queries are {q.dtype}"
        if call["max_len_extend"] > MAX_NODES:
            return f"{call['max_len_extend']} draft tokens are more than {MAX_NODES}"
        if call["custom_mask"] is None and not call["is_causal"]:
            return "the draft is neither masked nor causal"
        if (call["k_scale"], call["v_scale"]) != (1.0, 1.0):
            return f"the cache is scaled by {call['k_scale']} and {call['v_scale']}"
        if call["sm_scale"] is None:
            return "no sm_scale is given"
        for name, value in kwargs.items():
            if name == "logit_cap" or name in TUNING:
                continue
            if name not in NEUTRAL or value is not NEUTRAL[name] and value != NEUTRAL[name]:
                return f"{name} is {value!r}"
        return None

    def _serve(self, layer: int, call: dict[str, Any], args: tuple, kwargs: dict) -> None:
        batch = self._convert(layer, call)
        q, out = call["q_extend"], call["o_extend"]
        verify_attention(
            q, call["k_buffer"], batch, draft_kv=call["k_extend"], layout=self.layout,
            sm_scale=call["sm_scale"], logit_cap=kwargs.get("logit_cap", 0.0), out=out,
            lse=torch.empty(q.shape[:2], dtype=torch.float32, device=q.device))
        if self.shadow is not None:
            self.shadow.compare(layer, self.extend, args, kwargs)

    def _convert(self, layer: int, call: dict[str, Any]) -> VerifyBatch:
        """The batch of this forward pass, converted at its first layer. A pass over which a
        CUDA graph is captured thus has the conversion in the graph, although SGLang runs the
        same pass before it as a warm-up, with the same metadata."""
        tensors = [call[n] for n in ("qo_indptr", "kv_indptr", "kv_indices", "custom_mask",
                                     "mask_indptr")]
        nodes, num_tokens = call["max_len_extend"], call["q_extend"].shape[0]
        key = (num_tokens, nodes, *(None if t is None else t.data_ptr() for t in tensors))
        if layer <= self._last_layer or key != self._key:
            qo, kv, indices, mask, mask_indptr = tensors
            mode = "FULL_MASK"
            if mask is None:
                chain = torch.ones(nodes, nodes, dtype=torch.bool, device=qo.device).tril_()
                mask, mask_indptr = chain.repeat(kv.numel() - 1, 1).view(-1), None
                mode = "QLEN_ONLY"
            # Graph mode's fixed buffer holds a whole context for each token, not each request.
            indices = indices[: (kv.numel() - 1) * self.max_context_len]
            self._batch = from_sglang(
                qo, kv, indices, mask, mask_indptr, num_tokens=num_tokens, max_q_len=nodes,
                max_kv_len=min(indices.numel(), self.max_context_len), mode=mode)
            self._key = key
        self._last_layer = layer
        return self._batch


class Shadow:
    """Both paths on every so many steps, compared on the device.

    A graph's replay runs no Python, so the choice lies in tensors. Both paths are in the graph,
    and on steps in between SGLang's kernel is launched on empty requests, which ends it at
    once. After a mismatch it runs on every step, and its output is the one that counts.
    """

    def __init__(self, every: int, device: torch.device | str) -> None:
        self.every, self.step = every, 0
        self.mismatch = ""
        self._on = torch.ones(1, dtype=torch.int32, device=device)
        self._worst = torch.zeros(1, dtype=torch.float32, device=device)
        #: One more than the layer of the first mismatch; 0 while there is none.
        self._bad_layer = torch.zeros(1, dtype=torch.int32, device=device)

    def next_step(self) -> None:
        if self.step and (self.step - 1) % self.every == 0:
            self._report()
        on = self.step % self.every == 0
        self.step += 1
        self._on.copy_((self._bad_layer > 0) | on)

    def compare(self, layer: int, extend: Callable[..., None], args: tuple, kwargs: dict) -> None:
        """Replaces our output by SGLang's where the two have ever differed."""
        args = list(args)
        at = {name: POSITIONAL.index(name) for name in ("o_extend", "qo_indptr", "kv_indptr")}
        ours, qo, kv = (args[i] for i in at.values())
        theirs = torch.empty_like(ours)
        args[at["o_extend"]] = theirs
        args[at["qo_indptr"]] = qo * self._on.to(qo.dtype)
        args[at["kv_indptr"]] = kv * self._on.to(kv.dtype)
        extend(*args, **kwargs)

        error = torch.linalg.vector_norm(ours.float() - theirs.float(), dim=-1)
        size = torch.linalg.vector_norm(theirs.float(), dim=-1)
        relative = error / size.clamp(min=torch.finfo(torch.float32).tiny)
        relative = relative.nan_to_num(nan=torch.inf).amax(1)
        counts = _real_tokens(qo, kv, args[POSITIONAL.index("kv_indices")], len(relative))
        worst = torch.where(counts & (self._on > 0), relative, 0).amax()
        self._worst.copy_(torch.maximum(self._worst, worst))
        first = (worst > SHADOW_TOLERANCE) & (self._bad_layer == 0)
        self._bad_layer.copy_(torch.where(first, layer + 1, self._bad_layer))
        ours.copy_(torch.where(self._bad_layer > 0, theirs, ours))

    def _report(self) -> None:
        """Reads the device; once for each compared step."""
        worst, bad = float(self._worst), int(self._bad_layer)
        if bad and not self.mismatch:
            self.mismatch = (f"shadow mode found a mismatch at layer {bad - 1} by verify step "
                             f"{self.step}: relative difference {worst:.1e}, allowed "
                             f"{SHADOW_TOLERANCE:.1e}")
        elif not bad:
            log.info("shadow: verify step %d agrees with SGLang's path; largest relative "
                     "difference of a row so far %.1e, allowed %.1e", self.step, worst,
                     SHADOW_TOLERANCE)


def _real_tokens(qo: torch.Tensor, kv: torch.Tensor, kv_indices: torch.Tensor,
                 num_tokens: int) -> torch.Tensor:
    """``[num_tokens]`` bool: tokens of requests that are not padding. A graph's padded requests
    have one token of prefix, in the pool's slot 0, which no request owns."""
    first = kv_indices[kv[:-1].long().clamp(max=kv_indices.numel() - 1)]
    real = (kv.diff() > 0) & (first != 0)
    token = torch.arange(num_tokens, device=qo.device)
    request = torch.searchsorted(qo[1:].long(), token, right=True)
    return real[request.clamp(max=real.numel() - 1)] & (token < qo[-1])
