"""Worker processes of one agent, with their channels and death watchers. `core` decides what follows from events."""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from elastrain.base.event_loop import READ, WRITE, EventLoop
from elastrain.base.processes import state_of
from elastrain.comm.shm.liveness import Watcher, watch_beacon
from elastrain.comm.wire.secure import Connection
from elastrain.launcher.agent import worker_limits
from elastrain.launcher.agent.adopted import Process, WorkerSource
from elastrain.launcher.agent.guardian import Guardian
from elastrain.launcher.agent.worker_monitor import WatchedWorker
from elastrain.launcher.agent.worker_start import Logs, WorkerEnvironment
from elastrain.launcher.core import agent_events as ev
from elastrain.launcher.shared.job_values import Start, Tell
from elastrain.launcher.shared.line_socket import LineSocket, Received
from elastrain.launcher.shared.rundir import EventLog
from elastrain.protocol.agent_messages import FROM_WORKER, TO_WORKER, Hello
from elastrain.protocol.codec import BadMessageError

_RESTORE_AGAIN_S = 0.2


@dataclass(kw_only=True)
class _WorkerHandle:
    """Process, channel and death watcher of one worker."""

    process: Process
    channel: LineSocket | None = None
    watcher: Watcher | None = None
    running: bool = True


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """Values with which every worker is started."""

    source: WorkerSource
    common: WorkerEnvironment
    logs: Logs


class WorkerProcesses:
    """All workers that the agent has ever started. `happen` takes events for the core."""

    def __init__(
        self, loop: EventLoop, log: EventLog, spec: WorkerSpec, guardian: Guardian, happen: Callable[[ev.Event], None]
    ) -> None:
        self._loop, self._log, self._spec, self._happen = loop, log, spec, happen
        self._guardian = guardian
        self._handles: dict[str, _WorkerHandle] = {}
        self._restore_due_s: dict[str, float] = {}
        # Watcher threads fill this queue; the eventfd wakes the loop.
        self._mutex_deaths: deque[tuple[str, float]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        loop.register(self._wake, lambda _events: self._on_wake())

    @property
    def running(self) -> list[str]:
        """Ids of the members whose processes have not been reaped yet."""
        return [member for member, handle in self._handles.items() if handle.running]

    def next_deadline_s(self) -> float | None:
        """Return the monotonic time of the next attempt to restore a priority, or None."""
        return min(self._restore_due_s.values(), default=None)

    def on_tick(self, now: float) -> None:
        """Repeat attempts to restore priorities that are due."""
        for member in [m for m, due_s in self._restore_due_s.items() if due_s <= now]:
            self.restore_priority(member)

    def start(self, command: Start) -> None:
        """Start a worker, or report `StartFailed`."""
        try:
            process = self._spec.source.start(command, self._spec.common, self._spec.logs)
        except OSError as error:
            self._happen(ev.StartFailed(member=command.member, problem=str(error)))
            return
        if process.session is not None:
            self._guardian.watch(process.session)
        self._handles[command.member] = _WorkerHandle(process=process)
        waited = {"standby": True} if process.is_standby else {}
        self._log.write("worker_start", member=command.member, pid=process.pid, slot=command.slot, **waited)
        self._happen(ev.WorkerStarted(member=command.member, pid=process.pid))
        self._loop.register(process.pidfd, lambda _events: self._on_process_end(command.member))

    def tell(self, command: Tell) -> None:
        """Send a message to a worker. Does nothing if it has no channel."""
        handle = self._handles.get(command.member)
        if handle is None or handle.channel is None:
            return
        if not handle.channel.send(TO_WORKER.encode(command.message)):
            # The worker may have sent its last messages before it closed its end.
            self._on_channel(command.member)
            self._drop_channel(command.member)
        elif handle.channel.wants_to_write:
            self._loop.modify(handle.channel.sock, READ | WRITE)

    def restore_priority(self, member: str, *, ahead: bool = False) -> None:
        """Restore a worker's priority, or raise it with `ahead`. Repeats later if the kernel refuses."""
        self._restore_due_s.pop(member, None)
        handle = self._handles[member]
        change = worker_limits.ahead if ahead else worker_limits.restore
        if handle.running and not change(handle.process.pid):
            self._restore_due_s[member] = time.monotonic() + _RESTORE_AGAIN_S
        if not ahead:
            self._spec.source.refill()

    def pid(self, member: str) -> int:
        """Return the process id. Raises ProcessLookupError, an OSError, if the worker has ended."""
        handle = self._handles.get(member)
        if handle is None or not handle.running:
            raise ProcessLookupError(f"{member} has ended")
        return handle.process.pid

    def seen(self) -> Mapping[str, WatchedWorker]:
        """Return the running workers whose beacons have arrived."""
        return {
            member: WatchedWorker(pid=handle.process.pid, watcher=handle.watcher)
            for member, handle in self._handles.items()
            if handle.running and handle.watcher is not None
        }

    def is_stopped(self, member: str) -> bool:
        """Return True if the worker is stopped or has ended."""
        try:
            return state_of(self.pid(member)) in ("T", "Z", "X", "")
        except ProcessLookupError:
            return True

    def signal(self, member: str, number: int) -> None:
        """Send a signal to the worker's process group, if it still runs."""
        handle = self._handles.get(member)
        if handle is not None and handle.running:
            handle.process.signal_group(number)

    def signal_all(self, number: int) -> None:
        """Send a signal to the process groups of all running workers."""
        for member in self._handles:
            self.signal(member, number)

    def hear_all(self) -> None:
        """Read all messages that have arrived.

        A dead worker may have sent the cause of its death; the others may have sent which state they hold.
        """
        for member in [m for m, handle in self._handles.items() if handle.channel is not None]:
            self._on_channel(member)

    def objection(self, member: str) -> str | None:
        """Return why the worker is refused, or None if it may connect."""
        handle = self._handles.get(member)
        if handle is None or not handle.running:
            return f"{member} is no worker that this agent waits for"
        if handle.channel is not None or handle.watcher is not None:  # the watcher came with the first process's hello
            return (
                f"another process has come as {member} of this job. Of the processes of a worker one calls "
                "elastrain.init(): start the others behind that call, or without the variables ELASTRAIN_*"
            )
        return None

    def admit(self, member: str, sock: Connection) -> str | None:
        """Take an authenticated connection of a worker. Returns why it is refused, or None."""
        if (objection := self.objection(member)) is not None:
            return objection
        handle = self._handles[member]
        handle.channel = LineSocket(sock)
        self._loop.register(sock, lambda _events: self._on_channel(member))
        return None

    def close(self) -> None:
        """Kill remaining workers and close all resources, whatever has happened before."""
        self._spec.source.close()
        for handle in self._handles.values():
            if handle.running:  # only if the loop failed, or if the kernel does not end the process
                handle.process.signal_group(signal.SIGKILL)
            if handle.watcher is not None:
                handle.watcher.cancel()
            if handle.channel is not None:
                handle.channel.close()
        for handle in self._handles.values():
            if not handle.running:
                handle.process.close()
        # Closed last, because watcher threads write to it until they are cancelled.
        os.close(self._wake)

    def _on_wake(self) -> None:
        os.eventfd_read(self._wake)
        while self._mutex_deaths:
            member, at_s = self._mutex_deaths.popleft()
            self.hear_all()
            self._happen(ev.MutexBroke(member=member, at_s=at_s))

    def _on_process_end(self, member: str) -> None:
        handle = self._handles[member]
        died_s = time.monotonic()
        self.hear_all()
        self._happen(ev.WorkerDied(member=member, source="pidfd", at_s=died_s))
        self._loop.unregister(handle.process.pidfd)
        if handle.process.session is not None:
            self._guardian.unwatch(handle.process.session)
        exit_code = handle.process.reap()
        handle.running = False
        self._drop_channel(member)
        self._happen(ev.WorkerExited(member=member, exit_code=exit_code))

    def _on_channel(self, member: str) -> None:
        handle = self._handles[member]
        channel = handle.channel
        if channel is None:
            return
        alive = channel.flush()
        try:
            received = channel.receive()
            self._hear(member, received)
        except BadMessageError as problem:
            self._happen(ev.WorkerMisspoke(member=member, problem=str(problem)))
            self._drop_channel(member)
            return
        if received.closed or not alive:
            self._drop_channel(member)
        elif handle.channel is not None:
            self._loop.modify(channel.sock, READ | WRITE * channel.wants_to_write)

    def _hear(self, member: str, received: Received) -> None:
        try:
            for line in received.lines:
                message = FROM_WORKER.decode(line)
                if isinstance(message, Hello) and received.fds and self._handles[member].watcher is None:
                    self._watch_beacon(member, received.fds[0])
                self._happen(ev.WorkerSpoke(member=member, message=message))
        finally:
            for fd in received.fds:
                os.close(fd)

    def _watch_beacon(self, member: str, fd: int) -> None:
        def on_death(at_s: float) -> None:
            self._mutex_deaths.append((member, at_s))
            os.eventfd_write(self._wake, 1)

        try:
            self._handles[member].watcher = watch_beacon(fd, on_death)
        except Exception as error:  # any error means that the worker sent no valid beacon
            raise BadMessageError(f"its beacon is not usable: {error}") from error

    def _drop_channel(self, member: str) -> None:
        handle = self._handles[member]
        if handle.channel is None:
            return
        self._loop.unregister(handle.channel.sock)
        handle.channel.close()
        handle.channel = None
        self._happen(ev.ChannelClosed(member=member))
