"""The start of a job: the roster, which fixes the ranks, and the first view; also waits for the store or for nodes.

`Parking` handles changes of the view that cannot be made now, because the store is away or nodes are silent. Each wait
has a reason, a start time and an end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from elastrain.base.resume import NodeDisk
from elastrain.decisions.membership import first_view
from elastrain.job.world import Member, View
from elastrain.launcher.core import deadlines as dl
from elastrain.launcher.core.agent_events import AgentPart, NodeRegistered, StoreCameBack, StoreWentAway
from elastrain.launcher.core.cluster import Cluster
from elastrain.launcher.core.deadlines import Deadlines
from elastrain.launcher.core.shutdown import Shutdown
from elastrain.launcher.core.worker_table import Stage
from elastrain.launcher.shared.checkpoint_inventory import Joined, join
from elastrain.launcher.shared.job_values import Command, Kill, Log, NodeRecord, PutRecord, PutRoster, Roster
from elastrain.protocol.handlers import handles


@dataclass(frozen=True, kw_only=True)
class Parked:
    """A change of the view that is wanted but cannot be made now."""

    reason: str
    since_s: float
    """Monotonic time of the first reason."""


class Parking(AgentPart):
    """Outages of the store, and changes of the view that have to wait."""

    def __init__(self, cluster: Cluster, deadlines: Deadlines, shutdown: Shutdown) -> None:
        self._cluster, self._config = cluster, cluster.config
        self._deadlines, self._shutdown = deadlines, shutdown
        self.parked: Parked | None = None
        """The change of the view that waits now, or None."""
        self.store_away_since_s: float | None = None
        """Monotonic time since which the store has not answered. None while it answers."""

    def on_store_away(self, event: StoreWentAway, now: float) -> list[Command]:
        """Report the begin of an outage of the store. Later failed calls belong to the same outage."""
        if self._shutdown.end is not None or self.store_away_since_s is not None:
            return []
        self.store_away_since_s = now
        goes_on = "training goes on, but" if self._cluster.progress.begun else "the first commit waits for it, and"
        say = f"the store does not answer: {goes_on} no member can leave or join the view until it is back"
        return [Log(event="store_away", fields={"reason": event.problem}, say=say)]

    @handles(StoreCameBack)
    def on_store_back(self, now: float) -> list[Command]:
        """Report the end of an outage of the store."""
        if self.store_away_since_s is None:
            return []
        away_s, self.store_away_since_s = now - self.store_away_since_s, None
        return [
            Log(event="store_back", fields={"away_s": away_s}, say=f"the store answers again, after {away_s:.0f} s")
        ]

    def park(self, reason: str, now: float) -> list[Command]:
        """Wait with a change of the view, and report each reason once. The time limit counts from the first reason."""
        if self.parked is not None and self.parked.reason == reason:
            return []
        self.parked = Parked(reason=reason, since_s=self.parked.since_s if self.parked else now)
        self._deadlines.set_first(dl.ParkedDue(), now + self._config.times.park_timeout_s)
        self._cluster.progress.explain(f"parked: {reason}")
        fields = {"lost": self._cluster.gone_from_view(), "reason": reason}
        return [Log(event="parked", fields=fields, say=f"parked: {reason}")]

    def unpark(self, now: float) -> list[Command]:
        """End the wait, if there is one."""
        if self.parked is None:
            return []
        parked_s, self.parked = now - self.parked.since_s, None
        self._deadlines.drop(dl.ParkedDue())
        return [Log(event="unparked", fields={"parked_s": parked_s}, say=f"no longer parked, after {parked_s:.1f} s")]

    @handles(dl.ParkedDue)
    def on_parked_too_long(self) -> list[Command]:
        """End this node, because a change of the view has waited for too long."""
        assert self.parked is not None
        limit_s = self._config.times.park_timeout_s
        sentence = f"parked for {limit_s:g} s: {self.parked.reason}. Raise --park-timeout to wait longer"
        if self._config.places.are_fixed:  # another launcher has no such flag
            sentence = f"parked for {limit_s:g} s, as long as it may: {self.parked.reason}"
        # Only this node ends: others may reach a majority, or the store, that this node does not reach.
        return self._shutdown.finish(1, sentence, everywhere=False)


class Rendezvous(AgentPart):
    """Decisions until the first view. Workers of nodes that are not in the roster join later."""

    def __init__(self, cluster: Cluster, deadlines: Deadlines, shutdown: Shutdown) -> None:
        self._cluster, self._config = cluster, cluster.config
        self._deadlines, self._shutdown = deadlines, shutdown
        self._roster_is_put = False
        self._lacking = ""
        """Reason why the nodes seen last could not begin the job although there were enough of them, else ""."""
        self._doubts_until_s = 0.0
        """Time until which a store that had lost its data may still lack a first view that some nodes know."""
        self._is_second_try = False
        """True if workers that were late, on any node, were killed and replaced once."""

    def begin(self, event: NodeRegistered, now: float) -> None:
        """Begin to wait for other nodes: this node's key is in the store."""
        self._cluster.peers.change_record(event.record)
        if not self._config.alone:
            self._deadlines.set(dl.RendezvousDue(), now + self._config.times.join_timeout_s)
            if event.settle_s:
                self._deadlines.set(dl.SettleDue(), now + event.settle_s)

    @handles(dl.LastCallDue)
    def on_last_call_over(self, now: float) -> list[Command]:
        """Put the roster with the nodes that have come."""
        return self.try_roster(now, last_call_is_over=True)

    def try_roster(self, now: float, *, last_call_is_over: bool = False) -> list[Command]:
        """Put the roster if enough nodes have come, else wait for more.

        `last_call_is_over`: start with those that are here.
        """
        present = self._cluster.peers.present()
        others = [record for record in present if record.name != self._config.node]
        # A store that lost its data gets the roster of the running job again from those nodes.
        if any(record.has_roster for record in others) or dl.SettleDue() in self._deadlines:
            return []
        if self._roster_is_put or len(present) < self._config.least.nodes:
            # A node has left while more were waited for. The last call starts again with the next node.
            self._deadlines.drop(dl.LastCallDue())
            self._lacking = ""
            return []
        if len(present) < self._config.places.nodes and not last_call_is_over:
            self._deadlines.set_first(dl.LastCallDue(), now + self._config.times.last_call_s)
            return []
        # Sorted by name, so that the same nodes get the same ranks in any order of arrival.
        chosen = sorted(present[: self._config.places.nodes], key=lambda record: (len(record.name), record.name))
        is_full = len(present) >= self._config.places.nodes
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
        """Wait for more nodes, which may bring the lacking workers or parts of a checkpoint.

        End the job if no more may come.
        """
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
        """Try again later. Nodes that know a roster which the store has lost get time to put it again."""
        self._roster_is_put = False
        if self._cluster.roster is None and self._shutdown.end is None:
            self._deadlines.set(dl.SettleDue(), now + self._config.times.absent_s)
        return []

    def first_nodes(self) -> set[tuple[str, int]]:
        """Return the nodes (name, incarnation) that begin the job. Empty without a roster."""
        roster = self._cluster.roster
        return {(record.name, record.incarnation) for record in roster.nodes} if roster is not None else set()

    def put_roster_again(self) -> list[Command]:
        """Put the roster again if it was removed while its nodes are here."""
        roster = self._cluster.roster
        return [] if roster is None else [PutRoster(roster=roster)]

    def doubt(self, restored: bool, now: float) -> None:
        """Give nodes that may know a lost first view time to put it again. Only the first call has an effect."""
        if restored and not self._doubts_until_s:
            self._doubts_until_s = now + self._config.times.absent_s

    def take_roster(self, roster: Roster) -> list[Command]:
        """Adopt the roster.

        If this node's key is lost, it is written again with a mark that this node knows the roster.
        """
        peers = self._cluster.peers
        self._cluster.begin_with(roster)
        self._deadlines.drop(dl.RendezvousDue(), dl.LastCallDue(), dl.SettleDue())
        peers.change_record(replace(peers.record, has_roster=True))
        return [] if self._config.alone else [PutRecord(record=peers.record, if_lost=True)]

    @handles(dl.RendezvousDue)
    def on_rendezvous_late(self) -> list[Command]:
        """End the job, because fewer nodes than required came in time."""
        if self._lacking:
            return self._shutdown.finish(1, self._lacking)
        there, limit_s = [record.name for record in self._cluster.peers.present()], self._config.times.join_timeout_s
        advice = "start the others with the same --rdzv-id and --rdzv-endpoint, or lower MIN in --nnodes"
        if self._config.places.are_fixed:
            advice = "the ranks on the other hosts say why they did not come"
        came = f"{len(there)} of at least {self._config.least.nodes} nodes came within {limit_s:g} s"
        return self._shutdown.finish(1, f"{came} ({', '.join(there)}): {advice}")

    def first_view(self, now: float) -> tuple[list[Command], View | None]:
        """Return commands, and the first view once all nodes that begin the job are ready and linked, else None."""
        cluster, commands = self._cluster, list[Command]()
        first = self._first_nodes()
        others = [cluster.peers.nodes[record.name] for record in first if record.name != self._config.node]
        if any(peer.record.ready for peer in others):  # a worker that hangs in its imports may be this node's only one
            self.expect_the_others(now)
        # A view with a node whose agent cannot be reached would have to wait at the first loss of a worker of that
        # node.
        if not cluster.workers.all_are_ready or not all(peer.linked for peer in others):
            return commands, None
        # In order of slots, not of start times: a restarted worker takes the rank of its predecessor.
        in_order = sorted(cluster.workers.living, key=lambda worker: worker.slot)
        ready = tuple(cluster.as_member(worker) for worker in in_order)
        if self._config.alone:
            return commands, first_view(ready)
        # Every agent writes its ready workers into its key. The first agent that sees all of them proposes the view.
        record = cluster.peers.record
        if cluster.peers.change_record(replace(record, ready=ready)):
            commands.append(PutRecord(record=cluster.peers.record))
        if record.name not in (node.name for node in first):
            return commands, None
        # there was a view, and the store has lost it
        if any(peer.linked and peer.tells_view for peer in cluster.peers.nodes.values()):
            return commands, None
        if now < self._doubts_until_s and self._unheard():
            self._deadlines.set_first(dl.AskStoreDue(), self._doubts_until_s)  # no other event may come until then
            return commands, None
        members = self._first_members(first)
        return commands, first_view(members) if members else None

    def _unheard(self) -> list[str]:
        """Return the roster's absent nodes that may know a lost first view: they are not known to have left."""
        peers, roster = self._cluster.peers, self._cluster.roster
        there = {record.name for record in peers.known()}
        assert roster is not None
        return [r.name for r in roster.nodes if r.name not in there and (r.name, r.incarnation) not in peers.left]

    def _first_nodes(self) -> list[NodeRecord]:
        """Return the living nodes of the roster, or, if there is none, the nodes that came later.

        All others join later.
        """
        assert self._cluster.roster is not None
        there = {(record.name, record.incarnation): record for record in self._cluster.peers.known()}
        first = [(record.name, record.incarnation) for record in self._cluster.roster.nodes]
        later = [record for record in self._cluster.peers.present() if not record.spare]
        return [there[key] for key in first if key in there] or later

    def _first_members(self, first: Sequence[NodeRecord]) -> list[Member]:
        """Return the members of the first view in rank order. Empty while a node is not ready."""
        own = self._cluster.peers.record
        ready = [own.ready if record.name == own.name else record.ready for record in first]
        return [member for members in ready for member in members] if all(ready) else []

    def on_view(self, view: View, before: View | None, now: float) -> list[Command]:
        """Stop waiting for the first workers: the job has begun."""
        self._deadlines.drop(dl.JoinDue())
        return []

    def expect_the_others(self, now: float) -> None:
        """Limit the time from the first ready worker to the last."""
        # Counted from the first hello, because a plain script never says hello and may run without a limit.
        self._deadlines.set_first(dl.JoinDue(), now + self._config.times.join_timeout_s)

    @handles(dl.JoinDue)
    def on_join_late(self, now: float) -> list[Command]:
        """Kill workers that are not ready in time, so that they are replaced. At the second deadline, end the job."""
        workers, limit_s = self._cluster.workers, self._config.times.join_timeout_s
        late = [worker for worker in workers.living if worker.stage is Stage.STARTING]
        restarts_left = self._config.restarts_allowed - workers.restarts_used
        # If a worker of another node is missing, that node handles it in the same way.
        missing = self._missing()
        unlinked = [name for name in self._other_names() if not self._cluster.peers.nodes[name].linked]
        if not missing and unlinked:
            return self._shutdown.finish(1, f"the agent of {', '.join(unlinked)} cannot be reached: see --local-addr")
        if missing and (self._is_second_try or restarts_left < max(1, len(late))):
            return self._end_without(missing, limit_s)
        self.expect_the_others(now)
        if not missing:  # the first view is being proposed, and the store's answer has its own deadline
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
        """Return the workers of this node, and the other nodes, that are not ready."""
        here = [worker.id for worker in self._cluster.workers.living if worker.stage is not Stage.READY]
        others = [record for record in self._first_nodes() if record.name in self._other_names()]
        return [*here, *(f"node {record.name}" for record in others if not record.ready)]

    def _other_names(self) -> list[str]:
        return [record.name for record in self._first_nodes() if record.name != self._config.node]


def disk_of(record: NodeRecord) -> NodeDisk:
    """Return the address under which the checkpoints on a node's disk can be read."""
    return NodeDisk(node=record.name, door=record.signature, endpoint=record.endpoint)
