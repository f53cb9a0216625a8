"""The scripts that measure the kernel on a GPU, as far as a CPU goes; and what they recorded."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest

from mla_kernels.workload import PRESETS

ROOT = Path(__file__).parent.parent




@pytest.fixture(scope="module")
def profile():
    return import_module("profile_rows")


@pytest.fixture(scope="module")
def limits():
    return import_module("kernel_limits")


def ncu_text(profile, kernels):
    """What ``ncu --page raw --csv`` prints for kernels of given metrics, units and values."""
    columns = list(dict.fromkeys(name for k in kernels for name in k["values"]))
    quote = lambda cells: ",".join(f'"{c}"' for c in cells)  # noqa: E731
    lines = ["==PROF== Profiling", quote(["ID", "Kernel Name", *columns]),
             quote(["", "", *(kernels[0]["values"][c][1] for c in columns)])]
    for i, k in enumerate(kernels):
        lines.append(quote([i, k["name"], *(k["values"].get(c, ("", ""))[0] for c in columns)]))
    return "\n".join(lines) + "\n"


def test_profiles_are_read(profile):
    metrics, stall = profile.METRICS, profile.STALL
    values = {metrics["us"]: ("1,234.5", "ns"), metrics["tensor_percent"]: ("39.5", "%"),
              metrics["dram_read_bytes"]: ("18.25", "Mbyte"),
              metrics["shared_wavefronts"]: ("57,625,531", ""),
              stall.format("barrier"): ("3", "inst"), stall.format("wait"): ("0.99", "inst"),
              stall.format("membar"): ("0.01", "inst")}
    text = ncu_text(profile, [
        {"name": "void mla::tree_verify<mla::VerifyConfig<__nv_bfloat16, 64>>(VerifyParams)",
         "values": values},
        {"name": "combine(VerifyParams)", "values": values | {metrics["us"]: ("800", "ns")}}])
    verify, combine = profile.parse(text)
    assert (verify["kernel"], combine["kernel"]) == ("tree_verify", "combine")
    assert verify["us"] == pytest.approx(1.2345) and combine["us"] == pytest.approx(0.8)
    assert verify["tensor_percent"] == 39.5 and verify["shared_wavefronts"] == 57_625_531
    assert verify["dram_read_bytes"] == 18.25e6 and verify["l2_percent"] is None
    assert verify["waits_percent"] == {"barrier": 75.0, "wait": 24.8}  # the rest under 1 %


def test_a_cliff_is_a_shape_slower_than_a_larger_one(limits):
    results = limits.cliffs([{"row_tiles": 1, "us": 10.0}, {"row_tiles": 2, "us": 30.0},
                             {"row_tiles": 3, "us": 20.0}, {"row_tiles": 3, "us": 25.0}])
    assert [r["cliff"] for r in results] == [0.5, 1.5, None, None]


@pytest.mark.parametrize("name, arguments", [
    ("profile_rows", []), ("kernel_limits", ["--out", "nowhere.json"])])
def test_without_a_gpu(name, arguments, request, capsys, monkeypatch):
    module = import_module(name)
    monkeypatch.setattr(module, "local_gpu", lambda: None)
    assert module.main(arguments) == 2
    assert "no CUDA device here" in capsys.readouterr().err


def recorded(pattern):
    paths = sorted((ROOT / "data").glob(pattern))
    if not paths:
        pytest.skip(f"nothing recorded in data/{pattern}")
    return [json.loads(path.read_text()) for path in paths]


def test_recorded_limits():
    for r in recorded("limits/*.json"):
        assert r["gpu"] and r["commit"] and r["date"]
        ragged = r["ragged"]
        assert ragged["contexts"] == [131_072] + [1_024] * 31 and ragged["error"] < 5e-3
        assert ragged["ratio"] == pytest.approx(ragged["uneven_us"] / ragged["even_us"])
        assert ragged["ratio"] <= 1.25
        assert {n["nodes"] for n in r["sweep"]} >= {1, 1024}
        assert {n["heads"] for n in r["sweep"]} >= {1, 128}
        assert max(n["error"] for n in r["sweep"] if n["error"] is not None) < 5e-3
        # No shape takes longer than one with a row tile more, but for noise.
        assert max(n["cliff"] for n in r["sweep"] if n["cliff"] is not None) < 1.1


def test_recorded_profiles():
    for r in recorded("profiles/*.json"):
        assert r["gpu"] and r["commit"] and r["date"] and r["ncu"]
        assert [row["shape"] for row in r["rows"]] == [
            f"{s.batch_size},{s.num_heads},{s.num_nodes},{s.context}" for s in PRESETS["spine"]]
        for row in r["rows"]:
            verify = row["kernels"][0]
            assert verify["kernel"] == "tree_verify" and verify["us"] > 0, row["shape"]
            for name, x in verify.items():
                if name.endswith("_percent") and name != "waits_percent":
                    assert x is None or 0 <= x <= 100.5, (row["shape"], name)
            assert 50 < sum(verify["waits_percent"].values()) <= 100.5
