"""``python -m mla_kernels.sglang doctor | install | uninstall``.

Exit status of the doctor: 0 where SGLang fits, 1 where not.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import sys
import warnings
from collections.abc import Sequence

from . import pth
from .fit import BACKEND, REGISTRY, REPLAY, examine
from .settings import Settings


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m mla_kernels.sglang",
        description="Draft-tree verify of MLA models in SGLang, through this project's kernel.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="what would be patched, and whether it fits")
    for name, text in (("install", "write the .pth file that runs the hook in every process"),
                       ("uninstall", "remove it")):
        commands.add_parser(name, help=text).add_argument(
            "--into", metavar="FOLDER", help="default: this Python's site-packages")
    args = parser.parse_args(argv)
    if args.command == "doctor":
        return doctor()
    try:
        if args.command == "install":
            print(f"wrote {pth.install(args.into)}; set MLA_KERNELS_SGLANG=1 to turn it on")
        else:
            path = pth.uninstall(args.into)
            print(f"removed {path}" if path else f"nothing to remove at {pth.place(args.into)}")
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def doctor() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SGLang's import warns about absent GPUs
        fit = examine()
    print(fit)
    if fit.ok:
        print("would be patched, in each process that builds an attention backend:")
        print(f"  {REGISTRY}.ATTENTION_BACKENDS['triton']")
        print(f"  of the {BACKEND}.TritonAttnBackend that it makes for an MLA model:")
        backend = vars(importlib.import_module(BACKEND).TritonAttnBackend)
        for name in ("extend_attention_fwd", "forward_extend", "init_forward_metadata",
                     *(name for name in REPLAY if name in backend)):
            print(f"    {name}")
    entry = [e for e in importlib.metadata.entry_points(group="sglang.srt.plugins")
             if e.value.startswith("mla_kernels.")]
    hook = pth.place()
    print("ways in:")
    print(f"  plugin entry point: {entry[0].value if entry else 'none; pip install this project'}")
    print(f"  .pth file: {hook if hook.exists() else 'none; `install` writes it'}")
    try:
        settings = Settings.read()
    except ValueError as error:
        print(f"environment: {error}")
        return 1
    print("environment:")
    for name, value in settings.as_environment().items():
        print(f"  {name}={value}")
    return 0 if fit.ok else 1


if __name__ == "__main__":
    sys.exit(main())
