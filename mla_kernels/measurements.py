"""Recorded measurements: reading ``data/measurements``, and what a file there must hold.

One tidy CSV file a run, as ``python -m mla_kernels.bench --out`` writes it: one row for each
shape and provider, with where and with what it was measured in the row itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from .device import attention_bytes, attention_flops

#: The repository's folder of measurements. The project is installed in place, so it lies
#: beside the package.
FOLDER = Path(__file__).parent.parent / "data" / "measurements"

#: Columns that name a shape; see :class:`mla_kernels.bench.Shape`.
SHAPE = ["batch_size", "num_heads", "num_nodes", "context"]

#: Columns with numbers that a measured row must have, in microseconds where so named.
NUMBERS = ["latency_us", "p10_us", "p90_us", "error", "tflops", "gbps", "regions"]

#: Columns that say where a row comes from.
ORIGIN = ["gpu", "arch", "sms", "driver", "cuda", "torch", "commit", "date"]

#: What the providers are called in figures and tables.
NAMES = {
    "cuda": "our CUDA kernel",
    "triton_split": "our Triton, split-KV",
    "triton_serial": "our Triton, serial per head",
    "sglang_extend": "SGLang's Triton extend",
}


#: Times of the kernel's versions on one H200, of single short runs; notes/kernel_versions.md tells
#: their story. ``kept``: later versions were built on it.
VERSIONS = FOLDER.parent / "kernel_versions.csv"


def versions() -> pd.DataFrame:
    """:data:`VERSIONS` as a table: version, change, kept, the shape's columns, latency_us."""
    return pd.read_csv(VERSIONS)


def files(folder: Path = FOLDER) -> list[Path]:
    return sorted(folder.glob("*.csv"))


def load(path: Path | str) -> pd.DataFrame:
    """One run's file, validated.

    Raises:
        FileNotFoundError: no such file.
        ValueError: see :func:`validate`.
    """
    # A commit of digits alone must stay text.
    frame = pd.read_csv(path, dtype={"commit": str, "date": str, "driver": str, "cuda": str})
    validate(frame, str(path))
    return frame


def latest(gpu: str | None = None, folder: Path = FOLDER) -> pd.DataFrame:
    """The newest run, by file name (they begin with the date), of a GPU if named.

    Raises:
        FileNotFoundError: there is none.
    """
    for path in reversed(files(folder)):
        frame = load(path)
        if gpu is None or gpu in str(frame["gpu"].iloc[0]):
            return frame
    raise FileNotFoundError(f"no measurements of {gpu or 'any GPU'} in {folder.name}/; make them "
                            "with `python -m mla_kernels.bench --out FILE`")


def validate(frame: pd.DataFrame, name: str = "measurements") -> None:
    """Checks a run.

    Raises:
        ValueError: columns missing; a shape and provider twice; a row that has neither a time
            nor a note why not; times that are not positive or quantiles out of order; an
            error above 1e-2 (the measurement of a wrong result is none); throughputs that do
            not follow from the shape and the time; origins missing or mixed.
    """
    def fail(what: str) -> None:
        raise ValueError(f"{name}: {what}")

    missing = [c for c in [*SHAPE, "provider", *NUMBERS, *ORIGIN] if c not in frame]
    if missing:
        fail(f"columns missing: {', '.join(missing)}")
    twice = frame.duplicated([*SHAPE, "provider"])
    if twice.any():
        fail(f"measured twice: {frame.loc[twice, [*SHAPE, 'provider']].iloc[0].to_dict()}")
    timed = frame["latency_us"].notna()
    noted = frame["note"].notna() if "note" in frame else pd.Series(False, index=frame.index)
    if not (timed | noted).all():
        fail("a row has neither a time nor a note")
    rows = frame[timed]
    if rows[NUMBERS].isna().any(axis=None):
        fail("a timed row lacks a number")
    if not ((rows["p10_us"] > 0) & (rows["p10_us"] <= rows["latency_us"])
            & (rows["latency_us"] <= rows["p90_us"])).all():
        fail("times must be positive and p10 <= median <= p90")
    if not rows["error"].between(0, 1e-2).all():
        fail(f"an error is out of 0 .. 1e-2: {rows['error'].max()}")
    for column, count, per in (("tflops", attention_flops, 1e6), ("gbps", attention_bytes, 1e3)):
        wanted = [count(*shape) / time / per
                  for *shape, time in rows[[*SHAPE, "latency_us"]].itertuples(index=False)]
        if not np.allclose(rows[column], wanted, rtol=1e-3):
            fail(f"{column} does not follow from the shape and the time")
    for column in ORIGIN:
        if frame[column].isna().any() or frame[column].nunique() != 1:
            fail(f"{column} must be one value in all rows; got {frame[column].unique().tolist()}")


def speedups(frame: pd.DataFrame, provider: str = "cuda",
             baseline: str = "triton_serial") -> pd.DataFrame:
    """How many times faster ``provider`` is than ``baseline``.

    Returns:
        A table with the shape's columns, ``latency_us``, ``baseline_us`` and ``speedup``.

    Raises:
        ValueError: a provider that the run does not have.
    """
    known = frame["provider"].unique().tolist()
    for name, value in (("provider", provider), ("baseline", baseline)):
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}; got {value!r}")
    wide = frame.pivot(index=SHAPE, columns="provider", values="latency_us")
    wide = wide[[provider, baseline]].dropna().reset_index()
    wide.columns = [*SHAPE, "latency_us", "baseline_us"]
    wide["speedup"] = wide["baseline_us"] / wide["latency_us"]
    return wide


def sweep(frame: pd.DataFrame, along: str, provider: str, **fixed: int) -> pd.DataFrame:
    """The rows of one provider along one column of the shape, the others fixed; sorted."""
    rows = frame[(frame["provider"] == provider) & frame["latency_us"].notna()]
    for column, value in fixed.items():
        rows = rows[rows[column] == value]
    return rows.sort_values(along)


def origin(frame: pd.DataFrame) -> str:
    """One line that says where a run comes from, for captions."""
    row = frame.iloc[0]
    return (f"Measured on {row['gpu']} ({row['arch']}), {row['date']}, driver {row['driver']}, "
            f"CUDA {row['cuda']}, torch {row['torch'].split('+')[0]}, commit {row['commit']}")


def markdown_table(frame: pd.DataFrame, shapes: Sequence[Sequence[int]],
                   providers: Sequence[str]) -> str:
    """A table of median microseconds for the README: shapes down, providers across."""
    wide = frame.pivot(index=SHAPE, columns="provider", values="latency_us")
    lines = ["| requests, heads, nodes, context | " + " | ".join(NAMES[p] for p in providers)
             + " | speed-up over the last |",
             "|---|" + "---:|" * (len(providers) + 1)]
    for shape in shapes:
        times = [wide.loc[tuple(shape), p] for p in providers]
        cells = [f"{t:,.0f}" if t >= 100 else f"{t:.1f}" for t in times]
        lines.append(f"| {', '.join(f'{n:,}' for n in shape)} | " + " | ".join(cells)
                     + f" | {times[-1] / times[0]:.1f}x |")
    return "\n".join(lines)
