"""kv_layout.cuh compiled for the CPU: which draft tokens a row sees, up to 1,024 of them, and
where a cache row lies, beyond 2^31 elements too."""

import shutil
import subprocess

import numpy as np
import pytest

from mla_kernels import build
from mla_kernels.tree import MAX_NODES, pack_mask

PROGRAM = r"""
#include <algorithm>
#include <cstdio>
#include <vector>
#define __device__
#define __forceinline__ inline
using std::min;
static inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return shift ? low >> shift | high << (32 - shift) : low;
}
#include "kv_layout.cuh"

int main() {
  char what;
  while (std::scanf(" %c", &what) == 1) {
    if (what == 'v') {             // words, nodes, then the mask words; bits of every window
      int words, nodes;
      if (std::scanf("%d %d", &words, &nodes) != 2) return 1;
      std::vector<unsigned> mask(words);
      for (auto& word : mask)
        if (std::scanf("%u", &word) != 1) return 1;
      for (int first = -40; first < nodes + 40; ++first)
        std::printf("%u ", mla::visible_bits(mask.data(), words, first, nodes));
    } else {                       // page, page_shift, row stride, position: the row's offset
      int page, shift, position;
      long long stride;
      if (std::scanf("%d %d %lld %d", &page, &shift, &stride, &position) != 4) return 1;
      mla::VerifyParams p = {};
      std::vector<int> pages((position >> shift) + 1, -1);
      pages.back() = page;
      const int qo[2] = {0, 1}, kv[1] = {0}, lens[1] = {position + 1};
      p.qo_indptr = qo;
      p.kv_indptr = kv;
      p.kv_lens = lens;
      p.kv_indices = pages.data();
      p.page_shift = shift;
      p.kv_row_stride = stride;
      const mla::RequestRows rows(p, 0);
      std::printf("%lld", (long long)rows.address(p, position, rows.look_up(p, position)));
    }
    std::printf("\n");
  }
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kv_layout")
    (folder / "main.cpp").write_text(PROGRAM)
    subprocess.run([shutil.which("g++"), "-std=c++17", "-fsanitize=address,undefined",
                    "-fno-sanitize-recover", "-I", build.CSRC, folder / "main.cpp", "-o",
                    folder / "main"], check=True)

    def run(lines):
        done = subprocess.run([folder / "main"], input="\n".join(lines), text=True,
                              capture_output=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run


def test_visible_bits(program, rng):
    sizes = [1, 31, 32, 33, 64, MAX_NODES, *(int(n) for n in rng.integers(1, MAX_NODES, 20))]
    masks = [rng.random((1, n)) < rng.random() for n in sizes]
    lines = []
    for mask in masks:
        # Words that the batch's largest tree needs and this one does not hold anything.
        words = np.append(pack_mask(mask)[0], rng.integers(0, 2**32, 2, dtype=np.uint32))
        lines.append(f"v {len(words)} {mask.shape[1]} {' '.join(map(str, words))}")
    for mask, line in zip(masks, program(lines), strict=True):
        nodes = mask.shape[1]
        seen = np.concatenate([np.ones(72, bool), mask[0], np.zeros(112, bool)])
        for first, bits in zip(range(-40, nodes + 40), map(int, line.split()), strict=True):
            expected = seen[first + 72:first + 72 + 32]
            assert bits == int(sum(1 << i for i in np.flatnonzero(expected))), (nodes, first)


def test_address_of_a_row(program, rng):
    cases = [(3_728_271, 0, 1152, 5), (2**31 - 1, 0, 1152, 0), (14_564, 8, 1168, 511)]
    cases += [(int(rng.integers(2**20)), int(rng.integers(9)), 1152 + 16 * int(rng.integers(9)),
               int(rng.integers(3000))) for _ in range(50)]
    found = map(int, program([f"a {page} {shift} {stride} {position}"
                              for page, shift, stride, position in cases]))
    for (page, shift, stride, position), offset in zip(cases, found, strict=True):
        slot = (page << shift) + position % (1 << shift)
        assert offset == slot * stride
