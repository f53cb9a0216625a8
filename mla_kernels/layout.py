"""What one row of an MLA KV cache means: which of its values are latent and which are rope.

A Multi-head Latent Attention cache keeps one row per token for all heads. The row holds
``kv_lora_rank`` latent values (the compressed key, and at the same time the value) and
``qk_rope_head_dim`` values of the rotary key. The two parts lie side by side, and engines
do not agree on which comes first::

    latent_first   [ latent 0 .. 511 | rope 512 .. 575 ]   SGLang, vLLM, FlashMLA, FlashInfer
    rope_first     [ rope 0 .. 63 | latent 64 .. 575 ]     llama.cpp before January 2026

A score is the dot product over the whole row, so it does not notice the order as long as
the query has the same one. The value does: it is the latent part alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import torch

Order = Literal["latent_first", "rope_first"]
ORDERS: tuple[Order, ...] = ("latent_first", "rope_first")

#: Element types that a row may be stored in. One-byte types appear only as plain rows
#: (576 e4m3 values); rows that carry scales between the parts, such as the 656-byte row of
#: FlashMLA and DSA, are not a concatenation of two parts and are refused.
ROW_DTYPES: tuple[torch.dtype, ...] = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


class Segment(NamedTuple):
    """One part of a row: its name, and where it lies in elements (``start`` to ``stop``)."""

    name: Literal["latent", "rope"]
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)


@dataclasses.dataclass(frozen=True)
class KVLayout:
    """The meaning of a cache row.

    Args:
        order: ``"latent_first"`` or ``"rope_first"``.
        kv_lora_rank: width of the latent part, in elements. 512 for DeepSeek V2, V3 and R1
            and for Kimi K2.x (``kv_lora_rank`` in their ``config.json``).
        qk_rope_head_dim: width of the rotary part, in elements; 64 for the same models.
        dtype: element type, or None for "whatever the cache holds". Offsets in bytes need
            one; offsets in elements do not.

    Raises:
        TypeError: a width is not an int, or ``dtype`` is not a ``torch.dtype``.
        ValueError: an unknown order, a width below 1 (a model without rotary dimensions has
            no such row), or a dtype that rows are not stored in.

    ``KVLayout.LATENT_FIRST`` and ``KVLayout.ROPE_FIRST`` are the two 512 + 64 layouts with
    no dtype of their own.
    """

    order: Order = "latent_first"
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    dtype: torch.dtype | None = None

    LATENT_FIRST: ClassVar[KVLayout]
    ROPE_FIRST: ClassVar[KVLayout]

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ValueError(f"order must be one of {', '.join(ORDERS)}; got {self.order!r}")
        for name in ("kv_lora_rank", "qk_rope_head_dim"):
            width = getattr(self, name)
            if isinstance(width, bool) or not isinstance(width, int):
                raise TypeError(f"{name} must be an int; got {width!r} ({type(width).__name__})")
        if self.kv_lora_rank < 1:
            raise ValueError(f"kv_lora_rank must be at least 1; got {self.kv_lora_rank}")
        if self.qk_rope_head_dim < 1:
            raise ValueError(
                f"qk_rope_head_dim must be at least 1; got {self.qk_rope_head_dim}. A model "
                "without rotary dimensions has a cache row of latent alone, and no order to "
                "ask about"
            )
        if self.dtype is not None:
            if not isinstance(self.dtype, torch.dtype):
                raise TypeError(f"dtype must be a torch.dtype or None; got {self.dtype!r}")
            if self.dtype not in ROW_DTYPES:
                known = ", ".join(str(d).removeprefix("torch.") for d in ROW_DTYPES)
                raise ValueError(
                    f"dtype must be one of {known}; got {self.dtype}. FP8 caches stored as "
                    "uint8 must be viewed as float8_e4m3fn first"
                )

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any] | Any, order: Order, dtype: torch.dtype | None = None
    ) -> KVLayout:
        """The layout of a model, its widths read from its Hugging Face ``config.json``.

        Args:
            config: a mapping, or an object with attributes, that has ``kv_lora_rank`` and
                ``qk_rope_head_dim``. A ``text_config`` inside it is looked into (Kimi K2.5
                nests the language model's configuration there).
            order: the engine's row order. No model configuration says it: it is a choice of
                the engine.

        Raises:
            ValueError: the model has no such fields, hence no MLA.
        """

        def get(source: Any, name: str) -> Any:
            return source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)

        for source in (config, get(config, "text_config")):
            if source is not None and get(source, "kv_lora_rank") is not None:
                break
        else:
            kind = get(config, "model_type") or type(config).__name__
            raise ValueError(
                f"config has no kv_lora_rank: model_type {kind!r} does not use Multi-head "
                "Latent Attention"
            )
        return cls(order, get(source, "kv_lora_rank"), get(source, "qk_rope_head_dim") or 0, dtype)

    # -- widths and offsets ---------------------------------------------------------------

    @property
    def row_dim(self) -> int:
        """Elements in a row: ``kv_lora_rank + qk_rope_head_dim``, 576 for 512 + 64."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def latent_offset(self) -> int:
        """First element of the latent part, and so of the value."""
        return 0 if self.order == "latent_first" else self.qk_rope_head_dim

    @property
    def rope_offset(self) -> int:
        """First element of the rotary part."""
        return self.kv_lora_rank if self.order == "latent_first" else 0

    @property
    def latent_slice(self) -> slice:
        return slice(self.latent_offset, self.latent_offset + self.kv_lora_rank)

    @property
    def rope_slice(self) -> slice:
        return slice(self.rope_offset, self.rope_offset + self.qk_rope_head_dim)

    @property
    def segments(self) -> tuple[Segment, Segment]:
        """The two parts in the order in which they lie in memory."""
        latent = Segment("latent", self.latent_slice.start, self.latent_slice.stop)
        rope = Segment("rope", self.rope_slice.start, self.rope_slice.stop)
        return (latent, rope) if self.order == "latent_first" else (rope, latent)

    @property
    def itemsize(self) -> int:
        """Bytes of one element.

        Raises:
            ValueError: the layout has no dtype.
        """
        if self.dtype is None:
            raise ValueError(
                "dtype is None, and bytes depend on it: use layout.with_dtype(torch.bfloat16) "
                "or another dtype first"
            )
        return self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of one row: 1,152 for 512 + 64 in bf16."""
        return self.row_dim * self.itemsize

    def with_dtype(self, dtype: torch.dtype) -> KVLayout:
        return dataclasses.replace(self, dtype=dtype)

    @property
    def swapped(self) -> KVLayout:
        """The same row read in the other order."""
        other: Order = "rope_first" if self.order == "latent_first" else "latent_first"
        return dataclasses.replace(self, order=other)

    def ruler(self, width: int = 72) -> str:
        """The row drawn to scale as text, with its boundaries in elements and, when the
        layout has a dtype, in bytes.

        Args:
            width: characters between the outer bars.
        """
        first, second = self.segments
        cut = min(max(round(width * first.size / self.row_dim), len(first.name) + 2),
                  width - len(second.name) - 3)
        bar = f"|{first.name.center(cut)}|{second.name.center(width - cut - 1)}|"

        def marks(unit: int, suffix: str) -> str:
            line = [" "] * (width + 16)
            for at, value in ((0, 0), (cut + 1, first.stop), (width + 1, self.row_dim)):
                text = f"{value * unit:,}"
                begin = at if at == 0 else at - len(text) + 1
                line[begin:begin + len(text)] = text
            return "".join(line).rstrip() + f"  {suffix}"

        lines = [f"{self.order}: {' + '.join(str(s.size) for s in (first, second))}", bar,
                 marks(1, "elements")]
        if self.dtype is not None:
            name = str(self.dtype).removeprefix("torch.")
            lines.append(marks(self.itemsize, f"bytes ({name})"))
        return "\n".join(lines)

    # -- rows -----------------------------------------------------------------------------

    def check_rows(self, rows: torch.Tensor, name: str = "rows") -> None:
        """Raises ValueError or TypeError unless ``rows`` is a tensor ``[..., row_dim]`` of this
        layout's dtype (any known dtype when the layout has none)."""
        if not isinstance(rows, torch.Tensor):
            raise TypeError(f"{name} must be a tensor; got {type(rows).__name__}")
        if rows.dim() < 1 or rows.shape[-1] != self.row_dim:
            hint = ""
            if rows.dim() and rows.shape[-1] == 656:
                hint = (". 656 is the byte width of a scaled FP8 row (512 e4m3, 4 fp32 scales, "
                        "64 bf16), which is not a plain row")
            raise ValueError(
                f"{name} must be [..., {self.row_dim}] ({self.kv_lora_rank} latent + "
                f"{self.qk_rope_head_dim} rope); got {list(rows.shape)}{hint}"
            )
        if self.dtype is not None and rows.dtype != self.dtype:
            raise ValueError(f"{name} must be {self.dtype}, as the layout says; got {rows.dtype}")
        if rows.dtype not in ROW_DTYPES:
            raise ValueError(f"{name} has dtype {rows.dtype}, which no cache row is stored in")

    def latent(self, rows: torch.Tensor) -> torch.Tensor:
        """The latent part ``[..., kv_lora_rank]`` of ``rows`` ``[..., row_dim]``; a view."""
        self.check_rows(rows)
        return rows[..., self.latent_slice]

    def rope(self, rows: torch.Tensor) -> torch.Tensor:
        """The rotary part ``[..., qk_rope_head_dim]`` of ``rows`` ``[..., row_dim]``; a view."""
        self.check_rows(rows)
        return rows[..., self.rope_slice]

    #: The value is the latent; the second name is for code that speaks of attention.
    value = latent

    def split(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``(latent, rope)`` of ``rows``, in this order whatever the layout's; both views."""
        return self.latent(rows), self.rope(rows)

    def concat(self, latent: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        """Rows ``[..., row_dim]`` from ``latent`` ``[..., kv_lora_rank]`` and ``rope``
        ``[..., qk_rope_head_dim]``, the inverse of :meth:`split`. Allocates.

        Raises:
            ValueError: widths or dtypes that do not fit. Swapped arguments are caught here
                because the widths differ.
        """
        for name, part, width in (("latent", latent, self.kv_lora_rank),
                                  ("rope", rope, self.qk_rope_head_dim)):
            if part.shape[-1] != width:
                raise ValueError(f"{name} must be [..., {width}]; got {list(part.shape)}")
        if latent.dtype != rope.dtype:
            raise ValueError(f"latent and rope differ in dtype: {latent.dtype}, {rope.dtype}")
        parts = (latent, rope) if self.order == "latent_first" else (rope, latent)
        return torch.cat(parts, dim=-1)

    def convert(self, rows: torch.Tensor, to: KVLayout) -> torch.Tensor:
        """``rows`` of this layout rewritten in the order of ``to``; always a new tensor."""
        if (to.kv_lora_rank, to.qk_rope_head_dim) != (self.kv_lora_rank, self.qk_rope_head_dim):
            raise ValueError(
                f"to must have the same widths; got {to.kv_lora_rank} + {to.qk_rope_head_dim} "
                f"for {self.kv_lora_rank} + {self.qk_rope_head_dim}"
            )
        return to.concat(*self.split(rows))

    def impulses(
        self, count: int = 1, *, dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows that mark one part each, to see where an engine's writer puts it.

        Returns:
            ``(latent_only, rope_only)``, each ``[count, row_dim]``: 1 in the named part, 0
            elsewhere.
        """
        kind = {"dtype": dtype or self.dtype or torch.bfloat16, "device": device}
        r, d = self.kv_lora_rank, self.qk_rope_head_dim
        one, zero = torch.ones, torch.zeros
        latent_only = self.concat(one(count, r, **kind), zero(count, d, **kind))
        rope_only = self.concat(zero(count, r, **kind), one(count, d, **kind))
        return latent_only, rope_only


KVLayout.LATENT_FIRST = KVLayout("latent_first")
KVLayout.ROPE_FIRST = KVLayout("rope_first")


def pool_rows(kv_pool: torch.Tensor, layout: KVLayout, name: str = "kv_pool") -> torch.Tensor:
    """A cache pool as ``[slots, row_dim]``, one row a slot; always a view.

    Args:
        kv_pool: ``[slots, row_dim]``, ``[slots, 1, row_dim]`` or ``[pages, page_size,
            row_dim]``. May itself be a view of something wider: the row stride is kept.

    Raises:
        TypeError, ValueError: not a tensor, another width, a row that is not contiguous, or
            pages whose distance is not ``page_size`` rows, so that no single row stride
            reaches every slot.
    """
    layout.check_rows(kv_pool, name)
    if kv_pool.dim() not in (2, 3):
        raise ValueError(
            f"{name} must be [slots, {layout.row_dim}], [slots, 1, {layout.row_dim}] or "
            f"[pages, page_size, {layout.row_dim}]; got {list(kv_pool.shape)}"
        )
    if kv_pool.stride(-1) != 1:
        raise ValueError(f"{name} must have contiguous rows; its last stride is "
                         f"{kv_pool.stride(-1)}")
    if kv_pool.dim() == 2:
        return kv_pool
    pages, page_size, width = kv_pool.shape
    if page_size == 1:
        return kv_pool[:, 0]
    row_stride = kv_pool.stride(1)
    if pages > 1 and kv_pool.stride(0) != page_size * row_stride:
        raise ValueError(
            f"{name} must have pages that follow one another: page stride must be page_size * "
            f"row stride = {page_size} * {row_stride} = {page_size * row_stride} elements; got "
            f"{kv_pool.stride(0)}"
        )
    return kv_pool.as_strided((pages * page_size, width), (row_stride, 1),
                              kv_pool.storage_offset())
