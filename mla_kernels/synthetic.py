"""Numbers that no model made, for the notebooks and their tests: what shape they have is said
here, and every figure drawn from them says that they are made up.

Two subjects need them: attention over a cache whose row is read in the wrong order, and draft
trees over a drafter's marginals.
"""

from __future__ import annotations

import dataclasses
import heapq

import numpy as np
import torch

from .batch import VerifyBatch
from .layout import KVLayout
from .reference import MLAWeights, attend, relative_error
from .tree import DraftTree, chain, ddtree, eagle, kary

# -- attention ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class AttentionInputs:
    """One request in decode: ``q_latent`` ``[T, H, 512]`` and ``q_rope`` ``[T, H, 64]``,
    ``latent`` ``[N, 512]`` and ``rope`` ``[N, 64]``, all float64."""

    q_latent: torch.Tensor
    q_rope: torch.Tensor
    latent: torch.Tensor
    rope: torch.Tensor
    sm_scale: float


def attention_inputs(
    tokens: int = 512,
    *,
    heads: int = 8,
    sharpness: float = 3.0,
    channel_mean: float = 0.0,
    layout: KVLayout = KVLayout.LATENT_FIRST,
    seed: int = 0,
) -> AttentionInputs:
    """Independent normal numbers with two properties set.

    Args:
        tokens: rows in the cache.
        sharpness: standard deviation of the logits of one query. At 0 every token gets the
            same weight; at 5 a few tokens get nearly all of it.
        channel_mean: standard deviation, over the latent's channels, of a mean that all
            tokens share, next to the standard deviation 1 of the tokens around it. Attention
            averages over tokens, so this part stays in every output.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    sm_scale = 192**-0.5
    r, d = layout.kv_lora_rank, layout.qk_rope_head_dim
    latent = normal(tokens, r) + channel_mean * normal(r)
    rope = normal(tokens, d)
    # Over the tokens, the dot product of unit normals has the standard deviation sqrt(r + d).
    size = sharpness / (sm_scale * (r + d) ** 0.5)
    return AttentionInputs(size * normal(1, heads, r), size * normal(1, heads, d), latent, rope,
                           sm_scale)


#: What a reader may get wrong: (query in the other order, value from the other slice).
MISREADINGS: dict[str, tuple[bool, bool]] = {
    "right": (False, False),
    "value": (False, True),
    "scores": (True, False),
    "both": (True, True),
}


def misread(
    inputs: AttentionInputs, layout: KVLayout, *, scores: bool = False, value: bool = False
) -> torch.Tensor:
    """Attention by a reader who takes a cache of ``layout`` for one of the other order.

    Args:
        scores: the reader lays its query out in the wrong order.
        value: the reader takes the value from the wrong slice.

    Returns:
        ``[T, H, kv_lora_rank]`` float64; the right answer when neither is set.
    """
    cache = layout.concat(inputs.latent, inputs.rope)
    query = (layout.swapped if scores else layout).concat(inputs.q_latent, inputs.q_rope)
    values = (layout.swapped if value else layout).value(cache)
    visible = torch.ones(len(query), len(cache), dtype=torch.bool)
    return attend(query, cache, values, visible, sm_scale=inputs.sm_scale)[0]


def misreadings(
    inputs: AttentionInputs, layout: KVLayout = KVLayout.LATENT_FIRST
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """The outputs of every entry of :data:`MISREADINGS`, and their relative errors."""
    outputs = {name: misread(inputs, layout, scores=scores, value=value)
               for name, (scores, value) in MISREADINGS.items()}
    errors = {name: relative_error(out, outputs["right"]) for name, out in outputs.items()}
    return outputs, errors


def suspect(inputs: AttentionInputs, layout: KVLayout = KVLayout.LATENT_FIRST) -> torch.Tensor:
    """The output of a kernel with one of the three faults of :data:`MISREADINGS`, for the
    exercise of notebook 01. Reading on spoils it."""
    return misread(inputs, layout, scores=True, value=True)


@dataclasses.dataclass(frozen=True)
class ProjectedInputs:
    """What absorption starts from: un-rotated and rotated queries, the latent rows, and the
    projections of each head."""

    q_nope: torch.Tensor
    q_rope: torch.Tensor
    latent: torch.Tensor
    rope: torch.Tensor
    weights: MLAWeights
    sm_scale: float


def projected_inputs(
    tokens: int = 256, *, heads: int = 8, qk_nope_head_dim: int = 128, v_head_dim: int = 128,
    layout: KVLayout = KVLayout.LATENT_FIRST, seed: int = 0,
) -> ProjectedInputs:
    """Normal numbers in float64; the projections scaled so that keys and values have the
    standard deviation 1."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    r, d = layout.kv_lora_rank, layout.qk_rope_head_dim
    weights = MLAWeights(w_uk=normal(heads, qk_nope_head_dim, r) / r**0.5,
                         w_uv=normal(heads, v_head_dim, r) / r**0.5)
    return ProjectedInputs(normal(1, heads, qk_nope_head_dim), normal(1, heads, d),
                           normal(tokens, r), normal(tokens, d), weights,
                           (qk_nope_head_dim + d) ** -0.5)


# -- draft trees --------------------------------------------------------------------------


def log_marginals(
    positions: int = 7, *, first: float = 0.85, decay: float = 0.96, tail: float = 0.5,
    candidates: int = 64,
) -> np.ndarray:
    """The marginals of a made-up block drafter.

    At depth ``d`` its best token has the probability ``first * decay ** (d - 1)``. The rest is
    spread over the other candidates, each with ``tail`` times the probability of the one
    before.

    Returns:
        ``[positions, candidates]`` natural-log probabilities. What lies beyond the last
        candidate is missing, so a row sums to slightly less than 1.
    """
    for name, value in (("first", first), ("decay", decay)):
        if not 0 < value <= 1:
            raise ValueError(f"{name} must be above 0 and at most 1; got {value}")
    if not 0 <= tail < 1:
        raise ValueError(f"tail must be at least 0 and below 1; got {tail}")
    if positions < 1 or candidates < 1:
        raise ValueError(f"positions and candidates must be at least 1; got {positions}, "
                         f"{candidates}")
    best = first * decay ** np.arange(positions)
    others = (1 - best)[:, None] * (1 - tail) * tail ** np.arange(candidates - 1)
    with np.errstate(divide="ignore"):
        return np.log(np.concatenate([best[:, None], others], axis=1))


def with_log_probs(tree: DraftTree, log_marginals: np.ndarray) -> DraftTree:
    """``tree`` with the path probabilities that a drafter's marginals give it.

    The first child of a node gets the most probable candidate of its depth, the second child
    the next one, and so on. A node deeper than the drafter's block has probability 0: no
    token was proposed there.
    """
    ranked = -np.sort(-np.asarray(log_marginals, dtype=np.float64), axis=1)
    positions, candidates = ranked.shape
    log_probs = np.zeros(len(tree))
    for node, kids in enumerate(tree.children):
        depth = tree.depths[node]
        for rank, kid in enumerate(kids):
            known = depth < positions and rank < candidates
            log_probs[kid] = log_probs[node] + (ranked[depth, rank] if known else -np.inf)
    return DraftTree(tree.parents, tree.tokens, log_probs)


FAMILIES = ("chain", "k-ary", "EAGLE", "DDTree")


def family_tree(
    family: str, num_nodes: int, log_marginals: np.ndarray, *, branching: int = 2
) -> DraftTree:
    """A tree of one of :data:`FAMILIES` with the path probabilities of ``log_marginals``.

    Args:
        num_nodes: nodes wanted, the root included. Fewer come back where the family cannot
            make that many: a tree is no deeper than the drafter's block, and EAGLE makes
            ``branching`` + ``branching``² × (steps - 1) candidates.
        branching: children a node, for k-ary; ``topk``, for EAGLE.
    """
    positions = len(log_marginals)
    if family == "chain":
        shape = chain(min(num_nodes, positions + 1))
    elif family == "k-ary":
        shape = kary([branching] * positions, num_nodes)
    elif family == "EAGLE":
        ranked = -np.sort(-np.asarray(log_marginals), axis=1)
        return eagle(positions, branching, num_nodes,
                     lambda path: ranked[len(path), :branching])
    elif family == "DDTree":
        return ddtree(log_marginals, num_nodes - 1)
    else:
        raise ValueError(f"family must be one of {', '.join(FAMILIES)}; got {family!r}")
    return with_log_probs(shape, log_marginals)


def small_batch(
    drafts: list[DraftTree], prefix_lens: list[int], *, page_size: int, seed: int = 0
) -> tuple[VerifyBatch, int]:
    """A batch small enough to draw, its pages handed out in random order from a pool whose
    page 0 stays free (engines send padded tokens there). Draft tokens follow their prefix and
    share its last page where there is room.

    Returns:
        The batch, and the slots of the pool.
    """
    totals = [n + len(draft) for n, draft in zip(prefix_lens, drafts, strict=True)]
    counts = [-(-total // page_size) for total in totals]
    free = 1 + np.random.default_rng(seed).permutation(sum(counts))
    pages, slots = [], []
    for count, begin, end in zip(counts, prefix_lens, totals, strict=True):
        own, free = free[:count], free[count:]
        position = np.arange(begin, end)
        pages.append(own)
        slots.append(own[position // page_size] * page_size + position % page_size)
    batch = VerifyBatch.from_requests(drafts, prefix_lens, pages, page_size=page_size,
                                      draft_slots=slots)
    return batch, (sum(counts) + 1) * page_size


@dataclasses.dataclass(frozen=True)
class HeapStep:
    """One pop of DDTree's heap: what was in it, and what came out.

    ``waiting`` and ``popped`` map paths of ranks to path probabilities.
    """

    waiting: dict[tuple[int, ...], float]
    popped: tuple[tuple[int, ...], float]


def heap_steps(log_marginals: np.ndarray, node_budget: int) -> list[HeapStep]:
    """DDTree's heap, watched while it works: the algorithm of :func:`mla_kernels.tree.ddtree`
    with paths instead of nodes, and its state written down before each pop."""
    ranked = -np.sort(-np.asarray(log_marginals, dtype=np.float64), axis=1)
    positions, candidates = ranked.shape
    heap: list[tuple[float, int, tuple[int, ...]]] = []
    serial = 0

    def push(path: tuple[int, ...]) -> None:
        nonlocal serial
        if len(path) <= positions and path[-1] < candidates:
            score = sum(ranked[depth, rank] for depth, rank in enumerate(path))
            if score > -np.inf:
                heapq.heappush(heap, (-score, serial, path))
                serial += 1

    push((0,))
    steps: list[HeapStep] = []
    while heap and len(steps) < node_budget:
        waiting = {path: float(np.exp(-score)) for score, _, path in heap}
        score, _, path = heapq.heappop(heap)
        steps.append(HeapStep(waiting, (path, float(np.exp(-score)))))
        push(path[:-1] + (path[-1] + 1,))
        push(path + (0,))
    return steps
