"""What names and offsets in an engine's source mean.

An offset is a linear form over L (``kv_lora_rank``), R (``qk_rope_head_dim``) and whatever
else occurs; that rest (token index times stride, a lane's number) is the same on both sides of
a copy and cancels, or selects the row and not the column.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from ..layout import Order

_L = "kv_lora_rank|lora_rank|nope_dim|dim_nope|nope_head_dim|head_dim_v|head_size_v|dv|d_v"
_R = "qk_rope_head_dim|rope_dim|dim_rope|pe_dim|rope_head_dim|n_embd_head_qk_rope"
_CACHE = re.compile(r"kv_?(buffer|cache|pool)|kv_c_and_k_pe_cache|workspace|blocked_k|"
                    r"(^|_)(k|key|dst)_buffer|(^|_)(cache|pool)$")
_LATENT = re.compile(r"(^|_)(k?_?nope|latent|ckv|c_kv|kv_c|k_c|compressed|kv_cmpr)(_|$)")
_ROPE = re.compile(r"(^|_)(k?_?rope|k?_?pe)(_|$)")
#: A name with one of these words is a number about a tensor, or belongs to the query.
_OTHER = re.compile(r"(^|_)(q\d?|query|has|is|num|n|stride|strides|bytes|dim|dtype|size|len|scale|"
                    r"scales|index|indices|ids|mask|offset|offs|head|emb|fn|proj|norm)(_|$)")


@dataclasses.dataclass(frozen=True)
class Form:
    """A sum of integer multiples of names. ``"1"`` is the constant's."""

    terms: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, terms: Mapping[str, int]) -> Form:
        return cls(tuple(sorted((k, v) for k, v in terms.items() if v)))

    def plus(self, other: Form, factor: int = 1) -> Form:
        terms = dict(self.terms)
        for name, count in other.terms:
            terms[name] = terms.get(name, 0) + factor * count
        return Form.of(terms)

    @property
    def column(self) -> Form:
        """The part that says where in a row: L, R and the constant."""
        return Form(tuple(t for t in self.terms if t[0] in ("L", "R", "1")))

    @property
    def constant(self) -> int | None:
        """Its value when it names nothing."""
        return dict(self.terms).get("1", 0) if all(k == "1" for k, _ in self.terms) else None

    def __str__(self) -> str:
        # L before R before the rest, numbers last.
        ordered = sorted(self.terms, key=lambda t: ("L", "R").index(t[0]) if t[0] in "LR" else
                         (3 if t[0] == "1" else 2))
        text = " + ".join(str(v) if k == "1" else k if v == 1 else f"{v}*{k}" for k, v in ordered)
        return text or "0"


ZERO, L, R = Form(), Form.of({"L": 1}), Form.of({"R": 1})
ROW = L.plus(R)


def number(value: int) -> Form:
    """A literal. The model's widths, written out, mean what the names mean."""
    return {512: L, 64: R, 576: ROW}.get(value, Form.of({"1": value}))


@dataclasses.dataclass(frozen=True)
class Part:
    """A tensor that holds one part of rows, or a pointer into it at an offset."""

    name: str
    at: Form = ZERO


@dataclasses.dataclass(frozen=True)
class Cache:
    """The cache, a pointer into it, or a window of its columns from ``at`` to ``stop``."""

    at: Form | None = None
    stop: Form | None = None


def meaning(name: str) -> Form | Part | Cache | None:
    """What a name by itself stands for, or None."""
    name = name.lower().rsplit(".", 1)[-1].strip("_").removesuffix("_ptr")
    if re.fullmatch(_L, name):
        return L
    if re.fullmatch(_R, name):
        return R
    if _OTHER.search(name):
        return None
    if _CACHE.search(name):
        return Cache()
    latent, rope = bool(_LATENT.search(name)), bool(_ROPE.search(name))
    return Part("latent" if latent else "rope") if latent != rope else None


def order_at(part: str, at: Form) -> Order | None:
    """The order in which ``part`` begins at column ``at``."""
    return {("latent", ZERO): "latent_first", ("rope", L): "latent_first",
            ("latent", R): "rope_first", ("rope", ZERO): "rope_first"}.get((part, at))


def order_of_window(start: Form, stop: Form | None) -> Order | None:
    """The order in which columns ``start : stop`` are exactly one part."""
    return {(ZERO, L): "latent_first", (L, None): "latent_first", (L, ROW): "latent_first",
            (ZERO, R): "rope_first", (R, None): "rope_first", (R, ROW): "rope_first"
            }.get((start, stop))


def window_text(start: Form, stop: Form | None) -> str:
    return f"row[{start} : {'L + R' if stop is None else stop}]"


@dataclasses.dataclass(frozen=True)
class Site:
    """One place in a source that fixes the order.

    Args:
        role: ``"write"`` or ``"value"`` (how a row is read back).
        expression: what it does in normal form; L is ``kv_lora_rank``, R ``qk_rope_head_dim``.
        sure: ``"followed"`` or ``"matched"``, see :class:`~.verdict.Testimony`.
        through: the functions from the entry to here.
    """

    role: str
    order: Order | None
    file: str
    line: int
    expression: str
    sure: str
    through: tuple[str, ...] = ()

    def __str__(self) -> str:
        role = self.role if self.sure == "followed" else f"{self.role}, {self.sure}"
        return f"{role}: {self.expression}   {self.file}:{self.line}"
