"""The action rule: it never blocks, whatever the routes and limits are; on even pipelines its order is that of 1F1B."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import Schedule1F1B

from elastrain.pipeline import actions
from elastrain.pipeline.actions import ActionKind, TaskAction
from elastrain.pipeline.open_tasks import StepShape, TaskDesk, readers
from elastrain.pipeline.pipeline_plan import PipelinePlan, Task, routes
from elastrain.pipeline.planning import PlanWish, first_plan
from tests.support.block_graphs import graph_of


class Members:
    """Desks that give each other what they make at once. No time passes but that of whoever drives it."""

    def __init__(self, shape: StepShape, tasks: Collection[Task], limits: dict[str, int]) -> None:
        self.shape = shape
        self.desks = {member: TaskDesk(shape, limit) for member, limit in limits.items()}
        for task in tasks:
            self.desks[task.member].hand_out([task])

    def compute(self, member: str, action: TaskAction) -> Callable[[], None]:
        """Compute it; the result is there for the others when the returned function is called."""
        made = self.desks[member].computed(action)

        def send() -> None:
            progress = [each for desk in self.desks.values() for each in desk.open_tasks()]
            for reader in readers(progress, made, self.shape) if made else ():
                self.desks[reader].arrive(made)

        return send

    @property
    def is_done(self) -> bool:
        return not any(desk.open_tasks() for desk in self.desks.values())

    def next_actions(self) -> list[tuple[str, TaskAction]]:
        chosen = [(member, desk.next_action()) for member, desk in self.desks.items()]
        return [(member, action) for member, action in chosen if action is not None]


def ends(seed: int) -> bool:
    """Play random routes over random members with random limits, in a random order."""
    rng = random.Random(seed)
    members = drawn(rng)
    while actions_now := members.next_actions():
        member, action = rng.choice(actions_now)
        members.compute(member, action)()
    return members.is_done


def ends_on_devices(seed: int) -> bool:
    """Play the same where members get another action while the present one lands."""
    rng = random.Random(seed)
    members = drawn(rng)
    outstanding: dict[str, list[TaskAction]] = {member: [] for member in members.desks}
    forwards: dict[Task, list[int]] = {}
    while True:
        may_begin = [
            (member, action)
            for member, desk in members.desks.items()
            if len(outstanding[member]) < 2 and (action := desk.next_action(outstanding[member])) is not None
        ]
        may_land = [member for member, given in outstanding.items() if given]
        if not may_begin and not may_land:
            return members.is_done
        if may_begin and (not may_land or rng.random() < 0.6):
            member, action = rng.choice(may_begin)
            assert action not in outstanding[member]
            outstanding[member].append(action)
            continue
        member = rng.choice(may_land)
        action = outstanding[member].pop(0)
        members.compute(member, action)()
        if action.kind is ActionKind.FORWARD:
            done = forwards.setdefault(action.task, [])
            assert action.micro_batch == members.shape.micro_batches_of(action.task.run)[len(done)], "in order"
            done.append(action.micro_batch)
            if action.task.end == members.shape.blocks:  # the loss goes backward at once
                members.compute(member, action._replace(kind=ActionKind.BACKWARD))()


def drawn(rng: random.Random) -> Members:
    blocks, names = rng.randint(2, 8), [f"m{i}" for i in range(rng.randint(2, 5))]
    shape = StepShape(number=0, micro_batches=rng.randint(2, 12), run_length=rng.choice([1, 1, 2, 3]), blocks=blocks)
    tasks = []
    for run in range(shape.runs):
        cuts = sorted(rng.sample(range(1, blocks), rng.randint(0, blocks - 1)))
        points = [0, *cuts, blocks]
        tasks += [Task(run, a, b, rng.choice(names)) for a, b in pairwise(points)]
    return Members(shape, tasks, {name: rng.randint(1, 3) for name in names})


def test_members_that_get_an_action_before_the_last_one_has_landed_block_nobody() -> None:
    assert all(ends_on_devices(seed) for seed in range(250))


def test_the_rule_blocks_nobody_for_random_routes_and_limits() -> None:
    assert all(ends(seed) for seed in range(250))


@pytest.mark.on_demand
def test_the_rule_blocks_nobody_in_twenty_thousand_schedules() -> None:
    assert all(ends(seed) for seed in range(20_000))


def test_where_every_task_in_flight_holds_a_forward_back_most_schedules_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actions, "_held_back_by", lambda task, in_flight: len(in_flight))
    assert sum(ends(seed) for seed in range(100)) < 60


def orders(plan: PipelinePlan, micro_batches: int) -> list[list[tuple[str, int]]]:
    """Each member's actions where a forward and a backward take one unit of time, and sending none."""
    shape = StepShape(number=0, micro_batches=micro_batches, run_length=1, blocks=plan.blocks)
    members = Members(shape, [task for route in routes(plan) for task in route], plan.limits)
    found: dict[str, list[tuple[str, int]]] = {member: [] for member in plan.members}
    while now := members.next_actions():
        sends = []
        for member, action in now:
            found[member].append((action.kind.value, action.micro_batch))
            sends.append(members.compute(member, action))
        for send in sends:
            send()
    assert members.is_done
    return [found[member] for member in plan.members]


class RecordingStage:
    """What torch's schedule asks of a stage: nothing is computed or sent, the order is written down."""

    def __init__(self, stage_index: int) -> None:
        self.stage_index = stage_index
        self.order: list[tuple[str, int]] = []

    def forward_one_chunk(self, micro_batch: int, *_: object, **__: object) -> None:
        self.order.append(("forward", micro_batch))

    def backward_one_chunk(self, micro_batch: int, **_: object) -> None:
        self.order.append(("backward", micro_batch))

    def __getattr__(self, name: str) -> Callable[..., list[object]]:
        return lambda *_: []


def orders_of_torch(stages: int, micro_batches: int) -> list[list[tuple[str, int]]]:
    """What torch's 1F1B really does. (The table that it also has numbers the last stage's forwards from 1, in 2.13.)"""
    recorded = []
    for index in range(stages):
        # Its constructor wants a device and a process group; the order needs neither.
        schedule: Any = object.__new__(Schedule1F1B)
        stage = RecordingStage(index)
        schedule._stage, schedule._num_stages, schedule._n_microbatches = stage, stages, micro_batches
        schedule.scale_grads = False
        schedule._check_inputs = lambda *_: ([None] * micro_batches, [None] * micro_batches)
        for unneeded in ("_initialize_stage", "_maybe_compute_loss", "_maybe_get_loss", "_update_losses"):
            setattr(schedule, unneeded, lambda *_: None)
        schedule._step_microbatches()
        recorded.append(stage.order)
    return recorded


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("more", [0, 1, 5])
def test_on_even_undisturbed_pipelines_the_order_is_that_of_torch_pipelining(stages: int, more: int) -> None:
    micro_batches = stages + more
    members = [f"m{i}" for i in range(stages)]
    plan = first_plan(graph_of([1] * stages), members, PlanWish(stages=stages, runs=micro_batches))
    assert orders(plan, micro_batches) == orders_of_torch(stages, micro_batches)


@given(stages=st.integers(1, 5), micro_batches=st.integers(1, 10))
def test_no_member_has_more_in_flight_than_its_depth_to_the_end(stages: int, micro_batches: int) -> None:
    members = [f"m{i}" for i in range(stages)]
    plan = first_plan(graph_of([1] * stages), members, PlanWish(stages=stages, runs=micro_batches))
    for depth, order in zip(plan.limits.values(), orders(plan, micro_batches), strict=True):
        in_flight = 0
        for kind, _ in order:
            in_flight += 1 if kind == "forward" else -1
            assert in_flight <= depth
