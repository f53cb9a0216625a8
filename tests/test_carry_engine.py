"""carry_engine: what is taken of which wheel. No network: the wheels are made here."""

import json
import subprocess
import tarfile
import zipfile

import carry_engine
import pytest
import wheels

KERNEL_FILES = ["sgl_kernel/__init__.py", "sgl_kernel/quantization/gguf.py",
                "sgl_kernel/sm90/common_ops.abi3.so", "sgl_kernel/sm100/common_ops.abi3.so",
                "sgl_kernel/flash_ops.abi3.so", "sgl_kernel/flashmla_ops.abi3.so",
                "sgl_kernel/infllm_ops.cpython-310-x86_64-linux-gnu.so"]


@pytest.fixture
def asked(monkeypatch):
    """Makes a wheel for each name that pip would be asked for; returns the names."""
    names = []

    def fetch(wheels, python, *wanted):
        made = []
        for want in wanted:
            names.append(want)
            name, _, version = want.partition("==")
            package, version = name.replace("-", "_").lower(), version or "7.0"
            path = wheels / f"{package}-{version}-py3-none-any.whl"
            with zipfile.ZipFile(path, "w") as wheel:
                wheel.writestr(f"{package}-{version}.dist-info/METADATA",
                               "Requires-Dist: pydantic-core==2.50.5\n"
                               "Requires-Dist: typing-extensions>=4\n")
                data = f"{package}-{version}.data"
                for file in KERNEL_FILES if package == "sglang_kernel" else [
                        f"{package}/__init__.py", f"{data}/purelib/{package}_x.py",
                        f"{data}/scripts/{package}"]:
                    wheel.writestr(file, "")
            made.append(path)
        return made

    monkeypatch.setattr(carry_engine, "download", fetch)
    return names


def test_what_is_carried(asked, tmp_path, capsys):
    dest = tmp_path / "build" / "engine"
    assert carry_engine.main([str(dest)]) == 0
    assert {"sglang==0.5.16", "sglang-kernel==0.4.5", "pydantic-core==2.50.5"} <= set(asked)
    with tarfile.open(dest / "kernel.tar.xz") as tar:
        files = {m.name for m in tar if m.isfile()}
    assert files == {*KERNEL_FILES[:3], "sglang_kernel-0.4.5.dist-info/METADATA"}
    with tarfile.open(dest / "site.tar.xz") as tar:
        names = set(tar.getnames())
    assert {"sglang/__init__.py", "sglang_x.py", "sglang-0.5.16.dist-info/METADATA"} <= names
    assert not any(".data" in name for name in names)
    versions = json.loads((dest / "versions.json").read_text())
    assert versions["sglang"] == "0.5.16" and versions["pydantic_core"] == "2.50.5"
    assert len(versions) == len(asked) and "MiB" in capsys.readouterr().out


def test_a_folder_that_is_there_is_left_alone(asked, tmp_path, capsys):
    assert carry_engine.main([str(tmp_path)]) == 2 and not asked
    assert "is there already" in capsys.readouterr().err


def test_pip_that_fails_is_told(monkeypatch, tmp_path, capsys):
    def fails(command, **kwargs):
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(wheels.subprocess, "run", fails)
    assert carry_engine.main([str(tmp_path / "engine")]) == 1
    assert "could not fetch" in capsys.readouterr().err and not (tmp_path / "engine").exists()
