"""Placement: balanced, no more movement than needed, backups on other nodes, and roles that never cost redundancy."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from elastrain.job.placement import Holders, Placement, effective, handed_over, next_roles, target

NAMES = [f"m{i}" for i in range(8)]


@st.composite
def clusters(draw: st.DrawFn) -> dict[str, str]:
    """Members and their nodes."""
    members = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=8, unique=True))
    return {member: f"n{draw(st.integers(0, 3))}" for member in members}


@st.composite
def currents(draw: st.DrawFn, shards: int) -> list[Holders | None]:
    """Any holders, of a cluster that may have been another one."""
    found: list[Holders | None] = []
    for _ in range(shards):
        names = draw(st.lists(st.sampled_from(NAMES), max_size=3, unique=True))
        found.append(Holders(names[0], tuple(names[1:])) if names else None)
    return found


def living(current: list[Holders | None], nodes: dict[str, str]) -> list[Holders | None]:
    base = tuple(holders or Holders("nobody") for holders in current)
    return list(effective(base, nodes)[0])


shards_st = st.integers(1, 24)
backups_st = st.integers(0, 3)


@given(nodes=clusters(), shards=shards_st, backups=backups_st, data=st.data())
def test_primaries_of_equal_shards_are_balanced_with_the_fewest_moves(
    nodes: dict[str, str], shards: int, backups: int, data: st.DataObject
) -> None:
    now = living(data.draw(currents(shards)), nodes)
    after = target(now, [1] * shards, nodes, backups)
    counts = Counter(dict.fromkeys(nodes, 0))
    counts.update(holders.primary for holders in after)
    assert max(counts.values()) - min(counts.values()) <= 1
    moved = sum(
        before is not None and before.primary != holders.primary for before, holders in zip(now, after, strict=True)
    )
    assert moved == fewest_moves(now, nodes)


def fewest_moves(now: list[Holders | None], nodes: dict[str, str]) -> int:
    """Every member may keep its share; the longer shares go to those who have most."""
    have = sorted((sum(h is not None and h.primary == m for h in now) for m in nodes), reverse=True)
    share, longer = divmod(len(now), len(nodes))
    kept = sum(min(count, share + (rank < longer)) for rank, count in enumerate(have))
    return sum(have) - kept


@given(nodes=clusters(), sizes=st.lists(st.integers(1, 9), min_size=1, max_size=24), backups=backups_st, data=st.data())
def test_a_shard_has_as_many_backups_as_there_can_be_all_different(
    nodes: dict[str, str], sizes: list[int], backups: int, data: st.DataObject
) -> None:
    now = living(data.draw(currents(len(sizes))), nodes)
    for holders in target(now, sizes, nodes, backups):
        assert len(holders.backups) == min(backups, len(nodes) - 1)
        assert len(set(holders.all)) == len(holders.all)
        assert set(holders.all) <= set(nodes)


@given(nodes=clusters(), sizes=st.lists(st.integers(1, 9), min_size=1, max_size=24), backups=backups_st, data=st.data())
def test_no_backup_is_on_the_primarys_node_while_a_free_member_lives_elsewhere(
    nodes: dict[str, str], sizes: list[int], backups: int, data: st.DataObject
) -> None:
    now = living(data.draw(currents(len(sizes))), nodes)
    for holders in target(now, sizes, nodes, backups):
        elsewhere = {member for member, node in nodes.items() if node != nodes[holders.primary]}
        for place, backup in enumerate(holders.backups):
            if elsewhere - set(holders.backups[:place]):
                assert backup in elsewhere


@given(nodes=clusters(), sizes=st.lists(st.integers(1, 9), min_size=1, max_size=24), backups=backups_st, data=st.data())
def test_the_target_is_the_same_whoever_computes_it_and_stays_where_it_is(
    nodes: dict[str, str], sizes: list[int], backups: int, data: st.DataObject
) -> None:
    now = living(data.draw(currents(len(sizes))), nodes)
    after = target(now, sizes, nodes, backups)
    assert target(list(now), list(sizes), dict(nodes), backups) == after
    assert target(after, sizes, nodes, backups) == after


@given(nodes=clusters(), sizes=st.lists(st.integers(1, 9), min_size=1, max_size=24))
def test_no_single_move_of_a_primary_would_balance_better(nodes: dict[str, str], sizes: list[int]) -> None:
    after = target([None] * len(sizes), sizes, nodes, 0)
    load = dict.fromkeys(nodes, 0)
    for size, holders in zip(sizes, after, strict=True):
        load[holders.primary] += size
    for size, holders in zip(sizes, after, strict=True):
        assert load[holders.primary] - min(load.values()) <= size


@given(shards=shards_st, backups=st.integers(1, 2), members=st.integers(3, 8))
def test_the_loss_of_a_member_moves_only_what_it_held(shards: int, backups: int, members: int) -> None:
    nodes = {name: name for name in NAMES[:members]}
    before = target([None] * shards, [1] * shards, nodes, backups)
    del nodes[NAMES[0]]
    now = effective(before, nodes)[0]
    after = target(now, [1] * shards, nodes, backups)
    promoted = [h.primary for h in now if h is not None]
    moved = sum(promoted[s] != after[s].primary for s in range(shards))
    assert moved == fewest_moves(list(now), nodes)


@given(data=st.data(), shards=st.integers(1, 6))
def test_next_roles_keep_every_verified_holder_until_the_goal_is_reached(data: st.DataObject, shards: int) -> None:
    names_st = st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True)
    for _ in range(shards):
        now, goal = (Holders(names[0], tuple(names[1:])) for names in (data.draw(names_st), data.draw(names_st)))
        ready = {*now.all, *data.draw(st.sets(st.sampled_from(NAMES)))}
        after = next_roles(now, goal, ready)
        assert set(after.all) <= ready
        assert len(set(after.all)) == len(after.all)
        if set(goal.all) <= ready:
            assert after == goal
        else:
            assert after.primary == now.primary
            assert set(now.all) <= set(after.all)
            assert len(after.all) <= max(len(now.all), len(goal.all))


@given(nodes=clusters(), data=st.data())
def test_a_handed_over_shard_keeps_its_copies_on_other_nodes(nodes: dict[str, str], data: st.DataObject) -> None:
    names = data.draw(st.permutations(sorted(nodes)))
    now = Holders(names[0], tuple(names[1 : data.draw(st.integers(1, len(names)))]))
    taker = data.draw(st.sampled_from(sorted(nodes)))
    ready = {*now.all, taker, *data.draw(st.sets(st.sampled_from(sorted(nodes))))}
    after = handed_over(now, taker, ready, nodes)
    assert after.primary == taker
    assert set(after.all) <= ready
    assert len(set(after.all)) == len(after.all)
    assert len(after.all) == len(now.all), "as many copies as before"
    if now.backups and any(nodes[member] != nodes[taker] for member in now.all):
        assert nodes[after.backups[0]] != nodes[taker]


@given(nodes=clusters(), shards=shards_st, data=st.data())
def test_effective_promotes_the_first_living_holder_and_names_what_is_lost(
    nodes: dict[str, str], shards: int, data: st.DataObject
) -> None:
    base: Placement = tuple(h or Holders("nobody") for h in data.draw(currents(shards)))
    now, lost = effective(base, nodes)
    for shard, holders in enumerate(base):
        left = [member for member in holders.all if member in nodes]
        assert (shard in lost) == (not left)
        assert now[shard] == (Holders(left[0], tuple(left[1:])) if left else None)


@given(nodes=clusters(), shards=shards_st, backups=backups_st, data=st.data())
def test_holders_are_members_that_compute_with_the_shard_and_stay(
    nodes: dict[str, str], shards: int, backups: int, data: st.DataObject
) -> None:
    homes = [data.draw(st.sets(st.sampled_from(NAMES))) & set(nodes) for _ in range(shards)]
    now = living(data.draw(currents(shards)), nodes)
    after = target(now, [1] * shards, nodes, backups, homes)
    assert target(after, [1] * shards, nodes, backups, homes) == after
    for holders, home in zip(after, homes, strict=True):
        assert holders.primary in home or not home
        elsewhere = {m for m in nodes if nodes[m] != nodes[holders.primary]}
        for place, backup in enumerate(holders.backups):
            free = elsewhere - set(holders.backups[:place]) or set(nodes) - {holders.primary, *holders.backups[:place]}
            assert backup in (free & home or free)
