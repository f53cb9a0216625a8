"""Text to train on: what Python ships with, its own standard library and its help topics.

Both are under the PSF License Agreement. Other versions of Python ship other text; a training
record has the version and a hash of what was read.
"""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

import numpy as np

LICENSE = "PSF License Agreement (https://docs.python.org/3/license.html)"

#: Folders of the standard library that are left out: tests, generated tables, what is installed.
LEFT_OUT = ("test", "tests", "idlelib", "site-packages", "dist-packages", "lib2to3", "encodings",
            "__pycache__", "turtledemo", "ensurepip", "config-")

#: One file in this many is held out, by a hash of its path.
HOLD_OUT_EVERY = 24



def files() -> list[Path]:
    """The sources that are read, in the order of their paths."""
    root = Path(sysconfig.get_path("stdlib"))
    found = (p for p in root.rglob("*.py")
             if not any(part.startswith(LEFT_OUT) for part in p.relative_to(root).parts))
    return sorted(found, key=lambda p: str(p.relative_to(root)))


def is_held_out(name: str) -> bool:
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % HOLD_OUT_EVERY == 0


def gather() -> tuple[bytes, bytes]:
    """The text to train on and the text held out, ASCII files only, so that a byte is a
    character."""
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions leave it out
        topics = {}
    root = Path(sysconfig.get_path("stdlib"))
    named = [(str(p.relative_to(root)), p.read_bytes()) for p in files()]
    named += [(f"topics/{name}", text.encode()) for name, text in sorted(topics.items())]
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    for name, text in named:
        if text.isascii():
            parts[is_held_out(name)].append(text)
    return b"\n\n".join(parts[False]), b"\n\n".join(parts[True])


def windows(text: bytes, count: int, length: int, seed: int = 0) -> list[list[int]]:
    """``count`` pieces of ``length`` bytes from evenly spaced places of a text, moved by a
    random amount, as token ids.

    Raises:
        ValueError: the text is too short for pieces that do not overlap.
    """
    stride = len(text) // count
    if stride < length:
        raise ValueError(f"text must have at least count * length = {count * length:,} bytes; "
                         f"got {len(text):,}")
    shift = np.random.default_rng(seed).integers(0, stride - length + 1, count)
    return [list(text[i * stride + s:i * stride + s + length]) for i, s in enumerate(shift)]
