"""Is the simulator sharp? Every planted bug has to be found within the stated number of schedules.

Five rules of the design are kept although breaking one alone does no harm here, because others cover it:

- *Parameters of s+1 never overwrite those of s before the record of s is held.* A publish exists only after all have
  voted. Then every gradient of the step is finished and on every holder: whoever took parameters too early has
  nothing left to compute for that step, and the version of each parameter is in its report. What can be planted is
  to learn the record without doing one's own part (LearnsWithoutPassing).
- *The primary's digest of s is taken before its state goes on.* A backup that lacks the digest does not acknowledge
  the next gradient, so the primary cannot commit.
- *A backup acknowledges the gradient of s+1 only when its state of s is verified.* It votes for s+1 when it knows that
  it has computed with the right parameters, which it looks at after the updates that it had left behind.
- *A new holder counts only when the digest of its copy has matched.* Its first update is compared again, and a copy
  that was not what the primary had told is known by that.
- *A join takes effect at the step whose record names it.* Who goes early only interrupts the others' step, which then
  recovers. A check of its own watches that joiners interrupt nobody (JoinsByItsOwnView).

A run under way that two members report is computed by both of them, and harmless: a partial that is covered already is
not taken. Handed out without the knowledge of who computes it, it is not (HandsOutWhatIsUnderWay).
"""

from __future__ import annotations

import pytest

from tests.sim import device_plants  # noqa: F401  it adds to PLANTS
from tests.sim.findings import Finding, Search
from tests.sim.plants import PLANTS
from tests.sim.scenarios import cluster_of, draw

FIRST = {
    "CapturesAfterTheNextUpdate": 270,
    "FreesASlotTwice": 300,
    "NeverMovesWhatHasItsHolders": 315,
    "VotesBeforeItHasLooked": 8_000,
    "VotesThoughAShardIsShortOfHolders": 20_000,
}
"""Where the schedules for a bug begin, if not at the first: they only save time."""


def search_for(name: str) -> Search:
    """The schedules of which one has to show the planted bug."""
    plant = PLANTS[name]

    def failure(seed: int) -> str:
        cluster = cluster_of(seed, plant.cluster)
        try:
            with plant.patch():
                cluster.run(limit=5_000)
        except (AssertionError, KeyError, IndexError, StopIteration, ValueError) as found:
            return f"{type(found).__name__}: {found}"
        return ""

    def only(seed: int) -> bool:
        return plant.only(draw(seed))

    return Search(kind="members", name=name, within=plant.within, failure=failure, only=only, first=FIRST.get(name, 0))


def first_finding(name: str) -> Finding | None:
    """Seed and message of a schedule that the planted bug breaks."""
    return search_for(name).find()


@pytest.mark.parametrize("name", sorted(PLANTS))
def test_planted_bug_is_found(name: str) -> None:
    assert first_finding(name) is not None, f"{PLANTS[name].rule} Nothing found in {PLANTS[name].within} schedules."


def test_there_are_enough_of_them_and_each_states_its_rule() -> None:
    assert len(PLANTS) >= 15
    assert all(plant.rule.endswith(".") for plant in PLANTS.values())
