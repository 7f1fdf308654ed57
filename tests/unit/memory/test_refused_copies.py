"""Copies that a member refuses: as few as its limit asks for, and never what it holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from elastrain.job.placement import Holders, Placement, effective, target, with_refusals
from elastrain.job.values import Shape, ShardShape
from elastrain.job.world import Member, View
from elastrain.memory.held_shards import MemoryKind
from elastrain.memory.member_account import Decision, Limit, MemberAccount
from elastrain.memory.memory_budget import Fit, Needs, Shortfall, mib
from elastrain.memory.plan_check import largest_lack
from elastrain.memory.refused_copies import are_short, fitted, refusable, refusing
from elastrain.pipeline.planner.plan_vote import ToldMemory
from tests.unit.memory.test_memory_estimate_stages import MIB, SCRIPT

SHARDS = 8
BASE_BYTES = 100 * MIB
SHAPE = Shape(
    runs=4, blocks=4, shards=tuple(ShardShape(size_bytes=2 * MIB, lanes=(s // 2,)) for s in range(SHARDS)), backups=2
)


def view_of(members: Sequence[str]) -> View:
    return View(generation=1, members=tuple(Member(id=m, node=m) for m in members), reason="")


def after_loss(lost: Sequence[str], backups: int = 2) -> tuple[View, Placement, Placement]:
    """The view without the lost members of four, the holders that are left, and those that there should be."""
    whole = {f"m{rank}": f"m{rank}" for rank in range(4)}
    before = target([None] * SHARDS, SHAPE.sizes, whole, backups)
    view = view_of([m for m in whole if m not in lost])
    now, gone = effective(before, view.ids)
    assert not gone
    return view, tuple(h for h in now if h is not None), target(now, SHAPE.sizes, view.nodes, backups)


def account_of(me: str, lost: Sequence[str] = ("m1",), backups: int = 2) -> MemberAccount:
    view, now, goal = after_loss(lost, backups)
    shape = replace(SHAPE, backups=backups)
    return MemberAccount(me=me, shape=shape, sizes=SCRIPT.sizes, view=view, placements=(now, goal))


def needs_of(account: MemberAccount) -> Needs:
    return account.needs(base_bytes=BASE_BYTES, parameters_bytes=SCRIPT.sizes.whole_bytes)


def decided(account: MemberAccount, limit_bytes: int) -> Decision:
    return account.decide(needs_of(account), Limit(limit_bytes=limit_bytes, has_disk=False))


def limits_of(account: MemberAccount) -> tuple[int, int]:
    """The bytes with all copies, and with none."""
    now, _ = account.placements
    return needs_of(account).total_bytes, needs_of(replace(account, placements=(now, now))).total_bytes


@given(
    share=st.integers(0, 100),
    lost=st.sampled_from([("m1",), ("m1", "m2")]),
    rank=st.integers(0, 3),
    backups=st.sampled_from([1, 2]),
)
def test_a_member_refuses_no_more_copies_than_its_limit_asks_for(
    share: int, lost: tuple[str, ...], rank: int, backups: int
) -> None:
    if len(lost) > backups or f"m{rank}" in lost:
        return
    account = account_of(f"m{rank}", lost, backups)
    most_bytes, least_bytes = limits_of(account)
    limit_bytes = least_bytes + (most_bytes - least_bytes) * share // 100
    own, decision, refused = fitted(account, lambda each: decided(each, limit_bytes))
    assert isinstance(decision.fit, Fit), "what it holds has room, so some goal has"
    assert decision.fit == decided(own, limit_bytes).fit
    now, goal = account.placements
    assert all(account.me in goal[shard].backups and account.me not in now[shard].all for shard in refused)
    assert bool(refused) == (limit_bytes < most_bytes)
    if refused:
        fewer = refusable(account)[: len(refused) - 1]
        taking = replace(account, placements=refusing(account.placements, account.me, fewer))
        assert isinstance(decided(taking, limit_bytes).fit, Shortfall), "it refuses as few as possible"


def test_a_member_that_lacks_more_than_its_copies_names_what_is_missing_without_them() -> None:
    account = account_of("m0")
    _, least_bytes = limits_of(account)
    _, decision, refused = fitted(account, lambda each: decided(each, least_bytes - 3 * MIB))
    assert refused == frozenset(refusable(account)) != frozenset()
    assert isinstance(decision.fit, Shortfall)
    assert decision.fit.missing_bytes == 3 * MIB


def test_the_last_backup_is_refused_first() -> None:
    account = account_of("m0", ("m1", "m2"))
    _, goal = account.placements
    places = [goal[shard].backups.index("m0") for shard in refusable(account)]
    assert places == sorted(places, reverse=True)


def test_on_a_device_no_copy_is_refused_because_copies_lie_on_the_host() -> None:
    account = account_of("m0")
    assert refusable(replace(account, sizes=replace(account.sizes, memory=MemoryKind.DEVICE))) == ()


def test_shards_are_short_after_a_loss_and_not_before() -> None:
    account = account_of("m0")
    _, goal = account.placements
    assert are_short(account)
    assert not are_short(replace(account, placements=(goal, goal)))


names = st.sampled_from(["m0", "m1", "m2", "m3", "m4"])
holders = st.lists(names, min_size=1, max_size=4, unique=True).map(lambda its: Holders(its[0], tuple(its[1:])))


@given(now=holders, goal=holders, refused=st.frozensets(names))
def test_refusals_never_leave_a_shard_with_fewer_holders_than_it_has(
    now: Holders, goal: Holders, refused: frozenset[str]
) -> None:
    refused -= set(now.all)
    found = with_refusals(now, goal, refused)
    assert found.primary == goal.primary
    assert len(set(found.all)) == len(found.all) <= len(goal.all)
    assert refused.isdisjoint(found.backups)
    assert len(found.all) >= min(len(now.all), len(goal.all))
    assert found == goal or not refused.isdisjoint(goal.backups)


def test_the_largest_lack_is_that_of_the_member_that_lacks_most() -> None:
    account = account_of("m0")
    least = {m: limits_of(account_of(m))[1] for m in account.view.ids}

    def told(**lacks_mib: int) -> dict[str, ToldMemory]:
        limits = {m: least[m] - lack * MIB for m, lack in lacks_mib.items()}
        return {
            m: ToldMemory(limit_bytes=limit_bytes, base_bytes=BASE_BYTES, taken_bytes=0, has_limit=True)
            for m, limit_bytes in limits.items()
        }

    found = largest_lack(account, {}, told(m0=50, m2=3, m3=8))
    more = largest_lack(account, {}, told(m0=50, m2=3, m3=11))
    assert found is not None and more is not None
    assert found[0] == more[0] == "m3", "not the asking member, and not the one that lacks less"
    # Its copies to others on their way come on top.
    assert found[1].missing_bytes >= 8 * MIB
    assert more[1].missing_bytes == found[1].missing_bytes + 3 * MIB
    assert f"limit is {mib(found[1].missing_bytes)} too small" in found[1].reason
    assert largest_lack(account, {}, told(m0=50, m2=-1000, m3=-1000)) is None
    without = {m: replace(its, has_limit=False) for m, its in told(m2=3, m3=8).items()}
    assert largest_lack(account, {}, without) is None
