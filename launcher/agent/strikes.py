"""Injected faults that an agent carries out from outside: on a worker of its node, or on the node with itself.

Temporary faults are undone in time, and at the latest when the agent ends. `core` chooses the targets.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable

from elastrain.launcher.agent import worker_limits
from elastrain.launcher.agent.guardian import Guardian
from elastrain.launcher.agent.worker_processes import WorkerProcesses
from elastrain.launcher.shared.job_values import Strike
from elastrain.launcher.shared.rundir import EventLog

_LOOK_AGAIN_S = 0.005
_ANSWERED_S = 0.1
"""Seconds within which the answer to the operator is sent."""


class Strikes:
    """Executor of faults, driven by the agent's loop. Later actions are kept with their monotonic times."""

    def __init__(self, workers: WorkerProcesses, log: EventLog, guardian: Guardian) -> None:
        self._workers, self._log, self._guardian = workers, log, guardian
        self._due: list[tuple[float, Callable[[], None]]] = []
        self._limited: dict[str, worker_limits.Limited] = {}
        self._strikes = {
            "stop": self._stop,
            "preempt": self._preempt,
            "throttle": self._throttle,
            "out-of-memory": self._exhaust,
        }

    def strike(self, command: Strike) -> None:
        """Carry out the fault now. If this machine cannot do it, write the reason to the event log."""
        try:
            self._strikes[command.kind](command)
        except OSError as error:
            self._log.write("fault_refused", reason=f"{command.kind} cannot be injected on this machine: {error}")

    def next_deadline_s(self) -> float | None:
        """Return the monotonic time of the next action, or None."""
        return min((due_s for due_s, _ in self._due), default=None)

    def on_tick(self, now: float) -> None:
        """Carry out the actions that are due."""
        due = [call for due_s, call in self._due if due_s <= now]
        self._due = [(due_s, call) for due_s, call in self._due if due_s > now]
        for call in due:
            call()

    def close(self) -> None:
        """Undo all limits. Call this after the workers have ended."""
        for name in list(self._limited):
            self._unlimit(name)

    def _stop(self, command: Strike) -> None:
        # A member that has reached the place of the fault stops itself there. A SIGSTOP from here would come before
        # that stop, and SIGCONT between the two.
        if command.at and not self._workers.is_stopped(command.at):
            self._later(_LOOK_AGAIN_S, lambda: self._stop(command))
            return
        if not command.member:
            # First let the answer reach the operator, who may have asked this node.
            self._later(0.0 if command.at else _ANSWERED_S, lambda: self._stop_node(command.for_s))
            return
        self._workers.signal(command.member, signal.SIGSTOP)
        if command.for_s is not None:
            self._later(command.for_s, lambda: self._workers.signal(command.member, signal.SIGCONT))

    def _stop_node(self, for_s: float | None) -> None:
        self._workers.signal_all(signal.SIGSTOP)
        if for_s is not None:
            # A separate process has to continue this agent, which then continues its workers.
            wake = ["sh", "-c", f"sleep {for_s}; kill -CONT {os.getpid()}"]
            subprocess.Popen(wake, start_new_session=True, stdin=subprocess.DEVNULL, cwd="/")
            self._later(0.0, lambda: self._workers.signal_all(signal.SIGCONT))
        os.kill(os.getpid(), signal.SIGSTOP)

    def _preempt(self, command: Strike) -> None:
        grace_s = float(command.options["grace"])
        if command.member:
            self._workers.signal(command.member, signal.SIGTERM)
            self._later(grace_s, lambda: self._workers.signal(command.member, signal.SIGKILL))
        else:
            self._later(grace_s, self._kill_node)
            os.kill(os.getpid(), signal.SIGTERM)

    def _kill_node(self) -> None:
        self._workers.signal_all(signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    def _throttle(self, command: Strike) -> None:
        pid = self._workers.pid(command.member)
        self._limit(command, worker_limits.throttled(pid, _group(command, pid), float(command.options["share"])))

    def _exhaust(self, command: Strike) -> None:
        pid = self._workers.pid(command.member)
        self._limit(command, worker_limits.out_of_memory(pid, _group(command, pid), float(command.options["room"])))

    def _limit(self, command: Strike, limited: worker_limits.Limited) -> None:
        name = f"{command.kind} {command.member}"
        self._limited[name] = limited
        self._guardian.remove_group(limited.path)  # in case this agent is killed
        if command.for_s is not None:
            self._later(command.for_s, lambda: self._unlimit(name))

    def _unlimit(self, name: str) -> None:
        limited = self._limited.pop(name, None)
        if limited is None:
            return
        try:
            limited.end()
        except OSError as error:
            self._log.write("fault_not_undone", fault=name, reason=str(error))

    def _later(self, after_s: float, call: Callable[[], None]) -> None:
        self._due.append((time.monotonic() + after_s, call))


def _group(command: Strike, pid: int) -> str:
    return f"elastrain-{command.kind}-{command.member}-{pid}"
