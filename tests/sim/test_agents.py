"""Agents under random faults: each ends, or goes on; nobody ends a job whose state is whole, or goes on without it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence

import pytest

from elastrain.agent_messages import Progress
from elastrain.launcher.core import Core
from elastrain.launcher.values import Command, Stage, Worker
from elastrain.membership import missing_state
from tests.sim.agents import Violation, World, outcome

CHUNK, CHUNKS = 100, 5


def play(seeds: range, core: type[Core] = Core) -> Counter[str]:
    ended: Counter[str] = Counter()
    for seed in seeds:
        world = World(seed, core)
        try:
            world.run()
        except Violation as violation:
            last = "\n".join(world.log[-12:])
            raise Violation(f"seed {seed} ({world.play}): {violation}\n{last}") from None
        ended[outcome(world)] += 1
    return ended


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_agents_end_or_go_on_whatever_dies_and_when(chunk: int) -> None:
    ended = play(range(chunk * CHUNK, (chunk + 1) * CHUNK))
    assert ended["goes on"] >= CHUNK // 4
    assert ended["ended"] >= CHUNK // 20


@pytest.mark.on_demand
@pytest.mark.timeout(0)
def test_as_many_schedules_of_agents_as_asked_for() -> None:
    first, _, behind = os.environ.get("ELASTRAIN_AGENT_SCHEDULES", "0:5000").partition(":")
    play(range(int(first), int(behind)))


# ---- planted bugs: each was once in the code, or nearly


class JudgesByOldWords(Core):
    """An agent that lost its only member judges by what that had said, as soon as its replacement is ready."""

    _old: Mapping[str, Sequence[str]] = {}

    def _on_progress(self, worker: Worker, message: Progress, now: float) -> list[Command]:
        self._old = message.holders or self._old
        return super()._on_progress(worker, message, now)

    def _edit_view(self, now: float) -> list[Command]:
        lacking = missing_state(self._old, set(self._alive_in_view()))
        if lacking and not self._proposing and any(w.stage is Stage.READY for w in self.living):
            return self._finish(1, lacking)
        return super()._edit_view(now)


class LeavesTheDeadToOthers(Core):
    """An agent whose members have said nothing yet removes nobody, not even the proven dead."""

    def _edit_view(self, now: float) -> list[Command]:
        alive = self._alive_in_view()
        if self.begun and self.holders is None and self.view is not None and 0 < len(alive) < len(self.view.members):
            return []
        return super()._edit_view(now)


class WaitsForTheDead(Core):
    """Where no member of the view is left, an agent without one there waits for others to say so."""

    def _on_nobody_alive(self, now: float) -> list[Command]:
        assert self.view is not None
        return super()._on_nobody_alive(now) if any(m in self.workers for m in self.view.ids) else []


class ForgetsIncarnations(Core):
    """A view's member is alive as long as a node of that name is."""

    def _is_of_a_former_start(self, member: str) -> bool:
        return False


class LooksForNobody(Core):
    """A node of the view that has neither key nor link is waited for."""

    def _on_absent(self, name: str, now: float) -> list[Command]:
        return []


class WaitsForTheRoster(Core):
    """The first view needs every node of the roster, also the dead."""

    def _first_nodes(self) -> list:  # type: ignore[type-arg]
        assert self.roster is not None
        known = {record.name: record for record in [self.record, *(node.record for node in self.nodes.values())]}
        lost = [record for record in self.roster.nodes if record.name not in known]
        return [] if lost else super()._first_nodes()


@pytest.mark.parametrize(
    ("plant", "first"),
    [
        (JudgesByOldWords, 100),
        (LeavesTheDeadToOthers, 60),
        (WaitsForTheDead, 0),
        (ForgetsIncarnations, 0),
        (LooksForNobody, 200),
        (WaitsForTheRoster, 0),
    ],
)
def test_planted_bug_is_found(plant: type[Core], first: int) -> None:
    """`first` only saves time: each is found within a few hundred seeds from anywhere."""
    with pytest.raises(Violation):
        play(range(first, first + CHUNK * CHUNKS), plant)
