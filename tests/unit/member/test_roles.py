"""Who holds what: on which other nodes there is what a member holds."""

from __future__ import annotations

import pytest

from elastrain.job.placement import Holders
from elastrain.member.state.committed import Roles

NODES = {"m0": "node0", "m1": "node0", "m2": "node1"}


@pytest.mark.parametrize(
    ("live", "elsewhere"),
    [
        ((Holders("m0", ("m2",)), Holders("m2", ("m0",))), {0: {"m2"}, 1: {"m2"}}),
        ((Holders("m0", ("m2",)), Holders("m0", ())), {0: {"m2"}, 1: set()}),
        ((Holders("m0", ("m1",)),), {0: set()}),  # both on one node
        ((Holders("m0", ("m1", "m2")),), {0: {"m2"}}),
        ((Holders("m1", ()),), {}),  # m1 itself sees to that
        ((Holders("m0", ("m3",)),), {0: set()}),  # who is not in the view may be gone
        ((), {}),
    ],
)
def test_holders_on_other_nodes_of_what_a_member_holds(
    live: tuple[Holders, ...], elsewhere: dict[int, set[str]]
) -> None:
    roles = Roles("m0")
    roles.set_live(live)
    assert roles.elsewhere(NODES) == elsewhere
