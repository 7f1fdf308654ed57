"""`job.log` and its loggers: what a line may hold, who writes, and what is said when a logger fails."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from elastrain.errors import ConfigError
from elastrain.job.log_book import Line, LogBook
from elastrain.job.values import Contribution, Record
from elastrain.runtime.loggers.job_lines import JobLines
from elastrain.runtime.loggers.summary_writer import SummaryWriter


def record(step: int, generation: int = 1) -> Record:
    return Record(
        step=step, generation=generation, contribution=Contribution(), square_norm=0.0, skipped=False, switch=False
    )


class Step:
    def __init__(self, number: int = 0, *, committed: bool = True, overruled: bool = False) -> None:
        self.number, self.is_committed, self.is_overruled = number, committed, overruled


class Memory:
    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, Any]]] = []
        self.full = False

    def __str__(self) -> str:
        return "memory"

    def begin(self, run: str) -> int:
        return self.lines[-1][0] if self.lines else -1

    def cut(self, step: int) -> None:
        self.lines = [line for line in self.lines if line[0] <= step]

    def write(self, lines: Sequence[Line]) -> None:
        for line in lines:
            if self.full:
                raise OSError(errno.ENOSPC, "No space left on device")
            self.lines.append((line.step, dict(line.values)))


def job(*loggers: Any, writes: bool = True) -> JobLines:
    clock = iter(range(0, 1_000_000, 100))
    lines = JobLines("run", "m0", clock=lambda: float(next(clock)))
    lines.loggers(*loggers)
    lines.join(10, lambda: writes, lambda name, timeout_s: nullcontext())
    return lines


def after(lines: JobLines, number: int, **values: Any) -> None:
    lines.step = Step(number)
    lines.committed(record(number))
    lines.log(values)


def test_values_of_one_element_become_plain_numbers() -> None:
    memory = Memory()
    lines = job(memory)
    values = {"a": torch.tensor(0.5), "b": np.int64(3), "c": np.array([2.5]), "d": True, "e": None, "f": "word"}
    after(lines, 0, **values)
    assert memory.lines == [(0, {"a": 0.5, "b": 3, "c": 2.5, "d": True, "e": None, "f": "word"})]
    assert [type(value) for value in memory.lines[0][1].values()] == [float, int, float, bool, type(None), str]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"loss": torch.ones(3)}, r"takes a number, a word, True, False or None; got Tensor of shape \(3,\)"),
        ({"loss": [1.0]}, "got list"),
        ({"loss": 1j}, "got complex"),
        ({"loss": 1 << 63}, "got a huge int"),
        ({"step": 3}, "job.log\\({'step': …}\\): names are words other than 'step' and 'run', which"),
        ({3: 1.0}, "names are words other than"),
        ([("loss", 1.0)], "takes a dict of values by name; got list"),
    ],
)
def test_what_is_no_value_is_refused_by_its_name_before_anything_is_logged(values: Any, said: str) -> None:
    memory = Memory()
    lines = job(memory)
    lines.step = Step()
    with pytest.raises(ConfigError, match=said):
        lines.log(values)
    assert memory.lines == [] and lines.book.count == 0


def test_a_line_comes_behind_the_step_that_it_is_of() -> None:
    lines = job(Memory())
    with pytest.raises(ConfigError, match="comes behind `for batch in step`"):
        lines.log({"loss": 1.0})
    lines.step = Step(committed=False)
    with pytest.raises(ConfigError, match="comes behind `for batch in step`"):
        lines.log({"loss": 1.0})
    lines.step = Step(committed=False, overruled=True)
    lines.log({"loss": 1.0})
    assert lines.book.count == 0, "a step that most members left before has no effect"


def test_loggers_are_named_once_and_before_the_first_line() -> None:
    lines = JobLines("run", "m0")
    lines.step = Step()
    with pytest.raises(ConfigError, match=r"job\.loggers\(elastrain\.Jsonl\('log\.jsonl'\)\) before the loop"):
        lines.log({"loss": 1.0})
    with pytest.raises(ConfigError, match=r"got 'log\.jsonl', which has no methods begin, cut and write"):
        lines.loggers("log.jsonl")  # type: ignore[arg-type]
    lines.loggers()
    with pytest.raises(ConfigError, match="name all loggers in one call"):
        lines.loggers()


def test_a_member_that_does_not_write_keeps_its_lines_until_it_does() -> None:
    memory = Memory()
    lines = job(memory, writes=False)
    after(lines, 0, loss=1.0)
    after(lines, 1, loss=2.0)
    assert memory.lines == []
    lines.join(10, lambda: True, lambda name, timeout_s: nullcontext())
    lines.write()
    assert memory.lines == [(0, {"loss": 1.0}), (1, {"loss": 2.0})]


def test_a_full_disk_is_said_once_ends_nothing_and_loses_no_line(capfd: pytest.CaptureFixture[str]) -> None:
    memory, other = Memory(), Memory()
    lines = job(memory, other)
    after(lines, 0, loss=0.0)
    memory.full = True
    for step in range(1, 5):
        after(lines, step, loss=float(step))
    said = capfd.readouterr().err
    assert said == (
        "elastrain: m0: memory cannot be written (OSError: [Errno 28] No space left on device); training goes on, and "
        "up to 4096 lines are kept until it can be\n"
    )
    assert len(other.lines) == 5, "the other logger goes on"
    memory.full = False
    after(lines, 5, loss=5.0)
    assert memory.lines == other.lines == [(step, {"loss": float(step)}) for step in range(6)]
    assert capfd.readouterr().err == "elastrain: m0: memory is written again, and no line is missing\n"


def test_lines_that_a_full_disk_kept_out_for_too_long_are_said_to_be_missing(capfd: pytest.CaptureFixture[str]) -> None:
    memory = Memory()
    lines = job(memory)
    lines.book = LogBook("run", kept_lines=3)
    memory.full = True
    for step in range(8):
        after(lines, step, loss=float(step))
    memory.full = False
    after(lines, 8, loss=8.0)
    assert [step for step, _ in memory.lines] == [5, 6, 7, 8]
    assert "memory is written again, and lines before step 5 are missing" in capfd.readouterr().err


def test_a_disk_that_stays_full_to_the_end_is_said_at_the_end(capfd: pytest.CaptureFixture[str]) -> None:
    memory = Memory()
    lines = job(memory)
    memory.full = True
    after(lines, 0, loss=0.0)
    lines.end()
    assert "memory lacks the last lines of the job (OSError: [Errno 28]" in capfd.readouterr().err


def test_lines_of_a_script_that_goes_on_from_its_own_checkpoint_follow_those_of_the_run_before() -> None:
    memory = Memory()
    memory.lines = [(step, {"loss": float(step)}) for step in range(5)]  # of another run: `begin` knows none of them
    memory.begin = lambda run: max((step for step, values in memory.lines if "new" in values), default=-1)  # type: ignore[method-assign]
    lines = JobLines("run", "m0")
    lines.loggers(memory, behind=4)  # the checkpoint was written before step 4, which is computed again
    lines.join(10, lambda: True, lambda name, timeout_s: nullcontext())
    for number in range(3):
        after(lines, number, new=number)
    assert [step for step, _ in memory.lines] == list(range(7))
    heir = JobLines("run", "m1")
    heir.loggers(memory, behind=4)
    heir.book.load(lines.book.state())
    heir.join(10, lambda: True, lambda name, timeout_s: nullcontext())
    after(heir, 3, new=3)
    assert [step for step, _ in memory.lines] == list(range(8))


@pytest.mark.parametrize("behind", [-1, 2.0, True])
def test_a_place_behind_which_no_lines_can_be_is_refused(behind: Any) -> None:
    with pytest.raises(ConfigError, match=r"behind of job.loggers\(…\) is a whole number of steps from 0 on; got"):
        JobLines("run", "m0").loggers(Memory(), behind=behind)


def test_a_summary_writer_writes_the_step_that_was_just_committed(tmp_path: Path) -> None:
    accumulators = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed"
    )
    lines = JobLines("run", "m0")
    with SummaryWriter(lines, tmp_path / "events", purge_step=40) as writer:
        lines.join(10, lambda: True, lambda name, timeout_s: nullcontext())
        for number in range(3):
            lines.step = Step(number)
            writer.add_scalar("loss", torch.tensor([0.5 + number]), 40 + number)
            writer.add_scalar("rate", 0.25)
            writer.add_text("words", "some", global_step=40 + number)
            writer.flush()
            lines.committed(record(number))
    lines.end()
    read = accumulators.EventAccumulator(str(tmp_path / "events")).Reload()
    assert [(each.step, each.value) for each in read.Scalars("loss")] == [(40, 0.5), (41, 1.5), (42, 2.5)]
    assert [each.step for each in read.Scalars("rate")] == [40, 41, 42]
    assert len(lines.book.behind(-1)) == 9


def test_a_summary_writer_refuses_other_steps_and_things_by_name(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    lines = JobLines("run", "m0")
    for wrong in (-1, 1.5, True, "1"):
        with pytest.raises(ConfigError, match="purge_step of "):
            SummaryWriter(lines, tmp_path, purge_step=wrong)  # type: ignore[arg-type]
    writer = SummaryWriter(lines, tmp_path)
    with pytest.raises(ConfigError, match="was called before"):
        SummaryWriter(lines, tmp_path)
    with pytest.raises(ConfigError, match="comes behind `for batch in step`"):
        writer.add_scalar("loss", 1.0, 0)
    lines.step = Step(3)
    with pytest.raises(ConfigError, match=r"step=4\) comes behind the step that has number 3"):
        writer.add_scalar("loss", 1.0, 4)
    with pytest.raises(ConfigError, match="'loss'"):
        writer.add_scalar("loss", object(), 3)
    with pytest.raises(AttributeError, match="has no add_histogram: it keeps scalars and texts"):
        writer.add_histogram("weights", torch.ones(3))
    assert not hasattr(writer, "add_image")
