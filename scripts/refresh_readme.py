"""Rewrites what the README shows of recorded data, from the data: the table, the sentence about
correctness, and the figure. Run it after adding a file to data/."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

from mla_kernels import figures_speed, measurements
from mla_kernels.bench import PRESETS

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


def main() -> None:
    run = measurements.latest("H200")
    shapes = [dataclasses.astuple(s) for s in PRESETS["spine"]]
    baseline = "sglang_extend" if "sglang_extend" in set(run["provider"]) else "triton_serial"
    table = measurements.markdown_table(run, shapes, ["cuda", "triton_split", baseline])
    summary = json.loads((ROOT / "data/checks/h200_tree_verify.json").read_text())
    readme = ROOT / "README.md"
    text = readme.read_text()
    text = between(text, "measurements", f"{table}\n\n{measurements.origin(run)}.")
    text = between(text, "correctness", correctness(summary))
    figure = figures_speed.speedup_bars(run, shapes, baselines=["triton_split", baseline],
                                        title="Speed-up of our CUDA kernel on an H200")
    (ROOT / "data/figures").mkdir(exist_ok=True)
    figure.savefig(ROOT / "data/figures/speedup_bars.png", metadata={"Software": None})
    readme.write_text(text)


if __name__ == "__main__":
    main()
