"""The words of `elastrain inject` and of faults files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from elastrain.errors import ConfigError
from elastrain.launcher.faults import Fault, make_fault
from elastrain.launcher.faults_file import read_faults


def test_fault_at_once_has_no_place() -> None:
    fault = make_fault("kill", "member:m1", None)
    assert (fault, fault.at_once) == (Fault(kind="kill", member="m1"), True)


@pytest.mark.parametrize(
    ("at", "step", "phase"),
    [
        ("step=3,phase=commit", 3, "commit"),
        ("phase=commit,step=3", 3, "commit"),
        ("step=0", 0, None),
        ("phase=join", None, "join"),
    ],
)
def test_place_is_a_step_or_a_phase_or_both(at: str, step: int | None, phase: str | None) -> None:
    assert make_fault("kill", "member:m1", at) == Fault(kind="kill", member="m1", step=step, phase=phase)


@pytest.mark.parametrize(
    ("kind", "target", "at", "sentence"),
    [
        ("maim", "member:m1", None, "unknown fault class 'maim': known are kill"),
        ("kill", "m1", None, "write member:ID"),
        ("kill", "member:", None, "write member:ID"),
        ("kill", "node:", None, "unknown target 'node:'"),
        ("kill", "member:m1", "phase=lunch", "unknown phase 'lunch': known are join, forward"),
        ("kill", "member:m1", "step=-1", "write step=N"),
        ("kill", "member:m1", "step=x", "write step=N"),
        ("kill", "member:m1", "step=1,step=2", "write step=N"),
        ("kill", "member:m1", "phase=join,phase=join", "write step=N"),
        ("kill", "member:m1", "", "write step=N"),
    ],
)
def test_wrong_words_are_answered_with_the_right_ones(kind: str, target: str, at: str | None, sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        make_fault(kind, target, at)


def test_file_has_one_fault_per_line_with_comments_and_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "faults"
    path.write_text(
        "# two kills\n\nkill --target member:m1 --at step=3,phase=backward # here\n"
        "kill --at=step=5 --target=member:random\n"
    )
    first, second = read_faults(path)
    assert first == Fault(kind="kill", member="m1", step=3, phase="backward")
    assert second == Fault(kind="kill", member="random", step=5)


def test_fault_prints_as_its_line(tmp_path: Path) -> None:
    path = tmp_path / "faults"
    line = "kill --target member:m1 --at step=3,phase=backward"
    path.write_text(line)
    assert [str(fault) for fault in read_faults(path)] == [line]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("maim --target member:m1 --at step=1", "unknown fault class 'maim'"),
        ("kill --at step=1", "--target is missing"),
        ("kill --target member:m1", "--at is missing"),
        ("kill --target member:m1 --at", "--at needs a value"),
        ("kill --target member:m1 --at step=1 --loud yes", "'--loud' is unknown"),
        ("kill --target member:m1 --target member:m2 --at step=1", "given twice"),
        ("kill --target member:m1 --at phase=lunch", "unknown phase 'lunch'"),
        ("kill --target 'member:m1 --at step=1", "No closing quotation"),
    ],
)
def test_wrong_line_is_named_by_its_number(tmp_path: Path, line: str, sentence: str) -> None:
    path = tmp_path / "faults"
    path.write_text(f"# first\n{line}\n")
    with pytest.raises(ConfigError, match="line 2") as caught:
        read_faults(path)
    assert sentence in str(caught.value)


def test_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can not be read"):
        read_faults(tmp_path / "nowhere")
