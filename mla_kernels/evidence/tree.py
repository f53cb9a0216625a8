"""The source files of an engine: installed, in a wheel, or in a folder. Nothing is imported."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
import re
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

SUFFIXES = (".py", ".cpp", ".cc", ".cu", ".cuh", ".h", ".hpp")


class SourceTree:
    """Files by name, read when asked for.

    Args:
        files: name (with ``/``, relative to the tree's root) to a function that reads it.
        version: of the engine, ``""`` when it isn't stated.
        origin: where the files are, for messages.

    ``problems`` collects files that could not be read or parsed; one such file does not hide
    the others.
    """

    def __init__(self, files: dict[str, Callable[[], bytes]], version: str, origin: str) -> None:
        self.files, self.version, self.origin = files, version, origin
        self.problems: list[str] = []
        self._texts: dict[str, str] = {}
        self._parsed: dict[str, ast.Module] = {}

    def text(self, name: str) -> str:
        if name not in self._texts:
            try:
                self._texts[name] = self.files[name]().decode("utf-8", errors="replace")
            except (OSError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
                self.problems.append(f"{name}: cannot be read: {error}")
                self._texts[name] = ""
        return self._texts[name]

    def parse(self, name: str) -> ast.Module:
        """The syntax tree of a Python file; an empty one where the syntax is wrong."""
        if name not in self._parsed:
            try:
                self._parsed[name] = ast.parse(self.text(name))
            except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
                line = getattr(error, "lineno", None) or 0
                self.problems.append(f"{name}:{line}: cannot be parsed: "
                                     f"{getattr(error, 'msg', None) or error}")
                self._parsed[name] = ast.Module([], [])
        return self._parsed[name]

    def module(self, dotted: str) -> str | None:
        """The file of a module, wherever in the tree its package lies."""
        path = dotted.replace(".", "/")
        ends = (f"{path}.py", f"{path}/__init__.py")
        return next((e for e in ends if e in self.files), None) or next(
            (name for name in self.files if name.endswith(tuple("/" + e for e in ends))), None)

    def with_text(self, *words: str, suffix: str = ".py") -> list[str]:
        """Names of files in which one of the words occurs."""
        return [name for name in self.files
                if name.endswith(suffix) and any(w in self.text(name) for w in words)]


def installed(package: str) -> SourceTree:
    """An installed package's files.

    Raises:
        ModuleNotFoundError: it isn't installed here.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(
            f"{package} is not installed here: install it, or name a wheel (--wheel) or a "
            "source tree (--path)")
    folder = Path(next(iter(spec.submodule_search_locations)))
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        version = ""
    return SourceTree(_folder(folder, folder.parent), version, str(folder))


def wheel(path: Path | str) -> SourceTree:
    """The files in a wheel, which need not fit this machine.

    Raises:
        FileNotFoundError, ValueError: no such file, or not a wheel.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"wheel: no file {path}")
    try:
        archive = zipfile.ZipFile(path)
        names = archive.namelist()
        meta = next((n for n in names if n.endswith(".dist-info/METADATA")), None)
        stated = archive.read(meta).decode(errors="replace") if meta else ""
    except (zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"wheel must be a .whl file (a zip archive); {path.name} is not: "
                         f"{error}") from None
    found = re.search(r"^Version: (\S+)", stated, re.M)
    files = {n: functools.partial(archive.read, n) for n in names if n.endswith(SUFFIXES)}
    return SourceTree(files, found[1] if found else "", path.name)


def folder(path: Path | str) -> SourceTree:
    """A source tree, or a single file.

    Raises:
        FileNotFoundError, ValueError: nothing there, or no source files.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"path: no file or folder {path}")
    if path.is_file():
        return SourceTree({path.name: path.read_bytes}, "", str(path))
    files = _folder(path, path.parent if (path / "__init__.py").exists() else path)
    if not files:
        raise ValueError(f"path {path} holds no source files ({', '.join(SUFFIXES)})")
    return SourceTree(files, "", str(path))


def _folder(folder: Path, root: Path) -> dict[str, Callable[[], bytes]]:
    return {path.relative_to(root).as_posix(): path.read_bytes
            for path in sorted(folder.rglob("*")) if path.suffix in SUFFIXES and path.is_file()}
