"""Do the shares cover every tile once, evenly, and as the kernel computes them?"""

import shutil
import subprocess

import numpy as np
import pytest
import torch

from mla_kernels import build, schedule, source, synthetic
from mla_kernels.reference import attend, relative_error
from mla_kernels.tree import chain

#: What the arithmetic of schedule.cuh stands on: the sums over requests that a warp makes there.
HOST = r"""
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <vector>
#define __device__
#define __forceinline__
using std::max;
using std::min;
int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }
struct VerifyParams {
  const int *qo_indptr, *kv_lens;
  int batch_size, groups, batch_invariant, row_tiles;
};
"""
WARP = r"""
  explicit Schedule(const VerifyParams& p) : total(request_begin(p, p.batch_size)) {
    groups = min(p.groups, total);
  }
  static int request_begin(const VerifyParams& p, int request) {
    int before = 0;
    for (int b = 0; b < request; ++b) before += units_of(p, b);
    return before;
  }
  void locate(const VerifyParams& p, int unit, int& request, int& unit_in_request) const {
    for (request = 0; unit >= units_of(p, request); ++request) unit -= units_of(p, request);
    unit_in_request = unit;
  }
"""


def draw(rng):
    """Tiles of a ragged batch, with empty requests, and a number of groups."""
    tiles = [int(t) for t in np.floor(60 ** rng.random(rng.integers(1, 12)))]
    for b in range(len(tiles)):
        if rng.random() < 0.2:
            tiles[b] = 0
    return tiles, int(rng.integers(1, 40))


@pytest.fixture
def batches(rng):
    return [([0], 3), ([0, 0, 5], 9), ([1], 1), ([7], 1), *(draw(rng) for _ in range(300))]


def test_every_tile_is_in_one_share(batches):
    for tiles, groups in batches:
        seen = [np.zeros(t, int) for t in tiles]
        for share in schedule.share_out(tiles, groups):
            assert share.tiles > 0
            seen[share.request][share.begin:share.end] += 1
        assert all((count == 1).all() for count in seen), (tiles, groups)


def test_shares_differ_by_one_tile_at_most(batches):
    for tiles, groups in batches:
        load = [0] * groups
        for share in schedule.share_out(tiles, groups):
            load[share.group] += share.tiles
        busy = load[:min(groups, sum(tiles))]
        assert sum(load) == sum(busy)
        assert not busy or max(busy) - min(busy) <= 1, (tiles, groups)


def test_two_partial_results_a_group_and_each_in_its_slot(batches):
    for tiles, groups in batches:
        shares = schedule.share_out(tiles, groups)
        assert shares == sorted(shares, key=lambda s: (s.group, s.request))
        slots = [(s.group, s.slot) for s in shares if s.partial]
        assert len(slots) == len(set(slots)), "two results in one place"
        for group in range(groups):
            own = [s for s in shares if s.group == group]
            assert sum(s.partial for s in own) <= 2
            assert all(s.slot == (s.begin == 0) for s in own if s.partial)
            assert not any(s.partial for s in own[1:-1])
        for request, count in enumerate(tiles):
            pieces = [s for s in shares if s.request == request]
            assert [s.partial for s in pieces] == [len(pieces) > 1] * len(pieces)
            assert len(pieces) <= max(count, 0)


def test_chunks_are_cut_by_a_request_s_own_length(batches, rng):
    """Batch-invariant: whatever is in the batch and however many groups there are."""
    for tiles, groups in batches:
        tiles = [*tiles, int(5000 ** rng.random())]
        shares = schedule.share_out(tiles, groups, batch_invariant=True)
        assert [s.group for s in shares] == sorted(s.group for s in shares)
        for request, count in enumerate(tiles):
            pieces = [s for s in shares if s.request == request]
            alone = schedule.share_out([count], 1, batch_invariant=True)
            assert [(s.begin, s.end, s.partial) for s in pieces] == [
                (s.begin, s.end, s.partial) for s in alone]
            assert len(pieces) == schedule.chunks_of(count) <= schedule.MAX_CHUNKS
            assert sum(s.tiles for s in pieces) == count
            assert [s.end for s in pieces[:-1]] == [s.begin for s in pieces[1:]]
        slots = [s.slot for s in shares if s.partial]
        assert slots == sorted(set(slots)) and all(s < len(shares) for s in slots)
        load = np.bincount([s.group for s in shares])
        assert not len(load) or load.max() - load.min() <= 1


def test_sizes_of_chunks():
    assert [schedule.chunk_tiles(t) for t in (0, 1, 8, 9, 1024, 1025, 2048, 2049)] == [
        8, 8, 8, 8, 8, 16, 16, 32]
    assert [schedule.most_chunks(t) for t in (1, 9, 1024, 1025, 4000)] == [1, 2, 128, 128, 128]
    most = 0
    for tiles in range(5000):
        most = max(most, schedule.chunks_of(tiles))
        assert schedule.most_chunks(tiles) == most


def test_a_known_sharing():
    shares = schedule.share_out([40, 3, 3, 50], 6)
    assert [(s.group, s.request, s.begin, s.end, s.slot) for s in shares] == [
        (0, 0, 0, 16, 1), (1, 0, 16, 32, 0), (2, 0, 32, 40, 0), (2, 1, 0, 3, None),
        (2, 2, 0, 3, None), (2, 3, 0, 2, 1), (3, 3, 2, 18, 0), (4, 3, 18, 34, 0),
        (5, 3, 34, 50, 0)]


def test_tiles_count_prefix_and_drafts_together():
    assert schedule.tiles_of(31, 1, 32) == 1
    assert schedule.tiles_of(31, 2, 32) == 2
    assert schedule.tiles_of(0, 1, 32) == 1
    assert schedule.tiles_of(500, 0, 32) == 0  # no query, no work
    batch, _ = synthetic.small_batch([chain(3), chain(1)], [62, 5], page_size=4)
    assert schedule.request_tiles(batch, 32) == [3, 1]


@pytest.mark.parametrize("tiles, groups, message", [
    ([3], 0, "groups must be at least 1; got 0"), ([3, -1], 2, "must not be negative")])
def test_what_is_refused(tiles, groups, message):
    with pytest.raises(ValueError, match=message):
        schedule.share_out(tiles, groups)


def test_the_kernel_s_own_arithmetic_agrees(tmp_path, rng):
    """The two functions of schedule.cuh that are plain arithmetic, compiled for the host."""
    header = build.sources()["schedule.cuh"]
    program = tmp_path / "twin.cpp"
    program.write_text(
        "#include <cstdint>\n#include <cstdio>\n#define __device__\n#define __forceinline__\n"
        "struct S { int total, groups;\n" + source.function(header, "begin") + "\n"
        + source.function(header, "group_of") + "\n};\n"
        "int main() { int total, groups; while (scanf(\"%d %d\", &total, &groups) == 2) {\n"
        "  S s{total, groups < total ? groups : total};\n"
        "  for (int g = 0; g <= groups; ++g) printf(\"%d \", s.begin(g));\n"
        "  for (int t = 0; t < total; ++t) printf(\"%d \", s.group_of(t));\n"
        "  printf(\"\\n\"); } }\n")
    compiler = shutil.which("g++")
    subprocess.run([compiler, "-std=c++17", program, "-o", tmp_path / "twin"], check=True)
    pairs = [(1, 1), (5, 9), (1, 188), *(map(int, rng.integers(1, 300, 2)) for _ in range(60))]
    pairs = [tuple(pair) for pair in pairs]
    out = subprocess.run([tmp_path / "twin"], input="\n".join(f"{t} {g}" for t, g in pairs),
                         capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(out) == len(pairs)
    for (total, groups), line in zip(pairs, out, strict=True):
        begins = [schedule.share_begin(g, groups, total) for g in range(groups + 1)]
        owner = [g for g in range(groups) for _ in range(begins[g], begins[g + 1])]
        assert list(map(int, line.split())) == begins + owner, (total, groups)


def test_the_kernel_s_own_walk_agrees(tmp_path, rng):
    """What a group does next and where it leaves the result, compiled for the host."""
    text = build.sources()["schedule.cuh"]
    begin, end = (text.index(mark) for mark in ("// A group's share of one", "template <int kTok"))
    methods = "\n".join(source.function(text, name) for name in (
        "tiles_of", "unit_shift", "units_of", "begin", "next"))
    program = tmp_path / "walk.cpp"
    program.write_text(
        HOST + text[begin:end] + "template <int kTokens> struct Schedule {\nint total, groups;\n"
        + methods + WARP + "};\n" + source.function(text, "partial_slot") + """
int main() {
  int bs, groups, invariant;
  while (scanf("%d %d %d", &bs, &groups, &invariant) == 3) {
    std::vector<int> lens(bs), qo(bs + 1);
    for (int b = 0; b < bs; ++b) scanf("%d %d", &lens[b], &qo[b + 1]), qo[b + 1] += qo[b];
    VerifyParams p{qo.data(), lens.data(), bs, groups, invariant, 1};
    const Schedule<32> schedule(p);
    for (int g = 0; g < groups; ++g)
      for (Segment s = {}; schedule.next(p, g, s);)
        printf("%d %d %d %d %d ", g, s.request, s.tile_begin, s.tile_end,
               s.whole ? -1 : partial_slot(p, s.owner, 0, s.tile_begin == 0));
    printf("\\n");
  }
}
""")
    subprocess.run([shutil.which("g++"), "-std=c++17", "-w", program, "-o", tmp_path / "walk"],
                   check=True)
    cases = []
    for _ in range(200):
        bs = int(rng.integers(1, 7))
        cases.append(([int(100_000 ** rng.random()) - 1 for _ in range(bs)],
                      [int(n) for n in rng.integers(0, 70, bs)], int(rng.integers(1, 60)),
                      bool(rng.integers(2))))
    lines = [f"{len(lens)} {groups} {int(invariant)} "
             + " ".join(f"{n} {t}" for n, t in zip(lens, nodes, strict=True))
             for lens, nodes, groups, invariant in cases]
    found = subprocess.run([tmp_path / "walk"], input="\n".join(lines), capture_output=True,
                           text=True, check=True).stdout.splitlines()
    for (lens, nodes, groups, invariant), line in zip(cases, found, strict=True):
        tiles = [schedule.tiles_of(n, t, 32) for n, t in zip(lens, nodes, strict=True)]
        shares = schedule.share_out(tiles, groups, batch_invariant=invariant)

        def slot(s, invariant=invariant):
            return -1 if s.slot is None else s.slot if invariant else 2 * s.group + s.slot

        assert [int(x) for x in line.split()] == [
            x for s in shares for x in (s.group, s.request, s.begin, s.end, slot(s))]
        # The merge takes a request's partial results at an even distance, but for the first one
        # where that lies in a group's slot 1.
        for request in range(len(tiles)):
            left = [slot(s) for s in shares if s.request == request and s.partial]
            if left:
                assert left[1:] == [left[0] - (not invariant) + i * (1 if invariant else 2)
                                    for i in range(1, len(left))]


def test_merging_the_shares_gives_the_whole(batches, generator):
    tile = 4
    for tiles, groups in batches[-20:]:
        shares = schedule.share_out(tiles, groups)
        for request, count in enumerate(tiles):
            if not count:
                continue
            rows = torch.randn(count * tile, 24, generator=generator, dtype=torch.float64)
            q = torch.randn(2, 3, 24, generator=generator, dtype=torch.float64)
            visible = torch.rand(2, len(rows), generator=generator) < 0.7
            visible[0, : len(rows) // 2] = False  # some pieces see nothing

            def over(piece, rows=rows, q=q, visible=visible):
                return attend(q, rows[piece], rows[piece, :16], visible[:, piece], sm_scale=0.5)

            parts = [over(slice(s.begin * tile, s.end * tile)) for s in shares
                     if s.request == request]
            out, lse = schedule.merge(*map(torch.stack, zip(*parts, strict=True)))
            whole, whole_lse = over(slice(None))
            assert relative_error(out, whole) < 1e-14
            torch.testing.assert_close(lse, whole_lse, rtol=0, atol=1e-13)


def test_merging_nothing_gives_nothing():
    out, lse = schedule.merge(torch.zeros(3, 2, 5), torch.full((3, 2), -torch.inf))
    assert (out == 0).all() and (lse == -torch.inf).all()
