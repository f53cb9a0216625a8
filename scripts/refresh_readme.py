"""Rewrites what the README shows of recorded data, from the data: the tables, the sentences about
correctness and the model's error, and the figures. ``make figures`` runs it, and draws the
notebooks' pictures anew; run that after adding a file to data/."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

from mla_kernels import (
    engine_runs,
    figures_model,
    figures_peers,
    figures_speed,
    measurements,
    predict,
)
from mla_kernels.bench import PRESETS
from mla_kernels.model import measure
from mla_kernels.workload import MODEL_HEADS

ROOT = Path(__file__).parent.parent


def between(text: str, name: str, inside: str) -> str:
    """``text`` with what stands between the two marks called ``name`` replaced."""
    pattern = rf"(<!-- {name}: begin -->\n).*?(\n<!-- {name}: end -->)"
    text, count = re.subn(pattern, lambda m: m[1] + inside + m[2], text, flags=re.S)
    if count != 1:
        raise SystemExit(f"README.md must have the marks of {name!r} once; found {count}")
    return text


def correctness(summary: dict) -> str:
    worst = summary["worst"]
    return (f"Correctness: {summary['cases'] - summary['failed']} of {summary['cases']} random "
            f"cases agree with a float64 oracle on the {summary['device']} (1 to 128 heads, "
            f"trees of 1 to {summary['max_nodes']} nodes, ragged batches, both row orders, bf16 "
            "and fp16, four page sizes, everything unreferenced poisoned with NaN); largest "
            f"relative error {worst['out']:.1e} ({summary['date']}, commit {summary['commit']}).")


def model_shapes() -> list[tuple[int, ...]]:
    """Shapes of the models' presets, each once."""
    return list(dict.fromkeys(dataclasses.astuple(s) for name in MODEL_HEADS
                              for s in PRESETS[name]))


def model_sentence(record: dict) -> str:
    """What the small model measures, right and wrong."""
    ways = record["orders"]["latent_first"]
    right, wrong = ways["right"], ways["wrong"]
    return (f"Measured on {record['texts']} held-out texts: read in the right order "
            f"{right['bits_per_byte']:.2f} bits a byte and {right['acceptance_length']:.2f} tokens "
            f"a step (DDTree, {record['wrong_nodes']} nodes), in the wrong order "
            f"{wrong['bits_per_byte']:.2f} and {wrong['acceptance_length']:.2f}, without an error "
            f"or a NaN ({record['date']}, commit {record['commit']}).")


def blocks() -> dict[str, str]:
    """What stands between each pair of marks."""
    everything = measurements.latest("H200", tree=None)
    run = measurements.of_tree(everything)
    shapes = [dataclasses.astuple(s) for s in PRESETS["spine"]]
    table = measurements.markdown_table(run, shapes, ["cuda", "triton_split", "sglang_extend"])
    summary = json.loads((ROOT / "data/checks/h200_tree_verify.json").read_text())
    errors = predict.errors_sentence(predict.held_out(run), predict.held_out(run, batches=True))
    engine = engine_runs.latest()
    modelled = predict.markdown_table(shapes, predict.calibrate(run))
    return {
        "measurements": f"{table}\n\n{measurements.origin(run)}.",
        "correctness": correctness(summary),
        "peers": measurements.markdown_peers(everything, shapes),
        "model": model_sentence(measure.load()),
        "engine": f"{engine.markdown_table()}\n\n{engine}.",
        "grid": measurements.grid_sentence(everything, model_shapes()),
        "modelled": f"{modelled}\n\n{errors}",
    }


def main() -> None:
    readme = ROOT / "README.md"
    text = readme.read_text()
    for name, inside in blocks().items():
        text = between(text, name, inside)
    everything = measurements.latest("H200", tree=None)
    shapes = [dataclasses.astuple(s) for s in PRESETS["spine"]]
    pictures = {
        "speedup_bars": figures_speed.speedup_bars(
            measurements.of_tree(everything), shapes,
            title="Speed-up of our CUDA kernel on an H200"),
        "beside_peers": figures_peers.beside_peers(
            everything, shapes, title="Other kernels' time over ours, H200"),
        "against_the_best": figures_peers.against_the_best(
            everything, title="Trees on an H200: the fastest other kernel's time over ours"),
        "acceptance": figures_model.acceptance(
            measure.load(), title="Tokens a verify step of the small model, held-out text"),
    }
    (ROOT / "data/figures").mkdir(exist_ok=True)
    for name, figure in pictures.items():
        figure.savefig(ROOT / f"data/figures/{name}.png", metadata={"Software": None})
    readme.write_text(text)


if __name__ == "__main__":
    main()
