"""Docstrings begin with a verb or a noun phrase, never with a word that starts a riddle."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.support.sources import Source, product

REFUSED = {"Of", "Who", "Whom", "Whether", "What", "How", "As", "Where", "It", "Its", "Those"}
BEGINS_SO = re.compile(rf"""["'][\\\s,.:;']*(?:{"|".join(sorted(REFUSED))}|From\s+now\s+on)\b""")
"""What a string looks like that begins with a refused word. A file without one need not be parsed."""


def riddles(source: Source) -> Iterator[str]:
    """Yield the place of each docstring, also of fields and constants, that begins with a refused word."""
    for node in source.nodes if BEGINS_SO.search(source.text) else ():
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            words = node.value.value.split()
            if words and (words[0].strip(",.:;'") in REFUSED or words[:3] == ["From", "now", "on"]):
                yield f"{source.module}:{node.lineno}: {' '.join(words[:6])}"


def test_no_docstring_begins_with_a_refused_word() -> None:
    assert [each for source in product() for each in riddles(source)] == []


@pytest.mark.parametrize(
    "text",
    ['"""What is planted."""', 'def f():\n    """Whether it is found."""', 'x = 1\n"""Of a constant."""'],
)
def test_what_is_planted_is_found(text: str) -> None:
    assert list(riddles(Source("elastrain.planted", text)))
    assert not list(riddles(Source("elastrain.planted", text.replace('"""', '"""Return this. ', 1))))
