"""The pages in docs/ are about this code: files that they name are there, pictures are those of the tables."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from docs import machines, messages
from tests.support.sources import ROOT

DOCS = ROOT / "docs"
DECISIONS = sorted((DOCS / "decisions").glob("[0-9]*.md"))
PAGES = [
    *sorted(DOCS.glob("*.md")),
    *sorted((DOCS / "tutorials").glob("*.md")),
    DOCS / "decisions/index.md",
    *DECISIONS,
]
TEXTS = [*PAGES, *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"))]
WORDS_MAX = 120
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"(?<![\w/.])((?:[\w.-]+/)*[\w-]+\.py)\b")
NOT_OURS = {"train.py", "hook.py", "longer.py"}
"""Scripts of users, in commands."""


@cache
def sources() -> frozenset[str]:
    """Every Python file, by its path from the root."""
    folders = ("elastrain", "comm", "snapshot", "offload", "launcher", "tests", "experiments", "examples", "docs")
    return frozenset(str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).rglob("*.py"))


def paragraphs(text: str) -> list[str]:
    """What stands between blank lines, each point of a list for itself; no tables, no code."""
    found = []
    for part in re.split(r"\n\s*\n", FENCE.sub("", text)):
        found += re.split(r"\n(?=\s*(?:\*|\d+\.) )", part) if "|" not in part[:1] else []
    return found


@pytest.mark.parametrize("page", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_paragraph_is_longer_than_a_reader_holds(page: Path) -> None:
    long = [each[:60] for each in paragraphs(page.read_text()) if len(each.split()) > WORDS_MAX]
    assert long == []


@pytest.mark.parametrize("page", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_files_that_are_named_are_there(page: Path) -> None:
    text = page.read_text()
    named = set(FILE.findall(text)) - NOT_OURS - set(re.findall(r'```python title="([^"]+)"', text))
    assert [name for name in sorted(named) if not any(f"/{path}".endswith(f"/{name}") for path in sources())] == []


def test_the_pictures_of_the_machines_are_those_of_their_tables() -> None:
    assert machines.PAGE.read_text() == machines.page(), "run `python -m docs.machines`"


def test_a_picture_has_every_arrow_of_its_table() -> None:
    for machine in machines.machines():
        picture = machines.picture(machine)
        wanted = [(machines._symbol(arrow.state), machines._symbol(arrow.after)) for arrow in machine.arrows]
        assert all(f"    {state} --> {after}: " in picture for state, after in wanted)


def defined() -> set[str]:
    """Every class, function, method and field of the product, and every module, by its last name."""
    names = {Path(path).stem for path in sources()}
    for path in sources():
        if not path.startswith(("tests", "experiments", "examples", "docs")):
            text = (ROOT / path).read_text()
            names |= {a or b for a, b in re.findall(r"^ *(?:def|class) (\w+)|^    (\w+):", text, flags=re.MULTILINE)}
    return names


def test_a_rule_is_kept_where_the_table_says() -> None:
    text = (ROOT / "docs/step.md").read_text()
    table = text[text.index("| rule | where |") :].split("\n\n")[0]
    named = re.findall(r"`([A-Za-z_.]+)`", "\n".join(row.split("|")[2] for row in table.splitlines()[2:]))
    assert len(named) > 15
    known = defined()
    parts = {part for name in named if not name.endswith(".py") for part in name.split(".")}
    assert sorted(parts - known) == []


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    listed = {line.split()[-1] for line in navigation.splitlines() if line.endswith(".md")}
    assert {str(page.relative_to(DOCS)) for page in PAGES} | {messages.PAGE} == listed


def test_every_decision_is_in_the_table_and_has_the_same_headings() -> None:
    table = (DOCS / "decisions/index.md").read_text()
    headings = ["Status.", "Context.", "Decision.", "Consequences.", "Alternatives rejected."]
    assert re.findall(r"\]\((.+)\) \|", table) == [page.name for page in DECISIONS]
    for page in DECISIONS:
        assert re.findall(r"^\*\*(.+?)\*\*", page.read_text(), re.MULTILINE) == headings, page


@pytest.mark.parametrize("page", DECISIONS, ids=lambda path: path.name)
def test_the_records_that_a_decision_names_are_there(page: Path) -> None:
    named = re.findall(r"`([\w./-]+\.(?:md|jsonl|toml))`", page.read_text())
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_a_word_of_the_glossary_has_one_entry() -> None:
    rows = re.findall(r"^\| ([^|]+) \|", (ROOT / "docs/glossary.md").read_text(), flags=re.MULTILINE)
    words = [word.strip() for row in rows for word in row.split(",") if row not in ("word", "---")]
    assert len(words) > 40
    assert sorted({word for word in words if words.count(word) > 1}) == []
