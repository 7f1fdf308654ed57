"""Table of what works together: each cell is a real job that loses a member, compared with the undisturbed job of one.

`python -m tests.support.combinations` writes the table in `docs/combinations.md` from `combinations.json`.
With `--record` it tries all cells before, with `--missing` those that the file lacks, and keeps what came out.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from tests.support.sources import ROOT
from tests.support.training import SCRIPTS, run_job, undisturbed

SCRIPT = SCRIPTS / "combined_training.py"
KEPT = Path(__file__).with_name("combinations.json")
PAGE = ROOT / "docs/combinations.md"
MARKS = ("<!-- table -->\n", "<!-- end of the table -->\n")
KILL = "kill --target member:m1 --at step=2,phase=backward"
WAYS = ("plain", "stages", "offload")
"""Columns: no options, `--stages 2`, and `--memory-limit` with a directory."""
_COMPILED = ("compile before", "compile after", "model.compile()", "block.compile()")
_BACKENDS = ("eager", "aot_eager", "inductor", "elastrain")
_ROWS = ("plain", "autocast", "fp16", "checkpoint", "reentrant", "tied", "lora", "ema")
NAMES = {
    "plain": "nothing besides",
    "autocast": "`torch.autocast` in bfloat16",
    "fp16": '`model.half()` with `loss_scale="dynamic"`',
    "checkpoint": "activation checkpoints, `use_reentrant=False`",
    "reentrant": "activation checkpoints, `use_reentrant=True`",
    "tied": "tied weights",
    "lora": "LoRA (`peft`)",
    "ema": "EMA, a copy that `job.register` names",
    "compile before": "`torch.compile(model)` before `prepare`",
    "compile after": "`torch.compile(model)` after `prepare`",
    "model.compile()": "`model.compile()` before `prepare`",
    "block.compile()": "`block.compile()` of each block before `prepare`",
}


@dataclass(frozen=True, order=True)
class Cell:
    """One combination."""

    feature: str
    kind: str = "gpt"
    backend: str = ""
    way: str = "plain"

    @property
    def key(self) -> str:
        return ", ".join(filter(None, (self.kind, self.feature, self.backend, self.way)))

    @property
    def arguments(self) -> tuple[str, ...]:
        chosen = ("--backend", self.backend) if self.backend else ()
        return "--kind", self.kind, "--feature", self.feature, *chosen


def cells() -> list[Cell]:
    """Return all cells that are tried."""
    compiled = [Cell(f, backend=backend, way=way) for f in _COMPILED for backend in _BACKENDS for way in WAYS]
    convnets = [Cell(f, "convnet", backend) for f in _COMPILED[:3] for backend in _BACKENDS[:3]]
    return [*(Cell(f, way=way) for f in _ROWS for way in WAYS), *compiled, *convnets]


@cache
def expected(arguments: tuple[str, ...]) -> str:
    """Return what the job of one says at its end."""
    return _told(undisturbed(*arguments, script=SCRIPT).output)[0]


def outcome(cell: Cell) -> str:
    """Try a cell. Returns "works", or the sentence with which it is refused. Raises AssertionError if bits differ."""
    if cell.feature == "lora" and find_spec("peft") is None:
        return "not tried"
    with tempfile.TemporaryDirectory(prefix="combined-") as folder:
        options = {
            "plain": (),
            "stages": ("--stages", "2"),
            "offload": ("--memory-limit", "4G", "--offload-dir", folder),
        }[cell.way]
        run = run_job(Path(folder), workers=2, script=SCRIPT, arguments=cell.arguments, faults=(KILL,), options=options)
        struck = run.phases_struck()
    if run.exit_code == 0:
        assert struck, f"{cell}: nothing was killed"
        told = _told(run.output)
        assert told and set(told) == {expected(cell.arguments)}, f"{cell}: {told}, not {expected(cell.arguments)}"
        return "works"
    refused = re.findall(rf"{SCRIPT.name}:\d+: (.*)|ConfigError: (.*)|the script raised on .*\n(?!/)(.*)", run.output)
    assert refused, f"{cell}: {run.output}"
    return "refused: " + re.sub(r"(parameter|block) '[^']*'", r"\1 '…'", "".join(refused[0]).strip())


def _told(output: str) -> list[str]:
    return re.findall(r"digest [0-9a-f]{16}.*", output)


def table(found: dict[str, str]) -> str:
    """Return the table of what came out, in Markdown, and below it each sentence once."""
    notes: list[str] = []
    rows = [
        " | ".join(("| with", "compiled by", "plain", "`--stages 2`", "`--memory-limit` |")),
        "|---|---|---|---|---|",
    ]
    for feature in (*_ROWS, *_COMPILED):
        for backend in _BACKENDS if feature in _COMPILED else ("",):
            mine = [[c for c in cells() if (c.feature, c.backend, c.way) == (feature, backend, way)] for way in WAYS]
            rows.append(
                f"| {NAMES[feature]} | {f'`{backend}`' if backend else ''} | "
                + " | ".join(_shown([found.get(c.key, "not tried") for c in each], notes) for each in mine)
                + " |"
            )
    return "\n".join([*rows, "", *(f"{number}. {note}" for number, note in enumerate(notes, 1))]) + "\n"


def _shown(outcomes: list[str], notes: list[str]) -> str:
    """Return the text of one cell. `notes` gets the sentences of refusals."""
    found = sorted(set(outcomes)) or ["not tried"]
    told = []
    for each in found:
        word, _, sentence = each.partition(": ")
        if sentence and sentence not in notes:
            notes.append(sentence)
        told.append(f"{word} ({notes.index(sentence) + 1})" if sentence else word)
    return ", ".join(told)


def with_table(page: str, found: dict[str, str]) -> str:
    """Return the page with the table between its marks."""
    before, _, rest = page.partition(MARKS[0])
    return f"{before}{MARKS[0]}\n{table(found)}\n{MARKS[1]}{rest.partition(MARKS[1])[2]}"


def kept() -> dict[str, str]:
    """Return what came out, by the key of each cell."""
    return dict(json.loads(KEPT.read_text())) if KEPT.exists() else {}


def main() -> None:
    found = kept()
    if "--record" in sys.argv:
        for cell in cells():
            if cell.key in found and "--missing" in sys.argv:
                continue
            try:
                found[cell.key] = outcome(cell)
            except AssertionError as error:
                sys.stderr.write(f"{error}\n")
                continue
            sys.stdout.write(f"{cell.key}: {found[cell.key]}\n")
            KEPT.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(with_table(PAGE.read_text(), found))


if __name__ == "__main__":
    main()
