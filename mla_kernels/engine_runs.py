"""Recorded runs of a real engine: what ``scripts/engine_run.py`` wrote on some machine.

An engine a run, each with SGLang's own Triton backend or with ours, and what comparing two of
them gave. A machine without such an engine shows these, and says where and when they were made.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent / "data" / "engine"

#: SGLang's path against ours, for the two ways to run a decode step.
PAIRS = {"CUDA graphs": ("triton-graph-64", "ours-graph-64"),
         "eager": ("triton-eager-64", "ours-eager-64")}


@dataclasses.dataclass(frozen=True)
class EngineRecord:
    """
    Args:
        runs: by name, each with its settings and ``found``, the measurements as they came.
        compared: by ``"one / other"``, rows of two runs' tokens and rates, a context each.
        origin: GPU, driver, versions, commit and date.
    """

    runs: dict[str, dict[str, Any]]
    compared: dict[str, list[dict[str, Any]]]
    model: dict[str, Any]
    origin: dict[str, Any]

    def rows(self, one: str, other: str) -> list[dict[str, Any]]:
        """The comparison of two runs, by context; empty where one is lacking."""
        return self.compared.get(f"{one} / {other}", [])

    def found(self, run: str, kind: str, context: int) -> list[dict[str, Any]]:
        return [f for f in self.runs.get(run, {}).get("found", []) if "error" not in f
                and (f["kind"], f.get("context")) == (kind, context)]

    def attention_us(self, run: str, context: int) -> float | None:
        """Median microseconds that a verify call of one layer keeps the GPU, from the profiler's
        trace; None where there is none."""
        kind = self.runs[run]["backend"] if run in self.runs else ""
        times = [f["attention"].get(kind) for f in self.found(run, "profile", context)]
        return times[0][1] if times and times[0] else None

    def decode(self, run: str, context: int) -> dict[str, float] | None:
        """The pass with the fewest verify steps, of equal ones the quickest, and without the
        first, in which much is compiled: its ``steps``, ``ms_a_step`` (milliseconds of a whole
        step of the engine) and ``tokens_per_second``. How many tokens a step accepts depends on
        what the drafts' corpus holds by then; how long a step takes does not."""
        passes = [f for f in self.found(run, "decode", context)
                  if f["draft"] == "warm" and f["verify_steps"]]
        if not passes:
            return None
        best = min(passes, key=lambda f: (f["verify_steps"], f["seconds"]))
        return {"steps": best["verify_steps"],
                "ms_a_step": 1e3 * best["seconds"] / best["verify_steps"],
                "tokens_per_second": self.model["new_tokens"] / best["seconds"]}

    def table(self, pairs: dict[str, tuple[str, str]] = PAIRS) -> list[dict[str, Any]]:
        """A row for each pair and context. The speed-up is that of a step."""
        table = []
        for mode, (one, other) in pairs.items():
            for context in (row["context"] for row in self.rows(one, other)):
                theirs, ours = self.decode(one, context), self.decode(other, context)
                if not theirs or not ours:
                    continue
                table.append({
                    "mode": mode, "context": context,
                    "SGLang ms/step": theirs["ms_a_step"], "ours ms/step": ours["ms_a_step"],
                    "speed-up": theirs["ms_a_step"] / ours["ms_a_step"],
                    "SGLang steps": theirs["steps"], "ours steps": ours["steps"],
                    "SGLang tokens/s": theirs["tokens_per_second"],
                    "ours tokens/s": ours["tokens_per_second"],
                    "SGLang us/layer": self.attention_us(one, context),
                    "ours us/layer": self.attention_us(other, context)})
        return table

    def markdown_table(self) -> str:
        """:meth:`table`, and whether the tokens are the same, for the README."""
        same = {(mode, row["context"]): "the same" if row["same_tokens"] else
                "a near-tie" if _near_tie(row) else "others"
                for mode, pair in PAIRS.items() for row in self.rows(*pair)}
        lines = ["| | context | SGLang, ms a step | ours, ms a step | speed-up | SGLang, us a "
                 "layer's verify | ours, us a layer's verify | greedy tokens |",
                 "|---|---:|---:|---:|---:|---:|---:|---|"]
        for r in self.table():
            lines.append(
                f"| {r['mode']} | {r['context']:,} | {r['SGLang ms/step']:.1f} | "
                f"{r['ours ms/step']:.1f} | {r['speed-up']:.1f} | {r['SGLang us/layer']:,.0f} | "
                f"{r['ours us/layer']:,.0f} | {same[r['mode'], r['context']]} |")
        return "\n".join(lines)

    def tokens(self, one: str, other: str) -> list[str]:
        """A sentence for each context: are the greedy tokens the same, and if not, why."""
        count = self.model.get("new_tokens", 0) + 1
        return [f"{row['context']:,} tokens of context: " + (
            f"the same {count} tokens" if row["same_tokens"] else _difference(row))
            for row in self.rows(one, other)]

    def said(self, run: str) -> list[str]:
        """What an engine's log says of who served, with the time and the rank cut off."""
        lines = (line.rpartition("] ")[2] for line in self.runs.get(run, {}).get("said", []))
        return list(dict.fromkeys(line for line in lines if line.startswith(
            ("SGLang", "shadow", "MLA_KERNELS"))))

    def __str__(self) -> str:
        o = self.origin
        commits = dict.fromkeys(run.get("commit", o.get("commit")) for run in self.runs.values())
        return (f"SGLang {o.get('sglang')} on {o.get('gpu')}, {o.get('date')}, driver "
                f"{o.get('driver')}, torch {o.get('torch')}, commit "
                f"{' and '.join(map(str, commits))}: "
                f"{sum(bool(r.get('whole')) for r in self.runs.values())} of {len(self.runs)} "
                "engine runs are whole")


#: Log-probabilities apart by less than this may change places by the rounding of 16 bits.
NEAR = 0.05


def _candidates(row: dict[str, Any]) -> tuple[bool, list[float]] | None:
    """Where two texts part: whether both engines have the same two likeliest tokens, and how far
    those are apart in each."""
    tops = row.get("top2_there")
    if not tops or len(tops) != 2:
        return None
    return ({t for t, _ in tops[0]} == {t for t, _ in tops[1]},
            [abs(pair[0][1] - pair[1][1]) for pair in tops])


def _near_tie(row: dict[str, Any]) -> bool:
    found = _candidates(row)
    return found is not None and found[0] and max(found[1]) < NEAR


def _difference(row: dict[str, Any]) -> str:
    text = f"the first difference is token {row['first_difference']}"
    found = _candidates(row)
    if found is None:
        return text
    same, gaps = found
    return text + (", where both have the same two likeliest tokens, apart by {:.3f} and {:.3f} in "
                   "log-probability".format(*gaps) if same else
                   ", where the likeliest tokens differ")


def load(path: Path | str) -> EngineRecord:
    """One file.

    Raises:
        ValueError: it is not what ``scripts/engine_run.py`` writes; the message says why.
    """
    try:
        data = json.loads(Path(path).read_text())
        runs, compared, model = data.pop("runs"), data.pop("compared"), data.pop("model")
        data.pop("packages", None)
        if not all({"backend", "found", "whole"} <= set(run) for run in runs.values()):
            raise ValueError("a run lacks its backend, its findings or whether it is whole")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not a record of scripts/engine_run.py "
                         f"({type(error).__name__}: {error})") from error
    return EngineRecord(runs, compared, model, data)


def latest(folder: Path | str = FOLDER) -> EngineRecord | None:
    """The last recorded run by date; None where nothing is recorded yet."""
    found = [load(path) for path in sorted(Path(folder).glob("*.json"))]
    return max(found, key=lambda record: str(record.origin.get("date")), default=None)
