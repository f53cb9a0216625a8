"""The ``.pth`` file that runs the hook at the start of every Python process of an environment."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from .settings import PREFIX

NAME = "mla_kernels_sglang.pth"

#: One line, as `site` executes it. It costs a look at one variable unless that is set, and a
#: package that has gone since leaves nothing worse than silence.
LINE = (f"import os; os.environ.get('{PREFIX}', '0') in ('', '0') or exec(\"try:\\n from "
        "mla_kernels.sglang.hook import activate\\nexcept ImportError: pass\\nelse: activate()\")")


def place(folder: Path | str | None = None) -> Path:
    """The file in ``folder``, by default the site-packages of the running Python."""
    return Path(folder or sysconfig.get_paths()["purelib"]) / NAME


def install(folder: Path | str | None = None) -> Path:
    """Writes the file; again is no error.

    Raises:
        OSError: the folder is not there or cannot be written.
    """
    path = place(folder)
    # A checkout that is not installed is found from its own folder.
    checkout = Path(__file__).resolve().parent.parent.parent
    path.write_text(f"{checkout}\n{LINE}\n")
    return path


def uninstall(folder: Path | str | None = None) -> Path | None:
    """Removes the file and returns where it was, or None where there is none."""
    path = place(folder)
    if not path.exists():
        return None
    path.unlink()
    return path
