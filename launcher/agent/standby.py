"""One waiting worker per node (`--standby`), which takes the place of a lost one.

The waiting process has imported the script's libraries and has done nothing else: it has no member's number, no place
in the job, and no device. The first workers are started as ever.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from elastrain.base.processes import tied
from elastrain.launcher.agent import worker_limits
from elastrain.launcher.agent.adopted import Process
from elastrain.launcher.agent.worker_start import Logs, Script, WorkerEnvironment, environment, error_file
from elastrain.launcher.shared import process_environment
from elastrain.launcher.shared.job_values import Start

_PROGRAM = Path(__file__).with_name("standby_worker.py")


class StandbyProcess:
    """A waiting process, and later the worker that it has become. `pidfd` is readable once it has ended."""

    is_standby = True

    def __init__(self, script: Script, variables: dict[str, str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-u", str(_PROGRAM), str(theirs.fileno()), *script.waiting]
            self._process = subprocess.Popen(
                tied(command),
                env=process_environment.without("TORCHELASTIC_ERROR_FILE") | variables,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._sock = ours
        self.pid = self._process.pid
        self.session: int | None = self.pid
        self.pidfd = os.pidfd_open(self.pid)
        worker_limits.lower(self.pid)

    def become(self, variables: dict[str, str]) -> bool:
        """Let the process run the script with these variables. Returns False if it has ended."""
        try:
            self._sock.sendall(json.dumps(variables).encode() + b"\n")
        except OSError:
            return False
        finally:
            self._sock.close()
        return self._process.poll() is None

    def signal_group(self, number: int) -> None:
        """Send a signal to the worker and all processes of its group."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def reap(self) -> int:
        """Kill the rest of the process group, and return the exit code (< 0: minus the signal)."""
        self.signal_group(signal.SIGKILL)
        exit_code = self._process.wait()
        os.close(self.pidfd)
        return exit_code

    def close(self) -> None:
        """Do nothing: its output is the launcher's."""


class StandbySource:
    """A script whose lost workers are replaced by a waiting process. The kernel ends it with the agent's thread."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._waiting: StandbyProcess | None = None
        self._variables: dict[str, str] | None = None
        """Variables of the newest worker, for the next waiting process. None before the first worker."""

    def start(self, worker: Start, common: WorkerEnvironment, logs: Logs) -> Process:
        """Start a worker, or let the waiting process be it if others train. Raises OSError if it cannot."""
        variables = environment(common, worker)
        process: Process | None = None
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not worker.warm_up:  # one of the first workers
            self._waiting = waiting
        elif waiting is not None:
            variables |= {"TORCHELASTIC_ERROR_FILE": error_file(logs, worker)}
            if waiting.become(variables):
                process = waiting
            else:
                waiting.reap()
        process = process or self._script.start(worker, common, logs)
        is_first, self._variables = self._variables is None, variables
        if is_first:
            self.refill()
        return process

    def refill(self) -> None:
        """Start the next waiting process, unless there is one. Call this when no worker warms up beside it."""
        if self._waiting is None and self._variables is not None:
            with suppress(OSError):  # without one, the next worker is started as ever
                self._waiting = StandbyProcess(self._script, self._variables)

    def close(self) -> None:
        """End the waiting process."""
        if self._waiting is not None:
            self._waiting.reap()
            self._waiting = None
