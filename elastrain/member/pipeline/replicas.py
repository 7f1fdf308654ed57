"""Replicas of blocks: the blocks whose parameters each member needs, and the blocks in this member's memory.

They follow from the plan in the last record, and from the blocks that recoveries of the open step have had members
adopt. So a publisher of a shard knows its readers without asking.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from elastrain import protocol as p
from elastrain.job.placement import Placement
from elastrain.job.values import Report, Shape, ShardShape, TracedGraph
from elastrain.member.contract import MemberPart
from elastrain.member.pipeline.assignments import Tracing
from elastrain.member.state.ballot import Commands
from elastrain.member.state.committed import Commit
from elastrain.member.state.holdings import Holdings
from elastrain.pipeline.forward_chains import Chain, forward_chains
from elastrain.pipeline.moves import fed
from elastrain.pipeline.pipeline_plan import PipelinePlan, held


@dataclass(frozen=True)
class _Memory:
    """Blocks in this member's memory."""

    blocks: frozenset[int] | None = None
    """All of them. None before the first `HoldBlocks` command: then it has all blocks of the model."""
    shadowed: frozenset[int] = frozenset()
    """Blocks of which it is a shadow."""
    warm: frozenset[int] = frozenset()
    """Blocks of `shadowed` that the training loop has computed on zeros, or is about to."""


class Replicas(MemberPart):
    """Part that owns the adopted blocks, the members with all blocks, and the blocks in this member's memory."""

    def __init__(
        self, me: str, shape: Shape, commit: Commit, tracing: Tracing, holdings: Holdings, out: Commands
    ) -> None:
        self._me, self._shape, self._commit = me, shape, commit
        self._tracing, self._holdings, self._out = tracing, holdings, out
        self._memory = _Memory()
        self._kept: Mapping[str, frozenset[int]] = {}
        """Member -> further blocks that it keeps until the next commit, as they are being read or computed with."""
        self.lent: frozenset[int] = frozenset()
        """Shards that this member publishes after the committed step. Peers may still be reading them."""
        self._told: TracedGraph | None = None
        """Tracing result of another member, for a newcomer that has not traced yet."""
        self._adopted: Mapping[str, frozenset[int]] = {}
        """Member -> places of the graph that it has adopted in a recovery of the open step."""
        self._whole: set[str] = set()
        """Members whose loops have ended, and that have all blocks or are being sent them."""

    @property
    def are_all(self) -> bool:
        """True if every member has every block."""
        return self._commit.plan is None

    def chains(self, members: Sequence[str]) -> dict[str, Chain]:
        """Return chains of these members through which batches of an evaluation go, by their heads.

        There is a plan. Empty if the members lack some block.
        """
        return forward_chains(self._units, {m: self._held_by(m) for m in members})

    def adopt_lacking(self, members: Sequence[str]) -> tuple[int, ...]:
        """Let this member adopt the blocks that none of the members computes with, and return them."""
        held_by = [self._held_by(m) for m in members]
        # Whole units: a chain cannot be cut within one.
        units = [range(*unit) for unit in self._units]
        lacking = [unit for unit in units if not any(blocks.issuperset(unit) for blocks in held_by)]
        places = tuple(place for unit in lacking for place in unit)
        self.adopt(self._me, places)
        return places

    def adopt(self, member: str, places: Collection[int]) -> tuple[int, ...]:
        """Let a member compute these blocks, too, until the next commit. Returns the shards that lie in them."""
        self._adopted = {**self._adopted, member: self._adopted.get(member, frozenset()).union(places)}
        self._hold()
        return self._shards_in(self._at(places))

    def _shards_in(self, blocks: frozenset[int]) -> tuple[int, ...]:
        return tuple(s for s, shard in enumerate(self._shape.shards) if not blocks.isdisjoint(shard.lanes))

    @property
    def _units(self) -> Sequence[tuple[int, int]]:
        traced = self._tracing.traced or self._told
        assert traced is not None
        return traced.graph.units

    def _held_by(self, member: str) -> frozenset[int]:
        plan = self._commit.plan
        assert plan is not None
        return held(plan).get(member, frozenset()) | self._adopted.get(member, frozenset())

    @property
    def adopted(self) -> tuple[int, ...]:
        """Blocks of the graph that this member has adopted, for its report."""
        return tuple(sorted(self._adopted.get(self._me, ())))

    @property
    def present(self) -> tuple[int, ...]:
        """Blocks of the layout in this member's memory, for its report, without those of which it is a shadow."""
        return tuple(sorted((self._memory.blocks or frozenset()) - self.shadowed(self._me)))

    def wanted(self, member: str, shards: Iterable[int]) -> tuple[int, ...]:
        """Return those of `shards` that lie in blocks that the member has."""
        # A block that is there is sent as a whole: a script would take an older step's rest for new parameters.
        if self.are_all or member in self._whole:
            return tuple(shards)
        blocks = self._blocks_of(member)
        return tuple(shard for shard in shards if not blocks.isdisjoint(self._shape.shards[shard].lanes))

    def shadowed(self, member: str) -> frozenset[int]:
        """Return the blocks of the layout of which the member is a shadow."""
        plan = self._commit.plan
        if plan is None or not (plan.coming or plan.standing) or member in self._whole:
            return frozenset()
        return self._at(fed(plan).get(member, frozenset())) - self._blocks_of(member)

    def shadow_shards(self, member: str, among: Collection[int] | None = None) -> frozenset[int]:
        """Return the shards that the member receives as a shadow. It does not compute with them yet.

        among: places of the graph; None: all.
        """
        blocks = self.shadowed(member) if among is None else self.shadowed(member) & self._at(among)
        if not blocks:
            return frozenset()
        every = range(len(self._shape.shards))
        lacking = frozenset(every) - frozenset(self.wanted(member, every))
        return frozenset(s for s in lacking if not blocks.isdisjoint(self._shape.shards[s].lanes))

    def allocate_shadows(self) -> None:
        """Make room for the blocks of which this member is a shadow. They have no values for the script."""
        if (shadowed := self.shadowed(self._me)) != self._memory.shadowed:
            self._memory = replace(self._memory, shadowed=shadowed)
            self._hold()

    def take_cold(self) -> tuple[int, ...]:
        """Return the places of blocks of which this member is a shadow and that are to be warmed up, each once.

        Makes room for them first.
        """
        traced, cold = self._tracing.traced, self.shadowed(self._me) - self._memory.warm
        if traced is None or not cold:
            return ()
        self.allocate_shadows()
        self._memory = replace(self._memory, warm=self._memory.warm | cold)
        return tuple(sorted({traced.places[block] for block in cold}))

    def _blocks_of(self, member: str) -> frozenset[int]:
        # Blocks of its own shards count, too, because their states work on the model's memory.
        mine = _lanes(self._shape.shards, self._commit.roles.live, member)
        return self._computed(member) | mine | self._kept.get(member, frozenset())

    def _computed(self, member: str) -> frozenset[int]:
        """Return the blocks of the layout that the member may get tasks for."""
        plan = self._commit.plan
        if plan is None or member in self._whole:
            return frozenset(range(self._shape.blocks))
        return self._at(self._held_by(member))

    def _at(self, places: Collection[int]) -> frozenset[int]:
        """Return the blocks of the layout that are computed at these places of the graph."""
        traced = self._tracing.traced or self._told
        assert traced is not None  # a plan comes from a traced graph, and every report carries that graph
        return frozenset(block for block, place in enumerate(traced.places) if place in places)

    def homes(self, plan: PipelinePlan | None) -> list[tuple[str, ...]] | None:
        """Return, per shard, the members that compute with it by the plan. None if all members do."""
        if plan is None:
            return None
        # Adopted blocks do not count: adoption lasts for one step, a move of holders longer.
        blocks = {member: self._at(places) for member, places in held(plan).items()}
        return [tuple(m for m in blocks if not blocks[m].isdisjoint(shard.lanes)) for shard in self._shape.shards]

    def pass_commit(self, before: Placement) -> None:
        """Take up the blocks of the new plan, and drop others. `before`: the holders that have made the step."""
        self._adopted = {}
        self.lent = frozenset(shard for shard, holders in enumerate(before) if holders.primary == self._me)
        # Blocks that peers read stay until the next commit: all readers have voted for that one.
        self._kept = {member: _lanes(self._shape.shards, before, member) for member in {h.primary for h in before}}
        self._hold()

    def hear(self, reports: Mapping[str, Report]) -> None:
        """Note the tracing result of another member from the reports."""
        self._told = next((r.work.traced for r in reports.values() if r.work.traced is not None), self._told)

    def recover(self, reports: Mapping[str, Report], adopted: Mapping[str, frozenset[int]], committed: int) -> None:
        """Take up a recovery's decision. `adopted`: member -> blocks adopted since the last commit."""
        # The primaries that live publish what is lacking.
        self._adopted, self.lent = adopted, frozenset(self._commit.roles.mine)
        self._whole = {member for member, report in reports.items() if report.finishing and not report.keeps_own}
        # No block is dropped in the middle of a step: the loop may be computing with it.
        self._kept = {m: frozenset(r.work.present) for m, r in reports.items() if r.committed == committed}
        self._hold()

    def end(self, member: str) -> None:
        """Let the member have all blocks, because its loop has ended."""
        self._whole.add(member)
        if member == self._me:
            self._hold()

    def _hold(self) -> None:
        if self.are_all:
            return
        # A block that was here for the script goes first: it would see old values until the publishes come.
        wanted = self.wanted(self._me, range(len(self._shape.shards)))
        # So does one with a shard that it shares with a block that goes now.
        gone = set(self._commit.parameters.needed()) - set(wanted)
        seen = frozenset(block for shard in gone for block in self._shape.shards[shard].lanes)
        shadowed = self._memory.shadowed & self.shadowed(self._me) - seen
        blocks, before = self._blocks_of(self._me) | shadowed, self._memory.blocks
        # What a shadow has read whole of the committed step, it computes with if it adopts the block.
        came = [s for s in self._shards_in(self._memory.shadowed - shadowed) if self._commit.parameters.has(s)]
        if came:
            self._out.do(p.ShowParameters(shards=tuple(came)))
        self._memory = replace(self._memory, shadowed=shadowed, warm=self._memory.warm & shadowed)
        self._commit.parameters.need(wanted)
        # A newcomer traces with the whole model of its script, so it drops no block before.
        if self._tracing.traced is None or blocks == before:
            return
        absent = [s for s, shard in enumerate(self._shape.shards) if blocks.isdisjoint(shard.lanes)]
        self._holdings.unbind(s for s in self._holdings.bound if s in absent)
        # No member would publish them here if their blocks came back before the next commit.
        for shard in absent:
            self._commit.parameters.lose(shard)
        self._memory = replace(self._memory, blocks=blocks)
        self._out.do(p.HoldBlocks(blocks=tuple(sorted(blocks)), for_good=self._me in self._whole))


def _lanes(shards: Sequence[ShardShape], holders: Placement, primary: str) -> frozenset[int]:
    """Return the blocks in which the primary's shards lie."""
    return frozenset(block for s, each in enumerate(holders) if each.primary == primary for block in shards[s].lanes)
