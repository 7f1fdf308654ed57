"""Agents under random faults: each ends, or goes on; nobody ends a job whose state is whole, or goes on without it."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from elastrain.decisions.membership import missing_state
from elastrain.job.world import View
from elastrain.launcher.core import Core, failures
from elastrain.launcher.core.agent_events import Event
from elastrain.launcher.core.cluster import Cluster
from elastrain.launcher.core.joins import Joins
from elastrain.launcher.core.peer_changes import PeerChanges
from elastrain.launcher.core.places import spares
from elastrain.launcher.core.rendezvous import Rendezvous
from elastrain.launcher.core.view_changes import ViewChanges
from elastrain.launcher.core.worker_table import Worker
from elastrain.launcher.shared.job_values import Command, End, NodeRecord
from elastrain.protocol.agent_messages import Progress
from tests.sim.agents import Violation, World, outcome
from tests.sim.agents.faults import random_faults
from tests.sim.agents.schedule import draw
from tests.sim.findings import Search

CHUNK = 100
WITHIN = 500
"""Schedules of which one shows a planted bug."""


def play(seeds: range, *, has_spares: bool = False) -> Counter[str]:
    """Play the schedules. `has_spares`: with one or two nodes beyond those that compute."""
    ended: Counter[str] = Counter()
    for seed in seeds:
        world = World(seed, replace(draw(seed), spares=1 + seed % 2) if has_spares else None)
        try:
            world.run()
        except Violation as violation:
            last = "\n".join(world.log[-12:])
            raise Violation(f"seed {seed} ({world.play}): {violation}\n{last}") from None
        ended[outcome(world)] += 1
    return ended


@pytest.mark.parametrize("chunk", range(2))
def test_agents_end_or_go_on_whatever_dies_and_when(chunk: int) -> None:
    ended = play(range(chunk * CHUNK, (chunk + 1) * CHUNK))
    assert ended["goes on"] >= CHUNK // 4
    assert ended["ended"] >= CHUNK // 20


def test_spares_take_free_places_and_no_others_whatever_dies_and_when() -> None:
    ended = play(range(CHUNK), has_spares=True)
    assert ended["goes on"] >= CHUNK // 4


@pytest.mark.on_demand
@pytest.mark.timeout(0)
def test_as_many_schedules_of_agents_as_asked_for() -> None:
    first, _, behind = os.environ.get("ELASTRAIN_AGENT_SCHEDULES", "0:5000").partition(":")
    play(range(int(first), int(behind)))


def ended(seed: int, **play: Any) -> list[End | None]:
    """How each agent has ended where the work is done after step 20."""
    world = World(seed, replace(draw(seed), ends_at=20, **play), faults=random_faults if play["faults"] else nothing)
    world.run()
    return [agent.core.shutdown.end for agent in world.agents.values()]


def nothing(world: World) -> None:
    """No faults."""


@pytest.mark.parametrize("altered", ["", "m0", "m1"])
def test_all_agents_of_a_finished_job_end_with_one_code(altered: str) -> None:
    """Whichever node is done first: two members with different parameters end all of them with 1."""
    for seed in range(60):
        ends = ended(seed, faults=0, altered=altered)
        assert {end.code if end is not None else None for end in ends} == {1 if altered else 0}, f"seed {seed}"


def test_no_agent_waits_for_ever_for_digests_whatever_dies_at_the_end() -> None:
    for seed in range(120):
        ended(seed, faults=4, burst=True)


@pytest.mark.parametrize("seed", range(20))
def test_a_log_of_events_and_ticks_replays_an_agent(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else goes into its core, and nothing else comes out."""
    logs: dict[Core, list[tuple[Event | None, float, list[Command]]]] = defaultdict(list)
    handle, on_tick = Core.handle, Core.on_tick

    def heard(core: Core, event: Event, now: float) -> list[Command]:
        commands = handle(core, event, now)
        logs[core].append((event, now, list(commands)))
        return commands

    def ticked(core: Core, now: float) -> list[Command]:
        commands = on_tick(core, now)
        logs[core].append((None, now, list(commands)))
        return commands

    with monkeypatch.context() as patch:
        patch.setattr(Core, "handle", heard)
        patch.setattr(Core, "on_tick", ticked)
        World(seed).run()
    assert len(logs) >= 2
    for core, log in logs.items():
        again = Core(core.cluster.config, (), choose=lambda members: members[-1])
        for event, now, commands in log:
            assert (again.on_tick(now) if event is None else again.handle(event, now)) == commands


# ---- planted bugs: each was once in the code, or nearly. A plant replaces one rule of one part.

Plant = Callable[[pytest.MonkeyPatch], None]


def judges_by_old_words(patch: pytest.MonkeyPatch) -> None:
    """An agent that lost its only member judges by what that had said, as soon as its replacement is ready."""
    old: dict[int, Mapping[str, Sequence[str]]] = {}
    on_progress, edit = Joins.on_progress, ViewChanges._edit

    def remember(self: Joins, worker: Worker, message: Progress, now: float) -> list[Command]:
        old[id(self._cluster)] = message.holders or old.get(id(self._cluster), {})
        return on_progress(self, worker, message, now)

    def judge(self: ViewChanges, view: View, now: float) -> list[Command]:
        lacking = missing_state(old.get(id(self._cluster), {}), set(self._cluster.alive_in_view()))
        if lacking and not self.proposing and self._cluster.workers.joiners:
            return self._shutdown.finish(1, lacking)
        return edit(self, view, now)

    patch.setattr(Joins, "on_progress", remember)
    patch.setattr(ViewChanges, "_edit", judge)


def leaves_the_dead_to_others(patch: pytest.MonkeyPatch) -> None:
    """An agent whose members have said nothing yet removes nobody, not even the proven dead."""
    edit = ViewChanges._edit

    def wait(self: ViewChanges, view: View, now: float) -> list[Command]:
        cluster = self._cluster
        some_live = 0 < len(cluster.alive_in_view()) < len(view.members)
        return [] if cluster.progress.begun and cluster.holders is None and some_live else edit(self, view, now)

    patch.setattr(ViewChanges, "_edit", wait)


def waits_for_the_dead(patch: pytest.MonkeyPatch) -> None:
    """Where no member of the view is left, an agent without one there waits for others to say so."""
    speak = ViewChanges._on_nobody_alive

    def wait(self: ViewChanges, view: View, now: float) -> list[Command]:
        return speak(self, view, now) if any(m in self._cluster.workers.by_id for m in view.ids) else []

    patch.setattr(ViewChanges, "_on_nobody_alive", wait)


def forgets_incarnations(patch: pytest.MonkeyPatch) -> None:
    """A view's member is alive as long as a node of that name is."""
    patch.setattr(Cluster, "_is_of_a_former_start", lambda self, member: False)


def looks_for_nobody(patch: pytest.MonkeyPatch) -> None:
    """A node of the view that has neither key nor link is waited for."""
    patch.setattr(PeerChanges, "_doubt_absent", lambda self, name, now: [])


def waits_for_the_roster(patch: pytest.MonkeyPatch) -> None:
    """The first view needs every node of the roster, also the dead."""
    first_nodes = Rendezvous._first_nodes

    def all_of_them(self: Rendezvous) -> list[NodeRecord]:
        known = {record.name for record in self._cluster.peers.known()}
        roster = self._cluster.roster
        lost = [record for record in roster.nodes if record.name not in known] if roster is not None else []
        return [] if lost else first_nodes(self)

    patch.setattr(Rendezvous, "_first_nodes", all_of_them)


def spares_begin_together(patch: pytest.MonkeyPatch) -> None:
    """Each spare looks only at the number of free places, not at earlier spares."""
    patch.setattr(spares, "_spares", lambda cluster: [])


def spares_wait_for_ever(patch: pytest.MonkeyPatch) -> None:
    """A spare begins before the first view only."""
    patch.setattr(spares, "_may_begin", lambda cluster: cluster.view is None)


def nodes_that_come_back_compute(patch: pytest.MonkeyPatch) -> None:
    """A node whose place was taken while nobody heard it starts its workers again."""
    patch.setattr(failures, "has_to_wait", lambda cluster: False)


def spares_believe_their_own_links(patch: pytest.MonkeyPatch) -> None:
    """A node that only this spare does not hear counts as lost."""
    patch.setattr(spares, "_computes", lambda cluster, peer: peer.linked and not peer.record.spare)


SPARE_PLANTS: dict[str, Plant] = {
    plant.__name__: plant
    for plant in (
        spares_begin_together,
        spares_wait_for_ever,
        nodes_that_come_back_compute,
        spares_believe_their_own_links,
    )
}
PLANTS: dict[str, Plant] = {
    plant.__name__: plant
    for plant in (
        judges_by_old_words,
        leaves_the_dead_to_others,
        waits_for_the_dead,
        forgets_incarnations,
        looks_for_nobody,
        waits_for_the_roster,
    )
}


def search_for(name: str) -> Search:
    """The schedules of which one has to show the planted bug."""

    def failure(seed: int) -> str:
        with pytest.MonkeyPatch.context() as patch:
            (PLANTS | SPARE_PLANTS)[name](patch)
            try:
                play(range(seed, seed + 1), has_spares=name in SPARE_PLANTS)
            except Violation as violation:
                return str(violation)
        return ""

    return Search(kind="agents", name=name, within=WITHIN, failure=failure)


@pytest.mark.parametrize("name", PLANTS | SPARE_PLANTS)
def test_planted_bug_is_found(name: str) -> None:
    assert search_for(name).find() is not None, (PLANTS | SPARE_PLANTS)[name].__doc__
