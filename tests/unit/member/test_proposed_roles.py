"""What a primary's vote says about the holders of its shards."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elastrain.job.placement import Holders
from elastrain.member.commit_rules import Committing
from elastrain.member.state.committed import Roles

ALL = Holders("m0", ("m1", "m2"))


def _proposed(committed: Holders, live: Holders, ready: set[str]) -> list[tuple[int, Holders]]:
    roles = Roles(live.primary)
    roles.settle((committed,), (live,))
    roles.aim((ALL,), {})
    ballot = SimpleNamespace(acknowledged=lambda _shard: ready)
    machine: Any = SimpleNamespace(
        me=live.primary, commit=SimpleNamespace(roles=roles), step=SimpleNamespace(ballot=ballot)
    )
    committing = Committing.__new__(Committing)
    committing._machine = machine
    return list(committing.proposed_roles([0]))


def test_a_present_holder_stays_in_the_place_of_a_member_without_room() -> None:
    roles = Roles("m0")
    now = Holders("m0", ("m3",))
    roles.settle((now,), (now,))
    roles.aim((ALL,), {})
    assert roles.goal(0) == ALL
    roles.refuse("m1", [0])
    assert roles.goal(0) == Holders("m0", ("m2", "m3"))
    roles.refuse("m2", [0])
    assert roles.goal(0) == now
    assert roles.copies_to_make({"m0": "n0", "m1": "n1", "m2": "n2", "m3": "n3"}) == ([], [])
    roles.aim((ALL,), {})
    assert roles.goal(0) == ALL, "under another plan it is asked again"


@pytest.mark.parametrize(
    ("committed", "live", "ready", "after"),
    [
        pytest.param(ALL, ALL, {"m1", "m2"}, None, id="nothing has changed"),
        pytest.param(Holders("m0", ("m1", "m9")), Holders("m0", ("m1",)), {"m1", "m2"}, ALL, id="one was replaced"),
        pytest.param(
            Holders("m0", ("m1", "m9")), Holders("m0", ("m1",)), {"m1"}, Holders("m0", ("m1",)), id="one died"
        ),
        pytest.param(ALL, Holders("m1", ("m2",)), {"m0", "m2"}, ALL, id="one was wrong, and has a copy again"),
        pytest.param(ALL, Holders("m1", ("m2",)), {"m2"}, Holders("m1", ("m2",)), id="one was wrong, and has none yet"),
    ],
)
def test_a_change_of_holders_is_what_differs_from_the_last_commit_or_from_this_view(
    committed: Holders, live: Holders, ready: set[str], after: Holders | None
) -> None:
    assert _proposed(committed, live, ready) == ([] if after is None else [(0, after)])
