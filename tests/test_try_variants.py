"""The script that compares versions of the kernel: what it edits, and what it reports here."""

import importlib
from pathlib import Path

import pytest

from mla_kernels import build

SCRIPTS = Path(__file__).parent.parent / "scripts"


@pytest.fixture
def script(monkeypatch):
    module = importlib.import_module("try_variants")
    monkeypatch.setattr(build, "CSRC", module.CSRC)
    monkeypatch.setattr(build, "_loaded", {})
    return module


def test_edits_a_copy(script, tmp_path):
    before = build.sources()
    folder = script.replaced(tmp_path / "copy", ["ptx.cuh: kLn2 = 0.69 => kLn2 = 0.70"])
    assert build.sources() == before
    changed = {p.name for p in folder.glob("*.*") if p.read_text() != before[p.name]}
    assert changed == {"ptx.cuh"}


@pytest.mark.parametrize("edit, message", [
    ("ptx.cuh kLn2", "must look like 'FILE: OLD => NEW'"),
    ("nothing.cuh: a => b", "no file nothing.cuh in csrc; there are bindings.cpp"),
    ("ptx.cuh: not in there => b", "'not in there' must occur once in ptx.cuh; it occurs 0 times"),
    ("ptx.cuh: asm => b", "must occur once in ptx.cuh; it occurs"),
])
def test_refuses(script, tmp_path, capsys, edit, message):
    with pytest.raises(ValueError, match=message):
        script.replaced(tmp_path / "copy", [edit])
    assert script.main(["--variant", "bad", edit]) == 2
    assert message.partition(";")[0] in capsys.readouterr().err


@pytest.mark.slow
def test_reports_without_a_gpu(script, monkeypatch, capsys):
    monkeypatch.setattr(script, "local_gpu", lambda: None)
    edit = "tree_verify.cuh: kLazyRescale = 8.f; => kLazyRescale = 0.f;"
    over = "tree_verify.cuh: kStages = 2; => kStages = 3;"
    assert script.main(["--variant", "eager-rescale", edit, "--variant", "over", over]) == 1
    said = capsys.readouterr()
    assert "base: sm_120: 255 registers" in said.out
    assert "eager-rescale: sm_120:" in said.out
    assert "over the shared memory of an sm_120 block" in said.err
