"""The product's source files: where they lie, what their modules are called, and their syntax trees."""

from __future__ import annotations

import ast
import re
import unicodedata
from collections.abc import Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("comm", "snapshot", "offload", "launcher")
"""Packages of `elastrain` that lie at the top of the repository; in `elastrain/` there are symbolic links to them."""


@dataclass(frozen=True)
class Source:
    """One file of the product, read once."""

    module: str
    """`elastrain.comm.ring`; a package's ends with `.__init__`."""
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All of the tree."""
        return list(ast.walk(self.tree))

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())

    def says(self, names: Set[str]) -> bool:
        """Whether one of these names stands in its text, wherever: who looks for them need not parse any other file."""
        return not names.isdisjoint(re.findall(r"\w+", unicodedata.normalize("NFKC", self.text)))


def files(folder: Path) -> list[Path]:
    """Its Python files at any depth, those behind symbolic links left out."""
    return sorted(path for path in folder.rglob("*.py") if not any(part.is_symlink() for part in path.parents))


def module_of(path: Path, root: Path = ROOT) -> str:
    """`elastrain.comm.ring`, also for the packages at the top."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts if parts[0] not in ROOMS else ("elastrain", *parts))


def product(root: Path = ROOT) -> list[Source]:
    """Every file of the package, in the order of the folders."""
    paths = [path for room in ("elastrain", *ROOMS) for path in files(root / room)]
    return [Source(module_of(path, root), path.read_text()) for path in paths]
