"""The report of an error that ends this member before the job's end. It is sent once, to the launcher or the screen.

An uncaught exception of the script comes through Python's excepthook, and one of the engine through `report`.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType

import torch

from elastrain.base.processes import say
from elastrain.base.told_devices import ToldDevices
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
from elastrain.runtime.io.member_device import MemberDevice
from elastrain.runtime.loop.step import Step

NOT_THE_SCRIPTS_FAULT = (RefusedError, StoppedError, CorruptedError, DriveFailedError, SpillWriteError)
"""Errors that are shown as one sentence on this member's screen, because a traceback would add nothing."""
ENDS_THE_JOB: dict[type[BaseException], type[am.NoRoom | am.LostState | am.Diverged]] = {
    NoRoomError: am.NoRoom,
    StateLostError: am.LostState,
    DivergedError: am.Diverged,
}
"""Errors that a replacement of the member would get, too. The launcher ends the job and shows them on every screen."""
_SIGNATURE_CHARS_MAX, _TRACEBACK_CHARS_MAX = 1 << 12, 1 << 16
"""Limits of the texts for the launcher, whose lines have a limited length: an exception may contain a whole tensor."""
_IS_OF_TWO_DEVICES = re.compile(
    r"same device\b|type \(torch\.\w+\) and weight type \(torch\.\w+\.|"
    r"type \(torch\.\w+\.\w+\) and weight type \(torch\.\w+\)"
)
"""Words of torch about tensors on several devices."""
_ONE_DEVICE = (
    "elastrain: the loop hands out batches in host memory: move each tensor of a batch, targets too, to the model's "
    "device before the forward (batch.to(device)), and move the model before job.prepare only"
)
# Paths of libraries, and "<" for generated code such as that of dataclasses.
_NOT_THE_SCRIPT = (*(f"{Path(file).parent}{os.sep}" for file in (str(Path(__file__).parents[1]), torch.__file__)), "<")


def _sentence(error: ConfigError) -> str:
    """Return the message of a ConfigError, with the last line of the script that the exception passed in front."""
    trace = traceback.extract_tb(error.__traceback__)
    lines = [f"{each.filename}:{each.lineno}: " for each in trace if not each.filename.startswith(_NOT_THE_SCRIPT)]
    # For a model that cannot be cut, a line of the script would not help.
    return ("" if isinstance(error, CutError) else "".join(lines[-1:])) + str(error)


def _show(
    otherwise: Callable[[type[BaseException], BaseException, TracebackType | None], object],
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """Show a ConfigError as one sentence with its line in the script, and any other exception as Python does."""
    if isinstance(error, ConfigError):
        say(_sentence(error))
    else:
        otherwise(kind, error, trace)


@contextmanager
def wrong_input_shown() -> Iterator[None]:
    """Show an uncaught ConfigError from inside as a sentence, while there is no `ExitReport` yet."""
    try:
        yield
    except ConfigError:
        sys.excepthook = partial(_show, sys.excepthook)
        raise


class ExitReport:
    """The reporter of a member's early end. `leave` closes the connections on which other members wait."""

    def __init__(
        self,
        agent: AgentLink,
        leave: Callable[[], None],
        device: MemberDevice | None = None,
        end_process: Callable[[int], object] = os._exit,
    ) -> None:
        self.step: Step | None = None
        """The step that the script is in."""
        self.has_left = False
        self._agent = agent
        self._leave = leave
        self._device = device or MemberDevice(ToldDevices(), None, deterministic=False)
        self._end_process = end_process
        self._reported: BaseException | None = None
        self._device_has_failed = False
        self._reporting = threading.Lock()
        self._previous_hook = sys.excepthook

    def take_hook(self) -> None:
        """Install an excepthook that reports uncaught exceptions before they are shown."""
        self._previous_hook = sys.excepthook
        sys.excepthook = self._on_uncaught

    def give_hook_back(self, *, raised: bool = False) -> None:
        """Restore the excepthook. `raised`: an exception is leaving the loop; it is shown if uncaught, not reported."""
        sys.excepthook = partial(_show, self._previous_hook) if raised else self._previous_hook

    def report(self, error: BaseException) -> None:
        """Report the error that ends this member, once: to the launcher, or on the screen if not the script's fault.

        A second thread waits until the report of the first one is sent, because it may then end the process.
        """
        with self._reporting:
            self._report(error)

    def _report(self, error: BaseException) -> None:
        if error is self._reported:
            return
        self._reported = error
        if (cause := self._device.error_in(error)) is not None:
            if self.step is not None and not isinstance(cause, torch.OutOfMemoryError):
                first = self.step.unfinished_micro_batch
                if first not in (None, self.step.micro_batch):
                    error.add_note(
                        f"elastrain: the loop was ahead of its device, which may have failed in micro-batch {first}"
                    )
            error.add_note(f"elastrain: {self._device.words(cause, self._agent.me)}")
            if self._device_has_failed:  # the loop and the engine both meet its error, each as one of its own
                return
            self._device_has_failed = True
        if isinstance(error, NOT_THE_SCRIPTS_FAULT):
            say(str(error))
            return
        with suppress(ChannelClosedError):  # the launcher has ended
            self._agent.say(self._told_of(self._device.as_input_error(error)))

    def go(self) -> None:
        """Leave the job now, so that other members need not wait for the interpreter's end, which takes most of 1 s."""
        self.has_left = True
        self._leave()

    def _on_uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Report an uncaught exception, show it unless the launcher or `report` shows it as a sentence, and leave."""
        if _IS_OF_TWO_DEVICES.search(str(error)):
            error.add_note(_ONE_DEVICE)
        if not issubclass(kind, KeyboardInterrupt):
            self.report(error)
        shown = self._device.as_input_error(error)
        is_a_sentence = type(shown) in ENDS_THE_JOB or isinstance(shown, ConfigError)
        if not (is_a_sentence and self._agent.is_there) and not isinstance(error, NOT_THE_SCRIPTS_FAULT):
            _show(self._previous_hook, type(shown), shown, trace)
        cause = self._device.error_in(error)
        if cause is None or isinstance(cause, torch.OutOfMemoryError):
            self.go()
            return
        # Nothing may touch the device: neither the engine's thread nor the interpreter's end, which frees its memory.
        sys.stdout.flush()
        sys.stderr.flush()
        self.has_left = True
        self._end_process(1)

    def _told_of(self, error: BaseException) -> am.FromWorker:
        if type(error) in ENDS_THE_JOB:
            return ENDS_THE_JOB[type(error)](sentence=str(error))
        cause = self._device.error_in(error)
        signature = f"{type(error).__name__}: {error}" if cause is None else self._device.signature(cause)
        sentence = _sentence(error) if isinstance(error, ConfigError) else signature
        whole = f"{sentence}\n" if isinstance(error, ElastrainError) else "".join(traceback.format_exception(error))
        return am.Failed(
            step=self.step.number if self.step else 0,
            micro_batch=self.step.micro_batch if self.step else None,
            signature=signature[:_SIGNATURE_CHARS_MAX],
            traceback=whole[-_TRACEBACK_CHARS_MAX:],
            device="" if cause is None else self._device.name_or_unknown(),
        )
