"""Does the source witness follow a row through code of every shape, and never read a comment?"""

import textwrap
import zipfile

import pytest

from mla_kernels.evidence import OrderUnknown, WitnessesDisagree, c_source, engines, source, tree
from mla_kernels.evidence.symbols import ZERO, Form, L, R

OTHER = {"latent_first": "rope_first", "rope_first": "latent_first"}


def project(folder, **files):
    """A source tree of small files; ``a__b`` stands for ``a/b``."""
    for name, text in files.items():
        path = folder / (name.replace("__", "/") + ("" if "." in name else ".py"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return tree.folder(folder)


def orders(files, engine=""):
    return {(s.role, s.order) for s in source.find_sites(files, engine)}


# -- one function -------------------------------------------------------------------------

WRITERS = {
    "cat": """
        def write(kv_cache, loc, kv_c, k_pe):
            kv_cache[loc] = torch.cat([{0}, {1}], dim=-1)
        """,
    "cat through names": """
        def write(kv_cache, loc, kv_c, k_pe):
            first = {0}.to(kv_cache.dtype)
            second = {1}.squeeze(1)
            row = torch.concat((first, second), -1)
            kv_cache.view(-1, 576)[loc] = row.contiguous()
        """,
    "cat into a setter": """
        def write(pool, layer, loc, k_nope, k_rope):
            pool.set_kv_buffer(layer, loc, torch.cat([{0}, {1}], dim=-1), None)
        """,
}
NAMES = {"cat": ("kv_c", "k_pe"), "cat through names": ("kv_c", "k_pe"),
         "cat into a setter": ("k_nope", "k_rope")}


@pytest.mark.parametrize("order", OTHER)
@pytest.mark.parametrize("shape", WRITERS)
def test_concatenations(shape, order, tmp_path):
    names = NAMES[shape] if order == "latent_first" else NAMES[shape][::-1]
    files = project(tmp_path, engine=WRITERS[shape].format(*names))
    assert orders(files) == {("write", order)}


SLICES = {
    "latent_first": """
        def write(kv_buffer, loc, latent, rope):
            rows = kv_buffer.view(kv_buffer.shape[0], -1)
            width = latent.shape[-1]
            rows[loc, :width] = latent
            rows[loc, width:width + rope.shape[-1]] = rope

        def value(kv_buffer, kv_lora_rank):
            return kv_buffer[..., :kv_lora_rank]
        """,
    "rope_first": """
        def write(kv_buffer, loc, latent, rope):
            rows = kv_buffer.view(kv_buffer.shape[0], -1)
            width = rope.shape[-1]
            rows[loc, :width] = rope
            rows[loc, width:].copy_(latent)

        def value(kv_buffer, qk_rope_head_dim):
            return kv_buffer[..., qk_rope_head_dim:]
        """,
}


@pytest.mark.parametrize("order", OTHER)
def test_slices(order, tmp_path):
    files = project(tmp_path, engine=SLICES[order])
    found = source.find_sites(files)
    assert {(s.role, s.order) for s in found} == {("write", order), ("value", order)}
    for site in found:  # the line is the one that does it
        assert "rows[loc" in files.text("engine.py").splitlines()[site.line - 1] or (
            "return" in files.text("engine.py").splitlines()[site.line - 1])


KERNEL = """
    @triton.jit
    def scatter(out_ptr, first_ptr, second_ptr, loc_ptr, row_stride, a_stride, b_stride,
                first_dim: tl.constexpr, second_dim: tl.constexpr, BLOCK: tl.constexpr):
        token = tl.program_id(0)
        offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        dst = out_ptr + tl.load(loc_ptr + token) * row_stride + offs
        if tl.program_id(1) * BLOCK < first_dim:
            row = tl.load(first_ptr + token * a_stride + offs, mask=offs < first_dim)
        else:
            local = offs - first_dim
            row = tl.load(second_ptr + token * b_stride + local)
        tl.store(dst, row, mask=offs < first_dim + second_dim)

    def launch(kv_buffer, loc, a, b):
        scatter[(loc.numel(), 5)](kv_buffer, a, b, loc, kv_buffer.stride(0), a.stride(0),
                                  b.stride(0), a.shape[-1], b.shape[-1], BLOCK=128)
    """
POOL = """
    from engine.ops import {helper} as put

    class Base:
        def set_mla_kv_buffer(self, layer, loc, cache_k_nope, cache_k_rope):
            # {comment}
            cache_k_nope = cache_k_nope.to(self.dtype)
            self._put(self.kv_buffer[layer.layer_id], loc, cache_k_nope, cache_k_rope)

        def _put(self, *arguments):
            raise NotImplementedError

    class MLATokenToKVPool(Base):
        def _put(self, where, loc, x, y):
            put(where, loc, {arguments})

        def get_value_buffer(self, layer_id):
            if self.store_dtype != self.dtype:
                return self.kv_buffer[layer_id][..., {window}].view(self.dtype)
            return self.kv_buffer[layer_id][..., {window}]
    """


def pool_project(folder, order):
    arguments, window = (("x, y", ":self.kv_lora_rank") if order == "latent_first"
                         else ("y, x", "self.qk_rope_head_dim:"))
    return project(folder, engine____init__="", engine__ops=KERNEL, engine__pool=POOL.format(
        helper="launch", comment=f"not {order}", arguments=arguments, window=window))


@pytest.mark.parametrize("order", OTHER)
def test_a_pool_is_followed_into_its_kernel(order, tmp_path):
    files = pool_project(tmp_path, order)
    found = source.find_sites(files, "sglang")
    assert {(s.role, s.order, s.sure) for s in found} == {
        ("write", order, "followed"), ("value", order, "followed")}
    write = next(s for s in found if s.role == "write")
    assert write.file == "engine/ops.py"
    assert "tl.store" in files.text(write.file).splitlines()[write.line - 1]
    assert write.through == ("Base.set_mla_kv_buffer", "MLATokenToKVPool._put", "launch", "scatter")


def test_code_that_moved_to_another_file_is_found(tmp_path):
    moved = project(tmp_path, engine__deep__kernels__mla=KERNEL, engine____init__="",
                    engine__ops="from .deep.kernels.mla import launch",
                    engine__new__place=POOL.format(helper="launch", comment="", arguments="x, y",
                                                   window=":self.kv_lora_rank"))
    found = source.find_sites(moved, "sglang")
    assert {s.order for s in found} == {"latent_first"}
    assert {s.file for s in found} == {"engine/deep/kernels/mla.py", "engine/new/place.py"}


def test_a_branch_does_not_see_the_other(tmp_path):
    files = project(tmp_path, engine="""
        def write(kv_cache, loc, kv_c, k_pe, whole):
            row = kv_c
            if whole:
                row = torch.cat([k_pe, kv_c], dim=-1)
            else:
                kv_cache[loc] = row
            pass
        """)
    assert source.find_sites(files) == []
    joined = (tmp_path / "engine.py").read_text().replace("pass", "kv_cache[loc] = row")
    assert orders(project(tmp_path, engine=joined)) == {("write", "rope_first")}


def test_the_query_is_no_cache_row(tmp_path):
    files = project(tmp_path, engine="""
        def forward(pool, layer, loc, q_nope, q_pe):
            q = torch.cat([q_pe, q_nope], dim=-1)
            pool.set_something(q)
        """)
    assert source.find_sites(files) == []
    assert source.testify(files, found=[]).order is None


def test_a_source_that_does_both_is_an_error_that_shows_both(tmp_path):
    files = project(tmp_path, one=WRITERS["cat"].format("kv_c", "k_pe"),
                    other=WRITERS["cat"].format("k_pe", "kv_c"))
    both = (r"(?s)latent_first: write: row = cat\(latent, rope\) +one.py:3.*"
            r"rope_first: .* +other.py:3")
    with pytest.raises(WitnessesDisagree, match=both):
        source.testify(files)


def test_a_syntax_error_is_named_and_hides_nothing(tmp_path):
    files = project(tmp_path, good=WRITERS["cat"].format("kv_c", "k_pe"),
                    bad="def write(kv_cache, kv_c, k_pe):\n    torch.cat([kv_c, k_pe\n")
    testimony = source.testify(files)
    assert testimony.order == "latent_first"
    assert any(line.startswith("bad.py:2: cannot be parsed: '[' was never closed")
               for line in testimony.says)


def test_hostile_nesting_is_named_and_hides_nothing(tmp_path):
    deep = "def write(kv_cache, kv_c):\n    return kv_c" + ".a" * 3000
    files = project(tmp_path, good=WRITERS["cat"].format("kv_c", "k_pe"), deep=deep)
    testimony = source.testify(files)
    assert testimony.order == "latent_first"
    assert any(line.startswith("deep.py:") for line in testimony.says)


# -- C++ ----------------------------------------------------------------------------------

STALE = """
    // {{n_embd_head_qk_rope + kv_lora_rank, 1, n_tokens}}
    // note: rope must go first: Kcur = ggml_concat(ctx, k_pe, kv_cmpr, 0);
    /* ggml_concat(ctx, {1}, {0}, 0) */
    log("ggml_concat(ctx, {1}, {0}, 0)");
    ggml_tensor * Qcur = ggml_concat(ctx, q_pe, q_nope_absorbed, 0);
    ggml_tensor * Kcur = ggml_concat(ctx, {0}, {1}, 0);
    ggml_tensor * per_head = ggml_concat(ctx, k_pe_repeated, k_nope, 0);
    """
CUDA = {
    "latent_first": """
        copy(kv_c, kv_cache, kv_c_stride, block_stride, kv_lora_rank, 0);
        copy(k_pe, kv_cache, k_pe_stride, block_stride, pe_dim,
             kv_lora_rank);  // not 0
        """,
    "rope_first": """
        copy(k_pe, kv_cache, k_pe_stride, block_stride, pe_dim, 0);
        copy(kv_c, kv_cache, kv_c_stride, block_stride, kv_lora_rank, pe_dim);
        """,
}


@pytest.mark.parametrize(("names", "order"), [(("kv_cmpr", "k_pe"), "latent_first"),
                                              (("k_pe", "kv_cmpr"), "rope_first")])
def test_comments_are_no_evidence(names, order, tmp_path):
    files = project(tmp_path, **{"model.cpp": STALE.format(*names)})
    (site,) = source.find_sites(files, "llama.cpp")
    assert (site.order, site.line, site.sure) == (order, 7, "matched")
    assert source.testify(files, "llama.cpp").sure == "matched"


@pytest.mark.parametrize("order", OTHER)
def test_cuda_copies_with_a_column(order):
    found = list(c_source.sites("cache_kernels.cu", CUDA[order]))
    assert [s.order for s in found] == [order] * 2 and [s.line for s in found] == [2, 3]


def test_pointers_side_by_side():
    text = "auto out_rope = pointer::offset(out_nope, kNopeBytes);"
    assert [s.order for s in c_source.sites("a.cuh", text)] == ["latent_first"]
    swapped = "auto out_nope = pointer::offset(out_rope, kRopeBytes);"
    assert [s.order for s in c_source.sites("a.cuh", swapped)] == ["rope_first"]
    shared = "Tensor vcache = given ? given.value() : kcache; // vcache = kcache;\n"
    assert [(s.role, s.order) for s in c_source.sites("a.cpp", shared)] == [
        ("value", "latent_first")]
    assert not list(c_source.sites("a.cpp", "// " + shared))


def test_removing_comments_keeps_lines_and_code():
    text = 'a /* b\n c */ d; // e\n"//" f; \'"\' g; R"x(// h\n)x" i;'
    bare = c_source.without_comments(text)
    assert bare.count("\n") == text.count("\n") and bare.split() == ["a", "d;", "f;", "g;", "i;"]


# -- trees and records --------------------------------------------------------------------


def test_a_wheel_is_read_without_installing(tmp_path):
    wheel = tmp_path / "engine-1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("engine-1.2.dist-info/METADATA", "Name: engine\nVersion: 1.2\n")
        archive.writestr("engine/cache.py", textwrap.dedent(WRITERS["cat"].format("kv_c", "k_pe")))
    files = tree.wheel(wheel)
    assert files.version == "1.2" and orders(files) == {("write", "latent_first")}


def test_what_cannot_be_opened_is_named(tmp_path):
    with pytest.raises(ModuleNotFoundError, match="no_such_engine is not installed here"):
        tree.installed("no_such_engine")
    with pytest.raises(FileNotFoundError, match="path: no file or folder"):
        tree.folder(tmp_path / "absent")
    with pytest.raises(ValueError, match="holds no source files"):
        tree.folder(tmp_path)
    (tmp_path / "a.whl").write_text("not a zip")
    with pytest.raises(ValueError, match="must be a .whl file .* a.whl is not"):
        tree.wheel(tmp_path / "a.whl")
    with pytest.raises(FileNotFoundError, match="wheel: no file"):
        tree.wheel(tmp_path / "b.whl")


def test_records(tmp_path):
    path = tmp_path / "engines.json"
    files = project(tmp_path / "e", engine=SLICES["rope_first"])
    found = source.find_sites(files)
    for version in ("1.10", "1.9"):
        engines.record(engines.from_sites("mine", version, "source tree", found), path)
    engines.record(engines.from_sites("mine", "1.9", "a wheel", found), path)
    assert [(r.version, r.read_from, r.order) for r in engines.load(path)] == [
        ("1.9", "a wheel", "rope_first"), ("1.10", "source tree", "rope_first")]
    assert engines.load(path)[0].place == "engine.py:5"
    with pytest.raises(OrderUnknown, match="the source names no order"):
        engines.from_sites("mine", "1", "x", [])


def test_the_committed_records_name_no_machine():
    found = engines.load()
    assert {r.engine for r in found} >= {"sglang", "vllm", "llama.cpp"}
    assert len([r for r in found if r.engine == "sglang"]) >= 3
    for r in found:
        places = [site.split()[-1] for site in r.sites]
        assert r.place in places and not any(p.startswith("/") for p in places)
        best = r.sites[places.index(r.place)]
        assert (", matched:" in best) == (r.how == "matched")


def test_offsets_are_sums():
    assert str(L.plus(R)) == "L + R" and str(ZERO) == "0"
    assert L.plus(R).plus(L, -1) == R
    assert Form.of({"loc * stride": 1, "L": 1}).column == L
