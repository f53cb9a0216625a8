"""What the kernel must not do: lose on uneven batches, cost much when small, have cliffs.

    python scripts/kernel_limits.py --out data/limits/h200.json

Three measurements on the local GPU, each call compared with the float64 oracle where that fits:

* ``ragged``: one request of 131,072 tokens among 31 of 1,024, against 32 equal ones of as many
  tokens in all; cold, graph replay.
* ``small``: one call (two kernels) at 256 tokens as a CUDA graph of its own, launched again and
  again, against a graph of two empty kernels; and both as parts of one long graph.
* ``sweep``: every T and H of a grid at one number of cache rows, ``context + T = 3,072``. A
  shape's cliff is its time over that of the fastest shape with more row tiles.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tqdm.auto import tqdm

from mla_kernels import bench, records
from mla_kernels.device import local_gpu, provenance
from mla_kernels.workload import Shape, Workload, make_workload

HEADS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
NODES = (1, 2, 3, 5, 8, 13, 16, 21, 32, 48, 64, 96, 128, 200, 256, 512, 1024)
CACHE_ROWS = 3072

#: Query rows above which the float64 oracle takes too long; one larger shape is checked too.
CHECKED_ROWS = 4096


def timed(work: Workload, seconds: float, checked: bool = True) -> tuple[float, float | None]:
    """Median microseconds a call, and the relative error."""
    call = bench.PROVIDERS["cuda"].prepare(work)
    error = bench.error_of(work, call) if checked else None
    return float(np.median(bench.time_graph(work, call, seconds=seconds))), error


def ragged(seconds: float, heads: int = 8, nodes: int = 8) -> dict[str, object]:
    contexts = [131_072] + [1_024] * 31
    shape = Shape(len(contexts), heads, nodes, max(contexts))
    even = dataclasses.replace(shape, context=sum(contexts) // len(contexts))
    uneven_us, error = timed(make_workload(shape, contexts=contexts), seconds)
    even_us, even_error = timed(make_workload(even), seconds)
    return {"heads": heads, "nodes": nodes, "contexts": contexts, "uneven_us": uneven_us,
            "even_us": even_us, "ratio": uneven_us / even_us, "error": max(error, even_error)}


def launches(record, count: int = 1, replays: int = 2000) -> float:
    """Microseconds a replay of a graph that holds ``record()``, ``count`` times, launched back to
    back; divided by ``count``."""
    record()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            record()
    best = np.inf
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(20):
            graph.replay()
        begin.record()
        for _ in range(replays // count):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end) * 1e3 / (replays // count) / count)
    return float(best)


def small() -> list[dict[str, object]]:
    def empty() -> None:
        torch.cuda._sleep(0)
        torch.cuda._sleep(0)

    rows = [{"what": "two empty kernels", "alone_us": launches(empty),
             "in_a_row_us": launches(empty, 50)}]
    for shape in (Shape(1, 8, 1, 256), Shape(1, 8, 8, 256)):
        work = make_workload(shape)
        call = bench.PROVIDERS["cuda"].prepare(work)
        rows.append({"what": str(shape), "error": bench.error_of(work, call),
                     "alone_us": launches(lambda call=call: call(0)),
                     "in_a_row_us": launches(lambda call=call: call(0), 50),
                     "cold_us": float(np.median(bench.time_graph(work, call, seconds=0.05)))})
    return rows


def sweep(seconds: float) -> list[dict[str, object]]:
    results = []
    for nodes in tqdm(NODES, mininterval=2):
        for heads in HEADS:
            work = make_workload(Shape(1, heads, nodes, CACHE_ROWS - nodes), l2_bytes=8 << 20)
            checked = heads * nodes <= CHECKED_ROWS or (heads, nodes) == (HEADS[-1], NODES[-1])
            us, error = timed(work, seconds, checked)
            results.append({"heads": heads, "nodes": nodes, "us": us, "error": error,
                            "row_tiles": -(-heads * nodes // 64)})
    return cliffs(results)


def cliffs(results: list[dict]) -> list[dict]:
    """Adds ``cliff`` to each; None for the largest."""
    for r in results:
        more = [other["us"] for other in results if other["row_tiles"] > r["row_tiles"]]
        r["cliff"] = r["us"] / min(more) if more else None
    return results


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=0.05, help="replay time a measurement")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    args = parser.parse_args(argv)
    if local_gpu() is None:
        print("error: no CUDA device here", file=sys.stderr)
        return 2
    summary = provenance() | {"ragged": ragged(args.seconds), "small": small(),
                              "cache_rows": CACHE_ROWS, "sweep": sweep(args.seconds / 5)}
    records.write(args.out, summary)
    r = summary["ragged"]
    print(f"uneven {r['uneven_us']:.1f} us, even {r['even_us']:.1f} us: {r['ratio']:.3f}")
    for row in summary["small"]:
        print(row)
    worst = max((r for r in summary["sweep"] if r["cliff"]), key=lambda r: r["cliff"])
    print(f"worst cliff: {worst}; worst error "
          f"{max(r['error'] for r in summary['sweep'] if r['error'] is not None):.2e}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
