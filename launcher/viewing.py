"""How views change: what this agent proposes, and what follows when one stands. A layer of `core`."""

from __future__ import annotations

from collections.abc import Sequence

from elastrain.agent_messages import NewView
from elastrain.launcher.faults import RANDOM
from elastrain.launcher.parking import Parking
from elastrain.launcher.roll import MEET, WARM_UP
from elastrain.launcher.values import (
    Command,
    FullPriority,
    Log,
    NodeRecord,
    Propose,
    PutRecord,
    PutRoster,
    Roster,
    Stage,
    Tell,
)
from elastrain.membership import NOBODY_LEFT, Outcome, first_view, propose
from elastrain.world import Member, View


class Viewing(Parking):
    """From the first view to the last."""

    def on_view(self, view: View, now: float) -> list[Command]:
        """The store holds this view now: ours, or one that was faster."""
        if self.end is not None or (self.view is not None and view.generation <= self.view.generation):
            return []
        if not view.members:
            return self._finish(1, view.reason, self._last_traceback())
        first, self.view = self.view is None, view
        self.begun = self.begun or view.begun
        for name in {member.node for member in view.members} - {self.config.node, *self.nodes}:
            self._deadlines_s.setdefault(MEET + name, now + self.config.absent_s)
        self._deadlines_s.pop("join", None)
        self._reason(f"generation {view.generation}: {view.reason}")
        commands: list[Command] = []
        for worker in self._mine_in_view():
            if worker.stage is Stage.READY:
                worker.stage = Stage.MEMBER
                self._deadlines_s.pop(WARM_UP + worker.id, None)
                if not worker.initial:
                    worker.goes_ahead = True
                    commands.append(FullPriority(member=worker.id, ahead=True))
        # Members that the view leaves out hear of it too: that is how they learn that they are to end.
        for worker in [w for w in self.workers.values() if w.stage in (Stage.MEMBER, Stage.FINISHED)]:
            commands.append(Tell(member=worker.id, message=NewView(view=view)))
            if worker.id not in view:
                self._must_leave(worker, now + self.config.leave_timeout_s)
        fields = {"generation": view.generation, "members": list(view.ids), "reason": view.reason}
        commands.append(Log(event="view", fields=fields, say=_describe(view)))
        commands += self._arm_random() if first else []
        return commands + self._settle(now)

    def on_removed(self, now: float) -> list[Command]:
        """Somebody has taken the view out of the store: the last node of a job does that. If most nodes of the view are
        still here, it was not the last one, and the view is put again; else the job was over while this node was away.
        """
        if self.end is not None or self.view is None or self._proposing or self._finishing():
            return []
        names = {member.node for member in self.view.members}
        if 2 * len(names - self._unlinked_nodes()) > len(names):
            self._proposing = True
            return [Propose(view=self.view)]
        return self._finish(1, "the job has ended while this node could not be reached", everywhere=False)

    def on_answer(self, view: View | None, now: float) -> list[Command]:
        """What the store holds after a proposal of this agent: it, or another's. None: the store does not answer."""
        self._proposing = False
        if self.end is not None:
            return []
        if view is None:
            self._deadlines_s["ask again"] = now + self.config.ask_again_s
            return self._park(self._without_store(), now)
        return self.on_view(view, now) or self._settle(now)

    def _without_store(self) -> str:
        gone = self._gone()
        what = f"{', '.join(gone)} lost, and " if gone else ""
        return f"{what}the store does not answer: the view can not change until it is back"

    def _settle(self, now: float) -> list[Command]:
        """Whatever the job lacks by now: a roster, its first view, another view."""
        if self.end is not None:
            return []
        if self.roster is None:
            return self._try_roster(now)
        ended = self._look_at_digests_again()
        if ended:
            return ended
        return self._try_first_view() if self.view is None else self._edit_view(now)

    # ---- the beginning

    def _try_roster(self, now: float, *, last_call_is_over: bool = False) -> list[Command]:
        present = self._present()
        if self._roster_is_put or len(present) < self.config.nodes_min:
            self._deadlines_s.pop("last call", None)
            return []
        if len(present) < self.config.nodes_max and not last_call_is_over:
            self._deadlines_s.setdefault("last call", now + self.config.last_call_s)
            return []
        self._roster_is_put = True
        # By name, so that the same nodes get the same ranks whoever was quicker.
        chosen = sorted(present[: self.config.nodes_max], key=lambda record: (len(record.name), record.name))
        return [PutRoster(roster=Roster(nodes=tuple(chosen)))]

    def _present(self) -> list[NodeRecord]:
        """The nodes that are there, in the order in which they came."""
        present = [self.record, *(node.record for node in self.nodes.values() if node.leased)]
        return sorted(present, key=lambda record: record.incarnation)

    def _try_first_view(self) -> list[Command]:
        """All nodes that begin the job are ready, and this agent reaches all of their agents."""
        first = self._first_nodes()
        others = [self.nodes[record.name] for record in first if record.name != self.config.node]
        if self._proposing or not self._all_are_ready() or not all(node.linked for node in others):
            return []
        commands: list[Command] = []
        ready = tuple(self._as_member(worker) for worker in self.living)
        if self.record.ready != ready and not self.config.alone:
            self.record = NodeRecord(**{**vars(self.record), "ready": ready})
            commands.append(PutRecord(record=self.record))
        members = self._first_members(first)
        if members:
            self._proposing = True
            commands.append(Propose(view=first_view(members)))
        return commands

    def _first_nodes(self) -> list[NodeRecord]:
        """The nodes of the roster that live; where none does, those that came later. Who is not there joins."""
        assert self.roster is not None
        known = [self.record, *(node.record for node in self.nodes.values())]
        there = {(record.name, record.incarnation): record for record in known}
        first = [(record.name, record.incarnation) for record in self.roster.nodes]
        return [there[key] for key in first if key in there] or self._present()

    def _first_members(self, first: Sequence[NodeRecord]) -> list[Member]:
        """In rank order; nobody while a node is missing."""
        ready = [self.record.ready if r.name == self.config.node else r.ready for r in first]
        if self.config.alone:
            return [self._as_member(worker) for worker in self.living]
        return [member for members in ready for member in members] if all(ready) else []

    # ---- changes

    def _edit_view(self, now: float) -> list[Command]:
        assert self.view is not None
        if self._proposing:
            return []
        if not self._alive_in_view():
            return self._on_nobody_alive(now)
        if self._finishing():
            return self._unpark(now)
        unlinked = self._unlinked_nodes()
        suspected = {name for name in unlinked if name in self.nodes and self.nodes[name].suspected}
        proposal = propose(
            self.view,
            holders=self.holders,
            dead=[m for m in self.view.ids if not self.is_alive(m)],
            suspected=[m.id for m in self.view.members if m.node in suspected and self.is_alive(m.id)],
            # Nobody joins while a node does not answer: joiners must not turn a minority into a majority.
            joining=[] if unlinked else self._joiners(),
            begun=self.begun,
        )
        if proposal.view is not None:
            self._proposing = True
            return [Propose(view=proposal.view)]
        if proposal.outcome is Outcome.WAIT:
            return self._park(
                f"{proposal.reason}; it waits for an answer of theirs, or for the end of their leases", now
            )
        return self._unpark(now)

    def _joiners(self) -> list[Member]:
        return [self._as_member(worker) for worker in self.workers.values() if worker.stage is Stage.READY]

    def _on_nobody_alive(self, now: float) -> list[Command]:
        """Every member of the view is proven dead or has left: the job is done, or its state is gone.

        The end is put as a view without members: a view that stands in the store and is not known here comes first.
        """
        assert self.view is not None
        if self._finishing() or any((m.node, m.incarnation) in self._left for m in self.view.members):
            return self._unpark(now) + self._end_if_nobody_is_left_to_join()
        if not self.begun:
            return self._unpark(now) + self._begin_anew()
        if not self._speaks_for_the_dead():
            return self._unpark(now)
        self._proposing = True
        reason = self._last_words or NOBODY_LEFT
        return [Propose(view=View(generation=self.view.generation + 1, members=(), reason=reason, begun=True))]

    def _begin_anew(self) -> list[Command]:
        """Nothing was committed: whoever is ready begins the job from its initial state."""
        assert self.view is not None
        view = propose(self.view, holders={}, dead=self.view.ids, joining=self._joiners(), begun=False).view
        if view is None:
            return []
        self._proposing = True
        return [Propose(view=view)]

    def _speaks_for_the_dead(self) -> bool:
        """Their own agents know best how they ended; others speak only where none of those answers."""
        assert self.view is not None
        mine = [self.workers[m] for m in self.view.ids if m in self.workers]
        if mine:
            return None not in [w.exit_code for w in mine] and any(w.exit_code for w in mine)
        there = {(node.record.name, node.record.incarnation) for node in self.nodes.values() if node.linked}
        return not any((m.node, m.incarnation) in there for m in self.view.members)

    # ---- faults that wait for the first view

    def _arm_random(self) -> list[Command]:
        """`random` means one member of all: the agent of the first one chooses."""
        assert self.view is not None
        waiting, self._faults = self._faults, []
        commands: list[Command] = []
        for fault in waiting:
            if fault.member != RANDOM:
                self._faults.append(fault)
            elif self.view.members[0].node == self.config.node:
                commands += self.inject(fault)[2]
        return commands


def _describe(view: View) -> str:
    return f"generation {view.generation}: {view.reason}; members {' '.join(view.ids)}"
