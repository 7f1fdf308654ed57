"""What ends this member before the job's end: said once, to the launcher or on the screen, then it goes.

An exception that no script catches comes through Python's hook, one of the engine's through `report`.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType

import torch

from elastrain import agent_messages as am
from elastrain.errors import (
    ConfigError,
    CorruptedError,
    CutError,
    DivergedError,
    DriveFailedError,
    ElastrainError,
    NoRoomError,
    RefusedError,
    StateLostError,
    StoppedError,
)
from elastrain.offload.errors import SpillWriteError
from elastrain.runtime.agent_link import AgentLink
from elastrain.runtime.channel import ChannelClosedError
from elastrain.runtime.step import Step

NOT_THE_SCRIPTS_FAULT = (RefusedError, StoppedError, CorruptedError, DriveFailedError, SpillWriteError)
"""Each of these is one sentence on this member's screen; no traceback says more."""
ENDS_THE_JOB: dict[type[BaseException], type[am.NoRoom | am.LostState | am.Diverged]] = {
    NoRoomError: am.NoRoom,
    StateLostError: am.LostState,
    DivergedError: am.Diverged,
}
"""What no replacement could do better: the launcher ends the job with the sentence, and shows it on every screen."""
_SIGNATURE_CHARS_MAX, _TRACEBACK_CHARS_MAX = 1 << 12, 1 << 16
"""An exception may hold a whole tensor as text; what the launcher is told goes into one line of limited length."""


_LIBRARIES = tuple(f"{Path(file).parent}{os.sep}" for file in (str(Path(__file__).parent), torch.__file__))


def _line_of_script(trace: TracebackType | None) -> str:
    """The last line of the script's own code that the exception has left, for the front of a sentence."""
    lines = [each for each in traceback.extract_tb(trace) if not each.filename.startswith(_LIBRARIES)]
    return f"{lines[-1].filename}:{lines[-1].lineno}: " if lines else ""


def _show(
    otherwise: Callable[[type[BaseException], BaseException, TracebackType | None], object],
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """Show what is wrong with the script's input as a sentence with its line, and anything else as Python does."""
    if isinstance(error, CutError):  # no line of the script says more than the sentence
        sys.stderr.write(f"elastrain: {error}\n")
    elif isinstance(error, ConfigError):
        sys.stderr.write(f"elastrain: {_line_of_script(trace)}{error}\n")
    else:
        otherwise(kind, error, trace)


@contextmanager
def wrong_input_shown() -> Iterator[None]:
    """Show a ConfigError from inside as a sentence, too, if nobody catches it: before there are last words of a job."""
    try:
        yield
    except ConfigError:
        sys.excepthook = partial(_show, sys.excepthook)
        raise


class LastWords:
    """`leave` closes what others wait for; it is called when the script ends before the job does."""

    def __init__(self, agent: AgentLink, leave: Callable[[], None]) -> None:
        self.step: Step | None = None
        """The step that the script is in."""
        self.has_left = False
        self._agent = agent
        self._leave = leave
        self._reported: BaseException | None = None
        self._previous_hook = sys.excepthook

    def take_hook(self) -> None:
        """From now on an exception that nobody catches is told before it is shown."""
        self._previous_hook = sys.excepthook
        sys.excepthook = self._on_uncaught

    def give_hook_back(self, *, raised: bool = False) -> None:
        """`raised`: an exception is leaving the loop, and may still be uncaught. It is told to nobody any more."""
        sys.excepthook = partial(_show, self._previous_hook) if raised else self._previous_hook

    def report(self, error: BaseException) -> None:
        """Say once what ends this member: to the launcher, or, where it is no fault of the script, on the screen."""
        if error is self._reported:
            return
        self._reported = error
        if isinstance(error, NOT_THE_SCRIPTS_FAULT):
            sys.stderr.write(f"elastrain: {error}\n")
            sys.stderr.flush()
            return
        with suppress(ChannelClosedError):  # nobody is left to be told
            self._agent.say(self._told_of(error))

    def go(self) -> None:
        """Leave before the job's end: nobody has to wait for the interpreter's, which takes torch most of a second."""
        self.has_left = True
        self._leave()

    def _on_uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """The script ends with an exception: tell the launcher where it was, then show it as Python does."""
        if not issubclass(kind, KeyboardInterrupt):
            self.report(error)
        shown_by_launcher = type(error) in ENDS_THE_JOB and self._agent.is_there
        if not shown_by_launcher and not isinstance(error, NOT_THE_SCRIPTS_FAULT):
            _show(self._previous_hook, kind, error, trace)
        self.go()

    def _told_of(self, error: BaseException) -> am.FromWorker:
        if type(error) in ENDS_THE_JOB:
            return ENDS_THE_JOB[type(error)](sentence=str(error))
        signature = f"{type(error).__name__}: {error}"
        whole = f"{signature}\n" if isinstance(error, ElastrainError) else "".join(traceback.format_exception(error))
        return am.Failed(
            step=self.step.number if self.step else 0,
            micro_batch=self.step.micro_batch if self.step else None,
            signature=signature[:_SIGNATURE_CHARS_MAX],
            traceback=whole[-_TRACEBACK_CHARS_MAX:],
        )
