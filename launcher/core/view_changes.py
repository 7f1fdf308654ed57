"""Changes of the view: what this agent proposes, and what follows when a view is adopted.

Any agent may propose. The store takes the first proposal for each generation, and all agents adopt it. Changes that are
still needed are proposed next.
"""

from __future__ import annotations

from collections.abc import Sequence

from elastrain.decisions.membership import NOBODY_LEFT, Outcome, propose, with_step_anew
from elastrain.job.world import Member, View
from elastrain.launcher.core import agent_events as ev
from elastrain.launcher.core.cluster import Cluster
from elastrain.launcher.core.deadlines import AskStoreDue, Deadlines, LeaveDue, SettleDue, WarmUpDue
from elastrain.launcher.core.places.large_jobs import goes_first, nodes_to_tell
from elastrain.launcher.core.rendezvous import Parking, Rendezvous
from elastrain.launcher.core.shutdown import Shutdown
from elastrain.launcher.core.worker_table import IN_A_VIEW, Course, Stage
from elastrain.launcher.shared.job_values import Command, FullPriority, Log, Propose, Remember, Tell, TellNodes
from elastrain.launcher.shared.notices import Stands
from elastrain.protocol.agent_messages import NewView, StepAnew
from elastrain.protocol.handlers import handles

OTHERS_FIRST_S = 0.25
"""Time for which the first nodes of a large job propose a change that all of them see. Then every node proposes it."""
_LAST_WAIT_S = 2.0
"""Time to wait for the last missing members. The network may be back, and they may be returning."""


class ViewChanges(ev.AgentPart):
    """The part that proposes and adopts views. `proposing`: this agent waits for the store's answer to a proposal."""

    def __init__(
        self,
        cluster: Cluster,
        deadlines: Deadlines,
        *,
        shutdown: Shutdown,
        parking: Parking,
        rendezvous: Rendezvous,
        parts: Sequence[ev.AgentPart],
    ) -> None:
        self._cluster, self._config = cluster, cluster.config
        self._deadlines, self._shutdown, self._parking = deadlines, shutdown, parking
        self._rendezvous, self._parts = rendezvous, parts
        self.proposing = False
        self._mine: View | None = None
        """The view that this agent proposed last."""
        self._removed: ev.ViewRemoved | None = None
        """The removal of the keys that the store reported while a proposal was under way."""
        self._others_since: tuple[int, float] | None = None
        """Generation whose change this agent leaves to others, and the time since which it does."""
        self._anew: StepAnew | None = None
        """The newest report of this node's members that something in the open step is wrong."""

    @handles(ev.NodeRegistered)
    def on_registered(self, event: ev.NodeRegistered, now: float) -> list[Command]:
        """Begin the work of this agent."""
        self._rendezvous.begin(event, now)
        return self.settle(now)

    @handles(ev.StoreWentAway)
    def on_store_away(self, event: ev.StoreWentAway, now: float) -> list[Command]:
        """Handle an outage of the store: some changes of the view have to wait now."""
        return self._parking.on_store_away(event, now) + self.settle(now)

    @handles(SettleDue, AskStoreDue)
    def settle(self, now: float) -> list[Command]:
        """Do what the job needs next: the roster, the first view, another view, or the end."""
        if self._shutdown.end is not None:
            return []
        # In the order of a job's life: each step needs the one before.
        if self._cluster.roster is None:
            return self._rendezvous.try_roster(now)
        ended = self._shutdown.look_at_digests_again()
        if ended:
            return ended
        return self._try_first_view(now) if self._cluster.view is None else self._edit(self._cluster.view, now)

    @handles(ev.ViewStands)
    def on_stands(self, event: ev.ViewStands, now: float) -> list[Command]:
        """Adopt the view that the store holds, if it is newer."""
        return self.adopt(event.view, now)

    def adopt(self, view: View, now: float) -> list[Command]:
        """Adopt a newer view: note its effects, and tell the workers and the other agents."""
        cluster, before = self._cluster, self._cluster.view
        # The store and the links deliver the same view several times, and may deliver an older one late.
        if self._shutdown.end is not None or (before is not None and view.generation <= before.generation):
            return []
        if not view.members:  # a view without members is the agreed end of a job that has lost its state
            lost = self._shutdown.raised.isdisjoint(self._cluster.ids)
            return self._shutdown.finish(1, view.reason, self._shutdown.last_traceback, lost=lost)
        cluster.enter(view)
        if view != self._mine:
            cluster.peers.open_again(view.ids)
        if view.links_since > (before.links_since if before is not None else 0):
            cluster.progress.note_new_links()
        if view.begun:
            cluster.progress.begin()
        said = f"generation {view.generation}: {view.reason}"
        self._cluster.progress.explain(said)
        commands = self._enter_mine()
        follows = [command for part in self._parts for command in part.on_view(view, before, now)]
        commands += self._tell_workers(view, now)
        fields = {"generation": view.generation, "members": list(view.ids), "reason": view.reason}
        commands.append(Log(event="view", fields=fields, say=f"{said}; members {' '.join(view.ids)}"))
        commands += [TellNodes(message=Stands(view=view), node=node) for node in nodes_to_tell(self._cluster)]
        # More may have happened while this view was proposed. The next proposal contains it.
        return commands + follows + self.settle(now)

    def on_told(self, notice: Stands, now: float) -> list[Command]:
        """Adopt a view that another agent reports. Without this, a node that does not reach the store would miss it."""
        # The roster says whether this node came late, and comes from the store only. A view is refused if the job has
        # not begun according to the store: if all members died, others would take the initial state for the newest.
        begun = self._cluster.progress.begun or notice.view.begun
        if not begun or self._cluster.roster is None:
            return []
        commands = self.adopt(notice.view, now)
        return [Remember(view=notice.view), *commands] if commands else []

    def _enter_mine(self) -> list[Command]:
        """Let this node's ready workers that are in the view become members."""
        commands: list[Command] = []
        for worker in self._cluster.mine_in_view():
            if worker.stage is Stage.READY:
                worker.follow(Course.ENTER_AT_FIRST if worker.initial else Course.ENTER_LATER)
                self._deadlines.drop(WarmUpDue(worker.id))
                if not worker.initial:  # a newcomer is the slowest in its first step, and the others wait for it
                    commands.append(FullPriority(member=worker.id, ahead=True))
        return commands

    def _tell_workers(self, view: View, now: float) -> list[Command]:
        """Tell the workers about the view. A worker that is not in it learns from this that it must exit."""
        commands: list[Command] = []
        for worker in [w for w in self._cluster.workers.by_id.values() if w.stage in IN_A_VIEW]:
            commands.append(Tell(member=worker.id, message=NewView(view=view)))
            if worker.id not in view:
                worker.follow(Course.BE_LEFT_OUT)
                self._deadlines.set_first(LeaveDue(worker.id), now + self._config.times.leave_timeout_s)
        return commands

    @handles(ev.ViewRemoved)
    def on_removed(self, event: ev.ViewRemoved, now: float) -> list[Command]:
        """Handle the removal of the job's keys. If most nodes are still here, put them again, else end this node.

        Only the last node of a job should remove them: otherwise the job was over while this node was away.
        """
        cluster, view = self._cluster, self._cluster.view
        if self._shutdown.end is not None or self._shutdown.finishing:
            return []
        # the answer says whether the proposal came before or after the removal
        self._removed = event if self.proposing else None
        if self.proposing:
            return []
        # A node that replaced one of them to begin the job again does not count.
        nodes = {(m.node, m.incarnation) for m in view.members} if view is not None else self._rendezvous.first_nodes()
        here = nodes & (cluster.peers.answering() | {(self._config.node, self._config.incarnation)})
        # A node that leaves right after an outage may remove the keys although other nodes are there. But a node that
        # is alone, and in no view yet, may have been away while the others finished the whole job.
        if 2 * len(here) > len(nodes) and (view is not None or len(here) > 1):
            if view is None:  # no other event would bring its proposal again
                self._deadlines.set(AskStoreDue(), now + self._config.times.ask_again_s)
            return self.propose(view) if view is not None else self._rendezvous.put_roster_again()
        return self._shutdown.finish(1, "the job has ended while this node could not be reached", everywhere=False)

    @handles(ev.ProposalAnswered)
    def on_answer(self, event: ev.ProposalAnswered, now: float) -> list[Command]:
        """Handle the store's answer to a proposal of this agent."""
        self.proposing = False
        removed, self._removed = self._removed, None
        if self._shutdown.end is not None:
            return []
        if event.view is None:
            return self._ask_later(now) if removed is None else self.on_removed(removed, now)
        # If the answer is no newer view, the watch has brought it before. What was proposed may still be needed.
        return self.adopt(event.view, now) or self.settle(now)

    def _ask_later(self, now: float) -> list[Command]:
        self._deadlines.set(AskStoreDue(), now + self._config.times.ask_again_s)
        gone = self._cluster.gone_from_view()
        what = f"{', '.join(gone)} lost, and " if gone else ""
        return self._parking.park(f"{what}the store does not answer: the view cannot change until it is back", now)

    def propose(self, view: View) -> list[Command]:
        """Propose a view to the store."""
        self.proposing, self._mine = True, view
        return [Propose(view=view)]

    def _try_first_view(self, now: float) -> list[Command]:
        if self.proposing:
            return []
        commands, view = self._rendezvous.first_view(now)
        return commands + (self.propose(view) if view is not None else [])

    def _edit(self, view: View, now: float) -> list[Command]:
        if self.proposing:  # a second proposal for the same generation would only interfere
            return []
        if not self._cluster.alive_in_view():
            return self._on_nobody_alive(view, now)
        if self._shutdown.finishing:  # members no longer wait for each other, so no other view is needed
            return self._parking.unpark(now)
        return self._edit_among_the_living(view, now)

    def _edit_among_the_living(self, view: View, now: float) -> list[Command]:
        cluster, nodes = self._cluster, self._cluster.peers.nodes
        unlinked = cluster.unlinked_nodes()
        suspected = {name for name in unlinked if name in nodes and nodes[name].suspected}
        proposal = propose(
            view,
            holders=cluster.holders,
            dead=cluster.gone_from_view(),
            suspected=[m.id for m in view.members if m.node in suspected and cluster.is_alive(m.id)],
            # No member joins while a node does not answer, because newcomers must not turn a minority into a majority.
            joining=[] if unlinked else self._joiners(),
            begun=self._cluster.progress.begun,
        )
        # A repetition of the step goes together with any other change, but not with a change that has to wait.
        if proposal.outcome in (Outcome.KEEP, Outcome.CHANGE) and (reason := self._why_anew(view)):
            return self.propose(with_step_anew(view, proposal.view, reason))
        if proposal.view is not None:
            return [] if self._leaves_to_others(view, proposal.view, now) else self.propose(proposal.view)
        if proposal.outcome is Outcome.WAIT:
            reason = f"{proposal.reason}; it waits for an answer of theirs, or for the end of their leases"
            return self._parking.park(reason, now)
        if cluster.progress.to_commit and self._parking.store_away_since_s is not None:
            return self._parking.park("the first commit of the job waits for the store, which does not answer", now)
        return self._parking.unpark(now)

    def _leaves_to_others(self, view: View, proposed: View, now: float) -> bool:
        """Return True for a short time if other nodes of a large job propose this change too."""
        if goes_first(self._cluster, view, proposed):
            return False
        if self._others_since is None or self._others_since[0] != view.generation:
            self._others_since = view.generation, now
        ends_s = self._others_since[1] + OTHERS_FIRST_S
        if now < ends_s:
            self._deadlines.set_first(AskStoreDue(), ends_s)
        return now < ends_s

    @handles(StepAnew)
    def wish_anew(self, message: StepAnew, now: float) -> list[Command]:
        """Ask for a new attempt at the open step, because a member of this node has found something wrong in it."""
        if self._anew is None or message.generation > self._anew.generation:
            self._anew = message
        log = Log(event="anew", fields={"generation": message.generation, "reason": message.reason})
        return [log, *self.settle(now)]

    def _why_anew(self, view: View) -> str:
        """Return the reason to repeat the step, or "" if no member asks, or the step was repeated since."""
        wish = self._anew
        return "" if wish is None or view.anew_since > wish.generation else wish.reason

    def _joiners(self) -> list[Member]:
        # A newcomer could not get state from a hanging member, and would be considered lost.
        if self._shutdown.leaving is not None or self._cluster.spared:
            return []
        return [self._cluster.as_member(worker) for worker in self._cluster.workers.joiners]

    def _on_nobody_alive(self, view: View, now: float) -> list[Command]:
        """Handle a view whose members all are dead or have left: the job is done, or its state is lost.

        The loss is put as a view without members. If the store holds another newer view, that one comes first.
        """
        left = self._cluster.peers.left
        # A node leaves in good order only after the work is done.
        if self._shutdown.finishing or any((m.node, m.incarnation) in left for m in view.members):
            return self._parking.unpark(now) + self._shutdown.end_if_nobody_is_left_to_join()
        progress, presumed_since_s = self._cluster.progress, self._cluster.peers.presumed_since_s(view.ids)
        # Any node has the initial state. But members that are only silent may have made the first commit.
        if not progress.begun and (presumed_since_s is None or not progress.due):
            return self._parking.unpark(now) + self._begin_anew(view)
        if not self._speaks_for_the_dead(view):
            return self._parking.unpark(now)
        if presumed_since_s is not None and now < (ends_s := presumed_since_s + _LAST_WAIT_S):
            self._deadlines.set_first(AskStoreDue(), ends_s)
            return self._parking.unpark(now)
        reason = self._shutdown.last_words or NOBODY_LEFT
        return self.propose(View(generation=view.generation + 1, members=(), reason=reason, begun=True))

    def _begin_anew(self, view: View) -> list[Command]:
        """Begin the job again with the ready workers, because nothing was committed."""
        anew = propose(view, holders={}, dead=view.ids, joining=self._joiners(), begun=False).view
        return [] if anew is None else self.propose(anew)

    def _speaks_for_the_dead(self, view: View) -> bool:
        """Return True if this agent may judge how the view's members ended.

        Their own agents go first, while one answers.
        """
        workers = self._cluster.workers.by_id
        mine = [workers[m] for m in view.ids if m in workers]
        if mine:  # their exit codes tell a script's end from a machine's failure, so wait for all of them
            return None not in [w.exit_code for w in mine] and any(w.exit_code for w in mine)
        answering = self._cluster.peers.answering()
        return not any((m.node, m.incarnation) in answering for m in view.members)
