"""The budget advisor: its answer against a scan by hand, and when a tree does not pay."""

import dataclasses
import json

import numpy as np
import pandas as pd
import pytest

from mla_kernels import measurements, predict, widgets
from mla_kernels.device import RTX_5090
from mla_kernels.labs import advisor
from mla_kernels.labs.advisor import Acceptance, Floor, Measured, Step, advise
from mla_kernels.synthetic import log_marginals
from mla_kernels.tree import DraftTree, chain, ddtree, from_choices
from mla_kernels.workload import Shape

RUN = measurements.latest("H200")


def scan(cost, marginals, step, batch_size, num_heads, context, top):
    """Every budget on its own, each tree grown anew."""
    def rate(nodes, length, extra):
        seconds, _ = cost(Shape(batch_size, num_heads, nodes, context))
        return batch_size * length / (step.layers * seconds + step.rest + extra
                                      + step.per_token * batch_size * (nodes - 1))

    plain = rate(1, 1.0, 0.0)
    trees = {n: rate(n, ddtree(marginals, n - 1).acceptance_length, step.draft + step.tree_extra)
             for n in range(2, top + 1)}
    chains = {n: rate(n, 1 + np.exp(np.cumsum(marginals.max(1)))[:n - 1].sum(), step.draft)
              for n in range(2, len(marginals) + 2)}
    return plain, trees, chains


@pytest.mark.parametrize("seed", range(8))
def test_equals_a_scan_of_all_budgets(seed):
    rng = np.random.default_rng([seed, int(np.random.default_rng().integers(1 << 30))])
    marginals = log_marginals(int(rng.integers(2, 9)), first=rng.uniform(0.4, 0.95),
                              decay=rng.uniform(0.7, 1))
    step = Step(int(rng.integers(1, 80)), rng.uniform(0, 0.03), rng.uniform(0, 1e-4),
                rng.uniform(0, 3e-3), rng.choice([0, 1e-3]))
    cost = Measured(RUN) if seed % 2 else Floor(RTX_5090)
    where = ((1, 8, int(rng.integers(4096, 65537))) if seed % 2 else
             (int(rng.integers(1, 9)), 64, int(rng.integers(1000, 131072))))
    plain, trees, chains = scan(cost, marginals, step, *where, top=80)
    got = advise(cost, advisor.from_marginals(marginals, 80), step,
                 **dict(zip(("batch_size", "num_heads", "context"), where, strict=True)))
    assert {p.nodes: p.rate for p in got.tree} == pytest.approx(trees)
    assert {p.nodes: p.rate for p in got.chain} == pytest.approx(chains)
    assert got.plain.rate == pytest.approx(plain)
    assert got.best_tree.rate == pytest.approx(max(trees.values()))
    assert trees[got.best_tree.nodes] == pytest.approx(max(trees.values()))
    tree, line = max(trees.values()), max(chains.values())
    if tree > 1.0001 * max(line, plain):
        assert got.choice == "tree"
    if max(line, plain) > 1.0001 * tree:
        assert "tree does not pay here" in got.verdict


# -- a tree does not pay ------------------------------------------------------------------

#: Budgets, tokens a step and ms a step of a published comparison: DDTree against a flat chain of
#: the same drafter, a 27B model on two RTX A6000, CUDA graphs (rmagur1203/vllm-ddtree,
#: docs/DDTREE-FINDINGS-EN.md, section 8, at 0fefcaa; linked from vLLM pull request 42910).
#: A budget counts drafted tokens, a node more is the root.
PUBLISHED_CHAIN = (8, 3.200, 43.35)
PUBLISHED_TREES = [(9, 3.200, 60.77), (10, 3.329, 62.04), (13, 3.273, 61.98), (17, 3.310, 63.23),
                   (33, 3.282, 72.53)]


def published(lines):
    times = {n: ms for n, _, ms in lines}

    def cost(shape):
        if shape.num_nodes == 1:  # 32.36 s without speculation for what took the chain 15.60 s
            return 1e-3 * 43.35 / 3.2 * 32.36 / 15.60, "measured"
        if shape.num_nodes not in times:
            raise ValueError("not published")
        return 1e-3 * times[shape.num_nodes], "measured"

    return cost


def test_published_chain_beats_the_published_trees():
    acceptance = Acceptance({n: a for n, a, _ in PUBLISHED_TREES},
                            {PUBLISHED_CHAIN[0]: PUBLISHED_CHAIN[1]})
    got = advise(published(PUBLISHED_TREES), acceptance, Step(1, 0.0), batch_size=1, num_heads=8,
                 context=1000, chain_cost=published([PUBLISHED_CHAIN]))
    assert got.choice == "chain" and got.verdict.startswith("A tree does not pay here")
    assert got.best_tree.nodes == 10
    assert got.best_tree.rate / got.best_chain.rate == pytest.approx(0.73, abs=0.005)


def test_long_context_on_a_compute_bound_card():
    """64 heads make every node cost arithmetic; with 128k of context nothing else counts."""
    def at(context):
        return advise(Floor(RTX_5090), advisor.from_marginals(log_marginals()),
                      Step(61, 15e-3, tree_extra=0.5e-3), batch_size=1, num_heads=64,
                      context=context)

    assert at(4096).choice == "tree"
    long = at(131072)
    assert long.choice == "chain" and long.kind == "modelled"
    assert long.best_chain.rate > long.best_tree.rate > long.plain.rate


def test_no_speculation_with_a_drafter_that_guesses():
    got = advise(Floor(RTX_5090), advisor.from_marginals(log_marginals(first=0.05)),
                 Step(61, 1e-3, draft=2e-3), batch_size=4, num_heads=64, context=65536)
    assert got.choice == "none" and "do not speculate" in got.verdict


def test_a_tree_without_branches_is_a_chain():
    """Where the best budget is so small that DDTree has not branched yet."""
    got = advise(Floor(RTX_5090), advisor.from_marginals(log_marginals()), Step(61, 15e-3),
                 batch_size=1, num_heads=64, context=131072)
    assert got.best_tree.rate == pytest.approx(got.best_chain.rate)
    assert got.choice == "chain"


# -- what a call costs --------------------------------------------------------------------


def frame(rows):
    columns = ["provider", *measurements.SHAPE, "latency_us"]
    return pd.DataFrame([("cuda", *r) for r in rows], columns=columns)


def test_measured_points_and_between_them():
    cost = Measured(frame([(1, 8, t, c, t * c / 100) for t in (1, 4, 64) for c in (1000, 8000)]))
    for shape in ((1, 8, 4, 1000), (1, 8, 64, 8000)):
        assert cost(Shape(*shape)) == (pytest.approx(shape[2] * shape[3] / 1e8), "measured")
    assert cost(Shape(1, 8, 17, 3000))[0] == pytest.approx(17 * 3000 / 1e8)


@pytest.mark.parametrize("shape", [(1, 8, 65, 1000), (1, 8, 4, 999), (1, 8, 4, 8001),
                                   (2, 8, 4, 1000), (1, 16, 4, 1000)])
def test_nothing_is_said_outside_what_was_measured(shape):
    cost = Measured(frame([(1, 8, t, c, 1.0) for t in (1, 64) for c in (1000, 8000)]))
    with pytest.raises(ValueError, match="not measured: .* measured contexts and nodes are: "):
        cost(Shape(*shape))


def test_budgets_that_were_not_measured_are_left_out():
    cost = Measured(frame([(1, 8, t, 1000, 1.0) for t in (1, 16)]))
    got = advise(cost, advisor.from_marginals(log_marginals()), Step(1, 1e-3), batch_size=1,
                 num_heads=8, context=1000)
    assert [p.nodes for p in got.tree] == list(range(2, 17)) and "T 17" in got.missing
    with pytest.raises(ValueError, match="not measured"):
        advise(cost, advisor.from_marginals(log_marginals()), Step(1, 1e-3), batch_size=1,
               num_heads=8, context=999)


# -- acceptance typed in, and the export --------------------------------------------------


def test_typed_acceptance():
    got = advisor.parse_acceptance("2: 1.5, 8: 3.5,")
    assert list(got) == list(range(2, 9)) and got[4] == pytest.approx(2.5)


@pytest.mark.parametrize("text", ["", "8", "8: x", "8: 4, 4: 3", "4: 5", "0: 1", "4: 0.5"])
def test_refuses_other_acceptance(text):
    with pytest.raises(ValueError, match="tree's tokens must"):
        advisor.parse_acceptance(text, "tree's tokens")


def test_export_rebuilds_the_tree():
    rng = np.random.default_rng()
    tree = ddtree(log_marginals(first=rng.uniform(0.3, 0.9)), int(rng.integers(5, 60)))
    data = json.loads(advisor.export(tree))
    assert DraftTree(data["parents"]) == tree
    again = from_choices(data["choices"])
    assert sorted(map(len, again.paths)) == sorted(map(len, tree.paths))
    assert again.nodes_per_depth == tree.nodes_per_depth
    assert data["acceptance_length"] == pytest.approx(tree.acceptance_length)
    _, steps, _, topk, _, nodes = data["arguments"]["sglang"].split()
    assert (int(steps), int(nodes)) == (tree.depth, len(tree))
    assert int(topk) == max(map(len, tree.children))
    config = json.loads(data["arguments"]["vllm"].split("'")[1])
    assert config["num_speculative_tokens"] == len(tree) - 1
    assert from_choices(eval(config["speculative_token_tree"])) == again


def test_export_of_a_chain():
    data = json.loads(advisor.export(chain(4)))
    assert data["arguments"]["sglang"] == (
        "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4")


# -- the front ----------------------------------------------------------------------------


def test_lab_redraws_and_says_what_it_cannot(monkeypatch):
    last = []
    monkeypatch.setattr(widgets, "show", lambda _, *things: last.__setitem__(slice(None), things))
    lab = advisor.lab()
    assert last[1].data == advisor.still().data
    lab.controls["num_heads"].value = 128
    lab.controls["batch_size"].value = 3
    assert "not measured" in lab.errors.outputs[0]["text"]
    lab.controls["gpu"].value = next(n for n in lab.controls["gpu"].options if "5090" in n)
    assert not lab.errors.outputs
    lab.controls["context"].value = 131072
    lab.controls["tree_extra"].value = 50.0
    assert "A tree does not pay here" in last[0].data
    lab.controls["typed"].value = "8: 9"
    assert "tree's tokens must be in 1 .. 8" in lab.errors.outputs[0]["text"]


def test_modelled_cards_take_the_model_s_time(rng):
    """Longer than the floor of the same card, and marked as modelled."""
    known = advisor.costs()
    for card in ("RTX PRO 6000 Blackwell", "GeForce RTX 5090"):
        modelled, floor = known[f"{card} (modelled)"], known[f"{card} (modelled: its floor)"]
        for _ in range(5):
            shape = Shape(1, 8, int(rng.integers(1, 65)), int(rng.integers(1000, 100_000)))
            seconds, kind = modelled(shape)
            assert kind == "modelled" and seconds > floor(shape)[0] > 0
            assert seconds == pytest.approx(predict.predict(
                dataclasses.astuple(shape), modelled.card, modelled.efficiency).total_us * 1e-6)
