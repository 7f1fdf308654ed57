"""Who holds what: when a member's node may go without taking the only copy of a state along."""

from __future__ import annotations

import pytest

from elastrain.member.roles import Roles
from elastrain.placement import Holders

NODES = {"m0": "node0", "m1": "node0", "m2": "node1"}


@pytest.mark.parametrize(
    ("live", "is_elsewhere"),
    [
        ((Holders("m0", ("m2",)), Holders("m2", ("m0",))), True),
        ((Holders("m0", ("m2",)), Holders("m0", ())), False),
        ((Holders("m0", ("m1",)),), False),  # both on the node that goes
        ((Holders("m0", ("m1", "m2")),), True),
        ((Holders("m1", ()),), True),  # m1 itself sees to that
        ((), True),
    ],
)
def test_a_member_is_spare_when_all_that_it_holds_is_on_another_node_too(
    live: tuple[Holders, ...], is_elsewhere: bool
) -> None:
    roles = Roles("m0")
    roles.set_live(live)
    assert roles.are_elsewhere_too(NODES) is is_elsewhere
