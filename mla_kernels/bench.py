"""Timing verify calls as an engine would meet them, and recording what came out.

Calls of a replayed CUDA graph walk the regions of a :class:`mla_kernels.workload.Workload`, so
that the cache is cold. Each provider's result is compared with the float64 oracle before it is
timed. ``python -m mla_kernels.bench`` runs presets on the local GPU and writes one tidy CSV
file, row by row: started again with the same file, it goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from tqdm.auto import tqdm

from . import build, cuda, measurements
from .attention import verify_attention, workspace_bytes
from .device import Ceiling, attention_bytes, attention_flops, local_gpu, provenance
from .graphs import capture
from .peers import PEERS, Call, Prepare, Provider, Unavailable
from .reference import relative_error
from .workload import PRESETS, TREES, Shape, Workload, chosen, make_workload

__all__ = ["DEFAULT", "PRESETS", "PROVIDERS", "ContextLost", "Shape", "Workload", "cuda_variant",
           "error_of", "make_workload", "measure", "time_graph"]


#: Replays that are timed of a call however long it takes. They differ by 0.1 % where calls take
#: milliseconds.
FEWEST = 5


class ContextLost(RuntimeError):
    """A kernel broke the CUDA context: nothing more can run in this process."""


# -- our providers ------------------------------------------------------------------------


def _through_verify_attention(backend: str) -> Prepare:
    def prepare(work: Workload) -> Call:
        space = torch.empty(
            workspace_bytes(work.batches[0], work.shape.num_heads, backend),
            dtype=torch.uint8, device=work.pool.device)

        def call(region: int) -> None:
            verify_attention(work.q[region], work.pool, work.batches[region],
                             sm_scale=work.sm_scale, layout=work.layout, out=work.out,
                             lse=work.lse, workspace=space, backend=backend)

        return call

    return prepare


def cuda_variant(**overrides) -> Prepare:
    """Our CUDA kernel with parts of its launch plan set by hand (``rows``, ``groups``)."""
    def prepare(work: Workload) -> Call:
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


def _triton_serial(work: Workload) -> Call:
    from .triton import verify_attention_triton

    def call(region: int) -> None:
        latent, rope = work.layout.split(work.q[region])
        verify_attention_triton(
            latent, rope, work.pool, None, work.batches[region], layout=work.layout,
            sm_scale=work.sm_scale, k_scale=1.0, v_scale=1.0, logit_cap=0.0, out=work.out,
            lse=work.lse, kernel="serial")

    return call


#: Providers by the name that appears in recorded data.
PROVIDERS: dict[str, Provider] = {
    "cuda": Provider(_through_verify_attention("cuda"), ("torch",), tuple(TREES), build.load),
    "triton_split": Provider(_through_verify_attention("triton"), ("triton",), tuple(TREES)),
    "triton_serial": Provider(_triton_serial, ("triton",)),
    **PEERS,
}

#: What is measured when nothing else is asked for. FlexAttention is compiled anew for most
#: shapes, which takes longer than everything else together.
DEFAULT = tuple(name for name in PROVIDERS if name != "flex_attention")


# -- one measurement ----------------------------------------------------------------------


def error_of(work: Workload, call: Call) -> float:
    """Relative error of region 0 against the float64 oracle, from outputs that held NaN; of the
    log-sum-exp too, where the provider writes it."""
    work.out.fill_(torch.nan)
    work.lse.fill_(torch.nan)
    out = call(0)
    exact, exact_lse = work.exact
    error = relative_error(work.out if out is None else out, exact)
    return error if work.lse.isnan().all() else max(error, relative_error(work.lse, exact_lse))


def time_graph(work: Workload, call: Call, *, seconds: float = 0.25) -> np.ndarray:
    """Microseconds a call: a CUDA graph of one call a region, replayed and timed with events.

    Returns:
        One figure a replay, each the mean over the regions: from :data:`FEWEST` to 400 of them.
    """
    def calls(regions: int) -> None:
        for region in range(regions):
            call(region)

    graph = capture(lambda: calls(work.regions), warm_up=lambda: calls(min(3, work.regions)))

    def replays(count: int) -> np.ndarray:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        marks[0].record()
        for mark in marks[1:]:
            graph.replay()
            mark.record()
        torch.cuda.synchronize()
        return np.array([a.elapsed_time(b) for a, b in zip(marks, marks[1:], strict=False)])

    probe = replays(2)[1] / 1e3
    return 1e3 * replays(int(np.clip(seconds / probe, FEWEST, 400)) + 1)[1:] / work.regions


def _reason(error: Exception) -> str:
    """An exception on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]


def _context_lost() -> bool:
    if not torch.cuda.is_available():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def _record(work: Workload, provider: Provider, seconds: float, ceiling: Ceiling | None
            ) -> dict[str, object]:
    """Checks and times one provider; a failure of any kind is part of the record."""
    record: dict[str, object] = {"regions": work.regions}
    try:
        call = provider.prepare(work)
        record["error"] = error_of(work, call)
        if record["error"] > measurements.MAX_ERROR:
            return record | {"status": "wrong", "note": "not timed: the result is wrong"}
        times = time_graph(work, call, seconds=seconds)
    except Unavailable as reason:
        return record | {"status": "unavailable", "note": str(reason)}
    except Exception as error:
        # Triton's name for more shared memory or registers than there are; of device memory.
        if (type(error).__name__ == "OutOfResources"
                or isinstance(error, torch.OutOfMemoryError)):
            return record | {"status": "unavailable", "note": _reason(error)}
        tqdm.write("".join(traceback.format_exception(error)[-4:]), file=sys.stderr)
        return record | {"status": "failed", "note": _reason(error)}
    counts = dataclasses.astuple(work.shape)
    latency = float(np.median(times))
    flops, moved = attention_flops(*counts), attention_bytes(*counts)
    record |= {
        "status": "ok", "note": getattr(call, "note", None), "replays": len(times),
        "latency_us": latency,
        "p10_us": float(np.quantile(times, 0.1)), "p90_us": float(np.quantile(times, 0.9)),
        "tflops": flops / latency / 1e6, "gbps": moved / latency / 1e3,
    }
    if ceiling:
        record |= {"ceiling_tflops": ceiling.tensor / 1e12,
                   "ceiling_gbps": ceiling.bandwidth / 1e9,
                   "ceiling_percent": 1e8 * ceiling.floor(flops, moved) / latency}
    return record


# -- a run --------------------------------------------------------------------------------


def _plan(shapes: Sequence[Shape], providers: dict[str, Provider], done: set[tuple]
          ) -> Iterator[tuple[Shape, str, list[str]]]:
    """What is still to be measured: shape, tree, names of providers."""
    for shape in shapes:
        for tree in TREES:
            names = [name for name, p in providers.items() if tree in p.trees or tree != "chain"]
            names = [n for n in names if (*dataclasses.astuple(shape), tree, n) not in done]
            if names:
                yield shape, tree, names


def measure(shapes: Sequence[Shape], providers: dict[str, Provider], *, seconds: float = 0.25,
            seed: int = 0, ceiling: Ceiling | None = None, earlier: pd.DataFrame | None = None,
            save: Callable[[pd.DataFrame], None] = lambda frame: None,
            **origin: object) -> pd.DataFrame:
    """Measures providers on shapes, each on the kinds of tree that it is meant for.

    Args:
        ceiling: rates of this GPU, for ``ceiling_percent``.
        earlier: rows of the same run, which stay and are not measured again.
        save: is given all rows after each shape and kind of tree.
        origin: columns that replace those of :func:`mla_kernels.device.provenance` or are added.

    Returns:
        One row each: the shape, ``tree``, ``provider``, its ``version``, ``status`` (``ok``,
        ``unavailable``, ``failed``, ``wrong``) and, where that is not ``ok``, the reason in
        ``note`` (else what the provider had to choose); ``latency_us`` (median) with ``p10_us``
        and ``p90_us``, ``error`` (relative, against the oracle), ``tflops`` and ``gbps`` (counted
        by :mod:`mla_kernels.device`), ``regions``, ``replays`` (how many were timed), the ceilings
        and ``ceiling_percent`` (the time that they allow over the time taken), and where it comes
        from. A provider without a tree mask has a row that says so on trees, and its times on
        chains.

    Raises:
        ContextLost: an illegal access or the like in a provider's kernel. Its row is saved.
    """
    rows = [] if earlier is None else earlier.to_dict("records")
    done = {tuple(row[c] for c in measurements.KEY) for row in rows}
    todo = list(_plan(shapes, providers, done))
    where = {k: v for k, v in provenance().items() if k != "sglang"} | origin
    empty = dict.fromkeys(measurements.COLUMNS)

    def add(shape: Shape, tree: str, name: str, record: dict[str, object]) -> None:
        key = {**dataclasses.asdict(shape), "tree": tree, "provider": name}
        version = providers[name].version
        rows.append(empty | key | {"version": version} | record | where)
        if record["status"] != "ok":
            tqdm.write(f"{shape}, {tree}: {name} {record['status']}: {record['note']}",
                       file=sys.stderr)

    def save_all() -> None:
        save(pd.DataFrame.from_records(rows))

    with tqdm(total=sum(len(names) for *_, names in todo), leave=False, unit="row") as bar:
        for shape, tree, names in todo:
            bar.set_description(f"{shape}, {tree}")
            able = [n for n in names if tree in providers[n].trees]
            for name in names:
                if name not in able:
                    add(shape, tree, name, {
                        "status": "unavailable",
                        "note": "it has no tree mask: timed on a chain of as many nodes"})
            bar.update(len(names) - len(able))
            if not able:
                save_all()
                continue
            try:
                work = make_workload(shape, tree=tree, seed=seed)
            except torch.OutOfMemoryError as error:
                for name in able:
                    add(shape, tree, name, {"status": "unavailable", "note": _reason(error)})
                bar.update(len(able))
                save_all()
                continue
            for name in able:
                add(shape, tree, name, _record(work, providers[name], seconds, ceiling))
                bar.update()
                if rows[-1]["status"] == "failed" and _context_lost():
                    save_all()
                    raise ContextLost(f"{name} broke the CUDA context on {shape}, {tree}: "
                                      f"{rows[-1]['note']}")
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
            del work
            save_all()
    return pd.DataFrame.from_records(rows)


def build_all(providers: Sequence[Provider]) -> None:
    """Compiles what providers compile, at the same time. What fails here fails again, with its
    reason, where it is measured."""
    tasks = [p.build for p in providers if p.build]
    with concurrent.futures.ThreadPoolExecutor(max(1, len(tasks))) as pool:
        concurrent.futures.wait([pool.submit(task) for task in tasks])


# -- the command --------------------------------------------------------------------------


def _write(path: Path, frame: pd.DataFrame) -> None:
    """Replaces the file in one step, so that it is whole whenever the run is stopped."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    frame.to_csv(part, index=False, float_format="%.6g")
    os.replace(part, path)


def _earlier(path: Path, retry: bool) -> pd.DataFrame | None:
    """The rows of a run that was stopped.

    Raises:
        ValueError: the file is another run's: of another GPU, commit or version.
    """
    if not path.exists():
        return None
    frame = measurements.load(path)
    here = provenance()
    for column in measurements.ORIGIN:
        found, now = frame[column].iloc[0], here[column]
        if column != "date" and str(found) != str(now):
            raise ValueError(f"{path} is of {column} {found}, and this is {now}: name another file")
    return frame[frame["status"] == "ok"] if retry else frame


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m mla_kernels.bench",
        description="Time verify attention on the local GPU, cold, by CUDA graph replay.")
    parser.add_argument("--preset", action="append", choices=sorted(PRESETS))
    parser.add_argument("--shape", action="append", help="B,H,T,L; repeatable")
    parser.add_argument("--provider", action="append", choices=sorted(PROVIDERS),
                        help=f"repeatable; default: {', '.join(DEFAULT)}")
    parser.add_argument("--seconds", type=float, default=0.25, help="replay time a measurement")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path,
                        help="CSV file to write; an earlier part of the same run is kept")
    parser.add_argument("--retry", action="store_true",
                        help="measure again what is in the file without a time")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    if local_gpu() is None:
        print("error: no CUDA device here; recorded measurements are in data/measurements",
              file=sys.stderr)
        return 2
    from . import ceilings

    shapes = chosen(args.shape, args.preset)
    providers = {name: PROVIDERS[name] for name in args.provider or DEFAULT}
    try:
        earlier = _earlier(args.out, args.retry) if args.out else None
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    origin = {"arguments": " ".join(sys.argv[1:] if argv is None else argv)}
    if earlier is not None and len(earlier):
        origin["date"] = earlier["date"].iloc[0]
    build_all(list(providers.values()))
    ceiling = ceilings.measure()
    print(f"ceilings: copy {ceiling.bandwidth / 1e12:.2f} TB/s, mma.sync "
          f"{ceiling.tensor / 1e12:.0f} TFLOP/s", file=sys.stderr)
    try:
        frame = measure(
            shapes, providers, seconds=args.seconds, seed=args.seed,
            ceiling=ceiling, earlier=earlier,
            save=functools.partial(_write, args.out) if args.out else lambda frame: None, **origin)
    except ContextLost as error:
        print(f"error: {error}", file=sys.stderr)
        if args.out:
            print("the same command again goes on behind it", file=sys.stderr)
        return 3
    columns = [*measurements.KEY, "status", "latency_us", "p10_us", "p90_us", "error", "tflops",
               "gbps", "ceiling_percent"]
    with pd.option_context("display.width", 200, "display.max_rows", None):
        print(frame[columns].astype({c: float for c in columns[7:]}).round(
            {"latency_us": 1, "p10_us": 1, "p90_us": 1, "error": 5, "tflops": 0, "gbps": 0,
             "ceiling_percent": 1}).to_string(index=False))
    measurements.validate(frame, "this run")
    return 0


if __name__ == "__main__":
    sys.exit(main())
