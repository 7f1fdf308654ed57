"""A job of pipelines under one seeded scheduler: any message next, any member next, deaths and joins at any point.

The rules under test are the product's: plans, routes, desks, actions, redo. What holders of shards do is taken as given
here (folded gradients and states outlive everybody), because the simulator of members has that.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from elastrain.pipeline.actions import ActionKind, TaskAction
from elastrain.pipeline.graph import BlockGraph, IllegalCut
from elastrain.pipeline.open_tasks import StepShape, TaskDesk, TaskProgress, readers
from elastrain.pipeline.pipeline_plan import BoundaryName, PipelinePlan, Task, held, replicas, routes
from elastrain.pipeline.planning import PlanWish, first_plan, next_plan
from elastrain.pipeline.redo import BlockRun, LossSituation, TaskReport, redo
from tests.sim.pipelines.symbols import AUTOCAST, Activation, Gradient, Model, fold

Value = tuple[int, ...]


@dataclass(frozen=True)
class Message:
    """A boundary tensor, a partial sum, published parameters, or a record: what it is, for whom, and the value."""

    kind: str
    to: str
    what: object
    value: object


@dataclass
class SimMember:
    """What one member has. `step` is the step that it computes."""

    name: str
    step: int
    desk: TaskDesk
    plan: PipelinePlan
    weights: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Block -> (step, weight)."""
    values: dict[BoundaryName, Value] = field(default_factory=dict)
    early: dict[BoundaryName, Value] = field(default_factory=dict)
    """Of a step whose record is not here yet."""
    sums: dict[tuple[Task, int], int] = field(default_factory=dict)
    left: dict[Task, dict[int, list[tuple[int, int, int]]]] = field(default_factory=dict)
    """Task -> micro-batch -> (block, gradient of its weight, contribution) that are still to be added."""
    own: dict[BlockRun, int] = field(default_factory=dict)
    redone: set[Task] = field(default_factory=set)


class PipelineJob:
    """One schedule, given by its seed. `plant`: the name of a rule that is broken in it."""

    def __init__(self, seed: int, plant: str = "") -> None:
        self.rng = rng = random.Random(seed)
        self.plant = plant
        self.model = _random_model(rng)
        self.graph = _random_graph(rng, self.model)
        self.run_length = rng.choice([1, 1, 2])
        self.micro_batches = rng.randint(2, 6)
        self.steps = 2
        shape = self._shape(0)
        self.alive = [f"m{i}" for i in range(rng.randint(1, 6))]
        stages = rng.randint(1, min(4, len(self.graph.units)))
        self.wish = PlanWish(stages=stages, runs=shape.runs)
        self.plan = first_plan(self.graph, self.alive, self.wish)
        self.committed = 0
        self.weights = [self.model.initial()]
        """By step, as the shards' holders have them."""
        self.folded: dict[int, dict[BlockRun, int]] = {0: {}}
        self.adopted: dict[str, frozenset[int]] = {}
        self.waiting: list[str] = []
        """Newcomers, until the next record."""
        self.born = len(self.alive)
        self.wire: list[Message] = []
        self.members = {name: self._member(name, self.plan) for name in self.alive}
        self.losses = [rng.randrange(1, 40 * len(self.graph.blocks)) for _ in range(rng.choice([0, 1, 1, 2, 3]))]
        self.lost_in = -1
        self.redone_over = 0
        """(block, run) pairs that were computed again beyond the lost member's tasks, after one loss."""
        self.adopted_idly = 0
        """Blocks that were adopted by members without a task for them."""

    # ------------------------------------------------------------------------------------------------------- a schedule

    def play(self) -> str:
        """`ok`, or what is wrong: `stuck`, `wrong weights`."""
        for tick in range(20_000):
            if self.committed == self.steps:
                return "ok" if self.weights == reference(self) else "wrong weights"
            if tick in self.losses and len(self.alive) > 1:
                self._lose()
            if self.rng.random() < 0.004 and self.born < 9:
                self._join()
            moves = self._moves()
            if not moves:
                return "stuck"
            kind, what = self.rng.choice(moves)
            if kind == "deliver":
                self._deliver(self.wire.pop(what))
            elif kind == "compute":
                self._compute(self.members[what[0]], what[1])
            else:
                self._commit(what)
        return "stuck"

    def _moves(self) -> list[tuple[str, object]]:
        found: list[tuple[str, object]] = [("deliver", index) for index in range(len(self.wire))]
        for name in self.alive:
            member = self.members[name]
            action = member.desk.next_action()
            if action is not None and self._may_begin(member, action):
                found.append(("compute", (name, action)))
        open_step = self.folded[self.committed]
        if len(open_step) == self.graph_blocks * self.wish.runs and self.committed < self.steps:
            found += [("commit", name) for name in self.alive if self.members[name].step == self.committed]
        return found

    @property
    def graph_blocks(self) -> int:
        return len(self.graph.blocks)

    def _may_begin(self, member: SimMember, action: TaskAction) -> bool:
        # With parameters of the last committed step, and not before they are here.
        if self.plant in ("stale parameters", "task before its publish"):
            return all(
                block in member.weights or self.plant == "task before its publish" for block in action.task.blocks
            )
        return all(member.weights.get(block, (-1, 0))[0] == member.step for block in action.task.blocks)

    # -------------------------------------------------------------------------------------------------------- computing

    def _compute(self, member: SimMember, action: TaskAction) -> None:
        can_split = action.kind is ActionKind.BACKWARD and member.desk.splits(action.task)
        is_split = can_split and self.rng.random() < 0.8
        made = member.desk.computed(action, is_split=is_split)
        if action.kind is ActionKind.FORWARD:
            value: Value = self._chain(member, action)[-1]
        else:
            value = self._backward(member, action, is_split=is_split)
        if made is None:
            return
        member.values[made] = value
        for name in readers(self._known_tasks(), made, member.desk.shape):
            if name != member.name and name in self.alive:
                self.wire.append(Message("boundary", name, made, value))
        if self.plant == "makers keep nothing":
            member.desk.here.discard(made)

    def _known_tasks(self) -> list[TaskProgress]:
        """All tasks of the open step: everybody derives them from the record's plan and from the same recoveries."""
        return [progress for name in self.alive for progress in self._desk_of(name).open_tasks()]

    def _desk_of(self, name: str) -> TaskDesk:
        member = self.members[name]
        return member.desk if member.step == self.committed else self._desk(name, self.plan)

    def _chain(self, member: SimMember, action: TaskAction) -> list[Activation]:
        task = action.task
        found: list[Activation] = [self._taken(member, action, task.begin)]
        for block in task.blocks:
            weight = member.weights.get(block, (0, 0))[1]
            if self.plant == "another copy has other bits" and task in member.redone:
                weight += 1
            found.append(self.model.forward(block, weight, found[-1]))
        return found

    def _taken(self, member: SimMember, action: TaskAction, cut: int) -> Activation:
        if cut == 0:
            return self.model.batch(member.step, action.micro_batch)
        names = [n for n in member.values if n.micro_batch == action.micro_batch and n.cut == cut]
        return next(member.values[n] for n in names if n.direction == "activation")  # type: ignore[return-value]  # by name

    def _backward(self, member: SimMember, action: TaskAction, *, is_split: bool) -> Gradient:
        """Compute the gradients; of a whole backward, those of the weights that earlier ones have left, too."""
        task = action.task
        left = member.left.setdefault(task, {})
        if action.kind is ActionKind.WEIGHT:
            self._add_left(member, task, action.micro_batch)
            return 0, 0, 0
        of_weights, gradient = self._gradients(member, action)
        left[action.micro_batch] = of_weights
        if not is_split:
            self._add_left(member, task, action.micro_batch)
        return gradient

    def _add_left(self, member: SimMember, task: Task, micro_batch: int) -> None:
        left = member.left[task]
        for each in [each for each in left if each <= micro_batch]:
            for block, weight_gradient, told in left.pop(each):
                before = member.sums.get((task, block), 0)
                member.sums[task, block] = self.model.add(before, weight_gradient, told)
        if member.desk.is_done(task):
            for block in task.blocks:
                member.own[block, task.run] = member.sums[task, block]
                self._send_partial(member, (block, task.run))

    def _gradients(self, member: SimMember, action: TaskAction) -> tuple[list[tuple[int, int, int]], Gradient]:
        """Return (block, gradient of its weight, contribution) of each block, and the gradient of the task's input."""
        task, chain = action.task, self._chain(member, action)
        gradient: Gradient
        if task.end == self.graph_blocks:
            gradient = self.model.loss(member.step, action.micro_batch, chain[-1])
        else:
            names = [n for n in member.values if n.micro_batch == action.micro_batch and n.cut == task.end]
            gradient = next(member.values[n] for n in names if n.direction == "gradient")  # type: ignore[assignment]
        autocast = 0 if self.plant == "no autocast when repeated" and task in member.redone else AUTOCAST
        told_by = action.micro_batch
        if self.plant == "contribution of another micro-batch" and task.begin > 0:
            told_by = (action.micro_batch + 1) % self.micro_batches
        found = []
        for block in reversed(task.blocks):
            weight = member.weights.get(block, (0, 0))[1]
            taken = chain[block - task.begin]
            weight_gradient, gradient = self.model.backward(block, weight, taken, gradient, autocast)
            told = gradient[2] if told_by == action.micro_batch else hash((told_by, gradient[2]))
            found.append((block, weight_gradient, told))
        return found, gradient

    def _send_partial(self, member: SimMember, block_run: BlockRun) -> None:
        self.wire.append(Message("partial", "", (member.step, block_run), member.own[block_run]))

    # -------------------------------------------------------------------------------------------------------- messages

    def _deliver(self, message: Message) -> None:
        if message.kind == "partial":
            step, block_run = message.what  # type: ignore[misc]  # a tuple, by kind
            folded = self.folded.get(step)
            if folded is None or step != self.committed:
                return
            if self.plant == "added a second time" and block_run in folded:
                folded[block_run] = hash((folded[block_run], message.value))
            folded.setdefault(block_run, message.value)  # type: ignore[arg-type]  # an int, by kind
            return
        member = self.members.get(message.to)
        if member is None or message.to not in self.alive:
            return
        if message.kind == "boundary":
            self._take(member, message.what, message.value)  # type: ignore[arg-type]  # by kind
        elif message.kind == "publish":
            block, step = message.what  # type: ignore[misc]
            if member.weights.get(block, (-1, 0))[0] < step:
                member.weights[block] = (step, message.value)  # type: ignore[assignment]
        else:
            self._pass(member)

    def _take(self, member: SimMember, name: BoundaryName, value: Value) -> None:
        if name.step > member.step:
            member.early[name] = value
        elif member.desk.arrive(name):
            member.values.setdefault(name, value)

    # ---------------------------------------------------------------------------------------------------------- commits

    def _commit(self, first: str) -> None:
        """One member has all votes: the record is there, and with it the plan that it names."""
        step = self.committed
        folded = self.folded[step]
        sums = tuple(fold([folded[b, r] for r in range(self.wish.runs)]) for b in range(self.graph_blocks))
        self.weights.append(self.model.update(self.weights[step], sums))
        self.committed = step + 1
        self.folded[self.committed] = {}
        if self.committed == self.steps:
            return
        for name in self.waiting:
            self.members[name] = self._member(name, self.plan)
            self.members[name].weights = {}
            self.members[name].step = step
        self.alive += [name for name in self.waiting if name not in self.alive]
        self.waiting = []
        self.plan = next_plan(self.graph, self.plan, self.alive, self.wish, self.adopted)
        self.adopted = {}
        self._pass(self.members[first])
        self.wire += [Message("record", name, None, None) for name in self.alive if name != first]
        self._publish()

    def _publish(self) -> None:
        for name, blocks in self._held().items():
            for block in blocks:
                if self.members[name].weights.get(block, (-1, 0))[0] != self.committed:
                    what = (block, self.committed)
                    self.wire.append(Message("publish", name, what, self.weights[self.committed][block]))

    def _pass(self, member: SimMember) -> None:
        """The record is here: what was kept is let go of, and the next step's tasks follow from its plan."""
        if member.step >= self.committed:
            return
        member.step = self.committed
        plan = self.plan
        if self.plant == "plan without a record":
            plan = next_plan(self.graph, member.plan, self.alive[:-1] or self.alive, self.wish)
        member.plan = plan
        member.desk = self._desk(member.name, plan)
        member.values, member.sums, member.own, member.redone, member.left = {}, {}, {}, set(), {}
        mine = self._held().get(member.name, frozenset())
        member.weights = {block: weight for block, weight in member.weights.items() if block in mine}
        early, member.early = member.early, {}
        for name, value in early.items():
            self._take(member, name, value)

    def _held(self) -> dict[str, frozenset[int]]:
        return {
            m: blocks | self.adopted.get(m, frozenset()) for m, blocks in held(self.plan).items() if m in self.alive
        }

    # ---------------------------------------------------------------------------------------------------- losses, joins

    def _lose(self) -> None:
        victims = self._victims()
        had = sum(t.end - t.begin for m in victims for t in self._desk_of(m).progress)
        self.alive = [name for name in self.alive if name not in victims]
        # Frames of an older generation are discarded, whoever sent them.
        self.wire = []
        for name in self.alive:
            self._pass(self.members[name])
        # A second loss in a step may take tensors with it that the first one's redo was to find.
        is_first, self.lost_in = self.lost_in != self.committed, self.committed
        self._recover(had if len(victims) == 1 and is_first else None)

    def _victims(self) -> list[str]:
        how = self.rng.choice(["any", "any", "neighbours", "pipeline", "replicas"])
        if how == "any":
            found = self.rng.sample(self.alive, min(self.rng.choice([1, 1, 2, 3]), len(self.alive) - 1))
        elif how == "replicas":
            found = list(self.rng.choice(replicas(self.plan)))
        else:
            chain = self.rng.choice(self.plan.pipelines).members
            at = self.rng.randrange(len(chain))
            found = list(chain[at : at + 2] if how == "neighbours" else chain)
        found = [name for name in found if name in self.alive]
        return found if len(found) < len(self.alive) else found[1:]

    def _recover(self, had: int | None) -> None:
        able = [name for name in self.alive if name in self.plan.members]
        situation = self._situation(able)
        decided = redo(situation)
        given = sum(task.end - task.begin for task in decided.tasks)
        if had is not None and given > had:
            self.redone_over += given - had
        for member, blocks in decided.adopted.items():
            used = {block for task in decided.tasks if task.member == member for block in task.blocks}
            self.adopted_idly += len(set(blocks) - used)
            self.adopted[member] = self.adopted.get(member, frozenset()) | set(blocks)
        for task in decided.tasks:
            self._hand_out(task)
        for resend in decided.resends:
            value = self.members[resend.giver].values[resend.name]
            self.wire.append(Message("boundary", resend.taker, resend.name, value))
        for name in self.alive:
            for block_run in self.members[name].own:
                self._send_partial(self.members[name], block_run)
        self._publish()

    def _hand_out(self, task: Task) -> None:
        member = self.members[task.member]
        for block in task.blocks:
            member.sums.pop((task, block), None)
        member.left.pop(task, None)
        member.desk.progress.pop(task, None)
        member.desk.hand_out([task])
        member.redone.add(task)
        if self.plant == "run resumed in its middle" and self.run_length > 1:
            shape = member.desk.shape
            if len(shape.micro_batches_of(task.run)) > 1 and self.rng.random() < 0.5:
                member.desk.progress[task] = TaskProgress(task=task, forwarded=1, passed_back=1, done=1)

    def _situation(self, able: list[str]) -> LossSituation:
        base = self.plan
        if self.plant == "replicas without a commit":
            base = next_plan(self.graph, self.plan, self.alive, self.wish)
        found = [list(of) for of in replicas(base)]
        for member, blocks in self.adopted.items():
            for block in blocks:
                found[block].append(member)
        reports = {
            name: TaskReport(
                tasks=self.members[name].desk.open_tasks(),
                kept=frozenset(self.members[name].desk.here),
                own=frozenset(self.members[name].own),
            )
            for name in able
        }
        return LossSituation(
            graph=self.graph,
            shape=self._shape(self.committed),
            replicas=tuple(map(tuple, found)),
            folded=frozenset(self.folded[self.committed]),
            reports=reports,
        )

    def _join(self) -> None:
        self.waiting.append(f"m{self.born}")
        self.born += 1

    # ------------------------------------------------------------------------------------------------------------ parts

    def _shape(self, step: int) -> StepShape:
        return StepShape(
            number=step, micro_batches=self.micro_batches, run_length=self.run_length, blocks=self.graph_blocks
        )

    def _member(self, name: str, plan: PipelinePlan) -> SimMember:
        mine = held(plan).get(name, frozenset())
        weights = {block: (self.committed, self.weights[self.committed][block]) for block in mine}
        return SimMember(name, self.committed, self._desk(name, plan), plan, weights)

    def _desk(self, name: str, plan: PipelinePlan) -> TaskDesk:
        desk = TaskDesk(self._shape(self.committed), plan.limits.get(name, 1), name in plan.split)
        desk.hand_out(_tasks_of(plan, name))
        return desk


def _tasks_of(plan: PipelinePlan, name: str) -> Iterable[Task]:
    return (task for route in routes(plan) for task in route if task.member == name)


def _random_model(rng: random.Random) -> Model:
    blocks = rng.randint(5, 7)
    giver = rng.randrange(0, blocks - 2)
    return Model(blocks, giver, rng.randrange(giver + 2, blocks))


def _random_graph(rng: random.Random, model: Model) -> BlockGraph:
    illegal = [IllegalCut(cut=cut, why="planted") for cut in range(1, model.blocks) if rng.random() < 0.2]
    return BlockGraph(
        blocks=tuple(f"b{i}" for i in range(model.blocks)),
        flops=tuple(rng.randint(1, 9) for _ in range(model.blocks)),
        crossings=((),) * (model.blocks + 1),
        illegal=tuple(illegal),
    )


def reference(job: PipelineJob) -> list[tuple[int, ...]]:
    """The weights after each step of one worker that computes everything by itself."""
    model, weights = job.model, [job.model.initial()]
    for step in range(job.steps):
        shape = job._shape(step)
        sums: dict[BlockRun, int] = {}
        for run in range(shape.runs):
            for micro_batch in shape.micro_batches_of(run):
                chain = [model.batch(step, micro_batch)]
                for block in range(model.blocks):
                    chain.append(model.forward(block, weights[step][block], chain[-1]))
                gradient = model.loss(step, micro_batch, chain[-1])
                for block in reversed(range(model.blocks)):
                    of_weight, gradient = model.backward(block, weights[step][block], chain[block], gradient, AUTOCAST)
                    sums[block, run] = model.add(sums.get((block, run), 0), of_weight, gradient[2])
        folded = tuple(fold([sums[b, r] for r in range(shape.runs)]) for b in range(model.blocks))
        weights.append(model.update(weights[step], folded))
    return weights
