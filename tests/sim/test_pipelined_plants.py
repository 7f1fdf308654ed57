"""Rules of pipelines, broken on purpose in the production cores: the simulator has to find each of them.

One rule is kept although breaking it does no harm here: no member votes while it has tasks left. A task whose gradients
others lack keeps their shards from being finished, and what is computed a second time counts for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from elastrain import protocol as p
from elastrain.buffers.captures import Boundaries, KeptBoundary
from elastrain.decisions import rerouting
from elastrain.decisions.rerouting import Rerouting, reroute
from elastrain.job.values import Contribution
from elastrain.member.job_end import JobEnd
from elastrain.member.member_machine import MemberMachine
from elastrain.member.pipeline.assignments import Tasks, Tracing
from elastrain.member.pipeline.replicas import Replicas
from elastrain.member.state.ballot import Commands
from elastrain.member.state.committed import Commit, Parameters
from elastrain.pipeline import actions, redo
from elastrain.pipeline.actions import ActionKind
from elastrain.pipeline.open_tasks import TaskDesk, TaskProgress
from elastrain.pipeline.pipeline_plan import Direction
from elastrain.protocol.messages import Boundary
from tests.sim.cluster import Scenario
from tests.sim.findings import Search
from tests.sim.pipelined import PLACES, PipelinedLoop, TaskRun
from tests.sim.test_pipelined_members import cluster_of, draw

Plant = Callable[[], AbstractContextManager[Any]]
PLANTS: dict[str, tuple[Plant, str]] = {}
WITHIN = 60
"""Schedules that break a rule at the latest."""
FIRST = {
    "needs_of_living_tasks_are_forgotten": 20,
    "early_tensors_are_dropped": 240,
    "what_is_computed_in_a_recovery_counts_at_once": 160,
    "the_last_copy_stays": 700,
}
"""Where the schedules for a bug begin, if not at the first: they only save time."""


def _plant(rule: str) -> Callable[[Plant], Plant]:
    def note(plant: Plant) -> Plant:
        PLANTS[plant.__name__] = (plant, rule)
        return plant

    return note


@_plant("Who makes a boundary tensor keeps it until it holds the step's record.")
def makers_let_go_when_they_have_sent() -> AbstractContextManager[Any]:
    payload = Boundaries.__getitem__

    def taken(books: Boundaries, name: Any) -> Any:
        kept = payload(books, name)
        books._kept.pop(name)
        return kept

    return patch.object(Boundaries, "__getitem__", taken)


@_plant("A second copy of a boundary tensor is dropped: the first may be being read.")
def the_last_copy_stays() -> AbstractContextManager[Any]:
    def replaces(books: Boundaries, message: Boundary, tensors: Any) -> None:
        books._kept[message.name] = KeptBoundary(message, tensors)

    return patch.object(Boundaries, "put", replaces)


@_plant("Who makes a boundary tensor reports it, and sends it again to whoever needs it now.")
def nothing_is_sent_again() -> AbstractContextManager[Any]:
    send_again = Tasks.send_again

    def forgets(tasks: Tasks, rerouted: Rerouting) -> None:
        send_again(tasks, replace(rerouted, resends=()))

    return patch.object(Tasks, "send_again", forgets)


@_plant("The contribution of a micro-batch travels with its boundary gradient.")
def contributions_stay_where_they_are_made() -> AbstractContextManager[Any]:
    arrive = Tasks.on_boundary

    def loses(tasks: Tasks, message: Boundary, payload: object) -> None:
        told = message.contribution
        arrive(tasks, replace(message, contribution=told and replace(told, samples=told.samples + 1)), payload)

    return patch.object(Tasks, "on_boundary", loses)


@_plant("A run that is interrupted is computed again whole.")
def runs_are_resumed_in_their_middle() -> AbstractContextManager[Any]:
    resume = Tasks.take_up

    def resumes(tasks: Tasks, plan: Any, rerouted: Rerouting) -> None:
        resume(tasks, plan, rerouted)
        for task in rerouted.new:
            desk = tasks._desk
            if desk is not None and task in desk.progress and len(desk.shape.micro_batches_of(task.run)) > 1:
                desk.progress[task] = TaskProgress(task=task, forwarded=1, passed_back=1, done=1)

    return patch.object(Tasks, "take_up", resumes)


@_plant("A forward is held back by tasks in flight that end behind its cut, and by no others.")
def all_tasks_in_flight_count() -> AbstractContextManager[Any]:
    return patch.object(actions, "_held_back_by", lambda task, in_flight: len(in_flight))


@_plant("The weight gradients of a run are added in micro-batch order.")
def the_newest_weight_gradients_come_first() -> AbstractContextManager[Any]:
    following = TaskDesk._next

    def newest(desk: TaskDesk, progress: TaskProgress, kind: ActionKind) -> Any:
        action = following(desk, progress, kind)
        if action is None or kind is not ActionKind.WEIGHT:
            return action
        return action._replace(micro_batch=desk.shape.micro_batches_of(action.task.run)[progress.passed_back - 1])

    def in_any_order(loop: PipelinedLoop, run: TaskRun) -> list[p.Event]:
        key = run.command.task, run.command.micro_batch
        others = {each: left for each, left in loop._left.items() if each != key}
        loop._left = {key: loop._left[key]} if key in loop._left else {}
        found = add_left(loop, run)
        loop._left = others
        return found

    add_left = PipelinedLoop._add_left
    planted = ExitStack()
    planted.enter_context(patch.object(TaskDesk, "_next", newest))
    planted.enter_context(patch.object(PipelinedLoop, "_add_left", in_any_order))
    return planted


@_plant("A task counts as done when its last weight gradient is computed.")
def tasks_are_done_with_their_last_input_gradient() -> AbstractContextManager[Any]:
    def is_done(desk: TaskDesk, progress: TaskProgress) -> bool:
        return progress.passed_back == len(desk.shape.micro_batches_of(progress.task.run))

    return patch.object(TaskDesk, "_is_done", is_done)


@_plant("A block is reported when its last weight gradient is computed.")
def blocks_are_reported_with_their_input_gradient() -> AbstractContextManager[Any]:
    go_back = PipelinedLoop._go_back

    def reports(loop: PipelinedLoop, run: TaskRun, back: int, told: Contribution) -> list[p.Event]:
        found = go_back(loop, run, back, told)
        left = loop._left.get((run.command.task, run.command.micro_batch))
        if left is None or not loop._is_last(run.command):
            return found
        blocks = [block for place, _, _ in left.by_place for block, at in enumerate(PLACES) if at == place]
        step, task = run.command.step, run.command.task
        return [*found, *(loop._block_done(step, task, block, left.told) for block in blocks)]

    return patch.object(PipelinedLoop, "_go_back", reports)


@_plant("A task whose weight gradients are missing is not spared when its member is lost.")
def input_gradients_spare_a_lost_task() -> AbstractContextManager[Any]:
    came_back = redo._missing

    def spared(situation: Any, run: int, living: Any) -> frozenset[int]:
        kept = frozenset[Any]().union(*(report.kept for report in situation.reports.values()))
        last = situation.shape.micro_batches_of(run)[-1]
        names = {name.cut for name in kept if name.micro_batch == last and name.direction is Direction.GRADIENT}
        return frozenset(block for block in came_back(situation, run, living) if block not in names)

    return patch.object(redo, "_missing", spared)


@_plant("What living tasks wait for and nobody will make any more is computed again.")
def needs_of_living_tasks_are_forgotten() -> AbstractContextManager[Any]:
    return patch.object(redo, "_waited_for", lambda living, comes, missing: set())


@_plant("A tensor of the step after the present one is held until the record is here.")
def early_tensors_are_dropped() -> AbstractContextManager[Any]:
    is_ahead = Commit.is_ahead
    return patch.object(Commit, "is_ahead", lambda commit, m: not isinstance(m, Boundary) and is_ahead(commit, m))


@_plant("What comes before this member knows the first step's plan is held until it does.")
def tensors_before_the_first_plan_are_dropped() -> AbstractContextManager[Any]:
    return patch.object(MemberMachine, "_is_early", lambda own, message: own.machine.commit.is_ahead(message))


@_plant("A member that knows the first step's plan brings it to the next view.")
def every_view_plans_the_first_step_anew() -> AbstractContextManager[Any]:
    take_up = Tracing.take_up
    return patch.object(Tracing, "take_up", lambda own, reports, plan: take_up(own, reports, None))


@_plant("All members decide alike what is computed again.")
def each_member_puts_itself_first() -> AbstractContextManager[Any]:
    turn = iter(range(1 << 30))

    def turned(reports: Any, *rest: Any) -> Rerouting:
        names = list(reports)
        at = next(turn) % len(names)
        return reroute({name: reports[name] for name in (*names[at:], *names[:at])}, *rest)

    return patch("elastrain.member.recovering.reroute", turned)


@_plant("A report is not overtaken by what is computed after it.")
def what_is_computed_in_a_recovery_counts_at_once() -> AbstractContextManager[Any]:
    on_computed = Tasks.on_computed

    def at_once(tasks: Tasks, event: Any) -> None:
        is_recovering, tasks._views.is_recovering = tasks._views.is_recovering, False
        on_computed(tasks, event)
        tasks._views.is_recovering = is_recovering

    return patch.object(Tasks, "on_computed", at_once)


@_plant("What only a lost member had is handed out again.")
def nothing_is_handed_out_again() -> AbstractContextManager[Any]:
    decide = rerouting.redo

    def forgets(situation: Any) -> Any:
        return replace(decide(situation), tasks=())

    return patch.object(rerouting, "redo", forgets)


@_plant("Which members are replicas of a block is changed only by a commit.")
def any_member_of_the_plan_is_handed_any_block() -> AbstractContextManager[Any]:
    return patch.object(rerouting, "replicas", lambda plan: (plan.members,) * plan.blocks)


@_plant("The holders of an adopted block's shards publish to who has adopted it.")
def adopted_blocks_are_not_published() -> AbstractContextManager[Any]:
    recover = Replicas.recover
    return patch.object(Replicas, "recover", lambda own, reports, adopted, step: recover(own, reports, {}, step))


@_plant("An adopted block is published before any of its tasks begins, and so is a block that moves.")
def tasks_begin_before_their_parameters_are_here() -> AbstractContextManager[Any]:
    return patch.object(Parameters, "are_here", lambda parameters: True)


@_plant("Who has published a shard keeps it until the next commit.")
def blocks_go_while_they_are_read() -> AbstractContextManager[Any]:
    pass_commit = Replicas.pass_commit

    def lets_go(own: Replicas, before: Any) -> None:
        pass_commit(own, before)
        own._kept = {}
        own._hold()

    return patch.object(Replicas, "pass_commit", lets_go)


@_plant("A primary has the blocks in which its shards lie.")
def only_the_plan_says_what_is_needed() -> AbstractContextManager[Any]:
    def of_plan(own: Replicas, member: str) -> frozenset[int]:
        return own._computed(member)

    return patch.object(Replicas, "_blocks_of", of_plan)


@_plant("Nobody leaves before all members have all blocks.")
def members_leave_with_their_own_blocks() -> AbstractContextManager[Any]:
    leave = JobEnd.leave_together
    return patch.object(JobEnd, "leave_together", lambda end, *, whole: leave(end, whole=False))


@_plant("The memory of gradients goes when the loop has ended, and not before.")
def gradients_go_whenever_blocks_do() -> AbstractContextManager[Any]:
    do = Commands.do

    def for_good(out: Commands, command: p.Command) -> None:
        do(out, replace(command, for_good=True) if isinstance(command, p.HoldBlocks) else command)

    return patch.object(Commands, "do", for_good)


def _is_disturbed(scenario: Scenario) -> bool:
    return scenario.crashes + scenario.joins > 0


def search_for(name: str) -> Search:
    """The schedules with losses or joins of which one has to show the planted bug."""
    plant, _ = PLANTS[name]

    def failure(seed: int) -> str:
        cluster = cluster_of(seed)
        try:
            with plant():
                cluster.run(limit=6_000)
        except (AssertionError, KeyError, IndexError, StopIteration, ValueError) as found:
            return f"{type(found).__name__}: {found}"
        return ""

    def only(seed: int) -> bool:
        return draw(seed).members > 1 and _is_disturbed(draw(seed))

    return Search(kind="pipelined", name=name, within=WITHIN, failure=failure, only=only, first=FIRST.get(name, 0))


@pytest.mark.parametrize("name", PLANTS)
def test_a_broken_rule_is_found(name: str) -> None:
    assert search_for(name).find() is not None, f"{PLANTS[name][1]} Nothing found in {WITHIN} schedules."
