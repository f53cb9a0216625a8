"""Does the live witness name the order of a buffer, and refuse one that has neither?"""

import pytest
import torch

from mla_kernels.evidence import (
    OrderUnknown,
    WitnessesDisagree,
    evidence_for,
    order_of_buffer,
    order_of_scaled_buffer,
    order_of_value,
    sglang,
    verdict_for,
)
from mla_kernels.layout import ORDERS, KVLayout

WIDTHS = [(512, 64), (128, 32), (64, 64)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn]


class Pool:
    """A cache with a writer and a reader, in whichever order it is told."""

    def __init__(self, layout, dtype=torch.bfloat16, shape=(6, 1)):
        self.layout = layout
        self.buffer = torch.randn(*shape, layout.row_dim).to(dtype)
        self.rows = self.buffer.view(-1, layout.row_dim)

    def write(self, slot, latent, rope):
        assert latent.shape == (1, self.layout.kv_lora_rank)
        assert rope.shape == (1, self.layout.qk_rope_head_dim)
        self.rows[slot] = self.layout.concat(latent, rope)[0]

    def read(self, slot):
        return self.rows[slot, self.layout.latent_slice]


def widths(layout):
    return {"kv_lora_rank": layout.kv_lora_rank, "qk_rope_head_dim": layout.qk_rope_head_dim}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("width", WIDTHS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_writer_of_either_order_is_named(order, width, dtype):
    pool = Pool(KVLayout(order, *width), dtype)
    assert order_of_buffer(pool.write, pool.buffer, **widths(pool.layout)) == order


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("width", WIDTHS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reader_of_either_order_is_named(order, width, dtype):
    pool = Pool(KVLayout(order, *width), dtype)
    assert order_of_value(pool.read, pool.buffer, **widths(pool.layout)) == order


@pytest.mark.parametrize("shape", [(6,), (6, 1), (3, 4)], ids=str)
def test_buffer_is_left_as_it_was(shape):
    pool = Pool(KVLayout.ROPE_FIRST, shape=shape)
    pool.rows[2] = torch.nan
    before = pool.buffer.clone()
    slot = len(pool.rows) - 1
    order_of_buffer(pool.write, pool.buffer, slot=slot)
    order_of_value(pool.read, pool.buffer, slot=slot)
    assert torch.equal(pool.buffer.view(torch.int16), before.view(torch.int16))


def scrambled(kind):
    """A pool that is wrong in one way, and what the refusal must say."""
    pool = Pool(KVLayout.LATENT_FIRST)
    right = pool.write

    def permute(index):
        def write(slot, latent, rope):
            right(slot, latent, rope)
            pool.rows[slot] = pool.rows[slot, index]
        return write

    whole = torch.arange(576)
    if kind == "rope in the middle":
        pool.write = permute(torch.cat([whole[:256], whole[512:], whole[256:512]]))
        return pool, r"latent part is at elements 0 \.\. 255, 320 \.\. 575.* at 256 \.\. 319"
    if kind == "interleaved":
        pool.write = permute(torch.randperm(576, generator=torch.Generator().manual_seed(1)))
        return pool, "neither latent_first nor rope_first"
    if kind == "latent permuted in itself":
        pool.write = permute(torch.cat([whole[:512].flip(0), whole[512:]]))
        return pool, "lie as in latent_first, but their elements are permuted, first at element 0"
    if kind == "writes elsewhere":
        pool.write = lambda slot, latent, rope: None
        return pool, "left the slot as it was"
    if kind == "latent only":
        pool.write = lambda slot, latent, rope: pool.rows[slot, :512].copy_(latent[0])
        return pool, r"left elements 512 \.\. 575 as they were"
    if kind == "next slot too":
        def both(slot, latent, rope):
            right(slot, latent, rope)
            right(slot + 1, latent, rope)
        pool.write = both
        return pool, "slot 1 changed slot 2 too"
    raise AssertionError(kind)


@pytest.mark.parametrize("kind", [
    "rope in the middle", "interleaved", "latent permuted in itself", "writes elsewhere",
    "latent only", "next slot too",
])
def test_scrambled_pool_is_refused_and_restored(kind):
    pool, message = scrambled(kind)
    before = pool.buffer.clone()
    with pytest.raises(OrderUnknown, match=message):
        order_of_buffer(pool.write, pool.buffer)
    assert torch.equal(pool.buffer, before)


@pytest.mark.parametrize("window", [slice(32, 544), slice(0, 576), slice(0, 511)], ids=str)
def test_reader_of_another_window_is_refused(window):
    pool = Pool(KVLayout.LATENT_FIRST)
    with pytest.raises(OrderUnknown, match="neither 0 .. 511 nor 64 .. 575"):
        order_of_value(lambda slot: pool.rows[slot, window], pool.buffer)


def test_a_large_buffer_is_not_copied_whole(monkeypatch):
    pool = Pool(KVLayout.ROPE_FIRST, torch.float8_e4m3fn, shape=(9000, 1))
    copied = []
    monkeypatch.setattr(torch.Tensor, "clone", lambda t: copied.append(t.numel()) or t + 0)
    before = pool.buffer.float()
    assert order_of_buffer(pool.write, pool.buffer, slot=5000) == "rope_first"
    assert torch.equal(pool.buffer.float(), before) and sum(copied) < 9000

    def too_far(slot, latent, rope):
        pool.write(slot, latent, rope)
        pool.rows[slot + 8] = 1

    with pytest.raises(OrderUnknown, match="slot 5000 changed slot 5008 too"):
        order_of_buffer(too_far, pool.buffer, slot=5000)
    assert torch.equal(pool.buffer.float(), before)


def test_buffers_without_plain_rows_are_refused():
    def write(slot, latent, rope):
        raise AssertionError("not to be called")

    with pytest.raises(ValueError, match="656 is the byte width of a scaled FP8 row"):
        order_of_buffer(write, torch.zeros(4, 1, 656, dtype=torch.uint8))
    with pytest.raises(ValueError, match="slot must be in 0 .. 3; got 4"):
        order_of_buffer(write, torch.zeros(4, 1, 576), slot=4)


# -- rows of 656 bytes --------------------------------------------------------------------


def scaled_writer(rows, places, permute=lambda latent: latent):
    """Quantizes as the row's definition says: e4m3 with a scale for each 128."""
    latent_at, scales_at, rope_at = places

    def write(slot, latent, rope):
        groups = permute(latent).float().view(4, 128)
        scales = groups.abs().amax(1).clamp(min=1e-4) / 448
        codes = (groups / scales[:, None]).to(torch.float8_e4m3fn).view(torch.uint8)
        rows[slot, latent_at:latent_at + 512] = codes.flatten()
        rows[slot, scales_at:scales_at + 16] = scales.view(torch.uint8)
        rows[slot, rope_at:rope_at + 128] = rope.bfloat16().view(torch.uint8).flatten()
    return write


@pytest.mark.parametrize(("places", "order"), [
    ((0, 512, 528), "latent_first"), ((128, 640, 0), "rope_first"), ((0, 640, 512), None)])
def test_scaled_rows(places, order, generator):
    buffer = torch.randint(0, 256, (6, 1, 656), generator=generator, dtype=torch.uint8)
    before = buffer.clone()
    write = scaled_writer(buffer.view(6, 656), places)
    if order:
        assert order_of_scaled_buffer(write, buffer, slot=2) == order
    else:
        with pytest.raises(OrderUnknown, match="656 bytes are neither"):
            order_of_scaled_buffer(write, buffer, slot=2)
    assert torch.equal(buffer, before)


def test_a_scaled_row_whose_latent_is_permuted_is_refused():
    buffer = torch.zeros(6, 656, dtype=torch.uint8)
    write = scaled_writer(buffer, (0, 512, 528), lambda latent: latent.roll(1, dims=-1))
    with pytest.raises(OrderUnknown, match="656 bytes are neither"):
        order_of_scaled_buffer(write, buffer)


def test_scaled_rows_must_be_that():
    for wrong in (torch.zeros(4, 1, 576, dtype=torch.bfloat16),
                  torch.zeros(4, 656, dtype=torch.bfloat16), torch.zeros(656, dtype=torch.uint8)):
        with pytest.raises(ValueError, match=r"uint8 \[\.\.\., 656\], rows of 512 e4m3"):
            order_of_scaled_buffer(lambda *_: None, wrong)


# -- pools with SGLang's methods ----------------------------------------------------------


class LikeSGLang:
    """The methods of ``MLATokenToKVPool`` that matter, in either order."""

    kv_lora_rank, qk_rope_head_dim, start_layer, dtype = 512, 64, 0, torch.bfloat16

    def __init__(self, order, reader=None, drops_slot_0=True):
        self.layout, self.reader = KVLayout(order), KVLayout(reader or order)
        self.kv_buffer = [torch.randn(9, 1, 576).bfloat16()]
        self.drops_slot_0 = drops_slot_0

    def set_mla_kv_buffer(self, layer, loc, latent, rope):
        if not (self.drops_slot_0 and int(loc) == 0):
            self.kv_buffer[layer.layer_id][loc] = self.layout.concat(latent, rope)

    def get_value_buffer(self, layer_id):
        return self.reader.value(self.kv_buffer[layer_id])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("drops_slot_0", [True, False])
def test_evidence_for_a_pool(order, drops_slot_0):
    pool = LikeSGLang(order, drops_slot_0=drops_slot_0)
    before = pool.kv_buffer[0].clone()
    assert evidence_for(pool) == KVLayout(order, dtype=torch.bfloat16)
    assert torch.equal(pool.kv_buffer[0], before)


def test_writer_and_reader_that_differ_are_both_shown():
    with pytest.raises(WitnessesDisagree, match="set_mla_kv_buffer is latent_first, the reader "
                                                "get_value_buffer is rope_first"):
        evidence_for(LikeSGLang("latent_first", "rope_first"))


class SaysOne(LikeSGLang):
    """Its source writes rope first; what it does is in ``written_as``."""

    written_as = "latent_first"

    def set_mla_kv_buffer(self, layer, loc, cache_k_nope, cache_k_rope):
        if self.written_as == "latent_first":
            return super().set_mla_kv_buffer(layer, loc, cache_k_nope, cache_k_rope)
        self.kv_buffer[layer.layer_id][loc] = torch.cat([cache_k_rope, cache_k_nope], dim=-1)


def test_source_against_live_buffer_is_an_error_that_shows_both():
    with pytest.raises(WitnessesDisagree) as error:
        evidence_for(SaysOne("latent_first"))
    assert "live buffer latent_first" in str(error.value)
    assert "source      rope_first" in str(error.value)
    assert "row = cat(rope, latent)   test_evidence.py:" in str(error.value)

    class Honest(SaysOne):
        written_as = "rope_first"

    assert evidence_for(Honest("rope_first")).order == "rope_first"


def test_captured_numbers_join_the_verdict(generator):
    from mla_kernels.reference import attend

    q, rows = torch.randn(2, 3, 576, generator=generator), torch.randn(30, 576, generator=generator)
    out, _ = attend(q, rows, rows[:, 64:], torch.ones(2, 30, dtype=torch.bool),
                    sm_scale=192**-0.5)
    captured = {"q": q, "rows": rows, "out": out.float()}
    verdict = verdict_for(LikeSGLang("rope_first"), captured=captured)
    assert [(t.witness, t.order) for t in verdict.testimonies] == [
        ("live buffer", "rope_first"), ("source", None), ("numbers", "rope_first")]
    both = "(?s)live buffer latent_first.*numbers +rope_first"
    with pytest.raises(WitnessesDisagree, match=both):
        verdict_for(LikeSGLang("latent_first"), captured=captured)


def test_what_is_no_pool_is_refused():
    with pytest.raises(TypeError, match="object lacks kv_buffer, set_mla_kv_buffer"):
        evidence_for(object())
    pool = LikeSGLang("latent_first")
    pool.kv_lora_rank = 448
    with pytest.raises(ValueError, match=r"\[\.\.\., 512\] \(448 latent \+ 64 rope\); got "
                                         r"\[9, 1, 576\]"):
        evidence_for(pool)
    pool = LikeSGLang("latent_first")
    pool.kv_buffer = [torch.zeros(9, 1, 656).bfloat16()]
    with pytest.raises(ValueError, match="656 is the byte width of a scaled FP8 row"):
        evidence_for(pool)


# -- the record ---------------------------------------------------------------------------


def test_record_says_that_it_is_one(monkeypatch):
    monkeypatch.setattr(sglang, "is_installed", lambda package: False)
    text = str(sglang.sglang_finding())
    assert "SGLang 0.5.23: latent_first" in text
    assert "recorded, 20" in text and "not installed here, so nothing was asked now" in text


def test_a_finding_survives_its_file(tmp_path):
    found = sglang.recorded()
    sglang.record(found, tmp_path / "finding.json")
    assert sglang.recorded(tmp_path / "finding.json") == found


def test_a_pool_that_cannot_be_asked_gives_the_record_and_the_reason(monkeypatch):
    def refuse():
        raise TypeError("MLATokenToKVPool got an unexpected argument")

    monkeypatch.setattr(sglang, "is_installed", lambda package: True)
    monkeypatch.setattr(sglang, "sglang_pool_order", refuse)
    finding = sglang.sglang_finding()
    assert finding.recorded and "unexpected argument" in finding.note

    def disagree():
        raise OrderUnknown("writer and reader differ")

    monkeypatch.setattr(sglang, "sglang_pool_order", disagree)
    with pytest.raises(OrderUnknown):
        sglang.sglang_finding()
