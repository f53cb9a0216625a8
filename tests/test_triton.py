"""triton: both kernels against the float64 oracle.

Whatever a kernel has no business reading is NaN (pool rows that no request names, padding
around strided rows, queries of no request), and so is the output beforehand. Without a GPU all
this runs in Triton's interpreter.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

import mla_kernels.triton as triton_room
from mla_kernels import tree
from mla_kernels.batch import VerifyBatch
from mla_kernels.layout import KVLayout, pool_rows
from mla_kernels.reference import verify_attention_reference
from mla_kernels.triton import (
    INTERPRETED,
    SM120_SHARED_MEMORY,
    SerialConfig,
    SplitConfig,
    compiled_resources,
    default_serial_config,
    default_split_config,
    device_config,
    split_candidates,
    split_workers,
    split_workspace_bytes,
    verify_attention_triton,
    workspace_bytes,
)

DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = (torch.float16, torch.float32) if INTERPRETED else (torch.bfloat16, torch.float16)
SM_SCALE = 192**-0.5
LATENT_FIRST, ROPE_FIRST = KVLayout.LATENT_FIRST, KVLayout.ROPE_FIRST

#: Largest error of one output row, relative to its norm. 16-bit types round twice, the weights
#: and the output, each by at most half an eps; fp32 rounds once for each of some hundred terms.
TOLERANCE = {torch.float16: torch.finfo(torch.float16).eps,
             torch.bfloat16: torch.finfo(torch.bfloat16).eps,
             torch.float32: 32 * torch.finfo(torch.float32).eps}

SERIAL = SerialConfig(16, 16)
SPLIT = SplitConfig(16, 16)
KERNELS = {"serial": SERIAL, "split": SPLIT}


@dataclasses.dataclass
class Case:
    """Arguments of one call; ``pool`` is what the oracle takes for ``rows``."""

    q_latent: torch.Tensor
    q_rope: torch.Tensor
    pool: torch.Tensor
    draft_kv: torch.Tensor | None
    batch: VerifyBatch
    layout: KVLayout
    scalars: dict[str, float]

    def expected(self):
        """In float64, on the CPU, from the very numbers that the kernel gets."""
        def cpu(x):
            return None if x is None else x.cpu()
        return verify_attention_reference(
            cpu(self.q_latent), cpu(self.q_rope), cpu(self.pool), self.batch.to("cpu"),
            layout=self.layout, draft_kv=cpu(self.draft_kv), **self.scalars)

    def run(self, config, **changes):
        """``out`` and ``lse`` of the kernel that ``config`` belongs to."""
        shape = self.q_latent.shape
        kind = {"device": DEVICE}
        out = torch.full(shape, torch.nan, dtype=self.q_latent.dtype, **kind)
        lse = torch.full(shape[:2], torch.nan, **kind)
        scalars = {"k_scale": 1.0, "v_scale": 1.0, "logit_cap": 0.0, **self.scalars}
        arguments = {
            "q_latent": self.q_latent, "q_rope": self.q_rope,
            "rows": pool_rows(self.pool, self.layout), "draft_kv": self.draft_kv,
            "batch": self.batch, "layout": self.layout, "out": out, "lse": lse,
            "kernel": "serial" if isinstance(config, SerialConfig) else "split",
            "config": config, **scalars, **changes,
        }
        verify_attention_triton(**arguments)
        return out, lse


def poisoned(shape, dtype):
    return torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)


def make_case(
    rng, drafts, lens, *, heads=3, page_size=1, layout=LATENT_FIRST, dtype=DTYPES[0],
    in_pool=False, padding=0, **scalars,
):
    """Random numbers in a pool of scattered pages. ``padding``: extra tokens, pages and mask
    words that belong to nobody, as under CUDA graphs, and larger capacities."""
    def normal(*shape):
        return torch.from_numpy(rng.standard_normal(shape)).to(dtype).to(DEVICE)

    counts = [-(-length // page_size) for length in lens]
    q_lens = [d if isinstance(d, int) else len(d) for d in drafts]
    num_pages = sum(counts) + -(-sum(q_lens) // page_size) + 3
    order = rng.permutation(num_pages)
    pages = np.split(order[:sum(counts)], np.cumsum(counts)[:-1])
    # Draft tokens anywhere in the remaining pages.
    free = (order[sum(counts):, None] * page_size + np.arange(page_size)).reshape(-1)
    slots = np.split(rng.permutation(free)[:sum(q_lens)], np.cumsum(q_lens)[:-1])
    batch = VerifyBatch.from_requests(drafts, lens, pages, page_size=page_size,
                                      draft_slots=slots if in_pool else None, device=DEVICE)
    num_tokens = batch.num_tokens
    if padding:
        def more(x, shape, value):
            grown = torch.full(shape, value, dtype=x.dtype, device=DEVICE)
            grown[tuple(map(slice, x.shape))] = x
            return grown

        far = 2**31 - 1  # never to be followed
        batch = dataclasses.replace(
            batch,
            kv_indices=more(batch.kv_indices, [batch.kv_indices.numel() + padding], far),
            mask_bits=more(batch.mask_bits, [num_tokens + padding,
                                             batch.mask_bits.shape[1] + 1], -1),
            draft_slots=None if not in_pool else more(batch.draft_slots, [num_tokens + padding],
                                                      far),
            max_q_len=batch.max_q_len + padding, max_kv_len=batch.max_kv_len + 100)

    # Strided views of wider tensors: nothing may assume rows that follow one another.
    width = layout.row_dim
    pool = poisoned((num_pages * page_size, width + 16), dtype)[:, 8:8 + width]
    for b in range(batch.batch_size):
        used = batch.prefix_slots(b)
        pool[used] = normal(len(used), width)
    draft_kv = None
    if in_pool:
        used = batch.draft_slots[:num_tokens].long()
        pool[used] = normal(num_tokens, width)
    else:
        draft_kv = poisoned((num_tokens + padding, 2, width), dtype)[:, 1]
        draft_kv[:num_tokens] = normal(num_tokens, width)
    q = poisoned((num_tokens + padding, heads + 1, width + 8), dtype)[:, :heads, :width]
    q[:num_tokens] = normal(num_tokens, heads, width)
    return Case(*layout.split(q), pool, draft_kv, batch, layout,
                {"sm_scale": SM_SCALE, **scalars})


def worst_error(case, out, lse, expected=None):
    """The largest error, in units of what is allowed: above 1 is a failure. NaN anywhere, a
    written row of no request, or anything but 0 and -inf where nothing is seen is infinity."""
    want_out, want_lse = expected or case.expected()
    out, lse = out.double().cpu(), lse.double().cpu()
    nobody, blind = want_lse.isnan(), want_lse.isneginf()
    sees = ~nobody & ~blind
    if not (out[nobody].isnan().all() and lse[nobody].isnan().all()
            and (out[blind] == 0).all() and lse[blind].isneginf().all()
            and out[sees].isfinite().all() and lse[sees].isfinite().all()):
        return float("inf")
    norm = torch.linalg.vector_norm
    error = norm(out - want_out, dim=-1)[sees] / norm(want_out, dim=-1)[sees]
    # The lse is fp32 throughout: the dtype of the inputs does not enter.
    lse_error = ((lse - want_lse).abs() / (1 + want_lse.abs()))[sees]
    return float(torch.cat([error / TOLERANCE[case.q_latent.dtype],
                            lse_error / TOLERANCE[torch.float32],
                            torch.zeros(1, dtype=torch.float64)]).max())


def check(case, config, **changes):
    error = worst_error(case, *case.run(config, **changes))
    assert error <= 1, f"{config}: {error:.3g} times the allowed error"


def ddtree(rng, budget):
    return tree.ddtree(np.log(rng.dirichlet(np.ones(6), size=5)), budget)


# -- numbers -------------------------------------------------------------------------------

#: name: (drafts(rng), prefix lengths, further arguments of make_case)
CASES = {
    "chain": (lambda rng: [5], [37], {"heads": 8}),
    "one token": (lambda rng: [1, 1], [1, 17], {"heads": 1}),
    "no prefix": (lambda rng: [tree.kary(2, 7), 3], [0, 0], {"heads": 3}),
    "k-ary, ragged": (lambda rng: [tree.kary(3, 13), tree.kary(2, 4), 2], [50, 0, 1],
                      {"heads": 3}),
    "ddtree in the pool": (lambda rng: [ddtree(rng, 12), ddtree(rng, 6)], [33, 70],
                           {"heads": 8, "in_pool": True}),
    "rope first": (lambda rng: [tree.kary(3, 8), 4], [19, 48],
                   {"heads": 3, "layout": ROPE_FIRST}),
    "rope first in the pool": (lambda rng: [tree.kary(3, 8), 4], [19, 48],
                               {"heads": 3, "layout": ROPE_FIRST, "in_pool": True}),
    "pages of 16": (lambda rng: [tree.kary(2, 6), 3], [31, 16],
                    {"heads": 12, "page_size": 16, "in_pool": True}),
    "pages of 64": (lambda rng: [tree.kary(2, 6), 2, 1], [65, 64, 3],
                    {"heads": 3, "page_size": 64}),
    "more than a mask word": (lambda rng: [tree.kary(2, 45)], [5], {"heads": 1}),
    "scales": (lambda rng: [tree.kary(3, 5)], [23],
               {"heads": 3, "k_scale": 0.37, "v_scale": 2.5}),
    # Random logits have a deviation of about 1.7: a cap of 2 bends most of them.
    "logit cap": (lambda rng: [tree.kary(3, 5), 2], [23, 0],
                  {"heads": 3, "logit_cap": 2.0, "k_scale": 1.5}),
    "padded": (lambda rng: [tree.kary(3, 5), 2], [23, 9], {"heads": 3, "padding": 5}),
    "padded, in the pool": (lambda rng: [tree.kary(3, 5), 2], [23, 9],
                            {"heads": 3, "padding": 5, "in_pool": True, "page_size": 16}),
}

#: name: config for a batch size
CONFIGS = {
    "serial": lambda bs: SERIAL,
    "whole requests": lambda bs: SplitConfig(16, 32, workers=bs),
    "split": lambda bs: SplitConfig(16, 16, workers=bs + 4),
    "split, default": lambda bs: None,
}


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_matches_the_oracle(rng, name, dtype, config):
    drafts, lens, arguments = CASES[name]
    case = make_case(rng, drafts(rng), lens, dtype=dtype, **arguments)
    check(case, CONFIGS[config](len(lens)))


@pytest.mark.parametrize("config", [SERIAL, SPLIT, SplitConfig(16, 16, workers=7)],
                         ids=["serial", "split", "split over 7"])
@pytest.mark.parametrize("in_pool", [False, True])
def test_any_mask(rng, config, in_pool):
    """A token that sees nothing at all, and a draft row that nobody sees, holding NaN."""
    mask = rng.random((9, 9)) < 0.5
    mask[2], mask[:, 4] = False, False
    case = make_case(rng, [mask, 3], [0, 20], in_pool=in_pool)
    if in_pool:
        case.pool[int(case.batch.draft_slots[4])] = torch.nan
    else:
        case.draft_kv[4] = torch.nan
    expected = case.expected()
    assert expected[1][2].isneginf().all()
    assert worst_error(case, *case.run(config), expected) <= 1


@pytest.mark.parametrize("block_m, block_n", [(16, 64), (32, 16), (32, 32), (64, 16), (64, 64)])
def test_block_sizes(rng, block_m, block_n):
    case = make_case(rng, [tree.kary(3, 11), 4, 1], [70, 3, 0], heads=8)
    check(case, SplitConfig(block_m, block_n, workers=6))
    check(case, SerialConfig(block_m, block_n))


@pytest.mark.parametrize("workers", [4, 5, 6, 9, 16, 40, 200])
def test_uneven_lengths_dealt_out(rng, workers):
    """Every tile is somebody's, and nobody's twice, however the runs fall."""
    lens = [300, 0, int(rng.integers(1, 20)), 64]
    case = make_case(rng, [2, 1, 3, 2], lens, heads=2, padding=2)
    check(case, SplitConfig(16, 16, workers=workers))


def test_requests_without_tokens(rng):
    """Engines pad a captured batch with requests that have none."""
    case = make_case(rng, [3, 2], [20, 9], heads=2)
    old = case.batch
    last = old.qo_indptr[-1:], old.kv_indptr[-1:]
    case.batch = dataclasses.replace(
        old, qo_indptr=torch.cat([old.qo_indptr[:2], old.qo_indptr[1:], last[0]]),
        kv_indptr=torch.cat([old.kv_indptr[:2], old.kv_indptr[1:], last[1]]),
        kv_lens=torch.cat([old.kv_lens[:1], old.kv_lens.new_tensor([5]), old.kv_lens[1:],
                           old.kv_lens.new_tensor([1])]))
    for config in (SERIAL, SplitConfig(16, 16, workers=4), SplitConfig(16, 16, workers=9)):
        check(case, config)


def test_other_widths(rng):
    case = make_case(rng, [tree.kary(2, 5)], [21], layout=KVLayout("rope_first", 64, 16))
    check(case, SERIAL)
    check(case, SplitConfig(16, 16, workers=3))


@pytest.mark.parametrize("kernel", KERNELS)
def test_slots_past_two_to_the_31_elements(rng, kernel):
    case = make_case(rng, [3], [20], in_pool=True)
    first = 2**31 // 576 + 1
    try:
        # Never touched except where the batch points, so it takes address space, not memory.
        pool = torch.empty(first + len(case.pool), 576, dtype=case.pool.dtype, device=DEVICE)
    except RuntimeError as error:
        pytest.skip(f"no 4 GB of address space: {error}")
    pool[first:] = case.pool
    case.pool = pool
    case.batch = dataclasses.replace(case.batch, kv_indices=case.batch.kv_indices + first,
                                     draft_slots=case.batch.draft_slots + first)
    check(case, KERNELS[kernel])


# -- the comparison itself -------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_comparison_notices(rng, kernel, dtype):
    """What a wrong kernel would compute is well outside of the tolerance."""
    config = KERNELS[kernel]
    # A small scale gives every token about the same weight, so that none is too light to miss.
    case = make_case(rng, [tree.kary(3, 8), 3], [40, 17], dtype=dtype, sm_scale=SM_SCALE / 10)
    case.pool[case.pool.isnan()] = 0  # so that a wrong row does not give itself away by NaN
    expected = case.expected()

    def error(**changes):
        return worst_error(case, *case.run(config, **changes), expected)

    def batch(name, index, change):
        tensor = getattr(case.batch, name).clone()
        tensor[index] = change(tensor[index])
        return dataclasses.replace(case.batch, **{name: tensor})

    assert error() <= 1
    # The silent mistake: queries and keys agree on the order, so the scores are right, but
    # the value is the wrong 512 of the 576.
    q_latent, q_rope = ROPE_FIRST.split(LATENT_FIRST.concat(case.q_latent, case.q_rope))
    wrong = case.run(config, q_latent=q_latent, q_rope=q_rope, layout=ROPE_FIRST)
    assert worst_error(case, expected[0].to(dtype), wrong[1], expected) <= 1, "scores differ"
    assert worst_error(case, *wrong, expected) > 5, "wrong row order"
    node, bit = int(rng.integers(8)), 1 << int(rng.integers(8))
    page = int(rng.integers(40 + 17))
    for what, changes in {
        "flipped mask bit": {"batch": batch("mask_bits", (node, 0), lambda word: word ^ bit)},
        "one token short": {"batch": batch("kv_lens", 1, lambda n: n - 1)},
        "another slot": {"batch": batch("kv_indices", page, lambda n: (n + 1) % len(case.pool))},
        "sm_scale": {"sm_scale": 576**-0.5},
        "k_scale": {"k_scale": 1.1},
        "v_scale": {"v_scale": 1.1},
        "logit_cap": {"logit_cap": 1.0},
    }.items():
        assert error(**changes) > 5, what


# -- launches --------------------------------------------------------------------------------


def test_launches_name_every_argument(rng, monkeypatch):
    """The interpreter drops arguments that a kernel does not have; the compiler refuses them."""
    case = make_case(rng, [2], [3])
    launched = []

    class Kernel:
        def __init__(self, name, kernel):
            self.name, self.parameters = name, set(kernel.arg_names)

        def __getitem__(self, grid):
            assert all(isinstance(n, int) and n > 0 for n in grid)

            def launch(**arguments):
                launched.append(self.name)
                assert set(arguments) - {"num_warps", "num_stages"} == self.parameters
            return launch

    for name in ("_serial_kernel", "_split_kernel", "_combine_kernel"):
        monkeypatch.setattr(triton_room, name, Kernel(name, getattr(triton_room, name)))
    for config in (SERIAL, SplitConfig(workers=1), SplitConfig(workers=2)):
        case.run(config)
    assert launched == ["_serial_kernel", "_split_kernel", "_split_kernel", "_combine_kernel"]


# -- workspace -------------------------------------------------------------------------------


@pytest.mark.parametrize("partial_dtype", ["fp32", "input"])
def test_workspace_is_reusable_and_deterministic(rng, partial_dtype):
    case = make_case(rng, [tree.kary(3, 8), 2], [60, 9])
    config = SplitConfig(16, 16, workers=8, partial_dtype=partial_dtype)
    size = workspace_bytes(case.batch, 3, dtype=case.q_latent.dtype, config=config)
    # 0xFF: NaN in every floating type, and nonsense as a run's number.
    workspace = torch.full([size], 0xFF, dtype=torch.uint8, device=DEVICE)
    first = case.run(config, workspace=workspace)
    # A rounding more, by half an eps at most.
    assert worst_error(case, *first) <= (1 if partial_dtype == "fp32" else 1.5)
    again = case.run(config, workspace=workspace)
    alone = case.run(config)
    for a, b, c in zip(first, again, alone, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)
    with pytest.raises(ValueError, match=f"workspace must have at least {size} bytes"):
        case.run(config, workspace=workspace[:-1])
    with pytest.raises(ValueError, match="multiple of 16"):
        case.run(config, workspace=torch.empty(size + 8, dtype=torch.uint8, device=DEVICE)[8:])


def test_workspace_bytes(rng):
    case = make_case(rng, [4, 4], [60, 9])
    assert workspace_bytes(case.batch, 3, kernel="serial") == 0
    assert workspace_bytes(case.batch, 3, config=SplitConfig(workers=2)) == 0
    fp32, half = (workspace_bytes(case.batch, 3, config=SplitConfig(workers=5, partial_dtype=p))
                  for p in ("fp32", "input"))
    # 5 workers * 16 rows * (512 values and an lse), and a pair of int32 for each request.
    assert fp32 == 5 * 16 * (512 * 4 + 4) + 16
    assert half == 5 * 16 * (512 * 2 + 4) + 16
    # By capacity: the largest prefix a captured graph may meet, not today's.
    config = SplitConfig()
    small, large = (split_workspace_bytes(2, 8, n, 8, config=config, num_sms=132)
                    for n in (1, 10_000))
    assert small == 0 < large


@pytest.mark.parametrize("batch_size", [1, 2, 7, 32, 300])
@pytest.mark.parametrize("rows", [1, 16, 64, 512, 4096])
def test_split_workers(batch_size, rows):
    for max_kv_len in (0, 100, 131072):
        workers = split_workers(batch_size, rows, max_kv_len, 1, SplitConfig(), num_sms=132)
        programs = workers * -(-rows // 16)
        assert workers >= batch_size
        if workers > batch_size:
            assert programs <= 4 * 132
        if max_kv_len == 131072:
            waves = -(-programs // 132)
            assert programs >= min(100, 0.75 * waves * 132)


# -- compiled for a GPU that need not be there -----------------------------------------------

COMPILE = """
import sys
from mla_kernels.layout import KVLayout
from mla_kernels.triton import (SM120_SHARED_MEMORY, SplitConfig, compiled_resources,
                                default_serial_config, default_split_config)
every = {"layout": KVLayout.ROPE_FIRST, "page_size": 64, "in_pool": False, "logit_cap": True,
         "num_heads": 12}
for name, config, arguments in [
    ("serial", default_serial_config(120), {}),
    ("split", default_split_config(), {}),
    ("split, other arguments", default_split_config(), every),
    ("split, whole requests", default_split_config(), {"split": False}),
    ("split, two buffers", SplitConfig(16, 32, 4, 5), {}),
    ("split, 32 rows", SplitConfig(32, 32, 8, 3), {}),
]:
    got = compiled_resources(config, 120, **arguments)
    need = config.shared_memory() if isinstance(config, SplitConfig) else None
    print(name, got.shared_memory, need, got.registers, got.stack, sep="\t")
"""


@pytest.mark.slow
def test_compiles_for_sm120(tmp_path, record_property):
    """Both kernels within a block's shared memory on sm_120, and the helper that says so right:
    were a load no longer pipelined, it would need less."""
    env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=env, text=True,
                          capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    assert len(lines) == 6
    for name, shared, need, registers, stack in lines:
        print(f"{name}: {shared} B shared, {registers} registers, {stack} B stack")
        record_property(name, f"{shared} B shared, {registers} registers, {stack} B stack")
        assert int(shared) <= SM120_SHARED_MEMORY
        if need != "None":
            assert abs(int(shared) - int(need)) <= 2048, (name, shared, need)
            # Spills of a few registers move with Triton's version; more would cost dearly.
            assert stack == "None" or int(stack) <= 64, (name, stack)


def test_resources_need_a_compiler():
    if not INTERPRETED:
        pytest.skip("the kernels of this process are compiled")
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=0"):
        compiled_resources(SPLIT)


def test_shared_memory_of_candidates():
    candidates = split_candidates()
    assert candidates and all(c.shared_memory() <= SM120_SHARED_MEMORY for c in candidates)
    assert default_split_config().shared_memory() == 96_256
    assert default_split_config().programs_per_sm == 1
    assert default_split_config(232_448).programs_per_sm == 2
    assert default_split_config(64 * 1024).buffers == 1
    with pytest.raises(ValueError, match="shared_memory: 20000 bytes hold no"):
        default_split_config(20_000)


def test_default_serial_config_is_the_engines():
    assert (default_serial_config(120).block_m, default_serial_config(120).block_n) == (32, 32)
    assert (default_serial_config(90).block_m, default_serial_config(90).block_n) == (32, 64)


# -- the interpreter, and what is refused ----------------------------------------------------

LATE = """
import os
import triton, torch
assert isinstance(triton.language.sum, triton.runtime.JITFunction)
import mla_kernels.triton as ours
from mla_kernels.batch import VerifyBatch
from mla_kernels.layout import KVLayout
assert ours.INTERPRETED and "TRITON_INTERPRET" not in os.environ
batch = VerifyBatch.from_requests([2], [20], [range(20)])
q, pool = torch.ones(2, 1, 576), torch.ones(20, 576)
out, lse = torch.zeros(2, 1, 512), torch.zeros(2, 1)
ours.verify_attention_triton(
    q[..., :512], q[..., 512:], pool, pool[:2], batch, layout=KVLayout.LATENT_FIRST,
    sm_scale=1 / 576, k_scale=1.0, v_scale=1.0, logit_cap=0.0, out=out, lse=lse,
    config=ours.SplitConfig(16, 16, workers=2))
assert (out - 1).abs().max() < 1e-6
"""


@pytest.mark.skipif(not INTERPRETED, reason="this machine compiles its kernels")
def test_interpreted_though_triton_came_first():
    """Triton's own sum and max cannot be interpreted when it was imported to compile, as by
    torch; and the choice is this module's alone."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-W", "error", "-c", LATE], env=env, text=True,
                          capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_refusals(rng):
    case = make_case(rng, [2], [3])
    with pytest.raises(ValueError, match="kernel must be split or serial; got 'fast'"):
        case.run(None, kernel="fast")
    with pytest.raises(TypeError, match="config must be a SplitConfig for kernel 'split'"):
        case.run(SERIAL, kernel="split")
    with pytest.raises(ValueError, match="kv_lora_rank must be a power of two"):
        case.run(None, layout=KVLayout(kv_lora_rank=480, qk_rope_head_dim=96))
    with pytest.raises(ValueError, match="qk_rope_head_dim must be a power of two"):
        case.run(None, layout=KVLayout(qk_rope_head_dim=8))
    with pytest.raises(ValueError, match="rows must have the queries' dtype"):
        case.run(None, rows=case.pool.double())
    with pytest.raises(ValueError, match="q must be"):
        case.run(None, q_latent=case.q_latent.double(), rows=case.pool.double())
    with pytest.raises(ValueError, match="workers must be at least the batch size, 2; got 1"):
        split_workers(2, 1, 1, 1, SplitConfig(workers=1), num_sms=8)
    for arguments, message in (
        ({"block_m": 8}, "block_m must be a power of two"),
        ({"block_n": 48}, "block_n must be a power of two"),
        ({"num_warps": 3}, "num_warps must be"),
        ({"num_stages": 1}, "num_stages must be at least 2"),
        ({"programs_per_sm": 0}, "programs_per_sm must be at least 1"),
        ({"workers": 0}, "workers must be at least 1"),
        ({"partial_dtype": "bf16"}, "partial_dtype must be fp32 or input"),
    ):
        with pytest.raises(ValueError, match=message):
            SplitConfig(**arguments)


@pytest.mark.skipif(not INTERPRETED, reason="bfloat16 is wrong in the interpreter alone")
@pytest.mark.parametrize("kernel", KERNELS)
def test_interpreter_refuses_bfloat16(rng, kernel):
    case = make_case(rng, [2], [3], dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="bfloat16 matrices wrongly"):
        case.run(KERNELS[kernel])


# -- on a GPU --------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("config", split_candidates(), ids=str)
def test_candidates_on_a_gpu(rng, config):
    case = make_case(rng, [tree.kary(3, 40), ddtree(rng, 24), 1], [3000, 517, 0], heads=8)
    check(case, config)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS)
def test_cuda_graph_follows_lengths(rng, kernel):
    """Captured at one set of lengths, replayed at another."""
    case = make_case(rng, [tree.kary(3, 8), 5], [900, 300], heads=8, padding=3)
    config = device_config(kernel, DEVICE)
    size = workspace_bytes(case.batch, 8, kernel=kernel, config=config)
    workspace = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    case.run(config, workspace=workspace)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = case.run(config, workspace=workspace)
    case.batch.kv_lens.copy_(torch.tensor([41, 299], device=DEVICE))
    graph.replay()
    torch.cuda.synchronize()
    assert worst_error(case, out, lse) <= 1
