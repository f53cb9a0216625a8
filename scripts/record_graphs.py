"""Records what CUDA graphs and the batch-invariant mode are worth on this GPU.

    python scripts/record_graphs.py --out data/graphs/h200.json

For each shape: microseconds a call, eager and replayed, as default and batch-invariant; whether
eager and replay give the same bits, a repeated call the same bits, and a request alone the bits
that it has in its batch. Then a pool of more than 2^31 elements, read at its last slot. Eager
calls are timed one after the other, as a profiler or a loop around the call would see them: the
host's work is in that figure. A replay holds several calls, each on cache rows of its own, so
that the cache is cold. Needs a GPU; about a minute.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from mla_kernels import records
from mla_kernels.attention import verify_attention, workspace_bytes
from mla_kernels.batch import VerifyBatch
from mla_kernels.device import provenance
from mla_kernels.graphs import capture
from mla_kernels.layout import KVLayout
from mla_kernels.reference import relative_error
from mla_kernels.tree import kary
from mla_kernels.workload import Shape, Workload, make_workload

#: Requests, heads, draft nodes, context.
SHAPES = ("1,8,1,4096", "1,8,8,4096", "1,8,8,16384", "8,8,8,16384", "32,8,8,4096",
          "1,8,64,16384", "8,8,64,16384", "1,8,8,65536")

SM_SCALE = 192**-0.5


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int16 if x.element_size() == 2 else torch.int32)


def same(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(bits(x), bits(y)) for x, y in zip(a, b, strict=True))


class Calls:
    """One shape's calls into buffers of their own, as an engine would make them."""

    def __init__(self, work: Workload, batch_invariant: bool, backend: str):
        self.work, self.how = work, {"backend": backend, "batch_invariant": batch_invariant}
        size = workspace_bytes(work.batches[0], work.shape.num_heads, backend,
                               batch_invariant=batch_invariant)
        self.space = torch.empty(size, dtype=torch.uint8, device=work.pool.device)

    def __call__(self, region: int) -> None:
        w = self.work
        verify_attention(w.q[region], w.pool, w.batches[region], sm_scale=SM_SCALE, out=w.out,
                         lse=w.lse, workspace=self.space, **self.how)

    def all(self) -> None:
        for region in range(self.work.regions):
            self(region)

    def result(self, call: Callable[[], object]) -> tuple[torch.Tensor, torch.Tensor]:
        self.work.out.fill_(torch.nan)
        self.work.lse.fill_(torch.nan)
        self.space.fill_(0xFF)
        call()
        return self.work.out.clone(), self.work.lse.clone()

    def alone(self) -> bool:
        """Whether each request alone gives the bits that it has in the batch of region 0."""
        w = self.work
        out, lse = self.result(lambda: self(0))
        whole = w.batches[0]
        qo = whole.qo_indptr.tolist()
        for b, (begin, end) in enumerate(zip(qo, qo[1:], strict=False)):
            own = dataclasses.replace(
                whole, qo_indptr=whole.qo_indptr[b:b + 2] - begin,
                kv_indptr=whole.kv_indptr[b:b + 2] - whole.kv_indptr[b],
                kv_indices=whole.kv_indices[int(whole.kv_indptr[b]):].clone(),
                kv_lens=whole.kv_lens[b:b + 1].clone(),
                mask_bits=whole.mask_bits[begin:end].clone(),
                draft_slots=whole.draft_slots[begin:end].clone())
            got = verify_attention(w.q[0][begin:end], w.pool, own, sm_scale=SM_SCALE, **self.how)
            if not same(got, (out[begin:end], lse[begin:end])):
                return False
        return True


def microseconds(call: Callable[[], object], calls: int, seconds: float = 0.15) -> float:
    """The median over repetitions, of one call among `calls` that `call` makes."""
    times: list[float] = []
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop or len(times) < 5:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    return float(np.median(times))


def record_shape(text: str, device: str = "cuda", backend: str = "cuda") -> dict:
    work = make_workload(Shape.parse(text), device)
    row: dict = {"shape": text}
    for name, invariant in (("default", False), ("batch_invariant", True)):
        calls = Calls(work, invariant, backend)
        eager = calls.result(lambda c=calls: c(0))
        replay = capture(lambda c=calls: c(0)).replay
        graph = capture(calls.all).replay
        row[name] = {
            "eager_us": round(microseconds(calls.all, work.regions), 2),
            "replay_us": round(microseconds(graph, work.regions), 2),
            "replay_same_bits": same(eager, calls.result(replay)),
            "again_same_bits": all(same(eager, calls.result(lambda c=calls: c(0)))
                                   for _ in range(20)),
            "alone_same_bits": calls.alone(), "workspace_bytes": calls.space.numel(),
            "relative_error": relative_error(eager[0], work.exact[0]),
        }
    return row


def last_slot(slots: int = 3_728_271 + 100, device: str = "cuda", backend: str = "cuda") -> dict:
    """A pool of more than 2^31 elements whose only finite rows lie at its end; the oracle gets
    these rows as a pool of their own."""
    count, tree = 70, kary(2, 7)
    generator = torch.Generator(device=device).manual_seed(slots)
    rows = torch.randn(count, 576, generator=generator, device=device).bfloat16()
    pool = torch.full((slots, 576), torch.nan, dtype=torch.bfloat16, device=device)
    pool[-count:] = rows
    drafts = count - len(tree)
    call = {"q": torch.randn(len(tree), 8, 576, generator=generator, device=device).bfloat16(),
            "sm_scale": SM_SCALE, "layout": KVLayout.LATENT_FIRST}
    results = []
    for kv_pool, first, by in ((pool, slots - count, backend), (rows, 0, "reference")):
        batch = VerifyBatch.from_requests(
            [tree], [drafts], [np.arange(first, first + drafts)],
            draft_slots=[np.arange(first + drafts, first + count)], device=device)
        results.append(verify_attention(kv_pool=kv_pool, batch=batch, backend=by, **call))
    error = relative_error(results[0][0], results[1][0].double())
    return {"elements": pool.numel(), "last_slot": slots - 1, "relative_error": error,
            "passed": bool(pool.numel() > 2**31 and error < 0.01)}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="requests,heads,nodes,context")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("error: needs a CUDA device: torch.cuda.is_available() is False", file=sys.stderr)
        return 2
    record: dict = {"shapes": [], "large_pool": last_slot()} | provenance()
    for text in args.shapes:
        record["shapes"].append(record_shape(text))
        print(json.dumps(record["shapes"][-1]), flush=True)
        records.write(args.out, record)
    print(json.dumps(record["large_pool"]))
    good = all(row[mode][key] for row in record["shapes"] for mode in ("default", "batch_invariant")
               for key in ("replay_same_bits", "again_same_bits"))
    good &= all(row["batch_invariant"]["alone_same_bits"] for row in record["shapes"])
    return 0 if good and record["large_pool"]["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
