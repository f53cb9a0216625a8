"""Follows, in the syntax tree of Python code, how a cache row is written and read back.

A small interpreter runs an engine's functions on symbols instead of tensors. It knows which
values hold the latent, the rope part or the cache, carries them through assignments, calls,
branches (all are taken) and modules, and notes every place where a part meets a column of the
cache: ``torch.cat``, a slice, or a Triton kernel's pointers. Comments don't exist in a syntax
tree.
"""

from __future__ import annotations

import ast
import dataclasses
import re

from .symbols import (
    ZERO,
    Cache,
    Form,
    L,
    Part,
    R,
    Site,
    meaning,
    number,
    order_at,
    order_of_window,
    window_text,
)
from .tree import SourceTree

#: How many calls deep a row is followed.
DEPTH = 10
_SCALAR_METHODS = {"stride", "numel", "element_size", "dim", "item", "data_ptr", "nelement"}
_STORES = re.compile(r"_*(set|write|store|update|append|insert|save|put)(_|$)")


@dataclasses.dataclass(frozen=True)
class Rows:
    """Whole rows made of parts side by side."""

    parts: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Shape:
    part: str


# A value is a frozenset of alternatives, one for each path to it, or a tuple of values.
NOTHING: frozenset = frozenset()


@dataclasses.dataclass(frozen=True)
class Function:
    file: str
    node: ast.FunctionDef
    owner: ast.ClassDef | None = None

    @property
    def name(self) -> str:
        return f"{self.owner.name}.{self.node.name}" if self.owner else self.node.name


@dataclasses.dataclass
class Frame:
    function: Function
    names: dict
    through: tuple[str, ...]
    returned: list = dataclasses.field(default_factory=list)


class Interpreter:
    """Follows functions of one tree; what it found is in ``sites``."""

    def __init__(self, tree: SourceTree) -> None:
        self.tree = tree
        self.sites: dict[tuple, Site] = {}
        self._done: dict[tuple, object] = {}
        self._indexes: dict[str, tuple[dict, dict, dict]] = {}

    # -- where names are defined ----------------------------------------------------------

    def index(self, file: str) -> tuple[dict, dict, dict]:
        """Functions, classes and imports of a file, at whatever depth."""
        if file not in self._indexes:
            functions, classes, imports = {}, {}, {}
            package = file.removesuffix("/__init__.py").removesuffix(".py").split("/")
            if not file.endswith("__init__.py"):
                package = package[:-1]
            tree = self.tree.parse(file)
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    classes[node.name] = node
                elif isinstance(node, ast.ImportFrom):
                    base = package[:len(package) - node.level + 1] if node.level else []
                    base = ".".join([*base, *filter(None, [node.module])])
                    imports |= {a.asname or a.name: (base, a.name) for a in node.names}
                elif isinstance(node, ast.Import):
                    imports |= {a.asname or a.name: (a.name, None) for a in node.names}
            methods = {id(f) for c in classes.values() for f in c.body}
            functions = {n.name: n for n in ast.walk(tree)
                         if isinstance(n, ast.FunctionDef) and id(n) not in methods}
            self._indexes[file] = functions, classes, imports
        return self._indexes[file]

    def lookup(self, file: str, name: str, kind: int, depth: int = 0):
        """``(file, node)`` of a function (``kind`` 0) or class (1), through imports."""
        if name in self.index(file)[kind]:
            return file, self.index(file)[kind][name]
        module, original = self.index(file)[2].get(name, (None, None))
        target = module and original and self.tree.module(module)
        return self.lookup(target, original, kind, depth + 1) if target and depth < DEPTH else None

    def method(self, file: str, owner: ast.ClassDef, name: str, depth: int = 0) -> Function | None:
        for node in owner.body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return Function(file, node, owner)
        for base in owner.bases:
            found = isinstance(base, ast.Name) and self.lookup(file, base.id, 1)
            if found and found[1] is not owner and depth < DEPTH:
                if method := self.method(*found, name, depth + 1):
                    return method
        return None

    def resolve(self, node: ast.expr, frame: Frame) -> Function | None:
        """The function that a call's callee names, if the tree has it."""
        function = frame.function
        if isinstance(node, ast.Subscript):  # a Triton launch: kernel[grid](...)
            node = node.value
        if isinstance(node, ast.Name):
            found = self.lookup(function.file, node.id, 0)
            return Function(*found) if found else None
        if not isinstance(node, ast.Attribute):
            return None
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            return self.method(*frame.names["self"], node.attr) if "self" in frame.names else None
        if isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "super":
            for base in function.owner.bases if function.owner else ():
                found = isinstance(base, ast.Name) and self.lookup(function.file, base.id, 1)
                if found and (method := self.method(*found, node.attr)):
                    return method
            return None
        module, name = self.index(function.file)[2].get(ast.unparse(node.value), (None, None))
        target = module and self.tree.module(f"{module}.{name}" if name else module)
        found = target and self.lookup(target, node.attr, 0)
        return Function(*found) if found else None

    # -- running --------------------------------------------------------------------------

    def enter(self, function: Function, owner: tuple[str, ast.ClassDef] | None = None) -> None:
        """Follows a function whose arguments mean what their names say."""
        try:
            self.run(function, {}, (), owner)
        except RecursionError:
            self.tree.problems.append(f"{function.file}:{function.node.lineno}: {function.name} is "
                                      "nested too deeply to follow")

    def run(self, function: Function, given: dict, through: tuple[str, ...], owner=None):
        arguments = function.node.args
        names = {}
        parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        for parameter in parameters:
            names[parameter.arg] = _known(given.get(parameter.arg, NOTHING), parameter.arg)
        key = (function, owner and owner[1], frozenset(names.items()))
        if key in self._done or len(through) >= DEPTH:
            return self._done.get(key, NOTHING)
        self._done[key] = NOTHING
        if owner or function.owner:
            names["self"] = owner or (function.file, function.owner)
        frame = Frame(function, names, (*through, function.name))
        self.block(function.node.body, frame)
        self._done[key] = _join(frame.returned)
        return self._done[key]

    def block(self, body: list[ast.stmt], frame: Frame) -> None:
        for statement in body:
            self.statement(statement, frame)

    def statement(self, node: ast.stmt, frame: Frame) -> None:
        if isinstance(node, ast.Assign):
            value = self.value(node.value, frame)
            for target in node.targets:
                self.assign(target, value, frame)
        elif isinstance(node, ast.AnnAssign) and node.value:
            self.assign(node.target, self.value(node.value, frame), frame)
        elif isinstance(node, ast.AugAssign):
            total = ast.copy_location(ast.BinOp(node.target, node.op, node.value), node)
            self.assign(node.target, self.value(total, frame), frame)
        elif isinstance(node, ast.Return):
            frame.returned.append(self.value(node.value, frame) if node.value else NOTHING)
        elif isinstance(node, ast.Expr):
            self.value(node.value, frame)
        elif isinstance(node, (ast.If, ast.For, ast.While, ast.With, ast.Try)):
            for field in ("test", "iter"):
                if isinstance(getattr(node, field, None), ast.expr):
                    self.value(getattr(node, field), frame)
            before, after = dict(frame.names), []
            handlers = [h.body for h in getattr(node, "handlers", [])]
            for body in (node.body, getattr(node, "orelse", []), *handlers):
                frame.names = dict(before)
                self.block(body, frame)
                if not (body and isinstance(body[-1], (ast.Return, ast.Raise))):
                    after.append(frame.names)
            after = after or [before]
            frame.names = {name: _join([a[name] for a in after if name in a])
                           if name != "self" else before["self"]
                           for name in {n: None for a in after for n in a}}
            self.block(getattr(node, "finalbody", []), frame)

    def assign(self, target: ast.expr, value, frame: Frame) -> None:
        if isinstance(target, ast.Name):
            frame.names[target.id] = _known(value, target.id)
        elif isinstance(target, (ast.Tuple, ast.List)):
            known = isinstance(value, tuple) and len(value) == len(target.elts)
            for i, element in enumerate(target.elts):
                self.assign(element, value[i] if known else NOTHING, frame)
        elif isinstance(target, ast.Subscript):
            for place in self.subscript(target, frame):
                self.store(place, value, target, frame)

    # -- expressions ----------------------------------------------------------------------

    def value(self, node: ast.expr, frame: Frame):
        if isinstance(node, ast.Name):
            known = frame.names.get(node.id)
            return known if known and node.id != "self" else _named(node.id) or _atom(node)
        if isinstance(node, ast.Constant):
            whole = isinstance(node.value, int) and not isinstance(node.value, bool)
            return frozenset([number(node.value)]) if whole else NOTHING
        if isinstance(node, ast.Attribute):
            base = self.value(node.value, frame)
            if node.attr == "shape":
                return frozenset(Shape(v.name) for v in base if isinstance(v, Part))
            return _named(node.attr) or (NOTHING if _tensors(base) else _atom(node))
        if isinstance(node, ast.Subscript):
            return self.subscript(node, frame)
        if isinstance(node, ast.BinOp):
            return self.operation(node, frame)
        if isinstance(node, ast.Call):
            return self.call(node, frame)
        if isinstance(node, (ast.Tuple, ast.List)):
            return tuple(self.value(e, frame) for e in node.elts)
        if isinstance(node, ast.IfExp):
            return _join([self.value(node.body, frame), self.value(node.orelse, frame)])
        if isinstance(node, ast.BoolOp):
            return _join([self.value(v, frame) for v in node.values])
        if isinstance(node, ast.NamedExpr):
            self.assign(node.target, value := self.value(node.value, frame), frame)
            return value
        return NOTHING

    def subscript(self, node: ast.Subscript, frame: Frame):
        base = self.value(node.value, frame)
        index = node.slice
        if isinstance(base, tuple):
            at = getattr(index, "value", None)
            return base[at] if isinstance(at, int) and at < len(base) else NOTHING
        out = []
        for v in base:
            if isinstance(v, Shape):
                first = isinstance(index, ast.Constant) and index.value == 0
                out += _atom(node) if first else [L if v.part == "latent" else R]
            elif isinstance(v, Cache):
                last = index.elts[-1] if isinstance(index, ast.Tuple) and index.elts else None
                if isinstance(last, ast.Slice) and (last.lower or last.upper):
                    start, stop = (self.form(e, frame) if e else None
                                   for e in (last.lower, last.upper))
                    v = Cache(start or ZERO, stop)
                    if isinstance(node.ctx, ast.Load):
                        self.window(v, node, frame)
                out.append(v)
            elif isinstance(v, (Part, Rows)):
                out.append(v)
        return frozenset(out)

    def form(self, node: ast.expr, frame: Frame) -> Form:
        """An offset; several alternatives, or none, count as unknown."""
        forms = [v for v in self.value(node, frame) if isinstance(v, Form)]
        return forms[0] if len(forms) == 1 else Form.of({ast.unparse(node): 1})

    def operation(self, node: ast.BinOp, frame: Frame):
        left, right = self.value(node.left, frame), self.value(node.right, frame)
        if isinstance(left, tuple) or isinstance(right, tuple):
            return NOTHING
        sign = {ast.Add: 1, ast.Sub: -1}.get(type(node.op))
        if sign is None:
            constants = [v.constant for v in (*left, *right) if isinstance(v, Form)]
            if isinstance(node.op, ast.Mult) and len(constants) == 2 and constants[0] is not None:
                return frozenset(ZERO.plus(v, constants[0]) for v in right)
            return _tensors(left) | _tensors(right) or _atom(node)
        out = []
        for a in left:
            for b in right:
                if isinstance(b, (Part, Cache)) and isinstance(a, Form) and sign == 1:
                    a, b = b, a
                if isinstance(b, Form) and isinstance(a, Form):
                    out.append(a.plus(b, sign))
                elif isinstance(b, Form) and isinstance(a, (Part, Cache)):
                    out.append(dataclasses.replace(a, at=(a.at or ZERO).plus(b, sign)))
        return frozenset(out) or _tensors(left) | _tensors(right)

    def call(self, node: ast.Call, frame: Frame):
        callee = node.func
        tail = callee.attr if isinstance(callee, ast.Attribute) else getattr(callee, "id", "")
        positional = [self.value(a, frame) for a in node.args]
        keywords = {k.arg: self.value(k.value, frame) for k in node.keywords if k.arg}
        receiver = (_tensors(self.value(callee.value, frame))
                    if isinstance(callee, ast.Attribute) else NOTHING)
        first = positional[0] if positional else NOTHING

        if tail in ("cat", "concat", "concatenate") and isinstance(first, tuple):
            parts = [{v.name for v in e if isinstance(v, Part)} if isinstance(e, frozenset) else {}
                     for e in first]
            one_each = all(len(p) == 1 for p in parts)
            return frozenset([Rows(tuple(p for (p,) in parts))]) if one_each else NOTHING
        if tail == "where" and len(positional) == 3:
            return _join(positional[1:])
        if tail == "load":
            return _tensors(first)
        if tail in ("store", "copy_"):
            source = positional[1] if tail == "store" and len(positional) > 1 else first
            for place in first if tail == "store" else receiver:
                self.store(place, source, node, frame)
            return NOTHING
        if tail == "split":
            return self.split(node, receiver or first, frame)
        if function := self.resolve(callee, frame):
            names = [a.arg for a in (*function.node.args.posonlyargs, *function.node.args.args)]
            bound = dict(zip(names[function.owner is not None:], positional, strict=False))
            owner = frame.names.get("self") if function.owner else None
            return self.run(function, {**bound, **keywords}, frame.through, owner)
        everything = [*positional, *keywords.values()]
        if _STORES.match(tail):
            for rows in {v for e in everything for v in e if isinstance(v, Rows)}:
                self.store(Cache(), frozenset([rows]), node, frame)
        if receiver:
            if tail == "size":
                return frozenset(L if v.name == "latent" else R
                                 for v in receiver if isinstance(v, Part)) or _atom(node)
            return _atom(node) if tail in _SCALAR_METHODS else receiver
        found = [t for e in everything if isinstance(e, frozenset) and (t := _tensors(e))]
        return found[0] if len(found) == 1 else NOTHING if found else _atom(node)

    def split(self, node: ast.Call, tensor, frame: Frame):
        """``split([a, b], dim=-1)`` of the cache gives two windows of it."""
        sizes = next((a for a in (*node.args, *(k.value for k in node.keywords))
                      if isinstance(a, (ast.List, ast.Tuple))), None)
        if sizes is None or not any(isinstance(v, Cache) for v in tensor):
            return NOTHING
        at, windows = ZERO, []
        for size in sizes.elts:
            stop = at.plus(self.form(size, frame))
            windows.append(Cache(at, stop))
            self.window(windows[-1], node, frame)
            at = stop
        return tuple(frozenset([w]) for w in windows)

    # -- what was found -------------------------------------------------------------------

    def window(self, cache: Cache, node: ast.expr, frame: Frame) -> None:
        order = order_of_window(cache.at, cache.stop)
        if order:
            latent = (cache.at == ZERO) == (order == "latent_first")
            self.note("value", order, f"{'latent' if latent else 'rope'} = "
                      f"{window_text(cache.at, cache.stop)}", node, frame)

    def store(self, place, value, node: ast.expr, frame: Frame) -> None:
        if isinstance(value, tuple):
            return
        for v in value:
            if isinstance(place, Cache) and isinstance(v, Rows) and set(v.parts) == {"latent",
                                                                                     "rope"}:
                order = "latent_first" if v.parts[0] == "latent" else "rope_first"
                self.note("write", order, f"row = cat({', '.join(v.parts)})", node, frame)
            elif isinstance(place, Cache) and isinstance(v, Part) and place.at is not None:
                self.part("write", v.name, place.at.plus(v.at, -1), node, frame)
            elif isinstance(place, Part) and isinstance(v, Cache) and v.at is not None:
                self.part("value", place.name, v.at.plus(place.at, -1), node, frame)

    def part(self, role: str, name: str, at: Form, node: ast.expr, frame: Frame) -> None:
        at = at.column
        stop = at.plus(L if name == "latent" else R)
        pair = (window_text(at, stop), name)
        self.note(role, order_at(name, at), " = ".join(pair if role == "write" else pair[::-1]),
                  node, frame)

    def note(self, role, order, expression: str, node: ast.expr, frame: Frame) -> None:
        site = Site(role, order, frame.function.file, node.lineno, expression, "followed",
                    frame.through)
        self.sites.setdefault((site.file, site.line, site.expression), site)


def _named(name: str) -> frozenset:
    known = meaning(name)
    return NOTHING if known is None else frozenset([known])


def _known(value, name: str):
    """``value``, or where nothing is known of it (the result of a call into compiled code, say)
    what its name stands for."""
    if isinstance(value, tuple) or _tensors(value):
        return value
    if any(isinstance(v, Shape) or (isinstance(v, Form) and v == v.column) for v in value):
        return value
    return _named(name) or value


def _atom(node: ast.expr) -> frozenset:
    return frozenset([Form.of({ast.unparse(node): 1})])


def _tensors(value) -> frozenset:
    if isinstance(value, tuple):
        return NOTHING
    return frozenset(v for v in value if isinstance(v, (Part, Cache, Rows)))


def _join(values: list):
    """Either of several values; tuples of one length element by element."""
    values = [v for v in values if v]
    if not values:
        return NOTHING
    if all(isinstance(v, tuple) and len(v) == len(values[0]) for v in values):
        return tuple(_join(list(group)) for group in zip(*values, strict=True))
    return frozenset().union(*(v for v in values if isinstance(v, frozenset)))
