"""cuda: the launch plan, what is handed to the kernel, and, where there is a GPU, the kernel."""

from __future__ import annotations

import dataclasses
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mla_kernels import build, check, cuda, schedule, tree
from mla_kernels.attention import verify_attention, workspace_bytes
from mla_kernels.batch import VerifyBatch
from mla_kernels.cuda import plan, verify_attention_cuda
from mla_kernels.graphs import capture
from mla_kernels.layout import KVLayout, pool_rows

LATENT_FIRST, ROPE_FIRST = KVLayout.LATENT_FIRST, KVLayout.ROPE_FIRST


# -- the plan -----------------------------------------------------------------------------


def random_capacities(rng):
    """Heads, batch size, draft and prefix capacities, multiprocessors."""
    def upto(n):
        return max(1, int(n ** rng.random()))
    return upto(128), upto(600), upto(1024), upto(200_000) - 1, upto(200)


def test_any_capacities_give_a_launch(rng):
    for _ in range(3000):
        heads, bs, q_len, kv_len, sms = capacities = random_capacities(rng)
        p = plan(*capacities)
        most = heads * q_len
        assert p.rows in build.TILE_ROWS, capacities
        assert (p.row_tiles - 1) * p.rows < most <= p.row_tiles * p.rows, capacities
        # A tile is no larger than what holds the rows of a request.
        assert all(r < most for r in build.TILE_ROWS if r < p.rows), capacities
        tiles = bs * -(-(kv_len + q_len) // cuda.TILE_TOKENS)
        assert 1 <= p.groups <= min(tiles, cuda.MAX_GROUPS), capacities
        assert (tiles + 1) * p.groups < 2**32, capacities  # group_of() of the schedule
        assert p.groups == 1 or p.row_tiles * p.groups <= 4 * sms, capacities
        assert p.combine_split in build.COMBINE_SPLITS, capacities
        # A grid's second dimension, and that of the combine's first.
        assert p.groups <= 65_535 and p.row_tiles * 4 * 32 < 2**31


def test_large_problems_take_large_tiles_and_small_ones_small():
    assert plan(8, 1, 8, 131_072, 132).rows == 64
    assert plan(8, 64, 8, 4096, 132).rows == 64
    assert plan(8, 1, 8, 256, 132).rows == 16          # 36 blocks instead of 9
    assert plan(4, 64, 4, 8192, 132).rows == 16        # and none larger than a request
    assert plan(8, 8, 4, 16_384, 132).rows == 32


@pytest.mark.parametrize("row_tiles", range(1, 100))
def test_more_rows_are_planned_to_take_as_long(row_tiles):
    """No row tile makes a launch much quicker by being there: 19 row tiles in four waves took
    1.5 times as long as 20 in one."""
    def tiles_in_a_row(row_tiles):
        p = plan(64, 1, row_tiles, 3072 - row_tiles, 132, rows=64)
        waves = -(-p.row_tiles * p.groups // 132)
        return waves * (cuda.START_US[64] + -(-97 // p.groups) * cuda.TILE_US[64])

    assert tiles_in_a_row(row_tiles) <= 1.1 * tiles_in_a_row(row_tiles + 1)


def test_workspace_holds_all_partials(rng):
    for _ in range(500):
        p = plan(*random_capacities(rng))
        if p.groups == 1:
            assert p.partials == p.workspace_bytes == 0
            continue
        # As partial_slot() and store() of the kernel count: [groups, row_tiles, 2] row tiles of
        # rows * 512 16-bit values and rows floats.
        last = ((p.groups - 1) * p.row_tiles + p.row_tiles - 1) * 2 + 1
        assert p.partial_out_bytes == (last + 1) * p.rows * 512 * 2
        assert p.workspace_bytes == p.partial_out_bytes + (last + 1) * p.rows * 4
        assert p.partial_out_bytes % 16 == 0  # so that the floats are aligned


def test_enough_groups_to_fill_the_machine():
    """A long context of one request is shared out to every multiprocessor."""
    for heads, q_len in ((8, 1), (8, 2), (8, 8), (16, 4)):
        p = plan(heads, 1, q_len, 131_072, 132)
        assert p.row_tiles * p.groups >= 0.9 * 132
    # And a short one to no more than it has tiles.
    assert plan(8, 1, 2, 30, 132).groups == 1
    assert plan(8, 1, 2, 62, 132).groups == 2
    # Row tiles that fill the machine by themselves are not split further for nothing.
    assert plan(128, 1, 1024, 1000, 132).groups <= 4


def test_the_plan_is_one_of_capacities_alone(monkeypatch):
    """So that a captured graph stays right when lengths change: `plan_for` looks at no tensor's
    values. Meta tensors have none."""
    batch = VerifyBatch.from_requests([5, 2], [70, 3], [range(70), range(3)])
    monkeypatch.setattr(cuda, "_device", lambda index: (132, "sm_90", True))
    for same in (batch, batch.to("meta")):
        assert cuda.plan_for(same, 8, torch.device("cuda", 0)) == plan(8, 2, 5, 70, 132)
    assert cuda.plan_for(batch, 8, torch.device("cuda", 0), groups=7).groups == 7


def test_a_batch_invariant_plan(rng):
    """Rows and merging are the same whatever the capacities; every chunk has its place."""
    for _ in range(1000):
        heads, bs, q_len, kv_len, sms = capacities = random_capacities(rng)
        p = plan(*capacities, batch_invariant=True)
        assert (p.rows, p.combine_split) == (64, 8)
        assert p.batch_invariant and not plan(*capacities).batch_invariant
        tiles = -(-(kv_len + q_len) // cuda.TILE_TOKENS)
        lengths = [tiles, *map(int, rng.integers(1, tiles + 1, 5))]
        assert p.chunks >= bs * max(map(schedule.chunks_of, lengths))
        assert p.groups <= min(p.chunks, cuda.MAX_GROUPS)
        assert p.partials == p.chunks * p.row_tiles
        assert p.workspace_bytes == p.partials * 64 * (1024 + 4)


@pytest.mark.parametrize("changes, message", [
    ({"rows": 48}, r"rows must be one of \(16, 32, 64\); got 48"),
    ({"rows": 128}, r"rows must be one of \(16, 32, 64\); got 128"),
    ({"groups": 0}, r"groups must be in 1 .. 1024; got 0"),
    ({"groups": 1025}, r"groups must be in 1 .. 1024; got 1025"),
], ids=str)
def test_refused_overrides(changes, message):
    with pytest.raises(ValueError, match=message):
        plan(8, 1, 8, 1000, 132, **changes)


def test_overrides_are_followed(rng):
    for _ in range(100):
        capacities = random_capacities(rng)
        rows, groups = int(rng.choice(build.TILE_ROWS)), int(rng.integers(1, 1025))
        p = plan(*capacities, rows=rows, groups=groups)
        assert (p.rows, p.groups) == (rows, groups)
        assert (p.row_tiles - 1) * rows < capacities[0] * capacities[2] <= p.row_tiles * rows


def test_groups_that_the_device_cannot_count():
    """The kernel multiplies tiles by groups in 32 bits: 2,000 requests of a million rows leave
    room for fewer groups than multiprocessors."""
    p = plan(8, 2000, 1, 1_000_000, 132)
    assert 50 < p.groups < 132 // 1 and (2000 * 31_251 + 1) * p.groups < 2**32
    with pytest.raises(ValueError, match=f"groups must be in 1 .. {p.groups}; got 132"):
        plan(8, 2000, 1, 1_000_000, 132, groups=132)


@pytest.mark.parametrize("shape, split", [
    ((8, 1, 1, 16384), 8),     # one request's 32 fragments, 132 partials each
    ((8, 1, 16, 16384), 4),    # two row tiles: 256 fragments, 66 partials
    ((8, 8, 8, 16384), 1),     # 1,024 fragments, 16 partials: a warp each
], ids=str)
def test_warps_a_fragment(shape, split):
    heads, bs, q_len, kv_len = shape
    assert plan(heads, bs, q_len, kv_len, 132).combine_split == split


def test_constants_are_the_sources():
    sources = build.sources()
    assert int(re.search(r"kLatentDim = (\d+)", sources["kv_layout.cuh"])[1]) == cuda.KV_LORA_RANK
    assert int(re.search(r"kRopeDim = (\d+)", sources["kv_layout.cuh"])[1]) == cuda.QK_ROPE_HEAD_DIM
    assert int(re.search(r"kTokens = (\d+)", sources["tree_verify.cuh"])[1]) == cuda.TILE_TOKENS
    compiled = re.findall(r"case (\d+): return launch_config", sources["launch.cuh"])
    assert tuple(map(int, compiled)) == build.TILE_ROWS


# -- what the kernel is given -------------------------------------------------------------


def fields():
    """Names of VerifyParams, from its declaration."""
    body = build.sources()["params.h"].split("struct VerifyParams {")[1].split("};")[0]
    return {name for line in body.splitlines()
            for name in re.findall(r"(\w+)(?:,|;)", line.split("//")[0])}


@pytest.fixture
def kernel(monkeypatch):
    """Stands for the compiled module, and keeps what it is called with."""
    calls = []

    class Context:
        def __init__(self, index):
            assert index == 0

        def __enter__(self):
            return self

        def __exit__(self, *exception):
            return None

    module = SimpleNamespace(
        VerifyParams=SimpleNamespace,
        tree_verify=lambda params, **how: calls.append((params, SimpleNamespace(**how))))
    monkeypatch.setattr(build, "_loaded", {"sm_120": module})
    monkeypatch.setattr(cuda, "_device", lambda index: (188, "sm_120", True))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", Context)
    monkeypatch.setattr(torch.cuda, "current_stream",
                        lambda index: SimpleNamespace(cuda_stream=0xABC0))
    return calls


def test_fields_of_the_parameters():
    """The binding offers every field of the struct."""
    bound = set(re.findall(r"(?:POINTER|VALUE)\((\w+)\)", build.sources()["bindings.cpp"]))
    assert bound - {"name"} == fields() and len(fields()) > 25


@pytest.mark.parametrize("in_pool", [False, True], ids=["draft_kv", "draft_slots"])
@pytest.mark.parametrize("dtype", cuda.DTYPES, ids=str)
@pytest.mark.parametrize("layout", [LATENT_FIRST, ROPE_FIRST], ids=lambda x: x.order)
@pytest.mark.parametrize("apart", [False, True], ids=["one q", "q in two"])
def test_parameters(kernel, layout, dtype, in_pool, apart):
    batch = VerifyBatch.from_requests(
        [tree.kary(2, 40), 3], [70, 5], [range(5), [9]], page_size=16,
        draft_slots=[range(80, 120), range(120, 123)] if in_pool else None)
    q = torch.zeros(43, 12, 584, dtype=dtype)[:, :, :576]
    latent, rope = layout.split(q)
    if apart:
        latent = torch.zeros(12, 43, 512, dtype=dtype).transpose(0, 1)
        rope = torch.zeros(43, 12, 64, dtype=dtype)
    rows = torch.zeros(200, 640, dtype=dtype)[:, 8:584]
    draft_kv = None if in_pool else torch.zeros(43, 1024, dtype=dtype)[:, :576]
    out, lse = torch.zeros(43, 12, 512, dtype=dtype), torch.zeros(43, 12)
    launch = plan(12, 2, 40, 70, 188)
    assert launch.groups > 1
    space = torch.zeros(launch.workspace_bytes, dtype=torch.uint8)
    verify_attention_cuda(latent, rope, rows, draft_kv, batch, layout=layout, sm_scale=0.3,
                          k_scale=0.5, v_scale=2.0, logit_cap=30.0, out=out, lse=lse,
                          workspace=space)
    ((p, how),) = kernel
    assert vars(p).keys() == fields()
    for name, tensor in {
        "q_latent": latent, "q_rope": rope, "kv_pool": rows, "out": out, "lse": lse,
        "qo_indptr": batch.qo_indptr, "kv_indptr": batch.kv_indptr,
        "kv_indices": batch.kv_indices, "kv_lens": batch.kv_lens, "mask_bits": batch.mask_bits,
        "draft_kv": draft_kv, "draft_slots": batch.draft_slots, "partial_out": space,
    }.items():
        assert getattr(p, name) == (0 if tensor is None else tensor.data_ptr()), name
    assert p.partial_lse == space.data_ptr() + launch.partial_out_bytes
    if not apart:  # one tensor: the parts lie within its rows, in their order
        step = p.q_rope - p.q_latent
        assert step == (1024 if layout is LATENT_FIRST else -128)
        assert (p.q_latent_token_stride, p.q_latent_head_stride) == (12 * 1168, 1168)
        assert (p.q_rope_token_stride, p.q_rope_head_stride) == (12 * 1168, 1168)
    else:
        assert (p.q_latent_token_stride, p.q_latent_head_stride) == (1024, 43 * 1024)
        assert (p.q_rope_token_stride, p.q_rope_head_stride) == (12 * 128, 128)
    assert p.kv_row_stride == 1280
    assert p.draft_row_stride == (0 if in_pool else 2048)
    assert p.latent_offset == (0 if layout is LATENT_FIRST else 128)
    assert (p.num_heads, p.batch_size, p.page_shift, p.mask_words) == (12, 2, 4, 2)
    assert (p.groups, p.row_tiles) == (launch.groups, launch.row_tiles)
    assert p.batch_invariant is False
    assert p.logit_scale == pytest.approx(0.15) and (p.logit_cap, p.value_scale) == (30.0, 2.0)
    assert vars(how) == {"rows": launch.rows, "half": dtype == torch.float16, "dependent": True,
                         "combine_split": launch.combine_split, "stream": 0xABC0}


def small_call(**changes):
    batch = VerifyBatch.from_requests([3], [200], [range(200)])
    half = {"dtype": torch.float16}
    call = {"layout": LATENT_FIRST, "sm_scale": 0.1, "k_scale": 1.0, "v_scale": 1.0,
            "logit_cap": 0.0, "out": torch.zeros(3, 2, 512, **half), "lse": torch.zeros(3, 2)}
    verify_attention_cuda(torch.zeros(3, 2, 512, **half), torch.zeros(3, 2, 64, **half),
                          torch.zeros(200, 576, **half), torch.zeros(3, 576, **half), batch,
                          **call | changes)


def test_a_given_launch_and_an_own_workspace(kernel):
    launch = dataclasses.replace(plan(2, 1, 3, 200, 188), rows=64, groups=3, combine_split=4)
    small_call(launch=launch)
    ((p, how),) = kernel
    assert (p.groups, how.rows, how.combine_split) == (3, 64, 4)
    assert p.partial_lse - p.partial_out == launch.partial_out_bytes


def test_batch_invariant_is_passed_on(kernel):
    small_call(batch_invariant=True)
    ((p, how),) = kernel
    assert p.batch_invariant is True and (how.rows, how.combine_split) == (64, 8)


def test_a_workspace_too_small(kernel):
    need = plan(2, 1, 3, 200, 188).workspace_bytes
    with pytest.raises(ValueError, match=f"workspace must have at least {need:,} bytes; got "
                                         f"{need - 1:,}"):
        small_call(workspace=torch.zeros(need - 1, dtype=torch.uint8))
    assert kernel == []
    small_call(workspace=torch.zeros(need, dtype=torch.uint8))
    assert len(kernel) == 1


# -- the kernel ---------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.slow
def test_kernel_matches_the_oracle(seed):
    for draw in range(30):
        case = check.random_case(seed + draw, device="cuda")
        errors = check.run(case, "cuda")
        assert errors.passed, f"seed {seed + draw}: {errors}: {case.text}"


@pytest.mark.gpu
@pytest.mark.parametrize("rows", build.TILE_ROWS)
@pytest.mark.parametrize("split", build.COMBINE_SPLITS)
def test_every_plan_gives_the_same(seed, rows, split):
    """However a call is laid out: the result is within rounding of the oracle's."""
    case = check.random_case(seed, device="cuda", max_heads=16, max_nodes=8, max_requests=4)
    a = dict(case.arguments)
    batch, layout, q = a["batch"], a["layout"], a.pop("q")
    latent, rope = layout.split(q) if isinstance(q, torch.Tensor) else q
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    for groups in (1, 2, 7, 30):
        launch = plan(latent.shape[1], batch.batch_size, batch.max_q_len, batch.max_kv_len, sms,
                      rows=rows, groups=groups)
        launch = dataclasses.replace(launch, combine_split=split)
        out = torch.full((*latent.shape[:2], 512), torch.nan, dtype=latent.dtype, device="cuda")
        lse = torch.full(latent.shape[:2], torch.nan, device="cuda")
        scalars = {"k_scale": 1.0, "v_scale": 1.0, "logit_cap": 0.0} | {
            n: a[n] for n in ("k_scale", "v_scale", "logit_cap") if n in a}
        verify_attention_cuda(latent, rope, pool_rows(a["kv_pool"], layout), a["draft_kv"], batch,
                              layout=layout, sm_scale=a["sm_scale"], out=out, lse=lse,
                              launch=launch, **scalars)
        errors = check.compare(case, out, lse)
        assert errors.passed, f"{launch}: {errors}: {case.text}"


@pytest.mark.gpu
def test_same_inputs_same_bits(seed):
    for draw in range(5):
        case = check.random_case(seed + draw, device="cuda")
        first = verify_attention(**case.arguments, backend="cuda")
        for _ in range(10):
            again = verify_attention(**case.arguments, backend="cuda")
            assert torch.equal(first[0].view(torch.int16), again[0].view(torch.int16)), case.text
            assert torch.equal(first[1].view(torch.int32), again[1].view(torch.int32)), case.text


@pytest.mark.gpu
def test_batch_invariant(seed):
    """A request alone and among others: the same bits, whatever the capacities."""
    for draw in range(5):
        a = dict(check.random_case(seed + draw, device="cuda", max_prefix=9000).arguments)
        whole, q, drafts = a.pop("batch"), a.pop("q"), a.pop("draft_kv")
        a |= {"backend": "cuda", "batch_invariant": True}
        out, lse = verify_attention(q, batch=whole, draft_kv=drafts, **a)
        parts = q if isinstance(q, tuple) else (q,)
        for b in range(whole.batch_size):
            begin, end = whole.qo_indptr[b:b + 2].tolist()
            if begin == end:
                continue
            own = dataclasses.replace(
                whole, qo_indptr=whole.qo_indptr[b:b + 2] - begin,
                kv_indptr=whole.kv_indptr[b:b + 2] - whole.kv_indptr[b],
                kv_indices=whole.kv_indices[int(whole.kv_indptr[b]):].clone(),
                kv_lens=whole.kv_lens[b:b + 1].clone(),
                mask_bits=whole.mask_bits[begin:end].contiguous(), max_q_len=end - begin,
                draft_slots=None if drafts is not None else whole.draft_slots[begin:end].clone())
            q_own = tuple(part[begin:end] for part in parts)
            alone = verify_attention(q_own if len(q_own) > 1 else q_own[0], batch=own,
                                     draft_kv=None if drafts is None else drafts[begin:end], **a)
            assert torch.equal(alone[0].view(torch.int16), out[begin:end].view(torch.int16))
            assert torch.equal(alone[1].view(torch.int32), lse[begin:end].view(torch.int32))


@pytest.mark.gpu
def test_graph_replay_with_other_lengths(rng, seed):
    """Captured once at capacity; then other lengths, slots, trees and numbers in the same
    buffers give the bits of an eager call."""
    device, bs, nodes, context, heads = "cuda", 3, 12, 2000, 8
    generator = torch.Generator(device=device).manual_seed(seed)
    pool = torch.randn(bs * context + 50, 576, generator=generator, device=device).bfloat16()
    total = bs * nodes
    q = torch.randn(total, heads, 576, generator=generator, device=device).bfloat16()
    draft_kv = torch.randn(total, 576, generator=generator, device=device).bfloat16()

    def fresh():
        drafts = [check.random_tree(rng, int(rng.integers(1, nodes + 1))) for _ in range(bs)]
        lens = [int(rng.integers(0, context + 1)) for _ in range(bs)]
        slots = rng.permutation(len(pool))
        return VerifyBatch.from_requests(
            drafts, lens, [slots[sum(lens[:b]):sum(lens[:b + 1])] for b in range(bs)],
            device=device)

    full = VerifyBatch.from_requests([nodes] * bs, [context] * bs,
                                     np.split(rng.permutation(bs * context), bs), device=device)
    out = torch.empty(total, heads, 512, dtype=torch.bfloat16, device=device)
    lse = torch.empty(total, heads, device=device)
    space = torch.empty(workspace_bytes(full, heads, "cuda"), dtype=torch.uint8, device=device)

    def call(out, lse, space=space):
        verify_attention(q, pool, full, sm_scale=192**-0.5, draft_kv=draft_kv, out=out, lse=lse,
                         workspace=space, backend="cuda")

    graph = capture(lambda: call(out, lse))
    for _ in range(20):
        batch = fresh()
        for name in ("qo_indptr", "kv_indptr", "kv_lens", "kv_indices", "mask_bits"):
            held, new = getattr(full, name), getattr(batch, name)
            held.view(-1)[: new.numel()] = new.view(-1)
        q.normal_(generator=generator)
        used = int(batch.qo_indptr[-1])
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        space.fill_(0xFF)
        graph.replay()
        eager_out, eager_lse = torch.full_like(out, torch.nan), torch.full_like(lse, torch.nan)
        call(eager_out, eager_lse, space.clone())
        assert torch.equal(out[:used], eager_out[:used])
        assert torch.equal(lse[:used], eager_lse[:used])
        assert out[used:].isnan().all() and lse[used:].isnan().all()
        arguments = {"q": q, "kv_pool": pool, "batch": full, "layout": LATENT_FIRST,
                     "sm_scale": 192**-0.5, "draft_kv": draft_kv}
        errors = check.compare(check.Case(seed, "", arguments), out, lse)
        assert errors.passed, errors


def test_launches_follow_overrides(monkeypatch):
    batch = VerifyBatch.from_requests([5, 2], [700, 30], [range(700), range(30)])
    monkeypatch.setattr(cuda, "_device", lambda index: (132, "sm_90", True))
    here = torch.device("cuda", 0)
    usual = cuda.plan_for(batch, 8, here)
    with cuda.launch_as(rows=16, groups=3):
        assert cuda.plan_for(batch, 8, here) == plan(8, 2, 5, 700, 132, rows=16, groups=3)
        with pytest.raises(ZeroDivisionError), cuda.launch_as(groups=7, combine_split=4):
            inner = cuda.plan_for(batch, 8, here)
            assert (inner.rows, inner.groups, inner.combine_split) == (16, 7, 4)
            raise ZeroDivisionError
        assert cuda.plan_for(batch, 8, here).groups == 3
    assert cuda.plan_for(batch, 8, here) == usual
