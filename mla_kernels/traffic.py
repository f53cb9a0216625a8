"""What one call moves, counted by the emulator: shared-memory wavefronts, tensor instructions,
sectors and bytes, by place in the kernels' source.

``python -m mla_kernels.traffic --shape 1,8,8,1024`` prints it. No GPU is asked; the kernels' own
source runs on the CPU (:mod:`mla_kernels.emulated`), planned for a GPU of ``--sms``
multiprocessors. What is counted and how is in ``csrc/emulated/counts.h``; reads and writes
through plain pointers, such as lengths in and results out, are not.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import torch

from . import build, cuda, emulated
from .device import RTX_PRO_6000
from .workload import Shape, make_workload

COLUMNS = ("what", "place", "instructions", "wavefronts", "least", "sectors", "needed", "bytes")

#: Comparisons that ``scripts/emulated_against_ncu.py`` recorded.
FOLDER = Path(__file__).parent.parent / "data" / "emulated"

#: What lies in shared memory's pipe; bulk copies write past it.
SHARED = ("ldmatrix", "shared load", "shared store")


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Counts of one call.

    Args:
        plan: how it was launched.
        sites: one row a place of the source, columns :data:`COLUMNS` and ``function``.
            ``wavefronts`` and ``least`` are of shared memory: what it takes, and what it would
            take without bank conflicts. ``sectors`` and ``needed``, of 32 bytes, are what is
            asked of L2 and what its bytes fill.
        copied: bytes brought to shared memory, by buffer.
        rows: cache rows of all requests, drafts among them.
    """

    shape: Shape
    plan: cuda.LaunchPlan
    sites: pd.DataFrame
    copied: dict[str, int]
    rows: int

    def total(self, column: str, *what: str) -> int:
        return int(self.sites.loc[self.sites["what"].isin(what), column].sum())

    @property
    def tensor_instructions(self) -> int:
        return self.total("instructions", "mma")

    @property
    def shared_wavefronts(self) -> int:
        return self.total("wavefronts", *SHARED)

    @property
    def conflicts(self) -> int:
        """Wavefronts that bank conflicts add."""
        return self.shared_wavefronts - self.total("least", *SHARED)

    @property
    def l2_sectors(self) -> int:
        return self.total("sectors", "bulk copy", "cp.async", "global load")

    @property
    def cache_bytes_per_row(self) -> float:
        """Bytes copied from the cache for each cache row and row tile: 1,152 if nothing is
        copied twice."""
        return sum(self.copied.values()) / (self.rows * self.plan.row_tiles)

    def by_function(self) -> pd.DataFrame:
        """Shared-memory wavefronts of each function of the source, the most first."""
        table = self.sites[self.sites["what"].isin(SHARED)].groupby("function")[
            ["wavefronts", "least"]].sum()
        return table.sort_values("wavefronts", ascending=False)


@functools.cache
def _functions(text: str) -> list[tuple[int, str]]:
    """``(first line, name)`` of a file's functions."""
    head = re.compile(r"^ {0,2}(?:static )?(?:inline )?__(?:device|global)__ [^;]*?(\w+)\(", re.M)
    return [(text.count("\n", 0, m.start(1)) + 1, m[1]) for m in head.finditer(text)]


def function_at(place: str) -> str:
    """The function of csrc that ``file:line`` lies in."""
    file, _, line = place.rpartition(":")
    text = build.sources().get(file, "")
    names = [name for first, name in _functions(text) if first <= int(line)]
    return names[-1] if names else file


def count(shape: Shape, sms: int = RTX_PRO_6000.sms, *, dtype: torch.dtype = torch.bfloat16,
          seed: int = 0) -> Traffic:
    """Runs one call of a shape on random inputs, planned for ``sms`` multiprocessors."""
    work = make_workload(shape, "cpu", l2_bytes=0, dtype=dtype, seed=seed)
    batch = work.batches[0]
    plan = cuda.plan(shape.num_heads, batch.batch_size, batch.max_q_len, batch.max_kv_len, sms)
    latent, rope = work.layout.split(work.q[0])
    with emulated.counting() as counts:
        emulated.verify_attention_emulated(
            latent, rope, work.pool, None, batch, layout=work.layout, sm_scale=work.sm_scale,
            k_scale=1.0, v_scale=1.0, logit_cap=0.0, out=work.out, lse=work.lse, launch=plan)
    lines = [line.split("\t") for line in counts.text.splitlines()]
    sites = pd.DataFrame([line for line in lines if line[0] != "copied"], columns=COLUMNS)
    sites = sites.astype(dict.fromkeys(COLUMNS[2:], int))
    sites["function"] = [function_at(place) for place in sites["place"]]
    return Traffic(shape, plan, sites, {name: int(n) for _, name, n in
                                        (line for line in lines if line[0] == "copied")},
                   batch.batch_size * (shape.context + shape.num_nodes))


def beside_nsight_compute(folder: Path = FOLDER) -> pd.DataFrame | None:
    """The recorded comparison with Nsight Compute, of the verify kernel: emulated, measured and
    their quotient, by shape; None where there is none."""
    rows = [row for path in sorted(folder.glob("*.json"))
            for row in json.loads(path.read_text())["rows"]]
    if not rows:
        return None
    table = {}
    for row in rows:
        line = {}
        for name, title in (("tensor_instructions", "tensor instructions"),
                            ("shared_wavefronts", "shared-memory wavefronts"),
                            ("l2_read_sectors", "L2 sectors read")):
            here, there = row[name]["emulator"], row[name]["nsight_compute"]
            line |= {(title, "emulator"): f"{here:,}", (title, "Nsight"): f"{there:,}",
                     (title, "quotient"): f"{here / there:.3f}"}
        table[str(Shape.parse(row["shape"]))] = line
    frame = pd.DataFrame.from_dict(table, orient="index")
    frame.columns = pd.MultiIndex.from_tuples(frame.columns)
    return frame


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m mla_kernels.traffic",
        description="Count what one call moves, on the CPU; needs no GPU.")
    parser.add_argument("--shape", type=Shape.parse, default=Shape(1, 8, 8, 1024), help="B,H,T,L")
    parser.add_argument("--sms", type=int, default=RTX_PRO_6000.sms,
                        help="multiprocessors to plan for; default: an RTX PRO 6000's")
    args = parser.parse_args(argv)
    traffic = count(args.shape, args.sms)
    table = traffic.sites.drop(columns=["function"]).assign(
        function=traffic.sites["function"]).sort_values(["what", "place"])
    print(f"{traffic.shape}: {traffic.plan}")
    with pd.option_context("display.width", 200, "display.max_rows", None):
        print(table.to_string(index=False))
    print(f"{traffic.tensor_instructions:,} tensor instructions; {traffic.shared_wavefronts:,} "
          f"wavefronts of shared memory, {traffic.conflicts:,} of them for bank conflicts; "
          f"{traffic.l2_sectors:,} sectors of L2; {traffic.cache_bytes_per_row:,.0f} bytes of the "
          "cache for each row and row tile")
    return 0


if __name__ == "__main__":
    sys.exit(main())
