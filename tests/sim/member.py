"""One simulated member: the production protocol core and the production ledger, over symbols; and a training loop.

Carries commands out and feeds results back as the worker's engine does, without threads. The memory behind it is that
of symbols.py: what is shared, released or overwritten too early shows as another digest, or when it is read.
"""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from elastrain import protocol as p
from elastrain.buffers.buffer_book import BufferBook
from elastrain.job.checkpoint_plan import LOOP, CheckpointPlan
from elastrain.job.values import Check, Contribution, Shape
from elastrain.job.world import View
from elastrain.member.member_machine import MemberMachine
from elastrain.member.parts import Machine
from elastrain.member.pipeline.assignments import action_of
from elastrain.member.state.committed import Roles
from elastrain.member.state.runs import OUTSTANDING_MOST
from elastrain.pipeline.actions import TaskAction
from elastrain.pipeline.planner.plan_vote import ToldMemory
from elastrain.protocol.messages import Message
from tests.sim.pipelined import PLACES, Chain, PipelinedLoop, TaskRun
from tests.sim.symbols import NOTHING, RELEASED, Cell, Lane, Ref, Script, Shelf, Slot, State, Symbols, Violation, symbol

MEMORY = ToldMemory(limit_bytes=1 << 40, base_bytes=7, taken_bytes=9)
"""Memory that every member tells. Whether plans fit is tested without the protocol."""

__all__ = ["Outbox", "Run", "SimMember", "Violation", "symbol"]


@dataclass(eq=False)
class Run:
    """A run in the training loop, with the slot for its gradients."""

    compute: p.Compute
    slot: Slot
    weights: int = 0
    """What the forward read."""
    told: Contribution = field(default_factory=Contribution)
    reported: set[int] = field(default_factory=set)
    chains: list[Chain] = field(default_factory=list)
    """Its micro-batches, where the model is a chain."""
    digests: dict[int, int] = field(default_factory=dict)
    """Block -> what its gradients came to when it was reported."""


@dataclass
class Outbox:
    """What one handled event produced for the world outside."""

    frames: list[tuple[str, int, Message, list[Ref]]] = field(default_factory=list)
    read_view: bool = False
    anew: list[p.BeginAnew] = field(default_factory=list)
    noticed: list[str] = field(default_factory=list)
    compute: list[Run | TaskRun | p.Recompute | p.WarmUp] = field(default_factory=list)
    questions: list[p.ChoosePlan] = field(default_factory=list)
    """Question that the planner is asked."""
    advanced: list[p.Advance] = field(default_factory=list)
    entered: list[p.Enter] = field(default_factory=list)
    failed: list[p.Fail] = field(default_factory=list)
    left: bool = False
    evicted: bool = False
    phases: list[str] = field(default_factory=list)
    manifests: list[p.WriteManifest] = field(default_factory=list)
    fetched: list[tuple[int, dict[int, State]]] = field(default_factory=list)
    """(step, states of all shards) that its script has asked for."""
    evaluating: list[p.EvaluateBatch | p.EvaluationEnded] = field(default_factory=list)


class SimDisk:
    """What this member writes of checkpoints: parts that were begun, and the states that were captured for them."""

    def __init__(self) -> None:
        self.parts: list[p.BeginPart] = []
        self.states: dict[tuple[int, int], int] = {}
        """(step, shard) -> what was captured."""
        self.has_room = True
        """For copies of states; else each is written where it lies."""
        self.is_full = False
        """It takes nothing any more."""

    # ---- the port of the books

    def is_ready_for(self, size_bytes: int) -> bool:
        return True

    def make_room(self, size_bytes: int, *, is_awaited: bool) -> bool:
        return self.has_room

    def take(self, step: int, digest: int | None, state: State) -> None:
        self.states[step, state.shard] = state.cell.value

    def lend(self, step: int, digest: int | None, state: State) -> None:
        self.take(step, digest, state)

    # ---- its thread

    @property
    def has_work(self) -> bool:
        return any(all((part.step, s) in self.states for s in part.shards) for part in self.parts)

    def write(self) -> p.PartWritten:
        """The next part of which all states are there."""
        part = next(part for part in self.parts if all((part.step, s) in self.states for s in part.shards))
        self.parts.remove(part)
        told = tuple(f"{shard}:{self.states.pop((part.step, shard))}" for shard in part.shards)
        if self.is_full:
            return p.PartWritten(step=part.step, shards=(), told=(), problem="no space left on device")
        return p.PartWritten(step=part.step, shards=part.shards, told=told, problem="")

    def end(self, step: int) -> None:
        self.parts = [part for part in self.parts if part.step != step]
        self.states = {key: value for key, value in self.states.items() if key[0] != step}


class SimMember:
    def __init__(
        self,
        me: str,
        shape: Shape,
        copy_budget_bytes: int = 1 << 20,
        *,
        frozen: frozenset[int] = frozenset(),
        checkpoints: CheckpointPlan | None = None,
    ) -> None:
        self.me = me
        self.shape = shape
        self.core = MemberMachine(me=me, shape=shape, checkpoints=checkpoints)
        self.disk = SimDisk()
        self.room = random.Random(me)
        self.refuses = 0.0
        """Share of the copies for which it has no room."""
        self.refused_copies = 0
        self.reads: deque[tuple[int, ...]] = deque()
        """Shards whose initial state is being read."""
        self.elsewhere: set[int] = set()
        """Shards whose parameters came from a state or another member: the reading of a checkpoint leaves them."""
        self.core.handle(p.CopyBudgetSet(parameters_bytes=copy_budget_bytes))
        self.symbols = Symbols(shape, frozen, self._flip)
        self.states: Shelf[int] = Shelf(self.symbols.model)
        self.ledger = BufferBook(
            runs=shape.runs,
            lanes=[len(shard.lanes) for shard in shape.shards],
            arithmetic=self.symbols,
            states=self.states,
            scratch=Shelf[tuple[int, int]](self.symbols.model),
        )
        self.ledger.capture_into(self.disk)
        self.script = Script()
        self.ledger.fetch_into(self.script)
        self.seconds: random.Random | None = None
        """Draws of the seconds that micro-batches take, where members tell them."""
        self.pipelined: PipelinedLoop | None = None
        """None: runs are computed as wholes, by symbols of their own."""
        self.generation = 0
        """Stamped on what is sent: it changes with the edit, between two commands of one event."""
        self.flips = 0
        """How many of the next updates behind, or copies taken, come out with a wrong bit."""
        self.slips = 0
        """How many of the gradients that its loop computes next come out wrong."""
        self.noise = ""
        """What its own rounding adds to what it computes."""
        self.carries = False
        """Whether its forward depends on how many there were before."""
        self.forwards = 0
        self.drift = ""
        """What its loop does otherwise than the others'."""
        self.loop = 0
        """State of the training loop: a scheduler that was stepped so often."""
        self.settings: dict[int, str] = {}
        self.kept_loop: dict[int, str] = {}
        """Step of a checkpoint -> the state with which the loop went on from it."""
        self.warming: set[int] = set()
        """Blocks of the layout that its loop computes on zeros."""
        self.given: deque[tuple[int, int | TaskAction] | None] = deque()
        """(step, run or action) of what its loop was given and has not landed; None: it counts for nothing."""
        self.watch: Callable[[SimMember, p.Command], None] = lambda member, command: None
        """Told of every command after it was carried out."""

    @property
    def machine(self) -> Machine:
        """The parts of its core, to look at."""
        return self.core.machine

    @property
    def view(self) -> View | None:
        return self.machine.views.current

    @property
    def committed(self) -> int:
        return self.machine.commit.step

    @property
    def roles(self) -> Roles:
        return self.machine.commit.roles

    # ------------------------------------------------------------------------------------------------------- the model

    def parameters(self) -> tuple[int, ...]:
        return tuple(cell.value for cell in self.symbols.model)

    def digest(self) -> int:
        return symbol(self.parameters())

    def state(self, shard: int) -> int:
        return int(self.states[shard].cell.value)

    # ----------------------------------------------------------------------------------------------- the training loop

    def enter(self, state: str | None) -> None:
        self.loop = int(state or 0)

    def begin(self, step: int) -> p.Began:
        hyperparameters = f"lr {self.loop}{self.drift}"
        settings = self.settings[step] = self.symbols.hyper[step] = json.dumps({"hyperparameters": hyperparameters})
        return p.Began(step=step, settings=settings, state=str(self.loop))

    def forward(self, run: Run) -> None:
        """Zero the slot, read the parameters."""
        run.slot.zero()
        run.weights = self.digest()
        if self.pipelined is not None:
            run.chains = self.pipelined.whole(run.compute)
            run.told = sum((chain.told for chain in run.chains), Contribution())
            return
        run.told = self.contribution_of_run(run.compute.step, run.compute.run)

    def backward(self, run: Run, block: int) -> p.BlockDone | None:
        """One block's gradients land; it is reported once, however often the run is computed."""
        step, number = run.compute.step, run.compute.run
        weights = run.weights if run.weights == self.digest() else symbol("torn", run.weights, self.digest())
        if self.pipelined is not None:
            self.pipelined.land(run.chains, run.slot, block)
        for key in self.symbols.keys if self.pipelined is None else ():
            if key[0] == block:
                run.slot.accumulate(key, self._gradient(step, number, key, weights, run.compute.loss_scale))
        if block in run.reported:
            return None
        run.reported.add(block)
        run.digests[block] = symbol([run.slot.values[key] for key in self.symbols.keys if key[0] == block])
        touched = 1 << number if symbol("touched", step, number, block) % 3 else 0
        return p.BlockDone(step=step, run=number, block=block, contribution=run.told, touched=touched)

    def _gradient(self, step: int, run: int, key: tuple[int, int, int], weights: int, loss_scale: float) -> int:
        gradient = symbol("grad", step, run, *key, weights, self.noise, loss_scale)
        if not self.slips:
            return gradient
        self.slips -= 1
        return symbol("slipped", self.slips, gradient)

    def audited(self, run: Run) -> Check:
        """What has come of its own run."""
        digests = tuple(digest for _, digest in sorted(run.digests.items()))
        told = run.told
        at = self._last_of(run.compute.run)
        return Check(micro_batch=at, loss=told.loss, weight=told.weight, digests=digests, sums=told.sums)

    def audit(self, command: p.Recompute) -> Check:
        """What comes of another member's run here."""
        step, run = command.step, command.run
        weights, told = self.digest(), self.contribution_of_run(step, run)
        gradients = {key: self._gradient(step, run, key, weights, command.loss_scale) for key in self.symbols.keys}
        digests = tuple(
            symbol([gradient for key, gradient in gradients.items() if key[0] == block])
            for block in range(self.shape.blocks)
        )
        return Check(
            micro_batch=self._last_of(run), loss=told.loss, weight=told.weight, digests=digests, sums=told.sums
        )

    def _last_of(self, run: int) -> int:
        """The number of a run's last micro-batch: that of its first one is the run's own number."""
        return self.shape.runs + run

    def compute_again(self, run: Run) -> None:
        """The drive did not give back what was saved for this backward."""
        slot: Slot = self.ledger.slots.change()
        run.slot = slot

    def contribution_of_run(self, step: int, run: int) -> Contribution:
        seed = symbol("loss", step, run, self.digest())
        noise = symbol(self.noise) % 100 / 1e6 if self.noise else 0.0
        # The second figure is one that only some runs add to.
        sums = (("answers", (seed % 77) / 3.0 + noise), *([("rare", 0.1)] if run % 3 == 1 else []))
        return Contribution((seed % 1000) / 7.0 + noise, 2.0, 2, seed, sums)

    def check_of_run(self, step: int, run: int, loss_scale: float) -> Check:
        """Of its first micro-batch; the number of the run stands for that of the micro-batch."""
        carried = self.forwards if self.carries else 0
        weights, told = self.digest(), self.contribution_of_run(step, run)
        digests = tuple(
            symbol(carried, "grad", step, run, block, weights, self.noise, loss_scale)
            for block in range(self.shape.blocks)
        )
        return Check(micro_batch=run, loss=told.loss, weight=told.weight, digests=digests, sums=told.sums)

    def flip(self, rng: random.Random) -> None:
        """One bit somewhere in this member's memory, or in what it computes or copies next."""
        kept = list(self.ledger._states._kept.values())
        cells = [*self.symbols.model, *(self.states[shard].cell for shard in self.states), *kept, *self._sums()]
        cell = rng.choice([None, *cells])
        if cell is None:
            self.flips += rng.randint(1, 2)
        else:
            cell.flip()

    def flip_backup(self, rng: random.Random, shard: int) -> None:
        """One bit of what this backup keeps of the shard: its state, the update made behind, or the gradient."""
        states = self.ledger._states
        kept = [cell for (of, _), cell in states._kept.items() if of == shard]
        made = [states._scratch[key].cell for key in states._scratch if key[0] == shard]
        rng.choice([self.states[shard].cell, *kept, *made]).flip()

    def _sums(self) -> list[Cell | Lane]:
        """Partials that are complete, sums, and finished gradients."""
        slots, folds = self.ledger.slots, self.ledger._folds
        partials = [
            self.symbols.lane(self.ledger.slots._own[at[:2]][at[2]].slot, *key)
            for at, made in slots._checksums.items()
            for key in made
            if at[2] in slots._own.get(at[:2], {})
        ]
        sums = [its.tensor for fold in (*folds._folds.values(), folds._finished) for its in fold.values()]
        return [
            each
            for each in (*partials, *sums)
            if isinstance(each, Cell | Lane) and each.value not in (NOTHING, RELEASED)
        ]

    def _flip(self) -> int:
        """1 where the device computes or stores wrongly this time."""
        wrong = min(self.flips, 1)
        self.flips -= wrong
        return wrong

    # ----------------------------------------------------------------------------------------------- carrying out

    def read_initial(self) -> p.InitialRead:
        """The checkpoint is read; what takes its time."""
        shards = self.reads.popleft()
        self.symbols.read(shards, left_alone=self.elsewhere)
        return p.InitialRead(shards=shards)

    def handle(self, event: p.Event) -> Outbox:
        return self._handle([event])

    def work_behind(self) -> Outbox | None:
        """Some background work, if there is any."""
        if not self.ledger.has_work_behind:
            return None
        self.symbols.is_behind = True
        events = self.ledger.work_behind()
        self.symbols.is_behind = False
        return self._handle(events)

    @property
    def has_work_behind(self) -> bool:
        return self.ledger.has_work_behind

    def _handle(self, first: Sequence[p.Event]) -> Outbox:
        out = Outbox()
        events = deque(first)
        while events:
            event = events.popleft()
            self._before(event)
            for command in self.core.handle(event):
                result = self._carry_out(command, out)
                self.watch(self, command)
                if result is not None:
                    events.append(result)
        self._release()
        return out

    def _before(self, event: p.Event) -> None:
        if isinstance(event, p.BlockDone):
            self.ledger.slots.block_done(event)
        elif isinstance(event, p.Ready):
            self.ledger.slots.end_run()
            if self.given:
                self.given.popleft()
        elif isinstance(event, p.Computed) and self.pipelined is not None:
            self.pipelined.note(event)
        elif isinstance(event, p.BatchEvaluated) and self.pipelined is not None:
            self.pipelined.keep(event)

    def _refused(self, command: p.Resumed) -> frozenset[int]:
        """Shards of which it takes no copy in this view: never what it holds, nor what it is to be the primary of."""
        shards = enumerate(zip(command.recovery.now, command.target, strict=True))
        new = [shard for shard, (now, goal) in shards if self.me in goal.backups and self.me not in now.all]
        refused = frozenset(shard for shard in new if self.room.random() < self.refuses)
        self.refused_copies += len(refused)
        return refused

    def _release(self) -> None:
        """What is free may get any other content at once. A free slot is not touched before the next run zeroes it."""
        for buffers in self.ledger._buffers._free.values():
            for buffer in buffers:
                buffer.value = RELEASED

    def _carry_out(self, command: p.Command, out: Outbox) -> p.Event | None:
        match command:
            case p.SendMessage():
                out.frames.append((command.to, self.generation, command.message, self._payload(command.message)))
                out.phases.append(type(command.message).__name__)
            case p.EditMesh():
                self.generation = command.view.generation
            case p.ReadView():
                out.read_view = True
            case p.AskToCommit():  # the store answers at once
                return p.CommitAllowed()
            case p.BeginAnew():
                out.anew.append(command)
            case p.Noticed():
                out.noticed.append(command.reason)
            case p.Compute():
                self._is_given((command.step, command.run))
                out.compute.append(Run(command, self.ledger.slots.start_run()))
            case p.Recompute():
                self._is_given(None)
                self.ledger.slots.start_check()
                out.compute.append(command)
            case p.WarmUp():
                self._is_given(None)
                self.ledger.slots.start_check()
                self.warming = {block for block, place in enumerate(PLACES) if place in command.places}
                out.compute.append(command)
            case p.Forward() | p.Backward() | p.WeightGradients() if self.pipelined is not None:
                self._is_given((command.step, action_of(command)))
                out.compute.append(self.pipelined.begin(command))
            case p.ChoosePlan():
                out.questions.append(command)
            case p.Passed() if self.seconds is not None:
                result = self.work(command)
                assert result is None
                took_s = self.seconds.choice((0.5, 1.0, 1.0, 1.0, 2.0, 5.0, None))
                return p.StepTimed(micro_batch_s=took_s)
            case p.Resumed() if self.refuses and not self.core.machine.commit.is_initial:
                self.work(command)
                return p.CopyBudgetSet(parameters_bytes=1 << 20, refused=self._refused(command))
            case p.ReadInitial():
                self.reads.append(command.shards)
            case p.Advance():
                if self.given:
                    raise Violation(f"{self.me} leaves step {command.record.step} while its device still works on it")
                out.advanced.append(command)
            case p.Enter():
                out.entered.append(command)
            case p.StateFetched():
                out.fetched.append((command.step, self.script.states))
                self.script.states = {}
            case p.EvaluateBatch() | p.EvaluationEnded():
                out.evaluating.append(command)
            case p.Fail():
                out.failed.append(command)
            case p.BeginPart():
                self.disk.parts.append(command)
            case p.CaptureLoop():
                self.kept_loop[command.step] = command.state
                if command.is_written:
                    self.disk.parts.append(p.BeginPart(step=command.step, shards=(LOOP,)))
                    self.disk.states[command.step, LOOP] = int(command.state)
            case p.WriteManifest():
                out.manifests.append(command)
            case p.EndCheckpoint():
                self.disk.end(command.step)
                if command.told not in ("", f"manifest of {command.step}"):
                    raise Violation(f"{self.me} is to keep {command.told!r} of the checkpoint of step {command.step}")
            case p.Leave():
                out.left, out.evicted = True, command.evicted
            case _:
                if isinstance(command, p.VoidAttempt):
                    self.given = deque([None] * len(self.given))
                result = self.work(command)
                if self.pipelined is not None:
                    self.pipelined.forget(command)
                    if isinstance(command, p.Passed):
                        return p.MemorySeen(memory=MEMORY)
                return result
        return None

    def _is_given(self, work: tuple[int, int | TaskAction] | None) -> None:
        if work is not None and work in self.given:
            raise Violation(f"{self.me} is given {work[1]} of step {work[0]} again before it has landed")
        self.given.append(work)
        if len(self.given) > OUTSTANDING_MOST:
            raise Violation(f"{self.me} has {len(self.given)} outstanding runs")

    def warmed_up(self) -> None:
        self.warming = set()

    def work(self, command: p.Command) -> p.Event | None:
        """The ledger's work. What it writes into the model and is not said to, a checkpoint's reading would undo."""
        if isinstance(command, p.HoldBlocks) and self.warming - set(command.blocks):
            raise Violation(f"{self.me} lets go of blocks {self.warming} while its loop computes with their memory")
        said = p.overwrites(command)
        self.elsewhere.update(said)
        before = [cell.value for cell in self.symbols.model]
        result = self.ledger.carry_out(command)
        # What is made of what was read comes after the reading, and is what the reading writes.
        if not isinstance(command, p.HoldBlocks | p.Create):
            for shard, (cell, value) in enumerate(zip(self.symbols.model, before, strict=True)):
                if cell.value is not value and cell.value != value and shard not in said:
                    raise Violation(f"{type(command).__name__} writes parameters, and `overwrites` does not say so")
        return result

    def _payload(self, message: Message) -> list[Ref]:
        name = f"{type(message).__name__} of {self.me}"
        return [Ref(place, name, place.value) for place in self.ledger.payload(message)]
