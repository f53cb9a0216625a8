"""One direction: a module of the package imports only modules that its list names earlier."""

import ast
import re
from pathlib import Path

import mla_kernels

FOLDER = Path(mla_kernels.__file__).parent
ROOMS = re.findall(r"``(\w+)``", mla_kernels.__doc__)


def imports_of(path):
    """Modules of the package that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            if node.module:
                yield node.module.split(".")[0]
            else:
                yield from (alias.name for alias in node.names)


def test_every_module_is_in_the_list_once():
    files = {path.stem for path in FOLDER.glob("*.py")} - {"__init__"}
    assert files == set(ROOMS) and len(ROOMS) == len(set(ROOMS))


def test_imports_go_one_way():
    wrong = [f"{room} imports {other}" for room in ROOMS
             for other in imports_of(FOLDER / f"{room}.py")
             if ROOMS.index(other) >= ROOMS.index(room)]
    assert not wrong
