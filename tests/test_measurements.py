"""Recorded data: every file is valid, the README's table is the data's, and the validator and
the pictures refuse what they should."""

import dataclasses
import importlib
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from mla_kernels import figures_speed, measurements
from mla_kernels.bench import DEFAULT, PRESETS, PROVIDERS
from mla_kernels.check import LSE_TOLERANCE, OUT_TOLERANCE, ROW_TOLERANCE
from mla_kernels.device import attention_bytes, attention_flops

ROOT = Path(__file__).parent.parent
SPINE = [dataclasses.astuple(s) for s in PRESETS["spine"]]


@pytest.fixture
def run():
    return measurements.latest("H200")


def test_there_are_measurements_and_all_are_valid():
    paths = measurements.files()
    assert paths
    for path in paths:
        assert len(measurements.load(path)) > 0


def test_recorded_check_is_of_enough_cases_and_passed():
    for path in (ROOT / "data" / "checks").glob("*.json"):
        summary = json.loads(path.read_text())
        enough = 250 if summary.get("every_plan") else 500
        assert summary["cases"] >= enough and summary["failed"] == 0, path.name
        assert summary["worst"]["out"] <= OUT_TOLERANCE
        assert summary["worst"]["row"] <= ROW_TOLERANCE
        assert summary["worst"]["lse"] <= LSE_TOLERANCE
        assert summary["backend"] == ["cuda"] and summary["commit"]


@pytest.fixture(scope="module")
def readme_script():
    return importlib.import_module("refresh_readme")


def test_readme_is_the_data(readme_script):
    """Tables, correctness, the model's predictions and its errors."""
    text = (ROOT / "README.md").read_text()
    blocks = readme_script.blocks()
    assert set(blocks) == {"measurements", "correctness", "peers", "engine", "grid",
                           "modelled", "model"}
    for name, inside in blocks.items():
        assert f"<!-- {name}: begin -->\n{inside}\n<!-- {name}: end -->" in text, name


def test_readme_tables_say_what_was_measured(run):
    """The same, from the rows themselves."""
    text = (ROOT / "README.md").read_text()
    everything = measurements.latest("H200", tree=None)
    for shape in SPINE:
        name = f"| {', '.join(f'{n:,}' for n in shape)} |"
        lines = [line for line in text.splitlines() if line.startswith(name)]
        assert len(lines) == 3  # measured, peers, modelled
        first, peers, modelled = ([c.strip(" *") for c in line.split("|")[2:-1]] for line in lines)
        for cells, columns in ((first, [(p, "3-ary") for p in ("cuda", "triton_split",
                                                               "sglang_extend")]),
                               (peers, measurements.PEER_COLUMNS)):
            for cell, (provider, tree) in zip(cells, columns, strict=False):
                row = everything[(everything[measurements.SHAPE] == list(shape)).all(axis=1)
                                 & (everything["provider"] == provider)
                                 & (everything["tree"] == tree)]
                assert float(cell.replace(",", "")) == pytest.approx(
                    row["latency_us"].iloc[0], rel=0.01)
        bold = [c.strip() for c in lines[1].split("|")[2:-1] if "**" in c]
        assert len(bold) == 2
    assert "modelled, not measured" in text


@pytest.fixture
def timed(run):
    """The rows with a time, of providers that have one for every shape of the table."""
    rows = run[run["status"] == "ok"]
    return rows[rows["provider"].isin(["cuda", "triton_split", "triton_serial"])].reset_index(
        drop=True)


@pytest.fixture
def whole(timed):
    """A run with chains, a row without a time, and ceilings."""
    chains = timed[timed["provider"] == "cuda"].assign(tree="chain")
    chains = pd.concat([timed, chains], ignore_index=True)
    chains = chains.assign(ceiling_tflops=637.0, ceiling_gbps=4230.0)
    floors = [max(attention_flops(*s) / 637e6, attention_bytes(*s) / 4.23e6)
              for s in chains[measurements.SHAPE].itertuples(index=False)]
    chains["ceiling_percent"] = 100 * np.array(floors) / chains["latency_us"]
    chains.loc[1, ["latency_us", "p10_us", "p90_us", "tflops", "gbps", "error"]] = np.nan
    chains.loc[1, "ceiling_percent"] = np.nan
    return chains.assign(status=np.where(chains.index == 1, "failed", "ok"),
                         note=np.where(chains.index == 1, "an illegal access", None))


def test_kinds_of_tree_are_kept_apart(whole, timed, tmp_path):
    whole.to_csv(tmp_path / "2026-12-01-h200.csv", index=False)
    everything = measurements.latest(folder=tmp_path, tree=None)
    trees = measurements.latest(folder=tmp_path)
    assert len(everything) == len(whole) and len(trees) == len(timed)
    chains = measurements.latest(folder=tmp_path, tree="chain")
    assert set(chains["provider"]) == {"cuda"} and len(chains) + len(trees) == len(whole)
    fixed = {"batch_size": 1, "num_heads": 8, "num_nodes": 8}
    for tree in ("3-ary", "chain"):
        rows = measurements.sweep(everything, "context", "cuda", tree=tree, **fixed)
        assert set(rows["tree"]) == {tree} and rows["context"].is_unique
    pd.testing.assert_frame_equal(measurements.speedups(everything, "cuda", "triton_serial"),
                                  measurements.speedups(trees, "cuda", "triton_serial"))
    with pytest.raises(ValueError, match="baseline must be one of cuda"):
        measurements.speedups(everything, "cuda", "triton_serial", tree="chain")


def test_files_of_before_are_completed(timed):
    old = timed.drop(columns=["tree", "status", "version", "note", *measurements.CEILINGS])
    new = measurements.complete(old)
    assert set(measurements.COLUMNS) <= set(new.columns)
    assert set(new["tree"]) == {"3-ary"} and set(new["status"]) == {"ok"}
    measurements.validate(old)


def set_at(frame, rows, **values):
    for column, value in values.items():
        frame.loc[rows, column] = value


def test_recorded_peers_have_a_time_or_a_reason():
    """Of the run that measured them all: each peer on each of the table's shapes."""
    everything = measurements.latest("H200", tree=None)
    spine = everything[[tuple(s) in set(SPINE) for s in everything[measurements.SHAPE].to_numpy()]]
    recorded = set(everything["provider"]) - {"cuda", "triton_split", "triton_serial"}
    assert recorded >= {"sglang_extend", "flashinfer_fa2", "flashinfer_fa3", "flashmla",
                        "prefix_suffix_fa2", "prefix_suffix_fa3", "sdpa", "sglang_verify",
                        "sglang_decode", "sglang_extend_sm12x", "flex_attention"}
    for provider in recorded:
        rows = spine[spine["provider"] == provider]
        timed = rows["status"] == "ok"
        assert timed.any() and rows.loc[timed, "version"].notna().all(), provider
        assert rows.loc[~timed, "note"].str.len().gt(10).all(), provider
        kind = "chain" if provider in measurements.CHAINS_ONLY else "3-ary"
        assert set(rows.loc[timed, "tree"]) == {kind}, provider
        assert set(map(tuple, rows[measurements.SHAPE].to_numpy())) == set(SPINE), provider
    assert spine.loc[spine["status"] == "ok", "ceiling_percent"].notna().all()


def test_the_recorded_run_is_the_whole_grid():
    """Every shape of every preset, by every provider, on each kind of draft that it is for."""
    everything = measurements.latest("H200", tree=None)
    recorded = set(everything[measurements.KEY].itertuples(index=False, name=None))
    for shape in map(dataclasses.astuple, PRESETS["grid"]):
        for name in DEFAULT:
            for tree in PROVIDERS[name].trees:
                assert (*shape, tree, name) in recorded, (shape, tree, name)
    assert everything.loc[everything["status"] == "ok", "error"].notna().all()


def test_the_best_of_the_others(timed):
    """By hand, from three kernels' times."""
    rng = np.random.default_rng()
    mine, theirs, wgmma = (float(x) for x in rng.uniform(10, 100, 3))
    row = timed.iloc[0].to_dict() | {"tree": "3-ary", "status": "ok"}
    shapes = [(1, 8, 8, 1024), (1, 8, 64, 1024)]
    rows = [row | dict(zip(measurements.SHAPE, shape, strict=True))
            | {"provider": who, "latency_us": us} for shape in shapes
            for who, us in (("cuda", mine), ("prefix_suffix_fa2", theirs),
                            ("prefix_suffix_fa3", wgmma), ("triton_split", 1.0))]
    rows[-2] |= {"status": "failed", "latency_us": np.nan}  # fa3 on the second shape
    rows.append(rows[0] | {"provider": "prefix_suffix_fa2", "tree": "chain", "latency_us": 1.0})
    frame = pd.DataFrame(rows)
    found = measurements.best_of_others(frame)
    assert found[shapes[0]] == pytest.approx(min(theirs, wgmma) / mine)
    assert found[shapes[1]] == pytest.approx(theirs / mine)
    told = measurements.grid_sentence(frame, shapes)
    first = sum(found[s] > 1 for s in shapes)
    assert "2 shapes and 8 times by 4 providers; 1 rows say why" in told
    assert f"Of the 2 shapes of the models' presets our CUDA kernel is the fastest for trees on " \
           f"{first};" in told
    assert f"without FA3, which sm_120 cannot run, on {2 * (theirs > mine)} of 2." in told


@pytest.mark.parametrize("provider", measurements.CHAINS_ONLY)
def test_validator_keeps_kernels_without_a_mask_off_trees(whole, provider):
    chains = whole.index[whole["tree"] == "chain"][:1]
    trees = whole.index[(whole["tree"] == "3-ary") & (whole["status"] == "ok")][:1]
    named = whole.copy()
    set_at(named, chains, provider=provider, version="peer 1.0")
    measurements.validate(named)
    with pytest.raises(ValueError, match=f"{provider} has a time and no version"):
        measurements.validate(broken(named, lambda f: set_at(f, chains, version=None)))
    with pytest.raises(ValueError, match=f"{provider} has no tree mask"):
        measurements.validate(broken(named, lambda f: set_at(f, trees, provider=provider)))


def broken(frame, change):
    frame = frame.copy()
    change(frame)
    return frame


@pytest.mark.parametrize("change, message", [
    (lambda f: f.pop("p10_us"), "columns missing: p10_us"),
    (lambda f: f.loc.__setitem__((0, "error"), 0.5), "an error is out of"),
    (lambda f: f.loc.__setitem__((0, "error"), np.nan), "lacks a number"),
    (lambda f: f.loc.__setitem__((0, "p10_us"), 1e9), "p10 <= median <= p90"),
    (lambda f: f.loc.__setitem__((0, "latency_us"), np.nan), "neither a time nor a note"),
    (lambda f: f.loc.__setitem__((0, "tflops"), 1.0), "tflops does not follow"),
    (lambda f: f.loc.__setitem__((0, "gpu"), "another"), "gpu must be one value"),
    (lambda f: f.loc.__setitem__((0, "commit"), None), "commit must be one value"),
    (lambda f: f.__setitem__("provider", "cuda"), "measured twice"),
    (lambda f: f.__setitem__("tree", "3-ary"), "measured twice"),
    (lambda f: f.loc.__setitem__((0, "status"), "slow"), "a status must be one of"),
    (lambda f: f.loc.__setitem__((0, "status"), "failed"), "if and only if its status is ok"),
    (lambda f: f.loc.__setitem__((1, "status"), "wrong"), "an error above 0.01"),
    (lambda f: f.loc.__setitem__((1, "gbps"), 100.0), "a row without a time has rates"),
    (lambda f: f.loc.__setitem__((1, "note"), None), "neither a time nor a note"),
    (lambda f: f.loc.__setitem__((0, "ceiling_percent"), 99.0), "ceiling_percent does not follow"),
    (lambda f: f.loc.__setitem__((0, "ceiling_gbps"), 1e9), "ceiling_percent does not follow"),
])
def test_validator_refuses(whole, change, message):
    measurements.validate(whole, "a run")
    with pytest.raises(ValueError, match=message):
        measurements.validate(broken(whole, change), "a run")


def test_missing_data_says_how_to_make_it(tmp_path):
    with pytest.raises(FileNotFoundError, match="python -m mla_kernels.bench"):
        measurements.latest(folder=tmp_path)


def test_speedups_are_quotients(run):
    table = measurements.speedups(run, "cuda", "triton_serial")
    row = table.sample(1).iloc[0]
    here = run[(run[measurements.SHAPE] == row[measurements.SHAPE]).all(axis=1)]
    times = here.set_index("provider")["latency_us"]
    assert row["speedup"] == pytest.approx(times["triton_serial"] / times["cuda"])
    with pytest.raises(ValueError, match="baseline must be one of"):
        measurements.speedups(run, "cuda", "nothing")


def test_commit_of_digits_stays_text(run, tmp_path):
    path = tmp_path / "run.csv"
    run.assign(commit="0012345").to_csv(path, index=False)
    assert measurements.load(path)["commit"].iloc[0] == "0012345"


def lines_of(figure):
    return [line for line in figure.axes[0].get_lines() if len(line.get_xdata()) > 2]


def test_figures_draw_the_data(run):
    figure = figures_speed.latency(run, "context", batch_size=1, num_heads=8, num_nodes=8)
    assert isinstance(figure, Figure)
    drawn = {tuple(line.get_ydata()) for line in lines_of(figure)}
    rows = measurements.sweep(run, "context", "cuda", batch_size=1, num_heads=8, num_nodes=8)
    assert tuple(rows["latency_us"]) in drawn
    assert "µs" in figure.axes[0].get_ylabel()
    assert run["commit"].iloc[0] in figure.get_supxlabel()

    figure = figures_speed.speedup_over_context(run, num_nodes=[8, 64])
    assert measurements.NAMES["sglang_extend"] in figure.axes[0].get_ylabel()
    for call in (lambda: figures_speed.speedup_bars(run, SPINE),
                 lambda: figures_speed.share_of_ceiling(run, SPINE)):
        labels = [t.get_text() for t in call().axes[0].get_yticklabels()]
        assert len(labels) == len(SPINE)


def test_computed_floor_is_dashed_and_below_everything_measured(run):
    figure = figures_speed.latency(run, "num_nodes", batch_size=1, num_heads=8, context=16384)
    dashed = [line for line in lines_of(figure) if line.get_linestyle() != "-"]
    assert len(dashed) == 1
    floor = dict(zip(*dashed[0].get_data(), strict=True))
    for line in lines_of(figure):
        if line is not dashed[0]:
            assert all(y > floor[x] for x, y in zip(*line.get_data(), strict=True))


def test_figures_refuse_what_was_not_measured(run):
    with pytest.raises(ValueError, match="no measurements along context"):
        figures_speed.latency(run, "context", batch_size=77, num_heads=8, num_nodes=8)
    with pytest.raises(ValueError, match="no shapes with"):
        figures_speed.speedup_over_context(run, num_heads=77)
    with pytest.raises(ValueError, match="not in this run"):
        figures_speed.speedup_bars(run, [(7, 7, 7, 1024)])
    with pytest.raises(ValueError, match="not in this run"):
        figures_speed.share_of_ceiling(run, [(7, 7, 7, 1024)])


def test_an_empty_cell_is_not_a_measurement(run):
    frame = pd.concat([run, run.iloc[[0]].assign(provider="other", latency_us=np.nan,
                                                  status="unavailable",
                                                  note="it needs 120,000 B of shared memory")])
    measurements.validate(frame)
    assert measurements.sweep(frame, "context", "other").empty


# -- the kernel's versions ----------------------------------------------------------------


def test_the_ladder_has_what_the_notes_have():
    versions = measurements.versions()
    notes = (measurements.FOLDER.parents[1] / "notes" / "kernel_versions.md").read_text()
    table = notes[notes.index("| version |"):].split("\n\n")[0]
    told = {int(line[2]): [float(x) for x in line.strip("| \n").split(" | ")[1:]]
            for line in table.splitlines() if line[2].isdigit()}
    assert told == {v: list(rows["latency_us"]) for v, rows in versions.groupby("version")}
    last = versions[versions["version"] == versions["version"].max()]
    recorded = measurements.of_tree(pd.concat(map(measurements.load, measurements.files())))
    ours = recorded[(recorded["provider"] == "cuda") & (recorded["gpu"] == "NVIDIA H200")]
    joined = last.merge(ours, on=measurements.SHAPE, suffixes=("", "_recorded"))
    assert len(joined) == len(last)
    # Other runs of the same version, which differ by 1.3 % at most.
    assert np.allclose(joined["latency_us"], joined["latency_us_recorded"], rtol=0.02)


def test_the_ladder_is_drawn():
    versions = measurements.versions()
    figure = figures_speed.version_ladder(versions, [(8, 8, 64, 16384), (1, 8, 8, 16384)])
    left = figure.axes[0]
    dots = [line for line in left.lines if line.get_marker() == "o"]
    rows = versions[(versions["num_nodes"] == 64) & (versions["batch_size"] == 8)]
    assert [d.get_xdata()[0] for d in dots] == list(rows["latency_us"])
    assert [d.get_markerfacecolor() != "white" for d in dots] == list(rows["kept"])
    with pytest.raises(ValueError, match="no version was timed"):
        figures_speed.version_ladder(versions, [(3, 8, 64, 16384)])
