"""`job.loggers` and `job.log`: the member of rank 0 writes the lines, every other member keeps the last ones.

A logger that fails never ends the job. Its lines are written once it works again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from elastrain.base.processes import say
from elastrain.errors import ConfigError
from elastrain.job.log_book import KEPT_LINES, Line, LogBook, Scalar
from elastrain.job.values import Record
from elastrain.runtime.loggers.progress_bar import StepBar

WRITING_TIMEOUT_S = 300.0
"""Time that a logger may take to open its files or to write, before the member is taken to hang."""
RETRY_FIRST_S = 1.0
RETRY_LAST_S = 60.0
_RESERVED = ("step", "run")
"""Names that loggers write themselves."""


class Logger(Protocol):
    """Files with lines, written by one member at a time. Scripts may pass loggers of their own.

    Every method may raise; it is called again later, from `begin` on.
    """

    def begin(self, run: str) -> int:
        """Open the files of this run. Returns the step of the last line in them, or -1 if there is none."""
        ...

    def cut(self, step: int) -> None:
        """Remove all lines of later steps, or mark them as no longer valid. They are written again."""
        ...

    def write(self, lines: Sequence[Line]) -> None:
        """Append lines. Once this returns, they outlive the process."""
        ...


class LoopStep(Protocol):
    """The part of a step that decides whether a line may be logged."""

    number: int
    is_overruled: bool

    @property
    def is_committed(self) -> bool:
        """True once the step is committed."""
        ...


class JobLines:
    """The lines of a job and its loggers. Only the thread of the training loop uses it."""

    def __init__(self, run: str, me: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.book = LogBook(run)
        self.step: LoopStep | None = None
        """The step whose body runs, or ran last."""
        self._me = me
        self._clock = clock
        self._logs: list[_Log] | None = None
        self._behind = 0
        self._bar = StepBar()
        self._is_writer: Callable[[], bool] = lambda: False
        self._stretch: Callable[[str, float], AbstractContextManager[None]] = lambda name, timeout_s: nullcontext()

    def loggers(self, *loggers: Logger, behind: int = 0) -> None:
        """Name the loggers that `job.log` writes to, alike on all members, before the loop.

        One member writes. If it is lost, another member goes on, without a missing or a repeated line. All nodes need
        to reach the same files; where they do not, the new writer begins a file of its own with the lines that it has.
        Without a logger, the job has a progress bar only. Raises ConfigError after the first call.

        Args:
            loggers: `elastrain.Jsonl`, `elastrain.TensorBoard`, `elastrain.Wandb`, or objects with their methods.
            behind: Steps that the script's own checkpoint stands behind, if it begins from one. Lines of the job's
                first step have this number in the files, so that they follow those of the run before.
        """
        if self._logs is not None:
            raise ConfigError("job.loggers(…) was called before: name all loggers in one call")
        if not isinstance(behind, int) or isinstance(behind, bool) or behind < 0:
            raise ConfigError(f"behind of job.loggers(…) is a whole number of steps from 0 on; got {behind!r}")
        for logger in loggers:
            lacking = [name for name in ("begin", "cut", "write") if not callable(getattr(logger, name, None))]
            if lacking or isinstance(logger, type):
                raise ConfigError(
                    f"job.loggers(…) takes objects such as elastrain.Jsonl('log.jsonl'); got {logger!r:.80}, which has "
                    f"no methods begin, cut and write"
                )
        self._behind = behind
        self._logs = [_Log(_Shifted(logger, behind) if behind else logger, self._me, self._clock) for logger in loggers]

    def log(self, values: Mapping[str, Any], *, step: int | None = None) -> None:
        """Write one line: values of the step that was just committed. Call it alike on all members.

        The values may differ between members, as times do; those of rank 0 are written.

        Args:
            values: Numbers, words, booleans or None by name; tensors and arrays of one element become numbers.
            step: Number that the step has in the files. It may be left out, and is compared only.

        Raises:
            ConfigError: A value is something else, there is no logger, `step` is the number of another step, or no
                step was committed just before.
        """
        if self._logs is None:
            raise ConfigError(
                "job.log(…) needs to know where: job.loggers(elastrain.Jsonl('log.jsonl')) before the loop"
            )
        newest = self.step
        if newest is None or not (newest.is_committed or newest.is_overruled):
            raise ConfigError("job.log(…) comes behind `for batch in step`, where the figures of the step are known")
        number = self._behind + newest.number
        if step is not None and step != number:
            raise ConfigError(
                f"job.log(…, step={step!r}) comes behind the step that has number {number} in the files: leave step "
                "out, or say by job.loggers(…, behind=) or SummaryWriter(…, purge_step=) how many lie before this job"
            )
        line = _plain(values)
        if not newest.is_overruled:
            self.book.add(newest.number, line)
            self.write()

    def join(
        self, until: int, is_writer: Callable[[], bool], stretch: Callable[[str, float], AbstractContextManager[None]]
    ) -> None:
        """Begin to write, where this member is the one that writes. `stretch` declares that a call may take long."""
        self._bar.until, self._is_writer, self._stretch = until, is_writer, stretch

    def committed(self, record: Record) -> None:
        """Note a commit."""
        self.book.committed(record.step, record.generation)
        if self._logs is not None and self._is_writer():
            self._bar.show(record.step + 1)

    def write(self, *, at_end: bool = False) -> None:
        """Write what is not written yet, if this member is the one that writes. Call it before each step is entered."""
        if not self._logs:
            return
        is_writer = self._is_writer()
        for log in self._logs:
            if not is_writer:
                log.leave()
            elif log.is_behind(self.book, at_end=at_end):
                with self._stretch(f"writing {log.name}", WRITING_TIMEOUT_S):
                    log.write(self.book, at_end=at_end)

    def end(self) -> None:
        """Write the last lines at the end of the loop, also those of a logger that failed a moment ago."""
        self._bar.end()
        self.write(at_end=True)


class _Shifted:
    """A logger whose files have the steps of an earlier run in front of those of this job."""

    def __init__(self, logger: Logger, behind: int) -> None:
        self._logger, self._behind = logger, behind

    def __str__(self) -> str:
        return str(self._logger)

    def begin(self, run: str) -> int:
        """Open the files, and return the job's own number of the step of their last line."""
        return max(self._logger.begin(run) - self._behind, -1)

    def cut(self, step: int) -> None:
        """Remove all lines of later steps."""
        self._logger.cut(step + self._behind)

    def write(self, lines: Sequence[Line]) -> None:
        """Append lines."""
        self._logger.write([replace(line, step=line.step + self._behind) for line in lines])


class _Log:
    """A logger, and how far its lines are written."""

    def __init__(self, logger: Logger, me: str, clock: Callable[[], float]) -> None:
        self._logger, self._me, self._clock = logger, me, clock
        self.name = str(logger)
        self._next: int | None = None
        """Number of the next line to write; None until the files are open here."""
        self._is_own = False
        """True while no other member writes."""
        self._has_gap = False
        """True if the files lack lines that are no longer kept."""
        self._wait_s = 0.0
        """Time between two tries; 0 unless the last one failed."""
        self._retry_s = 0.0

    def leave(self) -> None:
        """Leave the files to another member."""
        self._next, self._is_own = None, False

    def is_behind(self, book: LogBook, *, at_end: bool) -> bool:
        """Return True if there is something to write, and the time for another try has come."""
        return self._next != book.count and (at_end or not self._wait_s or self._clock() >= self._retry_s)

    def write(self, book: LogBook, *, at_end: bool) -> None:
        """Write all lines that are missing. After an error the next call begins again with what is in the files."""
        try:
            if self._next is None:
                newest = self._logger.begin(book.run)
                step = book.goes_on_behind(newest, is_own=self._is_own)
                self._logger.cut(step)
                self._has_gap = newest + 1 < book.known_from
                self._is_own = True
                lines = book.behind(step)
            else:
                lines = book.newer(self._next)
            if lines:
                self._logger.write(lines)
        except Exception as error:  # noqa: BLE001 - a logger may raise anything, and training goes on
            self._failed(error, at_end=at_end)
            return
        self._next = book.count
        if self._wait_s:
            self._wait_s = 0.0
            gap = f"lines before step {book.known_from} are" if self._has_gap else "no line is"
            say(f"{self._me}: {self.name} is written again, and {gap} missing")

    def _failed(self, error: Exception, *, at_end: bool) -> None:
        self._next = None
        why = f"{type(error).__name__}: {error}"
        if at_end:
            say(f"{self._me}: {self.name} lacks the last lines of the job ({why})")
        elif not self._wait_s:
            say(
                f"{self._me}: {self.name} cannot be written ({why}); training goes on, and up to {KEPT_LINES} lines "
                "are kept until it can be"
            )
        self._wait_s = min(max(RETRY_FIRST_S, 2 * self._wait_s), RETRY_LAST_S)
        self._retry_s = self._clock() + self._wait_s


def _plain(values: Mapping[str, Any]) -> dict[str, Scalar]:
    """Return the values of a line as plain Python values. Raises ConfigError for others."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"job.log(…) takes a dict of values by name; got {type(values).__name__}")
    found: dict[str, Scalar] = {}
    for name, value in values.items():
        if not isinstance(name, str) or name in _RESERVED:
            raise ConfigError(
                f"job.log({{{name!r}: …}}): names are words other than {' and '.join(map(repr, _RESERVED))}, which "
                "loggers write themselves"
            )
        if isinstance(value, Tensor | np.ndarray | np.generic) and np.prod(value.shape) == 1:
            value = value.item()
        is_huge = isinstance(value, int) and value.bit_length() > 63
        if is_huge or not isinstance(value, bool | int | float | str | None):
            what = f"{'a huge ' * is_huge}{type(value).__name__}"
            what += f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
            raise ConfigError(f"job.log({{{name!r}: …}}) takes a number, a word, True, False or None; got {what}")
        found[name] = value
    return found
