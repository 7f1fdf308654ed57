"""The runtime's step over pipelines, without a protocol: one process, a thread per member, desks that say what is next.

Only one member runs at a time, because torch's generators belong to the process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import elastrain
from elastrain import protocol as p
from elastrain.buffers.captures import KeptBoundary
from elastrain.job.values import Contribution, Findings
from elastrain.pipeline.actions import ActionKind
from elastrain.pipeline.open_tasks import StepShape, TaskDesk
from elastrain.pipeline.pipeline_plan import BoundaryName, Direction, PipelinePlan, routes
from elastrain.runtime.carrying.landed_results import Landing
from elastrain.runtime.io.loop_channel import Assignment, BoundaryMade, TaskAssignment
from elastrain.runtime.loop.computed_run import StepParts
from elastrain.runtime.loop.mutation_guard import MutationGuard
from elastrain.runtime.loop.pipelined import Pipelines, PipelineWish
from elastrain.runtime.loop.step import Step
from elastrain.runtime.loop_state.layers import Layers
from elastrain.runtime.loop_state.randomness import BlockRandomness
from elastrain.runtime.model.flat_model import ModelState
from elastrain.runtime.model.gradients import GradientSlot
from elastrain.runtime.model.partition import describe
from tests.support.pipeline_models import WORDS, Case, autocast, loss_of

MICRO_BATCHES, SEED = 5, 7
WAIT_S = 120.0
Found = dict[tuple[int, int], tuple[int, Contribution, int]]
"""(run, block of the layout) -> digest of its gradient, what it counts, which leaves have one."""


class Texts(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        words = torch.randint(0, WORDS, (13,))
        return words[:-1], words[1:]


@dataclass
class Post:
    """What members of one job have made, and whose turn it is."""

    plan: Any
    kept: dict[BoundaryName, KeptBoundary] = field(default_factory=dict)
    found: Found = field(default_factory=dict)
    turn: threading.Condition = field(default_factory=threading.Condition)
    failure: list[BaseException] = field(default_factory=list)
    order: list[tuple[str, str, int, int]] = field(default_factory=list)
    """(member, kind, micro-batch, begin), as computed."""


class DeskHandover:
    """Stands for the engine of one member of a pipeline, which has the blocks that it computes and no others."""

    landing = Landing()
    submitted = landing.port.record()

    def __init__(self, me: str, post: Post, state: ModelState, run_length: int) -> None:
        self._me, self._post, self._state, self._run_length = me, post, state, run_length
        self._desk: TaskDesk | None = None
        self._slots: dict[Any, GradientSlot] = {}
        self._slot: GradientSlot | None = None

    def tell_landed(self, *made: Callable[[], Any], **_: Any) -> None:
        for make in made:
            self.tell(make())

    def tell(self, *all_told: Any) -> None:
        for told in all_told:
            self._take(told)

    def _take(self, told: Any) -> None:
        match told:
            case p.Traced():
                blocks = len(told.model.graph.blocks)
                plan = self._post.plan(blocks)
                shape = StepShape(number=0, micro_batches=MICRO_BATCHES, run_length=self._run_length, blocks=blocks)
                self._desk = TaskDesk(shape, plan.limits[self._me], self._me in plan.split)
                mine = [task for route in routes(plan) for task in route if task.member == self._me]
                self._desk.hand_out(mine)
                begin, end = next(q.stretches(blocks)[self._me] for q in plan.pipelines if self._me in q.members)
                self._state.hold([b for b, place in enumerate(told.model.places) if begin <= place < end])
            case p.BlockDone():
                assert self._slot is not None
                key = (told.run, told.block)
                assert key not in self._post.found, f"{key} was computed twice"
                self._post.found[key] = (self._slot.digest(told.block), told.contribution, told.touched)
            case BoundaryMade(event=event):
                assert self._desk is not None and isinstance(event, p.Computed)
                made = self._desk.computed(event.action, is_split=event.is_split)
                assert (None if event.made is None else event.made.name) == made
                assert event.is_last == self._desk.is_done(event.action.task)
                self._post.order.append(
                    (self._me, str(event.action.kind), event.action.micro_batch, event.action.task.begin)
                )
                if event.made is not None:
                    self._post.kept[event.made.name] = KeptBoundary(event.made, told.tensors)

    def next_work(self) -> Any:
        with self._post.turn:
            self._post.turn.notify_all()
            found = self._post.turn.wait_for(self._next, timeout=WAIT_S)
            assert found is not None, f"{self._me} waits in vain"
            return found

    def _next(self) -> Any:
        post, desk = self._post, self._desk
        assert desk is not None
        if post.failure:
            raise RuntimeError("another member has failed")
        for name in post.kept:
            desk.arrive(name)
        if not desk.open_tasks():
            record = SimpleNamespace(plan=post.plan(desk.shape.blocks), findings=Findings())
            return p.Advance(record=record)  # type: ignore[arg-type]
        action = desk.next_action()
        if action is None:
            return None
        forward, task = action.kind is ActionKind.FORWARD, action.task
        cut = task.begin if forward else task.end
        name = desk.shape.name(action.micro_batch, cut, Direction.ACTIVATION if forward else Direction.GRADIENT)
        self._slot = self._slots.setdefault(task, self._state.new_slot())
        if action.kind is ActionKind.WEIGHT:
            left = p.WeightGradients(step=0, task=task, micro_batch=action.micro_batch)
            return TaskAssignment(left, self._slot, None)
        received = None if forward and cut == 0 else post.kept[name]
        kind = p.Forward if forward else p.Backward
        command = kind(step=0, task=task, micro_batch=action.micro_batch, is_split=desk.splits(task))
        return TaskAssignment(command, self._slot, received)


class WholeHandover:
    """Stands for the engine of a job of one that computes whole runs."""

    landing = Landing()

    def __init__(self, post: Post, state: ModelState, runs: int) -> None:
        self._post, self._state, self._runs = post, state, iter(range(runs))

    def tell_landed(self, *made: Callable[[], Any], **_: Any) -> None:
        for make in made:
            self.tell(make())

    def tell(self, told: Any) -> None:
        assert isinstance(told, p.BlockDone)
        self._post.found[told.run, told.block] = (self._slot.digest(told.block), told.contribution, told.touched)

    def next_work(self) -> Any:
        run = next(self._runs, None)
        if run is None:
            return p.Advance(record=SimpleNamespace(plan=None, findings=Findings()))  # type: ignore[arg-type]
        self._slot = self._state.new_slot()
        return Assignment(p.Compute(step=0, run=run), self._slot)


def _parts(case: Case, model: nn.Module, handover_of: Any, run_length: int, *, apart: bool = False) -> StepParts:
    layout = describe(model, torch.optim.SGD(model.parameters(), lr=0.1))
    state = ModelState(model, layout, lambda numel, dtype: torch.zeros(numel, dtype=dtype), apart=apart)
    loader = elastrain.DataLoader(
        Texts(), global_batch_size=2 * MICRO_BATCHES, micro_batch_size=2, num_workers=0, collate_fn=case.collate
    )
    loader.bind(SEED)
    loader.start(0, lambda step: ())
    untouched = MutationGuard(model, lambda: state.memory, [])
    untouched.begin()
    return StepParts(
        handover=handover_of(state),
        model=state,
        loader=loader,
        randomness=BlockRandomness(model, layout.blocks, SEED, torch.device("cpu")),
        untouched=untouched,
        layers=Layers(model),
        run_length=run_length,
        reach=lambda step, phase: None,
        log=lambda *args, **fields: None,
        backward=nullcontext,
    )


def _loop(case: Case, model: nn.Module, step: Step) -> None:
    """The user's loop. It knows nothing of pipelines."""
    with autocast(case.autocast == "loop"):
        for batch in step:
            with autocast(case.autocast == "forward"):
                loss = loss_of(model, batch)
            step.backward(loss, weight=batch[0].numel())


def _step(parts: StepParts, pipelines: Pipelines | None) -> Step:
    taken = SimpleNamespace(check=lambda: None)
    return Step(0, parts, taken, lambda: None, pipelines)  # type: ignore[arg-type]


def alone(case: Case, run_length: int) -> Post:
    """Whole runs on one member."""
    post, model = Post(plan=None), case.model()
    runs = -(-MICRO_BATCHES // run_length)
    parts = _parts(case, model, lambda state: WholeHandover(post, state, runs), run_length)
    _loop(case, model, _step(parts, None))
    return post


def in_pipelines(
    case: Case, plan: Any, members: tuple[str, ...], run_length: int, *, stages: int = 2, loop: Any = None
) -> Post:
    """`plan`: blocks of the graph -> PipelinePlan of these members. Raises what a member's loop raised."""
    post = Post(plan=plan)
    threads = [
        threading.Thread(target=_member, args=(case, post, member, stages, run_length, loop or _loop))
        for member in members
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    if post.failure:
        raise post.failure[0]
    return post


def _member(case: Case, post: Post, me: str, stages: int, run_length: int, loop: Any) -> None:
    with post.turn:  # waiting for work gives the turn to others
        try:
            model = case.model()
            handover_of = lambda state: DeskHandover(me, post, state, run_length)  # noqa: E731
            parts = _parts(case, model, handover_of, run_length, apart=True)
            wish = PipelineWish(model=model, stages=stages, allocate=lambda n, dtype: torch.empty(n, dtype=dtype))
            pipelines = Pipelines(wish, parts)
            loop(case, model, _step(parts, pipelines))
            pipelines.close()
        except BaseException as failure:  # noqa: BLE001  raised again by the test
            post.failure.append(failure)
        finally:
            post.turn.notify_all()


def chain(members: tuple[str, ...], cuts: tuple[int, ...], share: int) -> Any:
    from elastrain.pipeline.pipeline_plan import Pipeline
    from elastrain.pipeline.planning import one_f_one_b

    def plan(blocks: int) -> PipelinePlan:
        pipeline = Pipeline(members=members, cuts=cuts, share=share, limits=one_f_one_b(len(members)))
        return PipelinePlan(blocks=blocks, pipelines=(pipeline,))

    return plan
