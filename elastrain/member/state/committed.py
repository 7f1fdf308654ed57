"""The newest step that this member has passed: its record, who holds what since then, and which parameters are here.

Who holds which shard: as the last commit says, as it is in this view, and as it should be.

Which of the parameters that this member computes with are those of the committed step.

A member that computes some blocks only needs the parameters of those alone: `needed` is the one place that says which,
and the comparison of what was published, the loop and the vote all ask it.

The window without redundancy: which shards have fewer living holders than they should, and since which step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

from elastrain.job.placement import Holders, Placement, first_copies
from elastrain.job.scaling import Scaler
from elastrain.job.values import Record, Shape, Vote
from elastrain.member.contract import MemberPart
from elastrain.pipeline.pipeline_plan import PipelinePlan
from elastrain.protocol.messages import (
    Ack,
    Boundary,
    CheckpointOver,
    Copied,
    Damaged,
    Digests,
    Doubt,
    Evidence,
    Gradient,
    Message,
    Partial,
    PartReport,
    ShardCopy,
    Trial,
    WriteInstead,
)


class Roles:
    """Owns the three placements and the members that follow a shard without being its holders yet."""

    def __init__(self, me: str) -> None:
        self.committed: Placement | None = None
        """Changed by a commit only; None before the first recovery."""
        self.target: Placement = ()
        """Where the shards should be in this view."""
        self.mine: list[int] = []
        """Shards whose primary this member is."""
        self._me = me
        self._live: Placement = ()
        self._followers: dict[int, set[str]] = defaultdict(set)

    @property
    def live(self) -> Placement:
        """The committed holders that are in this view."""
        return self._live

    def settle(self, committed: Placement, live: Placement, target: Placement) -> None:
        """Take over what a recovery has decided."""
        self.committed, self.target = committed, target
        self.set_live(live)

    def change(self, roles: Iterable[tuple[int, Holders]]) -> None:
        """Carry out what a commit says."""
        assert self.committed is not None
        committed, live = list(self.committed), list(self._live)
        # A record names only members of its view: what it says lives.
        for shard, holders in roles:
            committed[shard] = live[shard] = holders
        self.committed = tuple(committed)
        self.set_live(tuple(live))

    def is_mine(self, shard: int) -> bool:
        return self._live[shard].primary == self._me

    def elsewhere(self, nodes: Mapping[str, str]) -> dict[int, frozenset[str]]:
        """Each shard that this member holds -> its holders on other nodes. `nodes`: of the view's members."""
        here = nodes[self._me]
        mine = [(shard, holders.all) for shard, holders in enumerate(self._live) if self._me in holders.all]
        return {shard: frozenset(m for m in holders if nodes.get(m, here) != here) for shard, holders in mine}

    def set_live(self, live: Placement) -> None:
        # Kept beside, since every message asks for it; it changes with `live` only.
        self._live = live
        self.mine = [shard for shard, holders in enumerate(live) if holders.primary == self._me]

    def follow(self, shard: int, member: str) -> None:
        """The member has a verified copy: from now on it gets each gradient, and is a holder after a commit."""
        self._followers[shard].add(member)

    def unfollow(self, shard: int, holders: Iterable[str]) -> None:
        self._followers[shard] -= set(holders)

    def forget_followers(self) -> None:
        # Who primaries are may change with the view, and only a primary knows its followers.
        self._followers.clear()

    def readers(self, shard: int) -> set[str]:
        """Members that get the shard's finished gradient: who keeps a copy, or is about to."""
        # Followers, too, or their copy would be a step behind when their time as holders comes.
        return {*self._live[shard].backups, *self._followers[shard]}

    def copies_to_make(self, nodes: Mapping[str, str]) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
        """(shard of this member's, member that should hold it and does not get it yet).

        First those that give a shard as many holders as it should have, then those that only move it.
        """
        first: list[tuple[int, str]] = []
        moving: list[tuple[int, str]] = []
        # By its primary alone: nobody else knows that a copy is verified.
        for shard in self.mine:
            have = list(dict.fromkeys((*self._live[shard].all, *sorted(self._followers[shard]))))
            soon = first_copies(have, self.target[shard], nodes)
            first += [(shard, member) for member in soon]
            moving += [(shard, m) for m in self.target[shard].all if m not in have and m not in soon]
        return first, moving


NEVER = -2
"""Version of what was never there; the initial state's is -1, or the step of the checkpoint that it comes from."""


class Parameters:
    """Owns the version of each shard's parameters in the model."""

    def __init__(self, shards: int, step: int) -> None:
        self.versions = [NEVER] * shards
        """Per shard, the step after which its parameters stand."""
        self._step = step
        self._needed: Collection[int] = range(shards)
        self._missing: set[int] | None = None
        """Shards with another version than `_step`; None: to be counted anew. Asked for several times per event."""

    def needed(self) -> Collection[int]:
        """Shards whose parameters this member computes with, ascending: all, unless it has some blocks only."""
        return self._needed

    def need(self, shards: Iterable[int]) -> None:
        """From now on this member computes with these shards, ascending, and with no others."""
        # Versions stay: of shards that were published here it has those of this step, needed or not.
        self._needed = tuple(shards)
        self._missing = None

    def expect(self, step: int) -> None:
        """From now on the parameters of `step` are those that count."""
        self._step = step
        # Versions stay: what lies in the model is of the step before until new parameters are taken.
        self._missing = None

    def have(self, shard: int) -> None:
        """The shard's parameters of the expected step are in the model."""
        self.versions[shard] = self._step
        # Not counted anew: a publish of a thousand shards asks a thousand times.
        if self._missing is not None:
            self._missing.discard(shard)

    def lose(self, shard: int) -> None:
        """What is in the model of the shard is not to be computed with."""
        self.versions[shard] = NEVER
        self._missing = None

    def have_initial(self) -> None:
        """What this member has made or read is what the job starts with."""
        self.versions = [self._step] * len(self.versions)
        self._missing = None

    # Exactly this version: newer parameters than those of the committed step cannot be here before its record.
    def has(self, shard: int) -> bool:
        return self.versions[shard] == self._step

    def are_here(self) -> bool:
        if self._missing is None:
            self._missing = {shard for shard in self.needed() if not self.has(shard)}
        return not self._missing


class UnderReplication:
    """Owns the shards that are short of holders. Every member counts alike: it may be their primary next."""

    def __init__(self) -> None:
        self.since: dict[int, int] = {}
        """Shard -> the step that was open when it was first seen with too few holders."""

    def look(self, step: int, live: Placement, goal: Placement) -> None:
        """Compare who holds the shards with who should, while `step` is open."""
        short = [
            shard for shard, (now, want) in enumerate(zip(live, goal, strict=True)) if len(now.all) < len(want.all)
        ]
        # What was short before stays so since then, whatever view that was in: else joins would put off the deadline.
        self.since = {shard: self.since.get(shard, step) for shard in short}

    def is_overdue(self, shard: int, step: int) -> bool:
        """Whether `step` is not committed before the shard has its holders: it is the second since they were lost."""
        # One step is granted for copies that nobody waits for; two steps after a loss, the next one may come.
        return self.since.get(shard, step) < step


class Commit(MemberPart):
    """Owns the record, and the roles and parameters that belong to its step."""

    def __init__(self, me: str, shape: Shape) -> None:
        self.step = shape.initial.step
        """The newest committed step; that of the initial state until something is committed."""
        self.record: Record | None = None
        """The record of `step`; None while the initial state stands."""
        self.roles = Roles(me)
        self.shortage = UnderReplication()
        self.parameters = Parameters(len(shape.shards), self.step)
        self._initial_step = self.step
        self._first_scaler = shape.initial.scaler or shape.loss_scale.start

    @property
    def is_initial(self) -> bool:
        """Nothing has been committed that this member knows of: all that counts is what the job starts from."""
        return self.step == self._initial_step

    def advance(self, step: int, record: Record | None) -> None:
        """Hold the record of a newer step. A member that has heard of a commit has passed it, and never goes back."""
        self.step, self.record = step, record
        self.parameters.expect(step)

    def forget_view(self) -> None:
        """Forget followers: the primaries may change with the view, and only a primary knows its followers."""
        self.roles.forget_followers()

    def why_not_yet(self) -> str:
        """Wait for the parameters of the committed step."""
        return "" if self.parameters.are_here() else f"parameters of step {self.step} are still to come"

    def next_scaler(self) -> Scaler:
        """The loss scaling of the step after this one."""
        # From the record and not from what this member has seen: a newcomer scales as all others do.
        return self._first_scaler if self.record is None else self.record.next_scaler

    @property
    def plan(self) -> PipelinePlan | None:
        """Who computes which blocks of the step after this one; None: all compute whole runs."""
        return None if self.record is None else self.record.plan

    def is_ahead(self, message: Message) -> bool:
        """Whether the message belongs to a step that this member reaches later, on its own or by another message."""
        # The first kinds belong to the open step, which is one further than the committed one.
        match message:
            case Partial() | Gradient() | Ack() | Vote() | Damaged():
                return message.step > self.step + 1
            case Digests() | ShardCopy() | Copied() | Doubt() | Evidence() | Trial():
                return message.step > self.step
            case Boundary():
                return message.name.step > self.step + 1
            case PartReport() | WriteInstead() | CheckpointOver():
                return message.step > self.step
            # The other kinds belong to no step, and are served whenever they come.
            case _:
                return False
