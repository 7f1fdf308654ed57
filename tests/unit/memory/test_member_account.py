"""The account of one member: shards whose holders change, and sums of pipelines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastrain.job.placement import Holders
from elastrain.job.values import Pipelining, Shape, ShardShape
from elastrain.job.world import Member, View
from elastrain.memory.member_account import MemberAccount, ModelSizes

MIB = 1 << 20


def account(members: str, now: tuple[Holders, ...], goal: tuple[Holders, ...]) -> MemberAccount:
    """The account of `a` in a job of these members, with shards of 1 MiB under Adam."""
    return MemberAccount(
        me="a",
        shape=Shape(runs=1, blocks=1, shards=(ShardShape(size_bytes=MIB, lanes=(0,)),) * len(now), backups=1),
        sizes=ModelSizes(masters=False, slot_bytes=0, whole_bytes=len(now) * MIB),
        view=View(generation=0, members=tuple(Member(id=name, node="node0") for name in members)),
        placements=(now, goal),
        copied_bytes=4 * MIB,
    )


def states_mib(its: MemberAccount) -> int:
    return its.needs(base_bytes=0, parameters_bytes=0).shards_bytes // MIB


def test_shards_that_keep_their_holders_change_roles_at_once() -> None:
    """Two values of Adam for each as a primary; two states of three values as a backup, the second one unverified."""
    mine, others = Holders("a", ("b",)), Holders("b", ("a",))
    swapped = account("ab", (mine, others), (others, mine))
    assert states_mib(swapped) == 2 + 6
    assert swapped.copying_bytes == 0
    # Where one side holds more, that side counts, whichever comes first.
    more = account("ab", (mine, mine), (others, mine))
    assert states_mib(more) == states_mib(account("ab", (others, mine), (mine, mine))) == 6 + 2


def test_a_shard_that_gets_another_holder_counts_where_it_was_and_where_it_goes() -> None:
    mine, others = Holders("a", ("b",)), Holders("b", ("c",))
    moving = account("abc", (mine, others), (others, mine))
    assert states_mib(moving) == 2 + 2
    # Both move, at their givers and at their receivers; of each there are three values.
    assert moving.copying_bytes == 2 * 2 * 3 * MIB
    assert replace(moving, copied_bytes=MIB).copying_bytes == 2 * 3 * MIB


@pytest.mark.parametrize(("stages", "sums"), [(None, 3), (2, 3), (4, 2), (8, 1)])
def test_a_primary_adds_up_the_partials_of_replicas_and_of_one_that_takes_over(stages: int | None, sums: int) -> None:
    its = account("abcdefgh", (Holders("a", ()),), (Holders("a", ()),))
    pipelining = None if stages is None else Pipelining(stages=stages, micro_batches=8, run_length=1)
    piped = replace(its, shape=replace(its.shape, pipelining=pipelining))
    # And scratch for the update.
    assert piped.gradients_bytes == (sums + 1) * MIB
