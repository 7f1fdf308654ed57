"""Makes the page of messages while MkDocs runs: all sentences in the product's code, and what to do about them.

A sentence is a string of four words or more that is no docstring and no help of a flag. So a message that is put
together in one place and raised in another is there, too. Values are shown by their names, as ‹member›, and words that
are there at times in brackets.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT = Path(__file__).resolve().parents[1]
PAGE = "tutorials/messages.md"
HEAD = ROOT / "docs/messages-head.txt"
ROOMS = {
    "elastrain/runtime/loop_state": "The training loop, and what it keeps",
    "elastrain/runtime/loader": "Data",
    "elastrain/runtime/loggers": "Logs",
    "elastrain/runtime/durable": "Checkpoints and saved states",
    "elastrain/runtime/model": "Model and optimizer",
    "elastrain/runtime": "The training script",
    "elastrain/pipeline": "Pipelines",
    "elastrain/integrations": "Adapters",
    "elastrain/device": "Devices",
    "elastrain": "The job's state",
    "launcher/cli": "The command line",
    "launcher": "The launcher",
    "comm": "The communicator, and the backend of torch.distributed",
    "offload": "Memory and drives",
    "snapshot": "States in memory",
}
"""Folder -> heading. The first one that contains a file counts."""
WORDS_LEAST = 4
_HELP = {"help", "short_help", "epilog", "rich_help_panel"}
_FOR_DEVELOPERS = {"AssertionError", "NotImplementedError"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the page."""
    from mkdocs.structure.files import File  # only in the environment that builds the pages

    files.append(File.generated(config, PAGE, content=page()))
    return files


def page() -> str:
    """Return the page's text."""
    by_heading: dict[str, set[str]] = {heading: set() for heading in ROOMS.values()}
    for path in sources():
        by_heading[heading_of(path)].update(sentences(ast.parse(path.read_text())))
    parts = [HEAD.read_text()]
    for heading, found in by_heading.items():
        lines = "\n".join(f"- {_escaped(each)}" for each in sorted(found, key=str.lower))
        parts.append(f"### {heading}\n\n{lines}\n" if found else "")
    return "\n".join(filter(None, parts))


def sources() -> Iterator[Path]:
    """Yield the files of the product, those behind symbolic links once."""
    for top in ("elastrain", "comm", "snapshot", "offload", "launcher"):
        for path in sorted((ROOT / top).rglob("*.py")):
            if not any(part.is_symlink() for part in path.parents):
                yield path


def heading_of(path: Path) -> str:
    """Return the heading under which the messages of a file stand."""
    name = path.relative_to(ROOT).as_posix()
    return next(heading for folder, heading in ROOMS.items() if name.startswith(f"{folder}/"))


def sentences(tree: ast.AST) -> Iterator[str]:
    """Yield the sentences of a syntax tree, each with `‹name›` for its values."""
    for node in ast.iter_child_nodes(tree):
        text = _text(node)
        if text is not None:
            if len(re.sub(r"‹[^›]*›", " ", text).split()) >= WORDS_LEAST and re.search(r"[a-z]{2}", text):
                yield " ".join(text.split())
        elif isinstance(node, ast.Call):
            yield from _of_call(node)
        elif not _is_docstring(node) and not isinstance(node, ast.Assert):
            yield from sentences(node)


def _of_call(call: ast.Call) -> Iterator[str]:
    if ast.unparse(call.func).split(".")[-1] in _FOR_DEVELOPERS:
        return
    for part in (call.func, *call.args, *(each for each in call.keywords if each.arg not in _HELP)):
        yield from sentences(ast.Expression(part) if isinstance(part, ast.expr) else part)


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _text(node: ast.AST) -> str | None:
    """Return the text of a string, or of strings that are added up; None for anything else."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(_text(each) or "" for each in values)
        case ast.FormattedValue(value=ast.IfExp() as choice) if (chosen := _text(choice)) is not None:
            return chosen
        case ast.IfExp(body=body, orelse=orelse) if _text(body) or _text(orelse):
            return "[" + " | ".join(filter(None, (_text(body), _text(orelse)))) + "]"
        case ast.FormattedValue(value=value):
            name = re.findall(r"[A-Za-z_]\w*", ast.unparse(value)) or ["value"]
            return f"‹{name[-1].strip('_')}›"
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            texts = [_text(left), _text(right)]
            return None if texts == [None, None] else "".join(each if each is not None else "‹…›" for each in texts)
    return None


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*_<>\[\]{}#|])", r"\\\1", text)
