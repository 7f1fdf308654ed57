"""What must hold in a whole job after every event, and at its end. Raises Violation."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from typing import TYPE_CHECKING
from unittest.mock import patch

from elastrain.errors import ElastrainError, StateLostError
from elastrain.job.placement import Placement
from elastrain.job.values import Shape
from elastrain.job.world import View
from elastrain.launcher.core.leaving.stopping import PREEMPTED
from elastrain.launcher.shared.job_values import End
from elastrain.launcher.store.job_keys import decode_roster, decode_view
from elastrain.launcher.store.registry import SharedRegistry
from tests.sim import cluster
from tests.sim.checks import Checks, Truth
from tests.sim.cluster import Cluster, Scenario
from tests.sim.job.disk import LACKING
from tests.sim.job.schedule import Schedule, shape_of
from tests.sim.member import SimMember, Violation

if TYPE_CHECKING:
    from tests.sim.job.agent import AgentProcess
    from tests.sim.job.lives import SimLife
    from tests.sim.job.member import MemberProcess
    from tests.sim.job.world import World

_LEGAL = (
    "raised the same exception",
    "after it had finished its work",
    "were ready within",
    "nodes came within",
    "before the first commit",
    "is refused",
    "has all its",
    "see --local-addr",
    "no worker is left on this node",
    "the checkpoint that this job starts from is damaged",
    "no node can tell any more",
    LACKING,
)
"""Ends that are right although the state is whole: nobody could mend what they name."""
STEPS_MAX, STEPS_MAX_OF_LONG = 8, 100
_WORD_S = 5.0
"""What a node says in its key has come to the others by then, also to one that hears late of what is in the store."""


@cache
def truth_of(runs: int, *, is_long: bool) -> Truth:
    """What an undisturbed job of one computes."""
    shape = shape_of(Schedule(seed=0, runs=runs))
    scenario = Scenario(members=1, steps=STEPS_MAX_OF_LONG if is_long else STEPS_MAX, runs=runs, backups=0)

    def same(scenario: Scenario) -> Shape:
        return shape

    with patch.object(cluster, "shape_of", same), patch.object(cluster, "FROZEN", frozenset([3])):
        job = Cluster(scenario, 0, None)
        job.run()
    return job.seen


class _Members(dict[str, SimMember]):
    """Member -> its core, as the checks of a step want it."""


class JobChecks:
    """`members` are the checks of the step protocol; here are those of the whole job."""

    def __init__(self, world: World, life: SimLife) -> None:
        self._world, self._life = world, life
        self._by_id = _Members()
        self.members = Checks(life.shape, world.truth, self._by_id, world.dead)
        self.views: dict[int, View] = {}
        """Generation -> the view that anybody has taken over."""
        self.newest: View | None = None
        self.finishers: dict[str, int] = {}
        """Members that have passed the end of the job -> the digest of their parameters."""
        self.groups: dict[int, dict[int, tuple[str, ...]]] = {}
        """Step -> generation -> members of the view in which it was committed."""
        self._rosters: dict[bytes, float] = {}
        """Each that was ever put -> when first."""
        self._judged: set[tuple[str, int]] = set()
        self._begun_in: int | None = None
        """The generation in which the store was told of the first commit."""
        self._was_lost = False
        """At some moment no living member could have made some shard."""
        self._counted: dict[tuple[str, int], int] = {}
        """Agent (name, incarnation) -> how many numbers it knew to be used when the store last lost its data."""

    @property
    def ids(self) -> tuple[str, ...]:
        """Of the newest view."""
        return tuple(self.newest.ids) if self.newest is not None else ()

    def enter(self, process: MemberProcess) -> None:
        if process.id in self._world.processes and not self._is_forgotten_number(process):
            if not self._is_another_job():
                raise Violation(f"the number of {process.id} is used twice")
            self._world.over = "another job begins in a store that has lost its data"
        self._by_id[process.id] = process.sim

    # ---- views

    def written(self, put: Mapping[str, bytes]) -> None:
        """Into the store."""
        prefix = f"/elastrain/{self._life.scope}/"
        if prefix + "begun" in put and self._begun_in is None:
            self._begun_in = self.newest.generation if self.newest is not None else 0
        if prefix + "roster" in put:
            self._rosters.setdefault(put[prefix + "roster"], self._world.clock.now)
        value = put.get(prefix + "view")
        if value is not None:
            self._stands(decode_view(value), "the store")

    def _stands(self, view: View, where: str) -> None:
        """Each generation has one list of members, and a view that leaves somebody out has a reason to."""
        there = self.views.setdefault(view.generation, view)
        if there != view and not self._is_forgotten(there):
            raise Violation(f"{where} has {view.ids} as generation {view.generation}, others have {there.ids}")
        self.views[view.generation] = view
        if self.newest is None or view.generation > self.newest.generation or there != view:
            before, self.newest = self.newest, view
            self._world.say(f"view {view.generation}: {' '.join(view.ids)} ({view.reason})")
            if not view.members:
                self._end_is_agreed(view.reason, before)

    def _is_forgotten(self, view: View) -> bool:
        """Whether nobody can know of it any more: the store has lost its data, and all who had taken it over are dead.

        Its number may be used again then: what is stopped or cut off counts as living, since it may come back.
        """
        agents, members = self._world.living_agents(), self._world.living()
        known = [*(a.core.cluster.view for a in agents), *(p.sim.view for p in members)]
        return self._world.etcd.wiped_s is not None and view not in known

    def store_forgets(self) -> None:
        """The store is about to lose its data."""
        agents = [agent for agent in self._world.living_agents() if isinstance(agent.registry, SharedRegistry)]
        self._counted = {(a.name, a.incarnation): a.registry._standing._used.get("members", 0) for a in agents}

    def _is_forgotten_number(self, process: MemberProcess) -> bool:
        """Whether nobody can know that another had it: that one has died, the store has lost its data since, and the
        agents that had heard of that many numbers by then are dead.
        """
        world, number = self._world, int(process.id.removeprefix("m"))
        # Not by what they have heard since: the number of the other may be all of that.
        knew = any(self._counted.get((a.name, a.incarnation), 0) > number for a in world.living_agents())
        return world.etcd.wiped_s is not None and not world.processes[process.id].alive and not knew

    def _is_another_job(self) -> bool:
        """Whether nobody can know of what was before the store lost its data: the roster was made afterwards, and of
        those who were there before, nobody that lives or is named in it has known another one.
        """
        world, roster = self._world, self._world.etcd.item("roster", self._life.scope)
        if world.etcd.wiped_s is None or roster is None or self._rosters[roster.value] < world.etcd.wiped_s:
            return False
        stands = decode_roster(roster.value)
        agents = [agent for agent in [*world.past, *world.agents.values()] if agent.started_s < world.etcd.wiped_s]
        knew = {agent.incarnation for agent in agents if agent.core.cluster.roster not in (None, stands)}
        living = {agent.incarnation for agent in world.living_agents()}
        return knew.isdisjoint(living | {node.incarnation for node in stands.nodes})

    def agent(self, agent: AgentProcess) -> None:
        """After each event of an agent."""
        view = agent.core.cluster.view
        if view is not None:
            if agent.core.cluster.config.alone or view.generation not in self.views:
                self._stands(view, agent.name)
            elif self.views[view.generation] != view:
                raise Violation(f"{agent.name} has {view.ids} as generation {view.generation}")
        end = agent.core.shutdown.end
        if end is not None and (agent.name, agent.incarnation) not in self._judged:
            self._judged.add((agent.name, agent.incarnation))
            self._ends(agent, end)

    def died(self) -> None:
        """A member is gone: what it held may be, too."""
        if self.newest is not None and self.members.records and self.able(self.newest) is None:
            self._was_lost = True

    # ---- ends

    def _ends(self, agent: AgentProcess, end: End) -> None:
        self._world.say(f"{agent.name} is to end with {end.code}: {end.sentence}")
        if not end.sentence:
            raise Violation(f"{agent.name} ends without a sentence")
        if end.code == 0 and not self.finishers:
            raise Violation(f"{agent.name} ends with 0, though nobody has finished: {end.sentence}")
        self._world.disk.check_end(agent, end)
        if end.code and end.everywhere:
            self._false_end(end.sentence, self.newest)

    def _end_is_agreed(self, why: str, before: View | None) -> None:
        """Nobody of the view is left, as far as anybody can know."""
        # No lease and no answer is a node's death, by definition (docs/nodes.md): what it alone held is lost with it,
        # though its processes may still run where nobody reaches them.
        if before is not None and self.able(before, without=self._given_up(before)) is None:
            self._was_lost = True
            return
        self._false_end(why, before)

    def _given_up(self, view: View) -> set[str]:
        """Members of the view whose nodes have no key in the store, and are reached by no other living agent."""
        world, names = self._world, {member.node for member in view.members}
        reached = {
            name
            for name in names
            for other in world.living_agents()
            if other.node != name and world.network.reach_each_other(other.node, name) and world.agents[name].runs
        }
        given_up = {name for name in names - reached if world.etcd.item(f"nodes/{name}", self._life.scope) is None}
        return {member.id for member in view.members if member.node in given_up}

    def _false_end(self, why: str, view: View | None) -> None:
        """Nobody ends a job while living members of the newest view hold everything."""
        if any(words in why for words in _LEGAL) or view is None:
            return
        if self.finishers and "differ" not in why:
            return
        able = self.able(view)
        if able is not None:
            raise Violation(f"a job whose state is whole (held by {', '.join(able)}) is ended: {why}")

    def able(self, view: View, without: Collection[str] = ()) -> list[str] | None:
        """Living members of the view that hold every shard of the newest committed step; None if a shard is gone.

        without: members that do not count.
        """
        living = [p for p in self._world.living() if p.id in view and p.id not in without]
        members = [p for p in living if p.sim.roles.committed is not None]
        initial = self._life.shape.initial.step
        top = max((process.sim.committed for process in members), default=initial)
        if top == initial:
            return None
        # Copies that no commit has made a holder's count for nothing: only their maker knows that they are whole.
        base = max(members, key=lambda process: process.sim.committed).sim.roles.committed
        assert base is not None
        by_id = {process.id: process.sim for process in members}
        whole = all(
            any(m in by_id and self._can_make(by_id[m], shard, top) for m in holders.all)
            for shard, holders in enumerate(base)
        )
        return list(by_id) if whole else None

    def _can_make(self, sim: SimMember, shard: int, step: int) -> bool:
        held, own = sim.machine.custody.holdings.find(shard), sim.machine.step
        if held is None or held.version == step:
            return held is not None
        # As it would report: a primary has folded the gradient, a backup keeps it.
        has_folded = own.number == step and shard in own.reduction.finished
        return held.version == step - 1 and (has_folded or step in held.kept)

    def failure(self, process: MemberProcess, failure: ElastrainError) -> None:
        """The engine of a member gives up."""
        if process.id not in self.ids:
            return
        if isinstance(failure, StateLostError):
            self._false_end(str(failure), self.newest)
        elif type(failure).__name__ in ("DivergedError", "CorruptedError"):
            raise Violation(f"{process.id} ends, though no bit has changed: {failure}")

    def ends_a_straggler(self, member: str) -> None:
        """An agent is about to end a member that is slow: nothing may go with it that nobody else has."""
        view = self.newest
        if view is None or member not in view.ids or self.able(view) is None:
            return
        if self.able(view, without=[member]) is None:
            raise Violation(f"{member} is ended for being slow, and takes the only copy of something along")

    def takes_for_dead(self, agent: AgentProcess, name: str, incarnation: int) -> None:
        """An agent takes a node for dead by its lease: none may live that another one with a lease reaches."""
        there, now = self._world.agents.get(name), self._world.clock.now
        if agent.core.cluster.view is None or there is None or not there.runs or there.core.shutdown.end is not None:
            return
        if there.incarnation != incarnation:  # it is the one before that is dead
            return
        for other, peer in agent.core.cluster.peers.nodes.items():
            third = self._world.agents.get(other)
            if other == name or not peer.leased or third is None or not third.runs:
                continue
            since_s = third.linked_since_s.get(name)  # a word takes its time to the store, and from there
            if since_s is not None and since_s < now - _WORD_S:
                raise Violation(f"{agent.name} takes {name} for dead, which lives and which {other} reaches")

    def handed_over(self, process: MemberProcess) -> None:
        """A member ends because its node is told to go: what it held is with others. Another of its node goes later."""
        view = process.sim.view
        if view is None or not all(self._world.processes[m].alive for m in view.ids):
            return
        if self.able(view) is not None and self.able(view, without=[process.id]) is None:
            raise Violation(f"{process.id} hands over, and takes the only copy of something along")

    # ---- steps

    def advanced(self, process: MemberProcess, step: int) -> None:
        """A training loop leaves a step."""
        digest, truth = process.sim.digest(), self.members.truth
        assert truth is not None
        self._world.say(f"{process.id} leaves step {step}")
        if digest != truth.digests[step]:
            raise Violation(f"{process.id}: parameters after step {step} differ from the undisturbed job")
        view = process.sim.view
        assert view is not None
        record = process.sim.core.record
        if record is not None and record.step == step and record.generation == view.generation:
            self._committed(step, view)

    def _committed(self, step: int, view: View) -> None:
        """No two groups without a common member commit the same step."""
        groups = self.groups.setdefault(step, {})
        for generation, ids in groups.items():
            if generation == view.generation or set(ids) & set(view.ids):
                continue
            # Where all who knew of the first commits died before the store was told, nobody can know of any.
            was_told = self._begun_in is not None and self._begun_in < view.generation
            if was_told or any(self._world.processes[m].alive for m in ids):
                raise Violation(f"step {step} is committed by {ids} and by {view.ids}")
        groups[view.generation] = view.ids

    def finished(self, process: MemberProcess) -> None:
        step, truth = process.sim.committed, self.members.truth
        assert truth is not None
        if step != self._world.schedule.steps - 1:
            raise Violation(f"{process.id} has finished after step {step} of {self._world.schedule.steps}")
        if process.sim.digest() != truth.digests[step]:
            raise Violation(f"{process.id} has finished with parameters that differ from the undisturbed job")
        self.finishers[process.id] = process.sim.digest()

    def holders(self, shard: int) -> list[str]:
        """Living members that hold it, by the newest placement that a living member of the newest view knows."""
        placements: list[tuple[int, Placement]] = []
        for process in self._world.living():
            if process.id in self.ids and process.sim.roles.committed:
                placements.append((process.sim.committed, process.sim.roles.live))
        if not placements:
            return []
        newest = max(placements, key=lambda each: each[0])[1]
        return [m for m in newest[shard].all if self._world.processes[m].alive]

    # ---- the end

    def at_the_end(self) -> None:
        """Every wait has had its end by now: nobody is left who waits, and a job that was not lost is done."""
        world = self._world
        if world.over:
            return
        waiting = world.living_agents()
        if waiting:
            raise Violation(f"stands still at {world.clock.now:.1f} s: " + "; ".join(map(self._where, waiting)))
        if world.lives.waiting:
            raise Violation(f"stands still between two lives: {[each.agent.name for each in world.lives.waiting]}")
        agents = [agent for agent in [*world.past, *world.agents.values()] if agent.life is self._life]
        ends = [agent.core.shutdown.end for agent in agents]
        # Who was told to go says nothing about the job.
        told = [end.sentence for end in ends if end is not None and end.code != PREEMPTED]
        is_right = self.finishers or self._was_lost or any(words in t for words in _LEGAL for t in told)
        if told and not (is_right or self.all_were_told_to_go() or self._was_left_before_it_began(told)):
            raise Violation(f"the job has ended though nothing was lost: {told}")
        orphans = [process.id for process in world.living()]
        if orphans:
            raise Violation(f"{', '.join(orphans)} outlive their agents")

    def all_were_told_to_go(self) -> bool:
        """Whether the operator has stopped all nodes of the newest view: for whoever else is there, the job is over."""
        agents = [*self._world.past, *self._world.agents.values()]
        stopped = {a.incarnation for a in agents if (end := a.core.shutdown.end) is not None and end.code == PREEMPTED}
        return self.newest is not None and {member.incarnation for member in self.newest.members} <= stopped

    def _was_left_before_it_began(self, told: Collection[str]) -> bool:
        """Whether a node that was stopped before there was a view took the keys along, and others ended upon that."""
        agents = [*self._world.past, *self._world.agents.values()]
        was_stopped = any((end := a.core.shutdown.end) is not None and end.code == PREEMPTED for a in agents)
        return self.newest is None and was_stopped and all("could not be reached" in sentence for sentence in told)

    def _where(self, agent: AgentProcess) -> str:
        core = agent.core
        parked = core.parking.parked
        view = core.cluster.view
        members = ", ".join(
            f"{p.id} committed={p.sim.committed} gen={p.sim.view.generation if p.sim.view else None} "
            f"recovering={p.sim.machine.views.is_recovering} voted={p.sim.machine.step.ballot.has_voted} "
            f"loop={p.sim.machine.loop.stage.value}"
            for p in agent.workers.living
        )
        state = f"is parked: {parked.reason}" if parked else f"waits in {view.generation if view else 'no view'}"
        return f"{agent.name} {state} (end {core.shutdown.end}) [{members}]"
