"""Placement of every shard's optimizer state: one primary and `B` backups, on different nodes if there are several.

Holders are state, and only a commit changes them. `target` computes where they should be. `next_roles` computes the
step towards it that the living, verified holders allow. All functions are pure, and every member computes the same.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat

from elastrain.job.dealing import Dealing


@dataclass(frozen=True)
class Holders:
    """The members that hold one shard.

    `primary` updates the shard and publishes its parameters. The first of `backups` is its successor.
    """

    primary: str
    backups: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        """All holders, the primary first."""
        return (self.primary, *self.backups)


Placement = tuple[Holders, ...]
"""One entry per shard."""


def living(holders: Holders, members: Collection[str]) -> Holders | None:
    """Return the holders that are still members. The first one left is the primary. None if none is left."""
    # Every member must find the same primary without asking, so the committed order decides.
    left = tuple(holder for holder in holders.all if holder in members)
    return Holders(left[0], left[1:]) if left else None


def effective(base: Placement, members: Collection[str]) -> tuple[tuple[Holders | None, ...], tuple[int, ...]]:
    """Return the living holders of each shard, and the shards that have no holder left."""
    now = tuple(living(holders, members) for holders in base)
    return now, tuple(shard for shard, holders in enumerate(now) if holders is None)


def target(
    current: Sequence[Holders | None],
    sizes: Sequence[int],
    nodes: Mapping[str, str],
    backups: int,
    homes: Sequence[Collection[str]] | None = None,
    blocks: Sequence[Hashable] | None = None,
) -> Placement:
    """Compute which members should hold each shard: balanced, spread over nodes, with as little movement as possible.

    current: present holders of each shard; None if it has none.
    sizes: bytes per shard.
    nodes: member -> node, in rank order.
    homes: per shard, the members that compute with it. Holders are chosen among them if one lives. None: all members
        do.
    blocks: per shard, its block. With `homes`, the shards of a block are dealt to its members in turn, and a move
        between equally many members is a permutation. None: shards with equal homes are a block.

    A backup is never on its primary's node while another node lives.
    """
    # In rank order: of equally loaded members, every member takes the same first one.
    members = list(nodes)
    # Primaries first: others wait for a primary's update, but backups update in the background.
    kept = [holders.primary if holders else None for holders in current]
    # A primary that does not compute with its shard would have to keep its parameters only for other members.
    outside = [_outside(frozenset(), members, homes, s) for s in range(len(sizes))]
    # Without homes all members compute with all shards, and every shard may even out every other one.
    hands = None if homes is None else list(zip(blocks or repeat(0), map(frozenset, homes), strict=False))
    primaries = (
        _balance(kept, sizes, members, outside) if hands is None else _deal(kept, sizes, members, outside, hands)
    )
    chosen: list[tuple[str, ...]] = [() for _ in sizes]
    # One layer of backups after the other, so that each layer is balanced by itself.
    for place in range(min(backups, len(members) - 1)):
        wanted = [_backup_at(holders, place, primaries[s], chosen[s]) for s, holders in enumerate(current)]
        forbidden = [_forbidden(primaries[s], chosen[s], nodes) for s in range(len(sizes))]
        # A member that computes with the shard can take over without a transfer. Being on another node matters more.
        forbidden = [_outside(each, members, homes, s) for s, each in enumerate(forbidden)]
        if hands is None:
            layer = _balance(wanted, sizes, members, forbidden, spread_from=primaries)
        else:
            # The backups of each primary are dealt for themselves, so that its loss loads all others alike.
            layer = _deal(wanted, sizes, members, forbidden, list(zip(hands, primaries, strict=True)))
        chosen = [(*chosen[s], layer[s]) for s in range(len(sizes))]
    return tuple(Holders(primary, rest) for primary, rest in zip(primaries, chosen, strict=True))


def next_roles(now: Holders, goal: Holders, ready: Collection[str]) -> Holders:
    """Return the holders after the next commit: `goal` once all of it is ready, until then the best that is possible.

    ready: members whose copy is verified and that hold this step's gradient, including the present holders.
    """
    # Roles move all at once: a half-moved shard could have its backup on the primary's node.
    if set(goal.all) <= set(ready):
        return goal
    # Until then a ready copy counts as one more backup, if there is a free place. It survives losses already.
    kept = [m for m in now.backups if m in ready]
    new = [m for m in (*goal.backups, goal.primary) if m in ready and m not in now.all]
    size = max(len(goal.backups), len(now.backups))
    return Holders(now.primary, tuple([*kept, *new][:size]))


def with_refusals(now: Holders, goal: Holders, refused: Collection[str]) -> Holders:
    """Return the goal without the backups that have no room for a copy. Present holders keep theirs in their place."""
    # Most goals have no refusals, and stay the same object.
    if not refused:
        return goal
    taking = [member for member in goal.backups if member not in refused]
    # A member that gives its role up for one that cannot take it would leave the shard with fewer copies.
    staying = [member for member in now.all if member not in (goal.primary, *taking)]
    return Holders(goal.primary, tuple([*taking, *staying][: len(goal.backups)]))


def handed_over(
    now: Holders, taker: str, ready: Collection[str], nodes: Mapping[str, str], backups: int = 0
) -> Holders:
    """Return the holders once `taker` is the primary: no fewer, the former primary among them where it fits.

    ready: members whose copy is verified and that hold this step's gradient, `taker` and the present holders included.
    backups: number of backups that the shard should have. It has fewer for some steps after a loss.
    """
    others = [member for member in (*now.backups, now.primary) if member != taker and member in ready]
    # A node dies as a whole, so backups on other nodes than the new primary's come first.
    apart = sorted(others, key=lambda member: nodes.get(member) == nodes.get(taker))
    return Holders(taker, tuple(apart[: max(len(now.backups), backups)]))


def first_copies(have: Sequence[str], goal: Holders, nodes: Mapping[str, str]) -> tuple[str, ...]:
    """Return the members of `goal` whose copies bring a shard back to its full number of holders.

    have: members that hold the shard now, or get each gradient already. Empty result if these are enough.
    """
    # Members on nodes without a holder come first, because a node dies as a whole. Future backups come before a future
    # primary: its copy would be worth no more, and would also make the role move.
    used = {nodes.get(holder) for holder in have}
    new = [member for member in (*goal.backups, goal.primary) if member not in have]
    apart = sorted(new, key=lambda member: nodes.get(member) in used)
    return tuple(apart[: max(0, len(goal.all) - len(have))])


def _backup_at(holders: Holders | None, place: int, primary: str, taken: tuple[str, ...]) -> str | None:
    """Return the member that can take this backup place without movement: the first holder without a role yet."""
    if holders is None:
        return None
    rest = [m for m in (*holders.backups, holders.primary) if m != primary and m not in taken]
    return rest[0] if rest else None


def _forbidden(primary: str, taken: tuple[str, ...], nodes: Mapping[str, str]) -> frozenset[str]:
    """Return the members that may not back a shard up: its holders, and the primary's node if another one is free."""
    # A node dies as a whole: a backup beside its primary would die with it.
    here = {member for member, node in nodes.items() if node == nodes[primary]}
    used = {primary, *taken}
    elsewhere = set(nodes) - here - used
    return frozenset(used | here) if elsewhere else frozenset(used)


def _outside(
    forbidden: frozenset[str], members: Sequence[str], homes: Sequence[Collection[str]] | None, shard: int
) -> frozenset[str]:
    """Add to `forbidden` the members that do not compute with the shard, if one that does is left."""
    at_home = set() if homes is None else set(members).intersection(homes[shard]) - forbidden
    return frozenset(members) - at_home if at_home else forbidden


def _deal(
    held: Sequence[str | None],
    sizes: Sequence[int],
    members: Sequence[str],
    banned: Sequence[frozenset[str]],
    hands: Sequence[Hashable],
) -> list[str]:
    """Choose a member per shard by dealing each hand. Hands in which some members get nothing are evened out together.

    hands: per shard, what it is dealt with.
    """
    dealing = Dealing(held, sizes, members, banned)
    dealt = [[s for s, each in enumerate(hands) if each == hand] for hand in dict.fromkeys(hands)]
    for shards in dealt:
        dealing.deal(shards)
    # In hands that are smaller than the number of members, some get nothing.
    dealing.even_out([shards for shards in dealt if len(shards) < len(members) - len(banned[shards[0]])])
    return [member for member in dealing.placed if member is not None]


def _balance(
    held: Sequence[str | None],
    sizes: Sequence[int],
    members: Sequence[str],
    forbidden: Sequence[frozenset[str]] | None = None,
    spread_from: Sequence[str] | None = None,
) -> list[str]:
    """Choose a member per shard: keep what may stay, give the rest to the least loaded, then move only to even out.

    held: the member that has the shard now, if any. spread_from: the shards' primaries, when backups are placed.
    """
    banned = forbidden or [frozenset()] * len(sizes)
    load = dict.fromkeys(members, 0)
    # Bytes of one primary's shards that a member backs up. Spreads the backups of one primary over the other members.
    pair: dict[tuple[str, str], int] = {}
    placed: list[str | None] = []
    for shard, member in enumerate(held):
        stays = member if member in load and member not in banned[shard] else None
        placed.append(stays)
        if stays is not None:
            load[stays] += sizes[shard]
            _count(pair, spread_from, shard, stays, sizes[shard])
    # Large shards first, as in bin packing: small ones then fill the gaps.
    for shard in sorted((s for s, m in enumerate(placed) if m is None), key=lambda s: -sizes[s]):
        choice = min(
            (m for m in members if m not in banned[shard]),
            key=lambda m: (load[m], pair.get((spread_from[shard], m), 0) if spread_from else 0),
        )
        placed[shard] = choice
        load[choice] += sizes[shard]
        _count(pair, spread_from, shard, choice, sizes[shard])
    _even_out(placed, sizes, banned, load)
    return [member for member in placed if member is not None]


def _count(
    pair: dict[tuple[str, str], int], spread_from: Sequence[str] | None, shard: int, member: str, size: int
) -> None:
    if spread_from is not None:
        key = (spread_from[shard], member)
        pair[key] = pair.get(key, 0) + size


def _even_out(
    placed: list[str | None], sizes: Sequence[int], banned: Sequence[frozenset[str]], load: dict[str, int]
) -> None:
    """Move shards from the heaviest to lighter members while a move narrows the gap between the two."""
    # Each move is a copy over the network. No real imbalance needs more moves than there are shards.
    for _ in range(len(sizes)):
        move = _best_move(placed, sizes, banned, load)
        if move is None:
            return
        shard, giver, taker = move
        placed[shard] = taker
        load[giver] -= sizes[shard]
        load[taker] += sizes[shard]


def _best_move(
    placed: Sequence[str | None], sizes: Sequence[int], banned: Sequence[frozenset[str]], load: Mapping[str, int]
) -> tuple[int, str, str] | None:
    for giver in sorted(load, key=lambda m: -load[m]):
        for taker in sorted(load, key=lambda m: load[m]):
            gap = load[giver] - load[taker]
            # A shard as large as the gap would only turn it around, and the next call would move it back.
            fits = [s for s, m in enumerate(placed) if m == giver and taker not in banned[s] and sizes[s] < gap]
            if fits:
                return max(fits, key=lambda s: (sizes[s], -s)), giver, taker
    return None
