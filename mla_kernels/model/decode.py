"""Decoding with draft trees: one pass of the model verifies a tree for each request.

Plain decoding is the same with trees of one node, the root.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import torch

from ..attention import verify_attention
from ..batch import VerifyBatch
from ..layout import KVLayout
from ..tree import DraftTree, chain
from .cache import PagedCache
from .transformer import MLATransformer

#: Makes a tree of the marginals ``[positions, vocabulary]`` (natural log) of the tokens that come
#: after the root. ``tokens`` are vocabulary ids, the root's is not looked at.
Drafter = Callable[[np.ndarray], DraftTree]

#: Is shown each attention call: the layer, its queries ``[n, H, row_dim]`` in the rows' order, its
#: pool, the batch, and the result ``[n, H, kv_lora_rank]``.
Watch = Callable[[int, torch.Tensor, torch.Tensor, VerifyBatch, torch.Tensor], None]

#: Chooses the next token of each request from logits ``[n, vocabulary]``: of one request's nodes
#: one after the other, as they are visited.
Chooser = Callable[[int, torch.Tensor], int]


def no_draft(log_marginals: np.ndarray) -> DraftTree:
    """The root alone: a step yields one token."""
    return chain(1)


def greedy(request: int, logits: torch.Tensor) -> int:
    """The likeliest token."""
    return int(logits.argmax())


def sampler(seed: int, temperature: float = 1.0) -> Chooser:
    """Draws from the model's distribution, for each request from a stream of its own.

    A token is drawn at every node that is visited, and the walk goes on where a child of the
    node carries the drawn token. So each token comes from the distribution that the model has
    after the tokens before it, whatever was drafted: nothing is rejected or drawn again. The
    draws are the same in number and order as without a tree, so even the tokens are the same.
    """
    streams: dict[int, np.random.Generator] = {}

    def choose(request: int, logits: torch.Tensor) -> int:
        stream = streams.setdefault(request, np.random.default_rng([seed, request]))
        weights = torch.softmax(logits.double() / temperature, dim=-1).cumsum(-1)
        at = torch.searchsorted(weights, stream.random() * float(weights[-1]), right=True)
        return min(int(at), logits.numel() - 1)

    return choose


@dataclasses.dataclass
class Generation:
    """One request's text.

    Attributes:
        tokens: what was generated.
        accepted: for each step the tokens that it yielded, the bonus token included.
        marginals: for each step ``[positions, vocabulary]`` natural-log probabilities of the
            tokens after the root, where they were asked for.
    """

    tokens: list[int]
    accepted: list[int]
    marginals: list[np.ndarray]

    @property
    def acceptance_length(self) -> float:
        """Tokens a verify step, on average."""
        return sum(self.accepted) / len(self.accepted) if self.accepted else float("nan")


def walk(tree: DraftTree, choose: Callable[[int], int]) -> tuple[list[int], list[int]]:
    """The accepted path: from the root on, as long as a child carries the token that the model
    chooses at its parent.

    Args:
        tree: with ``tokens`` where it has more than the root.
        choose: the model's token after a node.

    Returns:
        The path's nodes, the root included, and the tokens: those of the path below the root,
        and the last choice, which no child carries (the bonus token).

    Raises:
        ValueError: siblings with the same token.
    """
    path, chosen = [0], []
    while True:
        chosen.append(choose(path[-1]))
        children = tree.children[path[-1]]
        tokens = [int(tree.tokens[c]) for c in children]
        if len(set(tokens)) < len(tokens):
            raise ValueError(f"children of node {path[-1]} have a token twice: {tokens}")
        if chosen[-1] not in tokens:
            return path, chosen
        path.append(children[tokens.index(chosen[-1])])


class Decoder:
    """Decodes with a model over a paged cache.

    Args:
        model: in evaluation mode, on the device and in the dtype to decode with.
        layout: the order in which rows are written.
        read_as: the layout that the attention call is told; default ``layout``. Another one
            makes it read the wrong values, as a wrong belief about an engine does. Queries are
            in the order of the rows, so that the scores stay right.
        page_size: of the cache.
        backend: of :func:`mla_kernels.verify_attention`.
    """

    def __init__(self, model: MLATransformer, layout: KVLayout, *, read_as: KVLayout | None = None,
                 page_size: int = 16, backend: str = "auto") -> None:
        self.model, self.layout, self.read_as = model, layout, read_as or layout
        self.page_size, self.backend = page_size, backend
        weight = model.embedding.weight
        self.dtype, self.device = weight.dtype, weight.device

    @torch.inference_mode()
    def forward(self, cache: PagedCache, requests: Sequence[int], trees: Sequence[DraftTree],
                tokens: Sequence[np.ndarray], *,
                watch: Watch | None = None) -> list[torch.Tensor]:
        """Runs the model on the trees' nodes, whose rows go to the slots after each prefix.

        Args:
            tokens: for each request the token of each node, the root's too.
            watch: is called in each layer.

        Returns:
            For each request the nodes' hidden states ``[nodes, hidden_size]``.
        """
        lengths = [cache.lengths[r] for r in requests]
        slots = [cache.slots(r, n, n + len(t)) for r, n, t in
                 zip(requests, lengths, trees, strict=True)]
        batch = VerifyBatch.from_requests(
            trees, lengths, [cache.pages[r] for r in requests], page_size=cache.page_size,
            draft_slots=slots, device=self.device)
        where = torch.from_numpy(np.concatenate(slots)).to(self.device)
        positions = np.concatenate([n + t.depths for n, t in zip(lengths, trees, strict=True)])

        def attend(layer, q_latent, q_rope, latent, rope):
            pool = cache.pools[layer]
            pool[where] = self.layout.concat(latent, rope).to(pool.dtype)
            q = self.layout.concat(q_latent, q_rope)
            out, _ = verify_attention(q, pool, batch, sm_scale=self.model.config.sm_scale,
                                      layout=self.read_as, backend=self.backend)
            if watch:
                watch(layer, q, pool, batch, out)
            return out

        hidden = self.model.step(torch.from_numpy(np.concatenate(tokens)).to(self.device),
                                 torch.from_numpy(positions).to(self.device), attend)
        return list(hidden.split([len(t) for t in trees]))

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int, *,
                 draft: Drafter = no_draft, choose: Chooser = greedy,
                 keep_marginals: bool = False) -> list[Generation]:
        """Generates ``new_tokens`` tokens for each prompt, all prompts in one batch.

        Args:
            prompts: token ids, each at least one and at most 1,024 of them.
            draft: makes the tree of a step.
            choose: :func:`greedy` or a :func:`sampler`.
            keep_marginals: keep what each step's tree was made of.

        Raises:
            ValueError: an empty or too long prompt.
        """
        for i, prompt in enumerate(prompts):
            if not 1 <= len(prompt) <= 1024:
                raise ValueError(f"prompts[{i}] must have 1 .. 1024 tokens; got {len(prompt)}")
        longest = max(map(len, prompts)) + new_tokens + 1024
        cache = PagedCache(self.layout, len(self.model.layers),
                           len(prompts) * -(-longest // self.page_size), self.page_size,
                           dtype=self.dtype, device=self.device)
        found = [Generation([], [], []) for _ in prompts]
        # The prompt is a chain whose nodes are all accepted, whatever the model thinks of it.
        trees = [chain(len(prompt)) for prompt in prompts]
        requests = [cache.open() for _ in prompts]
        hidden = self.forward(cache, requests, trees,
                              [np.array(prompt, dtype=np.int64) for prompt in prompts])
        last = []
        for r, h in zip(requests, hidden, strict=True):
            cache.accept(r, range(len(h)))
            last.append(h[-1])
            found[r].tokens.append(choose(r, self.model.logits(h[-1])))
        while requests := [r for r, g in enumerate(found) if len(g.tokens) < new_tokens]:
            roots = torch.tensor([found[r].tokens[-1] for r in requests], device=self.device)
            marginals = torch.log_softmax(self.model.draft_logits(
                torch.stack([last[r] for r in requests]), roots).float(), dim=-1).cpu().numpy()
            trees = [draft(m) for m in marginals]
            tokens = []
            for r, tree in zip(requests, trees, strict=True):
                ids = np.zeros(len(tree), dtype=np.int64) if tree.tokens is None else (
                    tree.tokens.copy())
                ids[0] = found[r].tokens[-1]
                tokens.append(ids)
            hidden = self.forward(cache, requests, trees, tokens)
            for r, tree, h, m in zip(requests, trees, hidden, marginals, strict=True):
                logits = self.model.logits(h)
                path, chosen = walk(tree, lambda node, r=r, logits=logits: choose(r, logits[node]))
                cache.accept(r, path)
                last[r] = h[path[-1]]
                found[r].tokens += chosen
                found[r].accepted.append(len(chosen))
                if keep_marginals:
                    found[r].marginals.append(m)
        for g in found:
            del g.tokens[new_tokens:]
        return found

    @torch.inference_mode()
    def bits_per_byte(self, texts: Sequence[Sequence[int]]) -> float:
        """Of each text's tokens after the first, under the model as this decoder reads its
        cache, averaged."""
        cache = PagedCache(self.layout, len(self.model.layers), sum(
            -(-len(t) // self.page_size) for t in texts), self.page_size, dtype=self.dtype,
            device=self.device)
        requests = [cache.open() for _ in texts]
        hidden = self.forward(cache, requests, [chain(len(t)) for t in texts],
                              [np.array(t, dtype=np.int64) for t in texts])
        losses = [torch.nn.functional.cross_entropy(
            self.model.logits(h[:-1]).double(), torch.tensor(t[1:], device=self.device),
            reduction="none") for h, t in zip(hidden, texts, strict=True)]
        return float(torch.cat(losses).mean() / np.log(2))
