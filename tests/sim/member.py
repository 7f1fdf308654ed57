"""One simulated member: the production protocol core, a symbolic memory instead of tensors, and a training loop.

Numbers are hashes of how they came to be, so any lost, doubled, stale or reordered contribution changes the digest.
Memory is read by reference, as over shared memory: whoever reads what its owner has released or overwritten is caught.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from elastrain import protocol as p
from elastrain.lifecycle import Lifecycle
from elastrain.messages import Check, Contribution, Copy, Gradient, Message, Partial, Publish
from elastrain.recovery import Shape

OVERFLOWS = 32
"""One finished gradient in so many is out of range; a step has seven."""


class Violation(AssertionError):  # noqa: N818  named as what it is: a broken invariant
    """An invariant does not hold."""


def symbol(*parts: Any) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True)
class Ref:
    """A place in some member's memory, as it was when it was sent."""

    memory: dict[Any, Any]
    key: Any
    value: Any

    def read(self) -> Any:
        if self.memory.get(self.key) != self.value:
            raise Violation(f"{self.key} was released or overwritten before it was read")
        return self.value


@dataclass
class Outbox:
    """What one handled event produced for the world outside."""

    frames: list[tuple[str, int, Message, list[Ref]]] = field(default_factory=list)
    read_view: bool = False
    compute: list[p.Compute | p.Recompute] = field(default_factory=list)
    advanced: list[p.Advance] = field(default_factory=list)
    entered: list[p.Enter] = field(default_factory=list)
    failed: list[p.Fail] = field(default_factory=list)
    left: bool = False
    evicted: bool = False
    phases: list[str] = field(default_factory=list)


class SimMember:
    def __init__(
        self, me: str, shape: Shape, core: type[Lifecycle] = Lifecycle, copy_budget_bytes: int = 1 << 20
    ) -> None:
        self.me = me
        self.shape = shape
        self.core = core(me=me, shape=shape, copy_budget_bytes=copy_budget_bytes)
        self.memory: dict[Any, Any] = {("par", s): symbol("init", s) for s in range(len(shape.shards))}
        self.states: dict[int, int] = {}
        self.scratch: dict[tuple[int, int], int] = {}
        self.grads: dict[tuple[int, int], int] = {}
        self.folds: dict[tuple[int, int, Any], Ref | int] = {}
        self.behind: deque[p.Command] = deque()
        self.bound: set[int] = set()
        self.settings: dict[int, str] = {}
        self.step = -1
        self.generation = 0
        """Stamped on what is sent: it changes with the edit, between two commands of one event."""
        self.flips = 0
        """How many of the next updates behind, or copies taken, come out with a wrong bit."""
        self.noise = ""
        """What its own rounding adds to what it computes."""
        self.carries = False
        """Whether its forward depends on how many there were before."""
        self.forwards = 0
        self.watch: Callable[[SimMember, p.Command], None] = lambda member, command: None
        """Told of every command after it was carried out."""

    # ------------------------------------------------------------------------------------------------------- the model

    def parameters(self) -> tuple[int, ...]:
        return tuple(self.memory["par", s] for s in range(len(self.shape.shards)))

    def digest(self) -> int:
        return symbol(self.parameters())

    def gradient_of_run(self, step: int, run: int, loss_scale: float) -> dict[tuple[int, int, int], int]:
        """(block, shard, lane) -> gradient, computed from the parameters as they are now."""
        weights = (self.digest(), self.noise)
        return {
            (block, shard, lane): symbol("grad", step, run, block, shard, lane, weights, loss_scale)
            for shard, shape in enumerate(self.shape.shards)
            for lane, block in enumerate(shape.lanes)
        }

    def contribution_of_run(self, step: int, run: int) -> Contribution:
        seed = symbol("loss", step, run, self.digest())
        noise = symbol(self.noise) % 100 / 1e6 if self.noise else 0.0
        return Contribution((seed % 1000) / 7.0 + noise, 2.0, 2, seed)

    def check_of_run(self, step: int, run: int, loss_scale: float) -> Check:
        """Of its first micro-batch; the number of the run stands for that of the micro-batch."""
        grads, told = self.gradient_of_run(step, run, loss_scale), self.contribution_of_run(step, run)
        carried = self.forwards if self.carries else 0
        digests = tuple(
            symbol(carried, *(value for (its, _, _), value in grads.items() if its == block))
            for block in range(self.shape.blocks)
        )
        return Check(micro_batch=run, loss=told.loss, weight=told.weight, digests=digests)

    def begin(self, step: int) -> p.Began:
        self.step = step
        self.settings[step] = f"lr at {step}"
        return p.Began(step=step, settings=self.settings[step], state=f"loop at {step}")

    def finish_block(
        self, step: int, run: int, block: int, grads: dict[tuple[int, int, int], int], told: Any
    ) -> p.RunDone:
        for (its, shard, lane), value in grads.items():
            if its == block:
                self.memory["own", step, block, (run, run + 1), shard, lane] = value
        return p.RunDone(step=step, run=run, block=block, contribution=told, touched=1 << run)

    # ----------------------------------------------------------------------------------------------- carrying out

    def handle(self, event: p.Event) -> Outbox:
        out = Outbox()
        events: deque[p.Event] = deque([event])
        while events:
            for command in self.core.handle(events.popleft()):
                result = self._carry_out(command, out)
                self.watch(self, command)
                if result is not None:
                    events.append(result)
        return out

    def work_behind(self) -> Outbox | None:
        """One background task, if there is any."""
        if not self.behind:
            return None
        command = self.behind.popleft()
        if isinstance(command, p.ApplyBehind):
            value = self._updated(command.shard, command.record, self.grads[command.shard, command.record.step])
            value ^= self._flip()
            self.scratch[command.shard, command.record.step] = value
            return self.handle(
                p.AppliedBehind(step=command.record.step, shard=command.shard, digest=symbol("state", value))
            )
        assert isinstance(command, p.ComputeDigests)
        digests = {s: symbol("state", self.states[s]) for s in command.shards if s in self.states}
        return self.handle(p.Digested(step=command.step, digests=digests))

    def _flip(self) -> int:
        """1 where the device computes or stores wrongly this time."""
        wrong = min(self.flips, 1)
        self.flips -= wrong
        return wrong

    def _updated(self, shard: int, record: Any, gradient: int) -> int:
        if record.skipped:
            return self.states[shard]
        told = (record.contribution, record.square_norm, record.scaler, record.step)
        return symbol("update", self.states[shard], gradient, *told)

    def _carry_out(self, command: p.Command, out: Outbox) -> p.Event | None:
        match command:
            case p.Send():
                out.frames.append((command.to, self.generation, command.message, self._payload(command.message)))
                out.phases.append(type(command.message).__name__)
            case p.Edit():
                self.generation = command.view.generation
            case p.ReadView():
                out.read_view = True
            case p.Compute() | p.Recompute():
                out.compute.append(command)
            case p.Advance():
                out.advanced.append(command)
            case p.Enter():
                out.entered.append(command)
            case p.Fail():
                out.failed.append(command)
            case p.Leave():
                out.left, out.evicted = True, command.evicted
            case p.ApplyBehind() | p.ComputeDigests():
                self.behind.append(command)
            case _:
                return self._work(command)
        return None

    def _work(self, command: p.Command) -> p.Event | None:
        match command:
            case p.CombineOwn():
                self._combine_own(command)
            case p.Keep():
                key = ("own", command.step, command.block, command.node, command.shard, command.lane)
                mine = Ref(self.memory, key, self.memory.get(key))
                value = mine if command.payload is None else command.payload[command.index]
                self.folds[command.shard, command.lane, command.node] = value
            case p.CombineShard():
                c, at = command.combine, (command.shard, command.lane)
                left, right = self._fold_value(*at, c.left), self._fold_value(*at, c.right)
                self.folds[(*at, c.parent)] = symbol("+", left, right)
            case p.Finish():
                return p.Finished(
                    step=command.step, square_norms={s: self._finish(command.step, s) for s in command.shards}
                )
            case p.StoreGradient():
                self.grads[command.shard, command.step] = command.payload[command.index].read()
            case p.Create():
                for shard in command.shards:
                    self.states[shard] = self.memory["par", shard]
                self.bound |= set(command.bound)
            case p.Apply():
                self._apply(command)
            case p.Swap():
                self.states[command.shard] = self.scratch.pop((command.shard, command.step))
                self.grads.pop((command.shard, command.step))
            case p.Bind():
                self.bound.add(command.shard)
                self.memory["par", command.shard] = self.states[command.shard]
                self._cancel(command.shard, command.step)
            case p.Unbind():
                self.bound.discard(command.shard)
            case p.TakeParameters():
                self.memory["par", command.shard] = command.payload[command.index].read()
            case p.TakeCopy():
                wrong = self._flip()
                self.states[command.shard] = command.payload[0].read() ^ wrong
                self._cancel(command.shard, command.step)
                return p.TookCopy(step=command.step, shard=command.shard, intact=not wrong, source=command.source)
            case p.Drop():
                self.states.pop(command.shard, None)
                self.memory.pop(("state", command.shard), None)
                self.bound.discard(command.shard)
                self._cancel(command.shard, 1 << 62)
            case p.EndAttempt():
                self._end_attempt(command.step)
        return None

    def _fold_value(self, shard: int, lane: int, node: Any) -> int:
        value = self.folds[shard, lane, node]
        return value.read() if isinstance(value, Ref) else value

    def _combine_own(self, command: p.CombineOwn) -> None:
        step, c = command.step, command.combine
        for shard, shape in enumerate(self.shape.shards):
            for lane, block in enumerate(shape.lanes):
                if block == command.block:
                    left = self.memory.pop(("own", step, block, c.left, shard, lane))
                    right = self.memory.pop(("own", step, block, c.right, shard, lane))
                    self.memory["own", step, block, c.parent, shard, lane] = symbol("+", left, right)

    def _finish(self, step: int, shard: int) -> float:
        root = (0, self.shape.runs)
        lanes = [self._fold_value(shard, lane, root) for lane in range(len(self.shape.shards[shard].lanes))]
        value = lanes[0] if len(lanes) == 1 else symbol("lanes", *lanes)
        self.memory["fin", step, shard] = value
        return math.inf if value % OVERFLOWS == 0 else (value % 997) / 3.0

    def _apply(self, command: p.Apply) -> None:
        for shard in command.shards:
            step = command.record.step
            done = self.scratch.get((shard, step))
            gradient = self.memory.get(("fin", step, shard), self.grads.get((shard, step)))
            if done is None:
                if gradient is None:
                    raise Violation(f"{self.me} has to apply step {step} to shard {shard} without its gradient")
                done = self._updated(shard, command.record, gradient)
            self.states[shard] = done
            self.memory["par", shard] = done
            self.bound.add(shard)
            self._cancel(shard, step)

    def _cancel(self, shard: int, step: int) -> None:
        """What is known up to `step` needs no work behind any more."""
        self.behind = deque(c for c in self.behind if not (isinstance(c, p.ApplyBehind) and c.shard == shard))
        for store in (self.scratch, self.grads):
            for key in [k for k in store if k[0] == shard and k[1] <= step]:
                del store[key]

    def _end_attempt(self, step: int) -> None:
        self.folds.clear()
        for key in [k for k in self.memory if k[0] in ("own", "fin") and k[1] <= step]:
            del self.memory[key]

    def _payload(self, message: Message) -> list[Ref]:
        keys: list[tuple[Any, ...]]
        match message:
            case Partial():
                keys = [("own", message.step, message.block, message.node, s, lane) for s, lane in message.lanes]
            case Gradient():
                for shard in message.shards:
                    if ("fin", message.step, shard) not in self.memory and (shard, message.step) in self.grads:
                        self.memory["fin", message.step, shard] = self.grads[shard, message.step]
                keys = [("fin", message.step, s) for s in message.shards]
            case Publish():
                keys = [("par", s) for s in message.shards]
            case Copy():
                self.memory["state", message.shard] = self.states[message.shard]
                keys = [("state", message.shard)]
            case _:
                keys = []
        for key in keys:
            if key not in self.memory:
                raise Violation(f"{self.me} sends {key}, which it does not have")
        return [Ref(self.memory, key, self.memory[key]) for key in keys]
