"""Are recorded checks read, and refused when they are something else?"""

import json

import pytest

from mla_kernels import records

GOOD = {"cases": 600, "failed": 2, "first_seed": 7, "backend": ["cuda"],
        "worst": {"out": 0.003, "row": 0.005, "lse": 4e-5},
        "tolerance": {"out": 0.005, "row": 0.02, "lse": 0.002}, "max_nodes": 128,
        "device": "NVIDIA H200", "driver": "580.1", "torch": "2.11.0", "cuda": "13.0",
        "date": "2026-12-01", "failures": []}


def write(folder, data, name="one.json"):
    path = folder / name
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def test_reads_what_check_writes(tmp_path):
    record = records.load(write(tmp_path, GOOD))
    assert str(record) == ("598 of 600 random cases passed on NVIDIA H200 with cuda on 2026-12-01\n"
                           "(driver 580.1, CUDA 13.0, torch 2.11.0)")
    assert record.command == ("python -m mla_kernels.check --cases 600 --seed 7 --backend cuda "
                              "--max-nodes 128")
    assert record.worst["lse"] == 4e-5


def test_nothing_recorded_is_an_empty_list(tmp_path):
    assert records.checks(tmp_path) == records.checks(tmp_path / "absent") == []


@pytest.mark.parametrize("data", ["", "[]", "{}", json.dumps(GOOD | {"worst": {"out": 1}})])
def test_anything_else_is_refused_by_name(data, tmp_path):
    with pytest.raises(ValueError, match="one.json: not a record of mla_kernels.check"):
        records.load(write(tmp_path, data))


def test_the_repository_s_records_are_good():
    for record in records.checks():
        assert record.failed == 0
        assert all(record.worst[k] <= record.tolerance[k] for k in record.tolerance)


def test_the_latest_of_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "DATA", tmp_path)
    assert records.latest("some") is None
    for name, date in (("b", "2026-12-02"), ("a", "2026-12-03"), ("c", "2026-12-01")):
        records.write(tmp_path / "some" / f"{name}.json", {"name": name, "date": date})
    assert records.latest("some") == {"name": "a", "date": "2026-12-03"}


def test_a_record_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "new" / "record.json"
    records.write(path, {"x": 1})
    with pytest.raises(TypeError):
        records.write(path, {"x": object()})
    assert json.loads(path.read_text()) == {"x": 1} and list(path.parent.iterdir()) == [path]
