"""Lines of a job whose members are lost at every point: each is in the file once, whoever wrote, in order of the steps.

Members are played as the loop runs them: enter a step, commit it with all others of the view, log, enter the next one.
A commit may reach some members only before a loss; the others then commit the same step again in the next view. The
file may fail for a while. Planted bugs show that the oracle sees a missing and a repeated line.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest

from elastrain.job.log_book import Line, LogBook
from elastrain.runtime.loggers.job_lines import JobLines
from tests.unit.runtime.test_job_lines import record

STEPS = 14


@dataclass
class File:
    """Files that outlive every member: (run, step, values) of each line. `torn`: a failure in the middle of a write."""

    rng: random.Random
    fails: float = 0.0
    lines: list[tuple[str, int, Any]] = field(default_factory=list)

    def strike(self) -> None:
        if self.rng.random() < self.fails:
            raise OSError("no space left on device")


class OfMember:
    """One member's logger: it cannot write once another member has written since, as `Jsonl` cannot."""

    def __init__(self, file: File) -> None:
        self._file = file
        self._count = 0
        self._run = ""

    def begin(self, run: str) -> int:
        self._file.strike()
        self._run = run
        self._count = len(self._file.lines)
        assert all(name == run for name, *_ in self._file.lines), "one run id over lives and members"
        return self._file.lines[-1][1] if self._file.lines else -1

    def cut(self, step: int) -> None:
        self._file.lines[:] = [line for line in self._file.lines if line[1] <= step]
        self._count = len(self._file.lines)

    def write(self, lines: Sequence[Line]) -> None:
        if self._count != len(self._file.lines):
            raise OSError("another process has written to the file")
        for line in lines:
            self._file.strike()
            self._file.lines.append((self._run, line.step, line.values["value"]))
            self._count += 1


class Step:
    is_overruled = False

    def __init__(self, number: int) -> None:
        self.number = number
        self.is_committed = False


class Member:
    def __init__(self, name: str, job: Job, view: list[str]) -> None:
        self.name, self.job, self.view = name, job, view
        # A life that begins with a checkpoint may have a job of another name: the run keeps its id.
        self.lines = JobLines(f"job of {job.life}" if job.checkpoint[1] else "job", name, clock=lambda: job.clock_s)
        self.lines.loggers(OfMember(job.file))
        self.lines.join(STEPS, lambda: self.view[:1] == [name], lambda what, timeout_s: nullcontext())
        self.step: Step | None = None
        """None until a newcomer has the state of the loop."""
        self.entered = False
        self.record: int | None = None
        """Generation of the record of its step, which it has not passed yet."""

    def start(self, step: int, state: dict[str, Any] | None) -> None:
        self.step = Step(step)
        if state is not None:
            self.lines.book.load(state)
        self.at_start = self.lines.book.state()

    def enter(self) -> None:
        self.lines.step = self.step
        self.lines.write()
        self.entered = True

    def pass_step(self) -> None:
        assert self.step is not None and self.record is not None
        self.step.is_committed = True
        self.lines.committed(record(self.step.number, self.record))
        self.record = None

    def log(self, *, dies_between: bool = False) -> bool:
        """Log and begin the next step. Some steps log nothing, some twice. Returns False if it dies on the way."""
        assert self.step is not None
        for part in range(lines_of(self.step.number)):
            self.lines.log({"value": part})
            if dies_between:
                return False
        self.step, self.entered = Step(self.step.number + 1), False
        self.at_start = self.lines.book.state()
        return True


class Job:
    """One job with losses, joins and resumes drawn from a seed."""

    def __init__(self, seed: int, *, fails: float = 0.0) -> None:
        self.rng = random.Random(seed)
        # Newcomers and resumed jobs lack the lines that a full disk has kept out of the file for several steps.
        self.changes = not fails
        self.file = File(self.rng, fails)
        self.clock_s, self.life = 0.0, 0
        self.checkpoint: tuple[int, dict[str, Any] | None] = (0, None)
        self.begin_life()

    def begin_life(self) -> None:
        self.life, self.made, self.generation = self.life + 1, 3, 1
        names = [f"life {self.life} m{i}" for i in range(3)]
        self.members = {name: Member(name, self, names) for name in names}
        for member in self.members.values():
            member.start(*self.checkpoint)

    def lose(self, name: str) -> None:
        """The next view leaves the member out, and may have a newcomer as its last one. Members see it one by one."""
        del self.members[name]
        self.generation += 1
        if self.rng.random() < 0.5 and self.members and self.changes:
            newcomer = f"life {self.life} m{self.made}"
            self.made += 1
            self.members[newcomer] = Member(newcomer, self, [])

    def turn(self) -> None:
        self.clock_s += self.rng.choice([0.1, 5.0, 100.0])
        name = self.rng.choice(list(self.members))
        member = self.members[name]
        if self.rng.random() < 0.04 and (self.changes or len(self.members) > 1):
            self.lose(name)
        elif member.view != list(self.members) and self.rng.random() < 0.5:
            member.view = list(self.members)
        elif member.step is None:
            donors = [m for m in self.members.values() if m.entered and m.step is not None and not m.step.is_committed]
            if donors and all(m.record is None for m in self.members.values()):
                assert donors[0].step is not None
                member.start(donors[0].step.number, donors[0].at_start)
        elif member.record is not None:
            member.pass_step()
        elif member.step.is_committed:
            if not member.log(dies_between=len(self.members) > 1 and self.rng.random() < 0.1):
                self.lose(name)
        elif not member.entered and member.step.number < STEPS:
            member.enter()
        else:
            self.commit()

    def commit(self) -> None:
        everyone = list(self.members.values())
        if any(not m.entered or m.step is None or m.step.is_committed or m.record is not None for m in everyone):
            return
        if any(m.view != list(self.members) for m in everyone) or len({m.step.number for m in everyone if m.step}) > 1:
            return
        only = self.rng.choice(everyone)
        if self.rng.random() < 0.1 and len(everyone) > 1:
            # One member alone has the record, and may have logged the step when it dies: the others commit it again.
            only.record = self.generation
            only.pass_step()
            if self.rng.random() < 0.5:
                only.log()
            self.lose(only.name)
            return
        for member in everyone:
            member.record = self.generation

    def run(self) -> list[tuple[int, int]]:
        for _ in range(5000):
            if not any(member.step for member in self.members.values()):
                self.begin_life()  # all are lost: the job goes on from its checkpoint
            self.turn()
            steady = [m for m in self.members.values() if m.entered and m.step is not None and not m.step.is_committed]
            if steady and self.rng.random() < 0.1:
                assert steady[0].step is not None
                self.checkpoint = (steady[0].step.number, steady[0].at_start)
            if self.changes and self.rng.random() < 0.004:
                self.members.clear()
            elif self.members and all(m.step is not None and m.step.number >= STEPS for m in self.members.values()):
                break
        else:
            raise AssertionError("the job does not end")
        self.file.fails = 0.0
        for member in self.members.values():
            member.view = list(self.members)
            member.lines.end()
        return [(step, value) for _, step, value in self.file.lines]


def lines_of(step: int) -> int:
    return (1, 1, 2, 0)[step % 4]


EXPECTED = [(step, part) for step in range(STEPS) for part in range(lines_of(step))]


@pytest.mark.parametrize("fails", [0.0, 0.3])
def test_each_line_is_there_once_whoever_is_lost_wherever(fails: float) -> None:
    for seed in range(300):
        assert Job(seed, fails=fails).run() == EXPECTED, f"seed {seed}"


def confirms_at_once(self: LogBook, step: int, generation: int) -> None:
    """Bug: a line is taken to be written as soon as its step is committed."""
    self._confirmed = step


def goes_on_behind_the_last_line(self: LogBook, newest: int, *, is_own: bool = False) -> int:
    """Bug: what is in the file stays there, also of a former life, or half of a step."""
    return newest


def trusts_nothing(self: LogBook, newest: int, *, is_own: bool = False) -> int:
    """Bug: a new writer writes what it has, and removes nothing."""
    return max(newest, self.known_from - 1)


def tells_newcomers_nothing(self: LogBook) -> dict[str, Any]:
    return {"run": self.run, "count": self.count, "confirmed": self._confirmed, "lines": []}


@pytest.mark.parametrize(
    ("method", "planted"),
    [
        ("committed", confirms_at_once),
        ("goes_on_behind", goes_on_behind_the_last_line),
        ("goes_on_behind", trusts_nothing),
        ("state", tells_newcomers_nothing),
    ],
)
def test_planted_bugs_are_found(method: str, planted: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LogBook, method, planted)
    found = 0
    for seed in range(300):
        found += Job(seed).run() != EXPECTED
    assert found


def test_a_line_of_a_step_that_was_cut_twice_is_a_repeated_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OfMember, "cut", lambda self, step: None)
    assert any(len(told := Job(seed).run()) > len(set(told)) for seed in range(100))
