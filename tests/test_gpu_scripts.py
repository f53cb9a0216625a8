"""The scripts that need a GPU: what can be tried of them without one."""

import dataclasses
import json
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"




SMALL = ["--device", "cpu", "--replays", "6", "--oracle-every", "2", "--batch", "2", "--nodes",
         "5", "--context", "20", "--heads", "2"]


def test_replays_agree(tmp_path, seed):
    path = tmp_path / "replays.json"
    arguments = [*SMALL, "--seed", str(seed), "--out", str(path)]
    assert import_module("graph_replays").main(arguments) == 0
    record = json.loads(path.read_text())
    assert record["replays"] == 6 and not record["captured"]
    assert record["differ_from_eager"] == record["differ_from_oracle"] == 0


def test_replays_that_differ_are_counted(tmp_path, seed, monkeypatch):
    """A capture that holds what it read at its time, as one with a host read would."""
    module = import_module("graph_replays")

    def stale(call, out, lse):
        call.run(out, lse)
        first = out.clone(), lse.clone()
        return lambda: (out.copy_(first[0]), lse.copy_(first[1]))

    monkeypatch.setattr(module.Call, "capture", stale)
    path = tmp_path / "replays.json"
    assert module.main([*SMALL, "--seed", str(seed), "--out", str(path)]) == 1
    assert json.loads(path.read_text())["differ_from_eager"] > 0


def test_the_grid_is_large_enough():
    shapes = import_module("sanitize").SHAPES
    assert len(set(shapes)) == len(shapes) >= 30


GOOD = "shape 1: x\nshape 2: x\nshapes run: 2, wrong: 0\n"


@pytest.mark.parametrize(("text", "code", "clean"), [
    (GOOD + "========= ERROR SUMMARY: 0 errors\n", 0, True),
    (GOOD + "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", 0, True),
    (GOOD + "========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)\n", 0, False),
    (GOOD + "========= ERROR SUMMARY: 10 errors\n", 9, False),
    (GOOD + "========= ERROR SUMMARY: 1 error\n", 0, False),
    (GOOD + "========= ERROR SUMMARY: 0 errors\n", None, False),
    (GOOD, 0, False),
    ("shape 1: x\n========= ERROR SUMMARY: 0 errors\n", 0, False),
    (GOOD.replace("wrong: 0", "wrong: 1") + "========= ERROR SUMMARY: 0 errors\n", 0, False),
], ids=range(9))
def test_verdict_of_a_tool(text, code, clean):
    assert import_module("sanitize").verdict("memcheck", text, code, 2)["clean"] is clean


def test_no_sanitizer(capsys):
    assert import_module("sanitize").main(["--sanitizer", "no-such-program"]) == 2
    assert "there is no no-such-program here" in capsys.readouterr().err


def test_all_shapes_are_watched_by_tools_that_filter_by_name():
    """The filter is part of every kernel's mangled name, and of no kernel of torch's."""
    module = import_module("sanitize")
    source = (SCRIPTS.parent / "mla_kernels/csrc/tree_verify.cuh").read_text()
    assert module.KERNELS == f"{len('mla')}mla" and "namespace mla {" in source


def test_replays_stop_in_time_and_say_so(tmp_path):
    path = tmp_path / "folder" / "replays.json"
    assert import_module("graph_replays").main([*SMALL, "--seconds", "0", "--out", str(path)]) == 1
    record = json.loads(path.read_text())
    assert (record["replays"], record["wanted"]) == (0, 6)


def test_shapes_on_the_cpu(monkeypatch, capsys):
    """What the watched process does, with the reference in the kernel's place."""
    module = import_module("sanitize")
    asked, wrong = [], []
    random_case, run = module.check.random_case, module.check.run
    monkeypatch.setattr(module.check, "random_case", lambda seed, device, **sizes: random_case(
        seed, device="cpu", **sizes))
    monkeypatch.setattr(module.torch.cuda, "synchronize", lambda: None)

    def on_reference(case, backend, *, batch_invariant):
        asked.append((backend, batch_invariant))
        errors = run(case, "reference", batch_invariant=batch_invariant)
        return dataclasses.replace(errors, out=1.0) if wrong else errors

    monkeypatch.setattr(module.check, "run", on_reference)
    assert module.run_shapes(3) == 0
    assert "shapes run: 3, wrong: 0" in capsys.readouterr().out
    assert asked == [("cuda", False), ("cuda", False), ("cuda", True)]
    wrong.append(True)
    assert module.run_shapes(1) == 1


def test_what_is_recorded_of_graphs(monkeypatch):
    """On the CPU, with the reference and without a capture: what is compared, not the times."""
    module = import_module("record_graphs")
    monkeypatch.setattr(module, "capture", lambda call: SimpleNamespace(replay=call))
    monkeypatch.setattr(module, "microseconds", lambda call, calls: 1.0)
    row = module.record_shape("2,2,3,40", "cpu", "reference")
    for mode in ("default", "batch_invariant"):
        assert all(row[mode][f"{what}_same_bits"] for what in ("replay", "again", "alone"))
        assert row[mode]["relative_error"] < 0.01
    monkeypatch.setattr(module, "capture", lambda call: SimpleNamespace(replay=lambda: None))
    assert not module.record_shape("2,2,3,40", "cpu", "reference")["default"]["replay_same_bits"]


def test_the_last_slot_of_a_pool():
    found = import_module("record_graphs").last_slot(500, "cpu", "reference")
    assert found["relative_error"] < 0.01 and found["last_slot"] == 499
    assert not found["passed"]  # so small a pool proves nothing
    assert import_module("record_graphs").last_slot.__defaults__[0] * 576 > 2**31
