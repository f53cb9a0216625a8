"""The tree lab: trees from controls and texts, what it says about them, and its front."""

import io

import matplotlib.collections
import matplotlib.image
import numpy as np
import pytest
from PIL import Image

from mla_kernels import widgets
from mla_kernels.labs import tree as lab
from mla_kernels.synthetic import family_tree, log_marginals
from mla_kernels.tree import MAX_NODES, DraftTree, ddtree, eagle

MARGINALS = log_marginals(7)


def random_parents(rng, nodes):
    return [-1] + [int(rng.integers(i)) for i in range(1, nodes)]


def pixels(image):
    return np.asarray(Image.open(io.BytesIO(image.data)).convert("L"))


# -- trees --------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["chain", "k-ary", "DDTree"])
def test_families_are_the_packages(family):
    nodes = int(np.random.default_rng().integers(2, 100))
    got = lab.build(family, nodes=nodes, branching=2, marginals=MARGINALS)
    assert got == family_tree(family, nodes, MARGINALS, branching=2)
    assert got.log_probs is not None


def test_eagle_takes_steps_and_topk_apart():
    one = lab.build("EAGLE", nodes=30, steps=3, topk=5, marginals=MARGINALS)
    best = MARGINALS[:, :5]
    assert one == eagle(3, 5, 30, lambda path: best[len(path)])
    # More steps than the drafter's block has positions: the block is the limit.
    assert lab.build("EAGLE", nodes=900, steps=16, topk=8, marginals=MARGINALS).depth == 7


def test_pasted_parents_and_choices():
    parents = random_parents(np.random.default_rng(), 40)
    assert lab.build("parents", text=f" {parents} ", marginals=MARGINALS) == DraftTree(parents)
    one = lab.build("choices", text="[(0,), (1,), (0, 0), (1, 0)]", marginals=MARGINALS)
    assert one.parents.tolist() == [-1, 0, 0, 1, 2]
    best, second = np.exp(MARGINALS[0, 0]), np.exp(MARGINALS[0, 1])
    assert np.exp(one.log_probs[1:3]) == pytest.approx([best, second])


@pytest.mark.parametrize("family, text, message", [
    ("parents", "no list", "text must be a list such as"),
    ("parents", "[-1, 0.5]", "parents must be a list of integers"),
    ("parents", "[-1, 3]", r"parents\[1\] must be in 0 .. 0"),
    ("choices", "[0, 1]", "choices must be a list of lists"),
    ("choices", "[[0, 0]]", "not its parent"),
    ("oak", "", "family must be one of chain"),
])
def test_refuses_what_is_no_tree(family, text, message):
    with pytest.raises(ValueError, match=message):
        lab.build(family, text=text, marginals=MARGINALS)


# -- marginals from a file ----------------------------------------------------------------


def test_marginals_from_files(tmp_path):
    recorded = np.stack([log_marginals(5, first=f) for f in np.random.default_rng().random(3)])
    np.save(tmp_path / "one.npy", recorded[0])
    np.savez(tmp_path / "many.npz", log_marginals=recorded, tokens=np.arange(3))
    assert np.array_equal(lab.load_marginals(tmp_path / "one.npy"), recorded[0])
    assert np.array_equal(lab.load_marginals(tmp_path / "many.npz", 2), recorded[2])


@pytest.mark.parametrize("save, step, message", [
    (None, 0, "must name a .npy or .npz file"),
    (lambda p: p.write_text("no array"), 0, "cannot be read"),
    (lambda p: np.save(p, np.zeros(4)), 0, r"must hold \[positions, vocabulary\]"),
    (lambda p: np.save(p, np.zeros((2, 4, 8))), 2, "step must be in 0 .. 1; got 2"),
])
def test_refuses_other_files(tmp_path, save, step, message):
    path = tmp_path / "marginals.npy"
    if save:
        save(path)
    with pytest.raises(ValueError, match=message):
        lab.load_marginals(path, step)


# -- what it says -------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [1, 8, 9, 32, 33, 64, 65, 1024])
def test_mask_bytes_are_those_of_the_arrays(nodes):
    tree = DraftTree(random_parents(np.random.default_rng(), nodes))
    context = int(np.random.default_rng().integers(0, 300))
    sizes = lab.mask_bytes(nodes, context)
    batch, _ = lab.marshalled(tree, context, 1)
    first = int(batch.kv_lens[0] + 3) * 3  # the other request's part
    full, _ = batch.full_mask()
    assert sizes["SGLang FULL_MASK"] == full.numel() - first
    bits = np.packbits(full[first:].numpy())
    assert sizes["FlashInfer packed_custom_mask"] == bits.nbytes
    assert sizes["SGLang QLEN_ONLY"] == tree.ancestor_mask.nbytes
    assert sizes["mask_bits (this package)"] == tree.packed_mask.nbytes
    assert (sizes["SGLang QLEN_ONLY_BITPACKING"] is None) == (nodes > 32)
    assert (sizes["64-bit ancestor masks"] is None) == (nodes > 64)


def test_arrays_are_the_batch():
    tree = ddtree(MARGINALS, 40)
    batch, slots = lab.marshalled(tree, 100, 16)
    batch.validate(slots)
    table = lab.arrays(batch)
    assert table.loc["qo_indptr", "first values"] == "0, 3, 44"
    assert table.loc["kv_lens", "first values"] == "5, 100"
    assert table.loc["mask_bits", "shape"] == "[44, 2]"
    assert table.loc["mask_bits", "bytes"] == "352"
    assert table.loc["mask_bits", "first values"].startswith("0x1, 0x0, 0x3, 0x0, 0x7")


# -- the picture --------------------------------------------------------------------------


def test_picture_shows_the_tree():
    tree = lab.build("DDTree", nodes=50, marginals=MARGINALS)
    figure = lab.picture(tree)
    left, middle, *_ = figure.axes
    (dots,) = [c for c in left.collections
               if isinstance(c, matplotlib.collections.PathCollection)]
    assert dots.get_offsets()[:, 1].tolist() == tree.depths.tolist()
    assert [p.get_width() for p in middle.patches] == tree.nodes_per_depth
    (mask,) = [i for ax in figure.axes for i in ax.images if i.get_array().shape == (50, 50)]
    assert np.array_equal(mask.get_array() >= 2, tree.ancestor_mask)
    assert f"{tree.acceptance_length:.2f}" in left.get_title(loc="left")


@pytest.mark.parametrize("family", ["DDTree", "k-ary", "parents"])
def test_work_of_a_redraw_does_not_grow_with_nodes(family):
    """What makes a redraw slow is the number of things to draw: nodes and edges are one each."""
    text = str(list(range(-1, MAX_NODES - 1)))
    tree = lab.build(family, nodes=MAX_NODES, branching=3, text=text, marginals=MARGINALS)
    assert len(tree) == MAX_NODES
    assert len(lab.picture(tree).findobj()) < 600


@pytest.fixture
def displayed(monkeypatch):
    """What the lab showed last, before it became text and PNG."""
    last = []
    monkeypatch.setattr(widgets, "show", lambda _, *things: last.__setitem__(slice(None), things))
    return last


def test_still_is_the_labs_first_picture(displayed, tmp_path):
    lab.lab(tmp_path)
    image, table = displayed
    assert image.data == lab.still().data
    assert pixels(image).std() > 10
    assert list(table.columns) == ["dtype", "shape", "bytes", "first values"]


# -- the front ----------------------------------------------------------------------------


def shown(explorer):
    return {n for n, c in explorer.controls.items() if c.layout.display != "none"}


def test_only_controls_that_count_are_shown(tmp_path):
    explorer = lab.lab(tmp_path)
    assert {"nodes", "block", "first"} <= shown(explorer)
    assert not {"text", "steps", "branching", "step"} & shown(explorer)
    explorer.controls["family"].value = "EAGLE"
    assert {"nodes", "steps", "topk"} <= shown(explorer)
    explorer.controls["family"].value = "choices"
    assert "text" in shown(explorer) and "nodes" not in shown(explorer)
    assert explorer.controls["text"].value == lab.EXAMPLES["choices"]
    assert not explorer.errors.outputs
    np.save(tmp_path / "mine.npy", log_marginals(3))
    explorer.controls["file"].value = "mine.npy"
    assert "step" in shown(explorer) and "block" not in shown(explorer)
    assert not explorer.errors.outputs


def test_controls_wait_and_errors_show(displayed, tmp_path):
    explorer = lab.lab(tmp_path)
    assert not any(c.continuous_update for c in explorer.controls.values()
                   if c.has_trait("continuous_update"))
    explorer.controls["family"].value = "parents"
    explorer.controls["text"].value = "[-1, 5]"
    assert "parents[1] must be" in explorer.errors.outputs[0]["text"]
    explorer.controls["text"].value = "[-1, 0]"
    assert not explorer.errors.outputs
    assert displayed[1].loc["qo_indptr", "first values"] == "0, 3, 5"
