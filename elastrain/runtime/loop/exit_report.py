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

from elastrain.base.processes import say
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
from elastrain.protocol import agent_messages as am
from elastrain.runtime.io.agent_link import AgentLink, ChannelClosedError
from elastrain.runtime.loop.step import Step

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
# Libraries, and what dataclasses make as text.
_NOT_THE_SCRIPT = (*(f"{Path(file).parent}{os.sep}" for file in (str(Path(__file__).parent), torch.__file__)), "<")


def _sentence(error: ConfigError) -> str:
    """What is wrong with the script's input, after the last line of its own code that the exception has left."""
    trace = traceback.extract_tb(error.__traceback__)
    lines = [f"{each.filename}:{each.lineno}: " for each in trace if not each.filename.startswith(_NOT_THE_SCRIPT)]
    # No line says more than the sentence of a model that cannot be cut.
    return ("" if isinstance(error, CutError) else "".join(lines[-1:])) + str(error)


def _show(
    otherwise: Callable[[type[BaseException], BaseException, TracebackType | None], object],
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """Show what is wrong with the script's input as a sentence with its line, and anything else as Python does."""
    if isinstance(error, ConfigError):
        say(_sentence(error))
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


class ExitReport:
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
            say(str(error))
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
        is_a_sentence = type(error) in ENDS_THE_JOB or isinstance(error, ConfigError)
        if not (is_a_sentence and self._agent.is_there) and not isinstance(error, NOT_THE_SCRIPTS_FAULT):
            _show(self._previous_hook, kind, error, trace)
        self.go()

    def _told_of(self, error: BaseException) -> am.FromWorker:
        if type(error) in ENDS_THE_JOB:
            return ENDS_THE_JOB[type(error)](sentence=str(error))
        signature = f"{type(error).__name__}: {error}"
        sentence = _sentence(error) if isinstance(error, ConfigError) else signature
        whole = f"{sentence}\n" if isinstance(error, ElastrainError) else "".join(traceback.format_exception(error))
        return am.Failed(
            step=self.step.number if self.step else 0,
            micro_batch=self.step.micro_batch if self.step else None,
            signature=signature[:_SIGNATURE_CHARS_MAX],
            traceback=whole[-_TRACEBACK_CHARS_MAX:],
        )
