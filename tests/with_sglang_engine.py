"""Our backend inside the real SGLang: its constructor, metadata, tree builder and verify kernel.
Run by test_sglang_engine.py, in a process of its own (`pytest -W ignore` by hand: SGLang's
import warns about absent GPUs)."""

import logging
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import sglang_on_cpu
import torch
from sglang.srt.layers.attention import attention_registry, triton_backend
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang_on_cpu import HEADS, Server, layer

from mla_kernels.reference import verify_attention_reference
from mla_kernels.sglang import fit, verify
from mla_kernels.sglang.backend import MLAVerifyBackend, take_over
from mla_kernels.sglang.hook import activate, is_ours, wrap
from mla_kernels.sglang.settings import Settings

TritonAttnBackend = triton_backend.TritonAttnBackend
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


@pytest.fixture
def server(rng):
    """With a pool full of rows, and trees of 2 to 12 nodes."""
    server = Server(int(rng.integers(2, 13)), rng)
    server.fill_pool()
    with server.settings():
        yield server


def ours(server, **settings):
    backend = take_over(server.backend(), Settings(on=True, **settings))
    assert type(backend) is MLAVerifyBackend
    return backend


def lengths(server, count):
    most = server.context_len - server.nodes
    return server.rng.integers(1, most + 1, count).tolist()


def serve(backend, batch, tensors, index=0):
    """One layer's call, on copies: the backend writes k to its pool."""
    return backend.forward_extend(*tensors, layer(index), batch)


def check_batch(got, server, batch):
    """The converted batch against SGLang's own table of slots and the mask as it is laid out."""
    got.validate(server.pool.size + 1)
    at = 0
    for b, (row, length) in enumerate(zip(batch.req_pool_indices.tolist(),
                                          batch.seq_lens.tolist(), strict=True)):
        assert got.prefix_slots(b).tolist() == server.req_to_token[row, :length].tolist()
        size = server.nodes * (length + server.nodes)
        mask = batch.spec_info.custom_mask[at:at + size].view(server.nodes, -1)[:, length:]
        assert torch.equal(got.draft_mask(b), mask.bool())
        assert got.draft_mask(b).diagonal().all()
        at += size
    assert got.draft_slots is None and got.page_size == 1


class TestMetadata:
    def test_eager(self, server):
        backend = ours(server)
        for count in (1, 3, 4, 2):
            batch = server.batch(lengths(server, count))
            backend.init_forward_metadata(batch)
            serve(backend, batch, server.tensors(count * server.nodes))
            check_batch(backend.tree_verify._batch, server, batch)
            assert not backend.tree_verify.stopped

    def test_graph(self, server):
        """Fixed buffers, filled anew for every replay: fewer requests than were captured for, the
        rest padded, and left-overs of the step before behind what counts."""
        backend = ours(server)
        backend.init_cuda_graph_state(4, 4 * server.nodes)
        backend.init_forward_metadata_out_graph(server.batch([], padded=4), in_capture=True)
        captured = backend.forward_metadata
        assert captured.qo_indptr.dtype == torch.int64
        assert captured.kv_indices.numel() == 4 * server.nodes * server.context_len
        for count in (4, 1, 3):
            batch = server.batch(lengths(server, count), padded=4 - count)
            backend.init_forward_metadata_out_graph(batch)
            assert backend.forward_metadata is captured  # as a replay needs it
            serve(backend, batch, server.tensors(4 * server.nodes))
            check_batch(backend.tree_verify._batch, server, batch)
            assert not backend.tree_verify.stopped

    def test_the_builder_makes_trees(self, server):
        """Or the two above would compare chains."""
        masks = [server.trees(torch.tensor([1])).view(server.nodes, -1)[:, 1:]
                 for _ in range(20)]
        assert all(torch.equal(m, m.tril()) for m in masks)
        if server.nodes > 2:
            assert any(not m.tril().sum() == server.nodes * (server.nodes + 1) // 2
                       for m in masks)


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("mask", [True, False], ids=["tree", "chain"])
def test_same_outputs_as_sglangs_kernel(mode, mask, server, monkeypatch):
    theirs, mine = server.backend(), ours(server)
    called = []
    monkeypatch.setattr(mine.tree_verify, "extend", lambda *a, **k: called.append(1))
    for backend in (theirs, mine):
        backend.init_cuda_graph_state(4, 4 * server.nodes)
    for count in (4, 2):
        padded = 4 - count if mode == "graph" else 0
        batch = server.batch(lengths(server, count), padded=padded, mask=mask)
        tensors = server.tensors((count + padded) * server.nodes)
        outs = []
        for backend in (theirs, mine):
            if mode == "graph":
                backend.init_forward_metadata_out_graph(batch, in_capture=True)
                backend.init_forward_metadata_out_graph(batch)
            else:
                backend.init_forward_metadata(batch)
            outs.append([serve(backend, batch, tensors, i) for i in range(2)])
        for a, b in zip(*outs, strict=True):
            torch.testing.assert_close(b[:count * server.nodes], a[:count * server.nodes], **CLOSE)
    assert not called and not mine.tree_verify.stopped


def test_the_rows_are_saved_as_before(server):
    backend, batch = ours(server), server.batch(lengths(server, 2))
    tensors = server.tensors(2 * server.nodes)
    backend.init_forward_metadata(batch)
    serve(backend, batch, tensors)
    assert torch.equal(server.pool.kv_buffer[0][batch.out_cache_loc], tensors[1])


def test_other_modes_are_sglangs(server, monkeypatch):
    """A prefill with the same shapes."""
    theirs, mine = server.backend(), ours(server)
    batch = server.batch(lengths(server, 2))
    batch.forward_mode, batch.spec_info = ForwardMode.EXTEND, None
    batch.extend_prefix_lens, batch.extend_prefix_lens_cpu = batch.seq_lens, batch.seq_lens
    batch.extend_seq_lens = torch.full((2,), server.nodes)
    batch.extend_seq_lens_cpu = [server.nodes] * 2
    tensors = server.tensors(2 * server.nodes)
    monkeypatch.setattr(verify, "verify_attention", None)
    outs = []
    for backend in (theirs, mine):
        backend.init_forward_metadata(batch)
        outs.append(serve(backend, batch, tensors))
    assert torch.equal(*outs) and not mine.tree_verify.stopped


class TestFaults:
    """SGLang goes on serving, by its own path, with its own result."""

    def outputs(self, server, backend, steps=2):
        theirs, pairs = server.backend(), []
        for _ in range(steps):
            batch = server.batch(lengths(server, 3))
            tensors = server.tensors(3 * server.nodes)
            for b in (theirs, backend):
                b.init_forward_metadata(batch)
            pairs += [(serve(backend, batch, tensors, i), serve(theirs, batch, tensors, i))
                      for i in range(2)]
        return pairs

    def test_an_exception(self, server, monkeypatch, caplog):
        def broken(*args, **kwargs):
            raise RuntimeError("CUDA error: no kernel image is available")

        monkeypatch.setattr(verify, "verify_attention", broken)
        backend = ours(server)
        assert all(torch.equal(*pair) for pair in self.outputs(server, backend))
        assert "SGLang's own path serves verify from here on: RuntimeError" in caplog.text

    def test_a_wrong_output_in_shadow_mode(self, server, monkeypatch, caplog):
        real = verify.verify_attention

        def broken(*args, out, **kwargs):
            real(*args, out=out, **kwargs)
            out[-1, -1] += 1

        monkeypatch.setattr(verify, "verify_attention", broken)
        backend = ours(server, shadow_every=2)
        assert all(torch.equal(*pair) for pair in self.outputs(server, backend, 3))
        assert "shadow mode found a mismatch at layer 0 by verify step 1" in caplog.text

    def test_the_wrong_row_order_in_shadow_mode(self, server, caplog):
        backend = ours(server, shadow_every=1, row_order="rope_first")
        assert all(torch.equal(*pair) for pair in self.outputs(server, backend))
        assert "mismatch at layer 0" in caplog.text

    def test_agreement_in_shadow_mode(self, server, caplog):
        caplog.set_level(logging.INFO, "mla_kernels.sglang")
        backend = ours(server, shadow_every=2)
        for mine, theirs in self.outputs(server, backend, 4):
            torch.testing.assert_close(mine, theirs, **CLOSE)
        assert not backend.tree_verify.stopped
        assert "verify step 1 agrees" in caplog.text and "verify step 3 agrees" in caplog.text

    def test_shadow_mode_counts_replays(self, server, caplog):
        caplog.set_level(logging.INFO, "mla_kernels.sglang")
        backend = ours(server, shadow_every=3)
        backend.init_cuda_graph_state(2, 2 * server.nodes)
        backend.init_forward_metadata_out_graph(server.batch([], padded=2), in_capture=True)
        assert backend.tree_verify.shadow.step == 0
        for _ in range(5):
            batch = server.batch(lengths(server, 1), padded=1)
            backend.init_forward_metadata_out_graph(batch)
            serve(backend, batch, server.tensors(2 * server.nodes))
        assert backend.tree_verify.shadow.step == 5 and not backend.tree_verify.stopped
        assert "verify step 1 agrees" in caplog.text and "verify step 4 agrees" in caplog.text

    def test_a_build_that_fails(self, server, monkeypatch, caplog):
        def broken(*args, **kwargs):
            raise OSError("no nvcc")

        monkeypatch.setattr("mla_kernels.sglang.backend.TreeVerify", broken)
        backend = server.backend()
        before = dict(vars(backend))
        assert type(take_over(backend, Settings(on=True))) is TritonAttnBackend
        assert vars(backend) == before and "left untouched: OSError: no nvcc" in caplog.text


class TestRowOrder:
    def test_the_pool_is_asked(self, server, caplog):
        caplog.set_level(logging.INFO, "mla_kernels.sglang")
        assert ours(server).tree_verify.layout.order == "latent_first"
        assert "rows latent_first (asked of the pool)" in caplog.text

    def test_a_pool_whose_witnesses_disagree_is_refused(self, server, caplog):
        class Swapped(MLATokenToKVPool):
            def set_mla_kv_buffer(self, layer, loc, cache_k_nope, cache_k_rope):
                row = torch.cat([cache_k_rope, cache_k_nope], dim=-1)
                self.kv_buffer[layer.layer_id][loc] = row

        server.pool.__class__ = Swapped
        backend = take_over(server.backend(), Settings(on=True))
        assert type(backend) is TritonAttnBackend
        assert "left untouched: WitnessesDisagree" in caplog.text

    def test_a_stated_order_is_believed(self, server):
        """Rows, queries and values the other way round, as in an engine that stores them so."""
        backend = ours(server, row_order="rope_first")
        batch = server.batch(lengths(server, 2))
        q, k, _ = server.tensors(2 * server.nodes)
        backend.init_forward_metadata(batch)
        got = serve(backend, batch, (q, k, k[..., :512])).view(-1, HEADS, 512)
        layout = backend.tree_verify.layout
        latent, rope = layout.split(q.view(-1, HEADS, 576))
        want = verify_attention_reference(
            latent, rope, server.pool.kv_buffer[0], backend.tree_verify._batch, layout=layout,
            sm_scale=sglang_on_cpu.SM_SCALE, draft_kv=k[:, 0])[0]
        torch.testing.assert_close(got.double(), want, **CLOSE)


def test_an_fp8_cache_goes_to_sglang_with_one_line(rng, caplog):
    caplog.set_level(logging.INFO, "mla_kernels.sglang")
    server = Server(4, rng, dtype=torch.float8_e4m3fn)
    with server.settings():
        backend = ours(server)
        seen = []
        backend.tree_verify.extend = lambda *args, **kwargs: seen.append(args[4].dtype)
        batch = server.batch(lengths(server, 2))
        backend.init_forward_metadata(batch)
        for index in range(2):
            q, k, v = (t.bfloat16() for t in server.tensors(2 * server.nodes))
            serve(backend, batch, (q, k, v), index)
    assert seen == [torch.float8_e4m3fn] * 2
    (line,) = [r.getMessage() for r in caplog.records if "own path" in r.getMessage()]
    assert "the cache holds torch.float8_e4m3fn, the queries are torch.bfloat16" in line


class TestFit:
    def test_the_installed_fits(self):
        found = fit.examine()
        assert found.ok, found
        assert found.version == "0.5.23" and found.tried

    @pytest.mark.parametrize("name", ["forward_extend", "init_forward_metadata"])
    def test_a_renamed_method_leaves_sglang_untouched(self, name, server, monkeypatch, caplog):
        method = getattr(TritonAttnBackend, name)
        backend = server.backend()
        before = dict(vars(backend))
        with monkeypatch.context() as patch:
            patch.setattr(TritonAttnBackend, f"{name}_v2", method, raising=False)
            patch.delattr(TritonAttnBackend, name)
            assert take_over(backend, Settings(on=True)) is backend
        assert type(backend) is TritonAttnBackend and vars(backend) == before
        assert "does not fit, and is left untouched" in caplog.text and name in caplog.text


class TestHook:
    @pytest.fixture
    def registry(self, monkeypatch):
        monkeypatch.setattr(attention_registry, "ATTENTION_BACKENDS",
                            dict(attention_registry.ATTENTION_BACKENDS))
        return attention_registry

    def test_the_factory_makes_ours(self, registry, server, monkeypatch):
        monkeypatch.setenv("MLA_KERNELS_SGLANG", "1")
        assert not is_ours(registry.ATTENTION_BACKENDS["triton"])
        activate()
        activate()
        assert type(server.backend()) is MLAVerifyBackend
        monkeypatch.setenv("MLA_KERNELS_SGLANG_ROW_ORDER", "sideways")  # set too late
        assert type(server.backend()) is TritonAttnBackend

    def test_off(self, registry, monkeypatch):
        monkeypatch.delenv("MLA_KERNELS_SGLANG", raising=False)
        activate()
        assert not is_ours(registry.ATTENTION_BACKENDS["triton"])

    def test_draft_backends_and_other_models_stay_sglangs(self, registry, server, monkeypatch):
        monkeypatch.setenv("MLA_KERNELS_SGLANG", "1")
        wrap(registry)
        runner = server.runner()
        runner.model_config.attention_arch = sglang_on_cpu.AttentionArch.MHA
        backend = registry.ATTENTION_BACKENDS["triton"](runner)
        assert type(backend) is TritonAttnBackend


#: As SGLang's scheduler processes begin.
SPAWN = """
import multiprocessing

def worker(rank, said):
    from sglang.srt.plugins import load_plugins
    load_plugins()
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from mla_kernels.sglang.hook import is_ours
    said.put((rank, is_ours(ATTENTION_BACKENDS["triton"])))

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    said = context.Queue()
    ranks = [context.Process(target=worker, args=(rank, said)) for rank in range(8)]
    for process in ranks:
        process.start()
    print(sorted(said.get(timeout=400) for _ in ranks))
    for process in ranks:
        process.join()
"""


@pytest.mark.slow
def test_eight_spawned_processes_have_the_hook(tmp_path):
    """By SGLang's plugins, which find this project installed."""
    script = tmp_path / "spawn.py"
    script.write_text(SPAWN)
    done = subprocess.run([sys.executable, script], text=True, capture_output=True,
                          env={**os.environ, "MLA_KERNELS_SGLANG": "1", "PYTHONWARNINGS": "ignore"})
    assert done.stdout.splitlines()[-1:] == [str([(rank, True) for rank in range(8)])], done.stderr


#: Older versions, and what they need that the installed one's packages are too new for.
OLDER = {"0.5.12": ("transformers==5.6.0", "tokenizers==0.22.2", "huggingface-hub==1.33.0"),
         "0.5.16": ("transformers==5.12.1", "tokenizers==0.22.2", "huggingface-hub==1.33.0")}


@pytest.mark.slow
@pytest.mark.parametrize("version", OLDER)
def test_older_versions(version, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:",
         "-d", tmp_path, f"sglang=={version}", *OLDER[version]], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"sglang {version} cannot be downloaded here")
    for path in tmp_path.glob("*.whl"):
        with zipfile.ZipFile(path) as wheel:
            wheel.extractall(tmp_path / "site")
    tests = Path(__file__).parent
    path = os.pathsep.join(map(str, (tmp_path / "site", tests.parent)))
    done = subprocess.run([sys.executable, tests / "older_sglang.py"], text=True,
                          capture_output=True, env={**os.environ, "PYTHONPATH": path,
                                                    "PYTHONWARNINGS": "ignore"})
    assert done.stdout.splitlines()[-1:] == [f"SGLang {version} fits"], done.stdout + done.stderr
