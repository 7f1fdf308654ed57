"""Which states of shards a member keeps when a commit changes their holders."""

from __future__ import annotations

import pytest

from elastrain import protocol as p
from elastrain.job.placement import Holders
from elastrain.member.state.ballot import Commands
from elastrain.member.state.holdings import Holdings


@pytest.mark.parametrize(
    ("before", "after", "stays"),
    [
        (Holders("a", ("x",)), Holders("a", ("x", "c")), True),  # a follower: its own time as a holder is to come
        (Holders("a", ("me",)), Holders("a", ("c",)), False),
        (Holders("me", ("a",)), Holders("a", ("c",)), False),
        (Holders("a", ("me",)), Holders("me", ("a",)), True),
    ],
)
def test_a_state_goes_only_with_the_role_that_it_was_held_for(before: Holders, after: Holders, stays: bool) -> None:
    out = Commands()
    holdings = Holdings(out)
    holdings.of(0).replace(3, digest=7)
    holdings.change_role("me", 0, before, after)
    holdings.drop_leaving()
    assert (0 in holdings) is stays
    assert (p.Drop(shard=0) in out.take()) is not stays
