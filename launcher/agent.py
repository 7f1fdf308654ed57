"""The agent: one event loop that owns a node's workers and carries out what `core` decides.

It starts and ends processes, listens to them (pidfd, robust mutex, channel), talks to the store and to the operator. It
decides nothing and never imports the user's code.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from elastrain.comm.liveness import Watcher, watch_beacon
from elastrain.errors import ConfigError
from elastrain.launcher import priority, rundir, workers
from elastrain.launcher.channel import Channel, Received
from elastrain.launcher.core import Core
from elastrain.launcher.desk import OperatorDesk
from elastrain.launcher.door import Door, listen_abstract, workers_handshake
from elastrain.launcher.events import EventLog
from elastrain.launcher.faults import Fault, make_fault
from elastrain.launcher.loop import Loop
from elastrain.launcher.messages import BadMessageError, Hello, parse
from elastrain.launcher.rundir import RunDir
from elastrain.launcher.state import describe
from elastrain.launcher.store import Store
from elastrain.launcher.values import (
    Command,
    End,
    FullPriority,
    JobConfig,
    Kill,
    Log,
    Propose,
    PutSpec,
    Start,
    Tell,
)
from elastrain.launcher.views import JobKeys
from elastrain.launcher.workers import Logs, Script, Surroundings, WorkerProcess

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_RESTORE_AGAIN_S = 0.2
_STATE_EVERY_S = 5.0
"""So that `status` knows about where a run was whose agent was killed."""
_GIVE_UP_S = 10.0


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """What the agent needs beside the job's own configuration."""

    job: str
    script: Script
    logs: Logs
    stop_grace_s: float = 5.0
    """How long workers may take to end after SIGTERM, before SIGKILL."""


@dataclass(kw_only=True)
class _Seat:
    """The agent's hold on one worker."""

    process: WorkerProcess
    channel: Channel | None = None
    watcher: Watcher | None = None
    running: bool = True


class Agent:
    """`run` runs the job to its end. For the main thread of a process of its own: it takes over the signals."""

    def __init__(
        self, config: AgentConfig, job: JobConfig, run: RunDir, store: Store, faults: Sequence[Fault] = ()
    ) -> None:
        self._config = config
        self._run = run
        self._core = Core(job, faults, random.choice)
        self._keys = JobKeys(store, config.job)
        self._log = EventLog(run.events, f"agent:{job.node}")
        self._seats: dict[str, _Seat] = {}
        self._commands: deque[Command] = deque()
        self._busy = False
        self._end: End | None = None
        self._kill_due_s: float | None = None
        self._give_up_s: float | None = None
        # Filled by watcher threads; the eventfd wakes the loop.
        self._mutex_deaths: deque[tuple[str, float]] = deque()
        self._restore_due_s: dict[str, float] = {}
        self._state_stale = False
        self._state_written_s = 0.0
        self._open = ExitStack()
        self._loop = Loop()
        self._common = Surroundings(
            job=config.job,
            node=job.node,
            run_dir=run.path,
            secret_file=run.secret,
            workers=job.workers,
            max_restarts=job.max_restarts,
            armed=job.armed,
            master_port=_free_port(),
        )

    def run(self) -> End:
        """Start the workers, serve them until the job has ended, leave nothing behind. Raises ConfigError."""
        with self._open:
            self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            # The last to close: watcher threads write to it until they are cancelled.
            self._open.callback(os.close, self._wake)
            self._open.callback(self._leave_nothing)
            self._take_signals()
            self._listen()
            self._log.write("start", job=self._config.job, workers=self._core.config.workers)
            self._do(self._core.begin())
            while not self._over():
                self._turn()
        assert self._end is not None
        return self._end

    # ---- the loop

    def _take_signals(self) -> None:
        self._signals, signals_in = socket.socketpair()
        for sock in (self._signals, signals_in):
            sock.setblocking(False)
            self._open.callback(sock.close)
        for number in _STOP_SIGNALS:
            self._open.callback(signal.signal, number, signal.signal(number, _noted_elsewhere))
        self._open.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(signals_in.fileno(), warn_on_full_buffer=False))
        self._loop.serve(self._signals, self._on_signal)

    def _listen(self) -> None:
        self._loop.serve(self._wake, self._on_wake)
        secret, job = self._run.secret.read_bytes(), self._config.job
        self._door = Door(
            self._loop,
            listen_abstract(workers.agent_address(job)),
            lambda: workers_handshake(secret, job),
            self._admit,
            lambda reason: self._log.write("connection_refused", reason=reason),
        )
        self._open.callback(self._door.close)
        desk = OperatorDesk(self._loop, rundir.listen(self._run), self._answer)
        self._open.callback(desk.close)

    def _turn(self) -> None:
        due = [self._core.next_deadline_s(), self._door.next_deadline_s(), self._kill_due_s, self._give_up_s]
        self._loop.turn(min((d for d in [*due, *self._restore_due_s.values()] if d is not None), default=None))
        now = time.monotonic()
        self._door.on_tick(now)
        self._do(self._core.on_tick(now))
        for member in [m for m, due_s in self._restore_due_s.items() if due_s <= now]:
            self._restore_priority(member)
        if self._kill_due_s is not None and self._kill_due_s <= now:
            self._kill_all()
        # After the members were told of a view: they wait for that.
        if self._state_stale or now - self._state_written_s > _STATE_EVERY_S:
            self._write_state(now)

    def _write_state(self, now: float) -> None:
        self._state_stale, self._state_written_s = False, now
        try:
            self._run.write_state(describe(self._core, self._config.job))
        except OSError as error:  # a full disk must not end a job
            self._log.write("state_not_written", reason=str(error))

    def _over(self) -> bool:
        if self._end is None:
            return False
        given_up = self._give_up_s is not None and self._give_up_s <= time.monotonic()
        return given_up or not any(seat.running for seat in self._seats.values())

    # ---- carrying out

    def _do(self, commands: Sequence[Command]) -> None:
        self._commands.extend(commands)
        if self._busy:
            return
        self._busy = True
        try:
            while self._commands:
                self._carry_out(self._commands.popleft())
        finally:
            self._busy = False

    def _carry_out(self, command: Command) -> None:
        match command:
            case Propose():
                newest = self._keys.put_view(command.view)
                self._commands.extendleft(reversed(self._core.on_view(newest)))
                self._state_stale = True
            case Tell():
                self._tell(command)
            case Log():
                self._log.write(command.event, **command.fields)
                if command.say:
                    _say(command.say)
            case Kill():
                self._log.write("kill", member=command.member, reason=command.reason)
                _say(command.reason)
                self._signal(command.member, signal.SIGKILL)
            case FullPriority():
                self._restore_priority(command.member)
            case PutSpec():
                self._keys.put_spec(command.spec)
            case Start():
                self._start(command)
            case End():
                self._begin_end(command)

    def _start(self, command: Start) -> None:
        if self._end is not None:
            return
        try:
            process = workers.start(command, self._config.script, self._common, self._config.logs)
        except OSError as error:
            self._do(self._core.on_start_failed(command.member, str(error)))
            return
        self._seats[command.member] = _Seat(process=process)
        self._core.workers[command.member].pid = process.pid
        self._log.write("worker_start", member=command.member, pid=process.pid, slot=command.slot)
        self._loop.serve(process.pidfd, lambda: self._on_process_end(command.member))

    def _tell(self, command: Tell) -> None:
        seat = self._seats.get(command.member)
        if seat is None or seat.channel is None:
            return
        if not seat.channel.send(command.message):
            # It may have said its last words before it closed its end.
            self._on_channel(command.member)
            self._drop_channel(command.member)
        elif seat.channel.wants_to_write:
            self._loop.want_write(seat.channel.sock, True)

    def _restore_priority(self, member: str) -> None:
        self._restore_due_s.pop(member, None)
        seat = self._seats[member]
        if seat.running and not priority.restore(seat.process.pid):
            self._restore_due_s[member] = time.monotonic() + _RESTORE_AGAIN_S

    def _signal(self, member: str, number: int) -> None:
        seat = self._seats.get(member)
        if seat is not None and seat.running:
            seat.process.signal_group(number)

    def _begin_end(self, end: End) -> None:
        self._end = end
        self._log.write("end", exit_code=end.code, reason=end.sentence)
        running = [member for member, seat in self._seats.items() if seat.running]
        for member in running:
            self._tell(Tell(member=member, message={"type": "stop", "reason": end.sentence}))
            self._signal(member, signal.SIGTERM)
        if running:
            self._kill_due_s = time.monotonic() + self._config.stop_grace_s

    def _kill_all(self) -> None:
        self._kill_due_s = None
        if self._give_up_s is None:
            self._give_up_s = time.monotonic() + _GIVE_UP_S
        for member in self._seats:
            self._signal(member, signal.SIGKILL)

    # ---- what happens

    def _on_signal(self) -> None:
        for number in self._signals.recv(64):
            if number in _STOP_SIGNALS:
                self._on_stop_signal(signal.Signals(number))

    def _on_stop_signal(self, number: signal.Signals) -> None:
        if self._end is not None:  # asked twice: no more grace
            self._kill_all()
        self._do(self._core.stop(128 + number, f"stopped by {number.name}"))

    def _on_wake(self) -> None:
        os.eventfd_read(self._wake)
        while self._mutex_deaths:
            member, at_s = self._mutex_deaths.popleft()
            # Who has finished lets its mutex go in peace; its process ends later.
            if not self._core.workers[member].finished:
                self._died(member, "mutex", at_s)

    def _on_process_end(self, member: str) -> None:
        seat = self._seats[member]
        self._died(member, "pidfd", time.monotonic())
        self._loop.drop(seat.process.pidfd)
        exit_code = seat.process.reap()
        seat.running = False
        self._drop_channel(member)
        self._do(self._core.on_exit(member, exit_code, time.monotonic()))

    def _died(self, member: str, source: str, at_s: float) -> None:
        # First all that was said before: by the dead, why; by the others, who holds what by now.
        for other in [m for m, seat in self._seats.items() if seat.channel is not None]:
            self._on_channel(other)
        self._do(self._core.on_death(member, source, at_s, time.monotonic()))

    def _admit(self, member: str, sock: socket.socket) -> str | None:
        seat = self._seats.get(member)
        if seat is None or not seat.running or seat.channel is not None:
            return f"{member} is no worker that this agent waits for"
        seat.channel = Channel(sock)
        self._loop.serve(sock, lambda: self._on_channel(member))
        return None

    def _on_channel(self, member: str) -> None:
        seat = self._seats[member]
        channel = seat.channel
        if channel is None:
            return
        alive = channel.flush()
        try:
            received = channel.receive()
            self._hear(member, received)
        except BadMessageError as problem:
            self._do(self._core.on_bad_message(member, str(problem)))
            self._drop_channel(member)
            return
        if received.closed or not alive:
            self._drop_channel(member)
        elif seat.channel is not None:
            self._loop.want_write(channel.sock, channel.wants_to_write)

    def _hear(self, member: str, received: Received) -> None:
        try:
            for line in received.lines:
                message = parse(line)
                if isinstance(message, Hello) and received.fds and self._seats[member].watcher is None:
                    self._watch_beacon(member, received.fds[0])
                self._do(self._core.on_message(member, message, time.monotonic()))
        finally:
            for fd in received.fds:
                os.close(fd)

    def _watch_beacon(self, member: str, fd: int) -> None:
        def on_death(at_s: float) -> None:
            self._mutex_deaths.append((member, at_s))
            os.eventfd_write(self._wake, 1)

        try:
            self._seats[member].watcher = watch_beacon(fd, on_death)
        except Exception as error:  # a descriptor that is no beacon is the worker's fault, whatever it makes us raise
            raise BadMessageError(f"its beacon is not usable: {error}") from error

    def _drop_channel(self, member: str) -> None:
        seat = self._seats[member]
        if seat.channel is None:
            return
        self._loop.drop(seat.channel.sock)
        seat.channel.close()
        seat.channel = None
        self._do(self._core.on_channel_closed(member, time.monotonic()))

    # ---- the operator

    def _answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if request["type"] == "status":
            return {"ok": True, "state": describe(self._core, self._config.job)}
        if request["type"] != "inject":
            return {"ok": False, "sentence": f"this agent does not know {request['type']!r}"}
        try:
            at = request.get("at")
            fault = make_fault(str(request.get("class")), str(request.get("target")), None if at is None else str(at))
        except ConfigError as error:
            return {"ok": False, "sentence": str(error)}
        sentence, taken, commands = self._core.inject(fault)
        self._do(commands)
        return {"ok": taken, "sentence": sentence}

    # ---- the end

    def _leave_nothing(self) -> None:
        for seat in self._seats.values():
            if seat.running:  # only if the loop itself failed, or the kernel does not let go of the process
                seat.process.signal_group(signal.SIGKILL)
            if seat.watcher is not None:
                seat.watcher.cancel()
            if seat.channel is not None:
                seat.channel.close()
        for seat in self._seats.values():
            if not seat.running:
                seat.process.close()
        self._run.control.unlink(missing_ok=True)
        self._run.secret.unlink(missing_ok=True)
        self._write_state(time.monotonic())
        self._log.close()
        self._loop.close()


def _free_port() -> int:
    """A port for scripts that call init_process_group themselves, as under torchrun."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _noted_elsewhere(number: int, frame: object) -> None:
    """The wake-up descriptor has told the loop; this handler only keeps the default action away."""


def _say(text: str) -> None:
    print(f"elastrain: {text}", file=sys.stderr, flush=True)
