"""Which step becomes a checkpoint, and who writes what of it."""

from __future__ import annotations

import pytest

from elastrain.job.checkpoint_plan import Checkpointed, Wish, balanced, decide, keepers, steady, writers
from elastrain.job.placement import Holders

HOLDERS = (Holders("a", ("b",)), Holders("a", ("c",)), Holders("b", ()), Holders("a", ("b", "c")))


@pytest.mark.parametrize(
    ("wishes", "writing", "expected"),
    [
        ([Wish.NONE, Wish.NONE], False, Checkpointed.NO),
        ([Wish.NONE, Wish.DUE], False, Checkpointed.TAKEN),
        ([Wish.WANTED, Wish.NONE], False, Checkpointed.TAKEN),
        ([Wish.LAST, Wish.DUE], False, Checkpointed.LAST),
        ([Wish.DUE, Wish.NONE], True, Checkpointed.PASSED_OVER),
        ([Wish.WANTED, Wish.DUE], True, Checkpointed.NO),
        ([], False, Checkpointed.NO),
    ],
)
def test_the_strongest_wish_counts_unless_one_is_being_written(
    wishes: list[Wish], writing: bool, expected: Checkpointed
) -> None:
    assert decide(wishes, writing=writing) is expected


def test_a_backup_writes_and_the_primary_where_there_is_none() -> None:
    named = writers(HOLDERS, [8, 8, 8, 8], all_holders=False)
    assert sorted(shard for _, shard in named) == [0, 1, 2, 3]
    assert ("b", 0) in named and ("c", 1) in named and ("b", 2) in named and ("c", 3) in named


def test_on_disks_of_their_own_every_holder_writes() -> None:
    assert len(writers(HOLDERS, [8, 8, 8, 8], all_holders=True)) == 8


def test_who_comes_or_goes_with_the_commit_does_not_write() -> None:
    after = (Holders("b", ("a",)), Holders("a", ("c",)), Holders("b", ("a",)), Holders("a", ("c",)))
    kept = steady(HOLDERS, after)
    assert kept == (Holders("a", ()), Holders("a", ("c",)), Holders("b", ()), Holders("a", ("c",)))


def test_large_shards_are_shared_out_first() -> None:
    holders = (Holders("a", ("b", "c")),) * 3
    assert balanced(range(3), holders, [1, 9, 9]) == [("b", 1), ("c", 2), ("b", 0)]


def test_one_writer_of_each_node_that_lives_is_its_keeper() -> None:
    named = {("a", 0), ("b", 0), ("c", 1), ("d", 1)}
    assert keepers(named, {"a": "n0", "b": "n0", "c": "n1", "e": "n2"}) == {"a", "c"}
