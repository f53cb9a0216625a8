"""The kernel lab: budgets before the compiler, variants through it, and its front."""

import subprocess

import numpy as np
import pytest

from mla_kernels import build, source
from mla_kernels.device import SM120_SMEM_PER_BLOCK
from mla_kernels.labs import kernel
from mla_kernels.labs.kernel import Variant


@pytest.fixture
def no_compiler(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError(f"a program was started: {args}")

    monkeypatch.setattr(subprocess, "run", refuse)


@pytest.mark.parametrize("rows", build.TILE_ROWS)
def test_budget_is_the_compilers(rows):
    compiled = source.constants()[rows]
    mine = kernel.constants(Variant(rows=rows))
    for name in ("kRowStride", "kStageBytes", "kMailBytes", "kRescale", "kWalk", "kSmemBytes",
                 "kSteps", "kValueTiles", "kTeamGroups"):
        assert mine[name] == compiled[name], name
    assert kernel.smem(Variant(rows=rows)) == source.smem_parts(compiled)
    assert sum(kernel.smem(Variant(rows=rows)).values()) == compiled["kSmemBytes"]


def test_budget_of_variants_is_the_compilers(monkeypatch):
    """The compiler's own refusal is taken out, so that it tells the size of what it refuses."""
    changed = Variant(stages=3, padding=144)
    limit = "kSmemBytes <= 101376"
    with build.variant({**changed.constants, limit: "kSmemBytes > 0"}):
        compiled = source.constants()
    for rows in build.TILE_ROWS:
        mine = kernel.smem(Variant(rows=rows, stages=3, padding=144))
        assert sum(mine.values()) == compiled[rows]["kSmemBytes"]


def test_refused_before_the_compiler_with_the_sum(no_compiler):
    with pytest.raises(ValueError) as refused:
        kernel.build_one(Variant(stages=3))
    parts = kernel.smem(Variant(stages=3))
    total = sum(parts.values())
    over = total - SM120_SMEM_PER_BLOCK
    assert f"= {total:,} B, {over:,} over the 101,376 B" in str(refused.value)
    assert all(f"{size:,} {name}" in str(refused.value) for name, size in parts.items())


@pytest.mark.parametrize("changed, message", [
    ({"tile": 16}, "tile must be 32"), ({"warps": 4}, "warps must be 8"),
    ({"stages": 1}, "stages must be at least 2"), ({"padding": 0}, "4 of 32 banks"),
    ({"rows": 128}, "rows must be one of"), ({"splits": -1}, "splits must be in 0"),
    ({"padding": 144, "rows": 16}, "with 64 query rows"),
])
def test_refused_with_the_reason(no_compiler, changed, message):
    for act in (kernel.build_one, kernel.check_one, kernel.time_one):
        with pytest.raises(ValueError, match=message):
            act(Variant(**changed))


def test_variant_changes_a_copy_alone():
    before, folder = build.sources(), build.CSRC
    changed = Variant(rescale=0, blocks=2)
    with build.variant(changed.constants):
        text = build.sources()["tree_verify.cuh"]
        assert "kLazyRescale = 0.f;" in text and "Config::kThreads, 2)" in text
        assert build.build_key("sm_120", build.find_toolkit()) != ""
        inside = build.build_key("sm_120", build.find_toolkit())
    assert build.sources() == before and build.CSRC == folder
    assert inside != build.build_key("sm_120", build.find_toolkit())
    with pytest.raises(ValueError, match="kNothing must be defined once"), \
            build.variant({"kNothing": "1"}):
        pass
    assert Variant().constants == {}


@pytest.mark.slow
def test_a_variant_that_spills_says_so():
    report = kernel.build_one(Variant(blocks=2))
    assert report.registers <= 128 and report.spill_bytes > 0
    assert "bytes of spills" in kernel.row(report)["says"]


@pytest.mark.slow
def test_a_legal_variant_builds():
    report = kernel.build_one(Variant(rows=16, rescale=0, dtype="fp16"))
    assert (report.rows, report.dtype, report.spill_bytes) == (16, "fp16", 0)
    assert report.smem_bytes == sum(kernel.smem(Variant(rows=16)).values())
    assert kernel.row(report)["says"] == "within the limits"


@pytest.mark.slow
def test_a_legal_variant_is_right():
    if kernel.backend() is None:
        with pytest.raises(ValueError, match="this machine has neither"):
            kernel.check_one(Variant(rescale=0))
    else:
        assert kernel.check_one(Variant(rescale=0), 2) < 1e-2


def test_front_refuses_and_accumulates(monkeypatch, capsys):
    made = build.KernelReport("tree_verify", "bf16", 64, None, "sm_120", 128, 40, 20, 1000,
                              {"LDL": 3})
    monkeypatch.setattr(kernel, "build_one", lambda variant, arch="sm_120": made)
    monkeypatch.setattr(kernel, "local_gpu", lambda: None)
    lab = kernel.lab()
    assert lab.buttons["Time"].disabled and "Time: no GPU here" in lab.note.value
    assert lab.buttons["Check"].disabled == (kernel.backend() is None)
    lab.controls["stages"].value = 3
    lab.buttons["Build"].click()
    assert not lab.results and "over the 101,376 B" in capsys.readouterr().out
    lab.controls["stages"].value = 2
    lab.controls["rescale"].value = 4
    lab.buttons["Build"].click()
    assert list(lab.results) == ["64 rows, bf16: as shipped", "64 rows, bf16: rescale 4"]
    assert "40 bytes of spills" in capsys.readouterr().out
    lab._note(lab.variant, **{"worst error": "1e-3"})
    assert lab.results["64 rows, bf16: rescale 4"]["registers"] == 128
    assert np.all([c.continuous_update is False for c in lab.controls.values()
                   if c.has_trait("continuous_update")])
