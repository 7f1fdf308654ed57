"""How the nodes simulated on one machine have ended: what the screen they share says, and the command's exit code.

Starts of simulated nodes: what they are forked from, and how often one that was lost is started again.
"""

from __future__ import annotations

import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing.process import BaseProcess

from elastrain.errors import ConfigError, ElastrainError
from elastrain.launcher.shared import rundir
from elastrain.launcher.shared.console import say
from elastrain.launcher.shared.process_environment import NUMBERS
from elastrain.launcher.shared.rundir import RunDir
from elastrain.launcher.start.starting import say_last

ALL_LOST = "every node was lost, and with them the state"
_TOLD_TO_GO = 128 + signal.SIGTERM
"""The exit code of a node that was asked to leave."""


class EndsOfNodes:
    """What ends the job is said once, what ends only a node with its name."""

    def __init__(self) -> None:
        self.codes: list[int] = []
        self.job_is_over = False
        self._refused: list[int] = []
        self._told_to_go = 0
        self._told: set[tuple[str, str]] = set()

    def add(self, code: int, name: str, run: RunDir) -> None:
        try:
            end = rundir.of_node(run, name).read_state()["end"]
        except ConfigError:  # it has said itself why it could not begin; others may bring the job to a good end
            self._refused.append(code)
            return
        self.codes.append(code)
        if end is None:
            return
        self.job_is_over = self.job_is_over or end["job_is_over"]
        self._told_to_go += code == _TOLD_TO_GO and not end["job_is_over"]
        self.say_once(end["sentence"] if end["job_is_over"] else f"{name}: {end['sentence']}", end["detail"])

    def lose_all(self) -> None:
        """No node is left that knows how the job has ended."""
        self.codes.append(1)
        self.job_is_over = True
        self.say_once(ALL_LOST)

    def say_once(self, sentence: str, detail: str = "") -> None:
        if (sentence, detail) not in self._told:
            self._told.add((sentence, detail))
            say_last(sentence, detail)

    def say_if_nothing_was(self, sentence: str) -> None:
        """The nodes may have been told to go before they could say so."""
        if not self._told:
            self.say_once(sentence)

    def code(self) -> int:
        """The highest; who was told to go, or could not begin, says nothing about a job that others have ended."""
        codes = sorted(self.codes or self._refused)
        if self.job_is_over and self._told_to_go < len(codes):
            for _ in range(self._told_to_go):
                codes.remove(_TOLD_TO_GO)
        return codes[-1] if codes else 1


RESTART_COUNTS_S = 3600.0
"""How long a node's restart counts."""


class NodeRestarts:
    """Which nodes were started again, and whether one more may be."""

    def __init__(self, allowed: int) -> None:
        self._allowed = allowed
        self._at_s: list[float] = []
        self.names: set[str] = set()

    def take(self, name: str) -> bool:
        """Says so, either way."""
        now_s = time.monotonic()
        self._at_s = [at_s for at_s in self._at_s if at_s + RESTART_COUNTS_S > now_s]
        if len(self._at_s) >= self._allowed:
            say(f"{name} was lost; it is not started again: --max-restarts {self._allowed}")
            return False
        self._at_s.append(now_s)
        self.names.add(name)
        say(f"{name} was lost; it is started again ({len(self._at_s)} of {self._allowed})")
        return True


def start_fork_server() -> None:
    """Signals that stop the command pass it by: they wait in it, and in what is forked from it until `hear_signals`.

    Else Ctrl-C in a terminal, or at a node in its first moments, would write a traceback or be lost.
    """
    multiprocessing.resource_tracker.ensure_running()  # it would let the signals through again
    former = signal.pthread_sigmask(signal.SIG_BLOCK, NUMBERS)
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def hear_signals() -> None:
    """The first deed of what the fork server has forked: a signal ends it from now on, also one that has waited."""
    for number in NUMBERS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as the command was started
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, NUMBERS)


def signal_to_go() -> signal.Signals:
    """Return what ends a node: SIGKILL if SIGTERM is ignored (then the node's guardian ends its workers)."""
    return signal.SIGKILL if signal.getsignal(signal.SIGTERM) == signal.SIG_IGN else signal.SIGTERM


def begin(process: BaseProcess) -> None:
    """Raises ElastrainError where the fork server ends just then; one that is gone already is started again."""
    try:
        process.start()
    except (EOFError, ConnectionError):
        reason = f"the process that nodes are started from was killed as it was to start {process.name}: all nodes end"
        raise ElastrainError(reason) from None


def signal_all(processes: Iterable[BaseProcess], number: int) -> None:
    """Who has just ended hears nothing: the fork server lets go of its process id before anybody here knows of it."""
    for process in processes:
        if process.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)


def end_fork_server() -> None:
    """With torch in it the interpreter would end by itself a second or more after this command."""
    pid = multiprocessing.forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]  # there is no public way
    if pid is None:
        return  # it was never started
    with suppress(ProcessLookupError, ChildProcessError):  # somebody has killed it
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
