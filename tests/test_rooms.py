"""One direction: a module of the package imports only modules that its list names earlier."""

import ast
import re
from pathlib import Path

import mla_kernels
from mla_kernels import evidence, labs, model, sglang

FOLDER = Path(mla_kernels.__file__).parent
ROOMS = re.findall(r"``(\w+)``", mla_kernels.__doc__)
#: A room may be a folder; the sentence of its docstring that starts with "The files" orders it.
FILES = {room.__name__.rpartition(".")[2]: re.findall(
    r"``(\w+)``", room.__doc__[room.__doc__.index("The files"):])
    for room in (evidence, labs, model, sglang)}


def imports_of(path, level=1):
    """Modules of the package that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == level:
            if node.module:
                yield node.module.split(".")[0]
            else:
                yield from (alias.name for alias in node.names)


def imports_of_room(room):
    if (FOLDER / f"{room}.py").exists():
        return imports_of(FOLDER / f"{room}.py")
    return (name for path in (FOLDER / room).glob("*.py") for name in imports_of(path, 2))


def test_every_module_is_in_the_list_once():
    files = {path.stem for path in FOLDER.glob("*.py")} - {"__init__"}
    files |= {path.parent.name for path in FOLDER.glob("*/__init__.py")}
    assert files == set(ROOMS) and len(ROOMS) == len(set(ROOMS))
    assert set(FILES) == {path.parent.name for path in FOLDER.glob("*/__init__.py")}
    for room, names in FILES.items():
        inside = {path.stem for path in (FOLDER / room).glob("*.py")}
        assert inside - {"__init__", "__main__"} == set(names) and len(names) == len(set(names))


def test_imports_go_one_way():
    wrong = [f"{room} imports {other}" for room in ROOMS for other in imports_of_room(room)
             if ROOMS.index(other) >= ROOMS.index(room)]
    wrong += [f"{room}.{file} imports {other}" for room, names in FILES.items() for file in names
              for other in imports_of(FOLDER / room / f"{file}.py")
              if names.index(other) >= names.index(file)]
    assert not wrong
