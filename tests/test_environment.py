"""The two ways to install, held together, and the Makefile that one of them stands on."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:  # the test extra brings it there
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
CONDA = yaml.safe_load((ROOT / "environment.yml").read_text())
MAKEFILE = (ROOT / "Makefile").read_text()


def requirements(*extras: str) -> list[Requirement]:
    texts = list(PROJECT["dependencies"])
    for extra in extras:
        texts += PROJECT["optional-dependencies"][extra]
    return [Requirement(t) for t in texts]


# -- pyproject.toml and environment.yml ---------------------------------------------------


def conda_packages() -> dict[str, str]:
    """Name and version text of what conda itself installs."""
    parts = [re.fullmatch(r"([\w.-]+)\s*(.*)", d).groups()
             for d in CONDA["dependencies"] if isinstance(d, str)]
    return {canonicalize_name(name): version for name, version in parts}


def test_conda_installs_this_project_with_pip():
    """So that pyproject.toml stays the only list: one entry for pip, this folder itself."""
    assert CONDA["name"] == PROJECT["name"]
    (pip,) = [d["pip"] for d in CONDA["dependencies"] if isinstance(d, dict)]
    (entry,) = pip
    match = re.fullmatch(r"-e \.\[([\w,]+)\]", entry)
    assert match, entry
    extras = set(match[1].split(","))
    assert extras <= set(PROJECT["optional-dependencies"])
    # `make` installs the same.
    assert extras == set(re.search(r"^\$\(STAMP\):.*?--extras (\S+)", MAKEFILE,
                                   re.MULTILINE | re.DOTALL)[1].split(","))


def test_conda_states_no_version_of_its_own():
    packages = conda_packages()
    assert {"python", "pip"} <= set(packages)
    ours = {canonicalize_name(r.name) for extra in PROJECT["optional-dependencies"]
            for r in requirements(extra)}
    for name, version in packages.items():
        assert name not in ours, f"{name} is in pyproject.toml: leave it to pip"
        assert name == "python" or not version, f"{name}{version} is stated nowhere else"


def test_conda_s_python_is_one_that_the_project_takes():
    wanted = SpecifierSet(PROJECT["requires-python"])
    version = conda_packages()["python"]
    match = re.fullmatch(r"=(\d+\.\d+)", version)
    assert match, f"python{version}: one minor version, as python=3.12"
    assert Version(f"{match[1]}.0") in wanted and Version(f"{match[1]}.99") in wanted


def test_the_oldest_python_is_the_same_everywhere():
    oldest = re.fullmatch(r">=3\.(\d+)", PROJECT["requires-python"])[1]
    assert PYPROJECT["tool"]["ruff"]["target-version"] == f"py3{oldest}"
    assert f"v >= (3, {oldest})" in MAKEFILE and f"needs 3.{oldest} or newer" in MAKEFILE


def test_the_cuda_compiler_is_asked_for():
    (toolkit,) = [r for r in requirements() if r.name == "cuda-toolkit"]
    assert {"nvcc", "cccl"} <= toolkit.extras
    # torch pins it; a version here would fight with that.
    assert not toolkit.specifier
    assert toolkit.marker and toolkit.marker.evaluate({"platform_system": "Linux"})
    assert not toolkit.marker.evaluate({"platform_system": "Darwin"})


def test_what_is_installed_is_what_was_asked_for():
    missing = []
    for wanted in requirements("test"):
        if wanted.marker and not wanted.marker.evaluate():
            continue
        try:
            version = metadata.version(wanted.name)
        except metadata.PackageNotFoundError:
            version = None
        if version is None or not wanted.specifier.contains(version, prereleases=True):
            missing.append(f"{wanted} (found {version})")
    assert not missing


def pypi_nvcc() -> metadata.Distribution | None:
    """The compiler's own package: nvidia-cuda-nvcc, before CUDA 13 with a suffix -cu12."""
    for distribution in metadata.distributions():
        if re.fullmatch(r"nvidia[-_]cuda[-_]nvcc([-_]cu\d+)?", distribution.metadata["Name"]):
            return distribution
    return None


def test_nvcc_is_of_the_cuda_that_torch_was_built_for():
    if torch.version.cuda is None:
        pytest.skip("this torch was built without CUDA")
    nvcc = pypi_nvcc()
    if nvcc is None:
        pytest.skip("nvcc does not come from PyPI here")
    assert nvcc.version.split(".")[:2] == torch.version.cuda.split(".")[:2]
    (program,) = [f.locate() for f in nvcc.files if f.name == "nvcc"]
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    assert f"release {torch.version.cuda}," in said.stdout


def test_the_license_is_the_one_that_is_named():
    text = (ROOT / "LICENSE").read_text()
    assert PROJECT["license"] == "Apache-2.0" and PROJECT["license-files"] == ["LICENSE"]
    assert "Apache License" in text[:200] and "Version 2.0, January 2004" in text[:200]
    assert "9. Accepting Warranty" in text and "END OF TERMS AND CONDITIONS" in text


# -- the README's commands ----------------------------------------------------------------


def targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", MAKEFILE, re.MULTILINE))


def test_the_makefile_has_the_promised_targets():
    assert {"lab", "test", "run", "clean", "help"} <= targets()
    said = subprocess.run(["make", "-C", ROOT], capture_output=True, text=True, check=True).stdout
    for name in targets() - {"help"}:  # the default target lists the others
        assert re.search(rf"^  {name} +\S", said, re.MULTILINE), name


def test_the_readme_s_commands_exist():
    readme = ROOT / "README.md"
    if not readme.exists():
        pytest.skip("there is no README.md")
    text = readme.read_text()
    code = "\n".join(re.findall(r"^ *```.*?^ *```|`[^`\n]+`", text, re.MULTILINE | re.DOTALL))
    made = set(re.findall(r"\bmake (?:-\S+ )*([a-z][a-z-]*)\b(?!=)", code))
    assert {"lab", "test"} <= made <= targets(), f"not in the Makefile: {made - targets()}"
    for name in re.findall(r"conda activate ([\w.-]+)", code):
        assert name == CONDA["name"]
    for file in re.findall(r"(?:-f|--file) (\S+\.yml)", code):
        assert (ROOT / file).exists()


# -- the Makefile -------------------------------------------------------------------------

STUB_PYTHON = """\
#!/bin/sh
# A Python that installs and runs nothing, and says what it was asked.
echo "$@" >> "$CALLS"
case "$1" in
  -c|-V) exec {python} "$@" ;;
  scripts/install.py)
    sleep 0.3
    test -n "$FAIL" && exit 3
    mkdir -p "$2/bin" && cp "$0" "$2/bin/python" ;;
esac
exit 0
"""


@pytest.fixture
def checkout(tmp_path):
    """The Makefile beside an installer that only counts; `make` as a function."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "install.py").touch()
    python = tmp_path / "stub-python"
    python.write_text(STUB_PYTHON.format(python=sys.executable))
    python.chmod(0o755)
    calls = tmp_path / "calls"

    def make(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        # Not the variables of a `make test` that this test may itself run under.
        own = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))
               and k not in ("PYTHON", "VENV", "PYTESTFLAGS")}
        given = {"PYTHON": "./stub-python", "CALLS": str(calls), **environment}
        return subprocess.run(["make", *arguments], cwd=tmp_path, env={**own, **given},
                              capture_output=True, text=True, timeout=60)

    def installs() -> int:
        return calls.read_text().count("scripts/install.py") if calls.exists() else 0

    make.folder, make.installs, make.calls = tmp_path, installs, calls
    return make


def test_make_installs_once_and_again_when_pyproject_changes(checkout):
    assert checkout("test").returncode == 0 and checkout.installs() == 1
    assert "scripts/install.py .venv --extras test\n" in checkout.calls.read_text()
    assert checkout("run").returncode == 0 and checkout("test").returncode == 0
    assert checkout.installs() == 1
    pyproject = checkout.folder / "pyproject.toml"
    later = (checkout.folder / ".venv" / ".installed").stat().st_mtime + 5
    os.utime(pyproject, (later, later))
    assert checkout("test").returncode == 0 and checkout.installs() == 2


def test_make_j_installs_once(checkout):
    done = checkout("-j8", "test", "run", "lab")
    assert done.returncode == 0, done.stderr
    assert checkout.installs() == 1
    calls = checkout.calls.read_text()
    assert calls.index("install.py") < calls.index("-m pytest")
    assert "scripts/run_workbook.py" in calls and "-m jupyterlab" in calls
    assert "notebooks/00_start_here.ipynb" in calls


def test_a_failed_install_leaves_no_stamp(checkout):
    done = checkout("test", FAIL="yes")
    assert done.returncode != 0 and "pytest" not in checkout.calls.read_text()
    assert not (checkout.folder / ".venv" / ".installed").exists()
    # Nor does one that was there before survive a later install that fails.
    assert checkout("test").returncode == 0 and checkout.installs() == 2
    later = (checkout.folder / ".venv" / ".installed").stat().st_mtime + 5
    os.utime(checkout.folder / "pyproject.toml", (later, later))
    assert checkout("test", FAIL="yes").returncode != 0
    assert not (checkout.folder / ".venv" / ".installed").exists()
    assert checkout("test").returncode == 0 and checkout.installs() == 4


def test_an_environment_without_a_working_python_is_made_again(checkout):
    assert checkout("test").returncode == 0
    (checkout.folder / ".venv" / "bin" / "python").unlink()
    assert checkout("test").returncode == 0 and checkout.installs() == 2


def test_variables_reach_their_commands(checkout):
    done = checkout("test", "VENV=elsewhere", "PYTESTFLAGS=-k tree")
    assert done.returncode == 0
    assert (checkout.folder / "elsewhere" / ".installed").exists()
    assert not (checkout.folder / ".venv").exists()
    assert checkout("run", "VENV=elsewhere", "NOTEBOOKS=a.ipynb b.ipynb").returncode == 0
    calls = checkout.calls.read_text()
    assert "-m pytest -k tree\n" in calls
    assert "scripts/run_workbook.py a.ipynb b.ipynb\n" in calls


def test_an_old_python_is_refused_in_one_line(checkout):
    stub = checkout.folder / "old-python"
    stub.write_text(f"""#!/bin/sh
exec {sys.executable} -c 'import sys; sys.version_info = (3, 8, 10); exec(sys.argv[1])' "$2"
""")
    stub.chmod(0o755)
    done = checkout("test", "PYTHON=./old-python")
    assert done.returncode != 0 and checkout.installs() == 0
    lines = [x for x in done.stderr.splitlines() if "***" not in x]
    assert lines == ["make: ./old-python is Python 3.8, and this project needs 3.10 or newer. "
                     "Name another: make test PYTHON=python3.12"]
    done = checkout("lab", "PYTHON=no-such-python")
    lines = [x for x in done.stderr.splitlines() if "***" not in x]
    assert done.returncode != 0
    assert lines == ["make: no-such-python is not to be found. Name a Python of 3.10 or newer: "
                     "make lab PYTHON=python3.12"]


def test_clean_keeps_the_environment_and_clean_all_does_not(checkout):
    assert checkout("test").returncode == 0
    for name in ("build", ".pytest_cache", "mla_kernels", "tests"):
        (checkout.folder / name).mkdir()
    assert checkout("clean").returncode == 0
    assert not (checkout.folder / "build").exists()
    assert (checkout.folder / ".venv" / ".installed").exists()
    # Only what is an environment is removed, whatever VENV says.
    assert checkout("clean-all").returncode == 0 and (checkout.folder / ".venv").exists()
    (checkout.folder / ".venv" / "pyvenv.cfg").touch()
    assert checkout("clean-all").returncode == 0
    assert not (checkout.folder / ".venv").exists()
