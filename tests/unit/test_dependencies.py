"""Whatever is imported is installed by pyproject.toml itself, not by luck of what another package brings along.

A library that a dependency carries today may be gone with its next version, or be there on one machine only because the
pages were built on it.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib

import pytest

from tests.support.house import MODULES_OF
from tests.support.sources import ROOMS, ROOT, files

OWN = {"elastrain", *ROOMS, "tests", "experiments", "docs"}
NOT_NAMED = {
    "torchgen": "torch's distribution carries it",
    "transformers": "skipped, with a sentence, where it is not installed",
    "deepspeed": "an experiment says that it is missing",
}
"""Imported though pyproject.toml does not name it, and why that does no harm."""


def names_of(group: list[str]) -> set[str]:
    named = {re.split(r"[<>=!~\[; ]", each)[0] for each in group}
    return {MODULES_OF.get(name, name.replace("-", "_")) for name in named}


def declared() -> dict[str, set[str]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    return {name: names_of(group) for name, group in groups.items()}


def undeclared(source: str, known: set[str]) -> set[str]:
    """First parts of the names of absolute imports, anywhere in the source, that nobody installs."""
    nodes = list(ast.walk(ast.parse(source)))
    found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    found |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level}
    return {name.split(".")[0] for name in found} - known - sys.stdlib_module_names


def test_an_import_that_nobody_installs_is_found() -> None:
    source = "import os, numpy\nfrom click.testing import Result\ndef f():\n    import yaml.nodes\nfrom . import near\n"
    assert undeclared(source, {"numpy"}) == {"click", "yaml"}


@pytest.mark.parametrize("room", ["elastrain", *ROOMS, "tests", "experiments", "examples"])
def test_each_import_is_declared(room: str) -> None:
    groups = declared()
    known = OWN | set().union(*groups.values()) | NOT_NAMED.keys()
    found = {
        str(path.relative_to(ROOT)): missing
        for path in files(ROOT / room)
        if (missing := undeclared(path.read_text(), known))
    }
    assert not found, f"name these in pyproject.toml: {found}"
