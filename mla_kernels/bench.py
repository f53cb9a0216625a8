"""Timing verify calls as an engine would meet them, and recording what came out.

The cache is cold: every call of a replayed CUDA graph reads another region, all of them
together at least twice the L2. Slots are a random permutation, page size 1. Each provider's
result is compared with the float64 oracle before it is timed. ``python -m mla_kernels.bench``
runs a preset on the local GPU and writes one tidy CSV file.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from tqdm.auto import tqdm

from . import cuda
from .attention import verify_attention, workspace_bytes
from .batch import VerifyBatch
from .device import attention_bytes, attention_flops, local_gpu, provenance
from .layout import KVLayout
from .reference import relative_error, verify_attention_reference
from .tree import kary


@dataclasses.dataclass(frozen=True, order=True)
class Shape:
    """A batch of equal requests: ``context`` tokens of prefix each, and a draft tree of
    ``num_nodes``."""

    batch_size: int
    num_heads: int
    num_nodes: int
    context: int

    def __str__(self) -> str:
        return f"B {self.batch_size}, H {self.num_heads}, T {self.num_nodes}, L {self.context}"

    @classmethod
    def parse(cls, text: str) -> Shape:
        """From ``"B,H,T,L"``."""
        try:
            return cls(*map(int, text.split(",")))
        except (TypeError, ValueError):
            raise ValueError(f"a shape must look like 8,8,64,16384 (B,H,T,L); got {text!r}"
                             ) from None


#: Shapes by name. ``spine``: the project's table of targets; ``context``, ``nodes`` and
#: ``heads``: one of them swept.
PRESETS: dict[str, tuple[Shape, ...]] = {
    "spine": (
        Shape(1, 8, 8, 16384), Shape(1, 8, 16, 16384), Shape(1, 8, 64, 16384),
        Shape(1, 8, 64, 131072), Shape(8, 8, 1, 16384), Shape(8, 8, 8, 16384),
        Shape(32, 8, 8, 4096), Shape(8, 8, 16, 16384), Shape(8, 8, 64, 16384),
        Shape(16, 8, 32, 8192), Shape(1, 64, 8, 16384), Shape(1, 12, 8, 16384),
        Shape(4, 128, 4, 8192),
    ),
    "context": tuple(Shape(1, 8, t, 1024 * 2**i) for t in (8, 16, 64) for i in range(8)),
    "nodes": tuple(Shape(1, 8, t, c) for c in (4096, 16384, 65536)
                   for t in (1, 2, 4, 8, 16, 32, 64, 128, 256)),
    "heads": tuple(Shape(1, h, t, 16384) for t in (8, 64) for h in (4, 8, 16, 32, 64, 128)),
    "small": (Shape(1, 8, 8, 256), Shape(1, 8, 1, 256), Shape(4, 8, 8, 256)),
}


class Unavailable(RuntimeError):
    """A provider cannot run here, or not on this shape; the message says why."""


@dataclasses.dataclass
class Workload:
    """Inputs of one shape: a pool of several regions, and for each region its queries, batch,
    and outputs."""

    shape: Shape
    pool: torch.Tensor
    q: list[torch.Tensor]
    batches: list[VerifyBatch]
    out: torch.Tensor
    lse: torch.Tensor
    sm_scale: float = 192**-0.5
    layout: KVLayout = KVLayout.LATENT_FIRST

    @property
    def regions(self) -> int:
        return len(self.batches)


def make_workload(shape: Shape, device: torch.device | str = "cuda", *, seed: int = 0,
                  dtype: torch.dtype = torch.bfloat16, l2_bytes: int | None = None) -> Workload:
    """Random inputs whose regions together exceed twice the L2, at least 2 and at most 128 of
    them (short contexts then stay partly warm; the recorded ``regions`` say so)."""
    if l2_bytes is None:
        gpu = local_gpu()
        l2_bytes = gpu.l2 if gpu else 0
    a_request = shape.context + shape.num_nodes
    region_bytes = shape.batch_size * a_request * 576 * dtype.itemsize
    regions = min(max(2, -(-2 * l2_bytes // region_bytes)), 128)
    slots = regions * shape.batch_size * a_request
    generator = torch.Generator(device=device).manual_seed(seed)
    pool = torch.empty(slots, 576, dtype=dtype, device=device).normal_(generator=generator)
    rng = np.random.default_rng(seed)
    draft = kary(3, shape.num_nodes)
    tokens = shape.batch_size * shape.num_nodes
    q, batches = [], []
    for region in np.split(rng.permutation(slots), regions):
        requests = np.split(region, shape.batch_size)
        batches.append(VerifyBatch.from_requests(
            [draft] * shape.batch_size, [shape.context] * shape.batch_size,
            [r[: shape.context] for r in requests],
            draft_slots=[r[shape.context:] for r in requests], device=device))
        q.append(torch.empty(tokens, shape.num_heads, 576, dtype=dtype,
                             device=device).normal_(generator=generator))
    out = torch.full((tokens, shape.num_heads, 512), torch.nan, dtype=dtype, device=device)
    lse = torch.full((tokens, shape.num_heads), torch.nan, device=device)
    return Workload(shape, pool, q, batches, out, lse)


#: A provider takes a workload and gives a function that runs one region's call.
Provider = Callable[[Workload], Callable[[int], None]]


def _through_verify_attention(backend: str) -> Provider:
    def prepare(work: Workload) -> Callable[[int], None]:
        space = torch.empty(
            workspace_bytes(work.batches[0], work.shape.num_heads, backend),
            dtype=torch.uint8, device=work.pool.device)

        def call(region: int) -> None:
            verify_attention(work.q[region], work.pool, work.batches[region],
                             sm_scale=work.sm_scale, layout=work.layout, out=work.out,
                             lse=work.lse, workspace=space, backend=backend)

        return call

    return prepare


def cuda_variant(**overrides) -> Provider:
    """Our CUDA kernel with parts of its launch plan set by hand (``rows``, ``groups``)."""
    def prepare(work: Workload) -> Callable[[int], None]:
        device = work.pool.device
        launch = cuda.plan_for(work.batches[0], work.shape.num_heads, device, **overrides)
        space = torch.empty(launch.workspace_bytes, dtype=torch.uint8, device=device)

        def call(region: int) -> None:
            latent, rope = work.layout.split(work.q[region])
            cuda.verify_attention_cuda(
                latent, rope, work.pool, None, work.batches[region], layout=work.layout,
                sm_scale=work.sm_scale, k_scale=1.0, v_scale=1.0, logit_cap=0.0, out=work.out,
                lse=work.lse, workspace=space, launch=launch)

        return call

    return prepare


def _triton_serial(work: Workload) -> Callable[[int], None]:
    from .triton import verify_attention_triton

    def call(region: int) -> None:
        latent, rope = work.layout.split(work.q[region])
        verify_attention_triton(
            latent, rope, work.pool, None, work.batches[region], layout=work.layout,
            sm_scale=work.sm_scale, k_scale=1.0, v_scale=1.0, logit_cap=0.0, out=work.out,
            lse=work.lse, kernel="serial")

    return call


def _sglang_extend(work: Workload) -> Callable[[int], None]:
    """SGLang's own tree verify: its Triton backend's `extend_attention_fwd`, called as that
    backend does for a draft tree (FULL_MASK with the prefix skipped, drafts as tensors of
    their own)."""
    for module in ("sglang.kernels.ops.attention.extend_attention",
                   "sglang.srt.layers.attention.triton_ops.extend_attention"):
        try:
            extend_attention_fwd = importlib.import_module(module).extend_attention_fwd
            break
        except ImportError as error:
            reason = error
    else:
        raise Unavailable(f"SGLang is not importable: {reason}")
    layout = work.layout
    if layout.order != "latent_first":
        raise Unavailable("SGLang's rows are latent first")
    buffer = work.pool[:, None]
    drafts, metadata = [], []
    for batch in work.batches:
        drafts.append(work.pool[batch.draft_slots.long()][:, None].contiguous())
        mask, mask_indptr = batch.full_mask()
        metadata.append((batch.qo_indptr, batch.kv_indptr, batch.kv_indices.long(), mask,
                         mask_indptr))

    def call(region: int) -> None:
        qo_indptr, kv_indptr, kv_indices, mask, mask_indptr = metadata[region]
        rows = drafts[region]
        extend_attention_fwd(
            work.q[region], rows, layout.latent(rows), work.out, buffer, layout.latent(buffer),
            qo_indptr, kv_indptr, kv_indices, mask, True, mask_indptr, work.shape.num_nodes,
            1.0, 1.0, sm_scale=work.sm_scale)

    return call


#: Providers by the name that appears in recorded data.
PROVIDERS: dict[str, Provider] = {
    "cuda": _through_verify_attention("cuda"),
    "triton_split": _through_verify_attention("triton"),
    "triton_serial": _triton_serial,
    "sglang_extend": _sglang_extend,
}


def error_of(work: Workload, call: Callable[[int], None]) -> float:
    """Relative error of region 0 against the float64 oracle, from outputs that held NaN; of the
    log-sum-exp too, where the provider writes it."""
    work.out.fill_(torch.nan)
    work.lse.fill_(torch.nan)
    call(0)
    latent, rope = work.layout.split(work.q[0])
    exact, exact_lse = verify_attention_reference(
        latent, rope, work.pool, work.batches[0], sm_scale=work.sm_scale, layout=work.layout)
    error = relative_error(work.out, exact)
    return error if work.lse.isnan().all() else max(error, relative_error(work.lse, exact_lse))


def time_graph(work: Workload, call: Callable[[int], None], *, seconds: float = 0.25
               ) -> np.ndarray:
    """Microseconds a call: a CUDA graph of one call a region, replayed and timed with events.

    Returns:
        One figure a replay, each the mean over the regions.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for region in range(min(3, work.regions)):
            call(region)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for region in range(work.regions):
            call(region)

    def replays(count: int) -> np.ndarray:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        marks[0].record()
        for mark in marks[1:]:
            graph.replay()
            mark.record()
        torch.cuda.synchronize()
        return np.array([a.elapsed_time(b) for a, b in zip(marks, marks[1:], strict=False)])

    probe = replays(3)[1:].mean() / 1e3
    return 1e3 * replays(int(np.clip(seconds / probe, 10, 400)))[1:] / work.regions


def measure(shapes: Sequence[Shape], providers: dict[str, Provider], *, seconds: float = 0.25,
            seed: int = 0) -> pd.DataFrame:
    """Measures every provider on every shape.

    Returns:
        One row each: the shape, ``provider``, ``latency_us`` (median) with ``p10_us`` and
        ``p90_us``, ``error`` (relative, against the oracle), ``tflops`` and ``gbps`` (counted
        by :mod:`mla_kernels.device`), ``regions``, ``note`` (why there is no time), and
        :func:`mla_kernels.device.provenance`.
    """
    records = []
    for shape in tqdm(shapes, leave=False, unit="shape"):
        work = make_workload(shape, seed=seed)
        counts = (shape.batch_size, shape.num_heads, shape.num_nodes, shape.context)
        for name, prepare in providers.items():
            record = dataclasses.asdict(shape) | {"provider": name, "regions": work.regions}
            try:
                call = prepare(work)
                record["error"] = error_of(work, call)
                times = time_graph(work, call, seconds=seconds)
            except Unavailable as reason:
                record["note"] = str(reason)
            else:
                latency = float(np.median(times))
                record |= {
                    "latency_us": latency, "p10_us": float(np.quantile(times, 0.1)),
                    "p90_us": float(np.quantile(times, 0.9)),
                    "tflops": attention_flops(*counts) / latency / 1e6,
                    "gbps": attention_bytes(*counts) / latency / 1e3,
                }
            records.append(record)
        del work
        torch.cuda.empty_cache()
    # Last, when all that was measured has been imported and has a version.
    return pd.DataFrame.from_records(records).assign(**provenance())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m mla_kernels.bench",
        description="Time verify attention on the local GPU, cold, by CUDA graph replay.")
    parser.add_argument("--preset", action="append", choices=sorted(PRESETS))
    parser.add_argument("--shape", action="append", help="B,H,T,L; repeatable")
    parser.add_argument("--provider", action="append", choices=sorted(PROVIDERS))
    parser.add_argument("--seconds", type=float, default=0.25, help="replay time a measurement")
    parser.add_argument("--out", type=Path, help="CSV file to write")
    args = parser.parse_args(argv)
    if local_gpu() is None:
        print("error: no CUDA device here; recorded measurements are in data/measurements",
              file=sys.stderr)
        return 2
    shapes = [Shape.parse(s) for s in args.shape or []]
    for preset in args.preset or ([] if shapes else ["spine"]):
        shapes += PRESETS[preset]
    names = args.provider or list(PROVIDERS)
    frame = measure(list(dict.fromkeys(shapes)), {n: PROVIDERS[n] for n in names},
                    seconds=args.seconds)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        frame.to_csv(args.out, index=False, float_format="%.6g")
    columns = ["batch_size", "num_heads", "num_nodes", "context", "provider", "latency_us",
               "p10_us", "p90_us", "error", "tflops", "gbps"]
    with pd.option_context("display.width", 160, "display.max_rows", None):
        print(frame[columns].round({"latency_us": 1, "p10_us": 1, "p90_us": 1, "tflops": 0,
                                    "gbps": 0}).to_string(index=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
