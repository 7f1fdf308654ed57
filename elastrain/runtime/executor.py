"""Carries out the protocol's commands on tensors: partials, folds, gradients, states, parameters.

Called by one thread only (the engine's). Decides nothing, sends nothing, waits for nothing. What a message refers to
lies in this member's shared memory and is not changed before the protocol says that nobody reads it any more.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from elastrain import protocol as p
from elastrain.fold import Node, is_covered, overlap
from elastrain.layout import Layout
from elastrain.messages import Copy, Gradient, Message, Partial, Publish, Record
from elastrain.offload.device import Device
from elastrain.runtime import statistics
from elastrain.runtime.buffers import Buffers
from elastrain.runtime.model import Allocate, GradientSlot, ModelState
from elastrain.runtime.optimizer import Hyper, PieceOptimizer
from elastrain.runtime.shelf import Shelf
from elastrain.snapshot.state import ShardState

BEHIND_BYTES = 4 << 20
"""State that is updated in one go behind the scenes: it keeps the engine from its messages for that long."""


@dataclass(eq=False)
class Slot:
    """A gradient slot, the blocks whose partial it holds, and whether the training loop accumulates into it."""

    slot: GradientSlot
    blocks: set[int] = field(default_factory=set)
    running: bool = True


class Executor:
    def __init__(
        self,
        *,
        layout: Layout,
        runs: int,
        model: ModelState,
        optimizer: PieceOptimizer,
        allocate: Allocate,
        max_grad_norm: float | None,
    ) -> None:
        self.layout = layout
        self.model = model
        self.optimizer = optimizer
        self.max_grad_norm = max_grad_norm
        self._root: Node = (0, runs)
        self.hyper: dict[int, Hyper] = {}
        self.states: Shelf[int] = Shelf(self._home)
        self.behind: deque[p.ApplyBehind | p.ComputeDigests] = deque()
        self._buffers = Buffers(allocate)
        self._free_slots: list[GradientSlot] = []
        self._own: dict[tuple[int, int, Node], Slot] = {}
        self._ended = -1
        """Newest step whose attempt has ended: what is computed for it from then on serves nobody."""
        self._running: Slot | None = None
        self._folds: dict[tuple[int, int], dict[Node, Tensor]] = {}
        self._finished: dict[tuple[int, int], Tensor] = {}
        self._kept: dict[tuple[int, int], Tensor] = {}
        self._scratch: Shelf[tuple[int, int]] = Shelf(self._home)
        self._nothing = torch.empty(0)
        self.slot_bytes = self._slots_bytes = 0

    # ----------------------------------------------------------------------------------------- the training loop's side

    def warm_up(self) -> None:
        """Get the first slot's memory from the kernel before somebody waits for it."""
        slot = self._new_slot()
        slot.zero()
        self._free_slots.append(slot)

    def start_run(self) -> GradientSlot:
        """A slot for the next run; the training loop zeroes it and accumulates into it."""
        slot = self._free_slots.pop() if self._free_slots else self._new_slot()
        self._running = Slot(slot)
        return slot

    def _new_slot(self) -> GradientSlot:
        slot = self.model.new_slot()
        self.slot_bytes = slot.nbytes
        self._slots_bytes += slot.nbytes
        return slot

    def block_done(self, event: p.RunDone) -> None:
        """The block's part of the run is a partial of this member, unless it has it already or the step has ended."""
        assert self._running is not None
        node = (event.run, event.run + 1)
        mine = (have for step, block, have in self._own if (step, block) == (event.step, event.block))
        if event.step > self._ended and not is_covered(node, mine):
            self._own[event.step, event.block, node] = self._running
            self._running.blocks.add(event.block)

    def change_slot(self) -> GradientSlot:
        """Another slot for the run being computed: what it has reported stays where it is, the rest is void."""
        before = self._running
        assert before is not None
        slot = self.start_run()
        self._stop(before)
        return slot

    def end_run(self) -> None:
        if self._running is not None:
            self._stop(self._running)
            self._running = None

    def _stop(self, slot: Slot) -> None:
        slot.running = False
        self._recycle(slot)

    def _recycle(self, slot: Slot) -> None:
        """A slot is free when it holds no partial and nobody computes into it: then, and once."""
        if not slot.blocks and not slot.running:
            assert all(slot.slot is not free for free in self._free_slots), "a gradient slot is free twice"
            self._free_slots.append(slot.slot)

    # ----------------------------------------------------------------------------------------------- memory, in bytes

    def keep_outside(self, devices: Sequence[Device], shards: frozenset[int]) -> None:
        """From now on the states of these shards lie on the devices, all others in memory."""
        for shelf in (self.states, self._scratch):
            shelf.use(devices, shards)

    def gradients_bytes(self) -> int:
        """Slots, sums, kept gradients, and scratch of updates."""
        return self._slots_bytes + self._buffers.made_bytes + self.optimizer.scratch_bytes

    def states_bytes(self) -> tuple[int, int]:
        """Shard states in memory, beside the model's own parameters, and on disk."""
        shelves = (self.states, self._scratch)
        return sum(s.memory_bytes() for s in shelves), sum(s.disk_bytes() for s in shelves)

    def memory_bytes(self) -> int:
        """All that this class and the model hold in memory."""
        return self.model.nbytes + self.gradients_bytes() + self.states_bytes()[0]

    # ------------------------------------------------------------------------------------------------------ commands

    def carry_out(self, command: p.Command) -> p.Event | None:
        """Do the work of one command. Commands that are no work of this class are ignored."""
        match command:
            case p.CombineOwn():
                self._combine_own(command)
            case p.Keep():
                self._enter_fold((command.shard, command.lane), command.node, self._incoming(command))
            case p.CombineShard():
                self._combine_shard(command)
            case p.Finish():
                return p.Finished(step=command.step, square_norms={s: self._finish(command, s) for s in command.shards})
            case p.StoreGradient():
                self._store_gradient(command)
            case p.Create():
                self._create(command)
            case p.Apply():
                self._apply(command)
            case p.ApplyBehind() | p.ComputeDigests():
                self.behind.append(command)
            case p.Swap():
                self.states.adopt(command.shard, self._scratch, (command.shard, command.step))
                self._let_go(command.shard, command.step)
            case p.Bind():
                self._bind(self.states[command.shard])
                self._let_go(command.shard, command.step)
            case p.Unbind():
                self._unbind(command.shard)
            case p.TakeParameters():
                self.model.parameters_of(self.layout.shards[command.shard]).copy_(command.payload[command.index])
            case p.TakeCopy():
                return self._take_copy(command)
            case p.Drop():
                self.states.pop(command.shard, None)
                self._let_go(command.shard, 1 << 62)
            case p.EndAttempt():
                self._end_attempt(command.step)
        return None

    def work_behind(self) -> list[p.Event]:
        """Some work that nobody waits for at once, a few milliseconds at most; nothing when there is none."""
        if not self.behind:
            return []
        task = self.behind.popleft()
        if isinstance(task, p.ComputeDigests):
            digests = {s: self.states[s].digest() for s in task.shards if s in self.states}
            return [p.Digested(step=task.step, digests=digests)]
        tasks = [task, *self._more_like(task)]
        scratch = [self.states.copy(t.shard) for t in tasks]
        step = task.record.step
        items = [(s, self._kept[t.shard, step], t.touched) for s, t in zip(scratch, tasks, strict=True)]
        self._update(items, task.record)
        self._scratch.update({(state.shard, step): state for state in scratch})
        return [p.AppliedBehind(step=step, shard=state.shard, digest=state.digest()) for state in scratch]

    def _more_like(self, task: p.ApplyBehind) -> list[p.ApplyBehind]:
        """The next updates of the same step: one call of the optimizer serves several shards."""
        found: list[p.ApplyBehind] = []
        size_bytes = self.states.size_bytes(task.shard)
        while self.behind and size_bytes < BEHIND_BYTES:
            following = self.behind[0]
            if not isinstance(following, p.ApplyBehind) or following.record is not task.record:
                break
            self.behind.popleft()
            found.append(following)
            size_bytes += self.states.size_bytes(following.shard)
        return found

    # ----------------------------------------------------------------------------------------------------------- folds

    def _combine_own(self, command: p.CombineOwn) -> None:
        step, block, c = command.step, command.block, command.combine
        left, right = self._own.pop((step, block, c.left)), self._own.pop((step, block, c.right))
        left.slot.add(right.slot, block)
        self._own[step, block, c.parent] = left
        right.blocks.discard(block)
        self._recycle(right)

    def _own_lane(self, step: int, block: int, node: Node, shard: int, lane: int) -> Tensor:
        lanes = self.layout.shards[shard].lanes
        if not lanes:  # a frozen shard has no gradient; it takes part so that it is published like the others
            return self._nothing
        return self._own[step, block, node].slot.lane(self.layout.shards[shard], lane)

    def _incoming(self, command: p.Keep) -> Tensor:
        if command.payload is None:
            return self._own_lane(command.step, command.block, command.node, command.shard, command.lane)
        tensor: Tensor = command.payload[command.index]
        return tensor

    def _combine_shard(self, command: p.CombineShard) -> None:
        key, c = (command.shard, command.lane), command.combine
        left, right = self._folds[key].pop(c.left), self._folds[key].pop(c.right)
        sum_up = self._composed if statistics.is_statistics(self.layout, command.shard) else self._sum
        self._enter_fold(key, c.parent, sum_up(left, right))

    def _enter_fold(self, key: tuple[int, int], node: Node, tensor: Tensor) -> None:
        """In the place of everything that it has in common runs with: a covered partial must not be found again."""
        partials = self._folds.setdefault(key, {})
        for other in [other for other in partials if overlap(other, node)]:
            self._buffers.give_back(partials.pop(other))
        partials[node] = tensor

    def _sum(self, left: Tensor, right: Tensor) -> Tensor:
        """`left + right` in a buffer of ours; what belongs to a member's partial is never written."""
        if self._buffers.owns(left):
            left.add_(right)
            self._buffers.give_back(right)
            return left
        out = right if self._buffers.owns(right) else self._buffers.take(left)
        return torch.add(left, right, out=out)

    def _composed(self, left: Tensor, right: Tensor) -> Tensor:
        out = left if self._buffers.owns(left) else self._buffers.take(left)
        self._buffers.give_back(right)
        return statistics.compose(left, right, out=out)

    def _finish(self, command: p.Finish, shard: int) -> float:
        lanes = max(1, len(self.layout.shards[shard].lanes))
        total, *more = (self._folds[shard, lane].pop(self._root) for lane in range(lanes))
        for tensor in more:
            total = self._sum(total, tensor)
        self._finished[command.step, shard] = total
        if statistics.is_statistics(self.layout, shard):
            return statistics.square_norm(total)
        return float(torch.linalg.vector_norm(total, dtype=torch.float64)) ** 2

    def _give_back(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self._buffers.give_back(tensor)

    def _store_gradient(self, command: p.StoreGradient) -> None:
        source: Tensor = command.payload[command.index]
        kept = self._kept.get((command.shard, command.step))
        if kept is None:
            kept = self._kept[command.shard, command.step] = self._buffers.take(source)
        kept.copy_(source)

    def _gradient_of(self, step: int, shard: int) -> Tensor:
        finished = self._finished.get((step, shard))
        return finished if finished is not None else self._kept[shard, step]

    def _end_attempt(self, step: int) -> None:
        for partials in self._folds.values():
            self._give_back(partials.values())
        self._give_back(self._finished.values())
        self._folds.clear()
        self._finished.clear()
        slots = set(self._own.values())
        self._own.clear()
        self._ended = step
        for slot in slots:
            slot.blocks.clear()
            self._recycle(slot)
        self.hyper = {at: hyper for at, hyper in self.hyper.items() if at >= step}

    # ---------------------------------------------------------------------------------------------------------- states

    def _create(self, command: p.Create) -> None:
        for shard in command.shards:
            view = self.model.parameters_of(self.layout.shards[shard])
            master = getattr(torch, self.layout.shards[shard].master_dtype)
            parameters = view.to(master, copy=shard not in command.bound)
            self.states[shard] = self.optimizer.create(self.layout.shards[shard], parameters)

    def _apply(self, command: p.Apply) -> None:
        """Together what is in memory, then one after another what has to be read for it."""
        outside = [(shard,) for shard in command.shards if shard in self.states.outside]
        inside = tuple(shard for shard in command.shards if shard not in self.states.outside)
        for shards in (inside, *outside):
            self._apply_together(command, shards)

    def _apply_together(self, command: p.Apply, shards: tuple[int, ...]) -> None:
        step = command.record.step
        fresh = {s: self.states[s] for s in shards if (s, step) not in self._scratch}
        self._update(
            [(state, self._gradient_of(step, s), command.touched[s]) for s, state in fresh.items()], command.record
        )
        for shard in shards:
            self._bind(fresh[shard] if shard in fresh else self._scratch.pop((shard, step)))
            self._let_go(shard, step)

    def _update(self, items: Sequence[tuple[ShardState, Tensor, tuple[int, ...]]], record: Record) -> None:
        """Scale, clip, update, in this order; a skipped step moves nothing but the version."""
        for state, _, _ in items:
            state.version = record.step
        todo = [(s, g, self._parameters(masks)) for s, g, masks in items if self.layout.pieces[s.shard]]
        if todo and not record.skipped:
            factors = scale_and_clip(record, self.max_grad_norm)
            self.optimizer.apply(todo, hyper=self.hyper[record.step], factors=factors)
        for state, maps, _ in items:
            if statistics.is_statistics(self.layout, state.shard) and not record.skipped:
                statistics.apply(maps, state.parameters)

    def _parameters(self, masks: Iterable[int]) -> frozenset[int]:
        leaves = [leaf for mask in masks for leaf in range(mask.bit_length()) if mask >> leaf & 1]
        return self.layout.touched_parameters(leaves)

    def _bind(self, state: ShardState) -> None:
        """The model gets the state's parameters, rounded where it has less precision; else they share memory then.

        The state, changed or not, is put back.
        """
        view = self._home(state.shard)
        if state.parameters.data_ptr() != view.data_ptr():
            view.copy_(state.parameters)
            if view.dtype == state.parameters.dtype:
                state.parameters = view
        self.states[state.shard] = state

    def _unbind(self, shard: int) -> None:
        state = self.states[shard]
        if state.parameters.data_ptr() == self._home(shard).data_ptr():
            state.parameters = state.parameters.clone()
            self.states[shard] = state

    def _home(self, shard: int) -> Tensor:
        return self.model.parameters_of(self.layout.shards[shard])

    def _let_go(self, shard: int, step: int) -> None:
        """Nothing that belongs to this shard's steps up to `step` is needed any more."""
        self.behind = deque(
            t for t in self.behind if not (isinstance(t, p.ApplyBehind) and t.shard == shard and t.record.step <= step)
        )
        for key in [key for key in self._kept if key[0] == shard and key[1] <= step]:
            self._buffers.give_back(self._kept.pop(key))
        for key in [key for key in self._scratch if key[0] == shard and key[1] <= step]:
            del self._scratch[key]

    def _take_copy(self, command: p.TakeCopy) -> p.Event:
        meta, *tensors = command.payload
        digest, text = bytes(meta[:8].tolist()), bytes(meta[8:].tolist())
        state = ShardState.unpack(text, [tensor.clone() for tensor in tensors])
        self._let_go(command.shard, 1 << 62)
        self.states[command.shard] = state
        intact = state.digest() == int.from_bytes(digest, "little") and state.shard == command.shard
        return p.TookCopy(step=command.step, shard=command.shard, intact=intact, source=command.source)

    # -------------------------------------------------------------------------------------------------------- payloads

    def payload(self, message: Message) -> list[Tensor]:
        """The tensors that travel with a message, in the order in which it names them."""
        match message:
            case Partial():
                at = (message.step, message.block, message.node)
                return [self._own_lane(*at, shard, lane) for shard, lane in message.lanes]
            case Gradient():
                return [self._gradient_of(message.step, shard) for shard in message.shards]
            case Publish():
                return [self.model.parameters_of(self.layout.shards[shard]) for shard in message.shards]
            case Copy():
                state = self.states[message.shard]
                text, tensors = state.pack()
                head = state.digest().to_bytes(8, "little") + text
                return [torch.frombuffer(bytearray(head), dtype=torch.uint8), *tensors]
        return []


def scale_and_clip(record: Record, max_grad_norm: float | None) -> tuple[float, ...]:
    """Factors of the summed gradient, to be applied one after another: one over weight and loss scale, then clipping.

    Clipping is that of torch.nn.utils.clip_grad_norm_: `max_norm / (norm + 1e-6)`, never above 1.
    """
    scale = 1.0 / (record.contribution.weight * record.scaler.scale)
    if max_grad_norm is None:
        return (scale,)
    return (scale, min(1.0, max_grad_norm / (grad_norm(record) + 1e-6)))


def grad_norm(record: Record) -> float:
    """Global norm of the averaged gradient."""
    weight = record.contribution.weight * record.scaler.scale
    return math.sqrt(record.square_norm) / weight if weight else math.nan
