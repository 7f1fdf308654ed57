"""A member's journal, and the notices that a worker gives to people.

`Journal` writes what the member did and when, as JSON lines, to `members/<member>.jsonl` in the run's folder. `Notes`
also tells the agent and the screen. Times are time.monotonic() in seconds, which all processes of a host share.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from elastrain import protocol as p
from elastrain.base.line_files import LineLog
from elastrain.base.processes import say
from elastrain.decisions.agreed_speeds import speeds_of, told_speeds
from elastrain.job.checkpoint_plan import Checkpointed
from elastrain.job.run_plan import Speeds
from elastrain.job.values import Record
from elastrain.job.world import View
from elastrain.member.member_machine import MemberMachine
from elastrain.pipeline.pipeline_plan import PipelinePlan
from elastrain.pipeline.planner.plan_choice import PlanAnswer
from elastrain.protocol import agent_messages as am
from elastrain.runtime.io.agent_link import AgentLink, ChannelClosedError


class Journal:
    """The log of one member. Without a run folder it writes nothing."""

    def __init__(self, run_dir: Path | None, member: str) -> None:
        self._member = member
        self._log: LineLog | None = None
        if run_dir is not None:
            folder = run_dir / "members"
            folder.mkdir(mode=0o700, exist_ok=True)
            self._log = LineLog(folder / f"{member}.jsonl")

    def write(self, event: str, *, at_s: float | None = None, **fields: object) -> None:
        """Append one line. `fields` are plain values; `at_s` defaults to now."""
        if self._log is not None:
            at = time.monotonic() if at_s is None else at_s
            self._log.write({"t": at, "member": self._member, "event": event, **fields})

    def close(self) -> None:
        """Close the log."""
        if self._log is not None:
            self._log.close()


_REASONS_EVERY_S = 0.25
_REASON_HOLDS_S = 1.0
_TOLD_IN_ROW = tuple(10**power for power in range(7))


class Notes:
    """The notices of a worker, written to the journal, to the agent and to the screen."""

    def __init__(self, journal: Journal, agent: AgentLink) -> None:
        self._journal, self._agent = journal, agent
        self._has_warned = False
        self._told_misfit_in = -1
        """Generation of the last view for which the screen has shown that no plan fits."""
        self._skipped_in_row = 0
        self._told_short: tuple[dict[str, int], tuple[str, ...]] = {}, ()
        self._planned: frozenset[str] = frozenset()
        """Members of the plan in force."""
        self._speeds: Speeds = {}
        """Speeds that the last record has named."""
        self._looked_s = self._since_s = 0.0
        self._reason = self._told_reason = (-1, "")
        """(open step, reason why this member does not go on in it): at the last looks, since `_since_s`, and told."""

    def tell_reason(self, core: MemberMachine, now_s: float) -> None:
        """Report why this member does not vote, or whose votes are missing, once that has been true for a second."""
        if now_s - self._looked_s < _REASONS_EVERY_S:
            return
        self._looked_s, now = now_s, (core.step, core.why_not_yet())
        if now != self._reason:
            self._reason, self._since_s = now, now_s
        step, reason = now
        if reason and now != self._told_reason and now_s - self._since_s >= _REASON_HOLDS_S:
            self._told_reason = now
            self._journal.write("waits", step=step, reason=reason)
            self._agent.say(am.WaitReason(step=step, reason=reason))

    def suspect(self, silent: Iterable[str], view: View, for_s: float) -> None:
        """Report members whose report is missing for so long to the agent, which judges them."""
        reason = f"no report for generation {view.generation} in {for_s:.0f} s"
        for member in silent:
            self._agent.say(am.Suspect(member=member, reason=reason, generation=view.generation))

    def note_view(self, event: str, view: View) -> None:
        """Write a line about a view to the journal."""
        self._journal.write(event, generation=view.generation, members=list(view.ids), reason=view.reason)

    def resumed(self, command: p.Resumed) -> None:
        """Note that the step continues in a new view."""
        recovery, rerouting, generation = command.recovery, command.rerouting, command.view.generation
        self._journal.write(
            "resumed",
            generation=generation,
            committed=recovery.committed,
            redone=recovery.redone if rerouting is None else rerouting.redone,
            reason=recovery.reason if rerouting is None else rerouting.reason,
            runs={member: list(runs) for member, runs in recovery.runs.items()},
        )
        if rerouting is not None and rerouting.redone:
            step = recovery.committed + 1
            self._agent.say(am.Redone(generation=generation, step=step, pairs=rerouting.redone))

    def passed(self, record: Record, view: View | None) -> None:
        """Report what a commit record says besides its step."""
        self._tell_skipped(record, view)
        if isinstance(record.plan, PipelinePlan):
            self._tell_plan(record.step + 1, record.plan)
        self._tell_shares(record, view)
        if record.findings.warning:
            self._warn(record, view)
        if record.checkpoint is Checkpointed.PASSED_OVER:
            reason = "the one before is still being written"
            self._journal.write("checkpoint_passed_over", step=record.step, reason=reason)
            if view is not None and view.ids[0] == self._agent.me:
                self._agent.say(am.CheckpointEnded(step=record.step, reason=reason))

    def _tell_plan(self, step: int, plan: PipelinePlan) -> None:
        """Report a new plan. The member that has asked the planner has told the reason of that one's choice."""
        before, self._planned = self._planned, frozenset(plan.members)
        why = "" if before == self._planned else "members have come or gone" if before else "the first plan"
        standing, is_split = dict(plan.standing), bool(plan.split)
        self._journal.write(
            "plan", step=step, pipelines=plan.described(), standing=standing, is_split=is_split, reason=why
        )
        self._agent.say(am.PlanTold(step=step, pipelines=plan.described(), reason=why))

    def asked(self, command: p.ChoosePlan) -> None:
        """Note a question to the planner, whose answer may take longer than a step."""
        self._journal.write("planner_asked", generation=command.generation)

    def decided(self, command: p.ChoosePlan, answer: PlanAnswer | None, reason: str) -> None:
        """Report the planner's answer. Its thread calls this."""
        is_new, step_s = answer is not None and answer.plan != command.question.present, answer and answer.step_s
        self._journal.write("planned", generation=command.generation, is_new=is_new, step_s=step_s, reason=reason)
        # The rule's plan serves on, and may end a member. Once per view is enough.
        if answer is None and command.generation > self._told_misfit_in:
            self._told_misfit_in = command.generation
            say(f"warning: {reason}")
        with suppress(ChannelClosedError):  # the engine notices that, too
            self._agent.say(am.PlanTold(reason=reason, speeds=dict(command.question.profile.speeds)))

    def _tell_shares(self, record: Record, view: View | None) -> None:
        before, self._speeds = self._speeds, speeds_of(record)
        if before == self._speeds:
            return
        reason = told_speeds(before, self._speeds)
        self._journal.write("shares", step=record.step, speeds=self._speeds, reason=reason)
        if view is not None and view.ids[0] == self._agent.me:
            self._agent.say(am.SharesChanged(step=record.step, reason=reason))

    def _moved(self, command: p.Moved) -> None:
        """Note a move of blocks that has ended: named by one record, and ended by that of `step`."""
        shadows = {member: list(blocks) for member, blocks in command.shadows}
        told = {"is_dropped": command.is_dropped, "sent_bytes": command.sent_bytes}
        self._journal.write("moved", named=command.named, step=command.step, shadows=shadows, **told)

    def _tell_skipped(self, record: Record, view: View | None) -> None:
        """Report the first, tenth, hundredth, … skipped step in a row, because skipped steps look like training."""
        self._skipped_in_row = row = self._skipped_in_row + 1 if record.skipped else 0
        is_first = view is not None and view.ids[0] == self._agent.me
        # A loss scale is found by a few steps that overflow, so the first one is no news.
        if not is_first or row not in _TOLD_IN_ROW or (row == 1 and record.scaler.scale > 1):
            return
        weight = record.contribution.weight
        why = "its gradient is infinite or NaN" if weight else "its micro-batches have no weight together"
        often = f", and is the {row}th in a row" if row > 1 else ""
        self._notice(f"step {record.step} has moved no parameter{often}: {why} (step.skipped)")

    def _warn(self, record: Record, view: View | None) -> None:
        """Write a record's warning to the journal. The first member shows the job's first warning on the screen."""
        self._journal.write("warning", step=record.step, reason=record.findings.warning)
        if not self._has_warned and view is not None and view.ids[0] == self._agent.me:
            say(f"warning: {record.findings.warning}")
        self._has_warned = True

    def tell_window(self, core: MemberMachine) -> None:
        """Report a change of the shards that have too few holders, or of their number of holders."""
        short = {str(shard): len(core.holders[shard].all) for shard in core.copying.short}
        no_room = core.copying.without_room
        if (short, no_room) == self._told_short:
            return
        self._told_short = short, no_room
        step = 1 + (core.shape.initial.step if core.record is None else core.record.step)
        since = min(core.copying.short.values(), default=None)
        self._journal.write("window", step=step, short=short, since_step=since, no_room=no_room)
        self._agent.say(am.Window(step=step, short=short, since_step=since, no_room=no_room))

    def hear(self, command: p.Noticed | p.BeginAnew | p.AskToCommit | p.Moved, view: View | None) -> p.Event | None:
        """Report what the protocol core has noticed. Returns the event that follows, or None."""
        if isinstance(command, p.BeginAnew):
            return self._begin_anew(command, view)
        if isinstance(command, p.AskToCommit):
            self._agent.say(am.FirstCommitDue())
            return None if self._agent.is_there else p.CommitAllowed()
        if isinstance(command, p.Moved):
            self._moved(command)
        else:
            self._notice(command.reason)
        return None

    def _notice(self, reason: str) -> None:
        """Report something that was repaired and that the operator of the machine should know."""
        self._journal.write("noticed", reason=reason)
        self._agent.say(am.Note(fields={"noticed": reason}))
        say(reason)

    def _begin_anew(self, command: p.BeginAnew, view: View | None) -> p.Viewed | None:
        """Ask the agent for a view in which the open step begins anew. A job of one makes the view itself."""
        self._journal.write("anew", generation=command.generation, reason=command.reason)
        if self._agent.is_there:
            self._agent.say(am.StepAnew(generation=command.generation, reason=command.reason))
            return None
        assert view is not None
        generation = view.generation + 1
        return p.Viewed(view=replace(view, generation=generation, reason=command.reason, anew_since=generation))
