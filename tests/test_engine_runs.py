"""Recorded engine runs and their pictures. That the script's own files are read is tested with
the script, in test_engine_run.py."""

import json

import pytest
from matplotlib.figure import Figure

from mla_kernels import engine_runs, figures_sglang
from mla_kernels.engine_runs import FOLDER, PAIRS, EngineRecord

CONTEXTS = (4096, 16384, 65536)


def made_up(rng):
    """A record of all pairs, with random times."""
    runs, compared = {}, {}
    for one, other in PAIRS.values():
        for name in (one, other):
            backend = name.partition("-")[0]
            found = [{"kind": "profile", "context": c,
                      "attention": {backend: [64, float(rng.uniform(10, 1e4))]}} for c in CONTEXTS]
            found += [{"kind": "decode", "context": c, "draft": draft, "verify_steps": steps,
                       "seconds": float(rng.uniform(0.1, 1))} for c in CONTEXTS
                      for draft, steps in (("cold", 5), ("warm", 20), ("warm", 8), ("warm", 8))]
            runs[name] = {"backend": backend, "found": found, "whole": True, "said": []}
        compared[f"{one} / {other}"] = [{
            "context": c, "same_tokens": True, "first_difference": None} for c in CONTEXTS]
    return EngineRecord(runs, compared, {"new_tokens": 128},
                        {"gpu": "GPU", "date": "2026-12-01", "sglang": "0.5.16"})


def test_table(rng):
    """Of the passes, the quickest of the warm ones with the fewest steps counts."""
    record = made_up(rng)
    table = record.table()
    assert len(table) == 2 * 3
    for row in table:
        ms = [1e3 / 8 * min(f["seconds"] for f in record.found(name, "decode", row["context"])
                            if (f["draft"], f["verify_steps"]) == ("warm", 8))
              for name in PAIRS[row["mode"]]]
        assert [row["SGLang ms/step"], row["ours ms/step"]] == pytest.approx(ms)
        assert row["speed-up"] == pytest.approx(ms[0] / ms[1])
        assert row["SGLang steps"] == row["ours steps"] == 8
        assert row["ours tokens/s"] == pytest.approx(128 * 1e3 / 8 / ms[1])
        assert row["ours us/layer"] == record.attention_us(PAIRS[row["mode"]][1], row["context"])


@pytest.mark.parametrize(("tops", "text"), [
    ([[[3, -0.70], [4, -0.71]], [[4, -0.690], [3, -0.715]]],
     "same two likeliest tokens, apart by 0.010 and 0.025 in log-probability"),
    ([[[3, -0.70], [4, -0.71]], [[9, -0.2], [3, -0.9]]], "where the likeliest tokens differ"),
    (None, "the first difference is token 57"),
])
def test_a_difference_is_told_with_its_logits(tops, text, rng):
    record = made_up(rng)
    one, other = PAIRS["eager"]
    row = record.rows(one, other)[1]
    row |= {"same_tokens": False, "first_difference": 57}
    if tops:
        row["top2_there"] = tops
    lines = record.tokens(one, other)
    assert text in lines[1] and lines[0] == "4,096 tokens of context: the same 129 tokens"


def test_what_is_lacking_is_left_out(rng):
    record = made_up(rng)
    assert record.tokens("triton-graph-64", "ours-shadow") == [] and record.said("none") == []
    record.runs["ours-graph-64"]["found"].clear()
    assert record.attention_us("ours-graph-64", 4096) is None
    assert record.attention_us("none", 4096) is None and record.decode("none", 1) is None
    assert isinstance(figures_sglang.layer_time(record), Figure)
    record.compared.clear()
    assert record.table() == [] and isinstance(figures_sglang.step_time(record), Figure)


@pytest.mark.parametrize("text", ["[]", "{}", "not json", '{"runs": {"a": {}}, "compared": {}, '
                                                         '"model": {}}'])
def test_another_file_is_refused(text, tmp_path):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="a.json: not a record of scripts/engine_run.py"):
        engine_runs.load(path)


def test_the_latest_is_taken(tmp_path):
    assert engine_runs.latest(tmp_path) is None
    for date in ("2026-12-02", "2026-12-01"):
        (tmp_path / f"{date}.json").write_text(json.dumps(
            {"runs": {}, "compared": {}, "model": {}, "date": date}))
    assert engine_runs.latest(tmp_path).origin["date"] == "2026-12-02"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.name)
def test_what_is_recorded(path):
    """Whole, of one version and machine, with both paths and our backend serving where it says."""
    record = engine_runs.load(path)
    assert all(record.origin.get(k) for k in ("gpu", "driver", "sglang", "torch", "commit", "date"))
    for one, other in PAIRS.values():
        assert record.runs[one]["whole"] and record.runs[other]["whole"]
        assert {row["context"] for row in record.rows(one, other)} >= set(CONTEXTS)
        assert any("verify of draft trees runs through" in line for line in record.said(other))
        assert not any("own path" in line for line in record.said(other))
        assert not record.said(one)


def test_pictures(rng):
    record = made_up(rng)
    path = figures_sglang.verify_path()
    titles = {t.get_text() for t in path.axes[0].texts}
    assert {"TreeVerify", "marshal.from_sglang", "TritonAttnBackend.forward_extend"} <= titles
    speed = figures_sglang.step_time(record, title="t")
    assert [ax.get_title(loc="left") for ax in speed.axes] == list(PAIRS)
    for ax, (one, other) in zip(speed.axes, PAIRS.values(), strict=True):
        drawn = [line.get_ydata().tolist() for line in ax.lines]
        for name in (one, other):
            assert [record.decode(name, c)["ms_a_step"] for c in CONTEXTS] in drawn
    time = figures_sglang.layer_time(record)
    one, other = PAIRS["CUDA graphs"]
    assert [line.get_ydata().tolist() for line in time.axes[0].lines] == [
        [record.attention_us(name, c) for c in CONTEXTS] for name in (other, one)]


@pytest.mark.parametrize(("gap", "word"), [(0.01, "a near-tie"), (0.3, "others"),
                                           (None, "the same")])
def test_the_readme_tells_near_ties_from_differences(gap, word, rng):
    record = made_up(rng)
    row = record.rows(*PAIRS["eager"])[1]
    if gap is not None:
        row |= {"same_tokens": False, "first_difference": 5,
                "top2_there": [[[3, -0.7], [4, -0.7 - gap]], [[4, -0.7], [3, -0.7 - gap]]]}
    (line,) = [line for line in record.markdown_table().splitlines() if "eager | 16,384" in line]
    assert line.endswith(f"| {word} |")
