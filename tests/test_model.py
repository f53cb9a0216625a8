"""The small language model: its absorbed form, its trees, its cache, its training."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from mla_kernels.model import text, train
from mla_kernels.model.cache import PagedCache
from mla_kernels.model.decode import Decoder, greedy, no_draft, sampler, walk
from mla_kernels.model.transformer import MLATransformer, ModelConfig
from mla_kernels.tree import DraftTree, chain, ddtree, eagle, kary

SMALL = ModelConfig(num_hidden_layers=2, hidden_size=48, num_attention_heads=3, q_lora_rank=24,
                    qk_nope_head_dim=16, v_head_dim=24, intermediate_size=64, vocab_size=40,
                    num_draft_heads=5)
ORDERS = ("latent_first", "rope_first")


def random_model(seed, config=SMALL, sharpness=20.0):
    """Random weights whose next-token distributions are far from uniform, and which look at more
    than the last token."""
    torch.manual_seed(seed)
    model = MLATransformer(config).double().eval().requires_grad_(False)
    with torch.no_grad():
        model.embedding.weight.mul_(sharpness)
        for layer in model.layers:
            layer.o.weight.mul_(200)
            layer.down.weight.mul_(50)
    return model


def random_tree(rng, nodes):
    parents = np.array([-1] + [int(rng.integers(0, i)) for i in range(1, nodes)])
    tree = DraftTree(parents)
    tokens = np.zeros(nodes, dtype=np.int64)
    for children in tree.children:
        tokens[list(children)] = rng.permutation(SMALL.vocab_size)[:len(children)]
    return DraftTree(parents, tokens=tokens)


# -- one model, two forms -----------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
def test_absorbed_over_a_paged_cache_is_the_forward_of_training(order, seed, rng):
    model = random_model(seed)
    texts = [rng.integers(0, SMALL.vocab_size, n) for n in (1, 7, 40)]
    decoder = Decoder(model, SMALL.layout(order), page_size=8)
    cache = PagedCache(decoder.layout, 2, 40, 8, dtype=torch.float64)
    requests = [cache.open() for _ in texts]
    for begin, end in ((0, 1), (1, 5), (5, 40)):  # in pieces, over what is cached by then
        part = [(r, t[begin:end]) for r, t in zip(requests, texts, strict=True) if len(t) > begin]
        hidden = decoder.forward(cache, [r for r, _ in part], [chain(len(t)) for _, t in part],
                                 [t for _, t in part])
        for (r, t), h in zip(part, hidden, strict=True):
            whole = model(torch.from_numpy(texts[r])[None])[0]
            torch.testing.assert_close(h, whole[begin:begin + len(t)], rtol=1e-9, atol=1e-9)
            cache.accept(r, range(len(t)))


@pytest.mark.parametrize("order", ORDERS)
def test_a_node_sees_its_path_alone(order, seed, rng):
    """Each node's hidden state is that of the text of its path; tokens with the id 0, of which
    there are some, are tokens like others."""
    model = random_model(seed)
    prompt = rng.integers(0, SMALL.vocab_size, 11)
    tree = random_tree(rng, 24)
    tokens = tree.tokens.copy()
    for children in tree.children:  # a child with the token 0, wherever there are children
        if children and 0 not in tokens[list(children)]:
            tokens[children[-1]] = 0
    tokens[0] = 0
    decoder = Decoder(model, SMALL.layout(order), page_size=4)
    cache = PagedCache(decoder.layout, 2, 40, 4, dtype=torch.float64)
    request = cache.open()
    decoder.forward(cache, [request], [chain(11)], [prompt])
    cache.accept(request, range(11))
    (hidden,) = decoder.forward(cache, [request], [tree], [tokens])
    assert (tokens[1:] == 0).any()
    for node in range(len(tree)):
        path = torch.from_numpy(np.concatenate([prompt, tokens[tree.path(node)]]))
        torch.testing.assert_close(hidden[node], model(path[None])[0, -1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("order", ORDERS)
def test_the_other_order_changes_the_text_and_nothing_crashes(order, seed, rng):
    model = random_model(seed)
    layout = SMALL.layout(order)
    prompts = rng.integers(0, SMALL.vocab_size, (4, 12)).tolist()
    right = Decoder(model, layout).generate(prompts, 12)
    wrong = Decoder(model, layout, read_as=layout.swapped).generate(prompts, 12)
    assert [g.tokens for g in right] != [g.tokens for g in wrong]
    assert np.isfinite(Decoder(model, layout, read_as=layout.swapped).bits_per_byte(prompts))


# -- the cache ----------------------------------------------------------------------------


@pytest.mark.parametrize("arrange", [list, lambda p: p[::-1], lambda p: [p[-1], *p[:-1]]],
                         ids=["from the root", "from the leaf", "mixed"])
def test_accepted_rows_move_together(arrange, rng):
    layout = SMALL.layout("latent_first")
    for _ in range(20):
        cache = PagedCache(layout, 2, 30, 4, seed=int(rng.integers(1000)))
        mine, other = cache.open(), cache.open()
        rows = {}
        for request, nodes in ((mine, int(rng.integers(0, 9))), (other, 5)):
            slots = cache.slots(request, 0, nodes)
            for pool in cache.pools:
                pool[slots] = torch.randn(nodes, layout.row_dim)
            cache.lengths[request] = nodes
            rows[request] = [pool[slots].clone() for pool in cache.pools]
        tree = random_tree(rng, 12)
        slots = cache.slots(mine, cache.lengths[mine], cache.lengths[mine] + 12)
        drafted = [torch.randn(12, layout.row_dim) for _ in cache.pools]
        for pool, new in zip(cache.pools, drafted, strict=True):
            pool[slots] = new
        path = tree.path(int(rng.choice(tree.leaves)))
        before = cache.lengths[mine]
        cache.accept(mine, arrange(path))
        assert cache.lengths == [before + len(path), 5]
        for i, pool in enumerate(cache.pools):
            kept = pool[cache.slots(mine, 0, cache.lengths[mine])]
            assert torch.equal(kept, torch.cat([rows[mine][i], drafted[i][path]]))
            assert torch.equal(pool[cache.slots(other, 0, 5)], rows[other][i])


def test_nodes_accepted_twice_are_refused():
    cache = PagedCache(SMALL.layout("latent_first"), 1, 4, 4)
    request = cache.open()
    for nodes in ([0, 1, 1], []):
        with pytest.raises(ValueError, match="nodes must be different ones"):
            cache.accept(request, nodes)


def test_pages_are_given_back_and_run_out():
    cache = PagedCache(SMALL.layout("latent_first"), 1, 3, 4)
    first, second = cache.open(), cache.open()
    assert len(set(cache.slots(first, 0, 9).tolist())) == 9
    with pytest.raises(ValueError, match="num_pages is too small: request 1 needs 1 pages"):
        cache.slots(second, 0, 1)
    cache.close(first)
    assert len(cache.slots(second, 0, 12)) == 12


# -- acceptance ---------------------------------------------------------------------------


def test_the_walk_goes_where_the_model_goes():
    tree = DraftTree(np.array([-1, 0, 0, 2, 2, 4]), tokens=np.array([9, 0, 7, 1, 0, 3]))
    choice = {0: 7, 2: 0, 4: 8}
    assert walk(tree, choice.__getitem__) == ([0, 2, 4], [7, 0, 8])
    assert walk(tree, {0: 5}.__getitem__) == ([0], [5])
    assert walk(chain(1), {0: 5}.__getitem__) == ([0], [5])
    twins = DraftTree(np.array([-1, 0, 0]), tokens=np.array([9, 4, 4]))
    with pytest.raises(ValueError, match="children of node 0 have a token twice"):
        walk(twins, lambda node: 4)


def drafters(width):
    """Trees of five families, with tokens of the marginals' ranks."""
    def ranked(tree, m):
        order = np.argsort(-m, axis=1)
        tree = tree if tree.depth <= len(m) else chain(len(m) + 1)
        ranks = np.zeros(len(tree), dtype=np.int64)
        for children in tree.children:
            ranks[list(children)] = range(len(children))
        tokens = [0] + [int(order[d - 1, r]) for d, r in zip(tree.depths[1:], ranks[1:],
                                                             strict=True)]
        return DraftTree(tree.parents, tokens=np.array(tokens))

    return {
        "chain": lambda m: ranked(chain(len(m) + 1), m),
        "2-ary": lambda m: ranked(kary(2, 15), m),
        "5, 3, 1": lambda m: ranked(kary([5, 3, 1]), m),
        "EAGLE": lambda m: ranked(eagle(4, 3, 14), m),
        "DDTree": lambda m: ddtree(m, width),
        "one branch too many": lambda m: ranked(kary([min(40, m.shape[1])]), m),
    }


@pytest.mark.parametrize("order", ORDERS)
def test_greedy_is_the_same_with_every_tree_of_a_random_model(order, seed, rng):
    model = random_model(seed)
    prompts = [rng.integers(0, SMALL.vocab_size, int(n)).tolist()
               for n in rng.integers(1, 30, 12)]
    decoder = Decoder(model, SMALL.layout(order), page_size=4)
    plain = decoder.generate(prompts, 20)
    for prompt, g in zip(prompts, plain, strict=True):  # without a cache at all
        ids = list(prompt)
        for token in g.tokens:
            assert int(model.logits(model(torch.tensor([ids]))[0, -1]).argmax()) == token
            ids.append(token)
        assert g.accepted == [1] * 19 and len(g.tokens) == 20
    for name, draft in drafters(12).items():
        found = decoder.generate(prompts, 20, draft=draft)
        assert [g.tokens for g in found] == [g.tokens for g in plain], name


def test_greedy_with_a_drafter_that_knows(seed, rng):
    """A drafter that is always right: every step accepts all of a chain."""
    model = random_model(seed)
    prompts = rng.integers(0, SMALL.vocab_size, (3, 9)).tolist()
    decoder = Decoder(model, SMALL.layout("rope_first"), page_size=8)
    plain = [g.tokens for g in decoder.generate(prompts, 25)]
    told = iter([(i, s) for s in range(1, 25, 6) for i in range(3)])

    def oracle(m):
        i, at = next(told)
        tokens = [0, *plain[i][at:at + 5]]
        return DraftTree(np.arange(len(tokens)) - 1, tokens=np.array(tokens))

    found = decoder.generate(prompts, 25, draft=oracle)
    assert [g.tokens for g in found] == plain
    assert [g.accepted for g in found] == [[6, 6, 6, 6]] * 3


def statistic(counts, expected):
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("family", ["chain", "2-ary", "DDTree"])
def test_sampling_keeps_the_distribution(family, seed):
    """All texts of three tokens, counted, against their exact probabilities: chi-square at a
    level of 1e-4. Its power is simulated: a distribution at a total variation of 0.1 from the
    model's is found out in more than 99 of 100 cases. Taking the likeliest token instead of the
    drawn one, 30 times in 100, is such a one."""
    config = dataclasses.replace(SMALL, num_hidden_layers=1, vocab_size=3, num_draft_heads=2)
    model = random_model(seed, config, sharpness=6.0)
    prompt, count, weights = [1, 0, 2, 2], 2500, np.array([9, 3, 1])

    exact = np.zeros((3, 3, 3))
    with torch.no_grad():
        for a, b in np.ndindex(3, 3):
            hidden = model(torch.tensor([[*prompt, a, b]]))[0, -3:]
            p = torch.softmax(model.logits(hidden), -1).numpy()
            exact[a, b] = p[0, a] * p[1, b] * p[2]
    exact = exact.ravel() / exact.sum()

    def cells(counts):  # those with fewer than five expected are one
        small = exact * count < 5
        return np.append(counts[..., ~small], counts[..., small].sum(-1, keepdims=True), axis=-1)

    expected = np.maximum(cells(exact * count), 1e-9)
    simulate = np.random.default_rng(seed)
    limit = np.quantile([statistic(c, expected) for c in
                         cells(simulate.multinomial(count, exact, 40_000))], 1 - 1e-4)
    away, order = exact.copy(), simulate.permutation(len(exact))
    half = exact[order].cumsum() < 0.5
    away[order[half]] *= 1 - 0.1 / exact[order[half]].sum()
    away[order[~half]] *= 1 + 0.1 / exact[order[~half]].sum()
    assert np.mean([statistic(c, expected) > limit
                    for c in cells(simulate.multinomial(count, away, 2000))]) > 0.99

    decoder = Decoder(model, config.layout("latent_first"), page_size=4)
    found = decoder.generate([prompt] * count, 3, draft=drafters(6)[family], choose=sampler(seed))
    assert np.mean([len(g.accepted) for g in found]) < 1.9  # steps: something was accepted
    texts = np.array([g.tokens for g in found])
    assert statistic(cells(np.bincount(texts @ weights, minlength=27)), expected) < limit
    likeliest = exact.reshape(3, -1).sum(1).argmax()
    first = np.where(simulate.random(count) < 0.3, likeliest, texts[:, 0])
    wrong = np.bincount(first * 9 + texts[:, 1:] @ weights[1:], minlength=27)
    assert statistic(cells(wrong), expected) > limit


def test_sampled_tokens_are_those_without_a_tree(seed, rng):
    model = random_model(seed, sharpness=12.0)
    prompts = rng.integers(0, SMALL.vocab_size, (6, 9)).tolist()
    decoder = Decoder(model, SMALL.layout("latent_first"))
    plain = decoder.generate(prompts, 15, choose=sampler(seed, 0.8))
    trees = decoder.generate(prompts, 15, draft=lambda m: ddtree(m, 30), choose=sampler(seed, 0.8))
    assert [g.tokens for g in plain] == [g.tokens for g in trees]
    assert plain[0].tokens != decoder.generate(prompts[:1], 15, draft=no_draft)[0].tokens


def test_sampler_draws_from_the_logits(seed):
    logits = torch.tensor([0.0, 1.0, -torch.inf, 2.0])
    choose = sampler(seed, temperature=2.0)
    counts = np.bincount([choose(0, logits) for _ in range(20_000)], minlength=4)
    expected = torch.softmax(logits / 2, -1).numpy() * 20_000
    assert counts[2] == 0 and statistic(counts[[0, 1, 3]], expected[[0, 1, 3]]) < 27.6  # 1e-6
    assert greedy(0, logits) == 3


def test_prompts_are_checked():
    decoder = Decoder(random_model(0), SMALL.layout("latent_first"))
    with pytest.raises(ValueError, match=r"prompts\[1\] must have 1 .. 1024 tokens; got 0"):
        decoder.generate([[1], []], 2)


# -- training -----------------------------------------------------------------------------


def test_losses_are_of_the_tokens_that_follow(seed, rng):
    model = random_model(seed)
    tokens = torch.from_numpy(rng.integers(0, SMALL.vocab_size, (2, 20)))
    following, drafted = train.loss_of(model, tokens)
    nll, heads = [], [[] for _ in range(SMALL.num_draft_heads)]
    for b in range(2):
        hidden = model(tokens[b:b + 1])[0]
        for t in range(19):
            nll.append(-torch.log_softmax(model.logits(hidden[t]), -1)[tokens[b, t + 1]])
        for t in range(20 - 1 - SMALL.num_draft_heads):
            logits = model.draft_logits(hidden[t], tokens[b, t + 1])
            for k in range(SMALL.num_draft_heads):
                heads[k].append(-torch.log_softmax(logits[k], -1)[tokens[b, t + 2 + k]])
    assert float(following) == pytest.approx(float(torch.stack(nll).mean()))
    assert drafted.tolist() == pytest.approx([float(torch.stack(h).mean()) for h in heads],
                                             rel=1e-5)


def test_training_learns_and_its_weights_come_back(tmp_path, monkeypatch, rng):
    sentence = b"All rows of one cache have one order. "
    monkeypatch.setattr(text, "gather", lambda: (sentence * 200, sentence * 60))
    config = dataclasses.replace(SMALL, vocab_size=256)
    model, record, held_out = train.train(6.0, batch_size=4, length=64, config=config,
                                          device="cpu")
    assert record["held_out"]["bits_per_byte"] < 4 and record["steps"] > 20
    train.save(model, record, held_out, tmp_path)
    read = train.load(tmp_path)
    tokens = torch.tensor([list(sentence)])
    torch.testing.assert_close(read(tokens), model(tokens), rtol=0.1, atol=0.1)  # bf16 weights
    assert train.held_out_text(tmp_path) == sentence * 60
    kept = json.loads((tmp_path / "training.json").read_text())
    assert kept["text"]["license"] == text.LICENSE and kept["commit"] and kept["date"]


def test_nothing_trained_is_told(tmp_path):
    with pytest.raises(FileNotFoundError, match="python -m mla_kernels.model train makes"):
        train.load(tmp_path)


def test_text_is_split_by_file():
    known, held_out = text.gather()
    assert len(known) > 2_000_000 and 20_000 < len(held_out) < len(known) / 5
    assert known.isascii() and held_out.isascii()
    for path in text.files()[::40]:
        body = path.read_bytes()
        if body.isascii() and len(body) > 500:
            assert (body in known) != (body in held_out)


def test_windows_are_pieces_that_do_not_overlap(seed):
    data = bytes(i % 251 for i in range(1000))
    pieces = text.windows(data, 7, 100, seed=seed)
    places = [data.index(bytes(p)) if bytes(p) in data else None for p in pieces]
    assert [len(p) for p in pieces] == [100] * 7 and None not in places
    with pytest.raises(ValueError, match=r"at least count \* length = 1,100 bytes; got 1,000"):
        text.windows(data, 11, 100)


# -- the trained model --------------------------------------------------------------------


@pytest.mark.gpu
def test_the_cuda_kernel_decodes():
    """In 16 bits a tree may round differently than one token: where the texts part, the model
    holds both tokens for about equally likely."""
    model = train.load(dtype=torch.bfloat16, device="cuda")
    exact = train.load(dtype=torch.float64)
    prompts = text.windows(train.held_out_text(), 64, 96)
    for order in ORDERS:
        decoder = Decoder(model, model.config.layout(order), backend="cuda")
        plain = decoder.generate(prompts, 48)
        trees = decoder.generate(prompts, 48, draft=lambda m: ddtree(m, 31))
        steps = sum(len(g.accepted) for g in trees)
        assert sum(sum(g.accepted) for g in trees) > 1.5 * steps
        same = 0
        for prompt, a, b in zip(prompts, plain, trees, strict=True):
            at = next((i for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=True))
                       if x != y), None)
            if at is None:
                same += 1
                continue
            logits = exact.logits(exact(torch.tensor([prompt + a.tokens[:at]]))[0, -1])
            assert abs(float(logits[a.tokens[at]] - logits[b.tokens[at]])) < 0.25
        assert same > 40
