"""Do the made-up inputs have the properties that the notebooks claim for them?"""

import itertools

import numpy as np
import pytest
import torch

from mla_kernels import synthetic
from mla_kernels.layout import ORDERS, KVLayout
from mla_kernels.reference import attend, mla_unabsorbed, relative_error
from mla_kernels.tree import chain, ddtree, kary


@pytest.mark.parametrize("sharpness", [0.0, 1.0, 4.0])
def test_sharpness_is_the_standard_deviation_of_the_logits(sharpness):
    inputs = synthetic.attention_inputs(4096, heads=16, sharpness=sharpness)
    layout = KVLayout.LATENT_FIRST
    logits = (layout.concat(inputs.q_latent, inputs.q_rope)
              @ layout.concat(inputs.latent, inputs.rope).T) * inputs.sm_scale
    assert float(logits.std()) == pytest.approx(sharpness, rel=0.05)


@pytest.mark.parametrize("order", ORDERS)
def test_right_reading_is_the_same_in_both_orders_and_each_wrong_one_is_finite(order):
    inputs = synthetic.attention_inputs(200, channel_mean=1.0)
    outputs, errors = synthetic.misreadings(inputs, KVLayout(order))
    plain, _ = attend(torch.cat([inputs.q_latent, inputs.q_rope], -1),
                      torch.cat([inputs.latent, inputs.rope], -1), inputs.latent,
                      torch.ones(1, 200, dtype=torch.bool), sm_scale=inputs.sm_scale)
    assert relative_error(outputs["right"], plain) < 1e-14
    assert errors["right"] == 0
    for name in ("value", "scores", "both"):
        assert outputs[name].isfinite().all()
        assert errors[name] > 0.3
        assert float(outputs[name].std()) == pytest.approx(float(plain.std()), rel=0.3)
    assert list(outputs) == list(errors) == list(synthetic.MISREADINGS)


def test_value_error_is_near_root_two_whatever_the_data():
    for sharpness, mean in itertools.product([0, 1, 4], [0.0, 1.0]):
        inputs = synthetic.attention_inputs(512, sharpness=sharpness, channel_mean=mean)
        assert 1.3 < synthetic.misreadings(inputs)[1]["value"] < 1.5


def test_scores_error_vanishes_for_flat_attention_over_tokens_with_a_common_mean():
    def error(sharpness, mean):
        inputs = synthetic.attention_inputs(512, sharpness=sharpness, channel_mean=mean)
        return synthetic.misreadings(inputs)[1]["scores"]

    assert error(0.0, 1.0) < 1e-12
    assert error(0.5, 1.0) < 0.1 < error(6.0, 1.0)
    assert error(3.0, 0.0) > 1.2


def test_misread_value_is_the_right_one_64_channels_on():
    inputs = synthetic.attention_inputs(100)
    right = synthetic.misread(inputs, KVLayout.LATENT_FIRST)
    wrong = synthetic.misread(inputs, KVLayout.LATENT_FIRST, value=True)
    assert torch.allclose(wrong[..., :448], right[..., 64:], rtol=0, atol=1e-14)
    mirrored = synthetic.misread(inputs, KVLayout.ROPE_FIRST, value=True)
    assert torch.allclose(mirrored[..., 64:], right[..., :448], rtol=0, atol=1e-14)


def test_suspect_has_exactly_one_fault():
    inputs = synthetic.attention_inputs(tokens=300, sharpness=2.0, seed=7)
    out = synthetic.suspect(inputs)
    fits = [name for name, candidate in synthetic.misreadings(inputs)[0].items()
            if relative_error(out, candidate) < 1e-12]
    assert len(fits) == 1 and fits != ["right"]


def test_projected_inputs_absorb_exactly():
    p = synthetic.projected_inputs(64, heads=3)
    visible = torch.ones(1, 64, dtype=torch.bool)
    expanded = mla_unabsorbed(p.q_nope, p.q_rope, p.latent, p.rope, p.weights, visible,
                              sm_scale=p.sm_scale)
    out, _ = attend(torch.cat([p.weights.absorb_query(p.q_nope), p.q_rope], -1),
                    torch.cat([p.latent, p.rope], -1), p.latent, visible, sm_scale=p.sm_scale)
    assert relative_error(p.weights.project_output(out), expanded) < 1e-13


# -- trees --------------------------------------------------------------------------------


def test_marginals_are_as_documented():
    table = np.exp(synthetic.log_marginals(7, first=0.85, decay=0.96, tail=0.5))
    assert table.shape == (7, 64)
    assert table[:, 0] == pytest.approx(0.85 * 0.96 ** np.arange(7))
    assert (table.sum(axis=1) <= 1 + 1e-12).all() and (table.sum(axis=1) > 0.999).all()
    assert table[:, 2] / table[:, 1] == pytest.approx(0.5)


@pytest.mark.parametrize("bad", [
    {"first": 0.0}, {"first": 1.1}, {"decay": 0}, {"tail": 1.0}, {"positions": 0},
    {"candidates": 0},
], ids=str)
def test_marginals_refuse_what_is_no_probability(bad):
    with pytest.raises(ValueError, match="must be"):
        synthetic.log_marginals(**bad)


def test_log_probs_are_products_along_the_path():
    marginals = synthetic.log_marginals(3)
    tree = synthetic.with_log_probs(kary([2, 3, 1], 20), marginals)
    p = np.exp(marginals)
    for node in range(1, len(tree)):
        product, path = 1.0, tree.path(node)
        for depth, (parent, kid) in enumerate(zip(path, path[1:], strict=False)):
            product *= p[depth, tree.children[parent].index(kid)]
        assert np.exp(tree.log_probs[node]) == pytest.approx(product)


def test_nodes_below_the_block_count_nothing():
    marginals = synthetic.log_marginals(3)
    four = synthetic.with_log_probs(chain(4), marginals)
    ten = synthetic.with_log_probs(chain(10), marginals)
    assert ten.acceptance_length == four.acceptance_length
    assert synthetic.family_tree("chain", 10, marginals) == chain(4)


@pytest.mark.parametrize("budget", [1, 5, 40, 300])
@pytest.mark.parametrize("first", [0.4, 0.85])
def test_heap_steps_are_those_of_ddtree(budget, first):
    marginals = synthetic.log_marginals(6, first=first, candidates=9)
    steps = synthetic.heap_steps(marginals, budget)
    tree = ddtree(marginals, budget)
    assert len(steps) == len(tree) - 1
    popped = [step.popped[1] for step in steps]
    assert popped == pytest.approx(np.exp(tree.log_probs[1:]))
    assert popped == sorted(popped, reverse=True)
    for step in steps:
        assert step.popped[1] == max(step.waiting.values())


@pytest.mark.parametrize("nodes", [1, 2, 7, 33, 200])
def test_no_family_beats_ddtree_at_equal_nodes(nodes):
    marginals = synthetic.log_marginals(7)
    lengths = {family: synthetic.family_tree(family, nodes, marginals, branching=3)
               for family in synthetic.FAMILIES}
    assert all(len(tree) <= nodes for tree in lengths.values())
    best = lengths["DDTree"].acceptance_length
    assert all(tree.acceptance_length <= best + 1e-12 for tree in lengths.values())


def test_unknown_family_is_named():
    with pytest.raises(ValueError, match="chain, k-ary, EAGLE, DDTree; got 'star'"):
        synthetic.family_tree("star", 4, synthetic.log_marginals())


@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
def test_small_batch_shares_no_slot_and_leaves_page_0(page_size):
    drafts, prefixes = [chain(3), kary(2, 5), chain(1)], [5, 0, 9]
    batch, pool_slots = synthetic.small_batch(drafts, prefixes, page_size=page_size)
    batch.validate(pool_slots)
    slots = np.concatenate([batch.prefix_slots(b).numpy() for b in range(3)]
                           + [batch.draft_slots.numpy()])
    assert len(set(slots.tolist())) == len(slots) == sum(prefixes) + 9
    assert slots.min() >= page_size
    assert batch.kv_lens.tolist() == prefixes
