"""Execution of the core's commands, in order: on workers, on other agents, in the store, in the log.

Events that follow from a command go back to the core. Makes no decisions.
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from elastrain.launcher.agent.node_end import NodeEnd
from elastrain.launcher.agent.run_state import StateFile
from elastrain.launcher.agent.strikes import Strikes
from elastrain.launcher.agent.worker_monitor import WorkerMonitor
from elastrain.launcher.agent.worker_processes import WorkerProcesses
from elastrain.launcher.core import Core
from elastrain.launcher.core import agent_events as ev
from elastrain.launcher.nodes.peer_agents import PeerAgents
from elastrain.launcher.shared import operator_messages
from elastrain.launcher.shared.console import ProgressBar, say
from elastrain.launcher.shared.job_values import (
    AskLauncher,
    Command,
    End,
    FullPriority,
    Kill,
    KillNode,
    Log,
    Propose,
    PutBegun,
    PutCheckpoint,
    PutDue,
    PutRecord,
    PutRoster,
    PutSpec,
    Remember,
    Start,
    Strike,
    TakeNumber,
    TakeStacks,
    Tell,
    TellNodes,
)
from elastrain.launcher.shared.operator_messages import AskFault
from elastrain.launcher.shared.rundir import EventLog, RunDir
from elastrain.launcher.store.registry import Registry
from elastrain.protocol.agent_messages import Reading


class CommandQueue:
    """A queue of commands. `carry_out` may add commands, and is never entered recursively."""

    def __init__(self, carry_out: Callable[[Command], None]) -> None:
        self._carry_out = carry_out
        self._waiting: deque[Command] = deque()
        self._busy = False

    def add(self, commands: Sequence[Command]) -> None:
        """Append the commands to the queue."""
        self._waiting.extend(commands)
        self._work()

    def add_first(self, commands: Sequence[Command]) -> None:
        """Put the commands at the front: consequences of an answer come before later commands."""
        self._waiting.extendleft(reversed(commands))
        self._work()

    def _work(self) -> None:
        if self._busy:
            return
        self._busy = True
        try:
            while self._waiting:
                self._carry_out(self._waiting.popleft())
        finally:
            self._busy = False


_CONCERNS_ALL = ("view", "parked", "unparked", "store_away", "store_back")


@dataclass(frozen=True, kw_only=True)
class NodeParts:
    """Parts through which an agent acts. `peers` is None in a job of one node."""

    workers: WorkerProcesses
    lookout: WorkerMonitor
    peers: PeerAgents | None
    registry: Registry
    end: NodeEnd
    strikes: Strikes
    launcher: RunDir | None
    """Run folder in which the launcher of simulated nodes listens, or None without such a launcher."""


class CommandRunner:
    """Executor of the core's commands. `shares_screen`: other nodes, simulated here, print on the same screen."""

    def __init__(self, core: Core, parts: NodeParts, log: EventLog, state: StateFile, *, shares_screen: bool) -> None:
        self._core, self._parts, self._log, self._state = core, parts, log, state
        self._shares_screen = shares_screen
        self._bar: ProgressBar | None = None
        self.queue = CommandQueue(self._carry_out)

    def happen(self, event: ev.Event) -> None:
        """Pass an event to the core, and carry out its commands.

        A worker's progress in reading a checkpoint is only shown, and does not reach the core.
        """
        if isinstance(event, ev.WorkerSpoke) and isinstance(event.message, Reading):
            self._show(event.member, event.message)
            return
        if isinstance(event, ev.WorkerExited):
            self.close()
        self.queue.add(self._core.handle(event, time.monotonic()))

    def close(self) -> None:
        """Remove the progress bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _show(self, member: str, reading: Reading) -> None:
        """Show the progress of one worker on one node per screen. All workers read the same amount."""
        cluster = self._core.cluster
        if cluster.workers.by_id[member].slot == 0 and (cluster.first_rank == 0 or not self._shares_screen):
            self._bar = self._bar or ProgressBar(f"{member} is reading the checkpoint")
            self._bar.show(reading.done_bytes, reading.size_bytes)
            if reading.done_bytes >= reading.size_bytes:
                self.close()

    def _answered(self, event: ev.Event) -> None:
        """Pass the store's answer to a command to the core."""
        self.queue.add_first(self._core.handle(event, time.monotonic()))

    def _carry_out(self, command: Command) -> None:
        workers, peers = self._parts.workers, self._parts.peers
        match command:
            case Tell():
                workers.tell(command)
            case TellNodes():
                if peers is not None:
                    peers.tell(command.message, command.node)
            case Log():
                self._write(command)
            case Kill():
                self._log.write("kill", member=command.member, reason=command.reason)
                say(command.reason)
                workers.signal(command.member, signal.SIGKILL)
            case KillNode():
                self._kill_node(command)
            case Strike():
                say(f"{command.kind} strikes {command.member or 'this node'} on request")
                self._parts.strikes.strike(command)
            case AskLauncher():
                self._ask_launcher(command)
            case TakeStacks():
                self._take_stacks(command)
            case FullPriority():
                workers.restore_priority(command.member, ahead=command.ahead)
            case Start():
                if self._parts.end.end is None:
                    workers.start(command)
            case End():
                self._parts.end.begin(command)
            case _:
                self._ask_store(command)

    def _ask_store(
        self,
        command: Propose | Remember | PutSpec | PutRoster | PutDue | PutBegun | PutRecord | PutCheckpoint | TakeNumber,
    ) -> None:
        registry, answered = self._parts.registry, self._answered
        match command:
            case Propose():
                registry.propose(command.view, lambda view: answered(ev.ProposalAnswered(view=view)))
            case Remember():
                registry.remember(command.view)
            case PutSpec():
                registry.put_spec(command.spec, lambda spec: answered(ev.SpecStands(spec=spec)))
            case PutRoster():
                registry.put_roster(command.roster, lambda roster: answered(ev.RosterStands(roster=roster)))
            case PutDue():
                registry.put_due()
            case PutBegun():
                registry.put_begun()
            case PutRecord():
                registry.put_record(command.record, if_lost=command.if_lost)
            case PutCheckpoint():
                registry.put_checkpoint(
                    command,
                    lambda problem: answered(
                        ev.CheckpointAnswered(member=command.member, step=command.step, problem=problem)
                    ),
                )
            case TakeNumber():
                at_least = self._core.cluster.first_unused_number()
                registry.take_number(at_least, lambda number: answered(ev.NumberTaken(number=number)))

    def _write(self, log: Log) -> None:
        self._log.write(log.event, **log.fields)
        if log.say and not self._is_said_elsewhere(log):
            say(log.say)
        self._state.stale = self._state.stale or log.event == "view"

    def _is_said_elsewhere(self, log: Log) -> bool:
        """Return True if another node prints it. The first node that answers prints job-wide information."""
        if not self._shares_screen or log.event not in _CONCERNS_ALL:
            return False
        cluster, me = self._core.cluster, self._core.cluster.config.node
        # A node that has only just joined does not reach the other nodes yet.
        takes_part = cluster.view is None or any(member.node == me for member in cluster.members)
        return not takes_part or cluster.first_answering_node() != me

    def _ask_launcher(self, command: AskLauncher) -> None:
        launcher = self._parts.launcher
        if launcher is None or not operator_messages.tell(launcher, AskFault(line=command.line)):
            reason = f"{command.line}: only the launcher of simulated nodes (--local-nodes) can do that"
            self._log.write("fault_refused", reason=reason)

    def _take_stacks(self, command: TakeStacks) -> None:
        folder, said = self._parts.lookout.folder, self._parts.lookout.take_stacks(command.reason)
        self._log.write("stacks", reason=command.reason, folder=folder, members=said)
        if command.tell:
            say(f"{command.reason}; the stacks of all members are in {folder}")

    def _kill_node(self, command: KillNode) -> None:
        self._log.write("kill_node", node=self._core.cluster.config.node, reason=command.reason)
        say(command.reason)
        self._parts.workers.signal_all(signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
