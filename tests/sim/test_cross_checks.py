"""Members that compute a micro-batch of each other's: an alarm where they differ, on all of them, and never else.

That there is never a false one is shown by every schedule of this folder: members check each other in all of them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastrain import protocol as p
from tests.sim.cluster import Cluster
from tests.sim.scenarios import draw


class Alarmed(Cluster):
    """Goes on after an alarm, to hear what each member says."""

    def __init__(self, seed: int, **changes: object) -> None:
        self.alarms: dict[str, str] = {}
        self.checked: list[tuple[str, int]] = []
        super().__init__(replace(draw(seed), carries=True, resumes=None, early=False, **changes), seed, None)  # type: ignore[arg-type]

    def _failed(self, name: str, failure: p.Fail) -> None:
        self.alarms[name] = failure.reason
        self.finished.add(name)

    def _compute(self, name: str, command: p.Compute | p.Recompute) -> None:
        if isinstance(command, p.Recompute):
            self.checked.append((name, command.step))
        super()._compute(name, command)


@pytest.mark.parametrize("members", [2, 3, 5])
def test_a_forward_that_carries_something_along_ends_the_job_on_all_members_with_one_sentence(members: int) -> None:
    for seed in range(40):
        cluster = Alarmed(seed, members=members)
        cluster.run()
        assert set(cluster.alarms) == set(cluster.view.ids), f"seed {seed}"
        assert len(set(cluster.alarms.values())) == 1, f"seed {seed}"
        assert "of step 0 came out differently on m0 and m" in cluster.alarms["m0"]
        assert cluster.committed == -1


def test_a_job_of_one_checks_nobody_until_somebody_joins() -> None:
    alarmed = 0
    for seed in range(40):
        cluster = Alarmed(
            seed, members=1, joins=1, crashes=0, zombies=0, hunts=0, flips=0, isolated=False, check_every=0
        )
        cluster.run()
        assert {name for name, _ in cluster.checked} <= {"m1"}, f"seed {seed}: only the newcomer is checked"
        alarmed += bool(cluster.alarms)
    assert alarmed >= 5, "a newcomer is checked in its first step"
