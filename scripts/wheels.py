"""Wheels for a GPU machine without a network, fetched here; what `carry_peers.py` and
`carry_engine.py` have in common."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

#: pip matches the number of a platform tag exactly.
PLATFORMS = [flag for tag in ("manylinux1", "manylinux2014", *(f"manylinux_2_{n}" for n in
             (5, 12, 17, 24, 26, 27, 28, 31, 34, 35))) for flag in ("--platform", f"{tag}_x86_64")]


def download(folder: Path, python: str, *names: str) -> list[Path]:
    """Downloads wheels for Linux on x86-64, and says which files they are.

    Raises:
        subprocess.CalledProcessError: pip failed.
    """
    before = set(folder.glob("*.whl"))
    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps",
                    "--only-binary=:all:", "--python-version", python, "--implementation", "cp",
                    *PLATFORMS, "--dest", str(folder), *names], check=True)
    return sorted(set(folder.glob("*.whl")) - before)


def command(description: str, argv: Sequence[str] | None, gather: Callable[[Path, str], int]
            ) -> int:
    """The command line of both: ``gather(dest, python)`` fills a new folder and returns its
    bytes. Exit status 2 where the folder is there already, 1 where pip fails."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("dest", type=Path, help="a folder that is not there yet")
    parser.add_argument("--python", default="3.12", help="the other machine's Python")
    args = parser.parse_args(argv)
    if args.dest.exists():
        print(f"error: {args.dest} is there already: remove it or name another", file=sys.stderr)
        return 2
    try:
        size = gather(args.dest, args.python)
    except subprocess.CalledProcessError as error:
        print(f"error: pip could not fetch the wheels (status {error.returncode})",
              file=sys.stderr)
        return 1
    print(f"{args.dest}: {size / 2**20:.1f} MiB")
    return 0
