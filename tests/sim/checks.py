"""What must hold after every event of a simulated job, whatever happens to its members.

Everything is compared with the undisturbed job of one, or with what another member said of the same moment. Nothing
here drives the job.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from elastrain import protocol as p
from elastrain.job.checkpoint_plan import LOOP
from elastrain.job.fold import Node, leaves
from elastrain.job.placement import Placement
from elastrain.job.scaling import Scaler
from elastrain.job.values import Record, Recovery, Report, Shape, Vote
from elastrain.job.world import View
from elastrain.pipeline.moves import shadows
from elastrain.pipeline.pipeline_plan import PipelinePlan
from elastrain.pipeline.planner.plan_vote import PlanVote
from tests.sim.member import SimMember, Violation, symbol
from tests.sim.symbols import RELEASED

REGAIN_STEPS = 3
"""Copies are made in one step, followed up in the next, and count from its commit on."""


@dataclass
class Truth:
    """What an undisturbed job of one computes: per step, parameter digest, parameters and the record's content."""

    digests: dict[int, int] = field(default_factory=dict)
    parameters: dict[int, tuple[int, ...]] = field(default_factory=dict)
    told: dict[int, tuple[object, ...]] = field(default_factory=dict)

    def next_scaler(self, step: int) -> Scaler:
        """The loss scaling of the step after this one."""
        scaler = self.told[step][-1]
        assert isinstance(scaler, Scaler)
        return scaler

    def stored(self, shape: Shape) -> tuple[int, ...]:
        """What a checkpoint of the job's initial step has of each shard."""
        return tuple(self.after(shape.initial.step, shard) for shard in range(len(shape.shards)))

    def after(self, step: int, shard: int) -> int:
        """The shard's parameters after the step."""
        return symbol("init", shard) if step < 0 else self.parameters[step][shard]


class Checks:
    """Invariants of the whole job; raises Violation at the first that breaks."""

    def __init__(self, shape: Shape, truth: Truth | None, members: Mapping[str, SimMember], dead: Collection[str]):
        self.shape = shape
        self.truth = truth
        self.members = members
        self.dead = dead
        self.committed: dict[str, int] = {}
        self.records: dict[int, Record] = {}
        self.fresh: Record | None = None
        """Committed in the event at hand, for the first time."""
        self.reports: dict[tuple[int, str], Report] = {}
        self.flipped: Collection[str] = ()
        """Members in whose memory a bit has changed: wrong values are then there until they are noticed."""
        self.may_refuse = False
        """Members may have no room for copies: shards are then short of holders for good."""
        self.only_joins = False
        """Nobody leaves: then a new view interrupts nobody who computes."""
        self.decisions: dict[int, Recovery] = {}
        self.roles: dict[tuple[int, int], Placement] = {}
        self.checked_roles: dict[str, object] = {}
        self.newest_durable = -1
        """The step of the newest visible checkpoint."""
        self.checkpoints = 0
        self.due: dict[int, int] = {}
        """Generation -> step that is not committed with fewer copies than there should be."""
        self.short: dict[int, int] = {}
        """Shard with fewer living holders than it should have -> the step that was open when that began."""
        self.moves: dict[tuple[int, int], p.Moved] = {}
        """(step of the record that has named it, step of the one that has ended it) -> the move."""
        self.handed = 0
        """Shards whose new primaries have made the update of the handover themselves."""
        self.shown = 0
        """Shards that an adopter had read whole as a shadow, so that nobody had to publish them."""
        self.ids: tuple[str, ...] = ()
        """Members of the newest view that was resumed in."""

    # ------------------------------------------------------------------------------------------------ after a command

    def command(self, member: SimMember, command: p.Command) -> None:
        match command:
            case p.Passed():
                self._passed(member.me, command.record)
            case p.Resumed():
                self._resumed(member.me, command.view, command.recovery)
            case p.Apply():
                for shard in command.shards:
                    self._value(member, shard, command.record.step, member.state(shard), "applied state")
            case p.TakeOwnUpdate():
                for update in command.updates:
                    self.handed += 1
                    parameters = member.parameters()[update.shard]
                    self._value(member, update.shard, update.record.step, parameters, "its own update")
            case p.ShowParameters():
                self.shown += len(command.shards)
                for shard in command.shards:
                    self._value(member, shard, member.committed, member.parameters()[shard], "an adopter's parameters")
            case p.Swap():
                self._value(member, command.shard, command.step, member.state(command.shard), "verified copy")
            case p.Bind() | p.TakeParameters(part=None):
                self._value(member, command.shard, command.step, member.parameters()[command.shard], "parameters")
            case p.SendMessage() if isinstance(command.message, Report):
                self._reported(member, command.message)
            case p.SendMessage(message=Vote(step=step)) if member.warming:
                raise Violation(f"{member.me} votes on step {step} while its loop computes blocks on zeros")
            # Its own vote may have been the last one: then it has gone on in the same event.
            case p.SendMessage(message=Vote(step=step, plan=PlanVote(is_ready=True))) if step == member.committed + 1:
                self._ready(member)
            case p.Advance():
                self._seen(member, command.record.step)
            case p.Moved():
                self.moves[command.named, command.step] = command

    def _seen(self, member: SimMember, step: int) -> None:
        """Between two steps the script sees the values of the last one, or none."""
        for shard, value in enumerate(member.parameters()):
            if shard not in member.symbols.awaited and value != RELEASED:
                self._value(member, shard, step, value, "what the script sees")

    def _ready(self, member: SimMember) -> None:
        """A shadow says that it holds the parameters of the step before the one of its vote."""
        plan = member.machine.commit.plan
        assert plan is not None
        for shard in member.machine.replicas.shadow_shards(member.me, among=shadows(plan)[member.me]):
            if member.roles.coming.get(shard) == member.me:
                continue  # its primary knows what it has: `_all_holders_can_make`
            self._value(member, shard, member.committed, member.parameters()[shard], "a ready shadow's parameters")

    def _value(self, member: SimMember, shard: int, step: int, value: int, what: str) -> None:
        if self.truth is None or self.flipped:
            return
        if value != self.truth.after(step, shard):
            raise Violation(f"{member.me}: {what} of shard {shard} after step {step} differs from the undisturbed job")

    def _passed(self, me: str, record: Record) -> None:
        first = self.records.setdefault(record.step, record)
        if content(first) != content(record):
            raise Violation(f"{me} commits step {record.step} with another content than an earlier group")
        if first.generation == record.generation and first != record:
            raise Violation(f"{me} holds another record of step {record.step} than others of its view")
        if self.truth is not None and content(record) != self.truth.told[record.step]:
            raise Violation(f"{me}: the record of step {record.step} differs from the undisturbed job")
        self._same_settings(me, record)
        if first is record:
            self.fresh = record
            self._no_fewer_holders(record)

    def _same_settings(self, me: str, record: Record) -> None:
        view = self.members[me].view
        assert view is not None
        settings = {self.members[m].settings.get(record.step) for m in view.ids} - {None}
        if len(settings) > 1 and record.generation == view.generation:
            raise Violation(
                f"{me} commits step {record.step}, which members entered with different settings: {settings}"
            )

    def _no_fewer_holders(self, record: Record) -> None:
        before = self.roles.get((record.generation, record.step - 1))
        if before is None:
            return
        for shard, holders in record.roles:
            if len(holders.all) < len(before[shard].all):
                raise Violation(f"step {record.step} leaves shard {shard} with fewer holders: {holders}")

    def _all_holders_can_make(self, me: str, record: Record) -> None:
        """At the first commit of a step each living holder has its state, or the state before and the gradient."""
        member = self.members[me]
        assert member.view is not None
        for shard, holders in enumerate(member.roles.committed or ()):
            for holder in holders.all:
                if holder in member.view and holder not in self.dead and holder not in self.flipped:
                    self._can_make(self.members[holder], shard, record.step)

    def _can_make(self, member: SimMember, shard: int, step: int) -> None:
        held = member.machine.custody.holdings.find(shard)
        if held is None:
            raise Violation(f"{member.me} is a holder of shard {shard} in step {step}, but holds nothing")
        finished = shard in member.machine.step.reduction.finished and member.machine.step.number == step
        if held.version != step and not (held.version == step - 1 and (step in held.kept or finished)):
            raise Violation(f"step {step} is committed, but holder {member.me} cannot make shard {shard} of it")
        self._value(member, shard, held.version, member.state(shard), "a holder's state")

    def _resumed(self, me: str, view: View, recovery: Recovery) -> None:
        """All members come to one decision, and every run is done by somebody, and by nobody twice."""
        first = self.decisions.setdefault(view.generation, recovery)
        if first is recovery:
            self._each_run_once(view, recovery)
            self.due[view.generation] = recovery.committed + REGAIN_STEPS
            self.due[view.generation] += self._copies_to_make(recovery.now, self.members[me].roles.target)
            self._note_short(me, view, recovery)
        elif first != recovery:
            raise Violation(f"{me} decided otherwise than another member of generation {view.generation}")

    def _copies_to_make(self, now: Placement, goals: Placement) -> int:
        """How many the busiest primary has before it: at least one of them is made per step."""
        copies: Counter[str] = Counter()
        for holders, goal in zip(now, goals, strict=True):
            copies[holders.primary] += len(set(goal.all) - set(holders.all))
        return max(copies.values(), default=0)

    def _note_short(self, me: str, view: View, recovery: Recovery) -> None:
        """A loss grants its two steps anew; a join grants none to what was short before."""
        since = self.short if set(self.ids) <= set(view.ids) else {}
        goals = self.members[me].roles.target
        short = [s for s, now in enumerate(recovery.now) if len(now.all) < len(goals[s].all)]
        self.short = {shard: since.get(shard, recovery.committed + 1) for shard in short}
        self.ids = view.ids

    def _window_is_closed(self, member: SimMember, record: Record) -> None:
        """Two steps after a loss without another one, every shard has as many holders as there can be."""
        for shard, since in list(self.short.items()):
            now, goal = member.roles.live[shard], member.roles.target[shard]
            if len(now.all) >= len(goal.all):
                del self.short[shard]
            elif since < record.step and not self.flipped:  # a state that was found wrong is let go of, as after a loss
                raise Violation(f"step {record.step} is committed, but shard {shard} is held by {now.all} only")

    def _redundant_again(self, member: SimMember, record: Record) -> None:
        assert member.view is not None
        before = self.records.get(record.step - 1)
        if _plan_of(record) != _plan_of(before):
            # Holders go after the blocks that have moved.
            copies = self._copies_to_make(member.roles.live, member.roles.target)
            self.due[member.view.generation] = record.step + copies + REGAIN_STEPS
        if record.switch or record.step < self.due.get(member.view.generation, record.step + 1):
            return
        for shard, (holders, goal) in enumerate(zip(member.roles.committed or (), member.roles.target, strict=True)):
            if set(holders.all) != set(goal.all):
                raise Violation(
                    f"after step {record.step} shard {shard} is still held by {holders.all}, not by {goal.all}"
                )

    def _each_run_once(self, view: View, recovery: Recovery) -> None:
        if self.shape.pipelining is not None:
            return  # nobody is given whole runs
        if len(view.members) == 1 or recovery.wrong is not None:
            return  # it reports to nobody; or nothing of what was reported counts
        unheard = [m for m in view.ids if (view.generation, m) not in self.reports]
        if unheard:
            raise Violation(f"generation {view.generation} was decided before {unheard} reported")
        told = {m: self.reports[view.generation, m] for m in view.ids}
        reports = {m: report for m, report in told.items() if report.committed == recovery.committed}
        under_way = {m: set(report.work.pending[: report.work.fixed]) for m, report in reports.items()}
        doers: dict[int, list[str]] = {run: [] for run in range(self.shape.runs)}
        for member, runs in recovery.runs.items():
            for run in runs:
                doers[run].append(member)
        for run, members in doers.items():
            if len(members) > 1 and not all(run in under_way.get(m, ()) for m in members):
                raise Violation(f"run {run} is handed out to {members}")
        todo = {run for run, members in doers.items() if members}
        for (shard, lane), nodes in recovery.folded.items():
            block = self.shape.shards[shard].lanes[lane]
            computed = leaves(node for report in reports.values() for node in report.own[block])
            if todo | computed | leaves(nodes) != set(doers):
                raise Violation(
                    f"runs of shard {shard} are forgotten: {todo} to do, {computed} computed, {nodes} folded"
                )

    def _reported(self, member: SimMember, report: Report) -> None:
        assert member.view is not None
        generation = member.view.generation
        self.reports[generation, member.me] = report
        reduced = {block for shard in self.shape.shards for block in shard.lanes}
        ended = [leaves(report.own[block]) for block in reduced]  # no step waits for a block without shards
        if self.only_joins and any(ended) and any(set(report.work.pending) - runs for runs in ended):
            raise Violation(f"{member.me} lets joiners in in the middle of step {report.committed + 1}")
        for nodes in (*report.own, *(nodes for _, _, nodes in report.folded)):
            if not _disjoint(nodes):
                raise Violation(f"{member.me} keeps overlapping partials: {nodes}")

    def durable(self, member: SimMember, command: p.WriteManifest) -> None:
        """A checkpoint has become visible: all shards of one step, as an undisturbed job has them, and its loop."""
        step = command.record.step
        # The same one again: who made it visible was lost before the others knew.
        if step < self.newest_durable:
            raise Violation(f"{member.me} makes step {step} the newest checkpoint after {self.newest_durable}")
        self.newest_durable = step
        self.checkpoints += 1
        told = [each.split(":") for each in command.told]
        if {int(shard) for shard, _ in told} != set(range(len(self.shape.shards))):
            raise Violation(f"the checkpoint of step {step} lacks shards: {command.told}")
        for shard, value in told:
            self._value(member, int(shard), step, int(value), "what was captured")
        if any(each != f"{LOOP}:{step + 1}" for each in command.loops):
            raise Violation(f"the checkpoint of step {step} has the loop's state {command.loops} on disks")
        if member.kept_loop.get(step) != str(step + 1):
            raise Violation(f"the checkpoint of step {step} has the loop's state {member.kept_loop.get(step)}")

    def forget_fresh(self) -> None:
        """Nobody who lives knows of it: members that round differently may commit the step with another content."""
        if self.fresh is not None:
            self.records.pop(self.fresh.step, None)
            self.fresh = None

    # -------------------------------------------------------------------------------------------------- after an event

    def event(self, member: SimMember) -> None:
        if member.committed < self.committed.get(member.me, -1):
            raise Violation(f"{member.me}: the committed step fell to {member.committed}")
        self.committed[member.me] = member.committed
        if self.fresh is not None:
            fresh, self.fresh = self.fresh, None
            if max(self.committed.values()) == fresh.step:  # else a member that was removed hears it long afterwards
                self._all_holders_can_make(member.me, fresh)
                if not self.may_refuse:
                    self._window_is_closed(member, fresh)
                    self._redundant_again(member, fresh)
        if (
            member.view is None
            or member.machine.views.is_recovering
            or self.checked_roles.get(member.me) is member.roles.live
        ):
            return
        self.checked_roles[member.me] = member.roles.live
        now = self.roles.setdefault((member.view.generation, member.committed), member.roles.live)
        if now != member.roles.live:
            raise Violation(f"{member.me} sees other holders than others after step {member.committed} of its view")
        self._nodes_apart(member.roles.target, member.view.nodes)

    def _nodes_apart(self, goal: Placement, nodes: Mapping[str, str]) -> None:
        several = len(set(nodes.values())) > 1
        for shard, holders in enumerate(goal):
            primary = holders.primary
            if several and holders.backups and nodes[holders.backups[0]] == nodes[primary]:
                raise Violation(f"shard {shard} is to be backed up on its primary's node {nodes[primary]}")


def content(record: Record) -> tuple[object, ...]:
    """What does not depend on the view in which the step was committed."""
    return record.contribution, record.square_norm, record.skipped, record.scaler, record.next_scaler


def _disjoint(nodes: Collection[Node]) -> bool:
    return len(leaves(nodes)) == sum(stop - start for start, stop in nodes)


def _plan_of(record: Record | None) -> str | None:
    plan = None if record is None else record.plan
    return plan.digest if isinstance(plan, PipelinePlan) else plan
