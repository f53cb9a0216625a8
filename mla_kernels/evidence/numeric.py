"""The third witness: numbers. Which reading of a cache reproduces captured outputs?

A hypothesis says in which order the rows lie, which scale the logits have, whether
``k_scale`` is applied, and whether the other 64 values of a row take part in the scores at all.
Each is computed in float64 and compared with the outputs. If one alone reproduces them, it is
the answer; if several do, the data cannot tell, and what those have in common is reported.

The last alternative is what makes "these 64 are the rope part" a finding: with a query that is
orthogonal to them, with a single token, or with rows that are all equal, the value's place can
be seen and the meaning of the rest cannot.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch

from ..layout import KVLayout, Order
from ..reference import attend, relative_error
from .verdict import Testimony

#: An output within this many rounding units of the captured numbers is reproduced. Kernels in
#: bf16 that round probabilities and outputs are off by 0.4 of one in our checks.
ROUNDINGS = 2.0
#: A hypothesis is a rival of the best while its error is within one rounding unit, or less than
#: this many times the best's.
CLEAR = 4.0


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """One way to read a cache.

    Args:
        order: of rows and queries; it says where the value is.
        scale: name of the softmax scale.
        k_scale: of an FP8 cache: ``"not applied"``, to the ``"keys"`` alone, or to the whole
            ``"row"``, key and value.
        rope: whether the rope part takes part in the scores.
    """

    order: Order
    scale: str
    k_scale: Literal["not applied", "keys", "row"]
    rope: bool


@dataclasses.dataclass(frozen=True)
class Comparison:
    """All hypotheses with their relative errors (norm over all outputs), best first.

    ``unit`` is the rounding unit of the captured numbers, relative.
    """

    errors: tuple[tuple[Hypothesis, float], ...]
    unit: float

    @property
    def fitting(self) -> list[Hypothesis]:
        """What reproduces the outputs and can't be told from the best of them."""
        best = self.errors[0][1]
        if best > ROUNDINGS * self.unit:
            return []
        return [h for h, e in self.errors if e <= max(self.unit, CLEAR * best)]

    @property
    def answer(self) -> Hypothesis | None:
        """The one that reproduces the outputs, or None for "cannot tell"."""
        return self.fitting[0] if len(self.fitting) == 1 else None

    @property
    def margin(self) -> float:
        """How many times larger the next hypothesis' error is than the best's."""
        if len(self.errors) < 2:
            return math.inf
        best, following = (e for _, e in self.errors[:2])
        return following / best if best else (math.inf if following else 1.0)

    def describe(self, hypothesis: Hypothesis, *, shared: Sequence[Hypothesis] = ()) -> str:
        """A hypothesis in words, without what was no question; given ``shared``, only what it
        has in common with those."""
        texts = {"order": hypothesis.order, "scale": hypothesis.scale,
                 "k_scale": f"k_scale {hypothesis.k_scale}",
                 "rope": "rope in scores" if hypothesis.rope else "no rope in scores"}
        if len({h.k_scale for h, _ in self.errors}) == 1:
            del texts["k_scale"]
        if hypothesis.rope and not shared:
            del texts["rope"]
        return ", ".join(text for name, text in texts.items()
                         if len({getattr(h, name) for h in (hypothesis, *shared)}) == 1)

    def testimony(self) -> Testimony:
        """The answer with what it rests on, or why there is none."""
        (best, error), (following, next_error) = self.errors[:2]
        seen = (f"best {error:.1e}: {self.describe(best)}",
                f"next {next_error:.1e}: {self.describe(following)}",
                f"margin {self.margin:.3g}x; rounding unit {self.unit:.1e}")
        if self.answer:
            return Testimony("numbers", best.order, seen)
        fitting = self.fitting
        if not fitting:
            return Testimony("numbers", None, ("no hypothesis reproduces the outputs", *seen))
        shared = self.describe(best, shared=fitting)
        common = f"; all of them have: {shared}" if shared else ""
        return Testimony("numbers", None, (
            f"{len(fitting)} of {len(self.errors)} hypotheses reproduce the outputs{common}",
            *seen))


def scales(mscale_factors: Sequence[float] = (40.0,), *, qk_nope_head_dim: int = 128,
           layout: KVLayout = KVLayout.LATENT_FIRST) -> dict[str, float]:
    """Softmax scales by name: the model's (nope and rope width of a head, as trained), with
    YaRN's mscale squared for each scaling factor (40 for DeepSeek-V3, 32 or 64 for Kimi K2), and
    the one that code takes from the row's width.

    mscale = 0.1 ln(factor) + 1, as in DeepSeek-V3's published code for ``mscale_all_dim`` 1.
    """
    width = qk_nope_head_dim + layout.qk_rope_head_dim
    found = {f"{width}^-0.5": width**-0.5}
    for factor in mscale_factors:
        found[f"{width}^-0.5 x mscale({factor:g})^2"] = width**-0.5 * (
            0.1 * math.log(factor) + 1) ** 2
    return {**found, f"{layout.row_dim}^-0.5": layout.row_dim**-0.5}


def compare(
    q: torch.Tensor,
    rows: torch.Tensor,
    out: torch.Tensor,
    *,
    visible: torch.Tensor | None = None,
    k_scale: float = 1.0,
    candidates: Mapping[str, float] | None = None,
    kv_lora_rank: int = 512,
    qk_rope_head_dim: int = 64,
) -> Comparison:
    """Tries every hypothesis on captured tensors.

    Args:
        q: ``[num_tokens, H, 576]``, absorbed queries, laid out as the rows are.
        rows: ``[context, 576]`` of the cache, as stored (an FP8 row unscaled).
        out: ``[num_tokens, H, 512]``, what the engine returned.
        visible: ``[num_tokens, context]`` bool; default everything, as in a decode step.
        k_scale: the cache's scale; 1 leaves that question out.
        candidates: softmax scales by name, default :func:`scales`.

    Raises:
        ValueError, TypeError: shapes or dtypes that don't fit, or numbers that aren't finite.
    """
    layout = KVLayout("latent_first", kv_lora_rank, qk_rope_head_dim)
    tensors = {"q": q, "rows": rows, "out": out}
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or not tensor.dtype.is_floating_point:
            got = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            hint = ". View an FP8 cache's uint8 as float8_e4m3fn" if got == torch.uint8 else ""
            if isinstance(tensor, torch.Tensor) and tensor.shape[-1:] == (656,):
                hint = (". 656 bytes are a scaled FP8 row (512 e4m3, 4 fp32 scales, 64 bf16), "
                        "not 576 numbers")
            raise TypeError(f"{name} must be a floating-point tensor; got {got}{hint}")
    layout.check_rows(rows, "rows")
    layout.check_rows(q, "q")
    if rows.dim() == 3 and rows.shape[1] == 1:
        rows = rows[:, 0]
    if rows.dim() != 2 or not len(rows):
        raise ValueError(f"rows must be [context, {layout.row_dim}]; got {list(rows.shape)}")
    if q.dim() != 3 or not q.numel():
        raise ValueError(f"q must be [num_tokens, H, {layout.row_dim}]; got {list(q.shape)}")
    if out.shape != (*q.shape[:2], kv_lora_rank):
        raise ValueError(f"out must be {[*q.shape[:2], kv_lora_rank]}, as q says; got "
                         f"{list(out.shape)}")
    if visible is None:
        visible = torch.ones(len(q), len(rows), dtype=torch.bool)
    if visible.dtype != torch.bool or visible.shape != (len(q), len(rows)):
        raise ValueError(f"visible must be bool {[len(q), len(rows)]}; got "
                         f"{list(visible.shape)} {visible.dtype}")
    if not math.isfinite(k_scale) or k_scale <= 0:
        raise ValueError(f"k_scale must be a positive number; got {k_scale}")
    epsilon = max(_epsilon(t) for t in tensors.values())
    q, rows, out = (t.cpu().double() for t in (q, rows, out))
    for name, tensor in (("q", q), ("rows", rows), ("out", out)):
        if not tensor.isfinite().all():
            raise ValueError(f"{name} holds numbers that are not finite")

    candidates = scales(layout=layout) if candidates is None else candidates
    applied = ("not applied", "keys", "row") if k_scale != 1 else ("not applied",)
    errors = []
    for order, (name, scale), how, rope in itertools.product(
            ("latent_first", "rope_first"), candidates.items(), applied, (True, False)):
        reading = dataclasses.replace(layout, order=order)
        factor = 1.0 if how == "not applied" else k_scale
        keys, query = (rows, q) if rope else (reading.latent(rows), reading.latent(q))
        values = reading.value(rows) * (factor if how == "row" else 1.0)
        guess, _ = attend(query, keys, values, visible.cpu(), sm_scale=scale * factor)
        errors.append((Hypothesis(order, name, how, rope), relative_error(guess, out)))
    errors.sort(key=lambda pair: pair[1])
    return Comparison(tuple(errors), epsilon)


def simulate(
    truth: Hypothesis | None = None, *, tokens: int = 4, context: int = 200, heads: int = 4,
    sharpness: float = 2.0, k_scale: float = 1.0, dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> dict[str, torch.Tensor | float]:
    """Made-up captured tensors of a call that was computed as ``truth`` says; arguments of
    :func:`compare`. Without ``truth``, the seed draws one.

    Args:
        sharpness: standard deviation of a query's logits under the model's own scale.
    """
    generator = torch.Generator().manual_seed(seed)
    named, layout = scales(), KVLayout()
    if truth is None:
        first, second, third = torch.randint(0, 1000, (3,), generator=generator).tolist()
        how = ("not applied", "keys", "row")[third % 3] if k_scale != 1 else "not applied"
        truth = Hypothesis(("latent_first", "rope_first")[first % 2],
                           list(named)[second % len(named)], how, True)
    reading = dataclasses.replace(layout, order=truth.order)
    rows = torch.randn(context, layout.row_dim, generator=generator).to(dtype)
    spread = sharpness / math.sqrt(layout.row_dim) / next(iter(named.values()))
    q = (torch.randn(tokens, heads, layout.row_dim, generator=generator) * spread).to(dtype)
    applied = truth.k_scale != "not applied"
    values = reading.value(rows).double() * (k_scale if truth.k_scale == "row" else 1.0)
    out, _ = attend(q, rows, values, torch.ones(tokens, context, dtype=torch.bool),
                    sm_scale=named[truth.scale] * (k_scale if applied else 1.0))
    return {"q": q, "rows": rows, "out": out.to(dtype), "k_scale": k_scale}


def load(path: Path | str) -> dict[str, torch.Tensor | float]:
    """Captured tensors ``q``, ``rows``, ``out`` and perhaps ``visible`` and ``k_scale``, from a
    ``.npz``, ``.pt`` or ``.safetensors`` file, as arguments of :func:`compare`.

    Raises:
        FileNotFoundError, ValueError: no such file, another kind, or tensors missing.
        ModuleNotFoundError: ``.safetensors`` without that package.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"captured: no file {path}")
    try:
        if path.suffix == ".npz":
            import numpy as np

            with np.load(path, allow_pickle=False) as file:
                found = {name: torch.from_numpy(file[name]) for name in file.files}
        elif path.suffix == ".pt":
            found = torch.load(path, map_location="cpu", weights_only=True)
        elif path.suffix == ".safetensors":
            try:
                from safetensors.torch import load_file
            except ModuleNotFoundError:
                raise ModuleNotFoundError(
                    "reading .safetensors needs: pip install safetensors") from None
            found = load_file(path)
        else:
            raise ValueError("must be a .npz, .pt or .safetensors file")
    except ModuleNotFoundError:
        raise
    except Exception as error:  # each library has its own for a file that isn't what it says
        reason = str(error).split("\n")[0]
        raise ValueError(f"captured {path.name}: {type(error).__name__}: {reason}") from None
    missing = [n for n in ("q", "rows", "out") if not isinstance(found, dict) or n not in found]
    if missing:
        has = ", ".join(found) if isinstance(found, dict) else type(found).__name__
        raise ValueError(f"captured {path.name} must hold q, rows and out; {', '.join(missing)} "
                         f"missing, it holds {has}")
    found = {n: found[n] for n in ("q", "rows", "out", "visible", "k_scale") if n in found}
    if "k_scale" in found:
        found["k_scale"] = float(found["k_scale"])
    return found


def _epsilon(tensor: torch.Tensor) -> float:
    """Spacing at 1 of the coarsest of bf16, fp16 and fp32 that holds all numbers exactly: the
    precision that they had, whatever they were saved as."""
    wide = tensor.double()
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(wide, tensor.to(dtype).double()):
            return torch.finfo(dtype).eps
    return torch.finfo(torch.float32).eps  # engines accumulate in fp32 even for wider numbers
