"""comm/wire/addresses.py: who is whose neighbour."""

from __future__ import annotations

import itertools

from elastrain.comm.wire.addresses import neighbours

ORDER = tuple("abcdefgh")


def _next_to(me: str, lost: str = "", nodes: str = "11111111") -> str:
    found = neighbours(me, ORDER, set(lost), dict(zip(ORDER, nodes, strict=True)))
    return "".join(sorted(found))


def test_each_member_has_the_next_and_the_previous_one() -> None:
    assert [_next_to(me) for me in ORDER] == ["bh", "ac", "bd", "ce", "df", "eg", "fh", "ag"]


def test_small_rings_have_no_one_twice() -> None:
    assert neighbours("a", ("a",), set(), {"a": "1"}) == frozenset()
    assert neighbours("a", ("a", "b"), set(), {"a": "1", "b": "1"}) == {"b"}
    assert neighbours("x", ("a", "b"), set(), {"a": "1", "b": "1"}) == frozenset()


def test_the_lost_are_passed_over_and_those_left_are_one_ring_whoever_is_lost() -> None:
    assert _next_to("c", lost="d") == "be" and _next_to("c", lost="bd") == "ae" and _next_to("a", lost="bcdefgh") == ""
    for size in range(len(ORDER)):
        for lost in itertools.combinations(ORDER, size):
            alive = [member for member in ORDER if member not in lost]
            for at, member in enumerate(alive):
                wanted = {alive[at - 1], alive[(at + 1) % len(alive)]} - {member}
                assert set(_next_to(member, "".join(lost))) == wanted


def test_all_of_another_node_that_has_lost_somebody_next_to_me_are_tried_at_once() -> None:
    nodes = "11122233"
    assert _next_to("c", lost="d", nodes=nodes) == "befg"
    assert _next_to("g", lost="f", nodes=nodes) == "cdeh"
    assert _next_to("c", lost="de", nodes=nodes) == "bfg"
    assert _next_to("a", lost="d", nodes=nodes) == "bh"  # it is not next to me
    assert _next_to("e", lost="d", nodes=nodes) == "cf"  # on my own node the dead are known to be dead
