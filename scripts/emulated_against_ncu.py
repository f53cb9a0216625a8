"""Puts the emulator's counts beside those of Nsight Compute.

    python scripts/emulated_against_ncu.py --out data/emulated/h200_ncu.json

Needs no GPU: the profiles are the recorded ones of ``scripts/profile_rows.py``, the emulator runs
the same shapes with the launch plans of the profiled GPU. Of the verify kernel alone; takes about
a minute.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from mla_kernels import records, traffic
from mla_kernels.device import provenance
from mla_kernels.workload import Shape

ROOT = Path(__file__).parent.parent
PROFILES = "data/profiles/h200.json"

SHAPES = ("8,8,1,16384", "8,8,8,16384", "1,12,8,16384", "1,8,8,16384")


def compared(shape: str, measured: dict, sms: int) -> dict[str, object]:
    found = traffic.count(Shape.parse(shape), sms)
    verify = found.sites[found.sites["place"].str.startswith("tree_verify")]

    def total(column: str, *what: str) -> int:
        return int(verify.loc[verify["what"].isin(what), column].sum())

    counts = {"tensor_instructions": total("instructions", "mma"),
              "shared_wavefronts": total("wavefronts", *traffic.SHARED),
              "l2_read_sectors": total("sectors", "bulk copy", "cp.async", "global load")}
    return {"shape": shape} | {
        name: {"emulator": value, "nsight_compute": int(measured[name])}
        for name, value in counts.items()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args(argv)
    profiles = json.loads((ROOT / PROFILES).read_text())
    measured = {row["shape"]: row["kernels"][0] for row in profiles["rows"]}
    rows = []
    for shape in SHAPES:
        rows.append(compared(shape, measured[shape], profiles["sms"]))
        print(rows[-1], flush=True)
    here = provenance()
    record = {"profiles": PROFILES, "profiled": {k: profiles[k] for k in (
        "gpu", "driver", "ncu", "commit", "date")}, "commit": here["commit"],
        "date": here["date"], "rows": rows}
    if args.out:
        records.write(args.out, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
