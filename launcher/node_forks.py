"""The process that simulated nodes are forked from, with torch in it: the start of one, and its own end."""

from __future__ import annotations

import multiprocessing.forkserver
import os
import signal
from contextlib import suppress
from multiprocessing.process import BaseProcess

from elastrain.errors import ElastrainError


def begin(process: BaseProcess) -> None:
    """Raises ElastrainError where the fork server ends just then; one that is gone already is started again."""
    try:
        process.start()
    except (EOFError, ConnectionError):
        reason = f"the process that nodes are started from was killed as it was to start {process.name}: all nodes end"
        raise ElastrainError(reason) from None


def end() -> None:
    """With torch in it the interpreter would end by itself a second or more after this command."""
    pid = multiprocessing.forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]  # there is no public way
    if pid is None:
        return  # it was never started
    with suppress(ProcessLookupError, ChildProcessError):  # somebody has killed it
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
