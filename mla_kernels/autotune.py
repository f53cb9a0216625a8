"""Finds the fastest launch of each shape on the local GPU, and what the policy loses to it.

``python -m mla_kernels.autotune`` times every candidate cold, by graph replay, after comparing
its result with the oracle, and writes one JSON file a card. The policy (:func:`mla_kernels.cuda.
plan`) does not read it: it is small enough to be understood, and this says what that costs.
``mla_kernels.cuda.launch_as`` makes launches follow a line of the file.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from tqdm.auto import tqdm

from . import bench, build, cuda, measurements, records
from .device import local_gpu, provenance
from .workload import PRESETS, Shape, chosen, make_workload

#: The repository's folder of results, one file a card.
FOLDER = records.DATA / "autotune"


def policy(shape: Shape, sms: int, **overrides: int) -> cuda.LaunchPlan:
    """:func:`mla_kernels.cuda.plan` of a shape."""
    return cuda.plan(shape.num_heads, shape.batch_size, shape.num_nodes, shape.context, sms,
                     **overrides)


def candidates(shape: Shape, sms: int) -> list[cuda.LaunchPlan]:
    """Launches worth timing, the policy's first, with every number of warps a fragment in the
    merge; then every tile, with as many work groups as fill the multiprocessors once or twice,
    the whole multiples of the batch below that, and one group a request."""
    found = [policy(shape, sms)]
    if found[0].groups > 1:
        found += [dataclasses.replace(found[0], combine_split=n) for n in build.COMBINE_SPLITS]
    for rows in build.TILE_ROWS:
        row_tiles = policy(shape, sms, rows=rows).row_tiles
        tiles = shape.batch_size * -(-(shape.context + shape.num_nodes) // cuda.TILE_TOKENS)
        groups = {sms // row_tiles, 2 * sms // row_tiles, shape.batch_size}
        groups |= {g // shape.batch_size * shape.batch_size for g in groups}
        for g in sorted(g for g in groups if 1 <= g <= min(tiles, cuda.MAX_GROUPS)):
            found.append(policy(shape, sms, rows=rows, groups=g))
    return list(dict.fromkeys(found))


def tune(shape: Shape, sms: int, time: Callable[[cuda.LaunchPlan], float]) -> dict[str, object]:
    """The fastest candidate by ``time`` (microseconds; NaN for a wrong result)."""
    plans = candidates(shape, sms)
    times = np.array([time(plan) for plan in plans])
    if np.isnan(times[0]):
        raise RuntimeError(f"{shape}: the policy's launch gives a wrong result: {plans[0]}")
    best = int(np.nanargmin(times))
    return {"shape": dataclasses.astuple(shape), "policy": dataclasses.asdict(plans[0]),
            "policy_us": round(float(times[0]), 2), "best": dataclasses.asdict(plans[best]),
            "best_us": round(float(times[best]), 2), "tried": len(plans),
            "wrong": int(np.isnan(times).sum())}


def _timer(shape: Shape, seconds: float) -> Callable[[cuda.LaunchPlan], float]:
    work = make_workload(shape)

    def time(plan: cuda.LaunchPlan) -> float:
        call = bench.cuda_variant(rows=plan.rows, groups=plan.groups,
                                  combine_split=plan.combine_split)(work)
        if not bench.error_of(work, call) <= measurements.MAX_ERROR:
            return float("nan")
        return float(np.median(bench.time_graph(work, call, seconds=seconds)))

    return time


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m mla_kernels.autotune",
        description="Time candidate launches of each shape on the local GPU.")
    parser.add_argument("--preset", action="append", choices=sorted(PRESETS))
    parser.add_argument("--shape", action="append", help="B,H,T,L; repeatable")
    parser.add_argument("--seconds", type=float, default=0.02, help="replay time a launch")
    parser.add_argument("--out", type=Path, help="JSON file to write; default: data/autotune, "
                                                 "named after the card")
    args = parser.parse_args(argv)
    gpu = local_gpu()
    if gpu is None:
        print("error: no CUDA device here; recorded results are in data/autotune",
              file=sys.stderr)
        return 2
    results = []
    for shape in tqdm(chosen(args.shape, args.preset), unit="shape", mininterval=2):
        results.append(tune(shape, gpu.sms, _timer(shape, args.seconds)))
        r = results[-1]
        lost = r["policy_us"] / r["best_us"] - 1
        tqdm.write(f"{shape}: policy {r['policy_us']:.1f} us, best {r['best_us']:.1f} us "
                   f"({lost:.1%}): {r['best']}")
    out = args.out or FOLDER / f"{gpu.name.lower().replace(' ', '-')}.json"
    records.write(out, provenance() | {"seconds": args.seconds, "shapes": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
