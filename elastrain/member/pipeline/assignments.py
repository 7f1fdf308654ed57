"""Assignments in pipelines: the first step's plan after tracing, and this member's tasks of the open step.

`Tracing` owns this member's block graph and the plan of the job's first step. That plan is a pure function of the view
and of the block graph. It is in force on a member once that member knows that all members of its view have traced the
same graph. Later plans come with the commit record. `Tasks` owns the tasks, routes and boundary tensors. No member
hands tasks out: they follow from the plan and, after a change of view, from the reports.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from elastrain import protocol as p
from elastrain.decisions.rerouting import Rerouting
from elastrain.decisions.voting import different_graphs
from elastrain.errors import ConfigError
from elastrain.job.values import OpenWork, Pipelining, Report, TracedGraph
from elastrain.member.contract import MemberPart, handles
from elastrain.member.state.ballot import Commands
from elastrain.member.state.committed import Commit
from elastrain.member.state.member_views import Views
from elastrain.member.state.runs import Runs
from elastrain.memory.pipeline_memory import Load
from elastrain.pipeline.actions import ActionKind, TaskAction
from elastrain.pipeline.graph import check_stages
from elastrain.pipeline.open_tasks import StepShape, TaskDesk, TaskProgress, readers
from elastrain.pipeline.pipeline_plan import BoundaryName, PipelinePlan, Task, routes
from elastrain.pipeline.planning import PlanWish, first_plan
from elastrain.protocol.messages import Boundary, HasTraced


class Tracing(MemberPart):
    """Part that owns this member's block graph, the graphs that peers sent in this view, and the first step's plan."""

    def __init__(self, me: str, pipelining: Pipelining | None, views: Views, commit: Commit, out: Commands) -> None:
        self.pipelining = pipelining
        self.traced: TracedGraph | None = None
        """Result of this member's tracing pass. None before the pass, and without pipelines."""
        self.sizes: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
        """Per block of the graph: bytes of a copy of its gradients, and of what a micro-batch keeps of its forward."""
        self.plan: PipelinePlan | None = None
        """Plan of the job's first step once it is in force, else None. The record has the plans of later steps."""
        self._me = me
        self._views = views
        self._commit = commit
        self._out = out
        self._told: dict[str, HasTraced] = {}
        """Member of the view -> the graph that it has traced, and the fewest stages for which it has room."""
        self._fewest = 0
        """With `--stages auto`: members per pipeline, as agreed for the first plan. 0: not known here."""

    @property
    def awaits_plan(self) -> bool:
        """True while the job's first step is open and its plan is not yet known here."""
        return self.pipelining is not None and self._commit.is_initial and self.plan is None

    @handles(p.Traced)
    def on_traced(self, event: p.Traced) -> None:
        """Note the result of the tracing pass, and send the graph to all members before the first commit.

        The job ends with ConfigError if the graph cannot be cut into the wished number of stages.
        """
        assert self.pipelining is not None
        self.traced, self.sizes = event.model, (event.gradient_bytes, event.saved_bytes)
        try:
            check_stages(event.model.graph, self.pipelining.stages or 1)
        except ConfigError as error:
            self._out.fail("ConfigError", str(error))
            return
        # Every later plan comes with a record, so the graph of a later newcomer is not needed.
        if self._commit.is_initial:
            self._told[self._me] = told = _told_of(event.model)
            self._out.send_all(self._views.others, told)

    @handles(HasTraced)
    def on_told(self, source: str, message: HasTraced) -> None:
        """Note the graph that a member has traced."""
        self._told[source] = message

    def take_up(self, reports: Mapping[str, Report], plan: PipelinePlan | None) -> None:
        """Take up what the reports say of graphs. `plan`: the open step's plan, if any member of the view knows it."""
        told = {member: report.work.traced for member, report in reports.items()}
        # This member may have traced after its own report. The others get its graph by message then.
        told[self._me] = self.traced
        self._told = {member: _told_of(traced) for member, traced in told.items() if traced is not None}
        self.plan = plan if self._commit.is_initial else None

    def begin(self, step: int) -> None:
        """Forget the first step's plan: the record has the plan of every later step."""
        self.plan = None

    def agree(self, runs: int) -> PipelinePlan | None:
        """Return the first step's plan once all members have traced, else None. Ends the job if their graphs differ."""
        members = self._views.view.ids
        # All members must have traced: without a graph a member cannot name a block, and another graph means another
        # plan.
        if self.traced is None or self.pipelining is None or not self._told.keys() >= set(members):
            return None
        for member in members:
            if (where := self._told[members[0]].graph.difference(self._told[member].graph)) is not None:
                told = {each: self._told[each].graph.digest() for each in (members[0], member)}
                self._out.fail("DivergedError", different_graphs(self._commit.step + 1, told, where))
                return None
        # By what all members have told, so that all come to the same plan. The member with least room decides.
        self._fewest = max(self._told[member].fewest for member in members)
        self.plan = first_plan(self.traced.graph, members, self.wish(runs))
        return self.plan

    def wish(self, runs: int, present: PipelinePlan | None = None) -> PlanWish:
        """Return what every plan is to keep to. `present`: the plan in force, if there is one."""
        assert self.pipelining is not None and self.traced is not None
        if self.pipelining.stages:
            return PlanWish(stages=self.pipelining.stages, runs=runs)
        # A newcomer has not heard what was agreed. Its peers have room for what they compute.
        shortest = min((len(each.members) for each in present.goal.pipelines), default=1) if present is not None else 1
        stages = min(self._fewest or shortest, len(self.traced.graph.units))
        return PlanWish(stages=stages, runs=runs, is_least=True)


def _told_of(traced: TracedGraph) -> HasTraced:
    return HasTraced(graph=traced.graph, fewest=traced.fewest)


class Tasks(MemberPart):
    """Part that owns this member's tasks of one step, and its knowledge of the other members' tasks."""

    def __init__(self, me: str, tracing: Tracing, views: Views, commit: Commit, runs: Runs, out: Commands) -> None:
        self._me, self._tracing, self._views = me, tracing, views
        self._commit, self._runs, self._out = commit, runs, out
        self.begin(runs.step)

    def begin(self, step: int) -> None:
        """Start anew with a step of which no task is handed out."""
        self._desk: TaskDesk | None = None
        self._known: tuple[TaskProgress, ...] = ()
        """Open tasks of all members at the time when they were handed out."""
        self._messages: dict[BoundaryName, Boundary] = {}
        """Messages of the boundary tensors that are here, made or received. After a loss they may be sent again."""
        self._deferred: list[p.Computed] = []
        """Results of the training loop that came during a recovery."""

    # ------------------------------------------------------------------------------------------------------ questions

    @property
    def are_handed_out(self) -> bool:
        """True if the open step is computed in pipelines and this member knows its tasks."""
        return self._desk is not None

    def are_done(self) -> bool:
        """Return True if no task is left to compute here, or there are no pipelines."""
        return not self._tracing.awaits_plan and (self._desk is None or not self._desk.has_open_tasks())

    def why_not_yet(self) -> str:
        """Wait until all tasks are computed: the commit releases the boundary tensors that they need."""
        return "" if self.are_done() else f"tasks of step {self._runs.step} are still to be computed here"

    def open_work(self, adopted: tuple[int, ...], present: tuple[int, ...]) -> OpenWork:
        """Return this member's open tasks and kept tensors, for its report."""
        work = OpenWork(
            pending=tuple(self._runs.pending),
            fixed=self._runs.under_way,
            traced=self._tracing.traced,
            plan=self._tracing.plan,
            adopted=adopted,
            present=present,
        )
        if self._desk is None:
            return work
        return replace(work, tasks=self._desk.open_tasks(), kept=tuple(sorted(self._messages)))

    def load(self) -> Load | None:
        """Return this member's tasks of the open step for memory planning. None if none were handed out."""
        if self._desk is None:
            return None
        return Load(tasks=tuple(self._desk.progress), shape=self._desk.shape, in_flight=self._desk.limit)

    # --------------------------------------------------------------------------------------------------- the hand-out

    def by_member(self) -> Mapping[str, Sequence[Task]]:
        """Return the tasks of all members that were open when they were handed out."""
        found: dict[str, list[Task]] = defaultdict(list)
        for progress in self._known:
            found[progress.task.member].append(progress.task)
        return found

    def hand_out(self, plan: PipelinePlan) -> None:
        """Hand out a whole step by the plan."""
        self._hand(plan, [TaskProgress(task=task) for route in routes(plan) for task in route])

    def take_up(self, plan: PipelinePlan, rerouting: Rerouting) -> None:
        """Take up the tasks after a change of view: living members keep theirs, and lost work is computed again."""
        if self._desk is not None:
            # These tasks were done before and are wanted again as a whole, since other members may lack their output.
            self._desk.forget(rerouting.new)
        self._hand(plan, rerouting.tasks)

    def send_again(self, rerouting: Rerouting) -> None:
        """Send kept tensors to the members that lack them, and handle results computed since this member's report."""
        for resend in rerouting.resends:
            if resend.giver == self._me:
                self._out.send(resend.taker, self._messages[resend.name])
        deferred, self._deferred = self._deferred, []
        for event in deferred:
            self.on_computed(event)

    def _hand(self, plan: PipelinePlan, tasks: Iterable[TaskProgress]) -> None:
        self._known = tuple(tasks)
        if self._desk is None:
            self._desk = TaskDesk(self._shape(plan.blocks), plan.limits.get(self._me, 1), self._me in plan.split)
        mine = [progress.task for progress in self._known if progress.task.member == self._me]
        self._desk.hand_out(mine)
        runs_by_block: dict[int, set[int]] = defaultdict(set)
        traced = self._tracing.traced
        for block, place in enumerate(traced.places if traced is not None else ()):
            runs_by_block[block] |= {task.run for task in mine if place in task.blocks}
        self._runs.aim(runs_by_block)

    def _shape(self, blocks: int) -> StepShape:
        pipelining = self._tracing.pipelining
        assert pipelining is not None
        return StepShape(
            number=self._runs.step,
            micro_batches=pipelining.micro_batches,
            run_length=pipelining.run_length,
            blocks=blocks,
        )

    # --------------------------------------------------------------------------------------------------------- events

    def on_computed(self, event: p.Computed) -> None:
        """Note a computed action, and send the boundary tensor that it made to the members that read it."""
        # The loop may still compute for a step that was committed without it, or that has begun anew.
        if event.step != self._runs.step or self._runs.is_void or self._desk is None:
            return
        if self._views.is_recovering:
            # The recovery decides from this member's report. A result that came later must wait for the decision.
            self._deferred.append(event)
            return
        made = self._desk.computed(event.action, is_split=event.is_split)
        if made is None or event.made is None:
            return
        self._messages.setdefault(made, event.made)
        for member in readers(self._known, made, self._desk.shape):
            if member != self._me:
                self._out.send(member, event.made)

    @handles(Boundary)
    def on_boundary(self, message: Boundary, payload: object) -> None:
        """Take a boundary tensor that another member has sent, unless it is here already."""
        # A second copy has the same bits, and is dropped.
        if self._desk is not None and self._desk.arrive(message.name):
            self._messages.setdefault(message.name, message)
            self._out.do(p.TakeBoundary(message=message, payload=payload))

    # -------------------------------------------------------------------------------------------------- what comes next

    def next_command(self) -> p.Forward | p.Backward | p.WeightGradients | None:
        """Return the loop's next command. None if it waits for a boundary tensor, or has done its tasks."""
        if self._desk is None or (action := self._desk.next_action(self._runs.actions)) is None:
            return None
        step, task, micro_batch = self._runs.step, action.task, action.micro_batch
        if action.kind is ActionKind.WEIGHT:
            return p.WeightGradients(step=step, task=task, micro_batch=micro_batch)
        is_split = self._desk.splits(task)
        if action.kind is ActionKind.BACKWARD:
            return p.Backward(step=step, task=task, micro_batch=micro_batch, is_split=is_split)
        scale = self._commit.next_scaler().scale
        return p.Forward(step=step, task=task, micro_batch=micro_batch, is_split=is_split, loss_scale=scale)


_KINDS = {p.Forward: ActionKind.FORWARD, p.Backward: ActionKind.BACKWARD, p.WeightGradients: ActionKind.WEIGHT}


def action_of(command: p.Forward | p.Backward | p.WeightGradients) -> TaskAction:
    """Return the action that the command lets the training loop compute."""
    return TaskAction(_KINDS[type(command)], command.micro_batch, command.task)
