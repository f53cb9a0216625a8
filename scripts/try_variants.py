"""Builds, checks and times several versions of the kernel in one call.

A variant is a set of text replacements in ``mla_kernels/csrc``; each must fit exactly once::

    python scripts/try_variants.py \\
        --variant late-copies 'tree_verify.cuh: InScores = kSplitRows; => InScores = false;' \\
        --variant eager-rescale 'tree_verify.cuh: Rescale = 8.f; => Rescale = 0.f;' \\
        --shape 8,8,64,16384 --shape 1,8,8,16384

The sources as they are come first, as ``base``. For each version it prints registers, spills and
shared memory (for sm_120, and for the local GPU where there is one) and, on a GPU, the worst
error of random cases and the median time of every shape. A version with a wrong result is not
timed. Without a GPU the report is all.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from mla_kernels import build, check
from mla_kernels.bench import PRESETS, Shape, cuda_variant, make_workload, time_graph
from mla_kernels.device import local_gpu

CSRC = build.CSRC


def replaced(folder: Path, edits: Sequence[str]) -> Path:
    """A copy of the sources in ``folder`` with ``FILE: OLD => NEW`` carried out.

    Raises:
        ValueError: an edit of another form, an unknown file, or an old text that does not occur
            exactly once.
    """
    shutil.copytree(CSRC, folder)
    for edit in edits:
        name, colon, change = edit.partition(": ")
        old, arrow, new = change.partition(" => ")
        if not colon or not arrow:
            raise ValueError(f"an edit must look like 'FILE: OLD => NEW'; got {edit!r}")
        if not (folder / name).is_file():
            raise ValueError(f"no file {name} in csrc; there are "
                             f"{', '.join(sorted(p.name for p in folder.glob('*.*')))}")
        text = (folder / name).read_text()
        if text.count(old) != 1:
            raise ValueError(f"{old!r} must occur once in {name}; it occurs {text.count(old)} "
                             "times")
        (folder / name).write_text(text.replace(old, new))
    return folder


def use(folder: Path) -> None:
    """Makes :mod:`mla_kernels.build` compile and load from ``folder``."""
    build.CSRC = folder
    build._loaded.clear()


def resources(archs: Sequence[str]) -> str:
    """The 64-row kernel's resources and every problem of the others, on one line."""
    parts = []
    for arch in archs:
        reports = build.report(arch)
        main = next(r for r in reports
                    if (r.kernel, r.dtype, r.rows) == ("tree_verify", "bf16", 64))
        parts.append(f"{arch}: {main.registers} registers, {main.smem_bytes:,} B")
        parts += [f"{r.name}: {problem}" for r in reports for problem in r.problems]
    return "; ".join(parts)


def worst_error(cases: int, seed: int) -> float:
    """The largest relative error over random cases; infinite when one of them fails."""
    worst = 0.0
    for case in range(seed, seed + cases):
        errors = check.run(check.random_case(case, device="cuda"), "cuda")
        worst = max(worst, errors.out if errors.passed else np.inf)
    return worst


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--variant", nargs="+", action="append", default=[], metavar="NAME EDIT",
                        help="a name and one or more edits 'FILE: OLD => NEW'; repeatable")
    parser.add_argument("--shape", action="append", help="B,H,T,L; repeatable; default: the spine")
    parser.add_argument("--cases", type=int, default=20, help="random cases a version must pass")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0.1, help="replay time a measurement")
    args = parser.parse_args(argv)
    gpu = local_gpu()
    archs = ["sm_120"] + ([gpu.arch] if gpu and gpu.arch != "sm_120" else [])
    shapes = [Shape.parse(s) for s in args.shape] if args.shape else list(PRESETS["spine"])
    times: dict[str, dict[Shape, float]] = {}
    bad = False
    with tempfile.TemporaryDirectory() as scratch:
        folders = {}
        try:
            for name, *edits in [["base"], *args.variant]:
                folders[name] = replaced(Path(scratch) / name, edits)
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        right = []
        for name, folder in folders.items():
            use(folder)
            try:
                print(f"{name}: {resources(archs)}", flush=True)
                if gpu:
                    error = worst_error(args.cases, args.seed)
                    print(f"{name}: {args.cases} cases, worst relative error {error:.1e}",
                          flush=True)
                    if np.isfinite(error):
                        right.append(name)
                    else:
                        bad = True
            except build.BuildError as error:
                bad = True
                print(f"{name}: {str(error)[:2000]}", file=sys.stderr)
        # Shape by shape, all versions in turn: a card that warms up slows them all alike.
        for shape in shapes if gpu else []:
            work = make_workload(shape)
            for name in right:
                use(folders[name])
                call = cuda_variant()(work)
                times.setdefault(name, {})[shape] = float(
                    np.median(time_graph(work, call, seconds=args.seconds)))
    if times:
        table = pd.DataFrame(times).round(1)
        table.index = [str(shape) for shape in table.index]
        print(table.to_string())
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
