"""The kernels' source under the host compiler's AddressSanitizer and UndefinedBehaviorSanitizer,
which see what the emulator itself does not: accesses through plain pointers, and arithmetic
that has no meaning. In a Python of its own, since the libraries must be loaded first."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mla_kernels import build, emulated

ROOT = Path(__file__).parent.parent

RUN = """
import sys
from pathlib import Path
from mla_kernels import build, check, cuda
if len(sys.argv) > 2:
    build.CSRC = Path(sys.argv[2])
first = int(sys.argv[1])
for seed in range(first, first + 6):
    case = check.random_case(seed, max_heads=8, max_nodes=12, max_requests=3, max_prefix=200)
    with cuda.launch_as(rows=build.TILE_ROWS[seed % 3]):
        errors = check.run(case, "emulated")
    assert errors.passed, f"seed {seed}: {errors}"
print("all right")
"""


def run(*arguments: object) -> subprocess.CompletedProcess:
    environment = emulated.sanitizer_environment()
    if environment is None:
        pytest.skip("this compiler has no AddressSanitizer library")
    return subprocess.run(
        [sys.executable, "-c", RUN, *map(str, arguments)], capture_output=True, text=True,
        cwd=ROOT, env=os.environ | environment | {"PYTHONPATH": str(ROOT)}, timeout=600)


def test_clean(seed):
    done = run(seed)
    assert done.returncode == 0 and "all right" in done.stdout, (done.stdout + done.stderr)[-4000:]


@pytest.mark.parametrize("file, old, new, message", [
    ("kv_layout.cuh", "prefix_len(p.kv_lens[request])",
     "prefix_len(p.kv_lens[request] + (p.kv_lens[p.batch_size] == 0x7ffffffe))",
     "AddressSanitizer: heap-buffer-overflow"),
    ("kv_layout.cuh", "bits & ((1u << left) - 1)", "bits & ((1 << left << 31) - 1)",
     "runtime error: .*shift|shift exponent"),
], ids=["one past the lengths", "a shift too far"])
def test_what_they_are_there_for(file, old, new, message, seed, tmp_path):
    for name, text in build.sources().items():
        if name == file:
            assert text.count(old) == 1
            text = text.replace(old, new)
        (tmp_path / name).write_text(text)
    done = run(seed, tmp_path)
    assert done.returncode != 0 and re.search(message, done.stderr), done.stderr[-3000:]
