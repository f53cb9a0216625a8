"""tree: what parents imply, against plain walks; builders, against brute force."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from mla_kernels.tree import (
    MAX_NODES,
    DraftTree,
    chain,
    ddtree,
    eagle,
    from_choices,
    kary,
    pack_mask,
    unpack_mask,
)

SIZES = (1, 2, 31, 32, 33, 64, 1024)


def random_tree(rng: np.random.Generator, n: int) -> DraftTree:
    """Any parent before the child, with a bias (another one each time) from stars to chains."""
    reach = rng.integers(1, n + 1)
    parents = [-1] + [int(rng.integers(max(0, i - reach), i)) for i in range(1, n)]
    return DraftTree(np.array(parents))


def walk(parents: list[int], node: int) -> list[int]:
    """Node, parent, grandparent, … root."""
    steps = [node]
    while parents[steps[-1]] != -1:
        steps.append(parents[steps[-1]])
    return steps


# -- what parents imply -------------------------------------------------------------------


@pytest.mark.parametrize("n", SIZES)
def test_everything_follows_from_parents(n, rng):
    tree = random_tree(rng, n)
    parents = tree.parents.tolist()
    assert len(tree) == n
    assert tree.ancestor_mask.shape == (n, n) and tree.ancestor_mask.dtype == bool
    for i in range(n):
        up = walk(parents, i)
        assert tree.depths[i] == len(up) - 1
        assert np.flatnonzero(tree.ancestor_mask[i]).tolist() == sorted(up)
        assert tree.children[i] == tuple(j for j in range(n) if parents[j] == i)
    for i in rng.integers(0, n, size=20).tolist():
        assert tree.path(i) == walk(parents, i)[::-1]
    assert tree.depth == max(tree.depths)
    assert tree.nodes_per_depth == [int((tree.depths == d).sum()) for d in range(tree.depth + 1)]
    inner = set(parents)
    assert tree.leaves == [i for i in range(n) if i not in inner]
    assert tree.paths == [walk(parents, leaf)[::-1] for leaf in tree.leaves]
    assert {i for path in tree.paths for i in path} == set(range(n))


def test_equality_is_of_shape(rng):
    tree = random_tree(rng, 40)
    same = DraftTree(tree.parents.tolist(), tokens=np.arange(40))
    assert same == tree and hash(same) == hash(tree)
    parents = tree.parents.copy()
    parents[39] = (parents[39] + 1) % 39
    assert DraftTree(parents) != tree
    assert chain(3) != chain(4) and chain(3) != "DraftTree"


def test_a_tree_cannot_be_changed_afterwards(rng):
    given = np.array([-1, 0, 1, 1])
    tree = DraftTree(given, tokens=[5, 6, 7, 8], log_probs=[0, -1, -2, -3])
    given[3] = 2
    assert tree.parents.tolist() == [-1, 0, 1, 1]
    for array in (tree.parents, tree.tokens, tree.log_probs, tree.ancestor_mask):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    assert tree.tokens.tolist() == [5, 6, 7, 8] and tree.log_probs.tolist() == [0, -1, -2, -3]


def test_repr_says_the_shape():
    assert repr(kary(2, 6)) == "DraftTree(6 nodes, depth 2, nodes per depth 1/2/3)"


@pytest.mark.parametrize(("parents", "error", "message"), [
    ([], ValueError, r"parents must be \[n\] with n >= 1; got shape \[0\]"),
    ([[-1, 0]], ValueError, r"parents must be \[n\] with n >= 1; got shape \[1, 2\]"),
    (-1, ValueError, r"got shape \[\]"),
    ([-1.0, 0.0], TypeError, "parents must be integers; got dtype float64"),
    ([True, False], TypeError, "parents must be integers; got dtype bool"),
    ([0], ValueError, r"parents\[0\] must be -1 \(node 0 is the root\); got 0"),
    ([-2, 0], ValueError, r"parents\[0\] must be -1 .*got -2"),
    ([-1, 1], ValueError, r"parents\[1\] must be in 0 .. 0 .*got itself"),
    ([-1, 0, 3, 1], ValueError, r"parents\[2\] must be in 0 .. 1 .*got 3"),
    ([-1, 0, -1], ValueError, r"parents\[2\] must be in 0 .. 1 .*got -1"),
    ([-1, 2, 1], ValueError, r"parents\[1\] .*got 2"),  # a cycle names a later node somewhere
    ([-1] + [0] * 1024, ValueError, "parents has 1025 nodes; at most 1024"),
], ids=lambda v: str(v)[:24] if isinstance(v, list | int) else "")
def test_refused_parents(parents, error, message):
    with pytest.raises(error, match=message):
        DraftTree(parents)


@pytest.mark.parametrize("name", ["tokens", "log_probs"])
def test_refused_companions(name):
    for value, shape in (([1, 2, 3], r"\[3\]"), ([[1, 2]], r"\[1, 2\]"), (1, r"\[\]")):
        with pytest.raises(ValueError, match=rf"{name} must be \[2\], one a node; got {shape}"):
            DraftTree([-1, 0], **{name: value})


def test_refused_nodes():
    for node in (-1, 5):
        with pytest.raises(ValueError, match=f"node must be in 0 .. 4; got {node}"):
            chain(5).path(node)


# -- bits ---------------------------------------------------------------------------------


@pytest.mark.parametrize("n", SIZES)
def test_pack_puts_each_column_in_its_bit(n, rng):
    rows = 3 if n == 1024 else 17
    mask = rng.random((rows, n)) < rng.random()
    words = pack_mask(mask)
    assert words.shape == (rows, -(-n // 32)) and words.dtype == np.uint32
    for i in range(rows):
        want = [0] * words.shape[1]
        for j in range(n):
            want[j // 32] |= int(mask[i, j]) << (j % 32)
        assert words[i].tolist() == want  # bits past n are 0, or this fails
    assert np.array_equal(unpack_mask(words, n), mask)
    # Kernels hold the words as int32; more words than needed do no harm.
    wider = np.concatenate([words, rng.integers(0, 2**32, (rows, 2), dtype=np.uint32)], axis=1)
    assert np.array_equal(unpack_mask(wider.view(np.int32), n), mask)


@pytest.mark.parametrize("n", SIZES)
def test_packed_mask_is_the_ancestor_mask(n, rng):
    tree = random_tree(rng, n)
    assert np.array_equal(unpack_mask(tree.packed_mask, n), tree.ancestor_mask)


def test_refused_masks():
    with pytest.raises(ValueError, match=r"mask must be \[rows, n\]; got shape \[4\]"):
        pack_mask(np.zeros(4, dtype=bool))
    with pytest.raises(ValueError, match=r"words must be \[rows, >= 2\]; got shape \[3, 1\]"):
        unpack_mask(np.zeros((3, 1), dtype=np.uint32), 33)
    with pytest.raises(ValueError, match=r"words must be \[rows, >= 1\]; got shape \[3\]"):
        unpack_mask(np.zeros(3, dtype=np.uint32), 5)


# -- chains, k-ary trees, lists of choices ------------------------------------------------


@pytest.mark.parametrize("n", SIZES)
def test_chain(n):
    tree = chain(n)
    assert tree.parents.tolist() == list(range(-1, n - 1))
    assert np.array_equal(tree.ancestor_mask, np.tri(n, dtype=bool))
    assert tree == kary(1, n)


def test_kary_with_one_number(rng):
    for _ in range(30):
        k, n = int(rng.integers(1, 9)), int(rng.integers(1, 300))
        assert kary(k, n).parents.tolist() == [-1] + [(i - 1) // k for i in range(1, n)]


def test_kary_with_a_width_for_each_level(rng):
    for _ in range(30):
        widths = rng.integers(1, 5, size=rng.integers(0, 5)).tolist()
        tree = kary(widths)
        assert tree.nodes_per_depth == [math.prod(widths[:d]) for d in range(len(widths) + 1)]
        for node, kids in enumerate(tree.children):
            depth = tree.depths[node]
            assert len(kids) == (widths[depth] if depth < len(widths) else 0)
        cut = int(rng.integers(1, len(tree) + 1))
        assert kary(widths, cut).parents.tolist() == tree.parents[:cut].tolist()
        assert kary(widths, len(tree) + 5) == tree


@pytest.mark.parametrize(("call", "message"), [
    (lambda: chain(0), "num_nodes must be at least 1; got 0"),
    (lambda: chain(MAX_NODES + 1), "1025 nodes; at most 1024"),
    (lambda: kary(2), "num_nodes must be given when branching is one number"),
    (lambda: kary(2, 0), "num_nodes must be at least 1; got 0"),
    (lambda: kary(0, 5), "branching must be at least 1 everywhere; got 0"),
    (lambda: kary([3, -1, 2]), "branching must be at least 1 everywhere; got -1"),
    (lambda: kary([32, 32]), "1025 nodes; at most 1024"),
    (lambda: kary(4, 2000), "2000 nodes; at most 1024"),
], ids=["chain0", "chain+", "kary-n", "kary0", "k0", "k-1", "levels+", "kary+"])
def test_refused_shapes(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def random_choices(rng: np.random.Generator, count: int) -> list[list[int]]:
    """`count` paths of ranks closed under taking prefixes, in no order: the form of Medusa's
    and EAGLE's static trees."""
    taken: set[tuple[int, ...]] = {()}
    while len(taken) <= count:
        parent = list(taken)[rng.integers(len(taken))]
        if len(parent) < 5:
            taken.add((*parent, int(rng.integers(10))))
    paths = [list(p) for p in taken if p]
    return [paths[i] for i in rng.permutation(count)]


@pytest.mark.parametrize("count", [0, 1, 25, 63, 300])
def test_choices_come_back(count, rng):
    choices = random_choices(rng, count)  # 63 of them and the root: Medusa's 64 nodes
    tree = from_choices(choices)
    assert len(tree) == count + 1
    ranks = [tuple(tree.tokens[tree.path(i)[1:]].tolist()) for i in range(len(tree))]
    assert sorted(ranks[1:]) == sorted(map(tuple, choices))
    assert ranks == sorted(ranks, key=lambda p: (len(p), p))  # by depth, then by path
    assert tree.tokens[0] == 0
    shuffled = [choices[i] for i in rng.permutation(count)]
    assert from_choices(map(tuple, shuffled)) == tree


@pytest.mark.parametrize(("choices", "message"), [
    ([[0], []], r"choices must be non-empty paths of ranks >= 0; got \[\]"),
    ([[0], [0, -1]], r"ranks >= 0; got \[0, -1\]"),
    ([[0], [1], [0]], r"choices has \[0\] twice"),
    ([[0], [1, 0]], r"choices has \[1, 0\] but not its parent \[1\]"),
    ([[0, 0]], r"choices has \[0, 0\] but not its parent \[0\]"),
], ids=str)
def test_refused_choices(choices, message):
    with pytest.raises(ValueError, match=message):
        from_choices(choices)


# -- DDTree -------------------------------------------------------------------------------


def random_marginals(rng: np.random.Generator, positions: int, vocabulary: int,
                     kind: str) -> np.ndarray:
    """Log-probabilities: all distinct, with many ties, or with impossible tokens."""
    if kind == "ties":
        table = np.log(2.0) * -rng.integers(1, 4, (positions, vocabulary)).astype(float)
    else:
        logits = rng.normal(size=(positions, vocabulary)) * rng.uniform(0.2, 4)
        if kind == "impossible":
            logits[rng.random(logits.shape) < 0.4] = -np.inf
            logits[0, rng.integers(vocabulary)] = 0.0
        with np.errstate(invalid="ignore"):
            table = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
        table[np.isneginf(logits)] = -np.inf  # a row of nothing but -inf gave NaN
    return table


def all_paths(table: np.ndarray) -> dict[tuple[int, ...], float]:
    """Every path of tokens with a probability above 0, with its logarithm."""
    found = {}
    for depth in range(1, len(table) + 1):
        for path in itertools.product(range(table.shape[1]), repeat=depth):
            score = sum(table[d, token] for d, token in enumerate(path))
            if score > -np.inf:
                found[path] = float(score)
    return found


def token_paths(tree: DraftTree) -> list[tuple[int, ...]]:
    return [tuple(tree.tokens[tree.path(i)[1:]].tolist()) for i in range(len(tree))]


@pytest.mark.parametrize("kind", ["distinct", "ties", "impossible"])
def test_ddtree_takes_the_most_probable_paths(kind, rng):
    for _ in range(40):
        # One candidate alone is certain, and all its paths tie.
        positions = int(rng.integers(1, 5))
        vocabulary = int(rng.integers(2 if kind == "distinct" else 1, 6))
        table = random_marginals(rng, positions, vocabulary, kind)
        everything = all_paths(table)
        # Now and then more than there are.
        budget = int(rng.integers(0, min(len(everything) * 5 // 4 + 2, MAX_NODES)))
        tree = ddtree(table, budget)
        paths = token_paths(tree)
        assert len(tree) == min(budget, len(everything)) + 1
        assert tree.tokens[0] == -1 and tree.log_probs[0] == 0
        assert len(set(paths)) == len(paths) and set(paths[1:]) <= set(everything)
        np.testing.assert_allclose(tree.log_probs[1:], [everything[p] for p in paths[1:]],
                                   rtol=0, atol=1e-12)
        best = sorted(everything.values(), reverse=True)[:budget]
        np.testing.assert_allclose(np.sort(tree.log_probs[1:])[::-1], best, rtol=0, atol=1e-12)
        # In the order in which a best-first heap pops them.
        assert (np.diff(tree.log_probs) <= 1e-12).all()
        if kind == "distinct":
            assert set(paths[1:]) == set(sorted(everything, key=everything.get)[::-1][:budget])


def test_ddtree_with_more_budget_than_paths():
    table = np.log([[0.5, 0.5, 0.0], [0.0, 1.0, 0.0]], where=np.array(
        [[True, True, False], [False, True, False]]), out=np.full((2, 3), -np.inf))
    tree = ddtree(table, 100)
    assert set(token_paths(tree)) == {(), (0,), (1,), (0, 1), (1, 1)}
    nothing = ddtree(np.full((3, 4), -np.inf), 10)
    assert len(nothing) == 1 and nothing.acceptance_length == 1


def test_ddtree_extends_a_smaller_one(rng):
    """Popping does not depend on the budget, so a tree is a prefix of the larger ones."""
    table = random_marginals(rng, 7, 50, "distinct")
    large = ddtree(table, MAX_NODES - 1)
    assert len(large) == MAX_NODES
    for budget in rng.integers(0, MAX_NODES, size=5).tolist():
        small = ddtree(table, budget)
        assert small.parents.tolist() == large.parents[:budget + 1].tolist()
        assert small.tokens.tolist() == large.tokens[:budget + 1].tolist()


def test_ddtree_of_a_certain_drafter_is_a_chain(rng):
    table = np.full((6, 9), -np.inf)
    sure = rng.integers(0, 9, size=6)
    table[np.arange(6), sure] = 0.0
    tree = ddtree(table, 6)
    assert tree == chain(7) and tree.tokens.tolist() == [-1, *sure]
    assert tree.acceptance_length == 7


@pytest.mark.parametrize(("table", "budget", "message"), [
    (np.zeros((2, 3)), -1, "node_budget must be in 0 .. 1023; got -1"),
    (np.zeros((2, 3)), 1024, "node_budget must be in 0 .. 1023; got 1024"),
    (np.zeros(3), 2, r"log_marginals must be \[positions, vocabulary\]; got shape \[3\]"),
    (np.zeros((0, 3)), 2, r"got shape \[0, 3\]"),
    (np.zeros((3, 0)), 2, r"got shape \[3, 0\]"),
    (np.array([[-1.0, np.nan]]), 2, "log_marginals must be natural-log probabilities.*NaN: True"),
    (np.array([[0.5, 0.5]]), 2, "largest value 0.5, NaN: False"),
], ids=["budget-1", "budget+", "1d", "0 positions", "0 tokens", "nan", "not logs"])
def test_refused_marginals(table, budget, message):
    with pytest.raises(ValueError, match=message):
        ddtree(table, budget)


# -- acceptance ---------------------------------------------------------------------------


def accepted(tree: DraftTree, sequence: tuple[int, ...]) -> int:
    """Tokens that a verify step yields when the target's continuation is `sequence`: the
    drafted ones that match from the root down, and the bonus token."""
    node, count = 0, 1
    for token in sequence:
        kids = [k for k in tree.children[node] if tree.tokens[k] == token]
        if not kids:
            break
        node, count = kids[0], count + 1
    return count


@pytest.mark.parametrize("kind", ["distinct", "ties"])
def test_acceptance_length_is_the_expectation(kind, rng):
    """Over all continuations, weighted as the drafter's marginals do."""
    for _ in range(15):
        positions, vocabulary = int(rng.integers(1, 5)), int(rng.integers(2, 5))
        table = random_marginals(rng, positions, vocabulary, "distinct")
        if kind == "ties":
            table = np.log(np.full((positions, vocabulary), 1 / vocabulary))
        tree = ddtree(table, int(rng.integers(0, 60)))
        expected = sum(
            math.exp(sum(table[d, t] for d, t in enumerate(sequence))) * accepted(tree, sequence)
            for sequence in itertools.product(range(vocabulary), repeat=positions)
        )
        assert tree.acceptance_length == pytest.approx(expected, abs=1e-10)


def test_no_other_tree_accepts_more(rng):
    """What the construction is for: at equal size, no tree over the same tokens has a larger
    expectation. The rivals grow at random from the root."""
    for _ in range(20):
        table = random_marginals(rng, 4, 4, "distinct")
        everything = all_paths(table)
        budget = int(rng.integers(1, 40))
        best = ddtree(table, budget).acceptance_length
        rival, frontier = [()], [(t,) for t in range(4)]
        while len(rival) <= budget:
            path = frontier.pop(rng.integers(len(frontier)))
            rival.append(path)
            if len(path) < 4:
                frontier.extend((*path, t) for t in range(4))
        reached = 1 + sum(math.exp(everything[p]) for p in rival[1:])
        assert best >= reached - 1e-12


def test_acceptance_needs_probabilities():
    with pytest.raises(ValueError, match="log_probs is None"):
        _ = kary(2, 5).acceptance_length


# -- EAGLE --------------------------------------------------------------------------------

#: steps, topk, nodes: three that are in use, and corners.
SETTINGS = [(5, 8, 64), (4, 6, 26), (3, 4, 8), (1, 1, 1), (1, 4, 3), (6, 1, 7), (2, 3, 100)]


def random_drafter(seed: int, topk: int):
    """Candidates that depend on the whole path, as a drafter's do."""
    def candidates(path: tuple[int, ...]) -> list[float]:
        own = np.random.default_rng([seed, *path])
        values = np.sort(own.normal(size=topk + 2))[::-1] * 2
        return (values - np.logaddexp.reduce(values))[:topk].tolist()
    return candidates


@pytest.mark.parametrize(("steps", "topk", "nodes"), SETTINGS, ids=str)
def test_eagle_against_a_plain_beam(steps, topk, nodes, seed):
    candidates = random_drafter(seed, topk)
    tree = eagle(steps, topk, nodes, candidates)
    beam, made = {(): 0.0}, {}
    for _ in range(steps):
        fresh = {(*p, r): s + candidates(p)[r] for p, s in beam.items() for r in range(topk)}
        made.update(fresh)
        beam = dict(sorted(fresh.items(), key=lambda c: -c[1])[:topk])
    assert len(made) == topk + (steps - 1) * topk**2
    kept = dict(sorted(made.items(), key=lambda c: -c[1])[:nodes - 1])
    paths = token_paths(tree)
    assert len(tree) == min(nodes, len(made) + 1) and set(paths[1:]) == set(kept)
    np.testing.assert_allclose(tree.log_probs[1:], [kept[p] for p in paths[1:]], atol=1e-12)
    assert tree.depth <= steps and max(map(len, tree.children)) <= topk
    order = list(zip(tree.depths.tolist(), (-tree.log_probs).tolist(), strict=True))
    assert order == sorted(order)
    assert tree.tokens[0] == 0 and tree.log_probs[0] == 0
    inner = tree.parents[1:]
    assert (tree.log_probs[1:] <= tree.log_probs[inner] + 1e-12).all()


@pytest.mark.parametrize(("steps", "topk", "nodes"), SETTINGS, ids=str)
def test_eagle_with_nothing_but_ties(steps, topk, nodes):
    """Equal scores everywhere, a child's equal to its parent's: still a tree."""
    tree = eagle(steps, topk, nodes, lambda path: [0.0] * topk)
    assert len(tree) == min(nodes, topk + (steps - 1) * topk**2 + 1)


def test_eagle_by_default_prefers_the_first_candidate():
    tree = eagle(5, 8, 64)
    assert len(tree) == 64
    # 0.7 for the first candidate each time: the deepest path is all first candidates.
    deepest = int(np.argmax(tree.depths))
    assert tree.tokens[tree.path(deepest)].tolist() == [0] * (tree.depth + 1)
    assert tree.log_probs[deepest] == pytest.approx(tree.depth * math.log(0.7))


def test_eagle_takes_short_lists_of_candidates():
    tree = eagle(3, 4, 50, lambda path: [-0.1] if path else [-0.1, -2.0])
    assert token_paths(tree) == [(), (0,), (1,), (0, 0), (1, 0), (0, 0, 0), (1, 0, 0)]


@pytest.mark.parametrize(("settings", "message"), [
    ((0, 4, 8), "steps must be at least 1; got 0"),
    ((3, 0, 8), "topk must be at least 1; got 0"),
    ((3, 4, 0), "num_draft_tokens must be at least 1; got 0"),
    ((3, 4, 1025), "num_draft_tokens must be at most 1024; got 1025"),
], ids=str)
def test_refused_eagle_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        eagle(*settings)


def test_kary_takes_numpy_integers():
    for kind in (np.int32, np.int64, np.uint8):
        assert kary(kind(3), kind(9)) == kary(3, 9)
        assert kary([kind(2), kind(3)]) == kary([2, 3])
