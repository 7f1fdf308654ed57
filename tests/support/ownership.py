"""Writes into fields of other objects, found in the syntax tree.

The rule: **a field is written by the methods of its own class only.** A write is an assignment, an augmented assignment
or a deletion of the field, of an item in it, or a call that changes the container in it (`append`, `update`, …). Two
cases are allowed besides:

* A function may fill an object that it has constructed itself.
* A record, which is a dataclass, may be written by the module that defines it: the part that owns its records stands in
  the same file. Fields whose names begin with an underscore are excepted.

The types of variables and fields follow from annotations and constructors. An object whose type is not found counts as
foreign. A local name stands for the expression that it was bound to, so `kept = held.kept` and then `kept.clear()` is
a write to `held.kept`. Not seen are a container that a method returns, and one that a function gets as its argument.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from tests.support.sources import ROOT, Source, files, module_of

CHANGES = frozenset(
    {
        "add",
        "append",
        "appendleft",
        "clear",
        "difference_update",
        "discard",
        "extend",
        "extendleft",
        "insert",
        "intersection_update",
        "move_to_end",
        "pop",
        "popitem",
        "popleft",
        "remove",
        "reverse",
        "rotate",
        "setdefault",
        "sort",
        "subtract",
        "symmetric_difference_update",
        "update",
    }
)
"""Methods that change a container in place."""
SETTERS = frozenset({"setattr", "delattr", "__setattr__", "__delattr__"})
MAPPINGS = frozenset({"dict", "Mapping", "MutableMapping", "defaultdict", "OrderedDict"})
SEQUENCES = frozenset({"list", "tuple", "set", "frozenset", "Sequence", "Iterable", "Iterator", "Collection", "deque"})
CONTAINERS = MAPPINGS | SEQUENCES | {"Counter", "Any", "object"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def foreign_writes(folders: Iterable[str], root: Path = ROOT) -> list[str]:
    """Return `module:line: statement` of each write into another object's field, in the files of these folders."""
    sources = [Source(module_of(path, root), path.read_text()) for each in folders for path in files(root / each)]
    return writes_in(sources)


def writes_in(sources: Iterable[Source]) -> list[str]:
    """Return the same of these files. Classes are known in all of them."""
    sources = list(sources)
    classes = {
        node.name: Class(node, source.module)
        for source in sources
        for node in source.nodes
        if isinstance(node, ast.ClassDef)
    }
    return [
        f"{source.module}:{node.lineno}: {ast.unparse(node)}"
        for source in sources
        for function, owner in _functions(source.tree)
        for node in Scope(function, owner, source.module, classes).foreign()
    ]


def _functions(tree: ast.AST, owner: str = "") -> Iterator[tuple[ast.AST, str]]:
    """Yield each function with the class whose method it is, or "". Inner functions belong to the outer one."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, FUNCTIONS):
            yield child, owner
        else:
            yield from _functions(child, child.name if isinstance(child, ast.ClassDef) else owner)


@dataclass
class Class:
    """One class: its node, and the module that defines it."""

    node: ast.ClassDef
    module: str

    @cached_property
    def is_record(self) -> bool:
        """True for a dataclass."""
        return any("dataclass" in ast.unparse(each) for each in self.node.decorator_list)

    @cached_property
    def methods(self) -> dict[str, ast.FunctionDef]:
        """Name -> method or property."""
        return {each.name: each for each in self.node.body if isinstance(each, ast.FunctionDef)}

    @cached_property
    def annotated(self) -> dict[str, ast.expr]:
        """Field -> its annotation."""
        found = [node for node in ast.walk(self.node) if isinstance(node, ast.AnnAssign)]
        return {
            each.target.attr if isinstance(each.target, ast.Attribute) else ast.unparse(each.target): each.annotation
            for each in found
        }


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield (target, value) of an assignment; of two tuples, item by item."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        for inner, each in zip(target.elts, value.elts, strict=True):
            yield from _pairs(inner, each)
    else:
        yield target, value


def _bindings(tree: ast.AST) -> Iterator[tuple[ast.expr, ast.expr, bool]]:
    """Yield (target, value, True if the target is one item of the value) of all assignments and loops."""
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    yield from ((*pair, False) for pair in _pairs(target, value))
            case ast.NamedExpr(target=target, value=value):
                yield target, value, False
            case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
                yield target, value, True


@dataclass
class Scope:
    """One function or method, with the types that are known in it."""

    function: ast.AST
    owner: str
    module: str
    classes: dict[str, Class]
    _open: set[str] = field(default_factory=set)
    """Names whose type is being searched, so that a name that is bound to itself ends the search."""

    @cached_property
    def sources(self) -> dict[str, list[tuple[ast.expr, bool]]]:
        """Local name -> the expressions to which it is bound."""
        found: dict[str, list[tuple[ast.expr, bool]]] = {}
        for target, value, is_item in _bindings(self.function):
            if isinstance(target, ast.Name):
                found.setdefault(target.id, []).append((value, is_item))
            elif isinstance(target, ast.Tuple) and is_item and _called(value) == "items":
                found.setdefault(ast.unparse(target.elts[-1]), []).append((value, is_item))
        return found

    @cached_property
    def declared(self) -> dict[str, ast.expr]:
        """Local name -> its annotation, also of parameters."""
        found: dict[str, ast.expr] = {}
        for node in ast.walk(self.function):
            if isinstance(node, ast.arg) and node.annotation is not None:
                found[node.arg] = node.annotation
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found[node.target.id] = node.annotation
        return found

    # ------------------------------------------------------------------------------------------------------ writes

    def foreign(self) -> Iterator[ast.expr]:
        """Yield the expression of each write into a foreign field."""
        for node in ast.walk(self.function):
            match node:
                case ast.Attribute(ctx=ast.Store() | ast.Del(), value=of, attr=name):
                    is_foreign = not self._is_allowed(of, name)
                case ast.Subscript(ctx=ast.Store() | ast.Del(), value=container):
                    is_foreign = self._holds_foreign(container)
                case ast.Call(func=ast.Attribute(value=container, attr=name)) if name in CHANGES:
                    is_foreign = self._holds_foreign(container)
                case ast.Call(func=func, args=[of, *_]) if _last(func) in SETTERS:
                    is_foreign = not self._is_allowed(of, "")
                case _:
                    continue
            if is_foreign:
                assert isinstance(node, ast.expr)
                yield node

    def _holds_foreign(self, container: ast.expr) -> bool:
        """Return True if the container lies in a foreign field. An object of a class changes itself by its methods."""
        kind = _name(self.type_of(container))
        if kind and kind not in CONTAINERS:
            return False
        return any(not self._is_allowed(each.value, each.attr) for each in self._fields(container, set()))

    def _fields(self, container: ast.expr, seen: set[str]) -> Iterator[ast.Attribute]:
        """Yield the fields in which the container may lie, directly or as an item."""
        match container:
            case ast.Attribute():
                yield container
            case ast.Subscript(value=inner) | ast.Call(func=ast.Attribute(value=inner)) if isinstance(
                container, ast.Subscript
            ) or _called(container) in {"get", "setdefault", "values", "items"}:
                yield from self._fields(inner, seen)
            case ast.IfExp(body=first, orelse=second) | ast.BoolOp(values=[first, second]):
                yield from self._fields(first, seen)
                yield from self._fields(second, seen)
            case ast.Name(id=name) if name not in seen:
                for value, _ in self.sources.get(name, ()):
                    yield from self._fields(value, seen | {name})

    def _is_allowed(self, of: ast.expr, name: str) -> bool:
        kind = _name(self.type_of(of))
        if kind and kind == self.owner:
            return True
        if isinstance(of, ast.Name) and self._is_new(of.id):
            return True
        known = self.classes.get(kind)
        is_ours = known is not None and known.is_record and known.module == self.module
        return is_ours and not name.startswith("_")

    def _is_new(self, name: str) -> bool:
        """Return True if the function has constructed the object that this name is bound to."""
        values = self.sources.get(name, [])
        return bool(values) and all(not is_item and self._constructed(value) for value, is_item in values)

    def _constructed(self, value: ast.expr) -> str:
        match value:
            case ast.Call(func=ast.Name(id="cls")):
                return self.owner
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name[:1].isupper():
                return name
        return ""

    # ------------------------------------------------------------------------------------------------------- types

    def type_of(self, value: ast.expr) -> ast.expr | None:
        """Return the type of an expression as an annotation, or None if it is not found."""
        match value:
            case ast.Name(id="self" | "cls") if self.owner:
                return ast.Name(self.owner)
            case ast.Name(id=name):
                return self._type_of_name(name)
            case ast.Attribute(value=of, attr=name):
                return self._member(_name(self.type_of(of)), name)
            case ast.Subscript(value=of):
                kind = self.type_of(of)
                return _item(kind) or self._member(_name(kind), "__getitem__")
            case ast.Call():
                return self._type_of_call(value)
            case ast.IfExp(body=first, orelse=second) | ast.BoolOp(values=[first, second]):
                return self.type_of(first) or self.type_of(second)
            case ast.Dict() | ast.DictComp():
                return ast.Name("dict")
            case ast.List() | ast.ListComp() | ast.Set() | ast.SetComp() | ast.Tuple():
                return ast.Name("list")
        return None

    def _type_of_name(self, name: str) -> ast.expr | None:
        if name in self.declared:
            return _plain(self.declared[name])
        if name in self._open:
            return None
        self._open.add(name)
        kinds = [_item(self.type_of(v)) if is_item else self.type_of(v) for v, is_item in self.sources.get(name, ())]
        self._open.discard(name)
        return next(filter(None, kinds), None)

    def _type_of_call(self, value: ast.Call) -> ast.expr | None:
        if name := self._constructed(value):
            return ast.Name(name)
        match value.func:
            case ast.Name(id="set" | "dict" | "list" | "defaultdict" | "deque" as name):
                return ast.Name(name)
            case ast.Name(id="list" | "sorted" | "tuple" | "iter" | "reversed" | "replace") if value.args:
                return self.type_of(value.args[0])
            case ast.Attribute(value=of, attr=name):
                kind = self.type_of(of)
                if _name(kind) in self.classes:
                    return self._member(_name(kind), name)
                if name in {"values", "items"} and (item := _item(kind)) is not None:
                    return ast.Subscript(ast.Name("list"), item)
                return _item(kind) if name in {"get", "pop", "popleft", "setdefault"} else None
        return None

    def _member(self, kind: str, name: str) -> ast.expr | None:
        """Return the type of a field or property, or what a method returns."""
        found = self.classes.get(kind)
        if found is None:
            return None
        if name in found.annotated:
            return _plain(found.annotated[name])
        if name in found.methods:
            return _plain(found.methods[name].returns)
        for method in found.methods.values():
            for target, value, is_item in _bindings(method):
                if isinstance(target, ast.Attribute) and ast.unparse(target) == f"self.{name}" and not is_item:
                    inner = Scope(method, kind, found.module, self.classes)
                    if (known := inner.type_of(value)) is not None:
                        return known
        bases = [_name(base) for base in found.node.bases]
        return next(filter(None, (self._member(base, name) for base in bases)), None)


def _last(name: ast.expr) -> str:
    return ast.unparse(name).rpartition(".")[2]


def _called(value: ast.expr) -> str:
    return value.func.attr if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) else ""


def _plain(kind: ast.expr | None) -> ast.expr | None:
    """Return the annotation without `None` and quotes."""
    match kind:
        case ast.BinOp(left=left, right=right):
            return _plain(right) if isinstance(left, ast.Constant) and left.value is None else _plain(left)
        case ast.Constant(value=str(text)):
            return _plain(ast.parse(text, mode="eval").body)
    return kind


def _name(kind: ast.expr | None) -> str:
    """Return the class that an annotation names: `dict` of `dict[int, str]`; "" of none."""
    match kind:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Subscript(value=value):
            return _name(value)
    return ""


def _item(kind: ast.expr | None) -> ast.expr | None:
    """Return the type of a container's items; of a mapping, that of its values."""
    match kind:
        case ast.Subscript(value=of, slice=ast.Tuple(elts=[*_, last])) if _name(of) in MAPPINGS:
            return _plain(last)
        case ast.Subscript(value=of, slice=inner) if _name(of) in SEQUENCES:
            return _plain(inner.elts[0] if isinstance(inner, ast.Tuple) else inner)
    return None
