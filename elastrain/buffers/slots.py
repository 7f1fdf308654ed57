"""Gradient slots: which holds which of this member's partials, which one the training loop writes, which are free.

Lends buffers and takes them back. What a buffer is made of is not known here: tensors, or symbols in simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from elastrain import protocol as p
from elastrain.buffers.port import Arithmetic, GradientSlot, Tensor
from elastrain.job.fold import Node, is_covered
from elastrain.pipeline.pipeline_plan import Task


@dataclass(eq=False)
class UsedSlot:
    """A gradient slot, the blocks whose partial it holds, and whether the training loop accumulates into it."""

    slot: GradientSlot
    # By block: the partials of one slot are added and let go of block by block, as backward passes them.
    blocks: set[int] = field(default_factory=set)
    is_running: bool = True
    is_void: bool = False
    """What is being computed into it counts for nothing: the attempt that it belongs to was given up."""


class GradientSlots:
    """Owns the slots. One is free when it holds no partial and nobody computes into it."""

    def __init__(self, arithmetic: Arithmetic) -> None:
        self._arithmetic = arithmetic
        self._free: list[GradientSlot] = []
        self._running: UsedSlot | None = None
        self._tasks: dict[Task, UsedSlot] = {}
        """Of tasks of pipelines that are begun and not done: several have micro-batches in flight at a time."""
        self._own: dict[tuple[int, int], dict[Node, UsedSlot]] = {}
        """(step, block) -> this member's partials."""
        self._checksums: dict[tuple[int, int, Node], dict[tuple[int, int], int]] = {}
        """(step, block, node) -> (shard, lane) -> checksum of that part as it was when it was first read from here."""
        self._ended = -1
        """Newest step whose attempt has ended: what is computed for it from then on serves nobody."""

    def start_run(self) -> GradientSlot:
        """A slot for the next run; the training loop begins it and accumulates into it."""
        slot = self._free.pop() if self._free else self._arithmetic.new_slot()
        self._running = UsedSlot(slot)
        return slot

    def start_action(self, task: Task) -> GradientSlot:
        """The slot of a task, for its next action; the training loop begins it before the run's first backward."""
        if task not in self._tasks:
            self.start_run()
            assert self._running is not None
            self._tasks[task] = self._running
        self._running = self._tasks[task]
        return self._running.slot

    @property
    def is_void(self) -> bool:
        """What the training loop is computing counts for nothing."""
        return self._running is not None and self._running.is_void

    def computed(self, event: p.Computed) -> None:
        """After the last backward of its run nothing more is added to a task's slot."""
        if event.is_last:
            self._tasks.pop(event.action.task, None)

    def block_done(self, event: p.BlockDone) -> None:
        """The block's part of the run is a partial of this member, unless it has it already or the step has ended."""
        assert self._running is not None
        if self._running.is_void:
            return
        node, mine = (event.run, event.run + 1), self._own.setdefault((event.step, event.block), {})
        # Covered: the run is computed again after a fault of the drive, and this block was reported the first time.
        if event.step > self._ended and not is_covered(node, mine):
            mine[node] = self._running
            self._running.blocks.add(event.block)

    def change(self) -> GradientSlot:
        """Another slot for the run being computed: what it has reported stays where it is, the rest is void."""
        # Not the same slot: others may be reading what the run has reported from it.
        before = self._running
        assert before is not None
        slot = self.start_run()
        assert self._running is not None
        self._running.is_void = before.is_void
        self._stop(before)
        return slot

    def end_run(self) -> None:
        if self._running is not None:
            # A task that goes on keeps its slot: its other micro-batches are added to what is there.
            if self._running not in self._tasks.values():
                self._stop(self._running)
            self._running = None

    def _stop(self, slot: UsedSlot) -> None:
        slot.is_running = False
        self._recycle(slot)

    def _recycle(self, slot: UsedSlot) -> None:
        if not slot.blocks and not slot.is_running:
            assert all(slot.slot is not free for free in self._free), "a gradient slot is free twice"
            slot.slot.release()
            self._free.append(slot.slot)

    def combine(self, command: p.CombineOwn) -> None:
        mine, c = self._own[command.step, command.block], command.combine
        left, right = mine.pop(c.left), mine.pop(c.right)
        self._arithmetic.add_block(left.slot, right.slot, command.block)
        # The left slot is the parent's from now on, and goes on holding its partials of other blocks.
        mine[c.parent] = left
        right.blocks.discard(command.block)
        self._recycle(right)

    def lane(self, at: tuple[int, int, Node], shard: int, lane: int) -> Tensor:
        """A shard's part of a partial; `at` is (step, block, node)."""
        step, block, node = at
        return self._arithmetic.lane(self._own[step, block][node].slot, shard, lane)

    def checksum(self, at: tuple[int, int, Node], shard: int, lane: int) -> int:
        """Of a shard's part of a partial, as it was when this was asked first: the partial was complete just then."""
        # Never made anew: what has changed in this memory since would get a checksum that fits.
        made = self._checksums.setdefault(at, {})
        if (shard, lane) not in made:
            made[shard, lane] = self._arithmetic.checksum(self.lane(at, shard, lane))
        return made[shard, lane]

    def is_intact(self, at: tuple[int, int, Node]) -> bool:
        """Whether the partial is what it was when others were sent it; of one that is gone there is nothing to say."""
        step, block, node = at
        if node not in self._own.get((step, block), {}):
            return True
        made = self._checksums.get(at, {}).items()
        return all(self._arithmetic.checksum(self.lane(at, *key)) == checksum for key, checksum in made)

    def void_step(self) -> None:
        """All that was computed of the open step counts for nothing, what is being computed included."""
        # Not taken away: the training loop writes into this slot until it asks for more.
        if self._running is not None:
            self._running.is_void = True
        self._let_go()

    def end_step(self, step: int) -> None:
        # The training loop may still be computing for this step: what it reports from now on is not taken in.
        self._ended = step
        self._let_go()

    def _let_go(self) -> None:
        # Each once: a slot holds partials of many blocks.
        slots = dict.fromkeys(slot for mine in self._own.values() for slot in mine.values())
        self._own.clear()
        self._checksums.clear()
        tasks, self._tasks = self._tasks, {}
        # The one that is being written is let go of when the training loop asks for more.
        for used in tasks.values():
            if used is not self._running:
                used.is_running = False
                slots[used] = None
        for slot in slots:
            slot.blocks.clear()
            self._recycle(slot)


Buffer = TypeVar("Buffer")


class Buffers(Generic[Buffer]):
    """Keeps buffers for the next use: every step needs the same few kinds.

    `make(like)` gives a new buffer; those with the same `kind(buffer)` may replace one another.
    """

    def __init__(self, make: Callable[[Buffer], Buffer], kind: Callable[[Buffer], Hashable]) -> None:
        self._make = make
        self._kind = kind
        self._free: dict[Hashable, list[Buffer]] = {}
        # By identity: buffers that are equal in value are still two. Holding them here keeps an id from being reused.
        self._lent: dict[int, Buffer] = {}

    def take(self, like: Buffer) -> Buffer:
        """Lend a buffer of the same kind, with any content."""
        # The last that came back first: its pages are in the caches, if any are.
        free = self._free.get(self._kind(like))
        buffer = free.pop() if free else self._make(like)
        self._lent[id(buffer)] = buffer
        return buffer

    def give_back(self, buffer: Buffer) -> None:
        """Take a buffer back; one that was not taken here is left alone."""
        # Callers hand over whatever they have finished with, borrowed or not: only this room knows which it was.
        if self._lent.pop(id(buffer), None) is not None:
            self._free.setdefault(self._kind(buffer), []).append(buffer)

    def take_free(self) -> list[Buffer]:
        """Let go of those that are not lent: they are the caller's."""
        free, self._free = [each for those in self._free.values() for each in those], {}
        return free

    def owns(self, buffer: Buffer) -> bool:
        """Tell whether the buffer is lent now."""
        return id(buffer) in self._lent
