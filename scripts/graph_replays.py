"""Replays one captured graph with fresh metadata many times, and compares every replay.

    python scripts/graph_replays.py --out data/replays/h200.json

The graph holds what an engine's would: SGLang's metadata converted into a batch at capacity, the
tree mask packed to bits from its flat buffer, then the attention. Every replay gets other lengths,
trees, slots, padded requests (length 1, slot 0) and queries in the same buffers, outputs and
workspace filled with NaN. Each must give the bits of an eager call on the same buffers; a sample
is compared with the float64 oracle.
On the CPU, `--device cpu`, nothing is captured: that tries the script, not the kernel.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from tqdm.auto import tqdm

from mla_kernels import check, records
from mla_kernels.attention import choose_backend, verify_attention, workspace_bytes
from mla_kernels.device import local_gpu, provenance
from mla_kernels.graphs import capture
from mla_kernels.layout import KVLayout
from mla_kernels.marshal import StaticBatch

LATENT_FIRST = KVLayout.LATENT_FIRST
SM_SCALE = 192**-0.5


class Call:
    """Buffers of fixed capacity, as an engine holds them, and the call on them."""

    def __init__(self, bs: int, nodes: int, context: int, heads: int, seed: int, device: str):
        self.bs, self.nodes, self.context = bs, nodes, context
        self.rng = np.random.default_rng(seed)
        self.generator = torch.Generator(device=device).manual_seed(seed)
        self.slots = bs * context + 1  # slot 0 belongs to padded requests

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=self.generator, device=device).bfloat16()

        self.q, self.draft_kv = normal(bs * nodes, heads, 576), normal(bs * nodes, 576)
        self.pool = normal(self.slots, 576)
        self.static = StaticBatch(bs, bs * nodes, bs * context, max_q_len=nodes,
                                  max_kv_len=context, device=device)
        self.batch = self.static.batch

        def buffer(size: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        # As SGLang holds them under CUDA graphs.
        self.qo_indptr, self.mask_indptr = (buffer(bs + 1, torch.int64) for _ in range(2))
        self.kv_indptr = buffer(bs + 1, torch.int32)
        self.kv_indices = buffer(bs * context, torch.int64)
        self.custom_mask = buffer(bs * nodes * (context + nodes), torch.uint8)
        latent, rope = LATENT_FIRST.split(self.q)
        self.backend = choose_backend(latent, rope)
        self.space = torch.empty(workspace_bytes(self.batch, heads, self.backend),
                                 dtype=torch.uint8, device=device)

    def outputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.full_like(self.q[..., :512], torch.nan, memory_format=torch.contiguous_format)
        return out, out.new_full(out.shape[:2], torch.nan, dtype=torch.float32)

    def run(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        b = self.batch
        self.static.from_sglang(self.qo_indptr, self.kv_indptr, self.kv_indices,
                                self.custom_mask, self.mask_indptr)
        verify_attention(self.q, self.pool, b, sm_scale=SM_SCALE, draft_kv=self.draft_kv,
                         out=out, lse=lse, workspace=self.space, backend=self.backend)

    def capture(self, out: torch.Tensor, lse: torch.Tensor) -> Callable[[], None]:
        if self.q.device.type == "cpu":
            return lambda: self.run(out, lse)
        return capture(lambda: self.run(out, lse)).replay

    def refill(self) -> None:
        rng = self.rng
        padded = rng.random(self.bs) < 0.2
        nodes = rng.integers(0, self.nodes + 1, self.bs)
        lens = np.where(rng.random(self.bs) < 0.2, rng.integers(0, 3, self.bs),
                        rng.integers(0, self.context + 1, self.bs))
        lens[padded] = 1
        flat, indices = [], []
        for count, length, pad in zip(nodes, lens, padded, strict=True):
            if count:
                draft = check.random_tree(rng, int(count))
                rows = np.ones((count, length + count), dtype=np.uint8)
                rows[:, length:] = getattr(draft, "ancestor_mask", draft)
                flat.append(rows.ravel())
            indices.append(np.zeros(1, int) if pad else rng.integers(1, self.slots, length))
        sizes = nodes * (lens + nodes)
        for held, new in ((self.qo_indptr, np.cumsum([0, *nodes])),
                          (self.kv_indptr, np.cumsum([0, *lens])),
                          (self.kv_indices, np.concatenate(indices)),
                          (self.mask_indptr, np.cumsum([0, *sizes])),
                          (self.custom_mask, np.concatenate([np.zeros(0, np.uint8), *flat]))):
            held[: len(new)].copy_(torch.from_numpy(np.ascontiguousarray(new)))
        self.q.normal_(generator=self.generator)

    def spoil(self) -> None:
        """Leaves nothing of the call before: all must be converted and computed anew."""
        b = self.batch
        self.space.fill_(0xFF)
        for tensor in (b.mask_bits, b.qo_indptr, b.kv_indptr, b.kv_indices, b.kv_lens):
            tensor.fill_(-1)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    whole = torch.int16 if a.element_size() == 2 else torch.int32
    return torch.equal(a.view(whole), b.view(whole))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--replays", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=100, help="stop after so long, and say so")
    parser.add_argument("--oracle-every", type=int, default=50)
    parser.add_argument("--batch", type=int, default=4, help="capacity, in requests")
    parser.add_argument("--nodes", type=int, default=16, help="capacity, of a request")
    parser.add_argument("--context", type=int, default=2048, help="capacity, of a request")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    seed = args.seed if args.seed is not None else int(np.random.SeedSequence().entropy % 2**31)
    call = Call(args.batch, args.nodes, args.context, args.heads, seed, args.device)
    (out, lse), (eager_out, eager_lse) = call.outputs(), call.outputs()
    replay = call.capture(out, lse)
    differ, wrong, sampled, worst = [], [], 0, 0.0
    begin = time.perf_counter()
    done = 0
    for i in tqdm(range(args.replays), leave=False, mininterval=5):
        if time.perf_counter() - begin > args.seconds:
            break
        done = i + 1
        call.refill()
        for tensor in (out, lse, eager_out, eager_lse):
            tensor.fill_(torch.nan)
        call.spoil()
        replay()
        call.spoil()
        call.run(eager_out, eager_lse)
        if not (same_bits(out, eager_out) and same_bits(lse, eager_lse)):
            differ.append(i)
        if i % args.oracle_every == 0 and int(call.batch.qo_indptr[-1]):
            arguments = {"q": call.q, "kv_pool": call.pool, "batch": call.batch,
                         "layout": LATENT_FIRST, "sm_scale": SM_SCALE, "draft_kv": call.draft_kv}
            errors = check.compare(check.Case(seed, "", arguments), out, lse)
            sampled, worst = sampled + 1, max(worst, errors.out)
            if not errors.passed:
                wrong.append(i)
    on_gpu = args.device.startswith("cuda")
    record = {
        "replays": done, "wanted": args.replays, "captured": on_gpu,
        "differ_from_eager": len(differ),
        "compared_with_oracle": sampled, "differ_from_oracle": len(wrong),
        "worst_relative_error": worst if np.isfinite(worst) else str(worst),
        "first_differing": differ[:10], "first_wrong": wrong[:10], "seed": seed,
        "capacity": {"batch": args.batch, "nodes": args.nodes, "context": args.context,
                     "heads": args.heads},
        "backend": call.backend, "device": local_gpu().name if on_gpu else "CPU",
        "seconds": round(time.perf_counter() - begin, 1),
    } | provenance()
    records.write(args.out, record)
    print(json.dumps(record, indent=1))
    return 1 if differ or wrong or done < args.replays else 0


if __name__ == "__main__":
    sys.exit(main())
