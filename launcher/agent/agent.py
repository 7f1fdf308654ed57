"""The agent: one event loop that owns a node's workers and carries out what `core` decides.

It connects its parts (workers in `worker_processes`, other agents in `peer_agents`, the store in `registry`), runs the
loop, and answers the operator. It makes no decisions and never imports the user's code.
"""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Protocol

from elastrain.base.checkpoint_settings import CheckpointOptions
from elastrain.base.environment import scope
from elastrain.base.event_loop import EventLoop
from elastrain.comm.wire.acceptor import Acceptor
from elastrain.comm.wire.ports import bind_within
from elastrain.errors import ConfigError
from elastrain.launcher.agent import node_cache, worker_start
from elastrain.launcher.agent.adopted import WorkerSource
from elastrain.launcher.agent.command_runner import CommandRunner, NodeParts
from elastrain.launcher.agent.control_server import ControlServer
from elastrain.launcher.agent.guardian import Guardian
from elastrain.launcher.agent.guardian_watch import GuardianWatch
from elastrain.launcher.agent.node_cache import CompileCache
from elastrain.launcher.agent.node_end import NodeEnd
from elastrain.launcher.agent.run_state import StateFile, describe
from elastrain.launcher.agent.strikes import Strikes
from elastrain.launcher.agent.worker_monitor import WorkerMonitor
from elastrain.launcher.agent.worker_processes import WorkerProcesses, WorkerSpec
from elastrain.launcher.agent.worker_start import Logs, WorkerEnvironment, WorkerWish
from elastrain.launcher.core import Core
from elastrain.launcher.core import agent_events as ev
from elastrain.launcher.faults import grammar
from elastrain.launcher.faults.fault import Fault
from elastrain.launcher.nodes.door import DiskDoor, listen_abstract, open_door, workers_handshake
from elastrain.launcher.nodes.peer_agents import AgentPort, ClusterAccess, PeerAgents
from elastrain.launcher.shared import rundir
from elastrain.launcher.shared.job_values import End, JobConfig
from elastrain.launcher.shared.operator_messages import Answer, AskFault, AskStop, Request
from elastrain.launcher.shared.places import NodeHistory
from elastrain.launcher.shared.process_environment import StopSignals
from elastrain.launcher.shared.rundir import EventLog, RunDir
from elastrain.launcher.store.lone_registry import LoneRegistry
from elastrain.launcher.store.port import Store
from elastrain.launcher.store.registry import Registry


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """Configuration of the agent beside that of the job."""

    job: str
    settings: JobConfig
    """Configuration of the job, with its current life."""
    run: RunDir
    source: WorkerSource
    logs: Logs
    wish: WorkerWish
    checkpoints: CheckpointOptions | None = None
    host: str = "127.0.0.1"
    """This node's address for other nodes."""
    one_host: bool = True
    """True if all nodes are on this machine, so that members communicate over shared memory."""
    stop_grace_s: float = 5.0
    """Seconds from SIGTERM to SIGKILL for workers that must end."""
    settle_s: float = 0.0
    """Seconds for which a store with little history is left to nodes that may know the job."""
    key_ttl_s: float
    """Seconds that the keys of a job of several nodes live if its agents were killed before they could delete them."""

    @property
    def scope(self) -> str:
        """Name of this life in store keys, handshakes and addresses."""
        return scope(self.job, self.settings.life.number)


class _Timed(Protocol):
    def next_deadline_s(self) -> float | None: ...

    def on_tick(self, now: float) -> None: ...


class Agent:
    """The agent of a node. `run` must be called in the main thread, because it takes over the signals."""

    def __init__(self, config: AgentConfig, store: Store, guardian: Guardian, faults: Sequence[Fault] = ()) -> None:
        self._config, self._store, self._guardian = config, store, guardian
        self._core = Core(config.settings, faults, random.choice)
        self._record = replace(self._core.cluster.peers.record, master_port=_free_port(config.wish.ports))
        self._log = EventLog(config.run.events, f"agent:{config.settings.node}")
        self._state = StateFile(config.run, self._log, self._describe)
        self._open = ExitStack()
        self._loop = EventLoop()

    @property
    def first_unused_member(self) -> int:
        """First number that no member of this life has, as far as this agent knows."""
        return self._core.cluster.first_unused_number()

    @property
    def history(self) -> NodeHistory:
        """Failures that this agent knows: of devices, and of its own workers."""
        cluster = self._core.cluster
        return NodeHistory(device_failures=(*cluster.devices.known,), losses_s=(*cluster.quarantine.losses_s,))

    def run(self) -> End:
        """Start the workers, serve them until the job has ended, and clean up. Raises ConfigError."""
        settings = self._config.settings
        with self._open:
            self._open.callback(self._leave_nothing)
            self._take_signals()
            self._open_up()
            self._log.write(
                "start",
                job=self._config.job,
                workers=settings.workers,
                pid=os.getpid(),
                logs=str(self._config.logs.folder),
                **self._life(),
            )
            if not settings.alone:
                self._parts.registry.put_record(self._record)
            self._happen(ev.NodeRegistered(record=self._record, settle_s=self._config.settle_s))
            self._state.write(time.monotonic())  # plain scripts may never send a message
            while not self._parts.end.is_over:
                self._turn()
        assert self._parts.end.end is not None
        return self._parts.end.end

    def _life(self) -> dict[str, int]:
        """Return the fields of the event log about the life that begins; none for the first one."""
        life = self._config.settings.life
        return {"life": life.number, "step": life.step} if life.number > 1 else {}

    def _take_signals(self) -> None:
        signals = StopSignals()
        self._open.callback(signals.close)
        self._loop.register(signals, lambda _events: self._on_stop_signals(signals))

    def _open_up(self) -> None:
        """Create the parts. They are closed in reverse order, so that workers end before anything that they use."""
        config, settings = self._config, self._config.settings
        address = worker_start.agent_address(config.scope, None if settings.alone else settings.node)
        listener = listen_abstract(address)
        watch = GuardianWatch(self._loop, self._guardian, lambda say: self._log.write("guardian", reason=say))
        self._open.callback(watch.close)
        workers = WorkerProcesses(self._loop, self._log, self._worker_spec(address), self._guardian, self._happen)
        door = self._serve_workers(listener, workers)
        server = ControlServer(self._loop, rundir.listen(config.run), self._answer)
        self._open.callback(server.close)
        self._guardian.remove(config.run.control)
        peers = None if settings.alone else self._join_peers(workers)
        registry: Registry = peers.registry if peers is not None else LoneRegistry(self._store, config.scope)
        self._open.callback(workers.close)
        end = NodeEnd(workers, registry, self._log, incarnation=settings.incarnation, stop_grace_s=config.stop_grace_s)
        strikes = Strikes(workers, self._log, self._guardian)
        self._open.callback(strikes.close)
        launcher = RunDir(path=config.run.whole) if config.run.whole is not None else None
        lookout = WorkerMonitor(workers.seen, self._happen, config.run.stacks)
        self._parts = NodeParts(
            workers=workers,
            lookout=lookout,
            peers=peers,
            registry=registry,
            end=end,
            strikes=strikes,
            launcher=launcher,
        )
        shares_screen = config.run.whole is not None
        self._runner = CommandRunner(self._core, self._parts, self._log, self._state, shares_screen=shares_screen)
        self._open.callback(self._runner.close)
        self._timed: list[_Timed] = [door, workers, lookout, registry, *([peers] if peers else []), end, strikes]

    def _serve_workers(self, listener: socket.socket, workers: WorkerProcesses) -> Acceptor:
        secret, job = self._config.run.secret.read_bytes(), self._config.scope
        refused = lambda reason: self._log.write("connection_refused", reason=reason)  # noqa: E731
        door = open_door(
            self._loop, listener, lambda: workers_handshake(secret, job, workers.objection), workers.admit, refused
        )
        self._open.callback(door.close)
        return door

    def _join_peers(self, workers: WorkerProcesses) -> PeerAgents:
        access = ClusterAccess(
            job=self._config.scope,
            life=self._config.settings.life,
            secret=self._config.run.secret.read_bytes(),
            store=self._store,
            host=self._config.host,
            key_ttl_s=self._config.key_ttl_s,
            ports=self._config.wish.ports,
        )
        disks = self._config.checkpoints
        port = AgentPort(
            happen=self._happen,
            hear_workers=workers.hear_all,
            nodes=lambda: self._core.cluster.peers.nodes,
            let_read=DiskDoor(
                disks.source if disks is not None else None, self._log.write, self._compile_cache().given
            ).admit,
        )
        peers = PeerAgents(self._loop, self._log, access, self._record, port)
        self._open.callback(peers.close)
        self._record = peers.record
        return peers

    def _worker_spec(self, address: str) -> WorkerSpec:
        config, settings = self._config, self._config.settings
        common = WorkerEnvironment(
            job=config.job,
            settings=settings,
            agent=address,
            run_dir=config.run.journals,
            secret_file=config.run.secret,
            host=None if config.one_host else config.host,
            master=self._master,
            mark=self._guardian.mark,
            wish=config.wish,
            compile_cache=self._compile_cache(),
            checkpoints=config.checkpoints,
        )
        return WorkerSpec(source=config.source, common=common, logs=config.logs)

    def _compile_cache(self) -> CompileCache:
        return CompileCache(
            folder=node_cache.folder_of(self._config.run),
            is_shared=self._config.wish.shares_compile_cache,
            peers=lambda: [peer.record for peer in self._core.cluster.peers.nodes.values()],
        )

    def _master(self) -> tuple[str, int]:
        """Return the host and port for scripts that call init_process_group: those of the roster's first node."""
        roster = self._core.cluster.roster
        first = roster.nodes[0] if roster is not None else self._record
        host = first.endpoint.rpartition(":")[0].strip("[]")
        return host or "127.0.0.1", first.master_port

    def _turn(self) -> None:
        due = [self._core.deadlines.next_s(), *(timed.next_deadline_s() for timed in self._timed)]
        self._loop.turn(min((due_s for due_s in due if due_s is not None), default=None))
        now = time.monotonic()
        for timed in self._timed:
            timed.on_tick(now)
        self._runner.queue.add(self._core.on_tick(now))
        # Last, because members wait for the messages sent above.
        self._state.on_tick(now)

    def _happen(self, event: ev.Event) -> None:
        self._runner.happen(event)

    def _on_stop_signals(self, signals: StopSignals) -> None:
        for number in signals.take():
            asked_before = self._core.shutdown.leaving is not None
            self._parts.end.hurry()
            self._happen(ev.StopAsked(code=128 + number, sentence=f"stopped by {number.name}"))
            if asked_before:
                self._parts.end.hurry()

    def _describe(self, now: float) -> dict[str, object]:
        return describe(self._core, self._config.job, now)

    def _answer(self, request: Request) -> Answer:
        if isinstance(request, AskFault):
            return self._inject(request)
        if isinstance(request, AskStop):
            now = time.monotonic()
            stopping = self._core.stopping
            sentence, taken, commands = stopping.drain(request.drain, now) if request.drain else stopping.stop_all(now)
            self._runner.queue.add(commands)
            return Answer(ok=taken, sentence=sentence)
        return Answer(ok=True, state=self._describe(time.monotonic()))

    def _inject(self, request: AskFault) -> Answer:
        try:
            fault = grammar.parse(request.line)
        except ConfigError as error:
            return Answer(ok=False, sentence=str(error))
        sentence, taken, commands = self._core.inject(fault, request.careful_of)
        self._runner.queue.add(commands)
        return Answer(ok=taken, sentence=sentence)

    def _leave_nothing(self) -> None:
        run = self._config.run
        run.control.unlink(missing_ok=True)
        self._state.write(time.monotonic())
        self._log.close()
        self._loop.close()


def _free_port(ports: tuple[int, int] | None) -> int:
    """Return a free port for scripts that call init_process_group themselves, as under torchrun."""
    with socket.socket() as sock:
        bind_within(sock, "127.0.0.1", ports)
        return int(sock.getsockname()[1])
