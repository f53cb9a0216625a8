"""What the trained model does: bits a byte and acceptance, read in the right order and in the
wrong one, and acceptance by family and size of the draft tree."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import records
from ..device import provenance
from ..synthetic import family_tree
from ..tree import DraftTree, chain
from . import text, train
from .cache import PagedCache
from .decode import Decoder, Drafter, Generation, walk

#: Families, and the children of a node (for EAGLE, ``topk``).
FAMILIES = {"chain": ("chain", 1), "k-ary, k = 2": ("k-ary", 2), "k-ary, k = 3": ("k-ary", 3),
            "EAGLE, topk = 4": ("EAGLE", 4), "DDTree": ("DDTree", 0)}

#: Nodes of a tree, the root included.
NODES = (2, 4, 8, 16, 32, 64, 128)

PROMPT, NEW_TOKENS = 96, 128


def drafter(family: str, nodes: int) -> Drafter:
    """Makes trees of one of :data:`FAMILIES`: siblings carry the likeliest tokens of their
    depth, in order."""
    kind, branching = FAMILIES[family]

    def draft(log_marginals: np.ndarray) -> DraftTree:
        tree = family_tree(kind, nodes, log_marginals, branching=branching)
        ranked = np.argsort(-log_marginals, axis=1, kind="stable")
        tokens = np.zeros(len(tree), dtype=np.int64)
        for node, children in enumerate(tree.children):
            if children:
                tokens[list(children)] = ranked[tree.depths[node], :len(children)]
        return DraftTree(tree.parents, tokens, tree.log_probs)

    return draft


def acceptance_length(plain: Sequence[Generation], draft: Drafter) -> float:
    """Tokens a verify step that trees would yield on texts generated greedily without a draft.

    Speculation loses nothing, so that its text is that text: which steps it takes through it
    follows from the marginals at each place. Steps whose tree may reach past the end of a text
    are left out.

    Args:
        plain: generated with ``keep_marginals``, a token a step.
    """
    tokens = steps = 0
    for g in plain:
        at = 0
        while at + len(g.marginals[0]) + 1 < len(g.tokens):
            tree = draft(g.marginals[at])
            _, chosen = walk(tree, lambda node, at=at, g=g, tree=tree:
                             g.tokens[at + 1 + tree.depths[node]])
            at += len(chosen)
            tokens += len(chosen)
            steps += 1
    return tokens / steps


def captured(decoder: Decoder, prompt: Sequence[int], layer: int = 0) -> dict[str, Any]:
    """One attention call of decoding, as :func:`mla_kernels.evidence.compare` takes it: that of
    the prompt's last token."""
    cache = PagedCache(decoder.layout, len(decoder.model.layers), 1 + len(prompt) // 16, 16)
    request, found = cache.open(), {}

    def watch(at: int, q, pool, batch, out) -> None:
        if at == layer:
            slots = torch.from_numpy(cache.slots(request, 0, len(prompt)))
            found.update(q=q, rows=pool[slots], out=out)

    ids = np.array(prompt, dtype=np.int64)
    decoder.forward(cache, [request], [chain(len(ids) - 1)], [ids[:-1]])
    cache.accept(request, range(len(ids) - 1))
    decoder.forward(cache, [request], [chain(1)], [ids[-1:]], watch=watch)
    return found


class EnginePool:
    """A decoder's cache with the methods of SGLang's pool, as
    :func:`mla_kernels.evidence.evidence_for` asks it."""

    def __init__(self, decoder: Decoder, slots: int = 64) -> None:
        self.decoder = decoder
        self.kv_lora_rank = decoder.layout.kv_lora_rank
        self.qk_rope_head_dim = decoder.layout.qk_rope_head_dim
        self.dtype = decoder.dtype
        pools = PagedCache(decoder.layout, len(decoder.model.layers), slots // 16, 16,
                           dtype=self.dtype).pools
        self.kv_buffer = [torch.zeros_like(pool)[:, None] for pool in pools]

    def set_mla_kv_buffer(self, layer, loc, cache_k_nope, cache_k_rope) -> None:
        self.kv_buffer[0][loc] = self.decoder.layout.concat(cache_k_nope, cache_k_rope)

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.decoder.read_as.latent(self.kv_buffer[layer_id])


def measure(folder: Path = train.FOLDER, *, prompts: int = 64, nodes: Sequence[int] = NODES,
            wrong_nodes: int = 32) -> tuple[dict[str, Any], np.ndarray]:
    """Measures on held-out text, in fp32.

    Args:
        prompts: how many texts are continued, by 128 tokens each.
        wrong_nodes: of the DDTree with which right and wrong order are compared.

    Returns:
        A record, and marginals ``[64, positions, vocabulary]`` (natural log, fp16) of one text's
        first steps, for the tree lab.
    """
    model = train.load(folder)
    held_out = train.held_out_text(folder)
    given = text.windows(held_out, prompts, PROMPT)
    orders, plain = {}, []
    for order in ("latent_first", "rope_first"):
        layout = model.config.layout(order)
        orders[order] = {}
        for name, read_as in (("right", layout), ("wrong", layout.swapped)):
            decoder = Decoder(model, layout, read_as=read_as)
            found = decoder.generate(given, NEW_TOKENS, keep_marginals=True)
            trees = decoder.generate(given, NEW_TOKENS, draft=drafter("DDTree", wrong_nodes))
            orders[order][name] = {
                "bits_per_byte": decoder.bits_per_byte(text.windows(held_out, prompts, 256)),
                "acceptance_length": sum(sum(g.accepted) for g in trees)
                / sum(len(g.accepted) for g in trees),
                "same_as_without_a_tree": sum(a.tokens == b.tokens
                                              for a, b in zip(found, trees, strict=True)),
                "samples": [bytes(g.tokens).decode("latin-1") for g in trees[:4]]}
            if (order, name) == ("latent_first", "right"):
                plain = found
    accepted = [{"family": family, "nodes": n,
                 "acceptance_length": acceptance_length(plain, drafter(family, n))}
                for family in FAMILIES for n in nodes]
    trained = json.loads((folder / "training.json").read_text())
    record = {
        "prompts": [bytes(p).decode("latin-1") for p in given[:4]], "texts": prompts,
        "prompt_tokens": PROMPT, "new_tokens": NEW_TOKENS, "wrong_nodes": wrong_nodes,
        "orders": orders, "acceptance": accepted, "training_commit": trained["commit"],
        "config": dataclasses.asdict(model.config), **provenance()}
    return record, np.stack(plain[0].marginals[:64]).astype(np.float16)


def load(folder: Path = train.FOLDER) -> dict[str, Any]:
    """The record that lies beside the weights."""
    return json.loads((folder / "measured.json").read_text())


def main(arguments: Sequence[str] | None = None) -> None:
    """``python -m mla_kernels.model measure``."""
    import argparse

    parser = argparse.ArgumentParser(prog="python -m mla_kernels.model measure",
                                     description="Measure acceptance and bits a byte.")
    parser.add_argument("--folder", type=Path, default=train.FOLDER)
    parser.add_argument("--prompts", type=int, default=64)
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    record, marginals = measure(args.folder, prompts=args.prompts)
    records.write(args.folder / "measured.json", record)
    np.savez_compressed(args.folder / "marginals.npz", log_marginals=np.minimum(marginals, 0))
    for order, ways in record["orders"].items():
        for name, way in ways.items():
            print(f"{order}, {name}: {way['bits_per_byte']:.2f} bits a byte, "
                  f"{way['acceptance_length']:.2f} tokens a step")
    for row in record["acceptance"]:
        print(f"{row['family']:16} {row['nodes']:4} nodes: {row['acceptance_length']:.3f}")
