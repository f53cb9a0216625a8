"""Does the witness name the order of a buffer, and refuse one that has neither?"""

import pytest
import torch

from mla_kernels import evidence
from mla_kernels.evidence import OrderUnknown, order_of_buffer, order_of_value
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
def test_reader_of_either_order_is_named(order, width):
    pool = Pool(KVLayout(order, *width))
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


def test_buffers_without_plain_rows_are_refused():
    def write(slot, latent, rope):
        raise AssertionError("not to be called")

    with pytest.raises(ValueError, match="656 is the byte width of a scaled FP8 row"):
        order_of_buffer(write, torch.zeros(4, 1, 656, dtype=torch.uint8))
    with pytest.raises(ValueError, match="slot must be in 0 .. 3; got 4"):
        order_of_buffer(write, torch.zeros(4, 1, 576), slot=4)
    with pytest.raises(ValueError, match="two bytes or more"):
        order_of_value(write, torch.zeros(4, 576).to(torch.float8_e4m3fn))


def test_record_says_that_it_is_one(monkeypatch):
    monkeypatch.setattr(evidence, "_installed", lambda package: False)
    text = str(evidence.sglang_finding())
    assert "SGLang 0.5.23: latent_first" in text
    assert "recorded, 20" in text and "not installed here, so nothing was asked now" in text


def test_sglang_itself_agrees_with_the_record():
    if not evidence._installed("sglang"):
        pytest.skip("sglang is not installed: pip install sglang==0.5.23 to ask the real pool")
    finding = evidence.sglang_pool_order()
    assert not finding.recorded
    assert finding.order == evidence.recorded().order == "latent_first"


def test_a_pool_that_cannot_be_asked_gives_the_record_and_the_reason(monkeypatch):
    def refuse():
        raise TypeError("MLATokenToKVPool got an unexpected argument")

    monkeypatch.setattr(evidence, "_installed", lambda package: True)
    monkeypatch.setattr(evidence, "sglang_pool_order", refuse)
    finding = evidence.sglang_finding()
    assert finding.recorded and "unexpected argument" in finding.note

    def disagree():
        raise OrderUnknown("writer and reader differ")

    monkeypatch.setattr(evidence, "sglang_pool_order", disagree)
    with pytest.raises(OrderUnknown):
        evidence.sglang_finding()
