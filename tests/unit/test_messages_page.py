"""The page of messages has every sentence of the product, and its advice quotes sentences that exist."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from docs import messages
from tests.support.sources import product

ERRORS = re.compile(r"(Config|Cut|Refused|NoRoom|DriveFailed|Corrupted|StateLost|Diverged|Stopped)Error")


@cache
def lines() -> list[str]:
    return [line[2:].replace("\\", "") for line in messages.page().splitlines() if line.startswith("- ")]


def test_every_literal_error_is_on_the_page() -> None:
    page, lacking, seen = "\n".join(lines()), [], 0
    for source in product():
        for node in source.nodes if ERRORS.search(source.text) else ():
            if isinstance(node, ast.Call) and ERRORS.fullmatch(ast.unparse(node.func).split(".")[-1]) and node.args:
                pieces = [
                    each.value
                    for each in ast.walk(node.args[0])
                    if isinstance(each, ast.Constant) and isinstance(each.value, str) and len(each.value.split()) > 4
                ]
                seen += bool(pieces)
                lacking += [p for p in pieces if " ".join(p.split()).replace("\\", "") not in page]
    assert seen > 200
    assert lacking == []


def test_the_advice_quotes_messages_that_exist() -> None:
    told = lines()
    quoted = re.findall(r"^\*\*`([^`]+)`\*\*", messages.HEAD.read_text(), flags=re.MULTILINE)
    assert len(quoted) >= 5
    for quote in quoted:
        for piece in filter(None, (part.strip() for part in quote.split("…"))):
            assert any(piece in line for line in told), piece


@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        ('raise E(f"the batch of {self._size} samples is odd")', ["the batch of ‹size› samples is odd"]),
        ('def f():\n    """Return what was told before."""', []),
        ('option("--x", help="a flag of the command line")', []),
        ('say("one two three " + name)', []),
        ('say("one two three four " + name)', ["one two three four ‹…›"]),
        ('assert x, "this is for developers only"', []),
    ],
)
def test_a_sentence_is_told_from_other_strings(code: str, wanted: list[str]) -> None:
    assert list(messages.sentences(ast.parse(code))) == wanted
