"""Do the pictures show what they are given, and do the controls around them redraw?"""

import math
import threading
import time

import ipywidgets
import matplotlib
import matplotlib.pyplot
import nbformat
import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from nbclient import NotebookClient

from mla_kernels import figures, synthetic, widgets
from mla_kernels.layout import KVLayout
from mla_kernels.tree import DraftTree, chain, ddtree, kary

BF16 = KVLayout.LATENT_FIRST.with_dtype(torch.bfloat16)
MARGINALS = synthetic.log_marginals(7)
NODES = [1, 4, 16, 64]


def rng(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def cases():
    inputs = synthetic.attention_inputs(40, heads=2)
    return synthetic.misreadings(inputs)


def curves():
    return {case: [0.1, 0.5, 1.2] for case in ("value", "scores", "both")}


DRAW = {
    "cache_bars": lambda: figures.cache_bars({"a": 5_000_000, "b": 70_272}, title="t", note="n"),
    "row_ruler": lambda: figures.row_ruler([BF16, BF16.swapped, KVLayout("rope_first", 128, 32)]),
    "wrong_window": lambda: figures.wrong_window(BF16),
    "wrong_window other": lambda: figures.wrong_window(BF16.swapped),
    "agreement": lambda: figures.agreement(rng(50), rng(50) + 1e-9, ("x", "y"), epsilon=1e-7),
    "agreement equal": lambda: figures.agreement(rng(50), rng(50), ("x", "y"), epsilon=1e-7),
    "misreadings": lambda: figures.misreadings(*cases()),
    "misreading_curves": lambda: figures.misreading_curves([0, 1, 2], {"p": curves(),
                                                                       "q": curves()}),
    "shifted": lambda: figures.shifted(rng(512), rng(512), 64),
    "tree": lambda: figures.tree(ddtree(MARGINALS, 20), path=[0, 1, 2]),
    "tree of one": lambda: figures.tree(chain(1)),
    "tree of 1024": lambda: figures.tree(ddtree(MARGINALS, 1023)),
    "forest": lambda: figures.forest({"a": chain(4), "b": ddtree(MARGINALS, 9)}),
    "tree_and_mask": lambda: figures.tree_and_mask(kary(3, 13), path=[0, 1]),
    "tree_and_mask of 300": lambda: figures.tree_and_mask(ddtree(MARGINALS, 299)),
    "heap": lambda: figures.heap(synthetic.heap_steps(MARGINALS, 12)),
    "acceptance_curves": lambda: figures.acceptance_curves(NODES, {"a": NODES, "b": [1, 1, 1, 1]},
                                                           limit=80, note="n"),
    "batch_strips": lambda: figures.batch_strips(
        *synthetic.small_batch([chain(3), kary(2, 5)], [5, 0], page_size=4)),
    "batch_strips of long drafts": lambda: figures.batch_strips(
        *synthetic.small_batch([chain(40), chain(2)], [3, 4], page_size=1)),
    "mask_bytes": lambda: figures.mask_bytes(NODES, {"a": [10, 100, 1000, 1e6]},
                                             marks=[(16, 1000)]),
}


def texts(figure):
    return [t.get_text() for t in figure.findobj(matplotlib.text.Text) if t.get_text()]


def drawn(figure):
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return canvas.get_renderer()


@pytest.mark.parametrize("name", DRAW)
def test_returns_a_figure_and_leaves_pyplot_and_settings_alone(name):
    settings = dict(matplotlib.rcParams)
    figure = DRAW[name]()
    assert isinstance(figure, Figure)
    assert matplotlib.pyplot.get_fignums() == []
    assert dict(matplotlib.rcParams) == settings
    assert figure.get_figwidth() == figures.WIDTH


@pytest.mark.parametrize("name", DRAW)
def test_nothing_reaches_beyond_the_figure_and_text_can_be_read(name):
    figure = DRAW[name]()
    extent = figure.get_tightbbox(drawn(figure))
    slack = 0.03  # inches
    assert extent.x0 >= -slack and extent.x1 <= figure.get_figwidth() + slack
    assert extent.y0 >= -slack and extent.y1 <= figure.get_figheight() + slack
    for text in figure.findobj(matplotlib.text.Text):
        assert not text.get_text() or text.get_fontsize() >= 8, text.get_text()


def test_axes_say_what_they_show():
    figure = DRAW["misreading_curves"]()
    left, right = figure.axes
    assert left.get_ylabel() == "relative error"
    assert left.get_xlabel() == right.get_xlabel() == "standard deviation of the logits"
    assert left.get_title(loc="left") == "p"
    assert len(left.lines) == 4  # three cases and the line at 1
    assert {"value from the wrong slice", "both wrong"} <= set(texts(figure))

    figure = DRAW["acceptance_curves"]()
    (ax,) = figure.axes
    assert ax.get_xlabel() == "nodes in the tree, the root included"
    assert ax.get_ylabel() == "expected tokens a step"
    assert [list(line.get_ydata()) for line in ax.lines[:2]] == [NODES, [1, 1, 1, 1]]

    figure = DRAW["mask_bytes"]()
    assert figure.axes[0].get_ylabel() == "bytes of one request's mask"
    assert "16 nodes: 1,000 B" in texts(figure)


def test_bars_are_named_with_bytes_and_factor():
    shown = texts(DRAW["cache_bars"]())
    assert "5 MB   71.2×" in shown and "70.3 kB" in shown


def test_ruler_has_every_boundary_in_elements_and_bytes():
    shown = texts(figures.row_ruler([BF16, BF16.swapped]))
    for mark in ("0", "64", "512", "576", "0 B", "128 B", "1,024 B", "1,152 B"):
        assert mark in shown, mark
    assert "elements" not in "".join(t for t in shown if "B" in t)


@pytest.mark.parametrize("layout", [BF16, BF16.swapped], ids=lambda layout: layout.order)
def test_wrong_window_counts_what_is_shared(layout):
    shown = " ".join(texts(figures.wrong_window(layout)))
    assert "448 latent values, each 64 places" in shown
    assert "64 rope values" in shown and "64 latent values" in shown


def test_misreadings_show_errors_and_count_nan():
    outputs, errors = cases()
    outputs["both"] = outputs["both"].clone()
    outputs["both"][0, 0, :3] = math.nan
    shown = texts(figures.misreadings(outputs, errors))
    assert f"{errors['value']:.2f}" in shown
    assert any("3 NaN or inf" in t for t in shown)
    assert sum("no NaN" in t for t in shown) == 3


def test_tree_draws_every_node_and_edge():
    tree = DraftTree([-1, 0, 0, 1, 1, 4])
    (ax,) = figures.tree(tree, path=[0, 1, 4]).axes
    nodes, edges = ax.collections[1], ax.collections[0]
    assert len(nodes.get_offsets()) == 6
    assert len(edges.get_segments()) == 5
    assert sorted(nodes.get_offsets()[:, 1].tolist()) == sorted(tree.depths.tolist())
    assert sum(width > 2 for width in edges.get_linewidths()) == 2
    assert {"0", "1", "2", "3", "4", "5"} <= set(texts(ax.figure))


def test_no_two_nodes_share_a_place():
    for tree in (kary(3, 200), ddtree(MARGINALS, 500), chain(9)):
        places = set(zip(figures._spread(tree).tolist(), tree.depths.tolist(), strict=True))
        assert len(places) == len(tree)


def test_mask_picture_has_the_mask_and_its_words():
    tree = DraftTree([-1, 0, 0, 1])
    figure = figures.tree_and_mask(tree)
    image = np.asarray(figure.axes[1].images[0].get_array())
    assert np.array_equal(image >= 2, tree.ancestor_mask)
    assert np.array_equal(np.diag(image), [3, 3, 3, 3])
    assert {"0x00000001", "0x00000003", "0x00000005", "0x0000000b"} <= set(texts(figure))


def test_batch_picture_has_every_array():
    batch, slots = synthetic.small_batch([chain(3), kary(2, 5)], [5, 0], page_size=4)
    shown = texts(figures.batch_strips(batch, slots))
    for name in ("kv_lens", "qo_indptr", "kv_indptr", "kv_indices", "draft_slots",
                 "mask_bits (hex)", "request 0", "request 1"):
        assert name in shown, name
    assert shown.count("13") >= 1  # the word of node 4 in the second draft, 0b10011


@pytest.mark.parametrize("count, text", [
    (0, "0 B"), (1152, "1,152 B"), (9999, "9,999 B"), (70272, "70.3 kB"), (999_999, "1 MB"),
    (33_619_968, "33.6 MB"), (4.2e12, "4.2 TB"),
])
def test_bytes_text(count, text):
    assert figures.bytes_text(count) == text


def test_end_labels_do_not_overlap():
    figure = figures.acceptance_curves([1, 2], {n: [1, 2 + i / 1000] for i, n in
                                                enumerate("abcde")})
    labels = [t for t in figure.axes[0].texts if t.get_text() in "abcde"]
    renderer = drawn(figure)
    boxes = sorted((t.get_window_extent(renderer) for t in labels), key=lambda b: b.y0)
    assert len(boxes) == 5
    for below, above in zip(boxes, boxes[1:], strict=False):
        assert above.y0 >= below.y1 - 2


# -- widgets --------------------------------------------------------------------------------


@pytest.fixture
def shown(monkeypatch):
    """What the explorers display, since no frontend is there to take it."""
    figures_shown = []
    monkeypatch.setattr(widgets, "show", lambda output, *things: figures_shown.extend(things))
    return figures_shown


def test_changed_control_redraws(shown):
    explorer = widgets.explore(
        lambda nodes: figures.tree(chain(nodes)), height=3,
        nodes=ipywidgets.IntSlider(value=3, min=1, max=9))
    assert [len(f.axes[0].collections[1].get_offsets()) for f in shown] == [3]
    explorer.controls["nodes"].value = 5
    assert [len(f.axes[0].collections[1].get_offsets()) for f in shown] == [3, 5]
    assert matplotlib.pyplot.get_fignums() == []


def test_controls_report_final_values_and_the_picture_keeps_its_height(shown):
    explorer = widgets.explore(
        lambda a, b: figures.tree(chain(a)), height=2.5,
        a=ipywidgets.IntSlider(value=2, min=1, max=4),
        b=ipywidgets.Dropdown(options=["x", "y"]))
    assert explorer.controls["a"].continuous_update is False
    assert explorer.picture.layout.height == "316px"
    assert explorer.picture in explorer.children and explorer.errors in explorer.children


def test_error_is_one_visible_line_and_goes_away(shown):
    explorer = widgets.explore(
        lambda nodes: figures.tree(chain(nodes)), height=3,
        nodes=ipywidgets.IntSlider(value=2, min=0, max=9))
    assert explorer.errors.outputs == ()
    explorer.controls["nodes"].value = 0
    (message,) = explorer.errors.outputs
    assert message["text"] == "ValueError: num_nodes must be at least 1; got 0\n"
    assert message["name"] == "stdout"
    assert len(shown) == 1  # the last picture stays
    explorer.controls["nodes"].value = 4
    assert explorer.errors.outputs == () and len(shown) == 2


def test_two_controls_in_two_threads_draw_one_at_a_time_and_the_last_values_stay(shown):
    """ipykernel 7 runs the callbacks of two controls at once."""
    drawing, most = [], []
    begun, go_on = threading.Event(), threading.Event()

    def draw(a, b):
        drawing.append((a, b))
        most.append(len(drawing))
        if (a, b) == (1, 0):
            begun.set()
            assert go_on.wait(30)
        drawing.pop()
        return f"{a}, {b}"

    explorer = widgets.explore(draw, height=1, a=ipywidgets.IntSlider(0), b=ipywidgets.IntSlider(0))

    threads = []

    def change(name, value):
        control = explorer.controls[name]
        threads.append(threading.Thread(target=setattr, args=(control, "value", value)))
        threads[-1].start()
        while control.value != value:
            time.sleep(0.01)

    change("a", 1)
    assert begun.wait(30)
    change("b", 2)
    change("b", 3)
    go_on.set()
    for thread in threads:
        thread.join(30)
    assert shown[:2] == ["0, 0", "1, 0"] and shown[-1] == "1, 3"
    assert len(shown) == 3                     # what changed meanwhile is drawn once
    assert max(most) == 1


def test_error_for_the_starting_values_fails_the_cell(shown):
    with pytest.raises(ValueError, match="num_nodes must be at least 1; got 0"):
        widgets.explore(lambda nodes: figures.tree(chain(nodes)), height=3,
                        nodes=ipywidgets.IntSlider(value=0, min=0, max=9))


def test_check_answers(capsys):
    def test(answer):
        return answer == 3 or "Too small." if answer < 4 else 1 / 0

    for answer, said in [(None, "Not answered yet"), (3, "Right: 3"),
                         (2, "Not right yet: 2. Too small."),
                         (4, "Not right yet: 4. ZeroDivisionError: division by zero")]:
        widgets.check(answer, test)
        assert capsys.readouterr().out.startswith(said)


def test_explorer_in_a_real_kernel():
    """The picture arrives in its Output, a change replaces it, an error becomes a line."""
    cell = """
%matplotlib inline
import ipywidgets
from mla_kernels import figures, tree
from mla_kernels.widgets import explore
e = explore(lambda nodes: figures.tree(tree.chain(nodes)), height=2,
            nodes=ipywidgets.IntSlider(value=2, min=0, max=9))
e
"""
    notebook = nbformat.v4.new_notebook(cells=[
        nbformat.v4.new_code_cell(cell),
        nbformat.v4.new_code_cell("e.controls['nodes'].value = 5"),
        nbformat.v4.new_code_cell("e.controls['nodes'].value = 0"),
    ])
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    for code in notebook.cells:
        assert [o for o in code.outputs if o.get("name") == "stderr"] == []
    state = notebook.metadata.widgets["application/vnd.jupyter.widget-state+json"]["state"]
    outputs = [model["state"].get("outputs", []) for model in state.values()
               if model["model_name"] == "OutputModel"]
    drawn = [o for o in outputs if o and o[0]["output_type"] == "display_data"]
    said = [o for o in outputs if o and o[0]["output_type"] == "stream"]
    assert len(drawn) == 1 and len(drawn[0]) == 1 and "image/png" in drawn[0][0]["data"]
    assert [o[0]["text"] for o in said] == ["ValueError: num_nodes must be at least 1; got 0\n"]
