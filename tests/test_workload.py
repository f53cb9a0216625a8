"""Inputs of measurements: shapes of a command line, and requests of unequal lengths."""

from __future__ import annotations

import pytest
import torch

from mla_kernels.attention import verify_attention
from mla_kernels.workload import PRESETS, Shape, chosen, make_workload


def test_shapes_of_a_command_line():
    assert chosen(None, None) == list(PRESETS["spine"])
    assert chosen(["1,8,2,300"], None) == [Shape(1, 8, 2, 300)]
    both = chosen(["1,8,8,16384", "1,8,2,300"], ["spine"])
    assert both[:2] == [Shape(1, 8, 8, 16384), Shape(1, 8, 2, 300)]
    assert len(both) == len(PRESETS["spine"]) + 1          # one of them is in the preset too
    with pytest.raises(ValueError, match="a shape must look like"):
        chosen(["1,8"], None)


def test_contexts_of_their_own(rng, seed):
    contexts = [int(n) for n in rng.integers(0, 60, 4)]
    work = make_workload(Shape(4, 2, 3, max(contexts)), "cpu", contexts=contexts, l2_bytes=0,
                         seed=seed % 1000)
    for region, batch in enumerate(work.batches):
        assert batch.kv_lens.tolist() == contexts and batch.qo_indptr.tolist() == [0, 3, 6, 9, 12]
        used = torch.cat([batch.kv_indices[: sum(contexts)], batch.draft_slots]).tolist()
        others = torch.cat([torch.cat([b.kv_indices[: sum(contexts)], b.draft_slots])
                            for i, b in enumerate(work.batches) if i != region]).tolist()
        assert len(set(used)) == len(used) and not set(used) & set(others)
    out, _ = verify_attention(work.q[0], work.pool, work.batches[0], sm_scale=work.sm_scale,
                              backend="reference")
    assert torch.equal(out, work.exact[0].to(out.dtype))


def test_equal_contexts_are_the_default(seed):
    shape = Shape(3, 2, 4, 50)
    one, two = (make_workload(shape, "cpu", l2_bytes=0, seed=seed % 1000, **more)
                for more in ({}, {"contexts": [50] * 3}))
    assert torch.equal(one.pool, two.pool)
    for a, b in zip(one.batches, two.batches, strict=True):
        assert torch.equal(a.kv_indices, b.kv_indices)
        assert torch.equal(a.draft_slots, b.draft_slots)
