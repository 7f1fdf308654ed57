"""The experiment with people's scripts: its ports, its table, and how it reads logs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from experiments.adoption import tutorial
from experiments.adoption.five import FIVE, Program, missing, port, repeated
from experiments.adoption.run import PARTS, reaches
from experiments.harness import ROOT

README = (ROOT / "experiments" / "adoption" / "README.md").read_text()


def test_the_tables_have_the_keys() -> None:
    told = {
        key
        for line in README.splitlines()
        if line.startswith("| `")
        for key in re.findall(r"`(\w+)`", line.split("|")[1])
    }
    keys = {re.sub(rf"^({'|'.join(each.name for each in FIVE)})_", "", key) for key in reaches(PARTS)}
    assert told == keys | set(tutorial.REACHES)


@pytest.mark.parametrize("program", FIVE, ids=lambda program: program.name)
def test_a_port_can_be_made_and_compiled(program: Program, tmp_path: Path) -> None:
    changed = port(program, tmp_path / "port")
    text = (tmp_path / "port" / f"{program.name}.py").read_text()
    compile(text, program.name, "exec")
    assert "elastrain" in text and 0 < changed <= program.lines


def test_values_that_are_missing_other_or_there_twice_are_counted() -> None:
    wanted = {("runs", "loss", step): 1.0 for step in range(3)}
    found = {("runs", "loss", 0): 1.0, ("runs", "loss", 1): 1.0 + 1e-9}
    assert missing(FIVE[0], wanted, found) == 2
    assert missing(FIVE[2], wanted, found) == 1, "this program adds by itself"
    assert repeated(list(found.items()) * 2) == 2


def test_the_tutorial_has_a_script_and_two_commands() -> None:
    script, commands = tutorial.snippets()
    assert "elastrain.init" in script and [line.split()[0] for line in commands] == ["echo", "elastrain"]
