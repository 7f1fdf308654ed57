"""Starts and ends of simulated nodes: the fork server, restarts of lost nodes, and the exit code of the command.

`EndsOfNodes` also prints each node's last sentence on the shared screen, without repetitions.
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
    """The ends of all nodes. A sentence about the whole job is printed once.

    A sentence about one node is printed with the node's name.
    """

    def __init__(self) -> None:
        self.codes: list[int] = []
        self.job_is_over = False
        self._refused: list[int] = []
        self._told_to_go = 0
        self._told: set[tuple[str, str]] = set()

    def add(self, code: int, name: str, run: RunDir) -> None:
        """Record the exit code of a node, and print its last sentence."""
        try:
            end = rundir.of_node(run, name).read_state()["end"]
        except ConfigError:  # the node has printed why it could not start; other nodes may still finish the job
            self._refused.append(code)
            return
        self.codes.append(code)
        if end is None:
            return
        self.job_is_over = self.job_is_over or end["job_is_over"]
        self._told_to_go += code == _TOLD_TO_GO and not end["job_is_over"]
        self.say_once(end["sentence"] if end["job_is_over"] else f"{name}: {end['sentence']}", end["detail"])

    def lose_all(self) -> None:
        """Record that all nodes were lost, so that none knows how the job ended."""
        self.codes.append(1)
        self.job_is_over = True
        self.say_once(ALL_LOST)

    def say_once(self, sentence: str, detail: str = "") -> None:
        """Print a sentence, unless it was printed before."""
        if (sentence, detail) not in self._told:
            self._told.add((sentence, detail))
            say_last(sentence, detail)

    def say_if_nothing_was(self, sentence: str) -> None:
        """Print a sentence if no node has said anything, for example because all were stopped early."""
        if not self._told:
            self.say_once(sentence)

    def code(self) -> int:
        """Return the highest exit code.

        If the job ended otherwise, nodes that were asked to leave or could not start do not count.
        """
        codes = sorted(self.codes or self._refused)
        if self.job_is_over and self._told_to_go < len(codes):
            for _ in range(self._told_to_go):
                codes.remove(_TOLD_TO_GO)
        return codes[-1] if codes else 1


RESTART_COUNTS_S = 3600.0
"""Seconds for which the restart of a node counts against the limit."""


class NodeRestarts:
    """The nodes that were restarted, and the limit on restarts."""

    def __init__(self, allowed: int) -> None:
        self._allowed = allowed
        self._at_s: list[float] = []
        self.names: set[str] = set()

    def take(self, name: str) -> bool:
        """Return True if a lost node may be restarted, and count the restart. Prints the decision."""
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
    """Start the fork server with stop signals blocked. Its children inherit that until `hear_signals`.

    Otherwise, Ctrl-C would print a traceback in the fork server, or be lost by a node in its first moments.
    """
    multiprocessing.resource_tracker.ensure_running()  # started later, it would unblock the signals
    former = signal.pthread_sigmask(signal.SIG_BLOCK, NUMBERS)
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def hear_signals() -> None:
    """Let stop signals end this process, including signals that already wait. Call it first in a forked process."""
    for number in NUMBERS:
        if signal.getsignal(number) != signal.SIG_IGN:  # keep signals ignored if the command was started so
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, NUMBERS)


def signal_to_go() -> signal.Signals:
    """Return the signal that ends a node: SIGKILL if SIGTERM is ignored (then the node's guardian ends its workers)."""
    return signal.SIGKILL if signal.getsignal(signal.SIGTERM) == signal.SIG_IGN else signal.SIGTERM


def begin(process: BaseProcess) -> None:
    """Start a process from the fork server.

    A fork server that is gone is restarted. Raises ElastrainError if it ends during the start.
    """
    try:
        process.start()
    except (EOFError, ConnectionError):
        reason = f"the process that nodes are started from was killed as it was to start {process.name}: all nodes end"
        raise ElastrainError(reason) from None


def signal_all(processes: Iterable[BaseProcess], number: int) -> None:
    """Send a signal to all running processes.

    A process may have ended without notice, because the fork server reaps it first. It is skipped.
    """
    for process in processes:
        if process.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)


def end_fork_server() -> None:
    """Kill the fork server. With torch loaded, it would outlive this command by more than a second."""
    pid = multiprocessing.forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]  # there is no public way
    if pid is None:
        return  # it was never started
    with suppress(ProcessLookupError, ChildProcessError):  # it was killed
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
