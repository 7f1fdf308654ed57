"""Whatever is imported is installed by pyproject.toml itself, not by luck of what another package brings along.

A library that a dependency carries today may be gone with its next version, or be there on one machine only because the
pages were built on it. Tests import no more than `make install` installs, and start no program that may be missing
without being able to skip.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib

import pytest

from tests.support.house import MODULES_OF
from tests.support.imports import imports
from tests.support.sources import ROOMS, ROOT, files, module_of

OWN = {"elastrain", *ROOMS, "tests", "experiments", "docs"}
NOT_NAMED = {
    "torchgen": "torch's distribution carries it",
    "deepspeed": "an experiment says that it is missing",
    "lightning": "a script has it, whose tests are skipped without it",
}
"""Imported though pyproject.toml does not name it, and why that does no harm."""
STARTING_CALLS = {"run", "Popen", "call", "check_call", "check_output"}
EVERYWHERE = {"bash", "git", "mount", "sh", "sleep", "umount"}
"""Programs of a bare Linux, and the one that a checkout was made with."""


def names_of(group: list[str]) -> set[str]:
    named = {re.split(r"[<>=!~\[; ]", each)[0] for each in group}
    return {MODULES_OF.get(name, name.replace("-", "_")) for name in named}


def declared() -> dict[str, set[str]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    return {name: names_of(group) for name, group in groups.items()}


def undeclared(source: str, module: str, known: set[str]) -> set[str]:
    """First parts of the names that are imported anywhere in the source and that nobody installs."""
    return {name.split(".")[0] for name in imports(source, module)} - known - sys.stdlib_module_names


def all_undeclared(room: str, known: set[str]) -> dict[str, set[str]]:
    """Path of a file in that folder -> what it imports and nobody installs."""
    # A script finds the modules of its own folder.
    found = {
        path: undeclared(path.read_text(), module_of(path), known | {each.stem for each in path.parent.glob("*.py")})
        for path in files(ROOT / room)
    }
    return {str(path.relative_to(ROOT)): missing for path, missing in found.items() if missing}


def test_an_import_that_nobody_installs_is_found() -> None:
    source = "import os, numpy\nfrom click.testing import Result\ndef f():\n    import yaml.nodes\nfrom . import near\n"
    assert undeclared(source, "tests.there", {"numpy", "tests"}) == {"click", "yaml"}


@pytest.mark.parametrize("room", ["elastrain", *ROOMS, "tests", "experiments", "examples"])
def test_each_import_is_declared(room: str) -> None:
    groups = declared()
    known = OWN | set().union(*groups.values()) | NOT_NAMED.keys()
    found = all_undeclared(room, known)
    assert not found, f"name these in pyproject.toml: {found}"


def installed() -> set[str]:
    """What `make install` brings: the dependencies, and the groups that the Makefile names."""
    rule = re.search(r"^\$\(STAMP\):.*?--editable '\.\[([a-z,]+)\]'", (ROOT / "Makefile").read_text(), re.M | re.S)
    assert rule is not None
    groups = declared()
    return groups[""].union(*(groups[name] for name in rule[1].split(",")))


@pytest.mark.parametrize("room", ["tests", "examples"])
def test_what_tests_import_is_there_after_make_install(room: str) -> None:
    known = OWN | installed() | NOT_NAMED.keys()
    found = all_undeclared(room, known)
    assert not found, f"import these by pytest.importorskip, or have `make install` install them: {found}"


def programs(source: str) -> set[str]:
    """Programs that calls start whose command begins with a name."""
    if not re.search(rf"\b({'|'.join(STARTING_CALLS)})\(", source):
        return set()
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) and node.args]
    starting = [
        call.args[0]
        for call in calls
        if getattr(call.func, "attr", getattr(call.func, "id", "")) in STARTING_CALLS
        and isinstance(call.args[0], ast.List | ast.Tuple)
        and call.args[0].elts
    ]
    firsts = [command.elts[0] for command in starting]
    return {first.value for first in firsts if isinstance(first, ast.Constant) and isinstance(first.value, str)}


def test_a_started_program_is_found() -> None:
    assert programs("subprocess.run(['ip', 'link']); run([sys.executable]); Popen(('mkfs', *x))") == {"ip", "mkfs"}


def test_a_test_that_starts_a_program_can_skip_where_it_is_missing() -> None:
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in files(ROOT / "tests")}
    found = {name: programs(source) - EVERYWHERE for name, source in sources.items()}
    assert not {name: missing for name, missing in found.items() if missing and "skip" not in sources[name]}
