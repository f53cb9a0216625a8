"""layout: offsets, views without copies, and what is refused."""

from __future__ import annotations

import types

import numpy as np
import pytest
import torch

from mla_kernels.layout import ORDERS, ROW_DTYPES, KVLayout, pool_rows

BOTH = pytest.mark.parametrize("order", ORDERS)
DTYPES = pytest.mark.parametrize("dtype", ROW_DTYPES, ids=lambda d: str(d).split(".")[-1])


def random_widths(rng: np.random.Generator) -> tuple[int, int]:
    """A latent and a rope width that differ, so that swapping them shows."""
    rank, rope = rng.choice(np.arange(1, 700), size=2, replace=False)
    return int(rank), int(rope)


def random_rows(shape, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator).to(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equality that float8 tensors have too."""
    return (a.shape == b.shape and a.dtype == b.dtype
            and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)))


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


# -- widths and offsets -------------------------------------------------------------------


def test_the_published_widths():
    """512 + 64: what every MLA model so far has, and what the documentation quotes."""
    first, last = KVLayout.LATENT_FIRST, KVLayout.ROPE_FIRST
    assert (first.order, last.order) == ("latent_first", "rope_first")
    assert first.row_dim == last.row_dim == 576
    assert (first.latent_offset, first.rope_offset) == (0, 512)
    assert (last.latent_offset, last.rope_offset) == (64, 0)
    assert first.dtype is last.dtype is None
    assert first.with_dtype(torch.bfloat16).row_bytes == 1152
    assert last.with_dtype(torch.float8_e4m3fn).row_bytes == 576
    assert first.swapped == last and last.swapped == first and first != last


@BOTH
def test_segments_tile_the_row(order, rng):
    for _ in range(50):
        rank, rope = random_widths(rng)
        layout = KVLayout(order, rank, rope)
        names = [s.name for s in layout.segments]
        assert names == (["latent", "rope"] if order == "latent_first" else ["rope", "latent"])
        covered = [i for s in layout.segments for i in range(s.start, s.stop)]
        assert covered == list(range(rank + rope)) == list(range(layout.row_dim))
        by_name = {s.name: s for s in layout.segments}
        assert by_name["latent"].slice == layout.latent_slice
        assert by_name["rope"].slice == layout.rope_slice
        assert (by_name["latent"].size, by_name["rope"].size) == (rank, rope)
        assert layout.latent_offset == layout.latent_slice.start
        assert layout.rope_offset == layout.rope_slice.start


@DTYPES
def test_bytes_follow_the_dtype(dtype, rng):
    rank, rope = random_widths(rng)
    layout = KVLayout("rope_first", rank, rope, dtype)
    one = torch.empty(1, dtype=dtype)
    assert layout.itemsize == one.element_size()
    assert layout.row_bytes == (rank + rope) * one.element_size()
    other = torch.float16 if dtype != torch.float16 else torch.float32
    changed = layout.with_dtype(other)
    assert changed.dtype == other and changed.with_dtype(dtype) == layout
    assert layout.swapped.dtype == dtype


# -- parts of rows ------------------------------------------------------------------------


@BOTH
@DTYPES
@pytest.mark.parametrize("leading", [(), (7,), (3, 1), (2, 3, 4)], ids=str)
def test_split_gives_views_in_the_right_place(order, dtype, leading, rng, generator):
    rank, rope = random_widths(rng)
    layout = KVLayout(order, rank, rope)
    rows = random_rows((*leading, rank + rope), dtype, generator)
    latent, rope_part = layout.split(rows)
    assert latent.shape == (*leading, rank) and rope_part.shape == (*leading, rope)
    for part, offset in ((latent, layout.latent_offset), (rope_part, layout.rope_offset)):
        assert storage(part) == storage(rows)
        assert part.data_ptr() == rows.data_ptr() + offset * rows.element_size()
        assert part.stride() == rows.stride()
    assert same_bits(layout.latent(rows), latent) and same_bits(layout.rope(rows), rope_part)
    assert same_bits(layout.value(rows), latent)  # the value is the latent
    assert same_bits(layout.concat(latent, rope_part), rows)


@BOTH
def test_a_written_view_changes_the_row(order, generator):
    layout = KVLayout(order)
    rows = torch.randn(5, 576, generator=generator)
    before = rows.clone()
    layout.value(rows)[2] = 7.0
    changed = (rows != before).nonzero()
    assert set(changed[:, 0].tolist()) == {2}
    assert changed[:, 1].tolist() == list(range(layout.latent_offset, layout.latent_offset + 512))


@BOTH
def test_concat_against_a_loop(order, rng, generator):
    rank, rope = random_widths(rng)
    layout = KVLayout(order, rank, rope)
    latent = torch.randn(4, rank, generator=generator)
    rope_part = torch.randn(4, rope, generator=generator)
    rows = layout.concat(latent, rope_part)
    for i in range(4):
        a, b = latent[i].tolist(), rope_part[i].tolist()
        assert rows[i].tolist() == (a + b if order == "latent_first" else b + a)
    assert storage(rows) not in (storage(latent), storage(rope_part))


@BOTH
@DTYPES
def test_convert_moves_the_parts_and_nothing_else(order, dtype, rng, generator):
    rank, rope = random_widths(rng)
    layout = KVLayout(order, rank, rope)
    rows = random_rows((6, rank + rope), dtype, generator)
    there = layout.convert(rows, layout.swapped)
    assert same_bits(layout.swapped.latent(there), layout.latent(rows))
    assert same_bits(layout.swapped.rope(there), layout.rope(rows))
    assert not same_bits(there, rows)
    assert same_bits(layout.swapped.convert(there, layout), rows)
    copy = layout.convert(rows, layout)  # the same order: a new tensor all the same
    assert same_bits(copy, rows) and storage(copy) != storage(rows)


@BOTH
def test_impulses_mark_one_part_each(order, rng):
    rank, rope = random_widths(rng)
    layout = KVLayout(order, rank, rope)
    latent_only, rope_only = layout.impulses(3)
    assert latent_only.dtype == torch.bfloat16 and latent_only.shape == (3, rank + rope)
    assert torch.all(latent_only + rope_only == 1)
    assert torch.all(layout.latent(latent_only) == 1) and torch.all(layout.rope(rope_only) == 1)
    # Read in the other order they are told apart: some of each lands in the other part.
    assert layout.swapped.rope(latent_only).any()
    assert layout.impulses(dtype=torch.float32)[0].dtype == torch.float32
    assert layout.with_dtype(torch.float16).impulses()[1].dtype == torch.float16


# -- the ruler ----------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("width", [40, 72, 100])
def test_ruler_puts_numbers_under_the_bars(order, width):
    layout = KVLayout(order, dtype=torch.bfloat16)
    title, bar, elements, in_bytes = layout.ruler(width).split("\n")
    assert title == ("latent_first: 512 + 64" if order == "latent_first" else
                     "rope_first: 64 + 512")
    bars = [i for i, c in enumerate(bar) if c == "|"]
    assert len(bars) == 3 and bars[0] == 0 and bars[2] == width + 1
    first = layout.segments[0]
    assert bar[1:bars[1]].strip() == first.name
    assert bar[bars[1] + 1:bars[2]].strip() == layout.segments[1].name
    for line, unit, suffix in ((elements, 1, "elements"), (in_bytes, 2, "bytes (bfloat16)")):
        assert line.startswith("0 ") and line.endswith(f"  {suffix}")
        for at, value in ((bars[1], first.stop), (bars[2], 576)):
            text = f"{value * unit:,}"  # ends below its bar
            assert line[at - len(text):at + 1] == " " + text
    # To scale, as far as whole characters and the names allow.
    share = (bars[1] - 1) / width
    assert abs(share - first.size / 576) < 0.1 + 1 / width


def test_ruler_without_a_dtype_has_no_bytes():
    assert "bytes" not in KVLayout().ruler() and len(KVLayout().ruler().split("\n")) == 3


# -- from a model's configuration ---------------------------------------------------------


def as_object(config: dict) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        **{k: as_object(v) if isinstance(v, dict) else v for k, v in config.items()}
    )


@pytest.mark.parametrize("form", [dict, as_object], ids=["mapping", "object"])
@pytest.mark.parametrize("nested", [False, True], ids=["flat", "text_config"])
@BOTH
def test_from_config(order, form, nested, rng):
    rank, rope = random_widths(rng)
    config = {"model_type": "deepseek_v3", "kv_lora_rank": rank, "qk_rope_head_dim": rope}
    if nested:  # Kimi K2.5: a multimodal configuration around the language model's
        config = {"model_type": "kimi_k25", "text_config": config}
    layout = KVLayout.from_config(form(config), order, torch.bfloat16)
    assert layout == KVLayout(order, rank, rope, torch.bfloat16)


def test_from_config_prefers_the_outer_fields():
    config = {"kv_lora_rank": 512, "qk_rope_head_dim": 64,
              "text_config": {"kv_lora_rank": 8, "qk_rope_head_dim": 4}}
    assert KVLayout.from_config(config, "rope_first") == KVLayout.ROPE_FIRST


@pytest.mark.parametrize("form", [dict, as_object], ids=["mapping", "object"])
def test_from_config_refuses_a_model_without_mla(form):
    config = {"model_type": "llama", "num_key_value_heads": 8}
    with pytest.raises(ValueError, match="no kv_lora_rank: model_type 'llama' does not use"):
        KVLayout.from_config(form(config), "latent_first")
    with pytest.raises(ValueError, match="does not use Multi-head Latent Attention"):
        KVLayout.from_config(form({**config, "kv_lora_rank": None}), "latent_first")


@pytest.mark.parametrize("config", [
    {"kv_lora_rank": 512}, {"kv_lora_rank": 512, "qk_rope_head_dim": None},
    {"kv_lora_rank": 512, "qk_rope_head_dim": 0},
], ids=["absent", "None", "0"])
def test_from_config_refuses_a_model_without_rope(config):
    with pytest.raises(ValueError, match="qk_rope_head_dim must be at least 1; got 0. A model "
                                         "without rotary dimensions"):
        KVLayout.from_config(config, "latent_first")


# -- what is refused ----------------------------------------------------------------------


@pytest.mark.parametrize(("arguments", "error", "message"), [
    ({"order": "latent-first"}, ValueError, "order must be one of latent_first, rope_first; got "
                                            "'latent-first'"),
    ({"kv_lora_rank": 512.0}, TypeError, r"kv_lora_rank must be an int; got 512.0 \(float\)"),
    ({"kv_lora_rank": "512"}, TypeError, "kv_lora_rank must be an int"),
    ({"qk_rope_head_dim": True}, TypeError, "qk_rope_head_dim must be an int; got True"),
    ({"qk_rope_head_dim": None}, TypeError, "qk_rope_head_dim must be an int; got None"),
    ({"kv_lora_rank": 0}, ValueError, "kv_lora_rank must be at least 1; got 0"),
    ({"kv_lora_rank": -512}, ValueError, "kv_lora_rank must be at least 1; got -512"),
    ({"qk_rope_head_dim": 0}, ValueError, "qk_rope_head_dim must be at least 1; got 0"),
    ({"qk_rope_head_dim": -1}, ValueError, "qk_rope_head_dim must be at least 1; got -1"),
    ({"dtype": "bfloat16"}, TypeError, "dtype must be a torch.dtype or None; got 'bfloat16'"),
    ({"dtype": torch.uint8}, ValueError, "got torch.uint8. FP8 caches stored as uint8 must be "
                                         "viewed"),
    ({"dtype": torch.int32}, ValueError, "dtype must be one of bfloat16, float16, "),
], ids=lambda v: str(v) if isinstance(v, dict) else "")
def test_refused_layouts(arguments, error, message):
    with pytest.raises(error, match=message):
        KVLayout(**arguments)


def test_bytes_without_a_dtype_are_refused():
    for name in ("itemsize", "row_bytes"):
        with pytest.raises(ValueError, match="dtype is None, and bytes depend on it"):
            getattr(KVLayout(), name)


def test_refused_rows():
    layout = KVLayout()
    with pytest.raises(TypeError, match="rows must be a tensor; got ndarray"):
        layout.split(np.zeros((2, 576)))
    with pytest.raises(ValueError, match=r"rows must be \[..., 576\] \(512 latent \+ 64 rope\); "
                                         r"got \[2, 575\]$"):
        layout.latent(torch.zeros(2, 575))
    with pytest.raises(ValueError, match=r"got \[\]"):
        layout.rope(torch.zeros(()))
    with pytest.raises(ValueError, match=r"got \[2, 656\]. 656 is the byte width of a scaled FP8"):
        layout.latent(torch.zeros(2, 656, dtype=torch.uint8))
    with pytest.raises(ValueError, match="rows must be torch.bfloat16, as the layout says; got "
                                         "torch.float16"):
        layout.with_dtype(torch.bfloat16).rope(torch.zeros(2, 576, dtype=torch.float16))
    with pytest.raises(ValueError, match="rows has dtype torch.int32, which no cache row"):
        layout.split(torch.zeros(2, 576, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"cache must be \[..., 576\]"):
        layout.check_rows(torch.zeros(2, 64), "cache")


def test_refused_parts():
    layout = KVLayout()
    latent, rope = torch.zeros(3, 512), torch.zeros(3, 64)
    with pytest.raises(ValueError, match=r"latent must be \[..., 512\]; got \[3, 64\]"):
        layout.concat(rope, latent)
    with pytest.raises(ValueError, match=r"rope must be \[..., 64\]; got \[3, 63\]"):
        layout.concat(latent, rope[:, :63])
    with pytest.raises(ValueError, match="latent and rope differ in dtype: torch.float32, "
                                         "torch.float16"):
        layout.concat(latent, rope.half())
    with pytest.raises(ValueError, match=r"to must have the same widths; got 448 \+ 128 for "
                                         r"512 \+ 64"):
        layout.convert(torch.zeros(3, 576), KVLayout("latent_first", 448, 128))


# -- pools --------------------------------------------------------------------------------


def pools(generator: torch.Generator) -> dict[str, torch.Tensor]:
    """The shapes in which engines hold a pool of 48 slots, and views of wider buffers."""
    def fill(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "slots": fill(48, 576),
        "slots, 1": fill(48, 1, 576),
        "pages": fill(3, 16, 576),
        "one page": fill(1, 48, 576),
        "slots of a wider row": fill(48, 700)[:, 10:586],
        "slots, 1 of a wider row": fill(48, 2, 700)[:, 1:, 5:581],
        "pages of a wider row": fill(3, 16, 640)[..., 64:],
        "every other slot": fill(96, 576)[::2],
        "every other page, single slots": fill(96, 1, 576)[::2],
        "a layer of all layers": fill(5, 48, 576)[3],
        "one page, cut": fill(1, 64, 576)[:, :48],
    }


@pytest.mark.parametrize("name", list(pools(torch.Generator())))
def test_pool_rows_is_a_view_with_the_same_slots(name, generator):
    pool = pools(generator)[name]
    page = pool.shape[1] if pool.dim() == 3 else 1
    rows = pool_rows(pool, KVLayout.LATENT_FIRST)
    assert rows.shape == (48, 576) and rows.stride(1) == 1
    assert storage(rows) == storage(pool) and rows.data_ptr() == pool.data_ptr()
    for slot in range(48):
        there = pool[slot] if pool.dim() == 2 else pool[slot // page, slot % page]
        assert torch.equal(rows[slot], there)
        assert rows[slot].data_ptr() == there.data_ptr()


def test_refused_pools():
    layout = KVLayout.LATENT_FIRST
    for shape in [(576,), (2, 3, 4, 576)]:
        with pytest.raises(ValueError, match=r"kv_pool must be \[slots, 576\], \[slots, 1, 576\] "
                                             r"or \[pages, page_size, 576\]; got"):
            pool_rows(torch.zeros(shape), layout)
    with pytest.raises(ValueError, match=r"kv_pool must be \[..., 576\].*got \[4, 512\]"):
        pool_rows(torch.zeros(4, 512), layout)
    with pytest.raises(TypeError, match="cache must be a tensor; got list"):
        pool_rows([[0.0] * 576], layout, "cache")
    with pytest.raises(ValueError, match="contiguous rows; its last stride is 2"):
        pool_rows(torch.zeros(4, 1152)[:, ::2], layout)
    with pytest.raises(ValueError, match="contiguous rows; its last stride is 4"):
        pool_rows(torch.zeros(576, 4).t(), layout)
    gap = torch.zeros(3, 17, 576)[:, :16]
    with pytest.raises(ValueError, match=r"page_size \* row stride = 16 \* 576 = 9216 elements; "
                                         r"got 9792"):
        pool_rows(gap, layout)
    turned = torch.zeros(16, 3, 576).transpose(0, 1)
    with pytest.raises(ValueError, match=r"pages that follow one another.* = 16 \* 1728 = 27648 "
                                         r"elements; got 576"):
        pool_rows(turned, layout)
    repeated = torch.zeros(1, 16, 576).expand(3, 16, 576)
    with pytest.raises(ValueError, match="elements; got 0"):
        pool_rows(repeated, layout)
