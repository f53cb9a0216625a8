"""What this machine can do for the workbook, and how to fix what it can't.

:func:`examine` looks and changes nothing: it installs, builds and writes nothing. Its result
shows itself as a table in a notebook; ``python -m mla_kernels.doctor`` prints it and exits
with 1 when something that is needed is missing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import html
import importlib.metadata
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from . import build
from .device import LocalGPU, local_gpu

OK, MISSING, OPTIONAL = "ok", "missing", "optional"

#: What a status means, and the mark in front of it.
MEANING = {
    OK: ("✓", "works"),
    OPTIONAL: ("–", "not there, and no notebook fails without it"),
    MISSING: ("✗", "needed and not there"),
}


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing looked at.

    Args:
        status: ``"ok"``, ``"missing"``, or ``"optional"`` for what is not there but need not be.
        detail: what was found.
        fix: a command, or what to do; empty where there is nothing to do.
    """

    name: str
    status: str
    detail: str
    fix: str = ""


class Examination(list[Check]):
    """The checks in order; shows itself as a table."""

    @property
    def missing(self) -> list[Check]:
        return [c for c in self if c.status == MISSING]

    @property
    def summary(self) -> str:
        lost = [c.name for c in self.missing]
        if lost:
            return f"Needed and not there: {', '.join(lost)}. The last column has the fix."
        gpu = local_gpu()
        if gpu is None:
            return ("All that the notebooks need is there. Without a GPU the kernel is compiled "
                    "and read; what was measured on one is shown from records.")
        return f"All that the notebooks need is there, and the kernel can run on {gpu.name}."

    def __str__(self) -> str:
        width = max(len(c.name) for c in self)
        lines = []
        for c in self:
            lines.append(f"{MEANING[c.status][0]} {c.name:{width}}  {c.detail}")
            if c.fix:
                lines.append(f"  {'':{width}}  fix: {c.fix}")
        return "\n".join([*lines, self.summary])

    def _repr_html_(self) -> str:
        color = {OK: "#009E73", OPTIONAL: "#646c76", MISSING: "#D55E00"}
        left = "text-align:left;vertical-align:top"
        rows = [
            f"<tr><td style='{left};white-space:nowrap;color:{color[c.status]}'>"
            f"<b>{MEANING[c.status][0]} {c.status}</b></td>"
            f"<td style='{left};white-space:nowrap'>{html.escape(c.name)}</td>"
            f"<td style='{left}'>{html.escape(c.detail)}</td>"
            f"<td style='{left}'>{f'<code>{html.escape(c.fix)}</code>' if c.fix else ''}</td></tr>"
            for c in self]
        head = "".join(f"<th style='{left}'>{t}</th>" for t in ("", "what", "found", "to fix it"))
        return (f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
                f"<p>{html.escape(self.summary)}</p>")


def examine() -> Examination:
    """Looks at everything. A check that itself fails counts as missing, with the error as its
    detail, so that the table always appears."""
    found = Examination()
    for name, check in CHECKS.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns of an old driver; so does a check
                status, detail, fix = check()
        except Exception as error:
            status, detail, fix = MISSING, f"{type(error).__name__}: {error}", ""
        found.append(Check(name, status, detail, fix))
    return found


Finding = tuple[str, str, str]


def pip_install(*packages: str) -> str:
    """A command that installs into the Python that runs this, whatever is on the path."""
    return shlex.join([sys.executable, "-m", "pip", "install", *packages])


def _version(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def _python() -> Finding:
    return OK, f"{platform.python_version()}, {sys.executable}", ""  # pip refuses older ones


def _torch() -> Finding:
    version = torch.__version__
    if torch.version.cuda is None:
        return (MISSING, f"{version}, built without CUDA",
                pip_install("--force-reinstall", "torch",
                            "--index-url", "https://download.pytorch.org/whl/cu130"))
    return OK, f"{version}, built for CUDA {torch.version.cuda}", ""


def _gpu() -> Finding:
    gpu = local_gpu()
    if gpu is None:
        return OPTIONAL, "none that torch can use", ""
    about = f"{gpu.name}, {gpu.arch}, {gpu.sms} SMs, {gpu.memory / 2**30:.0f} GiB"
    if gpu.capability[0] * 10 + gpu.capability[1] < build.MIN_ARCH:
        return OPTIONAL, f"{about}: too old for the kernel, which needs sm_{build.MIN_ARCH}", ""
    if not _torch_runs_on(gpu):
        return (MISSING, f"{about}, but this torch has no code for {gpu.arch} (it has "
                f"{', '.join(torch.cuda.get_arch_list())})", pip_install("--upgrade", "torch"))
    return OK, about + (": the family that the kernel is made for" if gpu.is_sm120 else
                        ": the kernel runs here, under the limits of sm_120"), ""


def _torch_runs_on(gpu: LocalGPU) -> bool:
    """Machine code for a capability runs on it and on later minor versions of the same
    major one; compute_ entries are compiled for any later card."""
    for entry in torch.cuda.get_arch_list():
        kind, _, number = entry.partition("_")
        digits = "".join(d for d in number if d.isdigit())
        if not digits:
            continue
        major, minor = int(digits[:-1]), int(digits[-1])
        if kind == "compute" and (major, minor) <= gpu.capability:
            return True
        if major == gpu.capability[0] and minor <= gpu.capability[1]:
            return True
    return False


def _driver() -> Finding:
    gpu = local_gpu()
    if gpu is not None:
        return OK, gpu.driver or "works (nvidia-smi does not tell its version)", ""
    seen = _nvidia_smi()
    if seen is None:
        return OPTIONAL, "none; only a GPU needs one", ""
    return (MISSING, f"nvidia-smi shows {seen}, but torch, built for CUDA {torch.version.cuda}, "
            "cannot use it: the driver is older than that CUDA, or CUDA_VISIBLE_DEVICES hides "
            "the card",
            "unset CUDA_VISIBLE_DEVICES; else a newer driver from your distribution, or a torch "
            "for an older CUDA")


def _nvidia_smi() -> str | None:
    try:
        lines = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return None
    return lines[0] if lines else None


def _nvcc() -> Finding:
    wanted = torch.version.cuda
    packages = pip_install(f"cuda-toolkit[nvcc,cccl]{f'=={wanted}.*' if wanted else ''}")
    try:
        toolkit = build.find_toolkit()
    except build.BuildError as error:
        own = os.environ.get("MLA_KERNELS_CUDA_HOME")
        return MISSING, str(error), "unset MLA_KERNELS_CUDA_HOME" if own else packages
    about = "{}.{} from {}, {}".format(*toolkit.version, toolkit.origin, toolkit.nvcc)
    if "sm_120" not in toolkit.architectures:
        return MISSING, f"{about}: too old to know sm_120 (12.8 or newer does)", packages
    return OK, about, ""


def _compiler() -> Finding:
    name = os.environ.get("CXX", "g++")
    if shutil.which(name) is None:
        return (MISSING, f"{name} is not on the path",
                "unset CXX" if "CXX" in os.environ else "sudo apt install g++")
    done = subprocess.run([name, "--version"], capture_output=True, text=True, timeout=60)
    return OK, (done.stdout.splitlines() or [name])[0], ""


def _ninja() -> Finding:
    version = _version("ninja")
    if version is not None and importlib.util.find_spec("ninja"):
        return OK, version, ""
    path = shutil.which("ninja")
    if path:
        return OK, path, ""
    return MISSING, "torch builds extensions with it", pip_install("ninja")


def _cache() -> Finding:
    folder = build.cache_dir()
    there = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
        return OK, str(folder), ""
    return (MISSING, f"{folder} cannot be written",
            f"export MLA_KERNELS_CACHE={shlex.quote(str(Path.cwd() / 'build' / 'cache'))}")


def _widgets() -> Finding:
    versions = {name: _version(name) for name in ("ipywidgets", "jupyterlab_widgets")}
    lost = [name for name, version in versions.items() if version is None]
    if lost:
        return MISSING, f"{', '.join(lost)} not installed", pip_install(*lost)
    lab = _version("jupyterlab")
    return OK, (f"ipywidgets {versions['ipywidgets']}, "
                + (f"JupyterLab {lab}" if lab else "no JupyterLab here (another front end?)")), ""


def _disassembler() -> Finding:
    tool = build._disassembler()
    if tool:
        return OK, tool, ""
    return OPTIONAL, "none; the report then counts no instructions", pip_install("triton")


def _triton() -> Finding:
    version = _version("triton")
    if version is None:
        return OPTIONAL, "not installed", pip_install("triton")
    from .triton import INTERPRETED

    return OK, f"{version}, " + ("interpreted on the CPU: slow, but it checks" if INTERPRETED
                                 else "compiled for the GPU"), ""


def _sglang() -> Finding:
    # Found, not imported: that takes a minute.
    if importlib.util.find_spec("sglang") is not None:
        return OK, _version("sglang") or "found", ""
    return (OPTIONAL, "not installed; what it answered when asked is recorded",
            "in an environment of its own (11 GB): pip install sglang==0.5.23")


CHECKS: dict[str, Callable[[], Finding]] = {
    "Python": _python,
    "PyTorch": _torch,
    "widgets": _widgets,
    "CUDA compiler (nvcc)": _nvcc,
    "host compiler": _compiler,
    "ninja": _ninja,
    "build cache": _cache,
    "disassembler": _disassembler,
    "Triton": _triton,
    "GPU": _gpu,
    "driver": _driver,
    "SGLang": _sglang,
}


def main() -> int:
    found = examine()
    print(found)
    return 1 if found.missing else 0


if __name__ == "__main__":
    sys.exit(main())
