"""The real SGLang: its pools in all row formats, and its source in three versions. Run by
test_evidence_sglang.py, in a process of its own."""

import subprocess
import sys

import pytest
import torch

from mla_kernels.evidence import (
    WitnessesDisagree,
    engines,
    evidence_for,
    sglang,
    source,
    tree,
    verdict_for,
)
from mla_kernels.layout import KVLayout

# What SGLang and its dependencies warn about when imported is theirs.
pytestmark = pytest.mark.filterwarnings("default")


@pytest.mark.parametrize("row_format", sglang.FORMATS)
def test_the_real_pool_is_latent_first(row_format):
    pool = sglang.make_pool(row_format)
    before = pool.kv_buffer[0].clone()
    verdict = verdict_for(pool)
    assert [(t.witness, t.order) for t in verdict.testimonies] == [
        ("live buffer", "latent_first"), ("source", "latent_first")]
    assert torch.equal(pool.kv_buffer[0], before)
    if row_format == "scaled":
        with pytest.raises(ValueError, match="rows of 656 bytes, latent_first with scales"):
            evidence_for(pool)
    else:
        assert evidence_for(pool) == KVLayout("latent_first", dtype=pool.dtype)


def swapped_class():
    """The real pool with its parts exchanged: in the plain rows by hand, in the scaled one by
    moving the bytes that SGLang wrote."""
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    class Swapped(MLATokenToKVPool):
        def set_mla_kv_buffer(self, layer, loc, cache_k_nope, cache_k_rope):
            buffer = self.kv_buffer[layer.layer_id]
            if buffer.shape[-1] == 656:
                super().set_mla_kv_buffer(layer, loc, cache_k_nope, cache_k_rope)
                buffer[loc] = buffer[loc].roll(128, dims=-1)
            else:
                row = torch.cat([cache_k_rope, cache_k_nope], dim=-1).to(self.dtype)
                buffer[loc] = row.view(self.store_dtype)

        def get_value_buffer(self, layer_id):
            return self.kv_buffer[layer_id].view(self.dtype)[..., self.qk_rope_head_dim:]

    return Swapped


@pytest.mark.parametrize("row_format", sglang.FORMATS)
def test_a_pool_that_swaps_the_parts_is_rope_first(row_format):
    pool = sglang.make_pool(row_format, pool_class=swapped_class())
    # The scaled row's swap is a roll of bytes, which the source witness does not see through.
    assert sglang.ask_pool(pool, slot=3).order == "rope_first"
    if row_format != "scaled":
        with pytest.raises(WitnessesDisagree, match="does both"):
            evidence_for(pool, slot=3)


class TestSourceOfTheInstalled:
    def test_order_and_places(self):
        files = tree.installed("sglang")
        found = source.find_sites(files, "sglang")
        assert source.testify(files, "sglang", found).order == "latent_first"
        assert {s.role for s in found} == {"write", "value"} and not files.problems
        for site in found:
            line = files.text(site.file).splitlines()[site.line - 1]
            assert any(word in line for word in ("store", "rows[", "kv_buffer", "offset("))

    def test_the_record_agrees(self):
        of_version = [r for r in engines.load()
                      if (r.engine, r.version) == ("sglang", sglang.sglang_version())]
        assert all(r.order == "latent_first" for r in of_version)
        assert sglang.recorded().order == sglang.sglang_pool_order().order


@pytest.mark.slow
@pytest.mark.parametrize(("version", "writer"), [
    ("0.5.12", "srt/mem_cache/utils.py"), ("0.5.16", "kernels/ops/kvcache/mla_buffer.py")])
def test_older_wheels_where_the_code_lay_elsewhere(version, writer, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:",
         "-d", tmp_path, f"sglang=={version}"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"sglang {version} cannot be downloaded here")
    (file,) = tmp_path.glob("*.whl")
    files = tree.wheel(file)
    found = source.find_sites(files, "sglang")
    assert files.version == version
    assert source.testify(files, "sglang", found).order == "latent_first"
    followed = [s for s in found if s.sure == "followed"]
    assert {s.file for s in followed if s.role == "write"} == {f"sglang/{writer}"}
    assert "sglang/srt/mem_cache/memory_pool.py" in {s.file for s in followed if s.role == "value"}
