"""Random verify calls, poisoned, and their comparison with the float64 oracle.

A case is drawn from a seed: heads, trees, lengths, page size, row order, dtype, strides. All
that a kernel must not read or leave alone holds NaN: cache rows that no request owns, the rest
of a wider row, the outputs before the call. ``python -m mla_kernels.check`` runs many cases on
the local GPU and writes a summary.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tqdm.auto import tqdm

from . import build, cuda, records
from . import tree as trees
from .attention import choose_backend, verify_attention
from .batch import VerifyBatch
from .device import local_gpu, provenance
from .layout import ORDERS, KVLayout
from .reference import relative_error, verify_attention_reference

#: Largest relative error of an output, ``||out - exact|| / ||exact||`` over a case. bf16 has 8
#: bits: rounding the probabilities and the partial outputs each costs up to 2**-9 = 2e-3 of a
#: term, and about that after averaging.
OUT_TOLERANCE = 5e-3

#: The same for the worst single row (token, head), which has fewer terms to average over.
ROW_TOLERANCE = 2e-2

#: Largest absolute error of the log-sum-exp: scores are exact products summed in fp32.
LSE_TOLERANCE = 2e-3


@dataclasses.dataclass
class Case:
    """One verify call: arguments of :func:`mla_kernels.verify_attention` by name, and the seed
    and a line of text to find it again."""

    seed: int
    text: str
    arguments: dict

    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The oracle's ``(out, lse)``, float64, NaN for padded tokens."""
        a = dict(self.arguments)
        q, layout = a.pop("q"), a["layout"]
        latent, rope = layout.split(q) if isinstance(q, torch.Tensor) else q
        return verify_attention_reference(latent, rope, a.pop("kv_pool"), a.pop("batch"), **a)


def random_tree(rng: np.random.Generator, nodes: int) -> np.ndarray | trees.DraftTree:
    """A draft of exactly ``nodes`` nodes: a random recursive tree, a chain, a k-ary tree, or
    any boolean matrix, which may leave a row without anything to see."""
    kind = rng.integers(5)
    if kind == 0:
        return trees.chain(nodes)
    if kind == 1:
        return trees.kary(int(rng.integers(2, 5)), nodes)
    if kind == 2:
        return rng.random((nodes, nodes)) < rng.random()
    return trees.DraftTree(np.array([-1] + [int(rng.integers(i)) for i in range(1, nodes)]))


def random_case(
    seed: int,
    *,
    device: torch.device | str = "cpu",
    dtypes: Sequence[torch.dtype] = (torch.bfloat16, torch.float16),
    max_heads: int = 128,
    max_nodes: int = 128,
    max_requests: int = 9,
    max_prefix: int = 3000,
    page_sizes: Sequence[int] = (1, 16, 64, 256),
    plain: bool = False,
) -> Case:
    """Draws a case.

    Args:
        plain: no caps, scales, or strides that differ from contiguous.
    """
    rng = np.random.default_rng(seed)
    generator = torch.Generator(device=device).manual_seed(seed)
    pick = lambda values: values[int(rng.integers(len(values)))]  # noqa: E731
    dtype, order, page_size = pick(dtypes), pick(ORDERS), int(pick(page_sizes))
    layout = KVLayout(order)
    few = [h for h in (1, 2, 4, 8, 12, 16, 20, 32, 64, 99, 128) if h <= max_heads]
    heads = int(pick(few)) if rng.random() < 0.7 else int(rng.integers(1, max_heads + 1))
    bs = int(rng.integers(1, max_requests + 1))
    nodes, prefixes = [], []
    for _ in range(bs):
        nodes.append(int(pick([1, 2, 8, max_nodes])) if rng.random() < 0.3
                     else int(rng.integers(1, max_nodes + 1)))
        prefixes.append(int(pick([0, 1, 31, 32, 33])) if rng.random() < 0.3
                        else int(max_prefix ** rng.random()))
    drafts = [random_tree(rng, n) for n in nodes]
    pages = [-(-length // page_size) for length in prefixes]
    in_pool = rng.random() < 0.5
    spare = sum(nodes) if in_pool else 0
    num_pages = sum(pages) + -(-spare // page_size) + int(rng.integers(1, 9))
    order_of_pages = rng.permutation(num_pages)
    tables = np.split(order_of_pages[: sum(pages)], np.cumsum(pages)[:-1])
    free = order_of_pages[sum(pages):]
    slots = (free[:, None] * page_size + np.arange(page_size)).reshape(-1)
    slots = np.split(rng.permutation(slots)[: sum(nodes)], np.cumsum(nodes)[:-1])
    batch = VerifyBatch.from_requests(drafts, prefixes, tables, page_size=page_size,
                                      draft_slots=slots if in_pool else None)
    padding = 0 if rng.random() < 0.7 else int(rng.integers(1, 6))
    if padding:
        # Capacity beyond the batch: rows of q and out that no request owns.
        fill = torch.zeros(padding, batch.mask_bits.shape[1], dtype=torch.int32)
        own = batch.draft_slots
        batch = dataclasses.replace(
            batch, mask_bits=torch.cat([batch.mask_bits, fill]),
            draft_slots=None if own is None else torch.cat([own, own.new_zeros(padding)]))
    batch = batch.validate(num_pages * page_size)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    wide = 0 if plain or rng.random() < 0.7 else 8 * int(rng.integers(1, 5))
    used = [batch.prefix_slots(b) for b in range(bs)]
    if in_pool:
        used.append(batch.draft_slots[: sum(nodes)].long())
    used = torch.cat(used).to(device)
    pool = torch.full((num_pages * page_size, layout.row_dim + wide), torch.nan, dtype=dtype,
                      device=device)
    pool[used, : layout.row_dim] = normal(len(used), layout.row_dim)
    pool = pool[:, : layout.row_dim]
    if page_size > 1 and rng.random() < 0.5:
        pool = pool.unflatten(0, (num_pages, page_size))
    elif rng.random() < 0.5:
        pool = pool[:, None]
    total = batch.num_tokens
    sharp = float(pick([0.3, 1.0, 1.0, 4.0]))
    q = normal(total, heads, layout.row_dim) * sharp
    if not plain and rng.random() < 0.3:  # heads outermost, as a projection may leave them
        q = q.transpose(0, 1).contiguous().transpose(0, 1)
    arguments = {
        "q": q, "kv_pool": pool, "batch": batch.to(device), "layout": layout,
        "sm_scale": 192 ** -0.5,
        "draft_kv": None if in_pool else normal(total, layout.row_dim),
    }
    if rng.random() < 0.3:
        latent, rope = layout.split(q)
        arguments["q"] = (latent.contiguous(), rope)
    if not plain and rng.random() < 0.3:
        arguments |= {"k_scale": float(pick([0.5, 2.0])), "v_scale": float(pick([0.5, 2.0]))}
    if not plain and rng.random() < 0.1:
        arguments["logit_cap"] = float(pick([5.0, 30.0]))
    text = (f"H {heads}, nodes {nodes}, prefixes {prefixes}, page {page_size}, {order}, "
            f"{str(dtype).removeprefix('torch.')}, drafts {'in pool' if in_pool else 'apart'}")
    return Case(seed, text, arguments)


@dataclasses.dataclass
class Errors:
    """How far a result is from the oracle's."""

    out: float
    row: float
    lse: float
    padding: bool

    @property
    def passed(self) -> bool:
        return (self.out <= OUT_TOLERANCE and self.row <= ROW_TOLERANCE
                and self.lse <= LSE_TOLERANCE and self.padding)


def compare(case: Case, out: torch.Tensor, lse: torch.Tensor) -> Errors:
    """Compares a result, computed into outputs that held NaN, with the oracle's.

    Padded tokens must still hold NaN (``Errors.padding``); everywhere else NaN or a misplaced
    infinity makes an error infinite.
    """
    exact, exact_lse = case.exact()
    own = int(case.arguments["batch"].qo_indptr[-1])
    padding = bool(out[own:].isnan().all() and lse[own:].isnan().all())
    out, exact = out[:own].double(), exact[:own]
    lse, exact_lse = lse[:own].double(), exact_lse[:own]
    norms = torch.linalg.vector_norm(exact, dim=-1)
    gaps = torch.linalg.vector_norm(out - exact, dim=-1)
    rows = torch.where(norms > 0, gaps / norms, gaps)
    row = float("inf") if rows.isnan().any() else float(rows.max())
    empty = exact_lse.isinf()
    if lse.isnan().any() or not torch.equal(lse.isinf(), empty):
        lse_error = float("inf")
    else:
        lse_error = float((lse - exact_lse)[~empty].abs().max()) if (~empty).any() else 0.0
    return Errors(relative_error(out, exact), row, lse_error, padding)


def random_plan(seed: int) -> dict[str, int]:
    """Overrides of :func:`mla_kernels.cuda.plan`: any tile, any split of the work, any merge."""
    rng = np.random.default_rng([seed, 1])
    return {"rows": int(rng.choice(build.TILE_ROWS)), "groups": int(2 ** rng.uniform(0, 8)),
            "combine_split": int(rng.choice(build.COMBINE_SPLITS))}


def run(case: Case, backend: str, **how: bool) -> Errors:
    """Runs a case into poisoned outputs and compares. ``how``: ``batch_invariant``."""
    a = case.arguments
    latent = a["q"] if isinstance(a["q"], torch.Tensor) else a["q"][0]
    out = torch.full((*latent.shape[:2], a["layout"].kv_lora_rank), torch.nan, dtype=latent.dtype,
                     device=latent.device)
    lse = torch.full(latent.shape[:2], torch.nan, dtype=torch.float32, device=latent.device)
    verify_attention(out=out, lse=lse, backend=backend, **a, **how)
    return compare(case, out, lse)


def _finite(numbers: dict) -> dict:
    """For JSON, which has no infinity: that becomes the text "inf"."""
    return {name: x if np.isfinite(x) else str(x) for name, x in numbers.items()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m mla_kernels.check",
        description="Compare a backend with the float64 oracle on random, poisoned cases.")
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=None, help="first seed; default: random")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--max-nodes", type=int, default=128)
    parser.add_argument("--every-plan", action="store_true",
                        help="launch each case by a random plan instead of the policy's")
    parser.add_argument("--out", type=Path, help="write a JSON summary here")
    args = parser.parse_args(argv)
    if args.device == "cpu" and args.backend == "cuda":
        print("error: backend cuda needs a CUDA device, and there is none here; see --backend "
              "triton or reference", file=sys.stderr)
        return 2
    if args.every_plan and args.backend != "cuda":
        print("error: --every-plan is of --backend cuda", file=sys.stderr)
        return 2
    first = args.seed if args.seed is not None else int(np.random.SeedSequence().entropy % 2**31)
    failed, worst = [], {"out": 0.0, "row": 0.0, "lse": 0.0}
    backends = set()
    for seed in tqdm(range(first, first + args.cases), leave=False, unit="case", mininterval=2):
        case = random_case(seed, device=args.device, max_nodes=args.max_nodes)
        a = case.arguments
        latent, rope = (a["layout"].split(a["q"]) if isinstance(a["q"], torch.Tensor) else a["q"])
        backends.add(choose_backend(latent, rope, args.backend))
        with cuda.launch_as(**random_plan(seed) if args.every_plan else {}):
            errors = run(case, args.backend)
        for name in worst:
            worst[name] = max(worst[name], getattr(errors, name))
        if not errors.passed:
            failed.append({"seed": seed, "case": case.text} | _finite(dataclasses.asdict(errors)))
            print(f"FAILED seed {seed}: {errors}\n  {case.text}", flush=True)
    on_gpu = args.device.startswith("cuda")
    summary = {
        "cases": args.cases, "failed": len(failed), "first_seed": first,
        "backend": sorted(backends), "worst": _finite(worst),
        "tolerance": {"out": OUT_TOLERANCE, "row": ROW_TOLERANCE, "lse": LSE_TOLERANCE},
        "max_nodes": args.max_nodes, "every_plan": args.every_plan,
        "device": local_gpu().name if on_gpu else "CPU", "failures": failed[:20],
    } | provenance()
    print(f"{args.cases - len(failed)} of {args.cases} cases passed on {summary['device']} with "
          f"{', '.join(summary['backend'])}: worst relative error {worst['out']:.2e} "
          f"(single row {worst['row']:.2e}), lse {worst['lse']:.2e}")
    if args.out:
        records.write(args.out, summary)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
