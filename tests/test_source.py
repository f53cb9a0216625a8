"""Is what the kernel notebook shows of the source really the source?"""

import pytest
from bs4 import BeautifulSoup

from mla_kernels import build, source
from mla_kernels.device import SM120_SMEM_PER_BLOCK

TEXT = """\
// About f. With a brace { and a call f(1).
int f(int a,
      int b = (1 + 2)) {
  g("}", '{');  // }
  for (int i = 0; i < 3; ++i) { if (a) { b = f(2, 3); } }
#pragma unroll
  while (a) {
    b += 1;
    b -= 2; /* { */
    a = b + 100;
  }
  return b;
}

struct S {
  // Tiles.
  __device__ int tiles() const {
    return f(1, 2);
  }
  int later();
};
"""


def test_function_is_cut_out_whole():
    cut = source.function(TEXT, "f")
    assert cut.startswith("// About f.") and cut.endswith("return b;\n}")
    assert source.function(TEXT, "tiles") == (
        "// Tiles.\n__device__ int tiles() const {\n  return f(1, 2);\n}")


def test_longest_loop_of_a_function():
    loop = source.main_loop(source.function(TEXT, "f"))
    assert loop.startswith("while (a) {\n  b += 1;") and loop.endswith("\n}")


@pytest.mark.parametrize("name", ["g", "later", "nowhere"])
def test_a_call_or_declaration_is_no_definition(name):
    with pytest.raises(ValueError, match=f"no definition of {name}"):
        source.function(TEXT, name)
    with pytest.raises(ValueError, match="no loop"):
        source.main_loop("int f() { return 1; }")


def test_the_kernel_has_the_pieces_that_the_notebook_shows():
    text = build.sources()["tree_verify.cuh"]
    loop = source.main_loop(source.function(text, "run"))
    flat = "".join(text.split())
    assert "".join(loop.split()) in flat
    assert loop.count("{") == loop.count("}") and "visible_bits(" in loop
    mask = source.function(build.sources()["kv_layout.cuh"], "visible_bits")
    assert mask.startswith("// ") and "num_drafts" in mask


def test_load_inline_call_is_the_one_in_build():
    call = source.load_inline_call()
    compile(call, "call", "eval")
    for argument in ("cuda_sources", "no_implicit_headers=True", "extra_cuda_cflags"):
        assert argument in call


def test_listing_keeps_the_text_and_its_font():
    soup = BeautifulSoup(source.listing("if (a < b && c) {\n  d();  // e\n}", "cpp").data,
                         "html.parser")
    assert soup.get_text().strip() == "if (a < b && c) {\n  d();  // e\n}"
    assert "monospace" in soup.pre["style"]
    assert not soup.find_all("style")


@pytest.fixture(scope="module")
def constants():
    return source.constants("sm_120")


def test_shared_memory_adds_up_to_what_is_launched(constants):
    assert set(constants) == set(build.TILE_ROWS)
    for rows, config in constants.items():
        parts = source.smem_parts(config)
        assert config["kRows"] == rows
        assert all(size >= 0 for size in parts.values())
        assert sum(parts.values()) == config["kSmemBytes"] <= SM120_SMEM_PER_BLOCK
        assert "cache rows" in parts, "kKV was renamed: so must REGIONS be"


def test_constants_that_the_notebook_names_are_there(constants):
    for config in constants.values():
        for name in ("kTokens", "kThreads", "kTeams", "kTeamWarps", "kTeamRows", "kTeamTokens",
                     "kStages", "kRowStride", "kRowBytes"):
            assert config[name] > 0, name
        assert config["kTeams"] * config["kTeamWarps"] * 32 == config["kThreads"]
        assert source.smem_parts(config)["cache rows"] % config["kRowStride"] == 0


def test_what_ptxas_accepts():
    """Each instruction is taken by some target, so a refusal is not a slip in its spelling."""
    answers = source.accepted()
    assert all(any(row.values()) for row in answers.values())
    assert all(answers["mma.sync, bf16"].values())
    for name in ("wgmma", "tcgen05"):
        assert not answers[name]["sm_120"] and not answers[name]["sm_120a"]
    assert answers["cp.async.bulk.tensor (TMA, tiles)"]["sm_120"]


def test_report_table_has_a_row_for_each_kernel():
    report = build.KernelReport("tree_verify", "bf16", 16, None, "sm_120", 190, 0, 0, 100_008,
                                {"HMMA": 34, "total": 4728})
    bare = build.KernelReport("combine", "bf16", 16, 4, "sm_120", 64, 0, 0, 40_960, {})
    table = source.report_table([report, bare])
    assert [name.replace("\u00a0", " ") for name in table.index] == [
        "tree_verify, bf16, 16 rows", "combine, bf16, 16 rows, 4 warps"]
    assert table.iloc[0]["HMMA"] == 34
    assert table.iloc[0]["shared memory, B"] == "100,008"
    assert table.iloc[1]["HMMA"] == "–"
