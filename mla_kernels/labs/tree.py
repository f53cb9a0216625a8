"""The tree lab: one draft tree of any family, and what a verify call is given for it."""

from __future__ import annotations

import ast
from pathlib import Path

import ipywidgets
import numpy as np
import pandas as pd
from IPython.display import Image
from matplotlib.figure import Figure

from ..batch import VerifyBatch
from ..synthetic import family_tree, log_marginals, small_batch, with_log_probs
from ..tree import MAX_NODES, DraftTree, chain, eagle, from_choices
from ..widgets import Explorer, explore
from . import figures

#: Families, and the controls that shape each besides those of the drafter.
FAMILIES = {
    "chain": ("nodes",),
    "k-ary": ("nodes", "branching"),
    "EAGLE": ("nodes", "steps", "topk"),
    "DDTree": ("nodes",),
    "parents": ("text",),
    "choices": ("text",),
}

#: Inches that the picture and the table below it take.
HEIGHT = 8.2

#: Nodes that the lab starts with.
NODES = 24


def load_marginals(path: str | Path, step: int = 0) -> np.ndarray:
    """A drafter's recorded marginals.

    Args:
        path: a ``.npy`` file, or a ``.npz`` file with one array or one named
            ``log_marginals``: natural-log probabilities, ``[positions, vocabulary]``, or
            ``[steps, positions, vocabulary]`` for several drafts.
        step: which of several.

    Returns:
        ``[positions, vocabulary]`` float64.

    Raises:
        ValueError: no such file, another form, or a step that is not in it.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise ValueError(f"file must name a .npy or .npz file; {path} is none")
    try:
        data = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"file {path.name} cannot be read: {error}") from None
    if not isinstance(data, np.ndarray):
        names = data.files
        if "log_marginals" not in names and len(names) != 1:
            raise ValueError(f"file {path.name} must hold one array or log_marginals; it holds "
                             f"{', '.join(names)}")
        data = data["log_marginals" if "log_marginals" in names else names[0]]
    if data.ndim == 2:
        data = data[None]
    if data.ndim != 3:
        raise ValueError(f"file {path.name} must hold [positions, vocabulary] or [steps, "
                         f"positions, vocabulary]; got {list(data.shape)}")
    if not 0 <= step < len(data):
        raise ValueError(f"step must be in 0 .. {len(data) - 1}; got {step}")
    return np.asarray(data[step], dtype=np.float64)


def parse_tree(text: str, form: str) -> DraftTree:
    """A tree as it is written down: ``parents`` (``[-1, 0, 0, 1]``) or ``choices``, the paths of
    ranks of Medusa and EAGLE-1 (``[[0], [1], [0, 0]]``).

    Raises:
        ValueError: not a list of that form, or no tree.
    """
    try:
        value = ast.literal_eval(text.strip())
    except (SyntaxError, ValueError):
        raise ValueError(f"text must be a list such as {EXAMPLES[form]}; got {text[:60]!r}"
                         ) from None
    if form == "parents":
        if not isinstance(value, (list, tuple)) or not all(isinstance(v, int) for v in value):
            raise ValueError(f"parents must be a list of integers; got {text[:60]!r}")
        return DraftTree(np.array(value, dtype=np.int64))
    if not isinstance(value, (list, tuple)) or not all(
            isinstance(v, (list, tuple)) and all(isinstance(r, int) for r in v) for v in value):
        raise ValueError(f"choices must be a list of lists of ranks; got {text[:60]!r}")
    return from_choices(value)


EXAMPLES = {"parents": "[-1, 0, 0, 1, 1, 2, 4]",
            "choices": "[[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]"}


def build(
    family: str, *, nodes: int = NODES, branching: int = 3, steps: int = 5, topk: int = 4,
    text: str = "", marginals: np.ndarray,
) -> DraftTree:
    """A tree of one of :data:`FAMILIES`, with the path probabilities of ``marginals``.

    Args:
        nodes: wanted, the root included; fewer come back where the family or the drafter's
            block cannot give that many.
        branching: children a node, for k-ary; steps, topk: for EAGLE, at most the block.
        text: for parents and choices, see :func:`parse_tree`. Siblings get the most probable
            candidates in order.

    Raises:
        ValueError: an unknown family, or what the builders refuse.
    """
    if family not in FAMILIES:
        raise ValueError(f"family must be one of {', '.join(FAMILIES)}; got {family!r}")
    if family in EXAMPLES:
        return with_log_probs(parse_tree(text, family), marginals)
    if family == "EAGLE":
        ranked = -np.sort(-marginals, axis=1)[:, :topk]
        return eagle(min(steps, len(ranked)), topk, nodes, lambda path: ranked[len(path)])
    return family_tree(family, nodes, marginals, branching=branching)


def mask_bytes(nodes: int, context: int) -> dict[str, int | None]:
    """Bytes of one request's mask in each format; None where it cannot hold ``nodes``.

    FULL_MASK, QLEN_ONLY and QLEN_ONLY_BITPACKING are SGLang's ``TreeMaskMode``: a byte for
    each (draft, prefix or draft) pair, a byte for each pair of drafts, a word of 8, 16 or 32
    bits for each draft. FlashInfer packs its ``custom_mask`` to bits, prefix included.
    """
    word = next((bits // 8 for bits in (8, 16, 32) if nodes <= bits), None)
    return {
        "SGLang FULL_MASK": nodes * (context + nodes),
        "FlashInfer packed_custom_mask": -(-nodes * (context + nodes) // 8),
        "SGLang QLEN_ONLY": nodes * nodes,
        "SGLang QLEN_ONLY_BITPACKING": None if word is None else nodes * word,
        "64-bit ancestor masks": nodes * 8 if nodes <= 64 else None,
        "mask_bits (this package)": nodes * -(-nodes // 32) * 4,
    }


def marshalled(tree: DraftTree, context: int, page_size: int) -> tuple[VerifyBatch, int]:
    """A batch of two: a chain of three after 5 tokens, and ``tree`` after ``context`` tokens.

    Returns:
        The batch, and the slots of its pool.
    """
    return small_batch([chain(3), tree], [5, context], page_size=page_size)


def arrays(batch: VerifyBatch) -> pd.DataFrame:
    """What a batch consists of: dtype, shape, bytes and first values of each array."""
    rows = {}
    for name in ("qo_indptr", "kv_indptr", "kv_indices", "kv_lens", "draft_slots", "mask_bits"):
        tensor = getattr(batch, name)
        flat = tensor.flatten()
        first = [f"0x{v & 0xffffffff:x}" if name == "mask_bits" else str(v)
                 for v in flat[:8].tolist()]
        rows[name] = {"dtype": str(tensor.dtype).removeprefix("torch."),
                      "shape": str(list(tensor.shape)),
                      "bytes": f"{tensor.numel() * tensor.element_size():,}",
                      "first values": ", ".join(first) + (", …" if flat.numel() > 8 else "")}
    return pd.DataFrame.from_dict(rows, orient="index")


def picture(tree: DraftTree, context: int = 16384) -> Figure:
    """The lab's figure of one tree, for a prefix of ``context`` tokens."""
    return figures.tree_overview(
        tree, mask_bytes(len(tree), context),
        title=f"{len(tree)} nodes, {tree.acceptance_length:.2f} tokens a step")


def still() -> Image:
    """The picture that the lab starts with."""
    return figures.png(picture(build("DDTree", nodes=NODES, marginals=log_marginals())))


def lab(folder: str | Path = ".") -> Explorer:
    """The lab's controls, picture and arrays.

    Args:
        folder: where a file of marginals is looked for when it is named without one.
    """
    def draw(family, nodes, branching, steps, topk, text, file, step, block, first, decay,
             context, page_size):
        marginals = (load_marginals(Path(folder) / file.strip(), step) if file.strip() else
                     log_marginals(block, first=first, decay=decay))
        tree = build(family, nodes=nodes, branching=branching, steps=steps, topk=topk, text=text,
                     marginals=marginals)
        batch, _ = marshalled(tree, context, page_size)
        return figures.png(picture(tree, context)), arrays(batch)

    wide = {"width": "520px"}
    explorer = explore(
        draw, height=HEIGHT,
        family=ipywidgets.Dropdown(options=list(FAMILIES), value="DDTree", description="family"),
        nodes=ipywidgets.IntSlider(NODES, 1, MAX_NODES, description="nodes"),
        branching=ipywidgets.IntSlider(3, 1, 8, description="k"),
        steps=ipywidgets.IntSlider(5, 1, 16, description="steps"),
        topk=ipywidgets.IntSlider(4, 1, 16, description="topk"),
        text=ipywidgets.Textarea(EXAMPLES["parents"], description="list", rows=2, layout=wide),
        block=ipywidgets.IntSlider(7, 1, 16, description="drafted positions"),
        first=ipywidgets.FloatSlider(value=0.85, min=0.3, max=0.99, step=0.01,
                                     description="best token"),
        decay=ipywidgets.FloatSlider(value=0.96, min=0.5, max=1.0, step=0.01,
                                     description="decay by depth"),
        file=ipywidgets.Text("", description="marginals from a file", layout=wide,
                             placeholder="../data/tiny_mla/marginals.npz; empty: the sliders"),
        step=ipywidgets.BoundedIntText(0, 0, 1_000_000, description="draft in the file"),
        context=ipywidgets.SelectionSlider(
            options=[0, 16, 256, 4096, 16384, 65536, 131072], value=16384, description="context"),
        page_size=ipywidgets.SelectionSlider(options=[1, 16, 64, 256], value=1,
                                             description="page size"),
    )
    controls = explorer.controls

    def show_what_counts(_: object = None) -> None:
        family, recorded = controls["family"].value, bool(controls["file"].value.strip())
        shown = {"family", "file", "context", "page_size", *FAMILIES[family],
                 *(("step",) if recorded else ("block", "first", "decay"))}
        for name, control in controls.items():
            control.layout.display = None if name in shown else "none"

    def take_example(change: dict) -> None:
        if change["new"] in EXAMPLES and controls["text"].value in (*EXAMPLES.values(), ""):
            controls["text"].value = EXAMPLES[change["new"]]

    controls["family"].observe(take_example, "value")
    for name in ("family", "file"):
        controls[name].observe(show_what_counts, "value")
    show_what_counts()
    return explorer
