"""The tutorial pages do what they say: every snippet is run, and prints what its page shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.snippets import TUTORIALS, Snippet, SnippetError, compare, play, snippets
from tests.support.training import environment

pytestmark = pytest.mark.slow
LIBRARIES = {"streams=": "torchdata", "integrations.lightning": "lightning", "integrations.accelerate": "accelerate"}
"""Words in the snippets of a page -> the library that it needs."""
PAGES = sorted(TUTORIALS.glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_every_snippet_does_what_its_page_says(page: Path, tmp_path: Path) -> None:
    text = page.read_text()
    for library in LIBRARIES:
        if library in text:
            pytest.importorskip(LIBRARIES[library], reason="pip install 'elastrain[integrations]'")
    play(text, tmp_path, environment(ELASTRAIN_HOME=str(tmp_path / "state")))


def test_what_is_planted_is_found() -> None:
    assert list(snippets('```python title="a.py"\nx = 1\n```\n')) == [Snippet("python", "a.py", "x = 1\n")]
    for page in ("```python\nx = 1\n```\n", "```\nx\n```\n", "```diff\n+ x\n```\n"):
        with pytest.raises(SnippetError, match="neither"):
            list(snippets(page))
    compare("a … c\ne\n", "a b c\nd\ne\n")
    with pytest.raises(SnippetError, match="not printed"):
        compare("e\na … c\n", "a b c\nd\ne\n")


def test_a_command_that_fails_is_found(tmp_path: Path) -> None:
    with pytest.raises(SnippetError, match="exit code 1"):
        play("```sh\nfalse\n```\n", tmp_path, environment())
