"""Shards in pipelines: dealt in turn, moves that are permutations, and backups spread over all who may take over."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastrain.job.dealing import Dealing
from elastrain.job.placement import Holders, Placement, target

MEMBERS = {f"m{i}": f"n{i}" for i in range(8)}


def placed(now: list[Holders | None], replicas: list[list[str]], per_block: list[int], backups: int = 0) -> Placement:
    blocks = [block for block, count in enumerate(per_block) for _ in range(count)]
    homes = [tuple(replicas[block]) for block in blocks]
    return target(now, [1] * len(blocks), MEMBERS, backups, homes, blocks)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[list[str]], list[int]]:
    """Replicas and number of shards of each block. Every replica gets a shard of each."""
    replicas = draw(
        st.lists(st.lists(st.sampled_from(list(MEMBERS)), min_size=1, max_size=4, unique=True), min_size=1, max_size=4)
    )
    return replicas, [len(each) + draw(st.integers(0, 6)) for each in replicas]


@given(job=jobs(), backups=st.integers(0, 2))
def test_the_shards_of_a_block_are_dealt_to_its_replicas_in_turn(
    job: tuple[list[list[str]], list[int]], backups: int
) -> None:
    replicas, per_block = job
    after = placed([None] * sum(per_block), replicas, per_block, backups)
    assert placed(list(after), replicas, per_block, backups) == after
    for block, count in enumerate(per_block):
        its = after[sum(per_block[:block]) :][:count]
        counts = Counter(holders.primary for holders in its)
        assert counts.keys() == set(replicas[block])
        assert max(counts.values()) - min(counts.values()) <= 1


def moves(before: Placement, after: Placement) -> list[tuple[int, str, str]]:
    pairs = enumerate(zip(before, after, strict=True))
    return [(shard, old.primary, new.primary) for shard, (old, new) in pairs if old.primary != new.primary]


def breach(job: tuple[list[list[str]], list[int]], data: st.DataObject) -> str:
    """Move one block to as many replicas as it had, and return what is wrong with that; "" if nothing is."""
    replicas, per_block = job
    before = placed([None] * sum(per_block), replicas, per_block)
    block = data.draw(st.integers(0, len(replicas) - 1))
    members, count = replicas[block], per_block[block]
    others = data.draw(
        st.lists(st.sampled_from(list(MEMBERS)), min_size=len(members), max_size=len(members), unique=True)
    )
    after = placed(list(before), [*replicas[:block], others, *replicas[block + 1 :]], per_block)
    moved = moves(before, after)
    first = sum(per_block[:block])
    if any(not first <= shard < first + count for shard, _, _ in moved):
        return "a shard of another block has moved"
    if any(giver in others for _, giver, _ in moved):
        return "a member that stays has given"
    takers = {giver: {taker for _, each, taker in moved if each == giver} for _, giver, _ in moved}
    if any(len(each) > 1 for each in takers.values()) or len(set().union(*takers.values())) < len(takers):
        return "no permutation"
    most = -(-count // len(members))
    return "too many" if max(Counter(t for _, _, t in moved).values(), default=0) > most else ""


@given(job=jobs(), data=st.data())
def test_a_move_between_equally_many_replicas_is_a_permutation(
    job: tuple[list[list[str]], list[int]], data: st.DataObject
) -> None:
    assert breach(job, data) == ""


def test_a_planted_bug_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Givers' lists are torn apart, as if each of their shards had no holder."""
    original = Dealing.deal

    def torn(self: Dealing, shards: list[int]) -> None:
        self._held = [None] * len(self._held)
        original(self, shards)

    monkeypatch.setattr(Dealing, "deal", torn)
    with pytest.raises(AssertionError, match="no permutation"):
        settings(max_examples=500, deadline=None)(test_a_move_between_equally_many_replicas_is_a_permutation)()


@given(members=st.integers(3, 6), shards=st.integers(1, 24))
def test_the_shards_of_a_lost_member_are_spread(members: int, shards: int) -> None:
    names = list(MEMBERS)[:members]
    before = placed([None] * (members * shards), [names], [members * shards], 1)
    heirs = Counter(dict.fromkeys(names[1:], 0))
    heirs.update(holders.backups[0] for holders in before if holders.primary == names[0])
    assert max(heirs.values()) - min(heirs.values()) <= 1


def test_a_newcomer_takes_over_where_blocks_have_fewer_shards_than_replicas() -> None:
    per_block = [1] * 6
    before = placed([None] * 6, [["m0", "m1"]] * 6, per_block)
    after = placed(list(before), [["m0", "m1", "m2"]] * 6, per_block)
    assert [taker for _, _, taker in moves(before, after)] == ["m2", "m2"]
