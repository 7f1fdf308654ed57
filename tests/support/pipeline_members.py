"""Members of one pipeline for tests: an unchanged loop over stubs, in this process or in real ones with pipes.

The order is that of `TaskDesk`; what members hand on are bytes with strides. `undisturbed` is one worker, same loop.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, nn

from elastrain.pipeline.actions import ActionKind, TaskAction
from elastrain.pipeline.open_tasks import StepShape, TaskDesk
from elastrain.pipeline.pipeline_plan import BoundaryName, Direction, Pipeline, PipelinePlan, routes
from elastrain.pipeline.planning import one_f_one_b
from elastrain.pipeline.stubs.fakes import copy_of
from elastrain.pipeline.stubs.naming import blocks_of
from elastrain.pipeline.stubs.passes import StubPass
from elastrain.pipeline.stubs.stubs import Stubs
from elastrain.pipeline.stubs.trace import TracedModel, TracingPass
from elastrain.runtime.loop_state.randomness import BlockRandomness
from elastrain.snapshot.digest import digest
from tests.support.absent_blocks import let_go
from tests.support.pipeline_models import CASES, Case, autocast, batch_of, loss_of
from tests.support.traced import trace

MICRO_BATCHES, SEED = 4, 7
ANSWER_S = 150.0
"""A member that says nothing for so long has failed: the longest needs a few seconds on a quiet machine."""
Digests = dict[tuple[int, str], int]
"""(micro-batch, parameter) -> digest of its gradient."""
Packed = tuple[bytes, str, tuple[int, ...], tuple[int, ...], bool]


@dataclass
class Outcome:
    """What a member, or one worker, has computed."""

    gradients: Digests = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)


def untie(model: nn.Module) -> None:
    """Give each place of a shared weight a gradient leaf of its own, over the same memory, as the runtime does."""
    seen: set[int] = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                setattr(module, name, nn.Parameter(parameter.data))
            seen.add(id(parameter))


def pack(tensor: Tensor | None) -> Packed | None:
    if tensor is None:
        return None
    flat = copy_of(tensor)
    whole = flat.as_strided((flat.untyped_storage().nbytes() // flat.element_size(),), (1,), 0)
    name = str(tensor.dtype).removeprefix("torch.")
    raw = whole.view(torch.uint8).numpy().tobytes()
    return raw, name, tuple(tensor.shape), tuple(tensor.stride()), tensor.requires_grad


def unpack(packed: Packed | None) -> Tensor | None:
    if packed is None:
        return None
    raw, dtype, shape, stride, requires_grad = packed
    flat = torch.frombuffer(bytearray(raw), dtype=getattr(torch, dtype))
    return flat.as_strided(shape, stride).requires_grad_(requires_grad)


def take_gradients(model: nn.Module, micro_batch: int, found: Digests) -> None:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[micro_batch, name] = int(digest(parameter.grad))
            parameter.grad = None


def run_loop(case: Case, model: nn.Module, step: Any) -> None:
    """The user's loop. It knows nothing of pipelines."""
    with autocast(case.autocast == "loop"):
        for batch in step:
            with autocast(case.autocast == "forward"):
                loss = loss_of(model, batch)
            step.backward(loss, weight=step.micro_batch + 1)


class WholeStep:
    """What a job of one gives the loop."""

    def __init__(self, model: nn.Module) -> None:
        untie(model)
        self.model, self.outcome, self.micro_batch = model, Outcome(), 0
        self._randomness = BlockRandomness(model, blocks_of(model), SEED, torch.device("cpu"))

    def __iter__(self) -> Iterator[object]:
        for self.micro_batch in range(MICRO_BATCHES):
            self._randomness.begin(0, self.micro_batch)
            torch.clear_autocast_cache()
            yield batch_of(self.micro_batch)

    def backward(self, loss: Tensor, *, weight: float) -> None:
        self.outcome.losses[self.micro_batch] = float(loss.detach())
        (loss * weight).backward()  # type: ignore[no-untyped-call]  # of torch
        take_gradients(self.model, self.micro_batch, self.outcome.gradients)


def undisturbed(case: Case) -> Outcome:
    """One worker."""
    model = case.model()
    step = WholeStep(model)
    run_loop(case, model, step)
    return step.outcome


class MemberStep:
    """What a member of a pipeline gives the loop: first the tracing pass, then its tasks in the order of its desk."""

    def __init__(self, model: nn.Module, name: str, plan_of: Any, wires: Wires) -> None:
        untie(model)
        self.model, self.name, self.outcome, self.micro_batch = model, name, Outcome(), 0
        self._plan_of, self._wires = plan_of, wires
        self._blocks = blocks_of(model)
        self._randomness = BlockRandomness(model, self._blocks, SEED, torch.device("cpu"))
        self._tracing: TracingPass | None = None
        self._pass: StubPass | None = None
        self._waiting: dict[int, StubPass] = {}
        self._values: dict[BoundaryName, list[Packed | None]] = {}

    def __iter__(self) -> Iterator[object]:
        self._randomness.begin(0, 0)
        tracing = self._tracing = TracingPass(self.model, self._blocks)
        tracing.begin()
        yield batch_of(0)
        assert self._is_traced(), "the loop has called step.backward"
        while self._desk.open_tasks():
            action = self._desk.next_action()
            if action is None:
                self._arrived(*self._wires.receive(self.name))
            elif action.kind is ActionKind.FORWARD:
                self._action, self.micro_batch = action, action.micro_batch
                self._randomness.begin(0, action.micro_batch)
                self._pass = self._stubs.begin(self._received(action))
                yield batch_of(action.micro_batch)
            else:
                self._go_back(action)
        self._stubs.finish()

    def _is_traced(self) -> bool:
        return self._tracing is None

    def backward(self, loss: Tensor, *, weight: float) -> None:
        if self._tracing is not None:
            traced, self._tracing = self._tracing.finish(), None
            self._start(traced)
            return
        current, action = self._pass, self._action
        assert current is not None
        self._stubs.loss_is_made()
        current.backward_is_called()
        self._waiting[action.micro_batch] = current
        if action.task.end == len(self._traced.graph.blocks):
            self.outcome.losses[action.micro_batch] = float(loss.detach())
            self._made(action, [])
            back = TaskAction(ActionKind.BACKWARD, action.micro_batch, action.task)
            self._stubs.go_back(current, (loss * weight).backward)
            self._finished_backward(back)
        else:
            self._made(action, [pack(tensor) for tensor in current.going])

    def _start(self, traced: TracedModel) -> None:
        self._traced = traced
        plan: PipelinePlan = self._plan_of(len(traced.graph.blocks))
        begin, end = plan.pipelines[0].stretches(plan.blocks)[self.name]
        blocks = traced.graph.blocks
        let_go(self.model, [*blocks[:begin], *blocks[end:]], blocks[begin:end])
        self._stubs = Stubs(self.model, traced, begin, end)
        shape = StepShape(number=0, micro_batches=MICRO_BATCHES, run_length=1, blocks=plan.blocks)
        self._desk = TaskDesk(shape, plan.limits[self.name])
        tasks = [task for route in routes(plan) for task in route]
        self._desk.hand_out([task for task in tasks if task.member == self.name])
        self._neighbours = {(t.begin, Direction.ACTIVATION): t.member for t in tasks}
        self._neighbours |= {(t.end, Direction.GRADIENT): t.member for t in tasks}

    def _received(self, action: TaskAction) -> Sequence[Tensor]:
        if action.task.begin == 0:
            return ()
        name = self._desk.shape.name(action.micro_batch, action.task.begin, Direction.ACTIVATION)
        found = [unpack(packed) for packed in self._values[name]]
        return [tensor for tensor in found if tensor is not None]

    def _go_back(self, action: TaskAction) -> None:
        name = self._desk.shape.name(action.micro_batch, action.task.end, Direction.GRADIENT)
        gradients = [unpack(packed) for packed in self._values[name]]
        waiting = self._waiting[action.micro_batch]
        self._stubs.go_back(waiting, lambda: waiting.under_autocast(lambda: waiting.backward(waiting.ends(gradients))))
        self._finished_backward(action)

    def _finished_backward(self, action: TaskAction) -> None:
        take_gradients(self.model, action.micro_batch, self.outcome.gradients)
        done = self._waiting.pop(action.micro_batch)
        self._made(action, [pack(gradient) for gradient in done.gradients])

    def _made(self, action: TaskAction, packed: list[Packed | None]) -> None:
        name = self._desk.computed(action)
        if name is not None:
            self._wires.send(self._neighbours[name.cut, name.direction], name, packed)

    def _arrived(self, name: BoundaryName, packed: list[Packed | None]) -> None:
        if self._desk.arrive(name):
            self._values[name] = packed


class Wires:
    """One inbox per member, in pipes that all of them can write."""

    def __init__(self, members: Sequence[str], context: Any) -> None:
        self._inboxes: Mapping[str, Any] = {member: context.SimpleQueue() for member in members}

    def send(self, to: str, name: BoundaryName, packed: list[Packed | None]) -> None:
        self._inboxes[to].put((name, packed))

    def receive(self, member: str) -> tuple[BoundaryName, list[Packed | None]]:
        inbox = self._inboxes[member]
        if not inbox._reader.poll(ANSWER_S):
            raise TimeoutError(f"nothing came for {member} in {ANSWER_S} s")
        found: tuple[BoundaryName, list[Packed | None]] = inbox.get()
        return found


def one_pipeline(members: Sequence[str], cuts: tuple[int, ...], blocks: int) -> PipelinePlan:
    limits = one_f_one_b(len(members))
    pipeline = Pipeline(members=tuple(members), cuts=cuts, share=MICRO_BATCHES, limits=limits)
    return PipelinePlan(blocks=blocks, pipelines=(pipeline,))


def _member(
    case_name: str, name: str, members: Sequence[str], cuts: tuple[int, ...], wires: Wires, out: Connection
) -> None:
    torch.set_num_threads(1)
    case = CASES[case_name]
    model = case.model()
    step = MemberStep(model, name, lambda blocks: one_pipeline(members, cuts, blocks), wires)
    run_loop(case, model, step)
    out.send(step.outcome)


def _alone(case_name: str, out: Connection) -> None:
    torch.set_num_threads(1)
    out.send(undisturbed(CASES[case_name]))


def in_processes(case_name: str, count: int) -> tuple[Outcome, list[Outcome]]:
    """One worker's outcome and that of each of `count` members, each computed in a process of its own."""
    # Forked: torch is imported already, and what it imports late at a first trace; else every member would do that.
    _warm_up()
    context = multiprocessing.get_context("fork")
    members = [f"m{place}" for place in range(count)]
    cuts = CASES[case_name].cuts[: count - 1]
    wires = Wires(members, context)
    ends = [context.Pipe(duplex=False) for _ in range(count + 1)]
    targets: list[tuple[Any, tuple[Any, ...]]] = [(_alone, (case_name, ends[0][1]))]
    targets += [
        (_member, (case_name, member, members, cuts, wires, end[1]))
        for member, end in zip(members, ends[1:], strict=True)
    ]
    processes = [context.Process(target=target, args=args) for target, args in targets]
    for process in processes:
        process.start()
    try:
        outcomes = [_answer(reader) for reader, _ in ends]
    finally:
        for process in processes:
            process.kill()
            process.join()
    return outcomes[0], outcomes[1:]


@cache
def _warm_up() -> None:
    model = CASES["gpt"].model()
    trace(model, blocks_of(model), lambda: loss_of(model, batch_of(0)))


def _answer(reader: Connection) -> Outcome:
    assert reader.poll(ANSWER_S), f"a member has said nothing for {ANSWER_S} s"
    outcome: Outcome = reader.recv()
    return outcome
