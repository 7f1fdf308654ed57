"""The agent's state machine: it gives each event to the part that handles it. Events in, commands out.

All parts are created here, and each gets only the parts that it needs. `now` is in monotonic seconds. Commands must be
carried out in order. Replaying a log of the events and ticks reproduces every decision of an agent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import get_args

from elastrain.launcher.core import agent_events as ev
from elastrain.launcher.core import deadlines as dl
from elastrain.launcher.core.cluster import Cluster
from elastrain.launcher.core.failures import Failures, ScriptFailures
from elastrain.launcher.core.hang_detector import HangDetector
from elastrain.launcher.core.joins import Joins
from elastrain.launcher.core.leaving.stopping import Stopping
from elastrain.launcher.core.peer_changes import PeerChanges
from elastrain.launcher.core.places.spares import Spares
from elastrain.launcher.core.rendezvous import Parking, Rendezvous
from elastrain.launcher.core.requested_faults import FaultAnswer, FaultRequests
from elastrain.launcher.core.shutdown import Shutdown
from elastrain.launcher.core.stragglers import Stragglers
from elastrain.launcher.core.suspicions import Suspicions
from elastrain.launcher.core.view_changes import ViewChanges
from elastrain.launcher.core.worker_table import Worker
from elastrain.launcher.faults.fault import Fault
from elastrain.launcher.shared import notices
from elastrain.launcher.shared.job_values import Command, JobConfig, Log
from elastrain.protocol import agent_messages as am
from elastrain.protocol.handlers import handles, joined


class Core(ev.AgentPart):
    """The entry point: `handle` takes events, `on_tick` the passing of time, `inject` the operator's faults.

    Nothing else acts.
    """

    def __init__(self, config: JobConfig, faults: Sequence[Fault], choose: Callable[[Sequence[str]], str]) -> None:
        self.parts: list[ev.AgentPart] = []
        # In the order of their dependencies: each part knows only parts above it. Two hold the list, which is filled
        # below.
        self.cluster = cluster = Cluster(config)
        self.deadlines = deadlines = dl.Deadlines()
        self.shutdown = shutdown = Shutdown(cluster, deadlines)
        self.stopping = stopping = Stopping(cluster, deadlines, shutdown)
        self.parking = parking = Parking(cluster, deadlines, shutdown)
        self.faults = FaultRequests(cluster, deadlines, faults, choose)
        script = ScriptFailures(cluster, deadlines, shutdown)
        rendezvous = Rendezvous(cluster, deadlines, shutdown)
        self._views = views = ViewChanges(
            cluster, deadlines, shutdown=shutdown, parking=parking, rendezvous=rendezvous, parts=self.parts
        )
        self._suspicions = Suspicions(cluster, deadlines, shutdown=shutdown, view_changes=views)
        hangs = HangDetector(cluster, deadlines, shutdown=shutdown, view_changes=views)
        self.joins = Joins(
            cluster, deadlines, shutdown=shutdown, rendezvous=rendezvous, view_changes=views, faults=self.faults
        )
        stragglers = Stragglers(cluster, shutdown)
        failures = Failures(cluster, deadlines, shutdown=shutdown, script=script, view_changes=views, parts=self.parts)
        self._peers = PeerChanges(
            cluster, deadlines, shutdown=shutdown, parking=parking, script=script, view_changes=views
        )
        spares = Spares(cluster, shutdown)
        self.parts += (cluster.progress, cluster.work, cluster.window, cluster.checkpoints, cluster.devices)
        self.parts += (cluster.quarantine, shutdown, stopping, parking, self.faults, spares)
        # A report of progress makes a newcomer a member (`Joins`) before its speed is judged (`Stragglers`).
        self.parts += (script, rendezvous, views, self._suspicions, hangs)
        self.parts += (self.joins, stragglers, failures, self._peers)
        kinds = (ev.Event, dl.Due, am.FromWorker, notices.Notice)
        self._handlers = joined((kind for each in kinds for kind in get_args(each)), (self, *self.parts))

    def handle(self, event: ev.Event, now: float) -> list[Command]:
        """Decide about one event. Returns the commands to carry out, in order."""
        self.cluster.progress.recent.at(now)
        return self._handled(event, event=event, now=now) + self._followed_up()

    def on_tick(self, now: float) -> list[Command]:
        """Handle the deadlines that have passed."""
        self.cluster.progress.recent.at(now)
        passed = self.deadlines.take_passed(now)
        commands = [command for due in passed for command in self._handled(due, due=due, now=now)]
        return commands + self._followed_up()

    def inject(self, fault: Fault, careful_of: Collection[str] | None = None) -> FaultAnswer:
        """Inject a fault that the operator asks for, on this or another node.

        If `careful_of` is given, the fault is refused if it could destroy state after the loss of these members.
        """
        return self.faults.inject(fault, careful_of)

    def _followed_up(self) -> list[Command]:
        return [command for part in self.parts for command in part.follow_up()]

    def _handled(self, what: object, **offered: object) -> list[Command]:
        commands: list[Command] = self._handlers[type(what)].hear(**offered)
        return commands

    @handles(ev.WorkerSpoke)
    def on_spoke(self, event: ev.WorkerSpoke, now: float) -> list[Command]:
        """Handle a worker's message. After the job's end all messages but notes are ignored."""
        if self.shutdown.end is not None and not isinstance(event.message, am.Note):
            return []
        worker = self.cluster.workers.by_id[event.member]
        self.cluster.workers.connect()
        return self._handled(event.message, worker=worker, message=event.message, now=now)

    @handles(ev.NoticeCame)
    def on_notice(self, event: ev.NoticeCame, now: float) -> list[Command]:
        """Handle a notice of another agent."""
        return self._handled(event.notice, node=event.node, notice=event.notice, now=now)

    @handles(am.Note)
    def on_note(self, worker: Worker, message: am.Note) -> list[Command]:
        """Write a worker's note into the log."""
        return [Log(event="note", fields={"member": worker.id, **message.fields})]

    @handles(am.Reading, notices.Beat)
    def ignore(self) -> list[Command]:
        """Do nothing: a `Reading` is only displayed, and a heartbeat only keeps the link."""
        return []

    @handles(ev.Looked)
    def on_look(self, event: ev.Looked, now: float) -> list[Command]:
        """Let all parts judge by what the agent has seen of its workers."""
        return [command for part in self.parts for command in part.on_look(event, now)]

    @handles(am.Progress)
    def on_progress(self, worker: Worker, message: am.Progress, now: float) -> list[Command]:
        """Let all parts handle the report of a committed step."""
        return [command for part in self.parts for command in part.on_progress(worker, message, now)]

    @handles(am.Suspect)
    def on_suspect(self, worker: Worker, message: am.Suspect, now: float) -> list[Command]:
        """Handle a worker's report that it does not reach a member, or that it has seen the member's death."""
        # A worker detects deaths of members on other simulated nodes of this machine. This agent detects its own
        # workers' deaths itself.
        proof = message.dead and message.member not in self.cluster.workers.by_id
        return (self._peers.on_seen_dead if proof else self._suspicions.on_suspect)(worker, message, now)
