"""The trained model that lies in data/tiny_mla, and what was measured with it."""

import json

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from mla_kernels import evidence, figures_model
from mla_kernels.labs.tree import load_marginals
from mla_kernels.model import measure, text, train
from mla_kernels.model.decode import Decoder

ORDERS = ("latent_first", "rope_first")


@pytest.fixture(scope="module")
def model():
    return train.load(dtype=torch.float64)


@pytest.fixture(scope="module")
def held_out():
    return train.held_out_text()


@pytest.fixture(scope="module")
def record():
    return measure.load()


#: Tree families and their nodes.
TREES = (("chain", 6), ("k-ary, k = 2", 7), ("k-ary, k = 3", 13), ("EAGLE, topk = 4", 10),
         ("DDTree", 8), ("DDTree", 16))


@pytest.mark.parametrize("order", ORDERS)
def test_greedy_is_the_same_with_every_tree(order, model, held_out):
    """200 prompts, six shapes of tree. In float64: a rounding that turns a near-tie would be a
    difference, and no fault."""
    prompts = text.windows(held_out, 200, 24, seed=ORDERS.index(order))
    decoder = Decoder(model, model.config.layout(order))
    plain = decoder.generate(prompts, 10)
    for family, nodes in TREES:
        found = decoder.generate(prompts, 10, draft=measure.drafter(family, nodes))
        assert [g.tokens for g in found] == [g.tokens for g in plain], (family, nodes)
        assert sum(len(g.accepted) for g in found) < 0.8 * sum(len(g.accepted) for g in plain)


def test_steps_through_a_text_are_those_of_speculation(model, held_out):
    """The acceptance that is read off a text generated without a draft is that of a run with
    trees."""
    decoder = Decoder(model, model.config.layout("latent_first"))
    prompts = text.windows(held_out, 6, 48, seed=3)
    plain = decoder.generate(prompts, 40, keep_marginals=True)
    draft = measure.drafter("DDTree", 12)
    tokens = steps = 0
    for g in decoder.generate(prompts, 40, draft=draft):
        at = 0
        for count in g.accepted:
            if at + 8 >= 40:  # near the end the reading stops
                break
            at, tokens, steps = at + count, tokens + count, steps + 1
    assert measure.acceptance_length(plain, draft) == tokens / steps


def test_ddtree_accepts_most_on_other_texts(model, held_out):
    """A smaller measurement anew, of pieces that the record did not use."""
    decoder = Decoder(model.float(), model.config.layout("rope_first"))
    plain = decoder.generate(text.windows(held_out, 40, 64, seed=9), 48, keep_marginals=True)
    lengths = {f: measure.acceptance_length(plain, measure.drafter(f, 32))
               for f in measure.FAMILIES}
    model.double()
    assert max(lengths, key=lengths.get) == "DDTree" and lengths["DDTree"] > 2


def test_recorded_acceptance(record):
    found = {(r["family"], r["nodes"]): r["acceptance_length"] for r in record["acceptance"]}
    assert set(found) == {(f, n) for f in measure.FAMILIES for n in measure.NODES}
    for family, nodes in found:
        assert found["DDTree", nodes] >= found[family, nodes]
    assert found["DDTree", 128] > 1.2 * max(length for (family, _), length in found.items()
                                            if family in ("chain", "k-ary, k = 2"))


def test_recorded_orders(record):
    for ways in record["orders"].values():
        right, wrong = ways["right"], ways["wrong"]
        assert wrong["bits_per_byte"] > 2 * right["bits_per_byte"]
        assert wrong["acceptance_length"] < 0.5 * right["acceptance_length"]
        # Trees lose nothing, whatever the attention reads.
        assert right["same_as_without_a_tree"] == wrong["same_as_without_a_tree"] == (
            record["texts"])
    right = [ways["right"] for ways in record["orders"].values()]
    assert right[0]["samples"] == right[1]["samples"]
    assert all(record[k] for k in ("commit", "date", "torch", "training_commit"))


def test_the_record_is_of_these_weights(record, model, held_out):
    decoder = Decoder(model, model.config.layout("latent_first"))
    pieces = text.windows(held_out, record["texts"], 256)
    assert decoder.bits_per_byte(pieces) == pytest.approx(
        record["orders"]["latent_first"]["right"]["bits_per_byte"], rel=1e-4)
    (found,) = decoder.generate([list(record["prompts"][0].encode("latin-1"))], 32)
    assert bytes(found.tokens).decode("latin-1") == (
        record["orders"]["latent_first"]["right"]["samples"][0][:32])


def test_training_is_recorded():
    trained = json.loads((train.FOLDER / "training.json").read_text())
    assert "H200" in trained["gpu"] and trained["driver"] and trained["commit"] and trained["date"]
    assert trained["text"]["license"] == text.LICENSE and len(trained["text"]["sha256"]) == 64
    assert (train.FOLDER / "model.safetensors").stat().st_size <= 12e6
    config = trained["config"]
    assert (config["kv_lora_rank"], config["qk_rope_head_dim"]) == (512, 64)


def test_marginals_are_for_the_tree_lab(model):
    path = train.FOLDER / "marginals.npz"
    for step in (0, 63):
        table = load_marginals(path, step)
        assert table.shape == (7, 256)
        np.testing.assert_allclose(np.exp(table).sum(1), 1, atol=0.02)
        assert 1 < measure.drafter("DDTree", 32)(table).acceptance_length < 8


@pytest.mark.parametrize("order", ORDERS)
def test_two_witnesses_see_the_wrong_order(order, held_out):
    model = train.load()
    layout = model.config.layout(order)
    prompt = text.windows(held_out, 3, 80)[1]
    candidates = {"128^-0.5": 128**-0.5, "576^-0.5": 576**-0.5}
    right, wrong = (Decoder(model, layout, read_as=r) for r in (layout, layout.swapped))
    assert evidence.evidence_for(measure.EnginePool(right)).order == order
    for decoder in (right, wrong):
        found = evidence.compare(**measure.captured(decoder, prompt), candidates=candidates)
        assert found.answer.order == decoder.read_as.order
        assert found.answer.scale == "128^-0.5"
    with pytest.raises(evidence.WitnessesDisagree):
        evidence.evidence_for(measure.EnginePool(wrong))


def test_pictures(record):
    bars = figures_model.right_and_wrong(record["orders"], title="t")
    widths = [[p.get_width() for p in ax.patches] for ax in bars.axes]
    for key, drawn in zip(("bits_per_byte", "acceptance_length"), widths, strict=True):
        assert drawn == [ways[way][key] for way in ("right", "wrong")
                         for ways in record["orders"].values()]
    curves = figures_model.acceptance(record, title="t")
    assert isinstance(curves, Figure)
    lines = [list(line.get_ydata()) for line in curves.axes[0].lines]
    for family in measure.FAMILIES:
        assert [r["acceptance_length"] for r in record["acceptance"]
                if r["family"] == family] in lines
