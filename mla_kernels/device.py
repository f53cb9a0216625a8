"""What a GPU allows and how fast it could be: limits, ceilings, roofline."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import torch

#: Shared memory a block may use on sm_120 (CUDA C++ Programming Guide, table of compute
#: capabilities: 99 KB), in bytes. The kernel stays under it on every architecture.
SM120_SMEM_PER_BLOCK = 101_376

#: Registers a thread may use, on every architecture since sm_35.
MAX_REGISTERS = 255


@dataclasses.dataclass(frozen=True)
class Ceiling:
    """The two rates that bound attention on one card.

    Args:
        name: the card.
        arch: its compute capability as a compiler target, ``sm_120`` for instance.
        sms: multiprocessors.
        bandwidth: device memory, bytes a second.
        tensor: dense bf16 with fp32 accumulation through ``mma.sync``, flop a second.
        source: where the two rates come from, ``measured`` or ``datasheet`` and details.
    """

    name: str
    arch: str
    sms: int
    bandwidth: float
    tensor: float
    source: str

    @property
    def ridge(self) -> float:
        """Flop per byte above which arithmetic is the bound."""
        return self.tensor / self.bandwidth

    def floor(self, flops: float, bytes_: float) -> float:
        """Seconds that no kernel can go below: the larger of the two terms."""
        return max(flops / self.tensor, bytes_ / self.bandwidth)


H200 = Ceiling("NVIDIA H200", "sm_90", 132, 4.23e12, 637e12,
               "measured for this project: device copy, mma.sync bf16")
RTX_PRO_6000 = Ceiling("RTX PRO 6000 Blackwell", "sm_120", 188, 1.792e12, 504e12,
                       "datasheet figures as reported; not measured here")
RTX_5090 = Ceiling("GeForce RTX 5090", "sm_120", 170, 1.792e12, 209.5e12,
                   "datasheet figures as reported; not measured here")

CEILINGS = (H200, RTX_PRO_6000, RTX_5090)


def attention_flops(batch_size: int, num_heads: int, num_nodes: int, context: int) -> float:
    """Multiply-adds, counted as two, of one verify call over equal requests: 576 for the
    score and 512 for the value, for each head, node and token of prefix and draft."""
    return 2.0 * batch_size * num_heads * num_nodes * (context + num_nodes) * (576 + 512)


def attention_bytes(batch_size: int, num_heads: int, num_nodes: int, context: int,
                    itemsize: int = 2) -> float:
    """The fewest bytes one verify call moves: each cache row and query read once, each output
    written once."""
    rows = batch_size * (context + num_nodes) * 576
    queries = batch_size * num_nodes * num_heads * (576 + 512)
    return float(itemsize * (rows + queries))


@dataclasses.dataclass(frozen=True)
class LocalGPU:
    """The CUDA device of this process, as its driver describes it."""

    name: str
    capability: tuple[int, int]
    sms: int
    memory: int
    l2: int
    smem_per_block: int
    driver: str | None

    @property
    def arch(self) -> str:
        return "sm_{}{}".format(*self.capability)

    @property
    def is_sm120(self) -> bool:
        """Whether this is the family that the kernel is made for (12.0: RTX PRO 6000 and RTX
        5090; 12.1: DGX Spark)."""
        return self.capability[0] == 12


@functools.cache
def local_gpu(index: int = 0) -> LocalGPU | None:
    """The GPU at ``index``, or None where torch sees none."""
    if not torch.cuda.is_available():
        return None
    p = torch.cuda.get_device_properties(index)
    try:
        driver = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=20, check=True,
        ).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        driver = None
    return LocalGPU(
        name=p.name, capability=(p.major, p.minor), sms=p.multi_processor_count,
        memory=p.total_memory, l2=p.L2_cache_size,
        smem_per_block=getattr(p, "shared_memory_per_block_optin", 0), driver=driver,
    )


def provenance() -> dict[str, object]:
    """Where and with what a result was obtained: GPU, driver, power limit, versions, commit and
    date. The commit is ``MLA_KERNELS_COMMIT`` where that is set, for a copy without git."""
    gpu = local_gpu()
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    try:
        sglang_version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        sglang_version = getattr(sys.modules.get("sglang"), "__version__", None)
    commit = os.environ.get("MLA_KERNELS_COMMIT")
    if not commit:
        done = subprocess.run(["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=12",
                               "HEAD"], capture_output=True, text=True)
        commit = done.stdout.strip() or "unknown"
    power = None
    if gpu:
        done = subprocess.run(["nvidia-smi", "--query-gpu=power.limit,clocks.max.sm",
                               "--format=csv,noheader"], capture_output=True, text=True)
        power = done.stdout.strip().replace(", ", " / ") or None
    return {
        "gpu": gpu.name if gpu else None, "arch": gpu.arch if gpu else None,
        "sms": gpu.sms if gpu else None, "driver": gpu.driver if gpu else None,
        "power_and_max_clock": power, "cuda": torch.version.cuda, "torch": torch.__version__,
        "triton": triton_version, "sglang": sglang_version, "commit": commit,
        "date": datetime.date.today().isoformat(),
    }
