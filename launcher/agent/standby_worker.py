"""A waiting worker (`--standby`): it imports the libraries of the script, waits for its place, and runs the script.

It is run by path, as `python standby_worker.py FD file|module SCRIPT ARGS…`, so that its imports are the script's. The
agent writes the environment of the worker to the socket FD, as one line of JSON.
"""

import ast
import importlib
import importlib.util
import json
import os
import runpy
import socket
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType

_LINE_BYTES = 1 << 16
_LATER = ("elastrain.runtime.job", "torch._dynamo")
"""Modules that elastrain's first call and torch's optimizers import. They take as long as torch itself."""


def imported(source: str) -> list[str]:
    """Return the modules that a script imports at its top level, in order. An unreadable script has none."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError):
        return []
    found: list[str] = []
    for node in body:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.append(node.module)
    return found


def is_library(name: str) -> bool:
    """Return True for installed modules and elastrain. The script's own modules may do anything when imported."""
    top = name.partition(".")[0]
    if top == "elastrain":
        return True
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return False
    if spec is None or spec.origin is None:
        return False
    folders = {sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    return spec.origin in ("built-in", "frozen") or any(spec.origin.startswith(f"{folder}/") for folder in folders)


def import_libraries(names: Iterable[str]) -> None:
    """Import the libraries among these modules. The script itself meets the errors again."""
    for name in names:
        if is_library(name):
            with suppress(Exception):
                importlib.import_module(name)


def told(sock: socket.socket) -> Mapping[str, str] | None:
    """Wait for the environment of the worker. Returns None if the agent wants none any more."""
    line = b""
    while not line.endswith(b"\n"):
        part = sock.recv(_LINE_BYTES)
        if not part:
            return None
        line += part
    return dict(json.loads(line))


def run_file(path: str, args: list[str]) -> None:
    """Run a script as `python path args…` does."""
    main = ModuleType("__main__")
    main.__file__ = path
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    sys.argv = [path, *args]
    exec(compile(Path(path).read_bytes(), path, "exec"), main.__dict__)


def source_of(kind: str, target: str) -> str:
    """Return the text of the script, or "" if it cannot be read now."""
    try:
        path = Path(target)
        if kind == "module":
            spec = importlib.util.find_spec(target)
            path = Path(spec.origin if spec is not None and spec.origin is not None else "")
        return path.read_text()
    except (OSError, ImportError, ValueError):
        return ""


def main() -> None:
    """Import, wait, and run the script."""
    descriptor, kind, target, *args = sys.argv[1:]
    sys.path[0] = "" if kind == "module" else str(Path(target).resolve().parent)
    import_libraries([*imported(source_of(kind, target)), *_LATER])
    with socket.socket(fileno=int(descriptor)) as sock:
        environment = told(sock)
    if environment is None:
        return
    os.environ.update(environment)
    if kind == "module":
        sys.argv = [target, *args]
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        run_file(target, args)


if __name__ == "__main__":
    main()
