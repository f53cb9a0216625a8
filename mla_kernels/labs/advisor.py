"""The budget advisor: tokens a second against the node budget, and whether a tree pays.

A step verifies every request's draft: ``layers`` calls of attention, and the rest of the model.
It yields the accepted tokens and one more. More nodes raise the numerator ever less, and the
denominator ever more.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import ipywidgets
import numpy as np
import pandas as pd
from IPython.display import HTML, Image
from matplotlib.figure import Figure

from .. import measurements, predict
from ..device import RTX_5090, RTX_PRO_6000, Ceiling, attention_bytes, attention_flops
from ..synthetic import log_marginals
from ..tree import MAX_NODES, DraftTree, chain, ddtree
from ..widgets import Explorer, explore
from ..workload import Shape
from . import figures

#: Seconds of one layer's verify call of a shape, and ``"measured"`` or ``"modelled"``. Raises
#: ValueError for a shape that it knows nothing of.
Cost = Callable[[Shape], tuple[float, str]]


# -- what a call costs --------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Measured:
    """Recorded times, and between them straight lines in the logarithms of nodes and context.

    Args:
        frame: a run as :func:`mla_kernels.measurements.load` returns it.
        provider: whose times.
    """

    frame: pd.DataFrame
    provider: str = "cuda"

    def __call__(self, shape: Shape) -> tuple[float, str]:
        """Raises ValueError outside what was measured: other batch sizes or head counts, more
        nodes, or contexts without a longer and a shorter one."""
        rows = self.frame[(self.frame["provider"] == self.provider)
                          & (self.frame["batch_size"] == shape.batch_size)
                          & (self.frame["num_heads"] == shape.num_heads)
                          & self.frame["latency_us"].notna()]
        lines: dict[int, float] = {}
        for context, line in rows.groupby("context"):
            line = line.sort_values("num_nodes")
            nodes = line["num_nodes"].to_numpy(float)
            if nodes[0] <= shape.num_nodes <= nodes[-1]:
                lines[int(context)] = float(np.exp(np.interp(
                    math.log(shape.num_nodes), np.log(nodes), np.log(line["latency_us"]))))
        below = max((c for c in lines if c <= shape.context), default=None)
        above = min((c for c in lines if c >= shape.context), default=None)
        if below is None or above is None:
            known = "; ".join(f"{c:,} with {int(g.num_nodes.min())} to {int(g.num_nodes.max())}"
                              for c, g in rows.groupby("context"))
            raise ValueError(
                f"not measured: {shape}. For {shape.batch_size} requests of {shape.num_heads} "
                "heads, measured contexts and nodes are: " + (known or "none"))
        if below == above:
            return lines[below] * 1e-6, "measured"
        share = math.log(shape.context / below) / math.log(above / below)
        micros = math.exp((1 - share) * math.log(lines[below]) + share * math.log(lines[above]))
        return micros * 1e-6, "measured"


@dataclasses.dataclass(frozen=True)
class Floor:
    """The least time a card could take: its data sheet's rates over the call's bytes and
    arithmetic. No kernel reaches it."""

    card: Ceiling

    def __call__(self, shape: Shape) -> tuple[float, str]:
        args = dataclasses.astuple(shape)
        return self.card.floor(attention_flops(*args), attention_bytes(*args)), "modelled"


@dataclasses.dataclass(frozen=True)
class Modelled:
    """A card's time by :mod:`mla_kernels.predict`, fitted to a recorded run."""

    card: Ceiling
    efficiency: predict.Efficiency

    def __call__(self, shape: Shape) -> tuple[float, str]:
        args = dataclasses.astuple(shape)
        return predict.predict(args, self.card, self.efficiency).total_us * 1e-6, "modelled"


@functools.cache
def _efficiency(path: Path) -> predict.Efficiency:
    return predict.calibrate(measurements.load(path))


def costs() -> dict[str, Cost]:
    """What the advisor can ask, by name: recorded cards, the model of those that nobody
    measured, and data sheets' floors."""
    known: dict[str, Cost] = {}
    for path in measurements.files():
        frame = measurements.of_tree(measurements.load(path))
        known[f"{frame['gpu'].iloc[0]} (measured)"] = Measured(frame)
    fitted = [path for path in measurements.files() if "h200" in path.name]
    for card in (RTX_PRO_6000, RTX_5090):
        if fitted:
            known[f"{card.name} (modelled)"] = Modelled(card, _efficiency(fitted[-1]))
        known[f"{card.name} (modelled: its floor)"] = Floor(card)
    return known


# -- what a draft yields ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """Expected tokens a step by nodes, the root included: ``tree[n]`` and ``chain[n]``. A chain
    may be known for fewer nodes. ``tree_at`` gives the tree of a budget, where there is one."""

    tree: Mapping[int, float]
    chain: Mapping[int, float]
    tree_at: Callable[[int], DraftTree] | None = None


def from_marginals(marginals: np.ndarray, max_nodes: int = 256) -> Acceptance:
    """DDTree's trees, and chains of best tokens, by the drafter's own estimate."""
    whole = ddtree(marginals, min(max_nodes, MAX_NODES) - 1)
    # A budget's tree is the beginning of a larger one's: nodes come in the order of the pops.
    tree = np.cumsum(np.exp(whole.log_probs))
    best = np.cumsum(np.concatenate([[1.0], np.exp(np.cumsum(np.max(marginals, axis=1)))]))
    return Acceptance(dict(enumerate(tree, start=1)),
                      dict(enumerate(best[:max_nodes], start=1)),
                      lambda nodes: ddtree(marginals, nodes - 1))


def parse_acceptance(text: str, name: str = "acceptance") -> dict[int, float]:
    """Pairs such as ``8: 4.1, 16: 4.7``; between them straight lines over the logarithm of the
    nodes.

    Raises:
        ValueError: another form, nodes that do not rise, or lengths outside 1 .. nodes.
    """
    try:
        pairs = [(int(n), float(a)) for n, a in (p.split(":") for p in text.split(",") if
                                                 p.strip())]
    except ValueError:
        raise ValueError(f"{name} must look like 1: 1, 8: 4.1, 16: 4.7; got {text!r}") from None
    nodes = [n for n, _ in pairs]
    if not pairs or nodes != sorted(set(nodes)) or nodes[0] < 1 or nodes[-1] > MAX_NODES:
        raise ValueError(f"{name} must name rising nodes in 1 .. {MAX_NODES}; got {nodes}")
    for n, length in pairs:
        if not 1 <= length <= n:
            raise ValueError(f"{name} must be in 1 .. {n} for {n} nodes; got {length}")
    every = range(nodes[0], nodes[-1] + 1)
    lengths = np.interp(np.log(every), np.log(nodes), [a for _, a in pairs])
    return dict(zip(every, lengths.tolist(), strict=True))


# -- the advice ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Step:
    """All of a decode step that is not attention.

    Args:
        layers: attention calls.
        rest: seconds besides attention, of one token a request.
        per_token: seconds more for each further token in the batch.
        draft: seconds of the drafter; nothing without speculation.
        tree_extra: seconds that a tree costs and a chain does not: building it, masks, an
            engine's slower path.
    """

    layers: int
    rest: float
    per_token: float = 0.0
    draft: float = 0.0
    tree_extra: float = 0.0


@dataclasses.dataclass(frozen=True)
class Point:
    """One budget: expected tokens a step, seconds a step, tokens a second of the batch."""

    nodes: int
    length: float
    seconds: float
    rate: float


@dataclasses.dataclass(frozen=True)
class Advice:
    """Tokens a second of every budget that could be worked out, and what to do."""

    tree: tuple[Point, ...]
    chain: tuple[Point, ...]
    plain: Point
    kind: str
    missing: str = ""

    @property
    def best_tree(self) -> Point:
        return max(self.tree, key=lambda p: p.rate)

    @property
    def best_chain(self) -> Point:
        return max(self.chain, key=lambda p: p.rate, default=self.plain)

    @property
    def choice(self) -> str:
        """``tree``, ``chain`` or ``none``; equals go to what is simpler."""
        best, margin = self.plain, 1 + 1e-9
        name = "none"
        for other, kind in ((self.best_chain, "chain"), (self.best_tree, "tree")):
            if other.rate > best.rate * margin:
                best, name = other, kind
        return name

    @property
    def verdict(self) -> str:
        if self.choice == "tree":
            t, c = self.best_tree, self.best_chain
            return (f"A tree of {t.nodes} nodes: {t.rate:,.0f} tokens/s, {t.rate / c.rate:.2f} "
                    f"times the best chain, {t.rate / self.plain.rate:.2f} times no speculation.")
        instead = (f"take a chain of {self.best_chain.nodes} nodes, {self.best_chain.rate:,.0f} "
                   "tokens/s" if self.choice == "chain" else
                   f"do not speculate, {self.plain.rate:,.0f} tokens/s")
        return (f"A tree does not pay here: {instead}, against {self.best_tree.rate:,.0f} of the "
                f"best tree ({self.best_tree.nodes} nodes).")


def advise(cost: Cost, acceptance: Acceptance, step: Step, *, batch_size: int, num_heads: int,
           context: int, chain_cost: Cost | None = None) -> Advice:
    """Works out every budget.

    Args:
        cost: of a call with a tree; chain_cost: with a chain, by default the same (this
            package's kernel does the same work for both; others have faster ones for chains).

    Raises:
        ValueError: the cost of a single token is not known, or no budget's is.
    """
    kinds, missing = set(), ""

    def point(nodes: int, length: float, of: Cost, extra: float) -> Point | None:
        nonlocal missing
        try:
            seconds, kind = of(Shape(batch_size, num_heads, nodes, context))
        except ValueError as error:
            missing = missing or str(error)
            return None
        kinds.add(kind)
        seconds = (step.layers * seconds + step.rest
                   + step.per_token * batch_size * (nodes - 1) + extra)
        return Point(nodes, length, seconds, batch_size * length / seconds)

    def line(lengths: Mapping[int, float], of: Cost, extra: float) -> tuple[Point, ...]:
        made = (point(n, a, of, extra) for n, a in lengths.items() if n > 1)
        return tuple(p for p in made if p)

    plain = point(1, 1.0, cost, 0.0)
    if plain is None:
        raise ValueError(missing)
    of_chain = line(acceptance.chain, chain_cost or cost, step.draft)
    of_tree = line(acceptance.tree, cost, step.draft + step.tree_extra)
    if not of_tree:
        raise ValueError(missing or "acceptance has no tree of 2 nodes or more")
    kind = " and ".join(sorted(kinds))
    return Advice(of_tree, of_chain, plain, kind, missing)


# -- export -------------------------------------------------------------------------------


def choices(tree: DraftTree) -> list[list[int]]:
    """Each node's path of ranks among its siblings, breadth first, without the root."""
    paths: list[list[int]] = [[]]
    rank = [0] * len(tree)
    for kids in tree.children:
        for r, kid in enumerate(kids):
            rank[kid] = r
    for node in range(1, len(tree)):
        paths.append(paths[tree.parents[node]] + [rank[node]])
    return sorted(paths[1:], key=lambda p: (len(p), p))


def export(tree: DraftTree) -> str:
    """A tree as JSON: parents, choices, and the arguments of engines. ``sglang`` holds the
    sizes from which its EAGLE worker grows a tree of its own for every step; ``vllm`` fixes
    this very shape (``speculative_token_tree``)."""
    wide = max(map(len, tree.children), default=0)
    paths = choices(tree)
    data = {
        "nodes": len(tree), "parents": tree.parents.tolist(), "choices": paths,
        "acceptance_length": None if tree.log_probs is None else tree.acceptance_length,
        "arguments": {
            "sglang": f"--speculative-num-steps {tree.depth} --speculative-eagle-topk {wide} "
                      f"--speculative-num-draft-tokens {len(tree)}",
            "vllm": "--speculative-config " + "'" + json.dumps({
                "num_speculative_tokens": len(paths),
                "speculative_token_tree": str([tuple(p) for p in paths])}) + "'",
        },
    }
    return json.dumps(data)


# -- pictures and controls ----------------------------------------------------------------

HEIGHT = 6.2
DEFAULT = {"batch_size": 1, "num_heads": 8, "context": 16384}
STEP = Step(layers=61, rest=12e-3, per_token=40e-6, draft=1.5e-3, tree_extra=0.5e-3)


def picture(advice: Advice, title: str = "") -> Figure:
    return figures.budget(
        {"tree": [(p.nodes, p.rate) for p in advice.tree],
         "chain": [(p.nodes, p.rate) for p in advice.chain]},
        advice.plain.rate, best=(advice.best_tree.nodes, advice.best_tree.rate), title=title,
        note=f"Attention {advice.kind}; the rest of the step as typed in.")


def still() -> Image:
    """The picture that the advisor starts with."""
    name, cost = next(iter(costs().items()))
    advice = advise(cost, from_marginals(log_marginals()), STEP, **DEFAULT)
    return figures.png(picture(advice, name))


def chosen(advice: Advice, acceptance: Acceptance) -> DraftTree | None:
    """The draft that the advice is for; None for no speculation, or where its shape is not
    known."""
    if advice.choice == "chain":
        return chain(advice.best_chain.nodes)
    if advice.choice == "tree" and acceptance.tree_at:
        return acceptance.tree_at(advice.best_tree.nodes)
    return None


def lab(known: Mapping[str, Cost] | None = None, heads: Sequence[int] = (8, 16, 32, 64, 128)
        ) -> Explorer:
    """The advisor's controls and picture.

    Args:
        known: costs by name, default :func:`costs`.
    """
    known = known or costs()

    def draw(gpu, num_heads, batch_size, context, layers, rest, per_token, draft, tree_extra,
             first, decay, typed, typed_chain):
        acceptance = from_marginals(log_marginals(first=first, decay=decay))
        if typed.strip():
            acceptance = Acceptance(
                parse_acceptance(typed, "tree's tokens"),
                parse_acceptance(typed_chain, "chain's tokens") if typed_chain.strip() else {})
        step = Step(layers, rest * 1e-3, per_token * 1e-3, draft * 1e-3, tree_extra * 1e-3)
        advice = advise(known[gpu], acceptance, step, batch_size=batch_size,
                        num_heads=num_heads, context=context)
        shape = chosen(advice, acceptance)
        text = export(shape) if shape else "Nothing to export."
        limit = f"<p>Budgets left out. {advice.missing}</p>" if advice.missing else ""
        return (HTML(f"<p><b>{advice.verdict}</b></p>{limit}"),
                figures.png(picture(advice, gpu)),
                HTML(f"<p>Export:</p><pre style='white-space: pre-wrap'>{text}</pre>"))

    def number(value: float, label: str) -> ipywidgets.BoundedFloatText:
        return ipywidgets.BoundedFloatText(value=value, min=0, max=10_000, description=label,
                                           layout={"width": "300px"})

    return explore(
        draw, height=HEIGHT,
        gpu=ipywidgets.Dropdown(options=list(known), description="GPU"),
        num_heads=ipywidgets.Dropdown(options=list(heads), value=8, description="heads a rank"),
        batch_size=ipywidgets.IntSlider(1, 1, 64, description="requests"),
        context=ipywidgets.SelectionSlider(options=[4096, 8192, 16384, 32768, 65536, 131072],
                                           value=16384, description="context"),
        layers=ipywidgets.IntSlider(STEP.layers, 1, 128, description="layers"),
        rest=number(STEP.rest * 1e3, "rest of the step, ms"),
        per_token=number(STEP.per_token * 1e3, "and for each further token, ms"),
        draft=number(STEP.draft * 1e3, "drafter, ms"),
        tree_extra=number(STEP.tree_extra * 1e3, "what only a tree costs, ms"),
        first=ipywidgets.FloatSlider(value=0.85, min=0.3, max=0.99, step=0.01,
                                     description="best token"),
        decay=ipywidgets.FloatSlider(value=0.96, min=0.5, max=1.0, step=0.01,
                                     description="decay by depth"),
        typed=ipywidgets.Text("", description="tree's tokens a step", layout={"width": "520px"},
                              placeholder="8: 3.2, 16: 3.3; empty: the two sliders"),
        typed_chain=ipywidgets.Text("", description="chain's tokens a step",
                                    layout={"width": "520px"}, placeholder="8: 3.2"),
    )
