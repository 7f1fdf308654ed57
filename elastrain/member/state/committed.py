"""Newest committed step of this member (`Commit`), and all that belongs to it.

`Roles` knows the holders of every shard: by the last commit, in this view, and as they should be. `Parameters` knows
the shards whose parameters here are of the committed step. A member that computes only some blocks needs the parameters
of those alone: `Parameters.needed` names them. `UnderReplication` knows the shards with fewer living holders than they
should have, and since which step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

from elastrain.decisions.agreed_speeds import speeds_of
from elastrain.decisions.voting import InForce
from elastrain.job.placement import Holders, Placement, first_copies, with_refusals
from elastrain.job.scaling import Scaler
from elastrain.job.values import Record, Shape, Vote
from elastrain.member.contract import MemberPart
from elastrain.pipeline.pipeline_plan import PipelinePlan
from elastrain.protocol.evaluation_messages import (
    BatchBoundary,
    BatchFigures,
    BlocksAdopted,
    EvaluateBatches,
    EvaluationResult,
    InEvaluation,
    OutsideEvaluation,
)
from elastrain.protocol.messages import (
    Ack,
    Boundary,
    CheckpointOver,
    Copied,
    Damaged,
    DigestReply,
    Digests,
    Doubt,
    FetchShard,
    Gradient,
    Message,
    Partial,
    PartReport,
    RepeatUpdate,
    ShardCopy,
    WriteInstead,
)
from elastrain.protocol.move_messages import ShadowPiece


class Roles:
    """Three placements of the shards, and the followers: members that get gradients but hold no state yet."""

    def __init__(self, me: str) -> None:
        self.committed: Placement | None = None
        """Holders by the last commit. Only a commit changes them. None before the first recovery."""
        self.target: Placement = ()
        """Holders that the shards should have in this view."""
        self.mine: list[int] = []
        """Shards whose primary this member is."""
        self.coming: Mapping[int, str] = {}
        """Shard -> the shadow that becomes its primary with the coming plan. Until then it is a follower at most."""
        self.taken: Mapping[int, str] = {}
        """Shard -> its new primary, which makes the update of the last record itself and needs no publish."""
        self._me = me
        self._live: Placement = ()
        self._followers: dict[int, set[str]] = defaultdict(set)
        self._refusing: dict[int, set[str]] = {}
        """Shard of this primary -> members that have no room for a copy under the plan in force."""

    @property
    def live(self) -> Placement:
        """The committed holders that are in this view."""
        return self._live

    def settle(self, committed: Placement, live: Placement) -> None:
        """Set the placements that a recovery has decided. `aim` follows."""
        self.committed, self.taken = committed, {}
        self.set_live(live)

    def aim(self, target: Placement, coming: Mapping[int, str]) -> None:
        """Change the holders that the shards should have, because the blocks have moved or are about to."""
        self.target, self.coming = target, coming
        self._refusing.clear()  # under another plan they may have room
        for shard, followers in self._followers.items():
            # A follower of a move that was dropped would get gradients for nothing.
            followers &= {*target[shard].all, coming.get(shard, "")}

    def refuse(self, member: str, shards: Iterable[int]) -> None:
        """Note that a member has no room for copies of these shards as a backup."""
        for shard in shards:
            self._refusing.setdefault(shard, set()).add(member)

    @property
    def without_room(self) -> tuple[str, ...]:
        """Members that have no room for copies of this primary's shards."""
        return tuple(sorted({member for refusing in self._refusing.values() for member in refusing}))

    def goal(self, shard: int) -> Holders:
        """Return the holders that a shard of this primary should have, by what members have room for."""
        return with_refusals(self._live[shard], self.target[shard], self._refusing.get(shard, ()))

    def is_for_shadow(self, shard: int, member: str) -> bool:
        """Return True if a copy of the shard on this member serves a coming plan only, so that no member waits."""
        return self.coming.get(shard) == member and member not in self.target[shard].all

    def take(self, roles: Iterable[tuple[int, Holders]]) -> None:
        """Note the shadows that a record makes primaries."""
        self.taken = {shard: after.primary for shard, after in roles if self.coming.get(shard) == after.primary}

    def change(self, roles: Iterable[tuple[int, Holders]]) -> None:
        """Change the holders as a commit record says."""
        assert self.committed is not None
        committed, live = list(self.committed), list(self._live)
        # A record names only members of its view, so these holders are alive.
        for shard, holders in roles:
            committed[shard] = live[shard] = holders
        self.committed = tuple(committed)
        self.set_live(tuple(live))

    def is_mine(self, shard: int) -> bool:
        """Return True if this member is the shard's primary."""
        return self._live[shard].primary == self._me

    def elsewhere(self, nodes: Mapping[str, str]) -> dict[int, frozenset[str]]:
        """Return shard -> its holders on other nodes, for each shard held here. `nodes`: member -> node."""
        here = nodes[self._me]
        mine = [(shard, holders.all) for shard, holders in enumerate(self._live) if self._me in holders.all]
        return {shard: frozenset(m for m in holders if nodes.get(m, here) != here) for shard, holders in mine}

    def set_live(self, live: Placement) -> None:
        """Set the holders in this view."""
        # `mine` is stored, since every message asks for it. It changes with `live` only.
        self._live = live
        self.mine = [shard for shard, holders in enumerate(live) if holders.primary == self._me]

    def follow(self, shard: int, member: str) -> None:
        """Make the member a follower: it has a verified copy, gets each gradient, and becomes a holder by a commit."""
        self._followers[shard].add(member)

    def unfollow(self, shard: int, holders: Iterable[str]) -> None:
        """Remove these members from the shard's followers."""
        self._followers[shard] -= set(holders)

    def forget_followers(self) -> None:
        """Remove all followers."""
        # The primaries may change with the view, and only a primary knows its followers.
        self._followers.clear()

    def readers(self, shard: int) -> set[str]:
        """Return the members that get the shard's finished gradient: its backups and its followers."""
        # Without the gradient a follower's copy would be a step behind when it becomes a holder.
        return {*self._live[shard].backups, *self._followers[shard]}

    def copies_to_make(self, nodes: Mapping[str, str]) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
        """Return two lists of (shard, member): copies that this primary has to make.

        The first list gives shards their missing holders. The second list only moves shards.
        """
        first: list[tuple[int, str]] = []
        moving: list[tuple[int, str]] = []
        # Only its primary plans copies of a shard: no other member knows that a copy is verified.
        for shard in self.mine:
            have = list(dict.fromkeys((*self._live[shard].all, *sorted(self._followers[shard]))))
            goal = self.goal(shard)
            soon = first_copies(have, goal, nodes)
            first += [(shard, member) for member in soon]
            wanted = (*goal.all, *([self.coming[shard]] if shard in self.coming else ()))
            moving += [(shard, m) for m in dict.fromkeys(wanted) if m not in have and m not in soon]
        return first, moving


NEVER = -2
"""Version of a state that was never there. The initial state has version -1, or the step of its checkpoint."""


class Parameters:
    """Versions of the parameters of each shard in the model."""

    def __init__(self, shards: int, step: int) -> None:
        self.versions = [NEVER] * shards
        """Per shard, the step after which its parameters stand."""
        self._step = step
        self._needed: Collection[int] = range(shards)
        self._missing: set[int] | None = None
        """Shards with another version than `_step`.

        None: to be counted again. Stored, since each event asks several times.
        """

    def needed(self) -> Collection[int]:
        """Return the shards whose parameters this member computes with, ascending."""
        return self._needed

    def need(self, shards: Iterable[int]) -> None:
        """Set the shards, ascending, whose parameters this member computes with."""
        # Versions stay: parameters that were published here are of this step, needed or not.
        self._needed = tuple(shards)
        self._missing = None

    def expect(self, step: int) -> None:
        """Set the step whose parameters count."""
        self._step = step
        # Versions stay: the model has the parameters of the step before until new ones are taken.
        self._missing = None

    def have(self, shard: int) -> None:
        """Note that the shard's parameters of the expected step are in the model."""
        self.versions[shard] = self._step
        # The set is updated, not counted again: a publish of a thousand shards asks a thousand times.
        if self._missing is not None:
            self._missing.discard(shard)

    def lose(self, shard: int) -> None:
        """Note that the shard's parameters in the model must not be computed with."""
        self.versions[shard] = NEVER
        self._missing = None

    def have_initial(self) -> None:
        """Note that the parameters here are the job's initial ones."""
        self.versions = [self._step] * len(self.versions)
        self._missing = None

    # The version must be equal: newer parameters cannot be here before their record.
    def has(self, shard: int) -> bool:
        """Return True if the shard's parameters of the expected step are in the model."""
        return self.versions[shard] == self._step

    def are_here(self) -> bool:
        """Return True if all needed parameters of the expected step are in the model."""
        if self._missing is None:
            self._missing = {shard for shard in self.needed() if not self.has(shard)}
        return not self._missing


class UnderReplication:
    """Shards that are short of holders. Every member counts alike, since it may be their primary next."""

    def __init__(self) -> None:
        self.since: dict[int, int] = {}
        """Shard -> step that was open when it was first seen with too few holders."""

    def look(self, step: int, live: Placement, goal: Placement) -> None:
        """Update the shards that are short of holders, while `step` is open."""
        short = [
            shard for shard, (now, want) in enumerate(zip(live, goal, strict=True)) if len(now.all) < len(want.all)
        ]
        # A shard that was short before keeps its first step in every view. Otherwise joins would put off the deadline.
        self.since = {shard: self.since.get(shard, step) for shard in short}

    def is_overdue(self, shard: int, step: int) -> bool:
        """Return True if the shard was short before `step`, so that `step` must not be committed without a copy."""
        # The first step after a loss does not wait for copies. The second one does, since another loss may come.
        return self.since.get(shard, step) < step


class Commit(MemberPart):
    """Part that owns the newest commit record, and the roles and parameters of its step."""

    def __init__(self, me: str, shape: Shape) -> None:
        self.step = shape.initial.step
        """Newest committed step. The step of the initial state until the first commit."""
        self.record: Record | None = None
        """The record of `step`; None while the initial state stands."""
        self.roles = Roles(me)
        self.under_replication = UnderReplication()
        self.parameters = Parameters(len(shape.shards), self.step)
        self._initial_step = self.step
        self._plan: PipelinePlan | None = None
        self._learned: PipelinePlan | None = None
        """A plan that another member has told this newcomer."""
        self._first_scaler = shape.initial.scaler or shape.loss_scale.start

    @property
    def is_initial(self) -> bool:
        """True if no commit is known here, so that the job's initial state counts."""
        return self.step == self._initial_step

    def advance(self, step: int, record: Record | None) -> None:
        """Store the record of a newer step. A member that knows of a commit never goes back behind it."""
        self._plan = self.plan_of(record)
        self.step, self.record = step, record
        self.parameters.expect(step)

    def forget_view(self) -> None:
        """Forget followers: the primaries may change with the view, and only a primary knows its followers."""
        self.roles.forget_followers()

    def why_not_yet(self) -> str:
        """Wait for the parameters of the committed step."""
        return "" if self.parameters.are_here() else f"parameters of step {self.step} are still to come"

    def next_scaler(self) -> Scaler:
        """Return the loss scaling of the open step."""
        # It comes from the record, so that a newcomer scales like all others.
        return self._first_scaler if self.record is None else self.record.next_scaler

    def in_force(self) -> InForce:
        """Return what holds for the open step: by the record alone, so that it is the same for all members."""
        return InForce(scaler=self.next_scaler(), plan=self.plan, speeds=speeds_of(self.record))

    @property
    def plan(self) -> PipelinePlan | None:
        """Plan of the pipelines for the open step. None if all members compute whole runs."""
        return None if self.record is None else self._plan

    def plan_of(self, record: Record | None) -> PipelinePlan | None:
        """Return the plan that a record names. None if it names none, or one that this member lacks."""
        told = None if record is None else record.plan
        if isinstance(told, str):
            return next(
                (each for each in (self._plan, self._learned) if each is not None and each.digest == told), None
            )
        return told

    def learn_plan(self, plan: PipelinePlan) -> None:
        """Keep a plan of other members, before this one goes on to their step."""
        self._learned = plan

    def is_ahead(self, message: Message) -> bool:
        """Return True if the message belongs to a step that this member reaches later."""
        # The first kinds belong to the open step, which is one further than the committed one.
        match message:
            case Partial() | Gradient() | Ack() | Vote() | Damaged():
                return message.step > self.step + 1
            case Digests() | ShardCopy() | Copied() | Doubt() | DigestReply() | RepeatUpdate():
                return message.step > self.step
            case Boundary():
                return message.name.step > self.step + 1
            case PartReport() | WriteInstead() | CheckpointOver() | FetchShard() | ShadowPiece():
                return message.step > self.step
            case InEvaluation() | EvaluateBatches() | BatchFigures() | EvaluationResult() | OutsideEvaluation():
                return message.name.after > self.step
            case BatchBoundary() | BlocksAdopted():
                return message.name.after > self.step

            # The other kinds belong to no step, and are served whenever they come.
            case _:
                return False
