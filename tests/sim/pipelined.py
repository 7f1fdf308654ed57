"""A training loop that computes in pipelines, over symbols: activations and gradients are hashes of what went in.

A stale parameter, a mixed-up micro-batch, a wrong order of addition, or a contribution that went astray changes the
digest. Whole runs are computed along the same chain, so that the job of one, without pipelines, is the truth.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elastrain import protocol as p
from elastrain.job.values import Contribution, Pipelining, TracedGraph
from elastrain.pipeline.actions import ActionKind, TaskAction
from elastrain.pipeline.graph import BlockGraph, IllegalCut
from elastrain.pipeline.pipeline_plan import Bound, BoundaryName, Direction, Pipeline, PipelinePlan, Task
from elastrain.pipeline.planner.plan_choice import PlanAnswer, PlanQuestion, choose_plan
from elastrain.protocol.evaluation_messages import EvaluationName, boundary_name
from elastrain.protocol.messages import Boundary
from tests.sim.symbols import RELEASED, Cell, Slot, Violation, symbol

if TYPE_CHECKING:
    from tests.sim.member import SimMember

DRAWN = "drawn"
"""The reason of a plan that no planner has chosen."""
BLOCKS = 7
PLACES = (1, 1, 4, 6)
"""Of the four blocks of the layout: two at one place, and places with none."""
TRACED = TracedGraph(
    graph=BlockGraph(
        blocks=tuple(f"b{place}" for place in range(BLOCKS)),
        flops=(3, 1, 2, 2, 1, 1, 4),
        crossings=((),) * (BLOCKS + 1),
        illegal=(IllegalCut(cut=3, why="planted"),),
    ),
    places=PLACES,
)


@dataclass(eq=False)
class TaskRun:
    """An action in the training loop, with its slot and with what it takes of others."""

    command: p.Forward | p.Backward | p.WeightGradients
    slot: Slot
    taken: int | None
    """None: the batch, the loss, or nothing."""
    contribution: Contribution | None


@dataclass(frozen=True)
class Left:
    """Rest of a split backward: per place, from the last to the first, what it took and what came back to it."""

    by_place: tuple[tuple[int, int, int], ...]
    told: Contribution
    """The contribution of its run, up to this micro-batch."""


@dataclass(frozen=True)
class Chain:
    """One micro-batch through the whole model: what each place took, what came back to it, and what it counts."""

    taken: tuple[int, ...]
    back: tuple[int, ...]
    told: Contribution


class PipelinedLoop:
    """What a member's loop keeps between the forward and the backward of a micro-batch."""

    def __init__(self, member: SimMember, length: int, micro_batches: int) -> None:
        self._member = member
        self._length = length
        self._micro_batches = micro_batches
        self._saved: dict[tuple[Task, int], list[int]] = {}
        self._left: dict[tuple[Task, int], Left] = {}
        self._made: dict[int, tuple[Boundary, Cell]] = {}
        """By the message's id: what was made, until the books have it."""
        self._told: dict[Task, Contribution] = {}
        self._kept: list[Cell] = []
        """Memory of what was put into the books."""
        self._is_over = False
        self.seconds: random.Random | None = None
        """Draws of the seconds that actions take, where members tell them."""

    def micro_batches_of(self, run: int) -> range:
        return range(run * self._length, min((run + 1) * self._length, self._micro_batches))

    # -------------------------------------------------------------------------------------------------- the arithmetic

    def _weights(self, place: int) -> tuple[int, ...]:
        model, shards = self._member.symbols.model, enumerate(self._member.shape.shards)
        values = tuple(model[s].value for s, shard in shards if any(PLACES[block] == place for block in shard.lanes))
        if RELEASED in values:
            raise Violation(f"{self._member.me} computes block {place} without its parameters")
        return values

    def _forward(self, place: int, taken: int) -> int:
        return symbol("forward", place, self._weights(place), taken)

    def _backward(self, place: int, taken: int, back: int) -> int:
        return symbol("backward", place, self._weights(place), taken, back)

    def _loss(self, step: int, micro_batch: int, taken: int, scale: float) -> tuple[int, Contribution]:
        seed = symbol("loss", step, micro_batch, taken)
        return symbol("loss", seed, scale), Contribution(
            (seed % 1000) / 7.0, 2.0, 2, seed, ((("answers", (seed % 77) / 3.0),))
        )

    def _accumulate(self, slot: Slot, place: int, block: int, taken: int, back: int) -> None:
        for key in self._member.symbols.keys:
            if key[0] == block:
                slot.accumulate(key, symbol("grad", key, self._weights(place), taken, back))

    # ------------------------------------------------------------------------------------------------- a run as a whole

    def whole(self, compute: p.Compute) -> list[Chain]:
        return [self._chain(compute.step, m, compute.loss_scale) for m in self.micro_batches_of(compute.run)]

    def _chain(self, step: int, micro_batch: int, scale: float) -> Chain:
        taken = [symbol("batch", step, micro_batch)]
        for place in range(BLOCKS):
            taken.append(self._forward(place, taken[-1]))
        back, told = self._loss(step, micro_batch, taken[-1], scale)
        behind = [back]
        for place in reversed(range(1, BLOCKS)):
            behind.append(self._backward(place, taken[place], behind[-1]))
        return Chain(tuple(taken), tuple(reversed(behind)), told)

    def land(self, chains: list[Chain], slot: Slot, block: int) -> None:
        """One block's gradients of a whole run."""
        place = PLACES[block]
        for chain in chains:
            self._accumulate(slot, place, block, chain.taken[place], chain.back[place])

    # -------------------------------------------------------------------------------------------------------- a task

    def begin(self, command: p.Forward | p.Backward | p.WeightGradients) -> TaskRun:
        """As the engine does it: with the slot, and what it takes of others."""
        if self._is_over:
            raise Violation(f"{self._member.me} computes when the memory of gradients has gone")
        task, books = command.task, self._member.ledger
        slot: Slot = books.slots.start_action(task)
        if isinstance(command, p.WeightGradients):
            return TaskRun(command, slot, None, None)
        is_forward = isinstance(command, p.Forward)
        cut, direction = (task.begin, Direction.ACTIVATION) if is_forward else (task.end, Direction.GRADIENT)
        if cut in (0, BLOCKS):
            return TaskRun(command, slot, None, None)
        kept = books.boundaries[BoundaryName(command.step, command.micro_batch, cut, direction)]
        return TaskRun(command, slot, kept.tensors[0].value, kept.contribution)

    def compute(self, run: TaskRun) -> list[p.Event]:
        """Do it; what the loop tells, in order."""
        command, task = run.command, run.command.task
        if isinstance(command, p.WeightGradients):
            done = self._add_left(run)
            computed = self._computed(command, ActionKind.WEIGHT, None, None, is_last=self._is_last(command))
            return [*done, computed]
        if isinstance(command, p.Backward):
            assert run.taken is not None
            assert run.contribution is not None
            return self._go_back(run, run.taken, run.contribution)
        taken = [symbol("batch", command.step, command.micro_batch) if run.taken is None else run.taken]
        for place in task.blocks:
            taken.append(self._forward(place, taken[-1]))
        self._saved[task, command.micro_batch] = taken
        if task.end < BLOCKS:
            return [self._computed(command, ActionKind.FORWARD, taken[-1], None)]
        forward = self._computed(command, ActionKind.FORWARD, None, None)
        back, told = self._loss(command.step, command.micro_batch, taken[-1], command.loss_scale)
        return [forward, *self._go_back(run, back, told)]

    def _go_back(self, run: TaskRun, back: int, told: Contribution) -> list[p.Event]:
        command, task = run.command, run.command.task
        assert not isinstance(command, p.WeightGradients)
        taken = self._saved.pop((task, command.micro_batch))
        if command.micro_batch == self.micro_batches_of(task.run)[0]:
            run.slot.zero()
            self._told[task] = Contribution()
            self._left = {key: left for key, left in self._left.items() if key[0] != task}
        self._told[task] += told
        by_place = []
        for place in reversed(task.blocks):
            by_place.append((place, taken[place - task.begin], back))
            back = self._backward(place, taken[place - task.begin], back)
        self._left[task, command.micro_batch] = Left(tuple(by_place), self._told[task])
        is_split = command.is_split and self._can_split(task, command.micro_batch)
        done = [] if is_split else self._add_left(run)
        is_last = self._is_last(command) and not is_split
        value = back if task.begin else None
        computed = self._computed(command, ActionKind.BACKWARD, value, told, is_last=is_last, is_split=is_split)
        # An engine that was busy meanwhile sends the boundary tensor on before it hears of the blocks.
        return [computed, *done] if command.micro_batch % 2 else [*done, computed]

    def _can_split(self, task: Task, micro_batch: int) -> bool:
        """Some stretches are computed whole, and some micro-batches of others."""
        return bool(symbol("stretch", task.begin, task.end) % 4 and symbol("splits", task.begin, micro_batch) % 5)

    def _is_last(self, command: p.Forward | p.Backward | p.WeightGradients) -> bool:
        return command.micro_batch == self.micro_batches_of(command.task.run)[-1]

    def _add_left(self, run: TaskRun) -> list[p.Event]:
        """Add what backwards of the task have left, up to this micro-batch. A whole backward may have come before."""
        command, task, found = run.command, run.command.task, list[p.Event]()
        for key in [key for key in self._left if key[0] == task and key[1] <= command.micro_batch]:
            left = self._left.pop(key)
            for place, taken, back in left.by_place:
                for block in [block for block, at in enumerate(PLACES) if at == place]:
                    self._accumulate(run.slot, place, block, taken, back)
                    if key[1] == self.micro_batches_of(task.run)[-1]:
                        found.append(self._block_done(command.step, task, block, left.told))
        return found

    def _block_done(self, step: int, task: Task, block: int, told: Contribution) -> p.BlockDone:
        touched = 1 << task.run if symbol("touched", step, task.run, block) % 3 else 0
        return p.BlockDone(step=step, run=task.run, block=block, contribution=told, touched=touched)

    def _computed(
        self,
        command: p.Forward | p.Backward | p.WeightGradients,
        kind: ActionKind,
        value: int | None,
        told: Contribution | None,
        *,
        is_last: bool = False,
        is_split: bool = False,
    ) -> p.Computed:
        made, task = None, command.task
        if value is not None:
            cut, direction = task.end, Direction.ACTIVATION
            if kind is ActionKind.BACKWARD:
                cut, direction = task.begin, Direction.GRADIENT
            name = BoundaryName(command.step, command.micro_batch, cut, direction)
            made = Boundary(name=name, tensors=(), contribution=told)
            self._made[id(made)] = made, Cell(value)
        action = TaskAction(kind, command.micro_batch, task)
        told = len(task.blocks) if kind is ActionKind.FORWARD else 1
        took_s = () if self.seconds is None else tuple(self.seconds.uniform(0.5, 2.0) for _ in range(told))
        return p.Computed(
            step=command.step, action=action, made=made, is_last=is_last, is_split=is_split, took_s=took_s
        )

    def evaluate(self, command: p.EvaluateBatch) -> Callable[[], int | p.BatchEvaluated]:
        """Begin a stage of a batch. What is returned computes it: the value behind the last block, or what goes on."""
        stage, name = command.stage, command.received
        assert stage is not None
        cell = Cell(evaluated_batch(command.name, command.batch))
        if name is not None:
            (cell,) = self._member.ledger.boundaries[name].tensors

        def compute() -> int | p.BatchEvaluated:
            try:
                value = cell.value
            except Violation:  # a member that was removed, or has heard of another view, computes on: it must not count
                value = symbol("torn", str(command.name), command.batch)
            for place in range(stage.begin, stage.end):
                value = self._forward(place, value)
            if stage.end == BLOCKS:
                return int(value)
            made = Boundary(name=boundary_name(command.name, command.batch, stage.end), tensors=(), contribution=None)
            self._made[id(made)] = made, Cell(value)
            return p.BatchEvaluated(figures="", problem="", made=made)

        return compute

    # ---------------------------------------------------------------------------------------------------- in the books

    def note(self, event: p.Computed) -> None:
        """Before the core hears of it: the tensors lie in the books."""
        books = self._member.ledger
        if not books.slots.is_void:
            self.keep(event)
        books.slots.computed(event)

    def keep(self, event: p.Computed | p.BatchEvaluated) -> None:
        """Put what was made into the books."""
        if id(event.made) in self._made and event.made is not None:
            _, cell = self._made.pop(id(event.made))
            self._member.ledger.boundaries.put(event.made, [cell])
            self._kept.append(cell)
            self._release()

    def forget(self, command: p.Command) -> None:
        """Behind it: what belongs to an attempt that is over was let go of, and what another copy has replaced."""
        match command:
            case p.EndAttempt() | p.VoidAttempt():
                self._made = {key: its for key, its in self._made.items() if its[0].name.step > command.step}
                self._release()
            case p.TakeBoundary() | p.DropBoundaries():
                self._release()
            case p.HoldBlocks() if command.for_good:
                self._is_over = True
                if self._member.core.machine.end.keeps_own:
                    raise Violation(f"{self._member.me} takes all blocks without room for them")

    def _release(self) -> None:
        """The memory of what the books have let go of may get any other content at once."""
        there = {id(tensor) for kept in self._member.ledger.boundaries._kept.values() for tensor in kept.tensors}
        for cell in self._kept:
            if id(cell) not in there:
                cell.value = RELEASED
        self._kept = [cell for cell in self._kept if id(cell) in there]


def evaluated_batch(name: EvaluationName, batch: int) -> int:
    """A batch of an evaluation."""
    return symbol("evaluated batch", str(name), batch)


def any_plan(question: p.ChoosePlan, rng: random.Random) -> p.Planned:
    """A legal plan of the view's members, drawn at random; now and then the planner's own, or none."""
    asked, answer = question.question, None
    chance = rng.random()
    if chance < 0.15:
        answer = choose_plan(asked)
    elif chance < 0.9:
        answer = PlanAnswer(plan=_drawn(asked, rng), step_s=1.0, reason=DRAWN)
    return p.Planned(generation=question.generation, present=question.present, answer=answer)


def _drawn(asked: PlanQuestion, rng: random.Random) -> PipelinePlan:
    members, units = list(asked.members), len(asked.graph.units)
    rng.shuffle(members)
    chains: list[list[str]] = []
    while members:
        length = rng.randint(1, min(units, len(members)))
        chains.append(members[:length])
        members = members[length:]
    shares = [0] * len(chains)
    for _ in range(asked.runs):
        shares[rng.randrange(len(chains))] += 1
    pipelines = [_chain(asked.graph, chain, share, rng) for chain, share in zip(chains, shares, strict=True)]
    return PipelinePlan(blocks=len(asked.graph.blocks), pipelines=tuple(pipelines))


def _chain(graph: BlockGraph, chain: list[str], share: int, rng: random.Random) -> Pipeline:
    """A pipeline of these members, now and then with cuts that differ from run to run."""
    cuts: list[int | Bound] = sorted(rng.sample(graph.legal_cuts, len(chain) - 1))
    ends = (0, *graph.legal_cuts, len(graph.blocks))
    for at, cut in enumerate(cuts):
        deeper = ends[ends.index(cut) + 1] if isinstance(cut, int) else 0
        behind = cuts[at + 1] if at + 1 < len(cuts) else len(graph.blocks)
        if isinstance(cut, int) and isinstance(behind, int) and deeper < behind and share > 1 and rng.random() < 0.5:
            cuts[at] = Bound(cut, deeper, rng.randint(1, share - 1), share, rng.choice([1, 4]))
    limits = tuple(rng.randint(1, 4) for _ in chain)
    return Pipeline(members=tuple(chain), cuts=tuple(cuts), share=share, limits=limits)


def pipelining_of(stages: int, runs: int, length: int, *, has_standing: bool = False) -> Pipelining | None:
    """The last run is shorter than the others where it can be."""
    if not stages:
        return None
    micro_batches = micro_batches_of(runs, length)
    return Pipelining(stages=stages, micro_batches=micro_batches, run_length=length, has_standing=has_standing)


def micro_batches_of(runs: int, length: int) -> int:
    return runs * length - (length - 1)
