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

#: Columns that name a shape; see :class:`mla_kernels.workload.Shape`.
SHAPE = ["batch_size", "num_heads", "num_nodes", "context"]

#: Columns that name a row: the shape, the kind of tree (:data:`mla_kernels.workload.TREES`), and
#: what was measured.
KEY = [*SHAPE, "tree", "provider"]

#: Columns with numbers that a measured row must have, in microseconds where so named.
NUMBERS = ["latency_us", "p10_us", "p90_us", "error", "tflops", "gbps", "regions"]

#: Rates of the card, measured in the same run, and the share of the time taken that they would
#: allow.
CEILINGS = ["ceiling_tflops", "ceiling_gbps", "ceiling_percent"]

#: Columns that say where a row comes from.
ORIGIN = ["gpu", "arch", "sms", "driver", "cuda", "torch", "commit", "date"]

#: What became of a row: timed; cannot run here or on this shape; raised an error; gave a wrong
#: result, and so was not timed. ``note`` says why for all but the first.
STATUS = ("ok", "unavailable", "failed", "wrong")

#: All that a row says besides its origin.
COLUMNS = [*KEY, "version", "status", "note", "regions", "replays", "error", "latency_us", "p10_us",
           "p90_us", "tflops", "gbps", *CEILINGS]

#: The largest error that a timed row may have: the time of a wrong result is none.
MAX_ERROR = 1e-2

#: What the providers are called in figures and tables.
NAMES = {
    "cuda": "our CUDA kernel",
    "triton_split": "our Triton, split-KV",
    "triton_serial": "our Triton, serial per head",
    "sglang_extend": "SGLang's Triton extend",
}

#: The same for those that the figures of trees leave out.
PEER_NAMES = {
    "sglang_extend_sm12x": "SGLang's Triton extend, sm_12x blocks",
    "sglang_verify": "SGLang's Triton verify, chains only",
    "sglang_decode": "SGLang's Triton decode, one token",
    "flashinfer_fa2": "FlashInfer MLA FA2, chains only",
    "flashinfer_fa3": "FlashInfer MLA FA3 (wgmma), chains only",
    "flashmla": "FlashMLA (wgmma), chains only",
    "prefix_suffix_fa2": "FlashInfer FA2 prefix + SGLang suffix, merged",
    "prefix_suffix_fa3": "FlashInfer FA3 (wgmma) prefix + SGLang suffix, merged",
    "sdpa": "PyTorch SDPA, gathered",
    "flex_attention": "PyTorch FlexAttention, gathered",
}

#: Kernels without a tree mask: their times are of chains.
CHAINS_ONLY = ("sglang_verify", "sglang_decode", "flashinfer_fa2", "flashinfer_fa3", "flashmla")

#: Others than ours that verify trees.
TREE_RIVALS = ("sglang_extend", "sglang_extend_sm12x", "prefix_suffix_fa2", "prefix_suffix_fa3",
               "sdpa")

#: Those that need wgmma, which sm_120 does not have.
WGMMA = ("flashinfer_fa3", "flashmla", "prefix_suffix_fa3")

#: The rivals that sm_120 can run.
MMA_RIVALS = tuple(name for name in TREE_RIVALS if name not in WGMMA)

#: Times of the kernel's versions on one H200, of single short runs; notes/kernel_versions.md tells
#: their story. ``kept``: later versions were built on it.
VERSIONS = FOLDER.parent / "kernel_versions.csv"


def versions() -> pd.DataFrame:
    """:data:`VERSIONS` as a table: version, change, kept, the shape's columns, latency_us."""
    return pd.read_csv(VERSIONS)


def files(folder: Path = FOLDER) -> list[Path]:
    return sorted(folder.glob("*.csv"))


def load(path: Path | str) -> pd.DataFrame:
    """One run's file, completed and validated, rows of all kinds of tree.

    Raises:
        FileNotFoundError: no such file.
        ValueError: see :func:`validate`.
    """
    # A commit of digits alone must stay text.
    frame = complete(pd.read_csv(path, dtype={"commit": str, "date": str, "driver": str,
                                              "cuda": str}))
    validate(frame, str(path))
    return frame


def complete(frame: pd.DataFrame) -> pd.DataFrame:
    """A run with all of :data:`COLUMNS`; those of before there were chains and states get them.
    """
    frame = frame.copy()
    if "tree" not in frame:
        frame["tree"] = "3-ary"
    if "status" not in frame and "latency_us" in frame:
        frame["status"] = np.where(frame["latency_us"].notna(), "ok", "unavailable")
    for column in ("version", "note", "replays", *CEILINGS):
        if column not in frame:
            frame[column] = None
    return frame


def of_tree(frame: pd.DataFrame, tree: str = "3-ary") -> pd.DataFrame:
    """The rows measured on one kind of tree."""
    return frame[frame["tree"] == tree] if "tree" in frame else frame


def latest(gpu: str | None = None, folder: Path = FOLDER, *,
           tree: str | None = "3-ary") -> pd.DataFrame:
    """The newest run, by file name (they begin with the date), of a GPU if named: its rows of
    one kind of tree, or of all for None.

    Raises:
        FileNotFoundError: there is none.
    """
    for path in reversed(files(folder)):
        frame = load(path)
        if gpu is None or gpu in str(frame["gpu"].iloc[0]):
            return frame if tree is None else of_tree(frame, tree).reset_index(drop=True)
    raise FileNotFoundError(f"no measurements of {gpu or 'any GPU'} in {folder.name}/; make them "
                            "with `python -m mla_kernels.bench --out FILE`")


def validate(frame: pd.DataFrame, name: str = "measurements") -> None:
    """Checks a run.

    Raises:
        ValueError: columns missing; a key (:data:`KEY`) twice; an unknown status; a time without
            the status ``ok`` or the reverse; a row that has neither a time nor a note why not;
            times that are not positive or quantiles out of order; a timed row with an error
            above :data:`MAX_ERROR`, or a row called wrong without one; rates beside no time; a
            time on a tree of a kernel that has no tree mask (:data:`CHAINS_ONLY`), or of a peer
            without its version; throughputs and shares of
            the ceiling that do not follow from the shape and the time; origins missing or mixed.
    """
    def fail(what: str) -> None:
        raise ValueError(f"{name}: {what}")

    missing = [c for c in [*SHAPE, "provider", *NUMBERS, *ORIGIN] if c not in frame]
    if missing:
        fail(f"columns missing: {', '.join(missing)}")
    frame = complete(frame)
    twice = frame.duplicated(KEY)
    if twice.any():
        fail(f"measured twice: {frame.loc[twice, KEY].iloc[0].to_dict()}")
    timed = frame["latency_us"].notna()
    if not (timed | frame["note"].notna()).all():
        fail("a row has neither a time nor a note")
    if not frame["status"].isin(STATUS).all():
        fail(f"a status must be one of {', '.join(STATUS)}; got {frame['status'].unique()}")
    if ((frame["status"] == "ok") != timed).any():
        fail("a row must have a time if and only if its status is ok")
    if not (frame.loc[frame["status"] == "wrong", "error"] > MAX_ERROR).all():
        fail(f"a row called wrong must have an error above {MAX_ERROR:g}")
    rates = ["p10_us", "p90_us", "tflops", "gbps", "ceiling_percent"]
    if frame.loc[~timed, rates].notna().any(axis=None):
        fail("a row without a time has rates")
    rows = frame[timed]
    maskless = rows["provider"].isin(CHAINS_ONLY) & (rows["tree"] != "chain")
    if maskless.any():
        fail(f"{rows.loc[maskless, 'provider'].iloc[0]} has no tree mask, and has a time on a tree")
    nameless = rows["provider"].isin(PEER_NAMES) & rows["version"].isna()
    if nameless.any():
        fail(f"{rows.loc[nameless, 'provider'].iloc[0]} has a time and no version")
    if rows[NUMBERS].isna().any(axis=None):
        fail("a timed row lacks a number")
    if not ((rows["p10_us"] > 0) & (rows["p10_us"] <= rows["latency_us"])
            & (rows["latency_us"] <= rows["p90_us"])).all():
        fail("times must be positive and p10 <= median <= p90")
    if not rows["error"].between(0, MAX_ERROR).all():
        fail(f"an error is out of 0 .. {MAX_ERROR:g}: {rows['error'].max()}")
    wanted = {"tflops": [], "gbps": [], "ceiling_percent": []}
    for *shape, time, tensor, copy in rows[
            [*SHAPE, "latency_us", *CEILINGS[:2]]].itertuples(index=False):
        flops, moved = attention_flops(*shape), attention_bytes(*shape)
        wanted["tflops"].append(flops / time / 1e6)
        wanted["gbps"].append(moved / time / 1e3)
        wanted["ceiling_percent"].append(
            100 * max(flops / tensor / 1e6, moved / copy / 1e3) / time
            if tensor == tensor and tensor is not None else np.nan)
    for column, numbers in wanted.items():
        if not np.allclose(rows[column].astype(float), numbers, rtol=1e-3, equal_nan=True):
            fail(f"{column} does not follow from the shape and the time")
    for column in ORIGIN:
        if frame[column].isna().any() or frame[column].nunique() != 1:
            fail(f"{column} must be one value in all rows; got {frame[column].unique().tolist()}")


def speedups(frame: pd.DataFrame, provider: str = "cuda", baseline: str = "sglang_extend",
             tree: str = "3-ary") -> pd.DataFrame:
    """How many times faster ``provider`` is than ``baseline``, on one kind of tree.

    Returns:
        A table with the shape's columns, ``latency_us``, ``baseline_us`` and ``speedup``.

    Raises:
        ValueError: a provider that the run does not have.
    """
    frame = of_tree(frame, tree)
    known = frame["provider"].unique().tolist()
    for name, value in (("provider", provider), ("baseline", baseline)):
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}; got {value!r}")
    wide = frame.pivot(index=SHAPE, columns="provider", values="latency_us")
    wide = wide[[provider, baseline]].dropna().reset_index()
    wide.columns = [*SHAPE, "latency_us", "baseline_us"]
    wide["speedup"] = wide["baseline_us"] / wide["latency_us"]
    return wide


def best_of_others(frame: pd.DataFrame, rivals: Sequence[str] = TREE_RIVALS) -> pd.Series:
    """The time of the fastest of ``rivals`` on a tree as a multiple of our CUDA kernel's, by
    shape, for shapes where both were timed: above 1 ours is faster."""
    rows = of_tree(frame)
    wide = rows[rows["status"] == "ok"].pivot(index=SHAPE, columns="provider",
                                              values="latency_us")
    return (wide.reindex(columns=list(rivals)).min(axis=1) / wide["cuda"]).dropna()


def grid_sentence(frame: pd.DataFrame, shapes: Sequence[Sequence[int]]) -> str:
    """How much a run holds, and on how many of some shapes ours is the fastest for trees; for the
    README.

    Args:
        frame: a run with all kinds of tree.
    """
    ratios = [best_of_others(frame, r).reindex([tuple(s) for s in shapes]).dropna()
              for r in (TREE_RIVALS, MMA_RIVALS)]
    first, alone = ((r > 1).sum() for r in ratios)
    timed = (frame["status"] == "ok").sum()
    return (f"The run has {len(frame.groupby(SHAPE)):,} shapes and {timed:,} times by "
            f"{frame['provider'].nunique()} providers; {len(frame) - timed:,} rows say why there "
            f"is none. Of the {len(ratios[0])} shapes of the models' presets our CUDA kernel is "
            f"the fastest for trees on {first}; without FA3, which sm_120 cannot run, on {alone} "
            f"of {len(ratios[1])}.")


def sweep(frame: pd.DataFrame, along: str, provider: str, *, tree: str = "3-ary",
          **fixed: int) -> pd.DataFrame:
    """The rows of one provider along one column of the shape, the others fixed; sorted."""
    frame = of_tree(frame, tree)
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
    wide = of_tree(frame).pivot(index=SHAPE, columns="provider", values="latency_us")
    lines = ["| requests, heads, nodes, context | " + " | ".join(NAMES[p] for p in providers)
             + " | speed-up over the last |",
             "|---|" + "---:|" * (len(providers) + 1)]
    for shape in shapes:
        times = [wide.loc[tuple(shape), p] for p in providers]
        cells = [f"{t:,.0f}" if t >= 100 else f"{t:.1f}" for t in times]
        lines.append(f"| {', '.join(f'{n:,}' for n in shape)} | " + " | ".join(cells)
                     + f" | {times[-1] / times[0]:.1f}x |")
    return "\n".join(lines)


#: The README's columns beside ours: provider and the kind of draft that it takes.
PEER_COLUMNS = (("cuda", "3-ary"), ("prefix_suffix_fa2", "3-ary"), ("prefix_suffix_fa3", "3-ary"),
                ("cuda", "chain"), ("flashinfer_fa2", "chain"), ("flashinfer_fa3", "chain"),
                ("flashmla", "chain"))


def markdown_peers(frame: pd.DataFrame, shapes: Sequence[Sequence[int]]) -> str:
    """A table of median microseconds beside the kernels that take chains only, for the README;
    the fastest of each kind of draft in bold.

    Args:
        frame: a run with all kinds of tree.
    """
    timed = frame[frame["status"] == "ok"].set_index([*SHAPE, "tree", "provider"])["latency_us"]
    names = NAMES | PEER_NAMES
    heads = [f"{names[p].removesuffix(', chains only')}, {'tree' if t == '3-ary' else t}"
             for p, t in PEER_COLUMNS]
    lines = ["| requests, heads, nodes, context | " + " | ".join(heads) + " |",
             "|---|" + "---:|" * len(heads)]
    for shape in shapes:
        times = [timed.get((*shape, t, p)) for p, t in PEER_COLUMNS]
        cells = []
        for (_, tree), time in zip(PEER_COLUMNS, times, strict=True):
            text = "–" if time is None else f"{time:,.0f}" if time >= 100 else f"{time:.1f}"
            rivals = [x for (_, t), x in zip(PEER_COLUMNS, times, strict=True)
                      if t == tree and x is not None]
            cells.append(f"**{text}**" if time is not None and time == min(rivals) else text)
        lines.append(f"| {', '.join(f'{n:,}' for n in shape)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
