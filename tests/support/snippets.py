"""The snippets of the tutorial pages, played in their order in an empty folder.

A fence `python title="train.py"` is a file, `sh` are commands, and a `text` fence after them is what they print: its
lines appear in this order, and `…` stands for anything. `sh title="install"` needs a package index: it is played only
where `installs` is true. Other fences are not allowed, so that no snippet is left out.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.sources import ROOT

TUTORIALS = ROOT / "docs/tutorials"
FENCE = re.compile(r"^```(\w*)[ ]*([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
TITLE = re.compile(r'title="([\w./-]+)"')
TIMEOUT_S = 500.0


@dataclass(frozen=True)
class Snippet:
    """A fence of a page."""

    language: str
    title: str
    text: str


class SnippetError(AssertionError):
    """A snippet that does not do what its page says."""


def snippets(page: str) -> Iterator[Snippet]:
    """Yield the fences of a page. Raises SnippetError for one that the player does not know."""
    for language, options, text in FENCE.findall(page):
        title = TITLE.search(options)
        snippet = Snippet(language, title[1] if title else "", text)
        if language not in ("python", "sh", "text") or (language == "python") != (
            title is not None and language != "sh"
        ):
            raise SnippetError(f"neither a file with a title, nor commands, nor their output: ```{language} {options}")
        yield snippet


def play(page: str, folder: Path, environment: Mapping[str, str], *, installs: bool = False) -> int:
    """Play a page's snippets in the folder, and return the number of commands.

    Raises SnippetError if a command fails, or prints something else than the page says.
    """
    printed, commands = "", 0
    for snippet in snippets(page):
        if snippet.language == "python":
            path = folder / snippet.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(snippet.text)
        elif snippet.language == "sh" and (installs or snippet.title != "install"):
            printed = _run(snippet.text, folder, environment)
            commands += len(snippet.text.strip().splitlines())
        elif snippet.language == "text":
            compare(snippet.text, printed)
    return commands


def compare(wanted: str, printed: str) -> None:
    """Raise SnippetError unless the wanted lines appear in this order among the printed ones."""
    lines = iter(printed.splitlines())
    for line in filter(None, wanted.splitlines()):
        pattern = re.compile(".*".join(re.escape(part) for part in line.rstrip().split("…")))
        if not any(pattern.fullmatch(each.rstrip()) for each in lines):
            raise SnippetError(f"not printed, or not in this place: {line}\n--- printed:\n{printed}")


def _run(commands: str, folder: Path, environment: Mapping[str, str]) -> str:
    paths = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    done = subprocess.run(
        ["bash", "-ec", commands],
        cwd=folder,
        env={**environment, "PATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    if done.returncode:
        raise SnippetError(f"exit code {done.returncode} of: {commands}\n--- printed:\n{done.stdout}")
    return done.stdout
