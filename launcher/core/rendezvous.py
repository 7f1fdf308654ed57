"""Waiting for what nobody here can bring about: a store that is away, nodes that are only silent.

A wait says why and since when, and it has an end.

How the nodes of a job find together: the roster, which fixes ranks, and the first view.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from elastrain.base.resume import NodeDisk
from elastrain.decisions.membership import first_view
from elastrain.job.world import Member, View
from elastrain.launcher.core.agent_events import NodeRegistered, StoreCameBack, StoreWentAway
from elastrain.launcher.core.cluster import Cluster
from elastrain.launcher.core.deadlines import (
    AskStoreDue,
    Deadlines,
    JoinDue,
    LastCallDue,
    ParkedDue,
    RendezvousDue,
    SettleDue,
)
from elastrain.launcher.core.shutdown import Shutdown
from elastrain.launcher.core.worker_table import Stage
from elastrain.launcher.shared.checkpoint_inventory import Joined, join
from elastrain.launcher.shared.job_values import Command, Kill, Log, NodeRecord, PutRecord, PutRoster, Roster


@dataclass(frozen=True, kw_only=True)
class Parked:
    """A change of the view that is wanted and cannot be made."""

    reason: str
    since_s: float
    """Monotonic time of the first reason."""


class Parking:
    """The store's outages, and changes of the view that have to wait."""

    def __init__(self, cluster: Cluster, deadlines: Deadlines, shutdown: Shutdown) -> None:
        self._cluster, self._config = cluster, cluster.config
        self._deadlines, self._shutdown = deadlines, shutdown
        self.parked: Parked | None = None
        """Why a change of the view waits, if one does."""
        self.store_away_since_s: float | None = None
        """Monotonic time since which the store has not answered; None while it does."""

    def on_store_away(self, event: StoreWentAway, now: float) -> list[Command]:
        # The first failed call is news; those that follow are the same outage.
        if self._shutdown.end is not None or self.store_away_since_s is not None:
            return []
        self.store_away_since_s = now
        goes_on = "training goes on, but" if self._cluster.progress.begun else "the first commit waits for it, and"
        say = f"the store does not answer: {goes_on} nobody can leave or join the view until it is back"
        return [Log(event="store_away", fields={"reason": event.problem}, say=say)]

    def on_store_back(self, event: StoreCameBack, now: float) -> list[Command]:
        if self.store_away_since_s is None:
            return []
        away_s, self.store_away_since_s = now - self.store_away_since_s, None
        return [
            Log(event="store_back", fields={"away_s": away_s}, say=f"the store answers again, after {away_s:.0f} s")
        ]

    def park(self, reason: str, now: float) -> list[Command]:
        """Wait for this reason, told once. The time counts from the first reason: later ones do not put the end off."""
        if self.parked is not None and self.parked.reason == reason:
            return []
        self.parked = Parked(reason=reason, since_s=self.parked.since_s if self.parked else now)
        self._deadlines.set_first(ParkedDue(), now + self._config.times.park_timeout_s)
        self._cluster.progress.explain(f"parked: {reason}")
        fields = {"lost": self._cluster.gone_from_view(), "reason": reason}
        return [Log(event="parked", fields=fields, say=f"parked: {reason}")]

    def unpark(self, now: float) -> list[Command]:
        if self.parked is None:
            return []
        parked_s, self.parked = now - self.parked.since_s, None
        self._deadlines.drop(ParkedDue())
        return [Log(event="unparked", fields={"parked_s": parked_s}, say=f"no longer parked, after {parked_s:.1f} s")]

    def on_parked_too_long(self, due: ParkedDue, now: float) -> list[Command]:
        assert self.parked is not None
        limit_s = self._config.times.park_timeout_s
        sentence = f"parked for {limit_s:g} s: {self.parked.reason}. Raise --park-timeout to wait longer"
        # Alone: others may see a majority, or the store, that this node does not.
        return self._shutdown.finish(1, sentence, everywhere=False)


class Rendezvous:
    """Decides until the first view. Whoever is not in the roster came late: its workers join later."""

    def __init__(self, cluster: Cluster, deadlines: Deadlines, shutdown: Shutdown) -> None:
        self._cluster, self._config = cluster, cluster.config
        self._deadlines, self._shutdown = deadlines, shutdown
        self._roster_is_put = False
        self._lacking = ""
        """Why the nodes that were here when they were last looked at could not begin, though they were enough."""
        self._doubts_until_s = 0.0
        """The store had lost its data, and with it perhaps a first view, of which not every node has heard."""
        self._is_second_try = False
        """Workers that had not come were ended, here or on another node, and others are started in their places."""

    def begin(self, event: NodeRegistered, now: float) -> None:
        self._cluster.peers.record = event.record
        if not self._config.alone:
            self._deadlines.set(RendezvousDue(), now + self._config.times.join_timeout_s)
            if event.settle_s:
                self._deadlines.set(SettleDue(), now + event.settle_s)

    def try_roster(self, now: float, *, last_call_is_over: bool = False) -> list[Command]:
        present = self._cluster.peers.present()
        others = [record for record in present if record.name != self._config.node]
        # The store has lost the roster of their job, and they put it again.
        if any(record.has_roster for record in others) or SettleDue() in self._deadlines:
            return []
        if self._roster_is_put or len(present) < self._config.least.nodes:
            # A node went while more were waited for: the call begins again with the next one.
            self._deadlines.drop(LastCallDue())
            self._lacking = ""
            return []
        if len(present) < self._config.nodes_max and not last_call_is_over:
            self._deadlines.set_first(LastCallDue(), now + self._config.times.last_call_s)
            return []
        # By name, so that the same nodes get the same ranks whoever was quicker.
        chosen = sorted(present[: self._config.nodes_max], key=lambda record: (len(record.name), record.name))
        is_full = len(present) >= self._config.nodes_max
        if sum(record.workers for record in chosen) < self._config.least.members:
            return self._wait(self._too_few_members(chosen), is_full=is_full)
        life = self._config.life
        found = join([(disk_of(record), record.offers) for record in chosen], is_wary=life.barren > 0)
        lacking = found.lacking or (f"no node here has {life.named}" if life.named and found.resume is None else "")
        if lacking:
            told = f"{lacking}: start the nodes that have it on their disks too, or begin anew with --resume none"
            return self._wait(told, is_full=is_full)
        self._roster_is_put = True
        return [PutRoster(roster=self._roster_of(chosen, found))]

    def _wait(self, lacking: str, *, is_full: bool) -> list[Command]:
        """Nodes that may still come may have what is lacking: workers, or the other parts of a checkpoint."""
        self._lacking = lacking
        return self._shutdown.finish(1, lacking) if is_full else []

    def _too_few_members(self, chosen: Sequence[NodeRecord]) -> str:
        stages, members = self._config.least.members, sum(record.workers for record in chosen)
        return (
            f"--stages {stages} asks for pipelines of {stages} members, and the nodes that came "
            f"({', '.join(record.name for record in chosen)}) have {members}: start more workers (--nproc-per-node) or "
            "nodes, or ask for fewer stages"
        )

    def _roster_of(self, chosen: Sequence[NodeRecord], found: Joined) -> Roster:
        life, resume = self._config.life, found.resume
        start = life.start
        if resume is not None:
            start = "; ".join((f"the job goes on after step {resume.step}, from {resume}", *found.reasons))
        nodes = tuple(replace(record, offers=()) for record in chosen)
        return Roster(nodes=nodes, first_member=life.first_member, resume=resume or life.resume, start=start)

    def on_roster_refused(self, now: float) -> list[Command]:
        """Look again, once those who know of a roster that the store has lost have had their time to put it again."""
        self._roster_is_put = False
        if self._cluster.roster is None and self._shutdown.end is None:
            self._deadlines.set(SettleDue(), now + self._config.times.absent_s)
        return []

    def first_nodes(self) -> set[tuple[str, int]]:
        """The nodes (name, incarnation) that begin the job; nobody while there is no roster."""
        roster = self._cluster.roster
        return {(record.name, record.incarnation) for record in roster.nodes} if roster is not None else set()

    def put_roster_again(self) -> list[Command]:
        """Put the roster again that somebody has taken away while the nodes that it names are here."""
        roster = self._cluster.roster
        return [] if roster is None else [PutRoster(roster=roster)]

    def doubt(self, restored: bool, now: float) -> None:
        """Give those who may know of a first view that the store has lost their time to put it again, once."""
        if restored and not self._doubts_until_s:
            self._doubts_until_s = now + self._config.times.absent_s

    def take_roster(self, roster: Roster) -> list[Command]:
        """From now on a key of this node that was lost comes again with word of the roster: no other one is made."""
        peers, self._cluster.roster = self._cluster.peers, roster
        self._deadlines.drop(RendezvousDue(), LastCallDue(), SettleDue())
        peers.record = replace(peers.record, has_roster=True)
        return [] if self._config.alone else [PutRecord(record=peers.record, if_lost=True)]

    def on_rendezvous_late(self, due: RendezvousDue, now: float) -> list[Command]:
        if self._lacking:
            return self._shutdown.finish(1, self._lacking)
        there, limit_s = [record.name for record in self._cluster.peers.present()], self._config.times.join_timeout_s
        sentence = (
            f"{len(there)} of at least {self._config.least.nodes} nodes came within {limit_s:g} s "
            f"({', '.join(there)}): start the others with the same --rdzv-id and --rdzv-endpoint, or lower MIN in "
            "--nnodes"
        )
        return self._shutdown.finish(1, sentence)

    def first_view(self, now: float) -> tuple[list[Command], View | None]:
        """The view, once all nodes that begin the job are ready and their agents answer; what to say until then."""
        cluster, commands = self._cluster, list[Command]()
        first = self._first_nodes()
        others = [cluster.peers.nodes[record.name] for record in first if record.name != self._config.node]
        if any(peer.record.ready for peer in others):  # a worker that hangs in its imports may be this node's only one
            self.expect_the_others(now)
        # A view with a node whose agent cannot be reached would be parked as soon as one of its workers is lost.
        if not cluster.workers.all_are_ready or not all(peer.linked for peer in others):
            return commands, None
        # By slot, and not by the time of start: a worker that was started again takes the rank of the one before.
        in_order = sorted(cluster.workers.living, key=lambda worker: worker.slot)
        ready = tuple(cluster.as_member(worker) for worker in in_order)
        if self._config.alone:
            return commands, first_view(ready)
        # Every agent says so of its own workers in its key; whoever sees all of them first proposes.
        record = cluster.peers.record
        if record.ready != ready:
            cluster.peers.record = replace(record, ready=ready)
            commands.append(PutRecord(record=cluster.peers.record))
        if record.name not in (node.name for node in first):
            return commands, None
        if any(peer.linked and peer.tells_view for peer in cluster.peers.nodes.values()):  # it stood: the store lost it
            return commands, None
        if now < self._doubts_until_s and self._unheard():
            self._deadlines.set_first(AskStoreDue(), self._doubts_until_s)  # nothing else may happen until then
            return commands, None
        members = self._first_members(first)
        return commands, first_view(members) if members else None

    def _unheard(self) -> list[str]:
        """The nodes of the roster that may know of a first view which the store has lost: all but the dead and gone."""
        peers, roster = self._cluster.peers, self._cluster.roster
        there = {record.name for record in peers.known()}
        assert roster is not None
        return [r.name for r in roster.nodes if r.name not in there and (r.name, r.incarnation) not in peers.left]

    def _first_nodes(self) -> list[NodeRecord]:
        """The nodes of the roster that live; where none does, those that came later. Who is not there joins."""
        assert self._cluster.roster is not None
        there = {(record.name, record.incarnation): record for record in self._cluster.peers.known()}
        first = [(record.name, record.incarnation) for record in self._cluster.roster.nodes]
        return [there[key] for key in first if key in there] or self._cluster.peers.present()

    def _first_members(self, first: Sequence[NodeRecord]) -> list[Member]:
        """The members of the first view in rank order; nobody while a node is missing."""
        own = self._cluster.peers.record
        ready = [own.ready if record.name == own.name else record.ready for record in first]
        return [member for members in ready for member in members] if all(ready) else []

    def expect_the_others(self, now: float) -> None:
        """Bound the time from the first worker that is ready to the last."""
        # Counted from the first hello: a plain script never says hello and may run as long as it likes.
        self._deadlines.set_first(JoinDue(), now + self._config.times.join_timeout_s)

    def on_join_late(self, due: JoinDue, now: float) -> list[Command]:
        """End workers that have not come, so that others take their places; the second time, end the job."""
        workers, limit_s = self._cluster.workers, self._config.times.join_timeout_s
        late = [worker for worker in workers.living if worker.stage is Stage.STARTING]
        restarts_left = self._config.max_restarts - workers.restarts_used
        # Where a worker of another node is missing, that node does the same.
        missing = self._missing()
        unlinked = [name for name in self._other_names() if not self._cluster.peers.nodes[name].linked]
        if not missing and unlinked:
            return self._shutdown.finish(1, f"the agent of {', '.join(unlinked)} cannot be reached: see --local-addr")
        if missing and (self._is_second_try or restarts_left < max(1, len(late))):
            return self._end_without(missing, limit_s)
        self.expect_the_others(now)
        if not missing:  # the first view is on its way, and the store's answer has bounds of its own
            return []
        self._is_second_try = True
        why = f"was not ready within {limit_s:g} s of the first worker: it is ended"
        return [Kill(member=worker.id, reason=f"{worker.id} {why}") for worker in late]

    def _end_without(self, missing: Sequence[str], limit_s: float) -> list[Command]:
        ready = sum(worker.stage is Stage.READY for worker in self._cluster.workers.living)
        more = f", or within {limit_s:g} s more" if self._is_second_try else ""
        return self._shutdown.finish(
            1,
            f"{ready} of {self._config.workers} workers were ready within {limit_s:g} s of the first{more}; "
            f"missing: {', '.join(missing)}. See their output, or raise --join-timeout",
        )

    def _missing(self) -> list[str]:
        """Workers of this node, and other nodes, that are not ready."""
        here = [worker.id for worker in self._cluster.workers.living if worker.stage is not Stage.READY]
        others = [record for record in self._first_nodes() if record.name in self._other_names()]
        return [*here, *(f"node {record.name}" for record in others if not record.ready)]

    def _other_names(self) -> list[str]:
        return [record.name for record in self._first_nodes() if record.name != self._config.node]


def disk_of(record: NodeRecord) -> NodeDisk:
    """The place from which the checkpoints on a node's disk can be read."""
    return NodeDisk(node=record.name, door=record.signature, endpoint=record.endpoint)
