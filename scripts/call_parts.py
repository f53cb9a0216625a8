"""What of a call is due to the draft and what to the prefix, by measurement.

    python scripts/call_parts.py --out data/parts/h200.json

Times our CUDA kernel on every shape of the target table and on the same shape without a prefix:
start, the draft's own tiles and the merge of what little there is. What a call takes beyond that is
the prefix, and the merge of more splits; ``data/profiles`` has the merge kernel alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mla_kernels import bench, records
from mla_kernels.device import local_gpu, provenance
from mla_kernels.workload import PRESETS, Shape, make_workload


def timed(shape: Shape, seconds: float) -> dict[str, float]:
    """Median microseconds a call, cold, and the relative error."""
    work = make_workload(shape)
    call = bench.PROVIDERS["cuda"].prepare(work)
    error = bench.error_of(work, call)
    return {"us": float(np.median(bench.time_graph(work, call, seconds=seconds))),
            "error": error}


def parts(shapes: Sequence[Shape], seconds: float) -> list[dict[str, object]]:
    """A row for each shape: ``whole_us``, ``draft_us`` (no prefix), and the larger error."""
    drafts = {shape: dataclasses.replace(shape, context=0) for shape in shapes}
    times = {shape: timed(shape, seconds) for shape in dict.fromkeys([*shapes, *drafts.values()])}
    return [{"shape": ",".join(map(str, dataclasses.astuple(shape))),
             "whole_us": times[shape]["us"], "draft_us": times[drafts[shape]]["us"],
             "error": max(times[shape]["error"], times[drafts[shape]]["error"])}
            for shape in shapes]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=0.05, help="replay time a measurement")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    args = parser.parse_args(argv)
    if local_gpu() is None:
        print("error: no CUDA device here", file=sys.stderr)
        return 2
    rows = parts(PRESETS["spine"], args.seconds)
    records.write(args.out, provenance() | {"rows": rows})
    for row in rows:
        print(row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
