"""The copies that a member refuses, because its memory limit leaves no room for them. Pure.

After a loss the members that are left should hold more backups each, and compute more. A member without room for both
takes fewer backups, and the job goes on with shards that survive fewer losses. It never gives up what it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from elastrain.job.placement import Placement, with_refusals
from elastrain.memory.held_shards import MemoryKind
from elastrain.memory.member_account import Decision, MemberAccount
from elastrain.memory.memory_budget import Fit

Judge = Callable[[MemberAccount], Decision]
"""A function that decides about the needs of an account."""


def refusable(account: MemberAccount) -> tuple[int, ...]:
    """Return the shards whose copies the account's member may refuse, in the order in which they are refused."""
    # The copies of a device's job lie in host memory, which has a limit of its own.
    if account.sizes.memory != MemoryKind.ONE:
        return ()
    me, sizes = account.me, account.shape.sizes
    found = [
        (goal.backups.index(me), shard)
        for shard, (now, goal) in enumerate(zip(*account.placements, strict=True))
        if me in goal.backups and me not in now.all
    ]
    # The last backup first: the shard has others. Then the largest, so that few shards are affected.
    return tuple(shard for place, shard in sorted(found, key=lambda each: (-each[0], -sizes[each[1]], each[1])))


def refusing(placements: tuple[Placement, Placement], me: str, shards: Collection[int]) -> tuple[Placement, Placement]:
    """Return the present holders and those to come, if a member refuses copies of these shards."""
    if not shards:
        return placements
    now, goal = placements
    # An account counts present holders too, so those that stay in this member's place are counted.
    left = (
        with_refusals(holders, wanted, (me,) if shard in shards else ())
        for shard, (holders, wanted) in enumerate(zip(now, goal, strict=True))
    )
    return now, tuple(left)


def are_short(account: MemberAccount) -> bool:
    """Return True if some shard has fewer holders than the members of the view could hold."""
    # Fewer members than holders cannot hold more, so that is no lack.
    wanted = 1 + min(account.shape.backups, len(account.view.members) - 1)
    return any(len(holders.all) < wanted for holders in account.placements[0])


def fitted(account: MemberAccount, judge: Judge) -> tuple[MemberAccount, Decision, frozenset[int]]:
    """Refuse as few copies as possible until an account has room.

    Returns the account, the decision about it, and the shards whose copies are refused. If it has no room at all, the
    decision names what is missing without any of these copies.
    """
    # Few rounds are enough, because each refuses as many copies as the decision before has found missing.
    left, refused, own = list(refusable(account)), frozenset[int](), account
    while True:
        decision = judge(own)
        if isinstance(decision.fit, Fit) or not left:
            return own, decision, refused
        freed_bytes = 0
        while left and freed_bytes < decision.fit.missing_bytes:
            shard = left.pop(0)
            refused |= {shard}
            freed_bytes += _most_bytes(account, shard)
        own = replace(account, placements=refusing(account.placements, account.me, refused))


def _most_bytes(account: MemberAccount, shard: int) -> int:
    """Return the most that a copy of one shard takes: two states, as while an update is not verified, and gradients."""
    # Kept gradients of two steps, and scratch. With an estimate from above, no more copies are refused than needed.
    moments = account.moments[shard] if isinstance(account.moments, tuple) else account.moments
    return round(account.shape.sizes[shard] * (2 * (1 + moments) + 3))
