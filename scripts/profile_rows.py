"""What bounds the kernel, row by row of the target table, by Nsight Compute.

    python scripts/profile_rows.py --out data/profiles/h200.json

Runs itself under ``ncu`` once, with one profiled call a shape, and keeps of each kernel: its
time, how busy the tensor cores, the shared-memory pipe, the issue slots, L2 and DRAM were, and
what its warps waited for. Clocks are left alone, caches are flushed before each pass.
"""

from __future__ import annotations

import argparse
import csv
import io
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from mla_kernels import bench, records
from mla_kernels.device import local_gpu, provenance
from mla_kernels.workload import PRESETS, Shape, make_workload

#: Our names for Nsight Compute's metrics (those of an H200 with Nsight Compute 2025).
METRICS = {
    "us": "gpu__time_duration.sum",
    "tensor_percent": "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",
    "tensor_instructions": "sm__inst_executed_pipe_tensor_op_hmma.sum",
    "shared_percent": "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed",
    "shared_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "issue_percent": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "dram_percent": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "dram_read_bytes": "dram__bytes_read.sum",
    "l2_percent": "lts__t_sectors.avg.pct_of_peak_sustained_elapsed",
    "l2_read_sectors": "lts__t_sectors_srcunit_tex_op_read.sum",
    "instructions": "smsp__inst_executed.sum",
    "warps_per_sm": "sm__warps_active.avg.per_cycle_active",
}
STALLS = ("barrier", "branch_resolving", "dispatch_stall", "lg_throttle", "long_scoreboard",
          "math_pipe_throttle", "membar", "mio_throttle", "no_instruction", "not_selected",
          "selected", "short_scoreboard", "sleeping", "wait")
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"

UNITS = {"usecond": 1.0, "us": 1.0, "nsecond": 1e-3, "ns": 1e-3, "msecond": 1e3, "ms": 1e3,
         "byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}


def calls(shapes: Sequence[Shape]) -> None:
    """What runs under ncu: a warm-up and one profiled call of each shape."""
    for shape in shapes:
        work = make_workload(shape, l2_bytes=8 << 20)
        call = bench.PROVIDERS["cuda"].prepare(work)
        call(0)
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        call(1)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def parse(text: str) -> list[dict[str, object]]:
    """The kernels of ``ncu --page raw --csv``, in order."""
    rows = list(csv.reader(io.StringIO(text[text.index('"ID"'):])))
    names, units = rows[0], rows[1]
    kernels = []
    for row in rows[2:]:
        def value(metric: str, row: list[str] = row) -> float | None:
            if metric not in names or not row[names.index(metric)]:
                return None
            i = names.index(metric)
            try:
                return float(row[i].replace(",", "")) * UNITS.get(units[i], 1.0)
            except ValueError:
                return None

        name = row[names.index("Kernel Name")].split("<")[0].split("(")[0]
        kernel = {"kernel": name.split()[-1].split("::")[-1],
                  **{ours: value(theirs) for ours, theirs in METRICS.items()}}
        waits = {name: value(STALL.format(name)) for name in STALLS}
        total = sum(x for x in waits.values() if x)
        kernel["waits_percent"] = {
            name: round(100 * x / total, 1) for name, x in
            sorted(waits.items(), key=lambda w: -(w[1] or 0)) if x and x > 0.01 * total}
        kernels.append(kernel)
    return kernels


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", action="append", help="B,H,T,L; repeatable; default: the "
                                                         "target table")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--calls", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if local_gpu() is None:
        print("error: no CUDA device here", file=sys.stderr)
        return 2
    shapes = [Shape.parse(s) for s in args.shape or []] or list(PRESETS["spine"])
    texts = [f"{s.batch_size},{s.num_heads},{s.num_nodes},{s.context}" for s in shapes]
    if args.calls:
        calls(shapes)
        return 0
    metrics = [*METRICS.values(), *(STALL.format(name) for name in STALLS)]
    command = ["ncu", "--profile-from-start", "off", "--clock-control", "none", "-k",
               "regex:tree_verify|combine", "--metrics", ",".join(metrics), "--page", "raw",
               "--csv", sys.executable, __file__, "--calls"]
    for text in texts:
        command += ["--shape", text]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode or '"ID"' not in done.stdout:
        print((done.stdout + done.stderr)[-3000:], file=sys.stderr)
        return 1
    version = subprocess.run(["ncu", "--version"], capture_output=True, text=True).stdout
    kernels = iter(parse(done.stdout))
    record = provenance() | {"ncu": version.strip().splitlines()[-1], "rows": []}
    current = None
    for kernel in kernels:
        if kernel["kernel"] == "tree_verify":
            current = {"shape": texts[len(record["rows"])], "kernels": []}
            record["rows"].append(current)
        current["kernels"].append(kernel)
    for row in record["rows"]:
        k = row["kernels"][0]
        print(row["shape"], {name: k[name] for name in METRICS}, k["waits_percent"])
    if args.out:
        records.write(args.out, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
