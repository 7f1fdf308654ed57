"""The schedule of the soak of three hosts, and what it counts."""

from __future__ import annotations

from itertools import pairwise

from experiments.multinode.quorum import HOSTS
from experiments.multinode.soak import STRIKE_EVERY_S, STRIKES_IN_A_TURN, Strike, changes_of, strike_of


def test_an_etcd_member_is_lost_every_five_minutes_and_each_host_is_lost_whole_once() -> None:
    turns = [[strike_of(turn * STRIKES_IN_A_TURN + place) for place in range(STRIKES_IN_A_TURN)] for turn in range(6)]
    assert STRIKE_EVERY_S * STRIKES_IN_A_TURN == 300
    for turn in turns:
        assert sum(strike in (Strike.ETCD, Strike.HOST) for strike, _ in turn) == 1
    assert {host for turn in turns for strike, host in turn if strike is Strike.HOST} == set(HOSTS)


def test_a_lost_host_is_started_again_by_the_next_strike() -> None:
    strikes = [strike_of(number) for number in range(12 * STRIKES_IN_A_TURN)]
    after = [(host, *following) for (strike, host), following in pairwise(strikes) if strike is Strike.HOST]
    assert len(after) == 6
    assert all((strike, started) == (Strike.START, host) for host, strike, started in after)


def test_losses_and_joins_are_counted_over_views_in_the_order_of_their_generations() -> None:
    views = {3: ("m0", "m2", "m3"), 1: ("m0", "m1", "m2"), 2: ("m0", "m2")}
    assert changes_of(views) == (1, 1)
    assert changes_of({}) == (0, 0)
