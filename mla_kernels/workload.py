"""What the benchmark measures: shapes, and random inputs of a shape for every provider.

The cache is cold: every call reads another region of the pool, all of them together at least
twice the L2. Slots are a random permutation, page size 1.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch

from .batch import VerifyBatch
from .device import attention_flops, local_gpu
from .layout import KVLayout
from .reference import verify_attention_reference
from .tree import DraftTree, chain, kary


@dataclasses.dataclass(frozen=True, order=True)
class Shape:
    """A batch of equal requests: ``context`` tokens of prefix each, and a draft of
    ``num_nodes``."""

    batch_size: int
    num_heads: int
    num_nodes: int
    context: int

    def __str__(self) -> str:
        return f"B {self.batch_size}, H {self.num_heads}, T {self.num_nodes}, L {self.context}"

    @classmethod
    def parse(cls, text: str) -> Shape:
        """From ``"B,H,T,L"``."""
        try:
            return cls(*map(int, text.split(",")))
        except (TypeError, ValueError):
            raise ValueError(f"a shape must look like 8,8,64,16384 (B,H,T,L); got {text!r}"
                             ) from None


#: Query heads of whole models (``num_attention_heads`` of their published config.json; of
#: Kimi K3's gated MLA layers, which have no rotary part but the same rows of 512 + 64); tensor
#: parallelism deals them out.
MODEL_HEADS = {"kimi-k2": 64, "kimi-k3": 96, "deepseek-v2-lite": 16, "deepseek-v3": 128}

CONTEXTS = tuple(1024 * 2**i for i in range(8))

#: What a model is measured on: requests and context of each; nodes of a tree. Finer steps are in
#: the presets ``context``, ``nodes`` and ``heads``.
MODEL_BATCHES = ((1, 16384), (8, 8192), (1, 1024), (1, 131072), (64, 8192), (1, 4096))
MODEL_NODES = (8, 64)

#: Shapes with more arithmetic than this are left out of the models' presets: the serial kernels
#: would take more than 0.1 s for each of their calls.
MODEL_FLOPS = 2.4e12


def _model(heads: int) -> tuple[Shape, ...]:
    """A model at TP 1, 2, 4 and 8."""
    shapes = [Shape(b, heads // tp, nodes, context)
              for b, context in MODEL_BATCHES for nodes in MODEL_NODES for tp in (1, 2, 4, 8)]
    return tuple(s for s in shapes
                 if attention_flops(*dataclasses.astuple(s)) <= MODEL_FLOPS)


#: Shapes by name. ``spine``: the project's table of targets; ``context``, ``nodes`` and
#: ``heads``: one of them swept; a model's name: its heads at tensor parallelism 1 to 8; ``grid``:
#: all of these.
PRESETS: dict[str, tuple[Shape, ...]] = {
    "spine": (
        Shape(1, 8, 8, 16384), Shape(1, 8, 16, 16384), Shape(1, 8, 64, 16384),
        Shape(1, 8, 64, 131072), Shape(8, 8, 1, 16384), Shape(8, 8, 8, 16384),
        Shape(32, 8, 8, 4096), Shape(8, 8, 16, 16384), Shape(8, 8, 64, 16384),
        Shape(16, 8, 32, 8192), Shape(1, 64, 8, 16384), Shape(1, 12, 8, 16384),
        Shape(4, 128, 4, 8192),
    ),
    "context": tuple(Shape(1, 8, t, c) for t in (8, 16, 64) for c in CONTEXTS),
    "nodes": tuple(Shape(1, 8, t, c) for c in (4096, 16384, 65536)
                   for t in (1, 2, 4, 8, 16, 32, 64, 128, 256)),
    "heads": tuple(Shape(1, h, t, 16384) for t in (8, 64) for h in (4, 8, 16, 32, 64, 128)),
    "small": (Shape(1, 8, 8, 256), Shape(1, 8, 1, 256), Shape(4, 8, 8, 256)),
    **{name: _model(heads) for name, heads in MODEL_HEADS.items()},
}

#: All of them, each shape once: what a card's run holds. What matters most comes first, as a run
#: may be stopped; then the models, one pair of requests and context after another.
PRESETS["grid"] = tuple(dict.fromkeys(
    [s for name in ("spine", "nodes", "context", "heads", "small") for s in PRESETS[name]]
    + sorted((s for name in MODEL_HEADS for s in PRESETS[name]),
             key=lambda s: MODEL_BATCHES.index((s.batch_size, s.context)))))


def chosen(shapes: Sequence[str] | None, presets: Sequence[str] | None) -> list[Shape]:
    """Shapes of a command line, each once: those written out, then those of presets; of
    ``spine`` where neither is given."""
    found = [Shape.parse(text) for text in shapes or []]
    for preset in presets or ([] if found else ["spine"]):
        found += PRESETS[preset]
    return list(dict.fromkeys(found))


#: Kinds of draft by the name that recorded data has: what a tree verify is measured on, and what
#: a provider without a tree mask can take.
TREES: dict[str, Callable[[int], DraftTree]] = {"3-ary": lambda n: kary(3, n), "chain": chain}


@dataclasses.dataclass
class Workload:
    """Inputs of one shape: a pool of several regions, and for each region its queries, batch,
    and outputs."""

    shape: Shape
    pool: torch.Tensor
    q: list[torch.Tensor]
    batches: list[VerifyBatch]
    out: torch.Tensor
    lse: torch.Tensor
    tree: str = "3-ary"
    sm_scale: float = 192**-0.5
    layout: KVLayout = KVLayout.LATENT_FIRST

    @property
    def regions(self) -> int:
        return len(self.batches)

    def slots(self, region: int) -> torch.Tensor:
        """Pool slots of a region's tokens, ``[batch_size, context + num_nodes]`` int32: of each
        request the prefix, then its drafts. What peers read that count the drafts as part of
        the cache."""
        batch, shape = self.batches[region], self.shape
        return torch.cat([batch.kv_indices.view(shape.batch_size, shape.context),
                          batch.draft_slots.view(shape.batch_size, shape.num_nodes)], dim=1)

    @functools.cached_property
    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The float64 oracle's ``(out, lse)`` of region 0."""
        latent, rope = self.layout.split(self.q[0])
        return verify_attention_reference(latent, rope, self.pool, self.batches[0],
                                          sm_scale=self.sm_scale, layout=self.layout)


def make_workload(shape: Shape, device: torch.device | str = "cuda", *,
                  contexts: Sequence[int] | None = None, tree: str = "3-ary",
                  seed: int = 0, dtype: torch.dtype = torch.bfloat16,
                  l2_bytes: int | None = None) -> Workload:
    """Random inputs whose regions together exceed twice the L2, at least 2 and at most 128 of
    them (short contexts then stay partly warm; the recorded ``regions`` say so). The same seed
    gives the same numbers for every ``tree``, a key of :data:`TREES`.

    Args:
        contexts: ``[batch_size]``, where requests have prefixes of their own lengths; peers and
            :meth:`Workload.slots` take equal ones alone.
    """
    if contexts is None:
        contexts = [shape.context] * shape.batch_size
    if l2_bytes is None:
        gpu = local_gpu()
        l2_bytes = gpu.l2 if gpu else 0
    each = sum(contexts) + shape.batch_size * shape.num_nodes
    regions = min(max(2, -(-2 * l2_bytes // (each * 576 * dtype.itemsize))), 128)
    slots = regions * each
    ends = np.cumsum(np.add(contexts, shape.num_nodes))[:-1]
    generator = torch.Generator(device=device).manual_seed(seed)
    pool = torch.empty(slots, 576, dtype=dtype, device=device).normal_(generator=generator)
    rng = np.random.default_rng(seed)
    draft = TREES[tree](shape.num_nodes)
    tokens = shape.batch_size * shape.num_nodes
    q, batches = [], []
    for region in np.split(rng.permutation(slots), regions):
        requests = np.split(region, ends)
        batches.append(VerifyBatch.from_requests(
            [draft] * shape.batch_size, list(contexts),
            [r[: -shape.num_nodes] for r in requests],
            draft_slots=[r[-shape.num_nodes:] for r in requests], device=device))
        q.append(torch.empty(tokens, shape.num_heads, 576, dtype=dtype,
                             device=device).normal_(generator=generator))
    out = torch.full((tokens, shape.num_heads, 512), torch.nan, dtype=dtype, device=device)
    lse = torch.full((tokens, shape.num_heads), torch.nan, device=device)
    return Workload(shape, pool, q, batches, out, lse, tree)
