"""attention: one meaning on every backend, what is written where, and every refusal."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import mla_kernels
from mla_kernels import attention, build, check, tree
from mla_kernels import triton as triton_room
from mla_kernels.attention import choose_backend, verify_attention, workspace_bytes
from mla_kernels.batch import VerifyBatch
from mla_kernels.layout import KVLayout
from mla_kernels.reference import relative_error

LATENT_FIRST, ROPE_FIRST = KVLayout.LATENT_FIRST, KVLayout.ROPE_FIRST
BOTH = pytest.mark.parametrize("layout", [LATENT_FIRST, ROPE_FIRST], ids=lambda x: x.order)
#: Triton's interpreter takes CPU tensors; compiled, it takes those of a GPU.
DEVICE = "cpu" if triton_room.INTERPRETED else "cuda"
BACKENDS = pytest.mark.parametrize("backend", ["reference", "triton"])


def small_case(seed, *, dtypes=(torch.float16,), **changes):
    """A random case that the interpreter gets through in a second."""
    sizes = {"max_heads": 5, "max_nodes": 9, "max_requests": 3, "max_prefix": 70}
    return check.random_case(seed, device=DEVICE, dtypes=dtypes, **{**sizes, **changes})


def make_call(generator, drafts=(4, 3), lens=(20, 9), *, heads=2, layout=LATENT_FIRST,
              page_size=1, in_pool=False, padding=0, sharp=1.0, dtype=torch.float16):
    """Arguments of a valid call by name. Unreferenced pool rows are NaN."""
    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)

    counts = [-(-length // page_size) for length in lens]
    tokens = sum(d if isinstance(d, int) else len(d) for d in drafts)
    pages = sum(counts) + -(-tokens // page_size) + 2
    order = torch.randperm(pages, generator=generator).numpy()
    tables = np.split(order[: sum(counts)], np.cumsum(counts)[:-1])
    free = (order[sum(counts):, None] * page_size + np.arange(page_size)).reshape(-1)
    ends = np.cumsum([d if isinstance(d, int) else len(d) for d in drafts])[:-1]
    slots = np.split(free[:tokens], ends) if in_pool else None
    batch = VerifyBatch.from_requests(drafts, lens, tables, page_size=page_size,
                                      draft_slots=slots, device=DEVICE)
    pool = torch.full((pages * page_size, 576), torch.nan, dtype=dtype, device=DEVICE)
    for b in range(len(drafts)):
        used = batch.prefix_slots(b)
        pool[used] = normal(len(used), 576)
    if in_pool:
        pool[batch.draft_slots.long()] = normal(tokens, 576)
    if padding:
        own = batch.draft_slots
        fill = batch.mask_bits.new_zeros(padding, batch.mask_bits.shape[1])
        batch = dataclasses.replace(
            batch, mask_bits=torch.cat([batch.mask_bits, fill]),
            draft_slots=None if own is None else torch.cat([own, own.new_zeros(padding)]))
    return {
        "q": normal(tokens + padding, heads, 576) * sharp, "kv_pool": pool, "batch": batch,
        "sm_scale": 192**-0.5, "layout": layout,
        "draft_kv": None if in_pool else normal(tokens + padding, 576),
    }


def same(got, want):
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


# -- numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64],
                         ids=str)
@pytest.mark.parametrize("draw", range(3))
def test_reference_matches_the_oracle(seed, dtype, draw):
    case = small_case(seed + draw, dtypes=(dtype,), max_nodes=40, max_heads=128)
    assert check.run(case, "reference").passed, case.text


@pytest.mark.parametrize("draw", range(6))
def test_triton_matches_the_oracle(seed, draw):
    dtypes = ((torch.float16, torch.float32) if triton_room.INTERPRETED
              else (torch.float16, torch.bfloat16))
    case = small_case(seed + draw, dtypes=dtypes[draw % 2:][:1])
    errors = check.run(case, "triton")
    assert errors.passed, f"{errors}: {case.text}"


@BACKENDS
@BOTH
def test_q_may_be_one_tensor_or_a_pair(generator, backend, layout):
    call = make_call(generator, layout=layout)
    want = verify_attention(**call, backend=backend)
    latent, rope = layout.split(call["q"])
    for pair in ((latent, rope), [latent.contiguous(), rope.contiguous()],
                 (latent.transpose(0, 1).contiguous().transpose(0, 1), rope)):
        assert same(verify_attention(**{**call, "q": pair}, backend=backend), want)
    # And the order is not a name alone: told the other one, the result is another.
    wrong, _ = verify_attention(**{**call, "layout": layout.swapped}, backend="reference")
    assert relative_error(wrong, want[0]) > 0.5


@BACKENDS
@pytest.mark.parametrize("in_pool", [False, True], ids=["draft_kv", "draft_slots"])
def test_all_forms_of_a_pool_mean_the_same(generator, backend, in_pool):
    call = make_call(generator, page_size=4, in_pool=in_pool)
    want = verify_attention(**call, backend=backend)
    assert want[0].isfinite().all()
    pool = call["kv_pool"]
    wider = torch.full((len(pool), 576 + 24), torch.nan, dtype=pool.dtype, device=DEVICE)
    wider[:, 8:584] = pool
    view = wider[:, 8:584]
    for form in (pool[:, None], pool.unflatten(0, (-1, 4)), view, view[:, None],
                 view.unflatten(0, (-1, 4))):
        assert same(verify_attention(**{**call, "kv_pool": form}, backend=backend), want)


@BACKENDS
@BOTH
def test_draft_kv_and_draft_slots_agree(generator, backend, layout):
    call = make_call(generator, [tree.kary(2, 5), 3], [20, 9], layout=layout, in_pool=True)
    want = verify_attention(**call, backend=backend)
    batch = call["batch"]
    drafts = call["kv_pool"][batch.draft_slots.long()]
    apart = {**call, "batch": dataclasses.replace(batch, draft_slots=None)}
    # What lay in the pool is not looked at any more.
    apart["kv_pool"] = call["kv_pool"].index_fill(0, batch.draft_slots.long(), torch.nan)
    for form in (drafts, drafts[:, None]):
        assert same(verify_attention(**{**apart, "draft_kv": form}, backend=backend), want)


@BACKENDS
def test_scales_and_cap(generator, backend):
    call = make_call(generator, dtype=torch.float32 if DEVICE == "cpu" else torch.float16)
    out, lse = verify_attention(**call, backend=backend)
    # A cap of a million bends no logit, but a careless tanh loses its digits there.
    close = {"rtol": 1e-3, "atol": 1e-3} if DEVICE == "cpu" else {"rtol": 2e-3, "atol": 2e-3}

    def same_numbers(one, other):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, **close)

    def run(**changes):
        return verify_attention(**{**call, **changes}, backend=backend)

    # k_scale multiplies the logits and nothing else; v_scale the output and nothing else.
    same_numbers(run(k_scale=2.0), run(sm_scale=2 * call["sm_scale"]))
    same_numbers(run(v_scale=0.5), (0.5 * out, lse))
    same_numbers(run(logit_cap=1e6), (out, lse))
    for changes in ({"k_scale": 2.0}, {"logit_cap": 1.0}):
        assert relative_error(run(**changes)[0], out) > 0.05
    # With a cap of 1 and 24 visible tokens or fewer, an lse is in log(n) +- 1.
    counts = torch.tensor([20 + t for t in (1, 2, 3, 4)] + [9 + t for t in (1, 2, 3)],
                          device=DEVICE)
    capped = run(logit_cap=1.0)[1]
    assert (capped - counts.log()[:, None]).abs().max() <= 1
    assert (lse - counts.log()[:, None]).abs().max() > 1 / 3
    # One visible token: lse is its logit, capped.
    one = make_call(generator, [1], [0], dtype=call["q"].dtype)
    logit = torch.einsum("thd,td->th", one["q"].double(), one["draft_kv"].double())
    logit = 0.7 * one["sm_scale"] * logit
    got = verify_attention(**one, k_scale=0.7, logit_cap=1.5, v_scale=3.0, backend=backend)
    want = 1.5 * torch.tanh(logit / 1.5)
    torch.testing.assert_close(got[1].double(), want, **close)
    torch.testing.assert_close(
        got[0].double(), (3.0 * one["draft_kv"][:, None, :512]).expand(1, 2, 512).double(),
        rtol=2e-3, atol=2e-3)


@BACKENDS
def test_a_token_that_sees_nothing(generator, backend):
    mask = np.tri(3, dtype=bool)
    mask[1] = False
    call = make_call(generator, [mask, 2], [0, 5])
    out, lse = verify_attention(**call, backend=backend)
    assert (out[1] == 0).all() and lse[1].isneginf().all()
    others = [0, 2, 3, 4]
    assert out[others].ne(0).any(-1).all() and lse[others].isfinite().all()


# -- what is written ----------------------------------------------------------------------


@BACKENDS
def test_results_are_written_in_place(generator, backend):
    call = make_call(generator)
    want = verify_attention(**call, backend=backend)
    shape = (7, 2, 512)
    out = torch.full(shape, torch.nan, dtype=torch.float16, device=DEVICE)
    lse = torch.full(shape[:2], torch.nan, device=DEVICE)
    need = workspace_bytes(call["batch"], 2, backend, dtype=torch.float16)
    space = torch.full((need + 64,), 0xFF, dtype=torch.uint8, device=DEVICE)
    got = verify_attention(**call, out=out, lse=lse, workspace=space, backend=backend)
    assert got[0] is out and got[1] is lse
    assert same(got, want)
    assert (space[need:] == 0xFF).all(), "wrote past what workspace_bytes says"
    assert same(verify_attention(**call, out=out, lse=lse, workspace=space, backend=backend),
                want)


def test_the_workspace_follows_the_dtype(generator):
    """fp32 rows are twice as wide: other tiles, hence another workspace."""
    call = make_call(generator, [1], [150], dtype=torch.float32)
    sizes = {dtype: workspace_bytes(call["batch"], 2, "triton", dtype=dtype)
             for dtype in (torch.float16, torch.float32)}
    if DEVICE == "cpu":
        assert 0 < sizes[torch.float16] < sizes[torch.float32]
        out, lse = verify_attention(**call, backend="triton")
        want = verify_attention(**call, backend="reference")
        torch.testing.assert_close(out, want[0], rtol=1e-4, atol=1e-4)
    assert workspace_bytes(call["batch"], 2, "reference") == 0


@BACKENDS
@pytest.mark.parametrize("in_pool", [False, True], ids=["draft_kv", "draft_slots"])
def test_padded_tokens_are_left_alone(generator, backend, in_pool):
    call = make_call(generator, padding=3, in_pool=in_pool)
    call["q"][7:] = torch.nan
    if not in_pool:
        call["draft_kv"][7:] = torch.nan
    out = torch.full((10, 2, 512), torch.nan, dtype=torch.float16, device=DEVICE)
    lse = torch.full((10, 2), 17.0, device=DEVICE)
    verify_attention(**call, out=out, lse=lse, backend=backend)
    assert out[7:].isnan().all() and (lse[7:] == 17).all()
    assert out[:7].isfinite().all() and (lse[:7] != 17).all()
    own_out, own_lse = verify_attention(**call, backend=backend)
    assert (own_out[7:] == 0).all() and (own_lse[7:] == 0).all()
    assert same((own_out[:7], own_lse[:7]), (out[:7], lse[:7]))


# -- backends -----------------------------------------------------------------------------


def test_choice_of_a_backend(generator):
    latent, rope = LATENT_FIRST.split(torch.zeros(2, 3, 576, dtype=torch.bfloat16))
    assert choose_backend(latent, rope) == choose_backend(latent, rope, "auto") == "reference"
    assert choose_backend(latent, rope, "triton") == "triton"
    assert choose_backend(latent, rope, "reference") == "reference"
    with pytest.raises(ValueError, match="backend 'cuda' cannot run this call: it runs on a CUDA "
                                         "device, and the tensors are on cpu"):
        choose_backend(latent, rope, "cuda")
    with pytest.raises(ValueError, match="backend must be one of auto, cuda, triton, emulated, "
                                         "reference; got 'gpu'"):
        choose_backend(latent, rope, "gpu")


class OnGPU:
    """As much of a CUDA tensor as the choice of a backend looks at."""

    def __init__(self, width, dtype=torch.bfloat16):
        self.device, self.dtype, self.shape = torch.device("cuda", 0), dtype, (2, 3, width)


@pytest.mark.parametrize("widths, dtype, capability, reason", [
    ((512, 64), torch.bfloat16, (12, 0), None),
    ((512, 64), torch.float16, (8, 0), None),
    ((512, 64), torch.float32, (9, 0), "compiled for bfloat16 and float16, not torch.float32"),
    ((256, 64), torch.bfloat16, (9, 0), "compiled for rows of 512 \\+ 64, not 256 \\+ 64"),
    ((512, 64), torch.bfloat16, (7, 5), "needs compute capability 8.0 or later"),
], ids=["sm_120", "sm_80", "fp32", "256", "sm_75"])
def test_choice_on_a_gpu(monkeypatch, widths, dtype, capability, reason):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    q = OnGPU(widths[0], dtype), OnGPU(widths[1], dtype)
    assert choose_backend(*q) == ("triton" if reason else "cuda")
    if reason:
        with pytest.raises(ValueError, match=reason):
            choose_backend(*q, "cuda")
    else:
        assert choose_backend(*q, "cuda") == "cuda"


def test_the_package_exports_it():
    assert mla_kernels.verify_attention is verify_attention


# -- torch.library ------------------------------------------------------------------------


def operator_arguments(call):
    latent, rope = call["layout"].split(call["q"])
    batch = call["batch"]
    out, lse = torch.zeros_like(latent).contiguous(), torch.zeros(latent.shape[:2])
    return (latent.clone(), rope.clone(), call["kv_pool"], call["draft_kv"], batch.qo_indptr,
            batch.kv_indptr, batch.kv_indices, batch.kv_lens, batch.mask_bits,
            batch.draft_slots, batch.page_size, batch.max_q_len, batch.max_kv_len,
            call["layout"].order, call["sm_scale"], 1.0, 1.0, 0.0, "reference", out, lse,
            torch.empty(16, dtype=torch.uint8))


@pytest.mark.skipif(DEVICE != "cpu", reason="the reference's host reads are for the CPU")
@pytest.mark.parametrize("in_pool", [False, True], ids=["draft_kv", "draft_slots"])
def test_opcheck(generator, in_pool):
    call = make_call(generator, in_pool=in_pool)
    call["kv_pool"].nan_to_num_()  # opcheck compares inputs before and after
    results = torch.library.opcheck(torch.ops.mla_kernels.verify_attention.default,
                                    operator_arguments(call))
    assert set(results.values()) == {"SUCCESS"} and len(results) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_torch_compile(generator, compiler):
    calls = [make_call(generator), make_call(generator, [3], [30], in_pool=True)]

    def step(q, pool, batch, draft_kv):
        out, lse = verify_attention(q * 2, pool, batch, sm_scale=0.05, draft_kv=draft_kv,
                                    backend="reference")
        return out + 1, lse.exp()

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend=compiler)
    for call in [*calls, calls[0]]:
        arguments = [call[name] for name in ("q", "kv_pool", "batch", "draft_kv")]
        assert same(compiled(*arguments), step(*arguments))
    torch._dynamo.reset()


def test_torch_compile_into_given_outputs(generator):
    call = make_call(generator)
    want = verify_attention(**call, backend="reference")

    def step(q, pool, batch, draft_kv, out, lse):
        verify_attention(q, pool, batch, sm_scale=192**-0.5, draft_kv=draft_kv, out=out, lse=lse,
                         backend="reference")

    torch._dynamo.reset()
    out = torch.full((7, 2, 512), torch.nan, dtype=torch.float16, device=DEVICE)
    lse = torch.full((7, 2), torch.nan, device=DEVICE)
    torch.compile(step, fullgraph=True, backend="aot_eager")(
        call["q"], call["kv_pool"], call["batch"], call["draft_kv"], out, lse)
    assert same((out, lse), want)
    torch._dynamo.reset()


# -- refusals -----------------------------------------------------------------------------

half = {"dtype": torch.float16}


def without(name):
    return lambda a: a.pop(name)


def to(name, change):
    """Replaces an argument by a function of it."""
    def apply(a):
        a[name] = change(a[name])
    return apply


def put(**values):
    return lambda a: a.update(values)


def strided(x, step):
    """The same shape, every `step`-th element of a row that is wider."""
    return x.new_zeros(*x.shape[:-1], x.shape[-1] * step)[..., ::step]


def odd_stride(x):
    return x.new_zeros(*x.shape[:-1], x.shape[-1] + 1)[..., :-1]


def pair(a, latent=lambda x: x, rope=lambda x: x):
    a["q"] = tuple(f(x) for f, x in zip((latent, rope), a["layout"].split(a["q"]), strict=True))


#: name: (what is done to a valid call's arguments, the exception, its message as a pattern)
REFUSED = {
    "q a list of numbers": (put(q=[1.0, 2.0]), TypeError,
                            r"q must be a tensor or a pair \(q_latent, q_rope\).*got list"),
    "q None": (put(q=None), TypeError, "q must be a tensor or a pair .*got NoneType"),
    "q a triple": (to("q", lambda q: (q, q, q)), TypeError, "q must be a tensor or a pair"),
    "q flat": (to("q", lambda q: q.flatten(1)), ValueError,
               r"q must be \[num_tokens, H, 576\]; got \[7, 1152\]"),
    "q of another width": (to("q", lambda q: q[..., :512]), ValueError,
                           r"q must be \[num_tokens, H, 576\]; got \[7, 2, 512\]"),
    "q_latent narrow": (lambda a: pair(a, latent=lambda x: x[..., :448]), ValueError,
                        r"q_latent must be \[num_tokens, H, 512\]; got \[7, 2, 448\]"),
    "pair swapped": (lambda a: a.update(q=a["layout"].split(a["q"])[::-1]), ValueError,
                     r"q_latent must be \[num_tokens, H, 512\]; got \[7, 2, 64\]"),
    "q_rope wide": (lambda a: pair(a, rope=lambda x: torch.cat([x, x], -1)), ValueError,
                    r"q_rope must be \[num_tokens, H, 64\]; got \[7, 2, 128\]"),
    "pair of different heads": (lambda a: pair(a, rope=lambda x: x[:, :1]), ValueError,
                                r"q_latent is \[7, 2, 512\], q_rope \[7, 1, 64\]: tokens and "
                                "heads must agree"),
    "pair of different dtypes": (lambda a: pair(a, rope=lambda x: x.bfloat16()), TypeError,
                                 "q_rope must be torch.float16, as q is; got torch.bfloat16"),
    "no heads": (to("q", lambda q: q[:, :0]), ValueError, "q must have 1 .. 128 heads; got 0"),
    "129 heads": (put(q=torch.zeros(7, 129, 576, **half)), ValueError,
                  "q must have 1 .. 128 heads; got 129"),
    "q of integers": (to("q", lambda q: q.int()), TypeError,
                      "q must be bfloat16, float16 or.*got torch.int32"),
    "q in fp8": (to("q", lambda q: q.to(torch.float8_e4m3fn)), TypeError,
                 "q must be bfloat16, float16 or.*got torch.float8_e4m3fn"),
    "a token too many": (to("q", lambda q: torch.cat([q, q[:1]])), ValueError,
                         "q must have batch.num_tokens = 7 tokens; got 8"),
    "a token too few": (to("q", lambda q: q[:-1]), ValueError,
                        "q must have batch.num_tokens = 7 tokens; got 6"),
    "q not contiguous in a row": (lambda a: pair(a, latent=lambda x: strided(x, 2)), ValueError,
                                  r"q_latent must be contiguous in its last dimension; got "
                                  r"strides \(2048, 1024, 2\)"),
    "q with odd strides": (to("q", odd_stride), ValueError,
                           "q_latent must have strides of whole 16 bytes; dimension 0 has 2308"),
    "q_rope with odd strides": (lambda a: pair(a, rope=odd_stride), ValueError,
                                "q_rope must have strides of whole 16 bytes; dimension 0 has "
                                "260 bytes"),
    "no layout": (put(layout="latent_first"), TypeError,
                  "layout must be a KVLayout; got 'latent_first'"),
    "layout of other widths": (put(layout=KVLayout("latent_first", 256, 64)), ValueError,
                               r"q must be \[num_tokens, H, 320\]; got \[7, 2, 576\]"),
    "layout of another dtype": (put(layout=LATENT_FIRST.with_dtype(torch.bfloat16)), ValueError,
                                "kv_pool must be torch.bfloat16, as the layout says; got "
                                "torch.float16"),
    "no batch": (put(batch=None), TypeError, "batch must be a VerifyBatch; got NoneType"),
    "batch a dict": (to("batch", dataclasses.asdict), TypeError,
                     "batch must be a VerifyBatch; got dict"),
    "pool a list": (put(kv_pool=[[0.0] * 576]), TypeError, "kv_pool must be a tensor; got list"),
    "pool too narrow": (to("kv_pool", lambda p: p[:, :512]), ValueError,
                        r"kv_pool must be \[..., 576\] \(512 latent \+ 64 rope\); got"),
    "pool of 656 bytes": (put(kv_pool=torch.zeros(40, 656, **half)), ValueError,
                          "656 is the byte width of a scaled FP8 row"),
    "pool one row": (to("kv_pool", lambda p: p[0]), ValueError,
                     r"kv_pool must be \[slots, 576\], .*; got \[576\]"),
    "pool 4-dimensional": (to("kv_pool", lambda p: p[:, None, None]), ValueError,
                           r"kv_pool must be .*\[pages, page_size, 576\]; got \[38, 1, 1, 576\]"),
    "pool of other pages": (to("kv_pool", lambda p: p.unflatten(0, (-1, 2))), ValueError,
                            "kv_pool has pages of 2 tokens, batch.page_size is 1"),
    "pool of another dtype": (to("kv_pool", lambda p: p.bfloat16()), TypeError,
                              "kv_pool must be torch.float16, as q is; got torch.bfloat16"),
    "pool of bytes": (put(kv_pool=torch.zeros(40, 576, dtype=torch.uint8)), ValueError,
                      "kv_pool has dtype torch.uint8, which no cache row is stored in"),
    "pool not contiguous in a row": (to("kv_pool", lambda p: strided(p, 3)), ValueError,
                                     "kv_pool must have contiguous rows; its last stride is 3"),
    "pool with odd strides": (to("kv_pool", odd_stride), ValueError,
                              "kv_pool must have strides of whole 16 bytes; dimension 0 has "
                              "1154 bytes"),
    "pages apart": (put(kv_pool=torch.zeros(40, 3, 576, **half)[:, :2]), ValueError,
                    r"kv_pool must have pages that follow one another.*2 \* 576 = 1152 elements; "
                    "got 1728"),
    "pool elsewhere": (to("kv_pool", lambda p: p.to("meta")), ValueError,
                       "kv_pool is on meta, q on cpu"),
    "batch elsewhere": (to("batch", lambda b: b.to("meta")), ValueError,
                        "batch is on meta, q on cpu"),
    "no draft_kv": (without("draft_kv"), ValueError,
                    "draft_kv must be given, since batch.draft_slots is None"),
    "draft_kv and draft_slots": (
        to("batch", lambda b: dataclasses.replace(b, draft_slots=b.qo_indptr.new_zeros(7))),
        ValueError, "draft_kv must be None, since batch.draft_slots says where the draft rows"),
    "draft_kv a list": (put(draft_kv=[0.0]), TypeError, "draft_kv must be a tensor; got list"),
    "draft_kv too narrow": (to("draft_kv", lambda d: d[:, :512]), ValueError,
                            r"draft_kv must be \[..., 576\]"),
    "draft_kv a row short": (to("draft_kv", lambda d: d[:-1]), ValueError,
                             r"draft_kv must be \[7, 576\]; got \[6, 576\]"),
    "draft_kv for each head": (to("draft_kv", lambda d: d[:, None].expand(7, 2, 576)),
                               ValueError, r"draft_kv must be \[7, 576\]; got \[7, 2, 576\]"),
    "draft_kv of another dtype": (to("draft_kv", lambda d: d.float()), TypeError,
                                  "draft_kv must be torch.float16, as q is; got torch.float32"),
    "draft_kv not contiguous in a row": (to("draft_kv", lambda d: strided(d, 2)), ValueError,
                                         "draft_kv must be contiguous in its last dimension"),
    "draft_kv with odd strides": (to("draft_kv", odd_stride), ValueError,
                                  "draft_kv must have strides of whole 16 bytes"),
    "draft_kv elsewhere": (to("draft_kv", lambda d: d.to("meta")), ValueError,
                           "draft_kv is on meta, q on cpu"),
    "sm_scale NaN": (put(sm_scale=math.nan), ValueError, "sm_scale must be finite; got nan"),
    "sm_scale infinite": (put(sm_scale=math.inf), ValueError, "sm_scale must be finite; got inf"),
    "sm_scale a tensor": (put(sm_scale=torch.tensor(0.1)), TypeError,
                          r"sm_scale must be a number; got tensor\(0.1"),
    "sm_scale a string": (put(sm_scale="0.1"), TypeError, "sm_scale must be a number; got '0.1'"),
    "k_scale None": (put(k_scale=None), TypeError, "k_scale must be a number; got None"),
    "k_scale NaN": (put(k_scale=math.nan), ValueError, "k_scale must be finite; got nan"),
    "v_scale infinite": (put(v_scale=-math.inf), ValueError, "v_scale must be finite; got -inf"),
    "v_scale a bool": (put(v_scale=True), TypeError, "v_scale must be a number; got True"),
    "logit_cap negative": (put(logit_cap=-30.0), ValueError,
                           "logit_cap must be at least 0; got -30.0"),
    "logit_cap NaN": (put(logit_cap=math.nan), ValueError, "logit_cap must be finite; got nan"),
    "out a list": (put(out=[]), TypeError, "out must be a tensor; got list"),
    "out as wide as q": (put(out=torch.zeros(7, 2, 576, **half)), ValueError,
                         r"out must be \[7, 2, 512\]; got \[7, 2, 576\]"),
    "out of another dtype": (to("out", lambda x: x.float()), TypeError,
                             "out must be torch.float16; got torch.float32"),
    "out strided": (to("out", lambda x: x.new_zeros(2, 7, 512).transpose(0, 1)), ValueError,
                    r"out must be contiguous; got strides \(512, 3584, 1\)"),
    "out elsewhere": (to("out", lambda x: x.to("meta")), ValueError, "out is on meta, q on cpu"),
    "lse as out": (to("lse", lambda x: x[..., None]), ValueError,
                   r"lse must be \[7, 2\]; got \[7, 2, 1\]"),
    "lse transposed": (to("lse", lambda x: x.new_zeros(2, 7).T), ValueError,
                       r"lse must be contiguous; got strides \(1, 7\)"),
    "lse in half": (to("lse", lambda x: x.half()), TypeError,
                    "lse must be torch.float32; got torch.float16"),
    "lse elsewhere": (to("lse", lambda x: x.to("meta")), ValueError, "lse is on meta, q on cpu"),
    "workspace a number": (put(workspace=1024), TypeError, "workspace must be a tensor; got int"),
    "workspace of floats": (put(workspace=torch.zeros(64)), TypeError,
                            r"workspace must be uint8 \[bytes\]; got torch.float32 \[64\]"),
    "workspace a matrix": (put(workspace=torch.zeros(8, 8, dtype=torch.uint8)), TypeError,
                           r"workspace must be uint8 \[bytes\]; got torch.uint8 \[8, 8\]"),
    "workspace strided": (put(workspace=torch.zeros(64, dtype=torch.uint8)[::2]), ValueError,
                          r"workspace must be contiguous; got strides \(2,\)"),
    "workspace elsewhere": (put(workspace=torch.zeros(8, dtype=torch.uint8, device="meta")),
                            ValueError, "workspace is on meta, q on cpu"),
    "workspace too small": (lambda a: a.update(
        workspace=torch.zeros(64, dtype=torch.uint8), backend="triton",
        batch=dataclasses.replace(a["batch"], max_kv_len=1000)),
                            ValueError, r"workspace must have at least [\d,]+ bytes; got 64"),
    "backend unknown": (put(backend="flash"), ValueError,
                        "backend must be one of auto, cuda, triton, emulated, reference; "
                        "got 'flash'"),
    "backend None": (put(backend=None), ValueError, "backend must be one of .*; got None"),
    "backend cuda": (put(backend="cuda"), ValueError,
                     "backend 'cuda' cannot run this call: it runs on a CUDA device"),
}


def refuse(monkeypatch, generator, change, error, message):
    def launched(*arguments):
        raise AssertionError("launched")

    monkeypatch.setattr(attention, "_verify_attention_op", launched)
    call = make_call(generator)
    call |= {"out": torch.full((7, 2, 512), 7.0, **half), "lse": torch.full((7, 2), 7.0),
             "backend": "reference"}
    with pytest.raises(AssertionError, match="launched"):
        verify_attention(**call)  # as it stands it would run
    change(call)
    before = {name: value.clone() for name, value in call.items()
              if name in ("out", "lse") and isinstance(value, torch.Tensor)}
    with pytest.raises(error, match=message):
        verify_attention(**call)
    for name, value in before.items():
        assert value.is_meta or torch.equal(call[name], value), f"{name} was changed"


@pytest.mark.skipif(DEVICE != "cpu", reason="the table's tensors are on the CPU")
@pytest.mark.parametrize("name", REFUSED)
def test_refused(monkeypatch, generator, name):
    refuse(monkeypatch, generator, *REFUSED[name])


def test_the_table_of_refusals_is_long_enough():
    assert len(REFUSED) >= 60


@pytest.mark.skipif(not triton_room.INTERPRETED, reason="what the interpreter refuses")
@pytest.mark.parametrize("dtype, message", [
    (torch.bfloat16, "q is bfloat16, and Triton's interpreter multiplies bfloat16 matrices "
                     "wrongly.*use float16 or float32 without a GPU"),
    (torch.float64, "backend 'triton' cannot run this call: .* not torch.float64"),
], ids=str)
def test_refused_by_triton(generator, dtype, message):
    call = make_call(generator, dtype=dtype)
    out, lse = torch.full((7, 2, 512), 7.0, dtype=dtype), torch.full((7, 2), 7.0)
    with pytest.raises(ValueError, match=message):
        verify_attention(**call, out=out, lse=lse, backend="triton")
    assert (out == 7).all() and (lse == 7).all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["q", "kv_pool", "draft_kv"])
def test_addresses_must_be_aligned(generator, name):
    call = {key: value.cuda() if isinstance(value, torch.Tensor) else value
            for key, value in make_call(generator).items()}
    call["batch"] = call["batch"].to("cuda")
    good = call[name]
    moved = torch.empty(good.numel() + 1, dtype=good.dtype, device="cuda")[1:].view(good.shape)
    call[name] = moved.copy_(good)
    with pytest.raises(ValueError, match="must begin at a multiple of 16 bytes; its address is 2 "
                                         "past one"):
        verify_attention(**call)


# -- wrong kernels are noticed ------------------------------------------------------------


def split_up(generator, layout=LATENT_FIRST):
    """A case whose every token has about the same weight, so that none is too light to miss,
    with each request split among several programs."""
    arguments = make_call(generator, [tree.kary(2, 6), 5], [150, 7], heads=4, layout=layout,
                          sharp=0.3)
    return check.Case(0, "made to be split", arguments)


def run_triton(monkeypatch, case, module=triton_room):
    """Compares a Triton module's split kernel, splitting, with the oracle."""
    config = module.SplitConfig(16, 16, workers=7)

    def run(*arguments, workspace, **meaning):
        module.verify_attention_triton(*arguments, **meaning, config=config)

    monkeypatch.setitem(attention._RUN, "triton", run)
    return check.run(case, "triton")


def mutated(tmp_path, old, new):
    """A copy of mla_kernels/triton.py with one place changed, as a module."""
    source = Path(triton_room.__file__).read_text()
    assert source.count(old) == 1, f"{source.count(old)} places have: {old}"
    path = tmp_path / "mutated.py"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location("mla_kernels._mutated", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
    return module


TILE_END = "tile_end = tl.minimum(tile_begin + chunk, tiles)"
TILE_BEGIN = "tile_begin = part * chunk"
MUTATIONS = {
    "nothing": (TILE_END, TILE_END),
    "a share ends a tile early": (TILE_END, TILE_END.replace("chunk", "chunk - 1")),
    "a share ends a tile late": (TILE_END, TILE_END.replace("chunk", "chunk + 1")),
    "a share begins a tile late": (TILE_BEGIN, TILE_BEGIN + " + tl.minimum(part, 1)"),
    "prefix tiles rounded down": (
        "prefix_tiles = (kv_len + BLOCK_N - 1) // BLOCK_N\n    tiles = prefix_tiles",
        "prefix_tiles = kv_len // BLOCK_N\n    tiles = prefix_tiles"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_split_boundary_off_by_one(monkeypatch, tmp_path, generator, name):
    errors = run_triton(monkeypatch, split_up(generator), mutated(tmp_path, *MUTATIONS[name]))
    assert errors.passed == (name == "nothing"), errors


@BOTH
def test_wrong_row_order(monkeypatch, generator, layout):
    case = split_up(generator, layout)
    assert run_triton(monkeypatch, case).passed
    exact = case.exact()
    monkeypatch.setattr(check.Case, "exact", lambda self: exact)  # of the right order
    case.arguments["layout"] = layout.swapped
    errors = run_triton(monkeypatch, case)
    assert not errors.passed
    # No NaN gives it away: the numbers are finite and wrong.
    assert 0.5 < errors.out < math.inf


def test_one_flipped_mask_bit(monkeypatch, generator, rng):
    case = split_up(generator)
    assert run_triton(monkeypatch, case).passed
    exact = case.exact()
    monkeypatch.setattr(check.Case, "exact", lambda self: exact)
    batch = case.arguments["batch"]
    masks = [batch.draft_mask(0).cpu(), batch.draft_mask(1).cpu()]
    # A draft that sees one that is no ancestor of it, or misses one that is; of the request
    # with the short prefix, where a token is a tenth of what there is to see.
    for sees in (False, True):
        nodes, others = np.nonzero((masks[1] == sees).numpy())
        pick = int(rng.integers(len(nodes)))
        node, other = int(nodes[pick]), int(others[pick])
        bits = batch.mask_bits.clone()
        bits[6 + node, 0] ^= 1 << other
        case.arguments["batch"] = dataclasses.replace(batch, mask_bits=bits)
        changed = case.arguments["batch"].draft_mask(1).cpu() != masks[1]
        assert changed.nonzero().tolist() == [[node, other]]
        errors = run_triton(monkeypatch, case)
        assert not errors.passed, (node, other, errors)
        assert 2 * check.ROW_TOLERANCE < errors.row < math.inf


# -- wrong CUDA kernels -------------------------------------------------------------------

#: name: (file of csrc/, text, what it becomes)
END = "begin(group + 1) - unit;"
CUDA_MUTATIONS = {
    "a share ends a tile early": ("schedule.cuh", END, END.replace(" - unit", " - 1 - unit")),
    "a share ends a tile late": (
        "schedule.cuh", END, "min(begin(group + 1) + 1, total) - unit;"),
}


def mutate_csrc(tmp_path, monkeypatch, name):
    folder = tmp_path / "csrc"
    folder.mkdir()
    file, old, new = CUDA_MUTATIONS[name]
    for source, text in build.sources().items():
        if source == file:
            assert text.count(old) == 1, f"{text.count(old)} places of {file} have: {old}"
            text = text.replace(old, new)
        (folder / source).write_text(text)
    monkeypatch.setattr(build, "CSRC", folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", CUDA_MUTATIONS)
def test_mutated_cuda_source_compiles(tmp_path, monkeypatch, name):
    """So that it is known to be a wrong kernel, and not no kernel, where there is a GPU."""
    folder = mutate_csrc(tmp_path, monkeypatch, name)
    toolkit = build.find_toolkit()
    cubin = tmp_path / "verify.cubin"
    build._run([toolkit.nvcc, *build.NVCC_FLAGS, "-I", folder, "-arch=sm_120", "-cubin",
                folder / "verify.cu", "-o", cubin], "nvcc")
    assert cubin.stat().st_size > 10_000


def cuda_case(generator):
    """Several work groups a request, every tile of about the same weight."""
    case = check.Case(0, "made to be split", make_call(
        generator, [tree.kary(2, 6), 5], [900, 200], heads=4, sharp=0.3))
    for name, value in case.arguments.items():
        if isinstance(value, (torch.Tensor, VerifyBatch)):
            case.arguments[name] = value.to("cuda")
    return case


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", [None, *CUDA_MUTATIONS])
def test_cuda_split_boundary_off_by_one(tmp_path, monkeypatch, generator, name):
    if name:
        mutate_csrc(tmp_path, monkeypatch, name)
        monkeypatch.setenv("MLA_KERNELS_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(build, "_loaded", {})
    assert check.run(cuda_case(generator), "cuda").passed == (name is None)


@pytest.mark.gpu
def test_cuda_wrong_row_order_and_flipped_bit(monkeypatch, generator):
    case = cuda_case(generator)
    assert check.run(case, "cuda").passed
    exact = case.exact()
    monkeypatch.setattr(check.Case, "exact", lambda self: exact)
    case.arguments["layout"] = ROPE_FIRST
    errors = check.run(case, "cuda")
    assert 0.5 < errors.out < math.inf
    case.arguments["layout"] = LATENT_FIRST
    batch = case.arguments["batch"]
    # Without the prefixes, so that one draft has weight.
    case.arguments["batch"] = dataclasses.replace(batch, kv_lens=torch.zeros_like(batch.kv_lens))
    monkeypatch.undo()
    exact = case.exact()
    monkeypatch.setattr(check.Case, "exact", lambda self: exact)
    assert check.run(case, "cuda").passed
    bits = batch.mask_bits.clone()
    bits[0, 0] ^= 2  # the root sees a child
    case.arguments["batch"] = dataclasses.replace(case.arguments["batch"], mask_bits=bits)
    errors = check.run(case, "cuda")
    assert not errors.passed and errors.row < math.inf
