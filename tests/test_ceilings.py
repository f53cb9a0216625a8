"""ceilings: rates need a GPU; that the loop is what is counted does not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mla_kernels import ceilings
from mla_kernels.build import _disassembler

ROOT = Path(__file__).parent.parent

COMPILE = """
import sys, triton
from triton.backends.compiler import GPUTarget
from mla_kernels import ceilings
arch, path = int(sys.argv[1]), sys.argv[2]
source = triton.compiler.ASTSource(
    ceilings._multiply,
    {"out": "*fp32", "rounds": "i32", "THREADS": "constexpr", "ASM": "constexpr"},
    constexprs={"THREADS": 32 * ceilings.WARPS, "ASM": ceilings.LOOP})
compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32),
                          options={"num_warps": ceilings.WARPS})
open(path, "wb").write(compiled.asm["cubin"])
"""


@pytest.mark.parametrize("arch", [90, 120])
@pytest.mark.skipif(_disassembler() is None, reason="no cuobjdump")
def test_the_loop_keeps_its_multiplies(tmp_path, arch):
    """The machine code has whole rounds of distinct accumulators, one after another, and no
    multiply that costs less than it counts."""
    cubin = tmp_path / "loop.cubin"
    subprocess.run([sys.executable, "-c", COMPILE, str(arch), str(cubin)], check=True, cwd=ROOT,
                   env={**os.environ, "TRITON_INTERPRET": "0"})
    sass = subprocess.run([_disassembler(), "-sass", cubin], capture_output=True, text=True,
                          check=True).stdout
    found = re.findall(r"HMMA\.16816\.F32\.BF16 (R\d+),", sass)
    assert found and len(found) % ceilings.CHAINS == 0
    for i in range(0, len(found), ceilings.CHAINS):
        assert len(set(found[i:i + ceilings.CHAINS])) == ceilings.CHAINS
    assert sass.count("HMMA") == len(found) and "BRA" in sass


def test_flop_of_an_instruction():
    m, n, k = map(int, re.search(r"mma\.sync\.aligned\.m(\d+)n(\d+)k(\d+)\.", ceilings.LOOP)
                  .groups())
    assert ceilings.MMA_FLOPS == 2 * m * n * k
    assert ceilings.LOOP.count("mma.sync") == ceilings.CHAINS


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu():
    with pytest.raises(RuntimeError, match="no CUDA device here"):
        ceilings.measure()
    done = subprocess.run([sys.executable, "-m", "mla_kernels.ceilings"], capture_output=True,
                          text=True, cwd=ROOT)
    assert done.returncode == 1 and done.stderr == "error: no CUDA device here\n"


@pytest.mark.gpu
def test_rates_are_of_a_gpu():
    measured = ceilings.measure()
    assert 1e11 < measured.bandwidth < 1e14 and 1e13 < measured.tensor < 1e16
