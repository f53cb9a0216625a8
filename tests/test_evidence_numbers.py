"""Does the numeric witness find the one right reading, and say so when the data can't tell?"""

import sys

import numpy as np
import pytest
import torch

from mla_kernels.evidence import __main__ as cli
from mla_kernels.evidence import compare, numeric
from mla_kernels.layout import ORDERS, KVLayout
from mla_kernels.reference import attend

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def call(rng, generator, *, tokens=None, context=None, dtype=None, k_scale=1.0):
    """One random attention call and the hypothesis that it was computed under."""
    dtype = dtype or DTYPES[rng.integers(3)]
    # Less than two tokens by chance leave a call in which a single row has all the weight.
    tokens, context = tokens or int(rng.integers(2, 5)), context or int(rng.integers(8, 64))
    q = torch.randn(tokens, int(rng.integers(1, 5)), 576, generator=generator).to(dtype)
    rows = torch.randn(context, 576, generator=generator).to(dtype)
    order, name = ORDERS[rng.integers(2)], str(rng.choice(list(numeric.scales())))
    how = ("not applied", "keys", "row")[rng.integers(3)] if k_scale != 1 else "not applied"
    return q, rows, numeric.Hypothesis(order, name, how, True)


def outputs(q, rows, truth, visible=None, k_scale=1.0):
    """Outputs as a kernel would return them: computed by the truth, rounded to q's dtype."""
    factor = 1.0 if truth.k_scale == "not applied" else k_scale
    values = KVLayout(truth.order).value(rows).double()
    if truth.k_scale == "row":
        values = values * k_scale
    if visible is None:
        visible = torch.ones(len(q), len(rows), dtype=torch.bool)
    out, _ = attend(q, rows, values, visible, sm_scale=numeric.scales()[truth.scale] * factor)
    return out.to(q.dtype)


def test_the_right_reading_in_200_of_200_draws(rng, generator):
    right = 0
    for _ in range(200):
        # No product of these and a scale comes near another's: 0.31 would, and two bf16
        # hypotheses that are 0.6 % apart are one.
        k_scale = float(rng.choice([1.0, 0.5, 0.2, 1.3]))
        q, rows, truth = call(rng, generator, k_scale=k_scale)
        visible = torch.rand(len(q), len(rows), generator=generator) < 0.8
        visible[:, :4] = True
        found = compare(q, rows, outputs(q, rows, truth, visible, k_scale), visible=visible,
                        k_scale=k_scale)
        right += found.answer == truth and found.margin > numeric.CLEAR
    assert right == 200


def test_precision_is_that_of_the_numbers_not_of_the_file(rng, generator):
    q, rows, truth = call(rng, generator, dtype=torch.bfloat16)
    found = compare(q.double(), rows.float(), outputs(q, rows, truth).float())
    assert found.unit == torch.finfo(torch.bfloat16).eps and found.answer == truth


CASES = ("q orthogonal to rope", "q without rope", "one token", "equal rows", "q zero")


@pytest.mark.parametrize("case", CASES)
def test_data_that_cannot_tell(case, rng, generator):
    q, rows, truth = call(rng, generator, context=1 if case == "one token" else 40,
                          dtype=torch.float32)
    rope = KVLayout(truth.order).rope_slice
    if case == "q orthogonal to rope":
        # The rope rows span 40 of 64 dimensions: take their span out of q.
        basis, _ = torch.linalg.qr(rows[:, rope].T.double())
        q[..., rope] -= ((q[..., rope].double() @ basis) @ basis.T).float()
    elif case == "q without rope":
        q[..., rope] = 0
    elif case == "equal rows":
        rows[:] = rows[0]
    elif case == "q zero":
        q.zero_()
    found = compare(q, rows, outputs(q, rows, truth))
    assert found.answer is None and truth in found.fitting
    testimony = found.testimony()
    assert testimony.order is None
    assert f"all of them have: {truth.order}" in testimony.says[0]  # the value can be seen


def test_outputs_of_something_else_fit_nothing(rng, generator):
    q, rows, truth = call(rng, generator)
    found = compare(q, rows, torch.randn(outputs(q, rows, truth).shape, generator=generator))
    assert found.answer is None and found.fitting == []
    assert "no hypothesis reproduces the outputs" in found.testimony().says[0]


def test_a_wrong_answer_key_is_not_accepted(rng, generator):
    """The scale is told from the data: with another list of scales, another or no answer."""
    q, rows, truth = call(rng, generator)
    scale = numeric.scales()[truth.scale]
    found = compare(q, rows, outputs(q, rows, truth), candidates={"a": scale * 1.5, "b": scale * 2})
    assert found.answer is None
    found = compare(q, rows, outputs(q, rows, truth), candidates={"a": scale * 1.5, "b": scale})
    assert found.answer.scale == "b"


def test_scales():
    found = numeric.scales((40, 32))
    assert list(found) == ["192^-0.5", "192^-0.5 x mscale(40)^2", "192^-0.5 x mscale(32)^2",
                           "576^-0.5"]
    assert found["192^-0.5 x mscale(40)^2"] == pytest.approx(0.1352337788608801)


@pytest.mark.parametrize(("change", "error", "message"), [
    (lambda t: t.update(q=t["q"].numpy()), TypeError, "q must be a floating-point tensor; got nd"),
    (lambda t: t.update(rows=t["rows"].to(torch.uint8)), TypeError, "View an FP8 cache's uint8"),
    (lambda t: t.update(rows=torch.zeros(9, 656, dtype=torch.uint8)), TypeError,
     "656 bytes are a scaled FP8 row"),
    (lambda t: t.update(rows=torch.zeros(9, 656)), ValueError, "656 is the byte width"),
    (lambda t: t.update(rows=t["rows"][:, :512]), ValueError, r"rows must be \[\.\.\., 576\]"),
    (lambda t: t.update(rows=t["rows"][:0]), ValueError, r"rows must be \[context, 576\]"),
    (lambda t: t.update(q=t["q"][0]), ValueError, r"q must be \[num_tokens, H, 576\]"),
    (lambda t: t.update(out=t["out"][..., :64]), ValueError, r"out must be \[2, 3, 512\]"),
    (lambda t: t["out"].fill_(torch.nan), ValueError, "out holds numbers that are not finite"),
    (lambda t: t.update(visible=torch.ones(2, 8)), ValueError, r"visible must be bool \[2, 9\]"),
    (lambda t: t.update(k_scale=0.0), ValueError, "k_scale must be a positive number; got 0.0"),
])
def test_refused(change, error, message):
    tensors = {"q": torch.randn(2, 3, 576), "rows": torch.randn(9, 576),
               "out": torch.randn(2, 3, 512)}
    change(tensors)
    with pytest.raises(error, match=message):
        compare(**tensors)


# -- files and the command line -----------------------------------------------------------


def save(path, tensors):
    if path.suffix == ".npz":
        np.savez(path, **{n: np.asarray(t) for n, t in tensors.items()})
    elif path.suffix == ".pt":
        torch.save(tensors, path)
    else:
        pytest.importorskip("safetensors.torch").save_file(
            {n: torch.as_tensor(t) for n, t in tensors.items()}, path)


@pytest.mark.parametrize("suffix", [".npz", ".pt", ".safetensors"])
def test_captured_files(suffix, rng, generator, tmp_path, capsys):
    q, rows, truth = call(rng, generator, dtype=torch.float32, k_scale=0.5)
    path = tmp_path / f"captured{suffix}"
    save(path, {"q": q, "rows": rows, "out": outputs(q, rows, truth, k_scale=0.5),
                "k_scale": torch.tensor(0.5)})
    found = compare(**numeric.load(path))
    assert found.answer == truth
    assert cli.main(["--captured", str(path)]) == 0
    printed = capsys.readouterr().out
    assert f"{truth.order}, from 1 witness" in printed and found.describe(truth) in printed


def test_the_command_cannot_tell(rng, generator, tmp_path, capsys):
    q, rows, truth = call(rng, generator, context=1)
    save(tmp_path / "one.pt", {"q": q, "rows": rows, "out": outputs(q, rows, truth)})
    assert cli.main(["--captured", str(tmp_path / "one.pt")]) == 1
    assert "cannot tell" in capsys.readouterr().out


def test_the_command_shows_witnesses_that_disagree(rng, generator, tmp_path, capsys):
    q, rows, truth = call(rng, generator)
    save(tmp_path / "c.pt", {"q": q, "rows": rows, "out": outputs(q, rows, truth)})
    parts = ["kv_c", "k_pe"] if truth.order == "rope_first" else ["k_pe", "kv_c"]
    (tmp_path / "e.py").write_text("def write(kv_cache, loc, kv_c, k_pe):\n"
                                   f"    kv_cache[loc] = torch.cat([{', '.join(parts)}], -1)\n")
    given = ["mine", "--path", str(tmp_path / "e.py"), "--captured", str(tmp_path / "c.pt")]
    assert cli.main(given) == 2
    shown = capsys.readouterr().err
    assert "the witnesses of mine disagree" in shown
    assert "latent_first" in shown and "rope_first" in shown and "e.py:2" in shown


@pytest.mark.parametrize(("given", "message"), [
    (["no_such_engine"], "no_such_engine is not installed here"),
    (["--wheel", __file__], "must be a .whl file"),
    (["--path", "/no/such"], "no file or folder"),
    (["--captured", __file__], r"must be a .npz, .pt or .safetensors file"),
])
def test_wrong_input_gets_a_message(given, message, capsys):
    assert cli.main(given) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("suffix", [".npz", ".pt"])
def test_files_that_are_not_what_they_say(suffix, tmp_path):
    path = tmp_path / f"captured{suffix}"
    path.write_text("nothing of the kind")
    with pytest.raises(ValueError, match=f"captured captured{suffix}: "):
        numeric.load(path)
    save(path, {"q": torch.zeros(1)})
    with pytest.raises(ValueError, match="q, rows and out; rows, out missing, it holds q"):
        numeric.load(path)


def test_safetensors_is_named_when_it_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    (tmp_path / "a.safetensors").write_bytes(b"")
    with pytest.raises(ModuleNotFoundError, match="pip install safetensors"):
        numeric.load(tmp_path / "a.safetensors")
