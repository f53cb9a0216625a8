"""Does the examination see what is missing, and name a fix that is one?"""

import dataclasses
import os
import subprocess
import sys

import pytest
import torch
from bs4 import BeautifulSoup

from mla_kernels import build, doctor
from mla_kernels.device import LocalGPU

CARD = LocalGPU("RTX PRO 6000", (12, 0), 188, 96 << 30, 96 << 20, 101_376, "580.1")


def look(name):
    status, detail, fix = doctor.CHECKS[name]()
    return doctor.Check(name, status, detail, fix)


@pytest.fixture
def gpu(monkeypatch):
    def put(card, archs=("sm_90", "sm_120")):
        monkeypatch.setattr(doctor, "local_gpu", lambda: card)
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: list(archs))
    return put


def test_this_machine_has_what_the_tests_need():
    found = doctor.examine()
    assert [c.name for c in found] == list(doctor.CHECKS)
    assert all(c.status in doctor.MEANING and c.detail for c in found)
    lost = [c for c in found.missing if c.name not in ("GPU", "driver")]
    assert not lost
    assert all(c.fix for c in found if c.status == doctor.MISSING)


def test_examining_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("MLA_KERNELS_CACHE", str(tmp_path / "new" / "cache"))
    assert look("build cache").status == doctor.OK
    assert list(tmp_path.iterdir()) == []


def test_a_check_that_raises_is_shown(monkeypatch):
    def broken():
        raise OSError("disk on fire")

    monkeypatch.setattr(doctor, "CHECKS", {"Python": doctor._python, "broken": broken})
    found = doctor.examine()
    assert [c.status for c in found] == ["ok", "missing"]
    assert found[1].detail == "OSError: disk on fire"
    assert "Needed and not there: broken" in str(found)


def test_no_compiler(monkeypatch):
    monkeypatch.setenv("MLA_KERNELS_CUDA_HOME", "/nowhere")
    check = look("CUDA compiler (nvcc)")
    assert check.status == "missing" and "/nowhere" in check.detail
    assert check.fix == "unset MLA_KERNELS_CUDA_HOME"
    monkeypatch.delenv("MLA_KERNELS_CUDA_HOME")
    monkeypatch.setattr(build, "_candidates", lambda: iter(()))
    check = look("CUDA compiler (nvcc)")
    assert check.status == "missing"
    assert "cuda-toolkit[nvcc,cccl]" in check.fix and sys.executable in check.fix
    if torch.version.cuda:
        assert f"=={torch.version.cuda}.*" in check.fix


def test_a_compiler_that_does_not_know_sm_120(monkeypatch, tmp_path):
    class Old:
        architectures, version, origin, nvcc = ("sm_80", "sm_90"), (12, 4), "PATH", tmp_path

    monkeypatch.setattr(build, "find_toolkit", lambda: Old)
    check = look("CUDA compiler (nvcc)")
    assert check.status == "missing" and "12.8" in check.detail


def test_no_host_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    check = look("host compiler")
    assert check.status == "missing" and check.fix == "unset CXX"
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert look("host compiler").fix == "sudo apt install g++"


def test_no_ninja(monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda package: None)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    check = look("ninja")
    assert check.status == "missing" and check.fix.endswith("-m pip install ninja")
    assert look("widgets").fix.endswith("-m pip install ipywidgets jupyterlab_widgets")
    assert look("Triton").status == "optional"


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_cache_without_permission(monkeypatch, tmp_path):
    tmp_path.chmod(0o500)
    monkeypatch.setenv("MLA_KERNELS_CACHE", str(tmp_path / "cache"))
    assert look("build cache").status == "missing"


def test_cache_below_a_file(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MLA_KERNELS_CACHE", str(tmp_path / "file" / "cache"))
    check = look("build cache")
    assert check.status == "missing" and "MLA_KERNELS_CACHE" in check.fix


def test_torch_without_cuda(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    check = look("PyTorch")
    assert check.status == "missing" and "built without CUDA" in check.detail


def test_no_gpu_is_no_fault(gpu, monkeypatch):
    gpu(None)
    monkeypatch.setattr(doctor, "_nvidia_smi", lambda: None)
    assert look("GPU").status == look("driver").status == "optional"
    assert "compiled and read" in doctor.Examination([look("GPU")]).summary


def test_a_gpu_that_torch_cannot_use(gpu, monkeypatch):
    gpu(None)
    monkeypatch.setattr(doctor, "_nvidia_smi", lambda: "RTX 5090, 550.1")
    check = look("driver")
    assert check.status == "missing" and "RTX 5090, 550.1" in check.detail and check.fix


def test_cards(gpu):
    gpu(CARD)
    check = look("GPU")
    assert check.status == "ok" and "sm_120, 188 SMs, 96 GiB" in check.detail
    assert "made for" in check.detail and look("driver").detail == "580.1"
    assert "can run on RTX PRO 6000" in doctor.Examination([check]).summary
    gpu(dataclasses.replace(CARD, name="H200", capability=(9, 0)))
    check = look("GPU")
    assert check.status == "ok" and "under the limits of sm_120" in check.detail
    gpu(dataclasses.replace(CARD, name="T4", capability=(7, 5)))
    check = look("GPU")
    assert check.status == "optional" and "too old" in check.detail


@pytest.mark.parametrize("archs, capability, runs", [
    (("sm_80", "sm_90"), (12, 0), False),
    (("sm_80", "sm_90", "compute_90"), (12, 0), True),  # compiled when it is loaded
    (("sm_120",), (12, 1), True),
    (("sm_121",), (12, 0), False),
    (("sm_80",), (8, 9), True),
    (("sm_90a",), (9, 0), True),
    ((), (9, 0), False),
])
def test_whether_torch_has_code_for_a_card(archs, capability, runs, gpu):
    card = dataclasses.replace(CARD, capability=capability)
    gpu(card, archs)
    assert doctor._torch_runs_on(card) is runs
    assert look("GPU").status == ("ok" if runs else "missing")


def test_table_shows_every_check_and_escapes():
    found = doctor.Examination([
        doctor.Check("a <b>", "ok", "1 & 2"), doctor.Check("c", "missing", "gone", "pip install c"),
        doctor.Check("d", "optional", "not there")])
    soup = BeautifulSoup(found._repr_html_(), "html.parser")
    cells = [[td.get_text() for td in tr.find_all("td")] for tr in soup.find_all("tr")[1:]]
    assert cells == [["✓ ok", "a <b>", "1 & 2", ""], ["✗ missing", "c", "gone", "pip install c"],
                     ["– optional", "d", "not there", ""]]
    assert "Needed and not there: c" in soup.get_text()
    assert "fix: pip install c" in str(found)


def test_command_line():
    done = subprocess.run([sys.executable, "-W", "error", "-m", "mla_kernels.doctor"],
                          capture_output=True, text=True)
    assert done.returncode == (1 if doctor.examine().missing else 0)
    assert "PyTorch" in done.stdout and done.stderr == ""
