"""The two rates that bound attention, measured on the local GPU: device copy, and bf16
``mma.sync`` with fp32 accumulation.

    python -m mla_kernels.ceilings
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from .device import Ceiling, local_gpu

#: Independent accumulators of a warp, enough to hide the instruction's latency.
CHAINS = 8

#: Flop of one ``mma.sync.m16n8k16``, which is one warp's.
MMA_FLOPS = 2 * 16 * 8 * 16

WARPS = 8


def _loop() -> str:
    """PTX of ``$2`` rounds of :data:`CHAINS` multiplies, operands made of ``$1``, sum in
    ``$0``."""
    lines = ["{", ".reg .b32 a<4>, b<2>, i;", ".reg .pred more;", f".reg .f32 c<{4 * CHAINS}>;"]
    lines += [f"mov.b32 {r}, $1;" for r in ("a0", "a1", "a2", "a3", "b0", "b1")]
    lines += [f"mov.f32 c{j}, 0f00000000;" for j in range(4 * CHAINS)]
    lines += ["mov.b32 i, 0;", "again:"]
    for j in range(0, 4 * CHAINS, 4):
        c = f"{{c{j}, c{j + 1}, c{j + 2}, c{j + 3}}}"
        lines.append("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                     f"{c}, {{a0, a1, a2, a3}}, {{b0, b1}}, {c};")
    lines += ["add.u32 i, i, 1;", "setp.lt.u32 more, i, $2;", "@more bra again;"]
    lines += [f"add.f32 c0, c0, c{j};" for j in range(1, 4 * CHAINS)]
    return "\n".join([*lines, "mov.f32 $0, c0;", "}"])


LOOP = _loop()


@triton.jit
def _multiply(out, rounds, THREADS: tl.constexpr, ASM: tl.constexpr):
    thread = tl.program_id(0) * THREADS + tl.arange(0, THREADS)
    # Two bf16 in 0.5 .. 1, others in every thread: multiplying zeros would cost less power.
    operand = ((thread * 40503 + 12345) & 0x007F007F) | 0x3F003F00
    total = tl.inline_asm_elementwise(
        ASM, "=f,r,r", [operand, tl.zeros_like(operand) + rounds], dtype=tl.float32,
        is_pure=False, pack=1)
    tl.store(out + thread, total)


def _seconds(call: Callable[[], object], repeats: int = 11) -> float:
    """Median time of a call on the GPU, by events, after one that warms up."""
    call()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) for a, b in zip(marks, marks[1:], strict=False))
    return times[repeats // 2] / 1e3


def copy_bandwidth(size: int = 2**30) -> float:
    """Bytes a second read and written by copying ``size`` bytes of device memory."""
    source = torch.empty(size, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * size / _seconds(lambda: target.copy_(source))


def tensor_rate(rounds: int = 4096, blocks_per_sm: int = 4) -> float:
    """Flop a second of ``mma.sync`` m16n8k16 in bf16, from registers."""
    blocks = local_gpu().sms * blocks_per_sm
    out = torch.empty(blocks * 32 * WARPS, device="cuda")
    seconds = _seconds(lambda: _multiply[(blocks,)](out, rounds, 32 * WARPS, LOOP,
                                                    num_warps=WARPS))
    return blocks * WARPS * rounds * CHAINS * MMA_FLOPS / seconds


def measure() -> Ceiling:
    """Both rates, in about a tenth of a second.

    Raises:
        RuntimeError: no CUDA device.
    """
    gpu = local_gpu()
    if gpu is None:
        raise RuntimeError("no CUDA device here, so no ceilings to measure")
    return Ceiling(gpu.name, gpu.arch, gpu.sms, copy_bandwidth(), tensor_rate(),
                   "measured in this run: device copy, mma.sync bf16")


if __name__ == "__main__":
    if local_gpu() is None:
        sys.exit("error: no CUDA device here")
    print(measure())
