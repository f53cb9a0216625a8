"""Runs the kernel under NVIDIA's compute-sanitizer on a grid of small shapes.

    python scripts/sanitize.py --out data/sanitizer/h200.json

Each tool (memcheck, racecheck, initcheck, synccheck) watches one process that goes through all
shapes: heads, draft nodes and prefix lengths, chosen to fill tiles exactly, to leave them almost
empty, and to meet every tile height; every third launch is batch-invariant. The four processes
run side by side. The results are compared with the oracle as well. torch's caching of memory is
off, so that a read past a tensor's end is one past an allocation. Only the package's kernels are
watched, but by initcheck: that must see who else writes memory.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import torch

from mla_kernels import build, check, records
from mla_kernels.device import local_gpu, provenance

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")

#: Capacities of a case: (heads, draft nodes, prefix). Requests of a case have at most these.
SHAPES = [(heads, nodes, prefix) for heads in (1, 4, 8, 12, 20, 99, 128) for nodes, prefix in
          ((1, 40), (3, 1), (8, 300), (17, 333), (33, 64), (64, 90)) if heads * nodes <= 1300]

#: Part of the mangled names of all kernels in namespace mla.
KERNELS = "3mla"


def run_shapes(limit: int | None) -> int:
    """The watched process."""
    failed = []
    for i, (heads, nodes, prefix) in enumerate(SHAPES[:limit]):
        case = check.random_case(i, device="cuda", max_heads=heads, max_nodes=nodes,
                                 max_requests=3, max_prefix=prefix)
        errors = check.run(case, "cuda", batch_invariant=i % 3 == 2)
        if not errors.passed:
            failed.append(f"{case.text}: {errors}")
        torch.cuda.synchronize()
        print(f"shape {i + 1}: {case.text}", flush=True)
    print(f"shapes run: {len(SHAPES[:limit])}, wrong: {len(failed)}", *failed, sep="\n")
    return 1 if failed else 0


def watch(sanitizer: str, tool: str, limit: int | None, timeout: float) -> dict:
    """Runs one tool and reads its verdict."""
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", "--print-limit", "20",
               *(["--kernel-name", f"kns={KERNELS}"] if tool != "initcheck" else []),
               sys.executable, __file__, "--shapes"]
    if limit is not None:
        command += ["--limit", str(limit)]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    begin = time.perf_counter()
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True,
                              timeout=timeout)
        text, code = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as gone:
        text, code = (gone.stdout or b"").decode(errors="replace"), None
    return verdict(tool, text, code, len(SHAPES[:limit]), time.perf_counter() - begin)


def verdict(tool: str, text: str, code: int | None, wanted: int, seconds: float = 0) -> dict:
    """What a tool's output says. Clean is: it ended well, its own summary counts no error, and
    all shapes ran with right results."""
    summary = re.search(r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (.*)", text)
    counts = re.match(r"(\d+) (?:errors?|hazards?)", summary[1]) if summary else None
    ran = re.search(r"shapes run: (\d+), wrong: (\d+)", text)
    clean = (code == 0 and counts is not None and counts[1] == "0" and ran is not None
             and ran[1] == str(wanted) and ran[2] == "0")
    result = {"tool": tool, "clean": clean, "exit_code": code, "seconds": round(seconds, 1),
              "summary": summary[1] if summary else None,
              "shapes": text.count("\nshape ") + text.startswith("shape "),
              "wrong_results": int(ran[2]) if ran else None}
    if not clean:
        result["output"] = [line for line in text.splitlines() if line.startswith("=")][:40] or (
            text.splitlines()[-20:])
    return result


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", action="store_true", help="be the watched process")
    parser.add_argument("--limit", type=int, help="only the first shapes")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--sanitizer", default="compute-sanitizer", help="its path")
    parser.add_argument("--timeout", type=float, default=230, help="seconds a tool")
    parser.add_argument("--out", type=Path, help="write a JSON summary here")
    args = parser.parse_args(argv)
    if args.shapes:
        return run_shapes(args.limit)
    sanitizer = shutil.which(args.sanitizer)
    if sanitizer is None:
        print(f"error: there is no {args.sanitizer} here: it comes with the CUDA toolkit; give its "
              "path with --sanitizer", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("error: needs a CUDA device: torch.cuda.is_available() is False", file=sys.stderr)
        return 2
    gpu = torch.cuda.get_device_properties(0)
    build.load(f"sm_{gpu.major}{gpu.minor}")  # so that no tool watches the compiler
    results = []
    with ThreadPoolExecutor(len(args.tools)) as pool:
        jobs = [pool.submit(watch, sanitizer, tool, args.limit, args.timeout)
                for tool in args.tools]
        for job in as_completed(jobs):
            results.append(job.result())
            print(json.dumps(results[-1]), flush=True)
            if args.out:  # after every tool: what was seen stays, should a later one be stopped
                record = {"shapes": len(SHAPES[:args.limit]), "results": results,
                          "device": local_gpu().name} | provenance()
                records.write(args.out, record)
    return 0 if all(r["clean"] for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
