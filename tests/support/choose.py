"""Choose the test files that a change can reach, for `make test`.

    python -m tests.support.choose [BASE]

A file is changed if it differs from the commit BASE, or is not in it. BASE defaults to HEAD if the working tree has
changes, else to the commit before HEAD. A test file is chosen if it imports a changed file, directly or through others;
imports in functions and module names in embedded programs count. Tests that start jobs depend on all that a job
imports; on what limits memory only if their text is about memory or drives. Files that are no Python choose the tests
that name them; settings of the project choose everything.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from pathlib import Path

from tests.support.imports import imports
from tests.support.sources import ROOMS, ROOT, files, module_of

FOLDERS = ("elastrain", *ROOMS, "tests", "experiments", "examples", "docs")
CHOOSES_ALL = ("pyproject.toml", "constraints.txt", "Makefile", "tests/conftest.py", "tests/support/choose.py")
JOB = frozenset({"elastrain.launcher.cli.commands.run", "elastrain.runtime.job", "elastrain.runtime.loader.loader"})
"""Imports of every job: the command that starts it, and what a script uses."""
COMMAND_LINE = "elastrain.launcher.cli.command_line"
"""Module that imports all commands. A job is started by one of them; tests of another command name that one."""
STARTS_JOBS = re.compile(
    r"elastrain\.init\b|tests[./]integration[./]scripts|support\.(jobs|launching|warm)\b|\"elastrain\""
)
LAZY = ("elastrain", "elastrain.comm", "elastrain.offload")
"""Packages that import their names on first use. A file that uses a name depends on the module that defines it."""
WITHOUT_A_NAME = re.compile(r"import elastrain as |from elastrain(\.\w+)? import \*|getattr\(elastrain\b")
"""Uses of the package by which the text does not say which of its names are meant."""
LOOKS_AT_ALL = re.compile(
    r"support import house|support\.(house|table) import|support\.sources import .*\b(files|product)\b"
)
"""Tests that read the sources themselves: they are always chosen."""
ON_REQUEST = frozenset({"elastrain.runtime.memory.memory_keeper", "elastrain.runtime.tensors.spilled_states"})
"""Modules of the runtime that every job imports, and that do nothing without a limit on memory."""
ASKS_FOR_THEM = re.compile(r"memory.?limit|memory_keeper|spill|save_on_disk|offload\.", re.IGNORECASE)
NAMES_A_MODULE = re.compile(r"\b(?:elastrain|tests|experiments)(?:\.\w+)+")
SCRIPTS = "tests.integration.scripts."
NAMES_A_SCRIPT = re.compile(r"\b(\w+)\.py\b")


def changed(base: str | None) -> set[str]:
    """Return the paths of files that differ from commit `base`. Raises CalledProcessError for what is no commit."""
    if base is None:
        base = "HEAD" if _git("status", "--porcelain") else "HEAD~1"
    return {*_git("diff", "--name-only", base), *_git("ls-files", "--others", "--exclude-standard")}


def _git(*arguments: str) -> list[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()


def chosen(paths: Iterable[str], root: Path = ROOT) -> list[str]:
    """Return the test files that these changed files can reach, as paths from the root; ["tests"] for all."""
    paths = set(paths)
    if paths & set(CHOOSES_ALL):
        return ["tests"]
    graph = _graph(root)
    modules = {module_of(root / path, root).removesuffix(".__init__") for path in paths if path.endswith(".py")}
    others = [path for path in paths if not path.endswith(".py")]
    tests = [path for path in files(root / "tests") if path.name.startswith("test_")]
    found = []
    for path in tests:
        text = path.read_text()
        reached = _reached(module_of(path, root), graph, without=() if ASKS_FOR_THEM.search(text) else ON_REQUEST)
        if reached & modules or LOOKS_AT_ALL.search(text) or any(Path(each).name in text for each in others):
            found.append(str(path.relative_to(root)))
    return found


@cache
def _graph(root: Path) -> Mapping[str, frozenset[str]]:
    """Return the modules that each module imports or names."""
    paths = {module_of(path, root): path for folder in FOLDERS for path in files(root / folder)}
    texts = {name.removesuffix(".__init__"): (name, path.read_text()) for name, path in paths.items()}
    lazy = {package: _homes(*texts[package]) for package in LAZY if package in texts}
    return {
        name: frozenset(_imported(text, file, texts.keys(), lazy))
        for name, (file, text) in texts.items()
        if name != COMMAND_LINE
    }


def _homes(file: str, text: str) -> dict[str, str]:
    """Return the names of a lazy package, which it imports for type checkers only, with the full name of each."""
    at_run_time = imports(text, file, typing_too=False)
    return {full.rpartition(".")[2]: full for full in imports(text, file) - at_run_time}


def _imported(text: str, file: str, known: Collection[str], lazy: Mapping[str, Mapping[str, str]]) -> Iterable[str]:
    is_used_by_people = file.startswith(("tests", "experiments", "examples"))
    named = {
        *imports(text, file, typing_too=file.removesuffix(".__init__") not in lazy),
        *(NAMES_A_MODULE.findall(text) if is_used_by_people else ()),
        *((SCRIPTS + stem for stem in NAMES_A_SCRIPT.findall(text)) if file.startswith("tests") else ()),
    }
    if is_used_by_people and WITHOUT_A_NAME.search(text):
        named |= lazy.keys() | set(lazy.get("elastrain", {}).values())
    while named:
        each = named.pop()
        module = next((part for part in _prefixes(each) if part in known), None)
        if module is None or (each.startswith(SCRIPTS) and module != each):
            continue
        yield module
        homes = lazy.get(module, {})
        name = each.removeprefix(module).removeprefix(".").partition(".")[0]
        if name in homes:
            named.add(homes[name])
        elif not name and module != "elastrain":
            named |= set(homes.values())
    if file.startswith("tests.") and STARTS_JOBS.search(text):
        yield from JOB


def _prefixes(name: str) -> Iterable[str]:
    parts = name.split(".")
    return (".".join(parts[:length]) for length in range(len(parts), 0, -1))


def _reached(start: str, graph: Mapping[str, frozenset[str]], without: Collection[str] = ()) -> set[str]:
    reached, pending = set[str](), [start]
    while pending:
        name = pending.pop()
        if name not in reached:
            reached.add(name)
            pending += graph.get(name, frozenset()).difference(without)
    return reached - {"elastrain"}


if __name__ == "__main__":
    sys.stdout.write(" ".join(chosen(changed(sys.argv[1] if len(sys.argv) > 1 else None))) + "\n")
