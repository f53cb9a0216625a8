"""A verify call as SGLang's backend makes it, without SGLang: for tests, and to see shadow mode
at work on any machine."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch

from ..batch import VerifyBatch
from ..layout import KVLayout
from ..reference import verify_attention_reference
from .settings import log
from .verify import POSITIONAL, TreeVerify


class Call:
    """Arguments of a verify call on the CPU, fp32, rows latent first.

    Args:
        bs: requests; nodes: draft tokens of each.
        padded: requests of a CUDA graph that are padding: one token of prefix, in slot 0.
        chain: no tree mask, as for chains.
        heads, context: query heads, and the longest sequence.
    """

    def __init__(self, rng: np.random.Generator, *, bs: int = 3, nodes: int = 5, padded: int = 0,
                 chain: bool = False, heads: int = 2, context: int = 40) -> None:
        self.nodes, self.context, self.sm_scale = nodes, context, 192**-0.5
        lower = np.tri(nodes, dtype=bool)
        masks = [lower if chain else lower & (rng.random((nodes, nodes)) < 0.6)
                 | np.eye(nodes, dtype=bool) for _ in range(bs + padded)]
        lens = [*rng.integers(1, context - nodes, bs).tolist(), *[1] * padded]
        slots = 1 + bs * context
        free = iter(rng.permutation(np.arange(1, slots)).tolist())
        tables = [[next(free) for _ in range(n)] for n in lens[:bs]] + [[0]] * padded
        self.batch = VerifyBatch.from_requests(masks, lens, tables)
        mask, mask_indptr = self.batch.full_mask()
        generator = torch.Generator().manual_seed(int(rng.integers(2**31)))
        num_tokens = (bs + padded) * nodes

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        k, pool = normal(num_tokens, 1, 576), normal(slots, 1, 576)
        # As SGLang's are: indices and mask longer than what is used of them.
        indices = torch.cat([self.batch.kv_indices.long(), torch.full((7,), 3)])
        mask = None if chain else torch.cat([mask, torch.ones(5, dtype=torch.bool)])
        self.arguments: dict[str, Any] = dict(zip(POSITIONAL, (
            normal(num_tokens, heads, 576), k, k[..., :512], normal(num_tokens, heads, 512), pool,
            pool[..., :512], self.batch.qo_indptr.long(), self.batch.kv_indptr, indices, mask,
            True, mask_indptr, nodes, 1.0, 1.0, self.sm_scale), strict=True))
        self.keywords: dict[str, Any] = {
            "logit_cap": 0.0, "sliding_window_size": -1, "sinks": None,
            "window_kv_offsets": None, "xai_temperature_len": -1, "page_size": 1}

    @property
    def out(self) -> torch.Tensor:
        return self.arguments["o_extend"]

    def exact(self) -> torch.Tensor:
        """What SGLang's kernel would write, from the float64 oracle."""
        layout = KVLayout.LATENT_FIRST
        latent, rope = layout.split(self.arguments["q_extend"])
        return verify_attention_reference(
            latent, rope, self.arguments["k_buffer"], self.batch, layout=layout,
            sm_scale=self.sm_scale, draft_kv=self.arguments["k_extend"][:, 0])[0].float()

    def __call__(self, serve: TreeVerify, layer: int = 0) -> torch.Tensor:
        """One layer's call, as from ``forward_extend``; the output starts as NaN."""
        self.out.fill_(torch.nan)
        with serve.serving(layer):
            serve(*self.arguments.values(), **self.keywords)
        return self.out.clone()


class Extend:
    """Stands for SGLang's kernel: writes ``result``, counts calls, and leaves rubbish in the
    output of a call whose requests are empty, as a kernel that writes nothing does."""

    def __init__(self, result: torch.Tensor) -> None:
        self.result, self.calls, self.empty = result, 0, 0

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.calls += 1
        call = dict(zip(POSITIONAL, args, strict=True))
        if int(call["qo_indptr"][-1]) == int(call["kv_indptr"][-1]) == 0:
            self.empty += 1
            call["o_extend"].fill_(torch.nan)
        else:
            call["o_extend"].copy_(self.result)


def shadow_log(order: str, *, steps: int = 5, every: int = 2, layers: int = 3,
               seed: int = 0) -> tuple[list[str], bool]:
    """Verify steps in shadow mode with rows taken to be of ``order``.

    Returns:
        what the log says, and whether every output was SGLang's to within rounding.
    """
    call = Call(np.random.default_rng(seed))
    exact = call.exact()
    serve = TreeVerify(Extend(exact), KVLayout(order), call.context, shadow_every=every)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(f"{record.levelname:5} {record.getMessage()}")
    level = log.level
    log.addHandler(handler)
    log.setLevel("INFO")
    try:
        right = True
        for _ in range(steps):
            serve.next_step()
            for layer in range(layers):
                right &= torch.allclose(call(serve, layer), exact, atol=1e-5)
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    return lines, right
