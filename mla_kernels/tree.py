"""Draft trees: what a drafter proposes and a verifier checks in one pass.

A tree is stored as ``parents``: node 0 is the root (the last accepted token, whose successor
the target model is about to produce), and each other node names its parent, which has a
smaller index. Everything else follows from that: depth, path, and which nodes a node may
attend to, namely its ancestors and itself.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

import numpy as np

#: Nodes a tree may have, set by the kernels' mask words: 32 words of 32 bits.
MAX_NODES = 1024


@dataclasses.dataclass(frozen=True, eq=False)
class DraftTree:
    """A draft tree.

    Args:
        parents: ``[n]`` integers; ``parents[0] == -1`` and ``0 <= parents[i] < i`` for every
            other node, which is how drafters emit them and what makes a cycle impossible.
        tokens: ``[n]`` token ids or, where no drafter ran, ranks among the siblings'
            candidates; optional.
        log_probs: ``[n]`` natural log of the probability that the node's whole path is
            accepted, as the drafter estimates it; 0 at the root; optional.

    Raises:
        TypeError: ``parents`` is not made of integers.
        ValueError: no nodes, more than :data:`MAX_NODES`, a root that is not node 0, a parent
            that does not come before its child (this covers cycles and nodes that name
            themselves), or ``tokens`` or ``log_probs`` of another length.
    """

    parents: np.ndarray
    tokens: np.ndarray | None = None
    log_probs: np.ndarray | None = None

    def __post_init__(self) -> None:
        given = np.asarray(self.parents)
        if given.size and not np.issubdtype(given.dtype, np.integer):
            raise TypeError(f"parents must be integers; got dtype {given.dtype}")
        parents = given.astype(np.int64).reshape(-1)
        if given.ndim != 1 or parents.size == 0:
            raise ValueError(f"parents must be [n] with n >= 1; got shape {list(given.shape)}")
        n = parents.size
        if n > MAX_NODES:
            raise ValueError(f"parents has {n} nodes; at most {MAX_NODES} are supported")
        if parents[0] != -1:
            raise ValueError(f"parents[0] must be -1 (node 0 is the root); got {parents[0]}")
        index = np.arange(n)
        bad = np.flatnonzero((parents[1:] < 0) | (parents[1:] >= index[1:])) + 1
        if bad.size:
            i = int(bad[0])
            what = "itself" if parents[i] == i else f"{parents[i]}"
            raise ValueError(
                f"parents[{i}] must be in 0 .. {i - 1} (a parent comes before its child); got "
                f"{what}"
            )
        parents.setflags(write=False)
        object.__setattr__(self, "parents", parents)
        for name, dtype in (("tokens", np.int64), ("log_probs", np.float64)):
            value = getattr(self, name)
            if value is not None:
                array = np.array(value, dtype=dtype)
                if array.shape != (n,):
                    raise ValueError(f"{name} must be [{n}], one a node; got {list(array.shape)}")
                array.setflags(write=False)
                object.__setattr__(self, name, array)

    # -- what parents imply ---------------------------------------------------------------

    def __len__(self) -> int:
        return self.parents.size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DraftTree) and np.array_equal(self.parents, other.parents)

    def __hash__(self) -> int:
        return hash(self.parents.tobytes())

    def __repr__(self) -> str:
        widths = "/".join(map(str, self.nodes_per_depth))
        return f"DraftTree({len(self)} nodes, depth {self.depth}, nodes per depth {widths})"

    @cached_property
    def depths(self) -> np.ndarray:
        """``[n]`` edges from the root: 0 for the root, 1 for its children. The position of a
        node in the sequence is the prefix length plus its depth."""
        depths = np.zeros(len(self), dtype=np.int64)
        for i in range(1, len(self)):
            depths[i] = depths[self.parents[i]] + 1
        return depths

    @property
    def depth(self) -> int:
        return int(self.depths.max())

    @property
    def nodes_per_depth(self) -> list[int]:
        return np.bincount(self.depths).tolist()

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """The children of each node, in index order."""
        kids: list[list[int]] = [[] for _ in range(len(self))]
        for i in range(1, len(self)):
            kids[self.parents[i]].append(i)
        return tuple(map(tuple, kids))

    @property
    def leaves(self) -> list[int]:
        return [i for i, kids in enumerate(self.children) if not kids]

    def path(self, node: int) -> list[int]:
        """Nodes from the root to ``node``, both included."""
        if not 0 <= node < len(self):
            raise ValueError(f"node must be in 0 .. {len(self) - 1}; got {node}")
        path = [int(node)]
        while path[-1]:
            path.append(int(self.parents[path[-1]]))
        return path[::-1]

    @property
    def paths(self) -> list[list[int]]:
        """Root-to-leaf paths, one a leaf."""
        return [self.path(leaf) for leaf in self.leaves]

    @cached_property
    def ancestor_mask(self) -> np.ndarray:
        """``[n, n]`` bool: entry ``[i, j]`` says that node ``i`` attends to node ``j``, which
        is so for ``i`` itself and its ancestors."""
        mask = np.eye(len(self), dtype=bool)
        for i in range(1, len(self)):
            mask[i] |= mask[self.parents[i]]
        mask.setflags(write=False)
        return mask

    @property
    def packed_mask(self) -> np.ndarray:
        """:attr:`ancestor_mask` as bits: see :func:`pack_mask`."""
        return pack_mask(self.ancestor_mask)

    @property
    def acceptance_length(self) -> float:
        """Expected tokens a verify step yields, the bonus token included, if acceptance
        follows the drafter's own estimate: the sum of path probabilities over all nodes,
        since a node adds one token exactly when its whole path is accepted.

        Raises:
            ValueError: the tree has no ``log_probs``.
        """
        if self.log_probs is None:
            raise ValueError("log_probs is None: this tree was built without probabilities")
        return float(np.exp(self.log_probs).sum())


def pack_mask(mask: np.ndarray) -> np.ndarray:
    """A boolean mask as 32-bit words.

    Args:
        mask: ``[rows, n]`` bool, or anything that numpy reads as such.

    Returns:
        ``[rows, ceil(n / 32)]`` uint32. Bit ``j % 32`` of word ``j // 32`` is column ``j``;
        bits past ``n`` are 0.
    """
    mask = np.asarray(mask, dtype=bool)
    if mask.ndim != 2:
        raise ValueError(f"mask must be [rows, n]; got shape {list(mask.shape)}")
    rows, n = mask.shape
    words = -(-n // 32)
    padded = np.zeros((rows, words * 32), dtype=bool)
    padded[:, :n] = mask
    return np.packbits(padded, axis=1, bitorder="little").view("<u4").astype(np.uint32)


def unpack_mask(words: np.ndarray, n: int) -> np.ndarray:
    """The inverse of :func:`pack_mask`: ``[rows, words]`` uint32 to ``[rows, n]`` bool."""
    words = np.ascontiguousarray(words, dtype="<u4")
    if words.ndim != 2 or words.shape[1] * 32 < n:
        raise ValueError(f"words must be [rows, >= {-(-n // 32)}]; got shape {list(words.shape)}")
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
    return bits[:, :n].astype(bool)


# -- builders -----------------------------------------------------------------------------


def chain(num_nodes: int) -> DraftTree:
    """``num_nodes`` nodes in a line, the root included: speculation without branches."""
    if num_nodes < 1:
        raise ValueError(f"num_nodes must be at least 1; got {num_nodes}")
    return DraftTree(np.arange(num_nodes) - 1)


def kary(branching: int | Sequence[int], num_nodes: int | None = None) -> DraftTree:
    """A tree that branches the same way at every node of a level, filled breadth first.

    Args:
        branching: children of each node: one number for all levels (``num_nodes`` must then
            be given), or one for each level.
        num_nodes: stop at this many nodes, the root included.
    """
    if isinstance(branching, (int, np.integer)):
        if num_nodes is None:
            raise ValueError("num_nodes must be given when branching is one number")
        levels: Iterable[int] = itertools.repeat(int(branching))
    else:
        levels = list(branching)
    limit = MAX_NODES + 1 if num_nodes is None else num_nodes
    if limit < 1:
        raise ValueError(f"num_nodes must be at least 1; got {num_nodes}")
    parents, frontier = [-1], [0]
    for width in levels:
        if width < 1:
            raise ValueError(f"branching must be at least 1 everywhere; got {width}")
        begin = len(parents)
        wanted = itertools.chain.from_iterable(itertools.repeat(p, width) for p in frontier)
        parents.extend(itertools.islice(wanted, limit - len(parents)))
        frontier = list(range(begin, len(parents)))
        if len(parents) >= limit:
            break
    return DraftTree(np.array(parents))


def from_choices(choices: Iterable[Sequence[int]]) -> DraftTree:
    """A tree from a list of paths of ranks, the form of Medusa's and EAGLE-1's static trees.

    Args:
        choices: each entry a path below the root: ``(0,)`` is the first candidate after the
            root, ``(0, 2)`` the third candidate after that one.

    Returns:
        A tree ordered by depth, then by path, with ``tokens`` holding each node's rank (0 at
        the root).

    Raises:
        ValueError: an empty path, a negative rank, a path given twice, or a path whose parent
            is not in the list.
    """
    paths = sorted((tuple(int(r) for r in c) for c in choices), key=lambda p: (len(p), p))
    index: dict[tuple[int, ...], int] = {(): 0}
    parents, ranks = [-1], [0]
    for path in paths:
        if not path or min(path) < 0:
            raise ValueError(f"choices must be non-empty paths of ranks >= 0; got {list(path)}")
        if path in index:
            raise ValueError(f"choices has {list(path)} twice")
        if path[:-1] not in index:
            raise ValueError(f"choices has {list(path)} but not its parent {list(path[:-1])}")
        index[path] = len(parents)
        parents.append(index[path[:-1]])
        ranks.append(path[-1])
    return DraftTree(np.array(parents), tokens=np.array(ranks))


def _log_marginals(log_marginals: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each position's candidates, most probable first: ``(token ids, log-probabilities)``."""
    table = np.asarray(log_marginals, dtype=np.float64)
    if table.ndim != 2 or 0 in table.shape:
        raise ValueError(
            f"log_marginals must be [positions, vocabulary]; got shape {list(table.shape)}"
        )
    if np.isnan(table).any() or (table > 1e-6).any():
        raise ValueError(
            "log_marginals must be natural-log probabilities (at most 0, no NaN); largest value "
            f"{np.nanmax(table):.3g}, NaN: {bool(np.isnan(table).any())}"
        )
    order = np.argsort(-table, axis=1, kind="stable")
    return order, np.take_along_axis(table, order, axis=1)


def ddtree(log_marginals: np.ndarray, node_budget: int) -> DraftTree:
    """The DDTree of a block drafter's marginals (arXiv 2604.12989, section on tree building).

    A block-diffusion drafter gives, in one pass, a distribution for each of the next
    positions. A path of ranks then has the product of its positions' probabilities, and the
    tree wanted is the ``node_budget`` most probable paths; they form a tree, because a prefix
    is at least as probable as any of its extensions. A heap finds them without listing the
    others: popping a node pushes its next sibling and its first child.

    Args:
        log_marginals: ``[positions, vocabulary]`` natural-log probabilities, row ``d`` for the
            tokens at depth ``d + 1``; need not be sorted. -inf marks a token never drafted.
        node_budget: drafted nodes to take. Fewer come back when fewer paths have a
            probability above 0.

    Returns:
        A tree of ``node_budget + 1`` nodes (the root is the token already accepted), in the
        order in which they were popped, with ``tokens`` (vocabulary ids; -1 at the root) and
        ``log_probs``.
    """
    if node_budget < 0 or node_budget + 1 > MAX_NODES:
        raise ValueError(f"node_budget must be in 0 .. {MAX_NODES - 1}; got {node_budget}")
    token_ids, log_probs = _log_marginals(log_marginals)
    positions, candidates = log_probs.shape
    parents, tokens, scores = [-1], [-1], [0.0]
    # Entries: (-score, serial, parent, depth, rank). The serial number, in the order of the
    # pushes, settles ties, so that equal scores give one tree and not several.
    serial = itertools.count()
    heap: list[tuple[float, int, int, int, int]] = []

    def push(parent: int, depth: int, rank: int) -> None:
        if depth < positions and rank < candidates and log_probs[depth, rank] > -np.inf:
            score = scores[parent] + log_probs[depth, rank]
            heapq.heappush(heap, (-score, next(serial), parent, depth, rank))

    push(0, 0, 0)
    while heap and len(parents) <= node_budget:
        negative, _, parent, depth, rank = heapq.heappop(heap)
        node = len(parents)
        parents.append(parent)
        tokens.append(int(token_ids[depth, rank]))
        scores.append(-negative)
        push(parent, depth, rank + 1)
        push(node, depth + 1, 0)
    return DraftTree(np.array(parents), np.array(tokens), np.array(scores))


def eagle(
    steps: int,
    topk: int,
    num_draft_tokens: int,
    candidates: Callable[[tuple[int, ...]], Sequence[float]] | None = None,
) -> DraftTree:
    """EAGLE-2's dynamic tree with an engine's three settings (in SGLang
    ``speculative_num_steps``, ``speculative_eagle_topk``, ``speculative_num_draft_tokens``).

    The drafter runs ``steps`` times. The first pass gives ``topk`` candidates after the root;
    each later pass extends the ``topk`` most probable of the newest ones by ``topk``
    candidates each. Of all candidates ever made, the ``num_draft_tokens - 1`` most probable
    stay.

    Args:
        candidates: maps a path of ranks below the root to the natural-log probabilities of
            its ``topk`` next candidates, most probable first. Default: rank ``r`` has
            probability ``0.7 * 0.3 ** r`` everywhere, a shape to look at and not a measured
            drafter.

    Returns:
        A tree ordered by depth, then by probability, with ``tokens`` holding ranks (0 at the
        root) and ``log_probs``. It has fewer than ``num_draft_tokens`` nodes when the steps
        made fewer candidates.
    """
    for name, value in (("steps", steps), ("topk", topk), ("num_draft_tokens", num_draft_tokens)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1; got {value}")
    if num_draft_tokens > MAX_NODES:
        raise ValueError(f"num_draft_tokens must be at most {MAX_NODES}; got {num_draft_tokens}")
    if candidates is None:
        shape = [float(np.log(0.7 * 0.3**r)) for r in range(topk)]

        def candidates(path: tuple[int, ...]) -> Sequence[float]:
            return shape

    made: list[tuple[float, tuple[int, ...]]] = []
    beam: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for _ in range(steps):
        fresh = []
        for score, path in beam:
            for rank, value in zip(range(topk), candidates(path), strict=False):
                fresh.append((score + float(value), path + (rank,)))
        made.extend(fresh)
        beam = sorted(fresh, key=lambda c: -c[0])[:topk]
    # Stable sort: among equals the earlier step wins, so a parent is never dropped for its
    # own child.
    kept = sorted(made, key=lambda c: -c[0])[: num_draft_tokens - 1]
    kept.sort(key=lambda c: (len(c[1]), -c[0]))
    index: dict[tuple[int, ...], int] = {(): 0}
    parents, ranks, scores = [-1], [0], [0.0]
    for score, path in kept:
        index[path] = len(parents)
        parents.append(index[path[:-1]])
        ranks.append(path[-1])
        scores.append(score)
    return DraftTree(np.array(parents), np.array(ranks), np.array(scores))
