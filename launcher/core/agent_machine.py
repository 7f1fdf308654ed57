"""The agent's state machine: it gives each event to the part that decides about it. Events in, commands out.

All parts are created here, and each gets only the parts that it needs. `now` is in monotonic seconds. Commands must be
carried out in order. Replaying a log of the events and ticks reproduces every decision of an agent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from elastrain.launcher.core import agent_events as ev
from elastrain.launcher.core import deadlines as dl
from elastrain.launcher.core.cluster import Cluster
from elastrain.launcher.core.failures import Failures, ScriptFailures
from elastrain.launcher.core.joins import Joins
from elastrain.launcher.core.peer_changes import PeerChanges
from elastrain.launcher.core.rendezvous import Parking, Rendezvous
from elastrain.launcher.core.requested_faults import FaultAnswer, FaultRequests
from elastrain.launcher.core.shutdown import Shutdown, Stopping
from elastrain.launcher.core.suspicions import Suspicions
from elastrain.launcher.core.view_changes import ViewChanges
from elastrain.launcher.core.worker_table import Worker
from elastrain.launcher.faults.fault import Fault
from elastrain.launcher.shared import notices
from elastrain.launcher.shared.job_values import Command, JobConfig, Log
from elastrain.protocol import agent_messages as am


class Core:
    """The entry point: `handle` takes events, `on_tick` the passing of time, `inject` the operator's faults.

    Nothing else acts.
    """

    def __init__(self, config: JobConfig, faults: Sequence[Fault], choose: Callable[[Sequence[str]], str]) -> None:
        # In the order of their dependencies: each part knows only parts above it.
        self.cluster = cluster = Cluster(config)
        self.deadlines = deadlines = dl.Deadlines()
        self.shutdown = shutdown = Shutdown(cluster, deadlines)
        self._stopping = Stopping(cluster, deadlines, shutdown)
        self.parking = parking = Parking(cluster, deadlines, shutdown)
        self.faults = requests = FaultRequests(cluster, deadlines, faults, choose)
        self._script = script = ScriptFailures(cluster, deadlines, shutdown)
        self._rendezvous = rendezvous = Rendezvous(cluster, deadlines, shutdown)
        self._views = views = ViewChanges(
            cluster, deadlines, shutdown=shutdown, parking=parking, rendezvous=rendezvous, faults=requests
        )
        suspicions = Suspicions(cluster, deadlines, shutdown=shutdown, view_changes=views)
        self.joins = Joins(
            cluster, deadlines, shutdown=shutdown, rendezvous=rendezvous, view_changes=views, faults=requests
        )
        self._failures = Failures(
            cluster, deadlines, shutdown=shutdown, script=script, suspicions=suspicions, view_changes=views
        )
        self._peers = PeerChanges(
            cluster, deadlines, shutdown=shutdown, parking=parking, script=script, view_changes=views
        )

    def handle(self, event: ev.Event, now: float) -> list[Command]:
        """Decide about one event. Returns the commands to carry out, in order."""
        if isinstance(event, ev.StopAsked):
            return self._stopping.on_stop(event, now)
        if isinstance(event, ev.StoreEvent):
            return self._on_store_event(event, now)
        if isinstance(event, ev.NodeEvent):
            return self._on_node_event(event, now)
        return self._on_worker_event(event, now)

    def on_tick(self, now: float) -> list[Command]:
        """Handle the deadlines that have passed."""
        return [command for due in self.deadlines.take_passed(now) for command in self._on_due(due, now)]

    def inject(self, fault: Fault, careful_of: Collection[str] | None = None) -> FaultAnswer:
        """Inject a fault that the operator asks for, on this or another node.

        If `careful_of` is given, the fault is refused if it could destroy state after the loss of these members.
        """
        return self.faults.inject(fault, careful_of)

    def _on_worker_event(self, event: ev.WorkerEvent, now: float) -> list[Command]:
        match event:
            case ev.WorkerStarted():
                return self.joins.on_started(event, now)
            case ev.StartFailed():
                return self.joins.on_start_failed(event, now)
            case ev.WorkerSpoke():
                return self._on_message(self.cluster.workers.by_id[event.member], event.message, now)
            case ev.WorkerMisspoke():
                return self.joins.on_misspoke(event.member, event.problem)
            case ev.ChannelClosed():
                return self._failures.on_channel_closed(event, now)
            case ev.MutexBroke():
                return self._failures.on_mutex(event, now)
            case ev.WorkerDied():
                return self._failures.on_death(event, now)
            case ev.WorkerExited():
                return self._failures.on_exit(event, now)
            case ev.Looked():
                self._peers.on_look(now)
                return self._failures.on_look(event, now)

    def _on_node_event(self, event: ev.NodeEvent, now: float) -> list[Command]:
        match event:
            case ev.NodeCame():
                return self._peers.on_came(event, now)
            case ev.LeaseEnded():
                return self._peers.on_lease_ended(event, now)
            case ev.LinkChanged():
                return self._peers.on_link(event, now)
            case ev.NodeLeft():
                return self._peers.on_left(event.node)
            case ev.NoticeCame():
                return self._on_notice(event.node, event.notice, now)

    def _on_store_event(self, event: ev.StoreEvent, now: float) -> list[Command]:
        match event:
            case ev.NodeRegistered():
                self._rendezvous.begin(event, now)
                return self._views.settle(now)
            case ev.RosterStands():
                return self.joins.on_roster(event, now)
            case ev.NumberTaken():
                return self.joins.on_number(event, now)
            case ev.SpecStands():
                return self.joins.on_spec(event, now)
            case ev.ViewStands():
                return self._views.adopt(event.view, now)
            case ev.ProposalAnswered():
                return self._views.on_answer(event, now)
            case ev.ViewRemoved():
                return self._views.on_removed(event, now)
            case ev.StoreForgot():
                return self._peers.on_store_forgot(event)
            case ev.CheckpointAnswered():
                return self.cluster.checkpoints.on_answered(event)
            case ev.FirstCommitStands():
                self.cluster.progress.begun = self.cluster.progress.begun or event.is_made
                return [] if event.is_made else self.joins.on_first_commit_allowed(now)
            case ev.EndStands():
                return self.shutdown.on_end(event, now)
            case ev.StoreWentAway():
                return self.parking.on_store_away(event, now) + self._views.settle(now)
            case ev.StoreCameBack():
                return self.parking.on_store_back(event, now)

    def _on_message(self, worker: Worker, message: am.FromWorker, now: float) -> list[Command]:
        """Handle a worker's message. Notes are logged, and after the job's end every other message is ignored."""
        if isinstance(message, am.Note):
            return [Log(event="note", fields={"member": worker.id, **message.fields})]
        if self.shutdown.end is not None or isinstance(message, am.Reading):  # a Reading is only displayed
            return []
        match message:
            case am.Hello():
                return self.joins.on_hello(worker, message, now)
            case am.FirstCommitDue():
                return self.joins.on_first_commit_due(worker, now)
            case am.Progress():
                self._failures.watch.pace.commit(message.step, now)
                commands = self.joins.on_progress(worker, message, now)
                return commands + self._failures.stragglers.on_progress(worker, message, now)
            case am.Window():
                return self.cluster.window.take(worker.id, message, now)
            case am.Redone():
                return self.cluster.progress.redo(message)
            case am.Suspect():
                # A worker detects deaths of members on other simulated nodes of this machine. This agent detects its
                # own workers' deaths itself.
                proof = message.dead and message.member not in self.cluster.workers.by_id
                part = self._peers.on_seen_dead if proof else self._failures.suspicions.on_suspect
                return part(worker, message, now)
            case am.StepAnew():
                return self._views.wish_anew(message, now)
            case am.Failed():
                return self._script.on_failed(worker, message, now)
            case am.LostState():
                return self.shutdown.on_lost_state(worker, message, now)
            case am.Diverged() | am.NoRoom():
                return self.shutdown.on_verdict(worker, message, now)
            case am.Finished():
                return self.shutdown.on_finished(worker, message, now)
            case am.Struck():
                return self.faults.on_struck(worker, message, now)
            case am.CheckpointReady():
                return self.cluster.checkpoints.on_ready(worker, message)
            case am.CheckpointEnded():
                return self.cluster.checkpoints.on_ended(message) + self._stopping.on_written(message)

    def _on_notice(self, node: str, notice: notices.Notice, now: float) -> list[Command]:
        """Handle a notice of another agent."""
        match notice:
            case notices.Beat():
                return []
            case notices.Exited():
                return self._peers.on_exited(node, notice, now)
            case notices.Raised():
                return self._script.on_raised(node, notice, now)
            case notices.Suspected():
                return self._failures.suspicions.on_suspected(node, notice, now)
            case notices.Stands():
                return self._peers.on_stands(node, notice, now)
            case notices.SomebodyWaits():
                return self._failures.watch.on_waits(node, notice, now)
            case notices.Spared():
                return self._failures.watch.on_spared(node, notice, now)
            case notices.Speeds():
                return self._failures.stragglers.on_speeds(node, notice, now)
            case notices.Hangs():
                return self._failures.watch.on_hangs(node, notice, now)
            case notices.Ended():
                return self.shutdown.on_ended(node, notice, now)
            case notices.Digested():
                return self.shutdown.on_digested(node, notice, now)
            case notices.Leaving():
                return self._stopping.on_leaving(node, now)
            case notices.LastWritten():
                return self._stopping.on_others_written()
            case notices.Left():
                return self._peers.on_left(node)
            case notices.Over():
                return self.shutdown.on_over(node, notice, now)
            case notices.Ask():
                return self.faults.on_ask(node, notice, now)

    def _on_due(self, due: dl.Due, now: float) -> list[Command]:
        match due:
            case dl.RendezvousDue():
                return self._rendezvous.on_rendezvous_late(due, now)
            case dl.SettleDue() | dl.AskStoreDue():
                return self._views.settle(now)
            case dl.LastCallDue():
                return self._rendezvous.try_roster(now, last_call_is_over=True)
            case dl.JoinDue():
                return self._rendezvous.on_join_late(due, now)
            case dl.HelloDue():
                return self.joins.on_hello_late(due, now)
            case dl.WarmUpDue():
                return self.joins.on_warm_up_over(due, now)
            case dl.RestartDue():
                return self.joins.on_restart_forgotten(due, now)
            case dl.SuspicionDue():
                return self._failures.suspicions.on_due(due, now)
            case dl.SilenceDue():
                return self._peers.on_silence(due, now)
            case dl.MeetDue():
                return self._peers.on_not_met(due, now)
            case dl.ParkedDue():
                return self.parking.on_parked_too_long(due, now)
            case dl.SparedDue():
                return self._failures.on_spared_over(due, now)
            case dl.DigestsDue():
                return self.shutdown.on_digests_late(due, now)
            case dl.LeaveDue():
                return self.shutdown.on_overdue(due, now)
            case dl.FaultDue():
                return self.faults.on_due(due, now)
            case dl.TogetherDue() | dl.HandOverDue():
                return self._stopping.on_due(due, now)
            case dl.HangDue():
                return self._failures.watch.on_stacks_taken(due, now)
            case dl.KilledDue():
                # No thread of a process runs after SIGKILL, however long the kernel keeps the process.
                return self._failures.on_death(ev.WorkerDied(member=due.member, source="sigkill", at_s=now), now)
