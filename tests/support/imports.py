"""What a source file imports, found in its text: every module that it names, and every name that it takes from one.

`from elastrain import comm` imports a module as much as `import elastrain.comm` does, `from .comm import mesh` too, and
`importlib.import_module` with a literal. Nothing is left out but, where the caller asks for it, what only type checkers
see (`if TYPE_CHECKING:`) and what functions import when they are called.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache

IMPORTING_CALLS = {"import_module", "__import__"}


@cache
def imports(source: str, module: str, *, typing_too: bool = True, top_only: bool = False) -> frozenset[str]:
    """Full dotted names. `module` is the file's own name (`elastrain.job.run_plan`; a package's ends with `.__init__`).

    `from a.b import c` gives `a.b.c`, since no text tells whether `c` is a module; `within` finds either. A plain `a.b`
    comes from `import a.b` or a star only: it stands for the whole of it. `typing_too=False` leaves out what only type
    checkers see, `top_only` what functions import when they are called.
    """
    found: set[str] = set()
    called = any(name in source for name in IMPORTING_CALLS)
    for node in _nodes(ast.parse(source).body, typing_too=typing_too, top_only=top_only, expressions=called):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            origin = _origin(node, module)
            found |= {origin if alias.name == "*" else f"{origin}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and (name := _called_import(node)) is not None:
            found.add(_absolute(name, module))
    return frozenset(found)


def within(name: str, modules: set[str] | frozenset[str]) -> bool:
    """Whether `name` is one of the modules, or something in one."""
    parts = name.split(".")
    return any(".".join(parts[:length]) in modules for length in range(1, len(parts) + 1))


def _nodes(body: list[ast.stmt], *, typing_too: bool, top_only: bool, expressions: bool) -> Iterator[ast.AST]:
    """Most nodes are expressions: where no call imports anything, they need not be looked at."""
    pending: list[ast.AST] = list(body)
    while pending:
        node = pending.pop()
        yield node
        if top_only and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and not typing_too and _asks_for_type_checking(node.test):
            pending += node.orelse
            continue
        below = ast.iter_child_nodes(node)
        pending += below if expressions else (child for child in below if not isinstance(child, ast.expr))


def _asks_for_type_checking(test: ast.expr) -> bool:
    name = test.attr if isinstance(test, ast.Attribute) else test.id if isinstance(test, ast.Name) else ""
    return name == "TYPE_CHECKING"


def _origin(node: ast.ImportFrom, module: str) -> str:
    return _absolute("." * node.level + (node.module or ""), module)


def _absolute(name: str, module: str) -> str:
    """A relative name (`.comm`, `..offload`) as seen from `module`."""
    rest = name.lstrip(".")
    level = len(name) - len(rest)
    if not level:
        return name
    package = module.split(".")[:-level]
    return ".".join([*package, rest] if rest else package)


def _called_import(node: ast.Call) -> str | None:
    called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if called not in IMPORTING_CALLS or not node.args or not isinstance(node.args[0], ast.Constant):
        return None
    return node.args[0].value if isinstance(node.args[0].value, str) else None
