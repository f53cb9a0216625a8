"""mla_kernels.sglang without SGLang: what stands where SGLang calls its kernel, against that
kernel's meaning written down in float64."""

import logging
import re

import pytest
import torch

from mla_kernels.layout import KVLayout
from mla_kernels.sglang import verify
from mla_kernels.sglang.rehearsal import Call, Extend, shadow_log
from mla_kernels.sglang.settings import Settings
from mla_kernels.sglang.verify import SHADOW_TOLERANCE, TreeVerify

HEADS, CONTEXT = 2, 40
LAYOUT = KVLayout.LATENT_FIRST


def serve_for(call, **settings):
    extend = Extend(call.exact())
    return TreeVerify(extend, LAYOUT, CONTEXT, **settings), extend


@pytest.mark.parametrize("chain", [False, True])
@pytest.mark.parametrize("padded", [0, 2])
def test_serves_what_sglang_would(chain, padded, rng):
    call = Call(rng, chain=chain, padded=padded)
    serve, extend = serve_for(call)
    torch.testing.assert_close(call(serve), call.exact(), atol=1e-5, rtol=1e-5)
    assert extend.calls == 0 and not serve.stopped


def test_outside_of_verify_sglang_is_called(rng):
    call = Call(rng)
    serve, extend = serve_for(call)
    for calls in (1, 2):
        serve(*call.arguments.values(), **call.keywords)
        assert extend.calls == calls and torch.equal(call.out, extend.result)
        call(serve)
        assert extend.calls == calls
    with pytest.raises(KeyError), serve.serving(0):
        raise KeyError
    serve(*call.arguments.values(), **call.keywords)
    assert extend.calls == 3


REASONS = [
    ({"q_extend": torch.zeros(15, HEADS, 192)}, "192, 576 and 512 are not absorbed MLA"),
    ({"k_extend": torch.zeros(15, 2, 576)}, "2 key heads"),
    ({"k_buffer": torch.zeros(200, 1, 576).bfloat16()}, "cache holds torch.bfloat16, .*float32"),
    ({"max_len_extend": 1025}, "1025 draft tokens are more than 1024"),
    ({"custom_mask": None, "is_causal": False}, "neither masked nor causal"),
    ({"k_scale": 0.5}, "scaled by 0.5 and 1.0"),
    ({"sm_scale": None}, "no sm_scale"),
]
KEYWORDS = [("sliding_window_size", 128), ("sinks", torch.zeros(1)), ("score_mod", print),
            ("xai_temperature_len", 4), ("skip_prefix_custom_mask", False), ("unheard_of", 1)]


@pytest.mark.parametrize(("change", "message"), REASONS, ids=[m for _, m in REASONS])
def test_what_it_cannot_serve_goes_to_sglang_with_one_line(change, message, rng, caplog):
    call = Call(rng)
    serve, extend = serve_for(call)
    call.arguments |= change
    with caplog.at_level(logging.INFO, "mla_kernels.sglang"):
        for layer in range(3):
            assert torch.equal(call(serve, layer), extend.result)
    (record,) = caplog.records
    assert extend.calls == 3 and not serve.stopped
    assert re.search(message, record.getMessage())
    call.arguments |= Call(rng).arguments  # the next request may be served again
    call(serve)
    assert extend.calls == 3


@pytest.mark.parametrize(("name", "value"), KEYWORDS, ids=[n for n, _ in KEYWORDS])
def test_a_keyword_that_changes_the_result_goes_to_sglang(name, value, rng):
    call = Call(rng)
    serve, extend = serve_for(call)
    call.keywords[name] = value
    call(serve)
    assert extend.calls == 1


def test_logit_cap_is_served(rng):
    call = Call(rng)
    serve, extend = serve_for(call)
    call.keywords["logit_cap"] = 0.5
    assert extend.calls == 0 and not torch.allclose(call(serve), call.exact(), atol=1e-3)


@pytest.mark.parametrize("where", ["verify_attention", "from_sglang"])
def test_an_exception_leaves_everything_to_sglang(where, rng, monkeypatch, caplog):
    call = Call(rng)
    serve, extend = serve_for(call)
    tries = []

    def broken(*args, **kwargs):
        tries.append(1)
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(verify, where, broken)
    for layer in (0, 1, 0):
        assert torch.equal(call(serve, layer), extend.result)
    assert extend.calls == 3 and len(tries) == 1
    assert serve.stopped == "RuntimeError at layer 0: no kernel image"
    (record,) = caplog.records
    assert "SGLang's own path serves verify from here on: RuntimeError" in record.getMessage()


def test_another_number_of_positional_arguments_is_left_to_sglang(rng, caplog):
    """As SGLang's decode context parallelism calls it."""
    call = Call(rng)
    *positional, scale = call.arguments.values()
    taken = []
    serve = TreeVerify(lambda *args, **kwargs: taken.append((len(args), set(kwargs))), LAYOUT,
                       CONTEXT)
    with caplog.at_level(logging.INFO, "mla_kernels.sglang"), serve.serving(0):
        serve(*positional, sm_scale=scale)
        serve(*positional, scale, 0.0)
    assert taken == [(15, {"sm_scale"}), (17, set())] and not serve.stopped
    assert "15 positional arguments, not 16" in caplog.text


def test_metadata_is_converted_once_a_pass_and_in_every_pass(rng, monkeypatch):
    """A warm-up and a capture are two passes over the same tensors: both must convert."""
    call = Call(rng)
    serve, _ = serve_for(call)
    converted = []
    real = verify.from_sglang
    monkeypatch.setattr(verify, "from_sglang",
                        lambda *a, **k: converted.append(1) or real(*a, **k))
    for passes in (1, 2, 3):
        for layer in (3, 4, 7):  # a pipeline stage's layers
            torch.testing.assert_close(call(serve, layer), call.exact(), atol=1e-5, rtol=1e-5)
        assert len(converted) == passes
    other = Call(rng, nodes=4)
    torch.testing.assert_close(other(serve, 8), other.exact(), atol=1e-5, rtol=1e-5)
    assert len(converted) == 4


def test_graph_mode_reads_a_context_for_each_request_of_the_fixed_buffer(rng, monkeypatch):
    call = Call(rng, bs=2)
    buffer = torch.zeros(10 * CONTEXT, dtype=torch.int64)
    indices = call.arguments["kv_indices"][:int(call.batch.kv_indptr[-1])]
    buffer[:len(indices)] = indices
    call.arguments["kv_indices"] = buffer
    serve, _ = serve_for(call)
    torch.testing.assert_close(call(serve), call.exact(), atol=1e-5, rtol=1e-5)
    assert (serve._batch.kv_indices.numel(), serve._batch.max_kv_len) == (2 * CONTEXT, CONTEXT)


class TestShadow:
    def steps(self, serve, call, count, layers=2):
        outs = []
        for _ in range(count):
            serve.next_step()
            outs += [call(serve, layer) for layer in range(layers)]
        return outs

    def test_agreement_is_logged_and_ours_served(self, rng, caplog):
        call = Call(rng, padded=1)
        serve, extend = serve_for(call, shadow_every=3)
        extend.result = extend.result * (1 + SHADOW_TOLERANCE / 4)
        extend.result[-call.nodes:] = torch.nan  # padded rows may hold anything
        with caplog.at_level(logging.INFO, "mla_kernels.sglang"):
            for out in self.steps(serve, call, 5):
                torch.testing.assert_close(out, call.exact(), atol=1e-5, rtol=1e-5)
        assert extend.calls == 10 and extend.empty == 6  # on at steps 1 and 4
        assert [r.getMessage().split(";")[0] for r in caplog.records] == [
            "shadow: verify step 1 agrees with SGLang's path",
            "shadow: verify step 4 agrees with SGLang's path"]
        assert f"{SHADOW_TOLERANCE / 4 / (1 + SHADOW_TOLERANCE / 4):.1e}" in caplog.text

    @pytest.mark.parametrize("wrong", [2.0, torch.nan])
    def test_a_mismatch_serves_sglang_at_once_and_ever_after(self, wrong, rng, caplog,
                                                             monkeypatch):
        call = Call(rng)
        serve, extend = serve_for(call, shadow_every=4)
        extend.result = extend.result * (1 + SHADOW_TOLERANCE / 8)  # to tell the two apart
        real = verify.verify_attention

        def broken(*args, out, **kwargs):
            real(*args, out=out, **kwargs)
            if serve._layer == 1:
                out[3] *= wrong

        monkeypatch.setattr(verify, "verify_attention", broken)
        serve.next_step()
        outs = [call(serve, layer) for layer in range(3)]
        assert not torch.equal(outs[0], extend.result)  # ours, and right
        assert torch.equal(outs[1], extend.result) and torch.equal(outs[2], extend.result)
        for _ in range(3):  # on steps that would not be compared
            serve.next_step()
            assert torch.equal(call(serve, 0), extend.result)
            # A graph that was captured before goes on with both paths.
            stopped, serve.stopped = serve.stopped, ""
            assert torch.equal(call(serve, 0), extend.result)
            serve.stopped = stopped
        assert "mismatch at layer 1 by verify step 1" in serve.stopped
        assert sum("mismatch" in r.getMessage() for r in caplog.records) == 1

    def test_between_compared_steps_nothing_is_compared(self, rng, monkeypatch):
        call = Call(rng)
        serve, extend = serve_for(call, shadow_every=5)
        self.steps(serve, call, 1)
        monkeypatch.setattr(verify, "verify_attention",
                            lambda *a, out, **k: out.fill_(7.0))
        assert all((out == 7).all() for out in self.steps(serve, call, 4))
        (out, _) = self.steps(serve, call, 1)  # step 6 is compared again
        assert torch.equal(out, extend.result)

    def test_a_reason_not_to_serve_needs_no_comparison(self, rng):
        call = Call(rng)
        serve, extend = serve_for(call, shadow_every=1)
        call.arguments["k_scale"] = 0.5
        self.steps(serve, call, 2)
        assert extend.calls == 4


@pytest.mark.parametrize("order", ["latent_first", "rope_first"])
def test_shadow_mode_as_the_notebook_shows_it(order, seed):
    lines, right = shadow_log(order, seed=seed)
    if order == "latent_first":
        assert right and len(lines) == 2 and all("agrees" in line for line in lines)
    else:  # the first step is compared, so nothing wrong is ever served
        (line,) = lines
        assert right and line.startswith("ERROR SGLang's own path") and "mismatch" in line


class TestSettings:
    def test_off_unless_set(self):
        assert Settings.read({}) == Settings(False, "probe", 0, "info")

    def test_read_back(self, rng):
        settings = Settings(True, "rope_first", int(rng.integers(1, 1000)), "debug")
        assert Settings.read(settings.as_environment()) == settings

    @pytest.mark.parametrize(("name", "value", "message"), [
        ("MLA_KERNELS_SGLANG", "yes", "MLA_KERNELS_SGLANG must be one of 0, 1; got 'yes'"),
        ("MLA_KERNELS_SGLANG_ROW_ORDER", "latent", "one of probe, latent_first, rope_first; got"),
        ("MLA_KERNELS_SGLANG_SHADOW", "-3", "must be a number of verify steps, or 0; got '-3'"),
        ("MLA_KERNELS_SGLANG_LOG", "loud", "one of debug, info, warning; got 'loud'"),
    ])
    def test_refused(self, name, value, message):
        with pytest.raises(ValueError, match=message):
            Settings.read({name: value})
