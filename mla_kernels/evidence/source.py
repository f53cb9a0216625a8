"""The first witness: an engine's source code."""

from __future__ import annotations

import ast
import dataclasses
import re

from . import c_source
from .python_source import Function, Interpreter
from .symbols import Site
from .tree import SourceTree
from .verdict import Testimony, WitnessesDisagree


@dataclasses.dataclass(frozen=True)
class Entry:
    """Where to begin: classes of these names, and their methods (all where none is named)."""

    classes: str
    methods: tuple[str, ...] = ()


#: Names are stable where files are not: they are looked for in the whole tree.
ENTRIES = {
    "sglang": Entry(r"MLATokenToKVPool", ("set_mla_kv_buffer", "set_kv_buffer",
                                          "get_value_buffer", "get_mla_kv_buffer")),
    "vllm": Entry(r"\w*MLA\w*Impl"),
}
#: An unknown tree is searched for functions in files that have one of these words.
WORDS = ("kv_lora_rank", "k_pe", "k_rope", "kv_c", "latent", "nope", "blocked_k")
C_WORDS = ("ggml_concat", "kv_lora_rank", "kNopeBytes", "kcache", "SmemLayoutV")


def find_sites(tree: SourceTree, engine: str = "") -> list[Site]:
    """Every place in ``tree`` that fixes the order of a row: for a known engine those on the
    way from its entry, else those of any function; in C++ all that match."""
    interpreter, entry = Interpreter(tree), ENTRIES.get(engine)
    if entry:
        _follow(interpreter, entry)
    if not interpreter.sites and not (entry and entry.methods):
        for file in tree.with_text(*WORDS):
            functions, classes, _ = interpreter.index(file)
            for owner in (None, *classes.values()):
                for node in owner.body if owner else functions.values():
                    if isinstance(node, ast.FunctionDef):
                        interpreter.enter(Function(file, node, owner),
                                          (file, owner) if owner else None)
    found = list(interpreter.sites.values())
    for suffix in (".cpp", ".cc", ".cu", ".cuh", ".h", ".hpp"):
        for file in tree.with_text(*C_WORDS, suffix=suffix):
            found += c_source.sites(file, tree.text(file))
    return sorted(found, key=lambda s: (s.sure, s.role != "write", s.file, s.line, s.expression))


def class_sites(tree: SourceTree, file: str, name: str, entry: Entry) -> list[Site]:
    """The same for one class of one file: a live pool's own."""
    interpreter = Interpreter(tree)
    owner = interpreter.index(file)[1].get(name)
    if owner is not None:
        _follow_class(interpreter, file, owner, entry)
    return sorted(interpreter.sites.values(),
                  key=lambda s: (s.role != "write", s.file, s.line, s.expression))


def _follow(interpreter: Interpreter, entry: Entry) -> None:
    tree = interpreter.tree
    definition = re.compile(rf"^\s*class ({entry.classes})\b", re.M)
    for file in tree.with_text("class "):
        if definition.search(tree.text(file)):
            for name, owner in interpreter.index(file)[1].items():
                if re.fullmatch(entry.classes, name):
                    _follow_class(interpreter, file, owner, entry)


def _follow_class(interpreter: Interpreter, file: str, owner: ast.ClassDef, entry: Entry) -> None:
    names = entry.methods or [n.name for n in owner.body if isinstance(n, ast.FunctionDef)]
    for name in names:
        if method := interpreter.method(file, owner, name):
            interpreter.enter(method, (file, owner))


def testify(tree: SourceTree, engine: str = "", found: list[Site] | None = None) -> Testimony:
    """What the source says.

    Raises:
        WitnessesDisagree: one place writes or reads latent first and another rope first.
    """
    found = find_sites(tree, engine) if found is None else found
    problems = tuple(tree.problems)
    telling = [s for s in found if s.order]
    if not telling:
        what = f"nothing in {tree.origin} that fixes the order"
        if not tree.files:
            what = f"{tree.origin} holds no source files"
        return Testimony("source", None, (what, *map(str, found), *problems))
    if len({s.order for s in telling}) > 1:
        one_each = {s.order: s for s in telling}.values()
        raise WitnessesDisagree(f"{tree.origin} does both:\n" + "\n".join(
            f"  {s.order}: {s}" for s in one_each))
    followed = any(s.sure == "followed" for s in telling)
    return Testimony("source", telling[0].order, (*map(str, found), *problems),
                     "followed" if followed else "matched")
