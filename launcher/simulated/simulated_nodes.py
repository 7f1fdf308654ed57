"""Several nodes simulated on this machine: one agent process each, in its own session, and an etcd for them.

With `netns`, each node also has its own network, and members use TCP as on separate hosts. The launcher restarts a lost
node, which joins as a new one, as if an operator had rebooted a machine. It makes no decisions about the job itself.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

from elastrain.base.event_loop import EventLoop
from elastrain.base.processes import die_with_parent, is_stopped, state_of
from elastrain.errors import ConfigError, ElastrainError
from elastrain.launcher.agent.control_server import ControlServer
from elastrain.launcher.agent.guardian import Guardian
from elastrain.launcher.agent.guardian_watch import GuardianWatch
from elastrain.launcher.faults import grammar
from elastrain.launcher.faults.table import CLASSES, NOT_ARMED, Carrier
from elastrain.launcher.namespaces.switch import SWITCH, SWITCH_ADDRESS, Switch, enter, lacking
from elastrain.launcher.shared import process_environment, rundir
from elastrain.launcher.shared.console import say
from elastrain.launcher.shared.job_values import End
from elastrain.launcher.shared.operator_messages import Answer, AskFault, Request
from elastrain.launcher.shared.process_environment import StopSignals
from elastrain.launcher.shared.rundir import EventLog, RunDir
from elastrain.launcher.shared.screen import keep_in
from elastrain.launcher.simulated.embedded_etcd import EmbeddedEtcd
from elastrain.launcher.simulated.infrastructure import Infrastructure
from elastrain.launcher.simulated.node_starts import (
    ALL_LOST,
    EndsOfNodes,
    NodeRestarts,
    begin,
    end_fork_server,
    hear_signals,
    signal_all,
    signal_to_go,
    start_fork_server,
)
from elastrain.launcher.start.restarts import Following, SharedLives
from elastrain.launcher.start.run_options import NodeOptions, RunOptions
from elastrain.launcher.start.start_checkpoint import held_place, newest_step
from elastrain.launcher.start.starting import count, run_node, shared_lives
from elastrain.launcher.store.etcd_config import EtcdConfig
from elastrain.launcher.store.port import StoreError, StoreUnavailableError

_STOP_AGAIN_S = 20.0
_UNKNOWN = 255
"""The exit code that `multiprocessing` reports for a process whose fork server is dead."""


def run_local_nodes(options: RunOptions, *, netns: bool) -> int:
    """Run all nodes on this machine. Returns the exit code. Raises ConfigError and NetworkError."""
    if netns and (reason := lacking()) is not None:
        raise ConfigError(f"--netns: {reason}")
    with ExitStack() as stack:
        stack.enter_context(held_place(options, is_of_simulated=True))
        # A fork server imports the agent once for all nodes, while etcd starts.
        forks = multiprocessing.get_context("forkserver")
        forks.set_forkserver_preload(["elastrain.launcher.agent.agent"])
        options = options.with_own_log_dir()
        guardian = stack.enter_context(Guardian("LAUNCHER", process_environment.without("ELASTRAIN_")))
        process_environment.mark_all_children(
            guardian.mark
        )  # etcd, the fork server, agents and their workers inherit it
        run = rundir.create(options.output.run_dir, options.job)
        stack.callback(run.secret.unlink, missing_ok=True)
        guardian.remove(run.secret)
        guardian.remove(run.path / "etcd")
        guardian.remove(Path(multiprocessing.util.get_temp_dir()))  # where the fork server listens
        switch = stack.enter_context(_switch(options, guardian)) if netns else None
        nodes = _Nodes(options, run, forks)
        stack.callback(nodes.close)
        start_fork_server()
        etcd = EmbeddedEtcd(run.path / "etcd", host=SWITCH_ADDRESS if switch else None, ports=options.wish.ports)
        stack.callback(etcd.close)
        log = EventLog(run.events, "launcher")
        stack.callback(log.close)
        stack.callback(nodes.guard(guardian, log).close)
        here, each = options.size.described, count(options.size.workers, "worker")
        keep_in(run.events)
        say(f"job {options.job}, {here} here, {each} each; run folder {run.path}")
        signals = StopSignals()
        stack.callback(signals.close)
        listener = rundir.listen(run)
        stack.callback(run.control.unlink, missing_ok=True)
        guardian.remove(run.control)  # the guardian identifies a file by its present inode
        return nodes.run(Infrastructure(etcd, switch, log), signals, listener)


@contextmanager
def _switch(options: RunOptions, guardian: Guardian) -> Iterator[Switch]:
    """Make the network. This process, and all that it starts later, run on the switch's host."""
    names = [_name(index) for index in range(options.size.all_nodes)]
    with Switch(options.job, names, guardian.remove_namespace) as switch:
        switch.move_to(SWITCH)
        yield switch


def _name(index: int) -> str:
    return f"node{index}"


class _Nodes:
    """The node processes, until the last one has ended."""

    def __init__(self, options: RunOptions, run: RunDir, forks: multiprocessing.context.ForkServerContext) -> None:
        self._options, self._run, self._forks = options, run, forks
        self._around: Infrastructure | None = None
        self._running: dict[str, BaseProcess] = {}
        self._restarts = NodeRestarts(options.config().restarts_allowed)
        self._ends = EndsOfNodes()
        self._dismissed: set[str] = set()
        self._lost: list[str] = []
        """Nodes that were killed and not restarted yet."""
        self._to_start: set[str] = set()
        """Nodes that were ended in order to be restarted."""
        self._stopped_by = 0
        self._loop = EventLoop()

    def guard(self, guardian: Guardian, log: EventLog) -> GuardianWatch:
        """Watch the guardian from this loop. Its messages are written to the log."""
        return GuardianWatch(self._loop, guardian, lambda say: log.write("guardian", reason=say))

    def run(self, around: Infrastructure, signals: StopSignals, listener: socket.socket) -> int:
        """Run all nodes to their end. Returns the exit code. Operators' requests arrive at `listener`."""
        self._around = around
        self._loop.register(signals, lambda _events: self._stop(signals.take()[-1:]))
        around.watch_etcd(self._loop)
        control = ControlServer(self._loop, listener, partial(answer, self._options, around))
        try:
            for index in range(self._options.size.all_nodes):
                self._start(_name(index))
            while self._running:
                self._loop.turn(around.next_deadline_s())
                around.on_tick(time.monotonic())
        finally:
            control.close()
        if self._stopped_by:
            self._ends.say_if_nothing_was(f"stopped by {signal.Signals(self._stopped_by).name}")
        return 128 + self._stopped_by if self._stopped_by else self._ends.code()

    def close(self) -> None:
        """End all nodes that still run, which happens only after an error here, and the fork server."""
        signal_all(self._running.values(), signal_to_go())
        for process in self._running.values():
            process.join(_STOP_AGAIN_S)
            process.kill()
        end_fork_server()
        self._loop.close()

    def _start(self, name: str) -> None:
        assert self._around is not None
        self._lost = [lost for lost in self._lost if lost != name]
        etcd, host = EtcdConfig(endpoints=(self._around.endpoint,)), self._around.address(name)
        run = rundir.of_node(self._run, name)
        for left in (run.control, run.state):  # left by an earlier start of this node
            left.unlink(missing_ok=True)
        is_first = name not in self._restarts.names
        node = NodeOptions(name=name, etcd=etcd, secret_file=self._run.secret, host=host, has_own_store=is_first)
        namespace = self._around.namespace(name)
        args = (self._options, node, self._run, namespace)
        again = {"again": not is_first}
        process = self._forks.Process(target=_node, args=args, kwargs=again, name=name)
        begin(process)
        self._running[name] = process
        self._loop.register(process.sentinel, lambda _events: self._on_end(name))

    def _on_end(self, name: str) -> None:
        process = self._running[name]
        self._loop.unregister(process.sentinel)
        process.join()
        if process.exitcode == _UNKNOWN and process.pid is not None and state_of(process.pid) not in ("", "Z"):
            self._wait_without_fork_server(name, process.pid)
        else:
            self._on_exit(name, process.exitcode if process.exitcode is not None else 1)

    def _wait_without_fork_server(self, name: str, pid: int) -> None:
        """Wait for a node whose fork server is dead. Its sentinel does not show the end, but its pidfd does."""
        self._ends.say_once("the process that nodes are started from was killed: all nodes end")
        ended = os.pidfd_open(pid)

        def on_end(_events: int) -> None:
            self._loop.unregister(ended)
            os.close(ended)
            self._on_exit(name, 1)

        self._loop.register(ended, on_end)

    def _on_exit(self, name: str, code: int) -> None:
        del self._running[name]
        if name in self._dismissed:
            return
        if name in self._to_start:
            self._to_start.remove(name)
            self._start(name)
            return
        if code >= 0:
            self._ends.add(code, name, self._run)
            self._dismiss_those_who_come_back()
            self._end_the_stopped()
            return
        rundir.of_node(self._run, name).control.unlink(missing_ok=True)
        if self._ends.codes:
            return
        self._lost.append(name)
        if self._nobody_is_inside() and self._begin_next_life():
            return
        if self._stopped_by:
            return
        if not self._running or (self._nobody_is_inside() and self._has_begun()):
            self._ends.lose_all()
            self._dismiss_those_who_come_back()
        elif self._restarts.take(name):  # other nodes continue
            self._start(name)

    def _nobody_is_inside(self) -> bool:
        """Return True if no running node is in a view: all were restarted, so the state is lost."""
        return all(name in self._restarts.names and self._is_outside(name) for name in self._running)

    def _begin_next_life(self) -> bool:
        """Begin the job's next life, because no node is left to do it. Returns False if there is none."""
        end = End(code=1, sentence=ALL_LOST, lost=True)
        following = None if self._stopped_by else self._next_life(end)
        if following is None or following.life is None:
            return False
        say(f"{end.sentence}. {following.reason}")
        for process in [self._running[name] for name in self._running]:
            self._to_start.add(process.name)
            process.kill()  # it would wait for the leases of dead nodes
        lost, self._lost = self._lost, []
        for name in [name for name in lost if self._restarts.take(name)]:
            self._start(name)
        return bool(self._running)

    def _next_life(self, end: End) -> Following | None:
        """Return the next life, or None if the job has no checkpoints or etcd does not answer."""
        if self._options.checkpoints is None:
            return None
        names = [_name(index) for index in range(self._options.size.all_nodes)]
        steps = [newest_step(self._options.on_simulated_node(name)) for name in names]
        with suppress(StoreError):
            return self._lives().begin_next(end, max((step for step in steps if step is not None), default=None))
        return None

    def _has_begun(self) -> bool:
        """Return True if a step may have been committed. Before that, restarted nodes may start the job over."""
        with suppress(StoreError):
            return self._lives().has_begun()
        return False

    def _lives(self) -> SharedLives:
        assert self._around is not None
        return shared_lives(self._options, EtcdConfig(endpoints=(self._around.endpoint,)), self._run)

    def _dismiss_those_who_come_back(self) -> None:
        """End restarted nodes if the job is over: they would wait for other nodes in vain.

        If the job ended well, only nodes outside the view are ended. The others end when their workers leave their
        scripts.
        """
        if not self._ends.job_is_over:
            return
        coming = self._restarts.names & self._running.keys() - self._dismissed
        for name in coming if max(self._ends.codes) else filter(self._is_outside, coming):
            self._dismissed.add(name)
            signal_all([self._running[name]], signal_to_go())

    def _end_the_stopped(self) -> None:
        """End nodes that a fault has suspended, once the job is over. They would never learn about its end."""
        for process in self._running.values() if self._ends.job_is_over else ():
            if process.pid is not None and is_stopped(process.pid):
                process.kill()  # its guardian ends its workers

    def _is_outside(self, name: str) -> bool:
        """Return True if the node has not joined a view since its restart."""
        try:
            return bool(rundir.of_node(self._run, name).read_state()["state"] == "starting")
        except ConfigError:
            return True

    def _stop(self, numbers: Sequence[signal.Signals]) -> None:
        for number in numbers:
            self._stopped_by = number
            signal_all(self._running.values(), number)


def answer(options: RunOptions, around: Infrastructure, request: Request) -> Answer:
    """Answer an operator: carry out a fault of etcd or the network, or list the classes that can be carried out."""
    if not isinstance(request, AskFault):
        return Answer(ok=True, state={"carries": around.carries})
    if not options.armed:
        return Answer(ok=False, sentence=NOT_ARMED)
    try:
        fault = grammar.parse(request.line)
        if CLASSES[fault.kind].by is not Carrier.LAUNCHER:
            return Answer(ok=False, sentence=f"{fault.kind} is no fault of the network or of etcd: ask a node")
        if fault.place.t_s is not None:
            around.carry_out_later(fault, options.began_s + fault.place.t_s)
            return Answer(ok=True, sentence=f"{fault} is due")
        around.carry_out(fault, time.monotonic())
    except (ElastrainError, StoreError) as error:
        return Answer(ok=False, sentence=str(error))
    say(f"{fault} is carried out on request")
    return Answer(ok=True, sentence=f"{fault} is carried out")


def _node(options: RunOptions, node: NodeOptions, whole: RunDir, namespace: str | None, *, again: bool) -> None:
    """Run one node in its own process. `again` is True for a restart."""
    hear_signals()
    os.setsid()
    if namespace is not None:
        enter(namespace)
    # The node ends with the fork server. If the launcher ends, its guardian ends the nodes.
    die_with_parent(signal_to_go())
    sys.stdout.flush()
    run = rundir.of_node(whole, node.name)
    options = (options.started_again() if again else options).on_simulated_node(node.name)
    try:
        code = _run(options, node, run, patient=again)
    except ElastrainError as error:
        say(f"{node.name}: {error}")
        code = 2 if isinstance(error, ConfigError) else 1
    sys.exit(code)


def _run(options: RunOptions, node: NodeOptions, run: RunDir, *, patient: bool) -> int:
    """Run the node, and return its exit code. With `patient`, wait for a store that cannot be reached at first."""
    waits_s, waits = (options.waits.park_timeout_s if patient else 0.0), False
    deadline_s = time.monotonic() + waits_s
    while True:
        try:
            return run_node(options, node, run).code
        except StoreUnavailableError as error:
            if time.monotonic() >= deadline_s:
                raise
            if not waits:
                say(f"{node.name}: {error} It waits for it, {waits_s:g} s at the most")
            waits = True
