"""comm/collectives/hosts.py: sums on each host first; the plans of all ranks fit together, in the order of the tree."""

from __future__ import annotations

import itertools

import pytest

from elastrain.comm.collectives import algorithms, hosts
from elastrain.comm.collectives.algorithms import AllReduce, Round

PLACES: list[tuple[int, ...]] = [
    (0, 0, 1, 1),
    (0, 0, 0, 1, 1, 1),
    (0, 0, 0, 1),
    (0, 1, 0, 1, 0),
    (5, 5, 3, 3, 3, 9, 9),
    (0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2),
]


def _spelled(steps: tuple[tuple[int, int], ...], world: int) -> str:
    sums = {rank: str(rank) for rank in range(world)}
    for left, right in steps:
        sums[left] = f"({sums[left]}+{sums.pop(right)})"
    (whole,) = sums.values()
    return whole


def test_the_order_is_that_of_each_host_and_then_of_the_hosts() -> None:
    assert _spelled(hosts.tree((0, 0, 0, 1, 1)), 5) == "(((0+1)+2)+(3+4))"
    assert _spelled(hosts.tree((7, 2, 7, 2, 4)), 5) == "(((0+2)+(1+3))+4)"
    assert _spelled(hosts.tree((3,)), 1) == "0"


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8, 13])
def test_one_host_one_rank_each_and_equal_powers_of_two_keep_the_order_of_the_ranks(world: int) -> None:
    plain = _spelled(algorithms.tree(world), world)
    assert _spelled(hosts.tree((0,) * world), world) == plain
    assert _spelled(hosts.tree(range(world)), world) == plain
    pairs = tuple(rank // 2 for rank in range(2 * world))
    assert _spelled(hosts.tree(pairs), 2 * world) == _spelled(algorithms.tree(2 * world), 2 * world)


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("numel", [1, 63, 64, 1000, 100_001])
def test_every_message_is_awaited_and_every_element_is_summed_once_and_reaches_all(
    places: tuple[int, ...], numel: int
) -> None:
    plans = [hosts.two_levels(rank, places, numel) for rank in range(len(places))]
    for number in range(4):
        sent = {(rank, send.to) for rank, plan in enumerate(plans) for send in plan.rounds[number].sends}
        awaited = {(of, rank) for rank, plan in enumerate(plans) for of in plan.rounds[number].awaits}
        assert sent == awaited, f"round {number}"
    for plan in plans:
        assert sorted(plan.owners.values())[0][0] == 0 and sum(b - a for a, b in plan.owners.values()) == numel
    summed = []
    for rank, plan in enumerate(plans):
        if rank in plan.pieces:
            begin, (start, stop) = plan.owners[rank][0], plan.pieces[rank]
            summed.append((begin + start, begin + stop))
    edges = sorted(interval for interval in summed if interval[1] > interval[0])
    assert edges[0][0] == 0 and edges[-1][1] == numel
    assert all(one[1] == other[0] for one, other in itertools.pairwise(edges))


def _crossing(rounds: list[tuple[Round, ...]], places: tuple[int, ...]) -> int:
    return sum(
        send.stop - send.start
        for rank, plan in enumerate(rounds)
        for one in plan
        for send in one.sends
        if places[rank] != places[send.to]
    )


def test_fewer_elements_cross_between_hosts_than_without_levels() -> None:
    places, numel = (0, 0, 0, 0, 1, 1, 1, 1), 1 << 20
    two = _crossing([hosts.two_levels(rank, places, numel).rounds for rank in range(8)], places)
    flat = _crossing([algorithms.scatter_gather(rank, 8, numel) for rank in range(8)], places)
    assert two == 2 * numel and flat == 8 * numel


def test_two_levels_are_chosen_where_they_spare_something_and_the_reason_says_what() -> None:
    choose = algorithms.choose_all_reduce
    assert choose(1 << 20, 4, pulled=False, hosts=(0, 0, 1, 1)) == (
        AllReduce.TWO_LEVELS,
        "1048576 bytes: sums of each of 2 hosts travel, not of each rank",
    )
    assert choose(1 << 20, 4, pulled=False, hosts=(0, 1, 2, 3))[0] is AllReduce.SCATTER_GATHER
    assert choose(1 << 20, 4, pulled=False, hosts=(0, 0, 0, 0))[0] is AllReduce.SCATTER_GATHER
    assert choose(4096, 4, pulled=False, hosts=(0, 0, 1, 1))[0] is AllReduce.EXCHANGE
