"""The agent: one event loop that owns a node's workers and carries out what `core` decides.

It holds the descriptors (workers in `worker_processes`, other agents in `peer_agents`, the store in `registry`), the
signals and the operator's socket. It decides nothing and never imports the user's code.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Protocol

from elastrain.agent_messages import Stop
from elastrain.errors import ConfigError
from elastrain.launcher import rundir, worker_start
from elastrain.launcher.control_server import ControlServer
from elastrain.launcher.core import Core
from elastrain.launcher.core import events as ev
from elastrain.launcher.door import Door, listen_abstract, workers_handshake
from elastrain.launcher.events import EventLog
from elastrain.launcher.faults import Fault, make_fault
from elastrain.launcher.guardian import Guardian
from elastrain.launcher.loop import Loop
from elastrain.launcher.notices import Over
from elastrain.launcher.operator_messages import Answer, AskFault, Request
from elastrain.launcher.peer_agents import AgentPort, ClusterAccess, PeerAgents
from elastrain.launcher.registry import LoneRegistry, Registry
from elastrain.launcher.rundir import RunDir
from elastrain.launcher.say import say
from elastrain.launcher.state import describe
from elastrain.launcher.store import Store
from elastrain.launcher.values import (
    Command,
    End,
    FullPriority,
    JobConfig,
    Kill,
    KillNode,
    Log,
    Propose,
    PutBegun,
    PutRecord,
    PutRoster,
    PutSpec,
    Start,
    TakeNumber,
    Tell,
    TellNodes,
)
from elastrain.launcher.worker_processes import WorkerProcesses, WorkerSpec
from elastrain.launcher.worker_start import Logs, Script, WorkerEnvironment

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_STATE_EVERY_S = 5.0
"""So that `status` knows about where a run was whose agent was killed."""
_GIVE_UP_S = 10.0
_CONCERNS_ALL = ("view", "parked", "unparked", "store_away", "store_back")


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """What the agent needs beside the job's own configuration."""

    job: str
    script: Script
    logs: Logs
    host: str = "127.0.0.1"
    """This node's address for other nodes."""
    one_host: bool = True
    """All nodes are on this machine: members talk over shared memory."""
    stop_grace_s: float = 5.0
    """How long workers may take to end after SIGTERM, before SIGKILL."""
    key_ttl_s: float
    """How long the keys of a job of several nodes outlive its last agent, if that could not take them along."""


class _Timed(Protocol):
    def next_deadline_s(self) -> float | None: ...

    def on_tick(self, now: float) -> None: ...


class Agent:
    """`run` runs the node's part of the job to its end. For the main thread of a process: it takes over the signals."""

    def __init__(
        self,
        config: AgentConfig,
        job: JobConfig,
        run: RunDir,
        store: Store,
        guardian: Guardian,
        faults: Sequence[Fault] = (),
    ) -> None:
        self._config = config
        self._job = job
        self._run = run
        self._store = store
        self._guardian = guardian
        self._secret = run.secret.read_bytes()
        self._core = Core(job, faults, random.choice)
        self._log = EventLog(run.events, f"agent:{job.node}")
        self._commands: deque[Command] = deque()
        self._busy = False
        self._end: End | None = None
        self._kill_due_s: float | None = None
        self._give_up_s: float | None = None
        self._state_stale = False
        self._state_written_s = 0.0
        self._open = ExitStack()
        self._loop = Loop()
        self._peers: PeerAgents | None = None

    def run(self) -> End:
        """Start the workers, serve them until the job has ended, leave nothing behind. Raises ConfigError."""
        with self._open:
            self._open.callback(self._leave_nothing)
            self._take_signals()
            self._open_up()
            self._log.write("start", job=self._config.job, workers=self._job.workers, pid=os.getpid())
            if not self._job.alone:
                self._registry.put_record(self._record)
            self._happen(ev.NodeRegistered(record=self._record))
            self._write_state(time.monotonic())  # plain scripts may say nothing for ever
            while not self._over():
                self._turn()
        assert self._end is not None
        return self._end

    # ---- the beginning

    def _take_signals(self) -> None:
        self._signals, signals_in = socket.socketpair()
        for sock in (self._signals, signals_in):
            sock.setblocking(False)
            self._open.callback(sock.close)
        for number in _STOP_SIGNALS:
            self._open.callback(signal.signal, number, signal.signal(number, _noted_elsewhere))
        self._open.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(signals_in.fileno(), warn_on_full_buffer=False))
        self._loop.serve(self._signals, self._on_signal)

    def _open_up(self) -> None:
        job = self._config.job
        address = worker_start.agent_address(job, None if self._job.alone else self._job.node)
        self._record = replace(self._core.cluster.peers.record, master_port=_free_port())
        refused = lambda reason: self._log.write("connection_refused", reason=reason)  # noqa: E731
        listener = listen_abstract(address)
        handshake = lambda: workers_handshake(self._secret, job)  # noqa: E731
        self._workers = WorkerProcesses(self._loop, self._log, self._worker_spec(address), self._guardian, self._happen)
        self._door = Door(self._loop, listener, handshake, self._workers.admit, refused)
        self._open.callback(self._door.close)
        server = ControlServer(self._loop, rundir.listen(self._run), self._answer)
        self._open.callback(server.close)
        self._guardian.remove(self._run.control)
        self._registry: Registry = LoneRegistry(self._store, job)
        if not self._job.alone:
            access = ClusterAccess(
                job=job,
                secret=self._secret,
                store=self._store,
                host=self._config.host,
                key_ttl_s=self._config.key_ttl_s,
            )
            port = AgentPort(
                happen=self._happen,
                hear_workers=self._workers.hear_all,
                nodes=lambda: self._core.cluster.peers.nodes,
            )
            self._peers = PeerAgents(self._loop, self._log, access, self._record, port)
            self._open.callback(self._peers.close)
            self._record, self._registry = self._peers.record, self._peers.registry
        # The first to close: workers end before anything that they use.
        self._open.callback(self._workers.close)

    def _worker_spec(self, address: str) -> WorkerSpec:
        common = WorkerEnvironment(
            job=self._config.job,
            node=self._job.node,
            agent=address,
            run_dir=self._run.journals,
            secret_file=self._run.secret,
            workers=self._job.workers,
            max_restarts=self._job.max_restarts,
            armed=self._job.armed,
            host=None if self._config.one_host else self._config.host,
            master=self._master,
            mark=self._guardian.mark,
        )
        return WorkerSpec(script=self._config.script, common=common, logs=self._config.logs)

    def _master(self) -> tuple[str, int]:
        """Where scripts that call init_process_group themselves meet: on the roster's first node."""
        first = self._core.cluster.roster.nodes[0] if self._core.cluster.roster is not None else self._record
        host = first.endpoint.rpartition(":")[0].strip("[]")
        return host or "127.0.0.1", first.master_port

    # ---- the loop

    def _turn(self) -> None:
        timed: list[_Timed] = [self._door, self._workers, self._registry, *([self._peers] if self._peers else [])]
        due = [self._kill_due_s, self._give_up_s, self._core.deadlines.next_s(), *(t.next_deadline_s() for t in timed)]
        self._loop.turn(min((d for d in due if d is not None), default=None))
        now = time.monotonic()
        for one in timed:
            one.on_tick(now)
        self._do(self._core.on_tick(now))
        if self._kill_due_s is not None and self._kill_due_s <= now:
            self._kill_all()
        # After the members were told of a view: they wait for that.
        if self._state_stale or now - self._state_written_s > _STATE_EVERY_S:
            self._write_state(now)

    def _write_state(self, now: float) -> None:
        self._state_stale, self._state_written_s = False, now
        try:
            self._run.write_state(describe(self._core, self._config.job, now))
        except OSError as error:  # a full disk must not end a job
            self._log.write("state_not_written", reason=str(error))

    def _over(self) -> bool:
        if self._end is None:
            return False
        given_up = self._give_up_s is not None and self._give_up_s <= time.monotonic()
        return given_up or not self._workers.running

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

    def _happen(self, event: ev.Event) -> None:
        self._do(self._core.handle(event, time.monotonic()))

    def _carry_out(self, command: Command) -> None:
        match command:
            case Tell():
                self._workers.tell(command)
            case TellNodes():
                if self._peers is not None:
                    self._peers.tell(command.message, command.node)
            case Log():
                self._log.write(command.event, **command.fields)
                if command.say and not self._is_said_elsewhere(command):
                    say(command.say)
                self._state_stale = self._state_stale or command.event == "view"
            case Kill():
                self._log.write("kill", member=command.member, reason=command.reason)
                say(command.reason)
                self._workers.signal(command.member, signal.SIGKILL)
            case KillNode():
                self._kill_node(command)
            case FullPriority():
                self._workers.restore_priority(command.member, ahead=command.ahead)
            case Start():
                if self._end is None:
                    self._workers.start(command)
            case End():
                self._begin_end(command)
            case _:
                self._ask_store(command)

    def _is_said_elsewhere(self, log: Log) -> bool:
        """Simulated nodes share a screen: of what concerns all, the first node that answers tells."""
        if not self._config.one_host or self._job.alone or log.event not in _CONCERNS_ALL:
            return False
        cluster, me = self._core.cluster, self._job.node
        # A node that has only just come reaches nobody yet.
        takes_part = cluster.view is None or any(member.node == me for member in cluster.members)
        return not takes_part or cluster.first_answering_node() != me

    def _ask_store(self, command: Propose | PutSpec | PutRoster | PutBegun | PutRecord | TakeNumber) -> None:
        match command:
            case Propose():
                self._registry.propose(command.view, lambda view: self._heard(ev.ProposalAnswered(view=view)))
            case PutSpec():
                self._registry.put_spec(command.spec, lambda spec: self._heard(ev.SpecStands(spec=spec)))
            case PutRoster():
                self._registry.put_roster(command.roster, lambda roster: self._heard(ev.RosterStands(roster=roster)))
            case PutBegun():
                self._registry.put_begun()
            case PutRecord():
                self._registry.put_record(command.record)
            case TakeNumber():
                at_least = self._core.cluster.first_unused_number()
                self._registry.take_number(at_least, lambda number: self._heard(ev.NumberTaken(number=number)))

    def _heard(self, answer: ev.Event) -> None:
        """What follows from a command's answer comes before the commands behind it."""
        self._commands.extendleft(reversed(self._core.handle(answer, time.monotonic())))
        self._do(())

    def _begin_end(self, end: End) -> None:
        self._end = end
        self._log.write("end", exit_code=end.code, reason=end.sentence)
        if end.job_is_over:
            self._registry.put_end(Over(code=end.code, sentence=end.sentence, detail=end.detail))
        elif end.code == 0:
            self._registry.put_left(self._job.incarnation)
        running = self._workers.running
        for member in running:
            self._workers.tell(Tell(member=member, message=Stop(reason=end.sentence)))
            self._workers.signal(member, signal.SIGTERM)
        if running:
            self._kill_due_s = time.monotonic() + self._config.stop_grace_s

    def _kill_all(self) -> None:
        self._kill_due_s = None
        if self._give_up_s is None:
            self._give_up_s = time.monotonic() + _GIVE_UP_S
        self._workers.signal_all(signal.SIGKILL)

    def _kill_node(self, command: KillNode) -> None:
        self._log.write("kill_node", node=self._job.node, reason=command.reason)
        say(command.reason)
        self._workers.signal_all(signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    # ---- what happens

    def _on_signal(self) -> None:
        for number in self._signals.recv(64):
            if number in _STOP_SIGNALS:
                self._on_stop_signal(signal.Signals(number))

    def _on_stop_signal(self, number: signal.Signals) -> None:
        if self._end is not None:  # asked twice: no more grace
            self._kill_all()
        self._do(
            self._core.handle(ev.StopAsked(code=128 + number, sentence=f"stopped by {number.name}"), time.monotonic())
        )

    # ---- the operator

    def _answer(self, request: Request) -> Answer:
        if not isinstance(request, AskFault):
            return Answer(ok=True, state=describe(self._core, self._config.job, time.monotonic()))
        try:
            fault = make_fault(request.kind, request.target, request.at)
        except ConfigError as error:
            return Answer(ok=False, sentence=str(error))
        sentence, taken, commands = self._core.inject(fault)
        self._do(commands)
        return Answer(ok=taken, sentence=sentence)

    # ---- the end

    def _leave_nothing(self) -> None:
        self._run.control.unlink(missing_ok=True)
        if self._run.owns_secret:
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
