"""Do the pictures of evidence show the findings they are given?"""

import dataclasses

import pytest
import torch
from matplotlib.figure import Figure

from mla_kernels import figures_evidence
from mla_kernels.evidence import compare, engines, numeric
from mla_kernels.layout import KVLayout

BF16 = KVLayout(dtype=torch.bfloat16)


def texts(figure):
    return [t.get_text() for ax in figure.axes for t in (*ax.texts, *ax.get_yticklabels())]


def test_the_ruler_draws_each_finding_in_its_order():
    records = engines.load()
    figure = figures_evidence.findings_ruler(records, BF16)
    assert isinstance(figure, Figure)
    boxes = sorted((round(p.get_y()), p.get_x()) for p in figure.axes[0].patches)
    first = [KVLayout(r.order).segments[1].start for r in records]
    assert boxes == sorted([(y, 0) for y in range(len(records))] + list(enumerate(first)))
    shown = texts(figure)
    for record in records:
        assert any(record.place in text and record.how in text for text in shown)
        assert any(record.version.split()[-1] in text for text in shown)
    swapped = [dataclasses.replace(r, order="rope_first") for r in records]
    assert {p.get_x() for p in figures_evidence.findings_ruler(swapped, BF16).axes[0].patches} == {
        0, 64}


@pytest.mark.parametrize("context", [1, 200])
def test_hypotheses_are_marked_by_what_they_reproduce(context, seed):
    found = compare(**numeric.simulate(context=context, k_scale=0.5, seed=seed))
    figure = figures_evidence.hypotheses(found, title="t", most=9)
    marks = [line.get_marker() for line in figure.axes[0].lines if line.get_marker() != "None"]
    assert len(marks) == 9 and marks.count("o") == min(9, len(found.fitting))
    assert figure.axes[0].get_title(loc="left") == "t"
    assert sum("k_scale" in t for t in texts(figure)) == 9
    plain = figures_evidence.hypotheses(compare(**numeric.simulate(seed=seed)))
    assert not any("k_scale" in t for t in texts(plain))


def test_a_simulated_call_is_what_it_says(seed):
    truth = numeric.Hypothesis("rope_first", "576^-0.5", "keys", True)
    assert compare(**numeric.simulate(truth, k_scale=0.2, seed=seed)).answer == truth
    drawn = {compare(**numeric.simulate(seed=seed + i)).answer for i in range(12)}
    assert None not in drawn and len(drawn) > 1
