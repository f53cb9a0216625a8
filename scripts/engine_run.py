"""Runs a real SGLang engine with its own Triton backend and with ours, and compares.

    python scripts/carry_engine.py build/engine                 # where there is a network
    python scripts/engine_run.py --carried build/engine --out engine.json      # on the GPU

A DeepSeek-V3-architecture model with true MLA dimensions (512 + 64) and 8 heads, as one of eight
tensor-parallel ranks has, random weights and dense layers, decodes greedily with NGRAM tree
speculation. Each run is an engine of its own, started in the background and polled; what a run
has measured is written at once, and ``--resume`` of such a file goes on with the runs it lacks.
The first engine of a machine compiles for a minute or more at its first prefill.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import gzip
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

LAYERS, HEADS, HIDDEN, VOCAB = 8, 8, 1024, 256
KV_LORA_RANK, ROPE, NOPE, VALUE, Q_LORA_RANK, INTERMEDIATE = 512, 64, 128, 128, 512, 2048

#: Length of a loop of successors, and how much likelier than another token a successor is, in
#: standard deviations of a logit.
LOOP, BIAS = 16, 4

#: Tokens generated for a measurement, and how often each is repeated.
NEW_TOKENS, REPEATS = 128, 2


@dataclasses.dataclass(frozen=True)
class Run:
    """One engine.

    Args:
        backend: ``"triton"`` or ``"ours"``.
        graph: CUDA graphs, or eager.
        nodes: draft tokens of a tree.
        environment: settings of ours, beyond being on.
    """

    name: str
    backend: str
    graph: bool
    nodes: int
    contexts: tuple[int, ...] = (4096, 16384, 65536)
    environment: tuple[tuple[str, str], ...] = ()


WRONG_ORDER = ("MLA_KERNELS_SGLANG_ROW_ORDER", "rope_first")
RUNS = (
    Run("triton-graph-64", "triton", True, 64),
    Run("ours-graph-64", "ours", True, 64),
    Run("triton-eager-64", "triton", False, 64),
    Run("ours-eager-64", "ours", False, 64),
    Run("ours-shadow", "ours", True, 64, (4096, 16384), (("MLA_KERNELS_SGLANG_SHADOW", "8"),)),
    # Told the wrong order: without shadow mode the text must change, with it it must not.
    Run("ours-wrong-order", "ours", True, 64, (4096,), (WRONG_ORDER,)),
    Run("ours-wrong-order-shadow", "ours", True, 64, (4096,),
        (WRONG_ORDER, ("MLA_KERNELS_SGLANG_SHADOW", "1"))),
    Run("triton-graph-16", "triton", True, 16),
    Run("ours-graph-16", "ours", True, 16),
)


# -- the model ----------------------------------------------------------------------------


def model_config() -> dict:
    return dict(
        architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3", hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE, moe_intermediate_size=256, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, q_lora_rank=Q_LORA_RANK,
        kv_lora_rank=KV_LORA_RANK, qk_rope_head_dim=ROPE, qk_nope_head_dim=NOPE,
        v_head_dim=VALUE, n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2,
        n_group=1, topk_group=1, first_k_dense_replace=LAYERS, moe_layer_freq=1,
        routed_scaling_factor=1.0, scoring_func="sigmoid", topk_method="noaux_tc",
        norm_topk_prob=True, vocab_size=VOCAB, max_position_embeddings=131072,
        rms_norm_eps=1e-6, rope_theta=10000.0, rope_scaling=None, hidden_act="silu",
        tie_word_embeddings=False, torch_dtype="bfloat16", bos_token_id=0, eos_token_id=1,
        attention_bias=False, num_nextn_predict_layers=0, initializer_range=0.02,
        aux_loss_alpha=0.001, pretraining_tp=1, use_cache=True, seq_aux=True)


def write_model(folder: Path) -> None:
    """Random weights at the scale of a trained model's: SGLang's own dummy weights are so small
    that attention has no part in the tokens. Attention logits spread by 3 standard deviations,
    so a few rows count. The last layer leans toward a fixed successor of the current token, which
    makes the loops that NGRAM drafts from; where it does not win, the context decides."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)

    def normal(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * gain * columns**-0.5

    embedding = torch.randn(VOCAB, HIDDEN, generator=generator)
    token = torch.arange(VOCAB)
    successor = token // LOOP * LOOP + (token + 1) % LOOP
    weights = {"model.embed_tokens.weight": embedding, "model.norm.weight": torch.ones(HIDDEN)}
    # BIAS standard deviations of a logit, as the normalized state keeps 0.7 of the embedding.
    head = normal(VOCAB, HIDDEN)
    head[successor] += embedding * (BIAS / (0.7 * HIDDEN))
    weights["lm_head.weight"] = head
    for layer in range(LAYERS):
        parts = {
            "input_layernorm": torch.ones(HIDDEN),
            "post_attention_layernorm": torch.ones(HIDDEN),
            "self_attn.q_a_proj": normal(Q_LORA_RANK, HIDDEN),
            "self_attn.q_a_layernorm": torch.ones(Q_LORA_RANK),
            "self_attn.q_b_proj": normal(HEADS * (NOPE + ROPE), Q_LORA_RANK, 3.0),
            "self_attn.kv_a_proj_with_mqa": normal(KV_LORA_RANK + ROPE, HIDDEN),
            "self_attn.kv_a_layernorm": torch.ones(KV_LORA_RANK),
            "self_attn.kv_b_proj": normal(HEADS * (NOPE + VALUE), KV_LORA_RANK),
            "self_attn.o_proj": normal(HIDDEN, HEADS * VALUE, 0.4),
            "mlp.gate_proj": normal(INTERMEDIATE, HIDDEN),
            "mlp.up_proj": normal(INTERMEDIATE, HIDDEN),
            "mlp.down_proj": normal(HIDDEN, INTERMEDIATE, 0.4)}
        weights |= {f"model.layers.{layer}.{name}.weight": w for name, w in parts.items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model_config()))
    save_file({name: w.bfloat16().contiguous() for name, w in weights.items()},
              folder / "model.safetensors", metadata={"format": "pt"})


def prompt(length: int) -> list[int]:
    import numpy as np

    return np.random.default_rng(length).integers(2, VOCAB, length).tolist()


# -- one engine, in a process of its own --------------------------------------------------


def serve(run: Run, work: Path, out: Path) -> None:
    """Starts the engine and measures; every line of ``out`` is one finding, written at once."""
    from sglang.srt.entrypoints.engine import Engine

    def note(kind: str, **found: object) -> None:
        with out.open("a") as file:
            file.write(json.dumps({"kind": kind, **found}) + "\n")

    begin = time.perf_counter()
    engine = Engine(
        model_path=str(work / "model"), skip_tokenizer_init=True, attention_backend="triton",
        speculative_algorithm="NGRAM", speculative_num_draft_tokens=run.nodes,
        disable_cuda_graph=not run.graph, context_length=max(run.contexts) + 1024,
        max_total_tokens=400_000, max_running_requests=2, chunked_prefill_size=8192,
        mem_fraction_static=0.3, grammar_backend="none", sampling_backend="pytorch",
        disable_overlap_schedule=True, disable_custom_all_reduce=True, log_level="info")
    note("start", seconds=time.perf_counter() - begin)

    def generate(ids: list[int], tokens: int, **more: object) -> tuple[float, dict]:
        begin = time.perf_counter()
        answer = engine.generate(input_ids=ids, sampling_params={
            "max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}, **more)
        seconds = time.perf_counter() - begin
        return seconds, answer[0] if isinstance(answer, list) else answer

    for context in run.contexts:
        ids = prompt(context)
        seconds, _ = generate(ids, 1)
        note("prefill", context=context, seconds=seconds)
        # The first pass drafts from nothing and compiles what is new, the next draft from what the
        # first has generated, as soon as that is in the corpus: so the steps are noted too.
        for draft in ("cold", *["warm"] * REPEATS):
            short = min(generate(ids, 1)[0] for _ in range(2))  # the prompt is cached by now
            seconds, answer = generate(ids, NEW_TOKENS + 1)
            note("decode", context=context, draft=draft, seconds=seconds - short,
                 tokens=answer["output_ids"], verify_steps=answer["meta_info"].get(
                     "spec_verify_ct"))
    # What may fail in an engine comes when all else is written.
    for look in (logprobs, profile):
        for context in run.contexts:
            try:
                found = look(engine, generate, prompt(context), work)
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {error}"}
            note(look.__name__, context=context, **found)
    note("end")
    engine.shutdown()


def logprobs(engine, generate, ids: list[int], work: Path) -> dict:
    """The tokens, and the two likeliest at each place: ``(token, logprob)``."""
    _, answer = generate(ids, NEW_TOKENS + 1, return_logprob=True, top_logprobs_num=2)
    top = answer["meta_info"]["output_top_logprobs"]
    return {"tokens": answer["output_ids"],
            "top2": [[(t[1], round(t[0], 5)) for t in pair] for pair in top]}


def profile(engine, generate, ids: list[int], work: Path) -> dict:
    """Kernel times of a short generation: by kernel its calls, their sum and their median in
    microseconds."""
    folder = work / "traces" / str(time.time_ns())
    folder.mkdir(parents=True)
    engine.start_profile(output_dir=str(folder), activities=["GPU"])
    _, answer = generate(ids, 33)
    engine.stop_profile()
    deadline = time.monotonic() + 20
    while not (found := sorted(folder.rglob("*.json*"))) and time.monotonic() < deadline:
        time.sleep(0.2)
    time.sleep(0.5)  # the file may still be growing
    raw = found[0].read_bytes()
    trace = json.loads(gzip.decompress(raw) if found[0].suffix == ".gz" else raw)
    events = sorted((e for e in trace["traceEvents"] if e.get("cat") == "kernel"),
                    key=lambda e: e["ts"])
    times: dict[str, list[float]] = collections.defaultdict(list)
    for event in events:
        times[event["name"][:100]].append(event["dur"])
    ranked = sorted(times.items(), key=lambda item: -sum(item[1]))
    return {"verify_steps": answer["meta_info"].get("spec_verify_ct"),
            "attention": attention_times(events),
            "kernels": {name: [len(t), round(sum(t), 1), round(statistics.median(t), 2)]
                        for name, t in ranked[:25]}}


def attention_times(events: list[dict]) -> dict[str, list[float]]:
    """Calls and their median microseconds, of SGLang's verify kernel and of ours; ours lasts
    until its second kernel, where it has one, has merged the partial results."""
    spans: dict[str, list[list[float]]] = {"triton": [], "ours": []}
    for event in events:
        begin, end = event["ts"], event["ts"] + event["dur"]
        if event["name"] == "_fwd_kernel":
            spans["triton"].append([begin, end])
        elif re.search(r"\btree_verify\b", event["name"]):
            spans["ours"].append([begin, end])
        elif re.search(r"\bcombine\b", event["name"]) and spans["ours"]:
            spans["ours"][-1][1] = end
    return {name: [len(pairs), round(statistics.median(b - a for a, b in pairs), 2)]
            for name, pairs in spans.items() if pairs}


# -- all of them --------------------------------------------------------------------------


def environment(run: Run, work: Path) -> dict[str, str]:
    ours = {"MLA_KERNELS_SGLANG": "1", **dict(run.environment)} if run.backend == "ours" else {}
    return {**os.environ, "TORCH_CUDA_ARCH_LIST": "9.0", "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join(map(str, (work / "plugin", work / "site", ROOT))),
            **ours}


def prepare(carried: Path | None, work: Path) -> None:
    """Unpacks the engine, and declares our plugin as an installed package's metadata would."""
    plugin = work / "plugin"
    if carried and not (work / "site").exists():
        (work / "site").mkdir(parents=True)
        unpacking = [subprocess.Popen([sys.executable, "-m", "tarfile", "-e", path, work / "site"])
                     for path in sorted(carried.resolve().glob("*.tar.xz"))]
        if any(process.wait() for process in unpacking):
            raise RuntimeError(f"the archives in {carried} do not unpack")
    info = plugin / "mla_kernels-0.1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mla-kernels\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nmla_kernels = mla_kernels.sglang.hook:activate\n")
    shutil.copy(ROOT / "scripts" / "engine_stand_ins.py", plugin / "sitecustomize.py")
    if not (work / "model").exists():
        write_model(work / "model")


#: Lines of an engine's log that say who served.
SAID = re.compile(r".*(mla_kernels|SGLang's own path|shadow:|left untouched).*")


def watch(run: Run, work: Path, seconds: float) -> dict:
    """Runs one engine to its end or its time's, and collects what it found."""
    lines, log = work / f"{run.name}.jsonl", work / f"{run.name}.log"
    lines.unlink(missing_ok=True)
    begin, seen = time.monotonic(), 0
    with log.open("w") as file:
        child = subprocess.Popen(
            [sys.executable, __file__, "--serve", run.name, "--work", str(work)],
            env=environment(run, work), cwd=work, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True)
        while child.poll() is None and time.monotonic() - begin < seconds:
            time.sleep(1)
            found = lines.read_text().splitlines() if lines.exists() else []
            for line in found[seen:]:
                print(f"{run.name} {time.monotonic() - begin:5.0f} s  {line[:110]}", flush=True)
            seen = len(found)
            if seen and json.loads(found[-1])["kind"] == "end":
                break
        timed_out = child.poll() is None and not (seen and '"end"' in found[-1])
        try:
            child.wait(timeout=10 if not timed_out else 0)
        except subprocess.TimeoutExpired:
            pass
        # The engine's own processes, should any be left.
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        child.wait()
    text = log.read_text(errors="replace")
    found = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    whole = bool(found) and found[-1]["kind"] == "end"
    said = list(dict.fromkeys(m[0][:300] for m in SAID.finditer(text)))
    return {"found": found, "whole": whole, "timed_out": timed_out, "said": said[:40],
            "seconds": round(time.monotonic() - begin, 1),
            **({} if whole else {"log_tail": text[-6000:]})}


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), None)


def compare(runs: dict[str, dict], one: str, other: str) -> list[dict]:
    """The greedy tokens of two runs, context by context."""
    rows = []
    a, b = runs.get(one, {}).get("found", []), runs.get(other, {}).get("found", [])
    for context in sorted({f["context"] for f in a if "context" in f}):
        def pick(found: list[dict], kind: str, context: int = context) -> dict:
            return next((f for f in found if f["kind"] == kind and f["context"] == context
                         and "error" not in f), {})
        cold = [pick(found, "decode").get("tokens") for found in (a, b)]
        if not all(cold):
            continue
        at = first_difference(*cold)
        row = {"context": context, "same_tokens": at is None, "first_difference": at}
        tops = [pick(found, "logprobs") for found in (a, b)]
        if at is not None and all(tops):
            row["top2_there"] = [t["top2"][at] for t in tops if len(t["top2"]) > at]
        rows.append(row)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--carried", type=Path, help="what carry_engine.py made; without it, "
                        "SGLang as installed")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--resume", type=Path, help="an earlier output, whose whole runs are kept")
    parser.add_argument("--runs", nargs="+", choices=[r.name for r in RUNS], metavar="RUN",
                        help=f"of {', '.join(r.name for r in RUNS)}; default all, in this order")
    parser.add_argument("--contexts", nargs="+", type=int)
    parser.add_argument("--seconds", type=float, default=540, help="no run starts with less than "
                        "a minute of this left")
    parser.add_argument("--work", type=Path, default=Path("/tmp/mla_kernels_engine"))
    parser.add_argument("--serve", choices=[r.name for r in RUNS], help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    runs = {r.name: dataclasses.replace(r, contexts=tuple(
        c for c in r.contexts if not args.contexts or c in args.contexts)) for r in RUNS}
    if args.serve:
        chosen = json.loads((args.work / "run.json").read_text())
        run = dataclasses.replace(runs[args.serve], contexts=tuple(chosen))
        serve(run, args.work, args.work / f"{run.name}.jsonl")
        return 0
    if not args.out:
        parser.error("--out is needed")
    begin = time.monotonic()
    args.work.mkdir(parents=True, exist_ok=True)
    prepare(args.carried, args.work)
    print(f"prepared after {time.monotonic() - begin:.0f} s", flush=True)
    # Our kernel compiles while the first engine starts.
    building = subprocess.Popen(
        [sys.executable, "-c", "from mla_kernels import build; build.load()"], cwd=ROOT)
    record = json.loads(args.resume.read_text()) if args.resume else {"runs": {}}
    for name in args.runs or runs:
        run, left = runs[name], args.seconds - (time.monotonic() - begin)
        if not run.contexts or record["runs"].get(name, {}).get("whole"):
            continue
        if left < 60:
            print(f"{name}: left for another time, {left:.0f} s remain", flush=True)
            continue
        if run.backend == "ours" and building.poll() is None:
            building.wait()
        (args.work / "run.json").write_text(json.dumps(run.contexts))
        record["runs"][name] = {**dataclasses.asdict(run),
                                **watch(run, args.work, min(left - 10, 300))}
        finish(record, args)
        last = record["runs"][name]
        print(f"{name}: {'whole' if last['whole'] else 'NOT whole'}, {last['seconds']} s",
              *last["said"][:6], sep="\n    ", flush=True)
        if not last["whole"]:
            print(last["log_tail"][-2500:], flush=True)
            if not last["found"] and run.backend == "triton":
                print("SGLang itself does not start here; the other runs are left out")
                break
    building.kill()
    building.wait()
    finish(record, args)
    print(json.dumps(record["compared"], indent=1))
    return 0 if all(r["whole"] for r in record["runs"].values()) else 1


def finish(record: dict, args: argparse.Namespace) -> None:
    """Writes the record with what can be said of it so far."""
    sys.path.insert(0, str(ROOT))
    from mla_kernels import records
    from mla_kernels.device import provenance

    pairs = [(f"triton-{m}", f"ours-{m}") for m in ("graph-64", "eager-64", "graph-16")]
    pairs += [("triton-graph-64", n) for n in ("ours-shadow", "ours-wrong-order",
                                               "ours-wrong-order-shadow")]
    versions = args.carried / "versions.json" if args.carried else None
    record |= {
        "compared": {f"{a} / {b}": compare(record["runs"], a, b) for a, b in pairs
                     if a in record["runs"] and b in record["runs"]},
        "model": {"layers": LAYERS, "heads": HEADS, "hidden_size": HIDDEN, "vocab_size": VOCAB,
                  "row": [KV_LORA_RANK, ROPE], "new_tokens": NEW_TOKENS},
        **provenance()}
    if versions and versions.exists():
        record["packages"] = json.loads(versions.read_text())
        record["sglang"] = record["packages"].get("sglang")
    for run in record["runs"].values():  # a resumed record may be of several commits
        run.setdefault("commit", record["commit"])
    records.write(args.out, record)


if __name__ == "__main__":
    sys.exit(main())
