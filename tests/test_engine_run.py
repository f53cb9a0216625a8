"""engine_run: the whole script, with an engine that answers at once in SGLang's place."""

import json
import sys
from pathlib import Path

import engine_run
import pytest

from mla_kernels import engine_runs

ROOT = Path(__file__).parent.parent

#: Decodes token i as i, but for one token of ours in runs that are told the wrong order.
ENGINE = '''
import gzip, json, os, time
from pathlib import Path

class Engine:
    def __init__(self, **settings):
        assert settings["attention_backend"] == "triton", settings
        assert Path(settings["model_path"], "model.safetensors").exists()
        if os.environ.get("MLA_KERNELS_SGLANG") == "1":
            print("[mla_kernels.sglang] SGLang 0.5.16: verify runs through mla_kernels")
        if "FAIL" in os.environ:
            raise RuntimeError("no such engine")

    def generate(self, input_ids, sampling_params, return_logprob=False, top_logprobs_num=0):
        n = sampling_params["max_new_tokens"]
        time.sleep(1e-4 * n)
        ids = list(range(n))
        if os.environ.get("MLA_KERNELS_SGLANG_ROW_ORDER") == "rope_first" and n > 7:
            ids[7] = 99
        meta = {"spec_verify_ct": -(-n // 4)}
        if return_logprob:
            meta["output_top_logprobs"] = [[(-0.1, i, None), (-0.2, i + 1, None)] for i in ids]
        return {"output_ids": ids, "meta_info": meta}

    def start_profile(self, output_dir, activities):
        self.folder = Path(output_dir)

    def stop_profile(self):
        names = ["_fwd_kernel", "void mla::tree_verify<C>(P)", "void mla::combine<C, 8>(P)"]
        events = [{"cat": "kernel", "name": n, "ts": 10 * i, "dur": 2.5}
                  for i, n in enumerate(names)] + [{"cat": "cpu_op", "name": "_fwd_kernel"}]
        (self.folder / "trace.json.gz").write_bytes(
            gzip.compress(json.dumps({"traceEvents": events}).encode()))

    def shutdown(self):
        pass
'''


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """A work folder whose `sglang` is the engine above."""
    package = tmp_path / "work" / "site" / "sglang"
    for folder in (package, package / "srt", package / "srt" / "entrypoints"):
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
    (package / "srt" / "entrypoints" / "engine.py").write_text(ENGINE)
    (tmp_path / "work" / "model").mkdir()
    (tmp_path / "work" / "model" / "model.safetensors").touch()
    monkeypatch.setattr(engine_run.subprocess, "Popen", quick_build(engine_run.subprocess.Popen))
    return tmp_path


def quick_build(popen):
    """Compiling is another test's matter."""
    def start(command, *args, **kwargs):
        if "build.load()" in command[-1]:
            command = [sys.executable, "-c", ""]
        return popen(command, *args, **kwargs)
    return start


def run(folder, *arguments):
    out = folder / "out" / "engine.json"
    status = engine_run.main(["--out", str(out), "--work", str(folder / "work"), *arguments])
    return status, json.loads(out.read_text())


def test_runs_are_recorded_and_compared(engine):
    names = ["triton-graph-64", "ours-graph-64", "ours-wrong-order"]
    status, record = run(engine, "--contexts", "4096", "--runs", *names)
    assert status == 0 and list(record["runs"]) == names
    (row,) = record["compared"]["triton-graph-64 / ours-graph-64"]
    assert row["same_tokens"] and row["context"] == 4096
    assert record["runs"]["ours-graph-64"]["commit"] == record["commit"]
    (row,) = record["compared"]["triton-graph-64 / ours-wrong-order"]
    assert (row["same_tokens"], row["first_difference"]) == (False, 7)
    assert row["top2_there"] == [[[7, -0.1], [8, -0.2]], [[99, -0.1], [100, -0.2]]]
    ours = record["runs"]["ours-graph-64"]
    assert ours["said"] and not record["runs"]["triton-graph-64"]["said"]
    (profile,) = [f for f in ours["found"] if f["kind"] == "profile"]
    assert profile["kernels"]["_fwd_kernel"] == [1, 2.5, 2.5] and len(profile["kernels"]) == 3
    assert profile["attention"] == {"triton": [1, 2.5], "ours": [1, 12.5]}
    assert record["date"] and record["torch"]
    # The room that reads such records reads this one.
    read = engine_runs.load(engine / "out" / "engine.json")
    (line,) = read.tokens("triton-graph-64", "ours-wrong-order")
    assert line == ("4,096 tokens of context: the first difference is token 7, where the likeliest "
                    "tokens differ")
    assert read.tokens("triton-graph-64", "ours-graph-64")[0].endswith("the same 129 tokens")
    assert read.attention_us("ours-graph-64", 4096) == 12.5
    assert read.attention_us("triton-graph-64", 4096) == 2.5
    assert len(read.table()) == 1 and read.decode("ours-graph-64", 4096)["ms_a_step"] > 0
    assert read.said("ours-graph-64") == ["SGLang 0.5.16: verify runs through mla_kernels"]


def test_an_engine_that_fails_is_recorded_and_taken_up_again(engine, monkeypatch):
    monkeypatch.setenv("FAIL", "1")
    both = ["triton-graph-64", "ours-graph-64"]
    status, record = run(engine, "--contexts", "4096", "--runs", *both)
    assert status == 1 and list(record["runs"]) == both[:1]
    assert "no such engine" in record["runs"]["triton-graph-64"]["log_tail"]
    monkeypatch.delenv("FAIL")
    earlier = engine / "earlier.json"
    earlier.write_text(json.dumps(record))
    status, record = run(engine, "--contexts", "4096", "--runs", *both, "--resume", str(earlier))
    assert status == 0
    earlier.write_text(json.dumps(record))
    monkeypatch.setenv("FAIL", "1")  # nothing is left to run
    assert run(engine, "--contexts", "4096", "--runs", *both, "--resume", str(earlier))[0] == 0


def test_no_run_starts_without_time_for_it(engine, capsys):
    status, record = run(engine, "--runs", "triton-graph-64", "--seconds", "50")
    assert record["runs"] == {} and "left for another time" in capsys.readouterr().out


def test_an_engine_that_hangs_is_ended(engine):
    run_ = engine_run.Run("triton-graph-64", "triton", True, 64, (4096,))
    source = engine / "work" / "site" / "sglang" / "srt" / "entrypoints" / "engine.py"
    source.write_text(ENGINE.replace("time.sleep(1e-4 * n)", "time.sleep(600)"))
    engine_run.prepare(None, engine / "work")
    (engine / "work" / "run.json").write_text("[4096]")
    got = engine_run.watch(run_, engine / "work", 8)
    assert got["timed_out"] and not got["whole"] and got["seconds"] < 30
    assert [f["kind"] for f in got["found"]] == ["start"]


def test_the_model_is_what_it_says(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    engine_run.write_model(tmp_path)
    weights = safetensors.load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["kv_lora_rank"] + config["qk_rope_head_dim"] == 576
    row = weights["model.layers.7.self_attn.kv_a_proj_with_mqa.weight"]
    assert row.shape == (576, config["hidden_size"])
    # A token's successor is what the last layer leans to.
    head, embedding = weights["lm_head.weight"].float(), weights["model.embed_tokens.weight"]
    best = (embedding.float() @ head.T).argmax(1)
    t = best.new_tensor(range(len(best)))
    assert (best == t // 16 * 16 + (t + 1) % 16).all()
