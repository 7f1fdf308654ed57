"""Durable checkpoints: the shards that this member writes, and the reports that the lowest rank collects.

A step's commit record says that the step becomes a checkpoint. Then every shard has one writer (or every holder
writes), while the next steps go on. The member of lowest rank collects the reports of all writers and makes the
checkpoint visible. Training does not wait for it. If a part is lost and no holder has that state any more, the
checkpoint is given up.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from elastrain import protocol as p
from elastrain.job.checkpoint_plan import LOOP, Checkpointed, CheckpointPlan, Wish, balanced, keepers, steady, writers
from elastrain.job.placement import Placement
from elastrain.job.values import Record, Recovery
from elastrain.member.contract import MemberPart, handles
from elastrain.member.state.ballot import Commands
from elastrain.member.state.committed import Commit
from elastrain.member.state.holdings import Holdings
from elastrain.member.state.member_views import Views
from elastrain.protocol.messages import CheckpointOver, PartReport, TakeLast, WriteInstead

GIVEN_UP = "it was given up in an earlier view"
_TAKEN = (Checkpointed.TAKEN, Checkpointed.LAST)
NO_LOOP = "the members that kept the state of the training loop were lost"


@dataclass
class OpenCheckpoint:
    """A checkpoint that is neither complete nor given up, with all that this member knows of its parts."""

    record: Record
    writers: frozenset[tuple[str, int]]
    """(member, shard) of every part to be written. The shard is LOOP for the loop's state on a node's own disk."""
    mine: set[int] = field(default_factory=set)
    """Shards that this member writes."""
    to_capture: set[int] = field(default_factory=set)
    """Shards of `mine` whose state after the step this member has not captured yet."""
    own: dict[int, str] = field(default_factory=dict)
    """Shard -> description of the part that this member has written, as its `PartWritten` event gave it."""
    problem: str = ""
    """The reason why this member cannot write its parts, or ""."""
    collected: dict[tuple[str, int], str] = field(default_factory=dict)
    """(member, shard) -> description of the written part. Only the member of lowest rank collects these."""
    has_begun: bool = False
    """True once the training loop has entered the next step."""
    has_loop: bool = False
    """True if this member has captured the loop's state at the start of the next step."""
    is_asked: bool = False
    """True while the manifest is being written."""

    @property
    def step(self) -> int:
        """Step whose state is written."""
        return self.record.step


class Checkpointing(MemberPart):
    """Part that owns this member's wish for a checkpoint, and the checkpoint that is being written."""

    def __init__(
        self,
        plan: CheckpointPlan,
        sizes: tuple[int, ...],
        views: Views,
        commit: Commit,
        holdings: Holdings,
        out: Commands,
    ) -> None:
        self.open: OpenCheckpoint | None = None
        self.is_last = False
        """True if the job is about to stop. Nothing is committed after the last checkpoint in this view."""
        self._sizes = sizes
        self._plan = plan
        self._views = views
        self._commit = commit
        self._holdings = holdings
        self._out = out
        self._over: CheckpointOver | None = None
        """Result of the last checkpoint. Members that missed it in its view are sent it later."""
        self.wanted = self._voted = Wish.NONE
        """The wish for this member's next vote, and the wish that its last vote carried."""

    # ------------------------------------------------------------------------------------------------------- the wish

    @handles(p.CheckpointWanted)
    def on_wanted(self, event: p.CheckpointWanted) -> None:
        """Note that a checkpoint was asked for, by the script or because the job is to stop."""
        self.wanted = max(self.wanted, Wish.LAST if event.last else Wish.WANTED)

    def wish(self, step: int) -> Wish:
        """Return the wish that this member's vote on `step` carries: the one that was asked for, or one that is due."""
        every = self._plan.every_steps
        self._voted = self.wanted
        return max(self.wanted, Wish.DUE if every and (step + 1) % every == 0 else Wish.NONE)

    def is_over(self, step: int) -> bool:
        """Return True if the checkpoint of `step` is complete, or a problem of the disk has ended it."""
        return self._over is not None and self._over.step == step and self._over.reason != GIVEN_UP

    # --------------------------------------------------------------------------------------------------------- a step

    def on_passed(self, record: Record, before: Placement) -> None:
        """Begin the checkpoint if the record asks for one. `before`: the holders of the shards until this commit."""
        if record.checkpoint not in _TAKEN:
            return
        # A wish that came after the vote is for a later state.
        self.wanted = Wish.NONE if self.wanted is self._voted else self.wanted
        self.is_last = record.checkpoint is Checkpointed.LAST
        named = writers(steady(before, self._commit.roles.live), self._sizes, all_holders=self._plan.all_holders)
        on_disks = keepers(named, self._views.view.nodes) if self._plan.all_holders else ()
        self.open = OpenCheckpoint(record=record, writers=named | {(member, LOOP) for member in on_disks})
        self._begin_part(shard for member, shard in named if member == self._views.me)

    def _begin_part(self, shards: Iterable[int]) -> None:
        assert self.open is not None
        new = sorted(set(shards) - self.open.mine)
        if new:
            self.open.mine |= set(new)
            self.open.to_capture |= set(new)
            self._out.do(p.BeginPart(step=self.open.step, shards=tuple(new)))
            self.progress()

    def progress(self) -> bool:
        """Capture states of the step: a primary's at once, a backup's once verified. Returns True if it did."""
        # This must run before any state moves on to the next step, because older states are not kept.
        if self.open is None or not self.open.to_capture:
            return False
        ready = sorted(s for s in self.open.to_capture if self._holdings.has(s, self.open.step))
        if ready:
            self.open.to_capture -= set(ready)
            digests = tuple(self._holdings[s].digest for s in ready)
            self._out.do(p.Capture(step=self.open.step, shards=tuple(ready), digests=digests))
        return bool(ready)

    def on_began(self, step: int, state: str) -> None:
        """Capture the loop's state with which it entered `step`, if the step before becomes a checkpoint."""
        if self.open is None or step != self.open.step + 1:
            return
        self.open.has_begun = True
        # The two lowest ranks capture it. If the first is lost, the second can collect. All would be too many: the
        # state may be as large as the model.
        is_written = (self._views.me, LOOP) in self.open.writers
        if is_written or self._views.me in self._views.view.ids[:2]:
            self.open.has_loop = True
            self._out.do(p.CaptureLoop(step=self.open.step, state=state, is_written=is_written))
            self._complete()

    # ------------------------------------------------------------------------------------------------------- its parts

    @handles(p.PartWritten)
    def on_part_written(self, event: p.PartWritten) -> None:
        """Note the parts that were written here, and report them to the member of lowest rank."""
        if self.open is None or event.step != self.open.step:
            return
        self.open.own.update(zip(event.shards, event.told, strict=True))
        self.open.problem = self.open.problem or event.problem
        if not self._views.is_recovering:
            self._report()

    def _report(self) -> None:
        """Report all parts that this member has written to the member of lowest rank. A repeated report is harmless."""
        assert self.open is not None
        report = PartReport(
            step=self._step,
            shards=tuple(sorted(self.open.own)),
            told=tuple(told for _, told in sorted(self.open.own.items())),
            lacking=self._lacking(),
            problem=self.open.problem,
        )
        if self._collector == self._views.me:
            self.on_report(self._views.me, report)
        else:
            self._out.send(self._collector, report)

    def _lacking(self) -> tuple[int, ...]:
        """Return the shards that this member can no longer write: their state is gone, or already of a later step."""
        assert self.open is not None
        held = self._holdings
        return tuple(s for s in sorted(self.open.to_capture) if s not in held or held[s].version > self._step)

    @property
    def _step(self) -> int:
        assert self.open is not None
        return self.open.step

    @property
    def _collector(self) -> str:
        return self._views.view.ids[0]

    # ------------------------------------------------------------------------------------------- at the lowest rank

    @handles(PartReport)
    def on_report(self, source: str, message: PartReport) -> None:
        """Collect a member's report. If the checkpoint is over, answer with its result."""
        if self.open is None or message.step != self.open.step:
            is_known = self._over is not None and self._over.step == message.step
            over = self._over if is_known else CheckpointOver(step=message.step, reason=GIVEN_UP, told="")
            assert over is not None
            self._out.send(source, over)
        elif message.problem:
            self._end(f"{source}: {message.problem}")
        else:
            self.open.collected.update(zip(((source, s) for s in message.shards), message.told, strict=True))
            self._replace([(source, shard) for shard in message.lacking])
            self._complete()

    def _replace(self, lost: list[tuple[str, int]]) -> None:
        """Assign lost parts to other holders of the state. Gives the checkpoint up if no holder has that state."""
        if self.open is None or not lost:
            return
        self.open.writers -= set(lost)
        written = {shard for _, shard in self.open.writers}
        shards = {shard for _, shard in lost} - written
        if not shards:  # another holder writes it, too
            return
        if LOOP in shards:
            self._end(NO_LOOP)
            return
        if self._commit.step != self.open.step:
            names = ", ".join(sorted({member for member, _ in lost}))
            self._end(f"{names} was lost with what it had to write, and the others are a step further")
            return
        # All holders have that state, or are about to verify it: the next step needs it.
        named = balanced(shards, self._commit.roles.live, self._sizes)
        self.open.writers |= set(named)
        for member in sorted({member for member, _ in named}):
            theirs = tuple(shard for writer, shard in named if writer == member)
            if member == self._views.me:
                self._begin_part(theirs)
            else:
                self._out.send(member, WriteInstead(step=self.open.step, shards=theirs))

    def _complete(self) -> None:
        found = self.open
        if found is None or found.is_asked or not found.has_loop or self._views.is_recovering:
            return
        if self._collector == self._views.me and found.collected.keys() >= found.writers:
            found.is_asked = True
            in_order = sorted(found.writers, key=lambda w: (w[1], w[0]))
            told = tuple(found.collected[each] for each in in_order if each[1] != LOOP)
            loops = tuple(found.collected[each] for each in in_order if each[1] == LOOP)
            self._out.do(p.WriteManifest(record=found.record, told=told, loops=loops))

    @handles(p.ManifestWritten)
    def on_manifest_written(self, event: p.ManifestWritten) -> None:
        """End the checkpoint: its manifest was written, or could not be."""
        if self.open is not None and event.step == self.open.step:
            self._end(event.reason, event.told)

    def _end(self, reason: str, told: str = "") -> None:
        over = CheckpointOver(step=self._step, reason=reason, told=told)
        self._out.send_all(self._views.others, over)
        self._close(over)

    # ---------------------------------------------------------------------------------------------- told by it

    @handles(WriteInstead)
    def on_write_instead(self, message: WriteInstead) -> None:
        """Write these shards, because the members that should have written them are lost."""
        if self.open is not None and message.step == self.open.step:
            self._begin_part(shard for shard in message.shards if shard != LOOP)
            if LOOP in message.shards and (self._views.me, LOOP) not in self.open.writers:
                # This part is lost for good: the member that kept the loop's state on this node is gone.
                self.open.to_capture.add(LOOP)
            if self._lacking():
                self._report()

    @handles(CheckpointOver)
    def on_over(self, message: CheckpointOver) -> None:
        """Close the checkpoint with the result that another member has sent."""
        if self.open is None or message.step != self.open.step:
            return
        # If the collector was lost, it may have sent the result to some members only. The new collector sends it again.
        if self._collector == self._views.me:
            self._end(message.reason, message.told)
        else:
            self._close(message)

    def _close(self, over: CheckpointOver) -> None:
        self._out.do(p.DropCaptures(step=over.step))
        is_told = self._collector == self._views.me
        self._out.do(p.EndCheckpoint(step=over.step, reason=over.reason, is_told=is_told, told=over.told))
        self.open, self._over = None, over

    # --------------------------------------------------------------------------------------------------- another view

    def forget_view(self) -> None:
        """Allow commits again: the members that were to stop after the last checkpoint have left."""
        self.is_last = False

    def why_not_yet(self) -> str:
        """Commit nothing after the last checkpoint: it would be lost when the job is stopped."""
        return "the job is about to be stopped with the last checkpoint" if self.is_last else ""

    def resume(self, recovery: Recovery) -> None:
        """Report again what is written, since the reports of the last view may be lost."""
        # A state that was found wrong after the commit may already have been written.
        if recovery.wrong is not None and self.open is not None:
            self.open.problem = self.open.problem or "a state of that step was found to be wrong"
        if self.open is None:
            if self._over is not None and self._collector != self._views.me:
                self._out.send(self._collector, self._over)
            return
        self.progress()
        if self._collector == self._views.me:
            self._take_over()
        if self.open is not None:
            self._report()

    def _take_over(self) -> None:
        """Become the collector, and ask the members for all parts that were not reported to this one.

        Parts that only lost members had written are assigned to other holders.
        """
        assert self.open is not None
        if self.open.has_begun and not self.open.has_loop:
            self._end(NO_LOOP)
            return
        record = self._commit.record
        if record is not None and record.step == self._step and record.checkpoint not in _TAKEN:
            # This checkpoint was asked for at the end of the loops. The member that asked may be lost before all got
            # its message.
            self._out.send_all(self._views.others, TakeLast(step=self._step))
        members = self._views.view.ids
        missing = self.open.writers - self.open.collected.keys()
        # Living writers are asked again, too: the request of the last view may not have reached them.
        for member in self._views.others:
            theirs = tuple(sorted(shard for writer, shard in missing if writer == member))
            if theirs:
                self._out.send(member, WriteInstead(step=self.open.step, shards=theirs))
        self._replace(sorted(each for each in missing if each[0] not in members))
