"""emulated: the CUDA kernel's own source on the CPU, against the oracle; and what it reports."""

from __future__ import annotations

import pytest
import torch

from mla_kernels import build, check, cuda, emulated
from mla_kernels.batch import VerifyBatch
from mla_kernels.layout import KVLayout, pool_rows

SMALL = {"max_heads": 8, "max_nodes": 12, "max_requests": 3, "max_prefix": 200}


def run(case, **launch):
    """Runs a case with a launch of its own into poisoned outputs and compares."""
    a = dict(case.arguments)
    batch, layout, q = a["batch"], a["layout"], a.pop("q")
    latent, rope = layout.split(q) if isinstance(q, torch.Tensor) else q
    plan = cuda.plan(latent.shape[1], batch.batch_size, batch.max_q_len, batch.max_kv_len, 132,
                     **launch)
    out = torch.full((*latent.shape[:2], 512), torch.nan, dtype=latent.dtype)
    lse = torch.full(latent.shape[:2], torch.nan)
    scalars = {name: a.get(name, default) for name, default in
               (("k_scale", 1.0), ("v_scale", 1.0), ("logit_cap", 0.0))}
    emulated.verify_attention_emulated(
        latent, rope, pool_rows(a["kv_pool"], layout), a["draft_kv"], batch, layout=layout,
        sm_scale=a["sm_scale"], out=out, lse=lse, launch=plan, **scalars)
    return check.compare(case, out, lse)


@pytest.mark.parametrize("rows", build.TILE_ROWS)
@pytest.mark.parametrize("split", build.COMBINE_SPLITS)
def test_kernel_matches_the_oracle(seed, rng, rows, split):
    """Orders, dtypes, heads, trees, pages, strides, where the drafts lie: as drawn."""
    for draw in range(4):
        case = check.random_case(seed + draw, **SMALL)
        how = {"rows": rows, "groups": int(rng.integers(1, 8)), "combine_split": split}
        errors = run(case, **how)
        assert errors.passed, f"seed {seed + draw}: {how}: {errors}: {case.text}"


def test_backend(seed):
    for draw in range(4):
        case = check.random_case(seed + draw, **SMALL)
        errors = check.run(case, "emulated")
        assert errors.passed, f"seed {seed + draw}: {errors}: {case.text}"


def one_case(generator, rng, dtype=torch.bfloat16):
    """Three tiles with drafts in the last two, 64 rows."""
    batch = VerifyBatch.from_requests([check.trees.kary(2, 7)], [70], [rng.permutation(70)])
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
    return check.Case(0, "", {
        "q": draw(7, 8, 576), "kv_pool": draw(70, 576), "draft_kv": draw(7, 576), "batch": batch,
        "layout": KVLayout.LATENT_FIRST, "sm_scale": 192**-0.5})


FAULTS = {
    "removed barrier": ("tree_verify.cuh", "      team_sync();  // all parts of S are there\n", "",
                        r"tree_verify.cuh:\d+: thread \d+ .* reads shared byte \d+, which nobody"),
    "removed wait": ("tree_verify.cuh", "      barrier_wait(full(tile), parity(tile));\n", "",
                     r"tree_verify.cuh:\d+: .* reads by ldmatrix shared byte \d+, the target of a "
                     r"copy in flight: it was issued at tree_verify.cuh:\d+"),
    "ldmatrix address": ("tree_verify.cuh", "    ldmatrix(f[0], K_smem);",
                         "    ldmatrix(f[0], K_smem + 8);",
                         r"tree_verify.cuh:\d+: .* reads by ldmatrix 16 bytes at shared address "
                         r"\d+, which is no multiple of 16"),
    "row past the tile": ("tree_verify.cuh", "return smem() + C::kKV + tile % C::kStages",
                          "return smem() + C::kKV + kRowStride + tile % C::kStages",
                          r"tree_verify.cuh:\d+: .* shared byte \d+, (which nobody wrote|the "
                          r"target of a copy in flight)"),
    "barrier not all reach": ("tree_verify.cuh", "    __syncthreads();  // all warps are done",
                              "    if (thread / 32) __syncthreads();  // all warps are done",
                              r"stuck: \d+ threads wait for what will not come.*\n +"
                              r"tree_verify.cuh:\d+: \d+ wait for "),
}


def use_changed(tmp_path, monkeypatch, file, old, new):
    for name, text in build.sources().items():
        if name == file:
            assert text.count(old) >= 1, f"no place of {name} has: {old}"
            text = text.replace(old, new, 1)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(build, "CSRC", tmp_path)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_reported(fault, tmp_path, monkeypatch, generator, rng):
    file, old, new, message = FAULTS[fault]
    use_changed(tmp_path, monkeypatch, file, old, new)
    with pytest.raises(emulated.Fault, match=message):
        run(one_case(generator, rng), rows=64, groups=1, combine_split=1)


def test_a_wrong_mask_bit_shows(tmp_path, monkeypatch, generator, rng):
    use_changed(tmp_path, monkeypatch, "kv_layout.cuh", "mask[0] << -first",
                "mask[0] << -first << 1")
    errors = run(one_case(generator, rng), rows=64, groups=1, combine_split=1)
    # Nothing that the emulator could object to: values are wrong, and the comparison says so.
    assert not errors.passed and errors.out > check.OUT_TOLERANCE


def test_a_copy_from_outside_the_pool_is_reported(generator, rng):
    case = one_case(generator, rng)
    case.arguments["kv_pool"] = case.arguments["kv_pool"][:60]
    with pytest.raises(emulated.Fault, match=r"tree_verify.cuh:\d+: .* copies 16 bytes at "):
        run(case, rows=64, groups=1, combine_split=1)


def test_other_devices_and_dtypes_are_refused():
    latent, rope = torch.zeros(1, 1, 512), torch.zeros(1, 1, 64)
    assert "bfloat16 and float16, not torch.float32" in emulated.why_not(latent, rope)
    assert "on meta" in emulated.why_not(latent.half().to("meta"), rope.half().to("meta"))
    assert emulated.why_not(latent.half(), rope.half()) is None
