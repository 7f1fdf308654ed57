"""Gradient slots, each with its owner and use, and a pool of buffers.

Slots hold this member's partials. Their content is opaque here: tensors, or symbols in the simulator.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from elastrain import protocol as p
from elastrain.buffers.port import Arithmetic, GradientSlot, Tensor
from elastrain.job.fold import Node, is_covered
from elastrain.pipeline.pipeline_plan import Task


@dataclass(eq=False)
class UsedSlot:
    """A gradient slot, the blocks whose partial it holds, and a flag if the training loop accumulates into it."""

    slot: GradientSlot
    # By block: the partials of one slot are added and freed block by block, as backward passes them.
    blocks: set[int] = field(default_factory=set)
    is_running: bool = True
    is_void: bool = False
    """True if the loop's next results in it do not count, because their attempt was given up."""


class GradientSlots:
    """Owner of the gradient slots. A slot is free if it holds no partial and no computation uses it.

    On a device several computations are outstanding. Their results come in the order in which they were started.
    """

    def __init__(self, arithmetic: Arithmetic) -> None:
        self._arithmetic = arithmetic
        self._free: list[GradientSlot] = []
        self._made = 0
        """Number of slots that exist, free or not."""
        self._outstanding: deque[UsedSlot | None] = deque()
        """Slots of the loop's computations that have not ended, oldest first. None: a slot from elsewhere."""
        self._tasks: dict[Task, UsedSlot] = {}
        """Slots of tasks of pipelines that have begun and are not done.

        Several have micro-batches in flight at a time.
        """
        self._own: dict[tuple[int, int], dict[Node, UsedSlot]] = {}
        """(step, block) -> this member's partials."""
        self._checksums: dict[tuple[int, int, Node], dict[tuple[int, int], int]] = {}
        """(step, block, node) -> (shard, lane) -> checksum of that part when it was first read from here."""
        self._ended = -1
        """Newest step whose attempt has ended. Later results for it are ignored."""

    def start_run(self) -> GradientSlot:
        """Return a slot for the next run. The training loop clears it and accumulates into it."""
        # Never an outstanding one: the next run would overwrite its blocks before they are reported.
        slot = self._take()
        self._outstanding.append(UsedSlot(slot))
        return slot

    def _take(self) -> GradientSlot:
        if self._free:
            return self._free.pop()
        self._made += 1
        return self._arithmetic.new_slot()

    def keep(self, count: int) -> bool:
        """Free the memory of free slots until `count` slots are left. Returns True if no more are left than that."""
        while self._free and self._made > count:
            self._free.pop().free()
            self._made -= 1
        return self._made <= count

    def start_check(self) -> None:
        """Note a computation whose slot is not from here. `end_run` ends it like a run."""
        self._outstanding.append(None)

    def start_action(self, task: Task) -> GradientSlot:
        """Return the slot of a task for its next action.

        The training loop clears it before the run's first backward.
        """
        if task not in self._tasks:
            self._tasks[task] = UsedSlot(self._take())
        self._outstanding.append(self._tasks[task])
        return self._tasks[task].slot

    @property
    def _running(self) -> UsedSlot | None:
        """The slot of the oldest outstanding computation, of which the next results are."""
        return self._outstanding[0] if self._outstanding else None

    @property
    def is_void(self) -> bool:
        """True if the next results of the training loop do not count."""
        return self._running is not None and self._running.is_void

    def computed(self, event: p.Computed) -> None:
        """Forget a task's slot after the last backward of its run, when nothing more is added to it."""
        # The same task may have a new slot already, in the attempt that follows a void one.
        if event.is_last and not self.is_void:
            self._tasks.pop(event.action.task, None)

    def block_done(self, event: p.BlockDone) -> None:
        """Enter the block's part of the run as a partial, unless it is known already or the step has ended."""
        running = self._running
        assert running is not None
        if running.is_void:
            return
        node, mine = (event.run, event.run + 1), self._own.setdefault((event.step, event.block), {})
        # Covered: the run is computed again after a drive fault, and this block was reported the first time.
        if event.step > self._ended and not is_covered(node, mine):
            mine[node] = running
            running.blocks.add(event.block)

    def change(self) -> GradientSlot:
        """Return another slot for the present run. Blocks that were reported stay in the old one; the rest is void."""
        # Not the same slot, because others may be reading the run's reported blocks from it.
        before = self._running
        assert before is not None
        # The loop waits for it, so all earlier runs have landed.
        self._outstanding.clear()
        slot = self.start_run()
        assert self._running is not None
        self._running.is_void = before.is_void
        self._stop(before)
        return slot

    def end_run(self) -> None:
        """Stop using the slot of the oldest outstanding run, unless its task goes on."""
        ended = self._outstanding.popleft() if self._outstanding else None
        # A task that goes on keeps its slot: its other micro-batches are added there.
        if ended is not None and ended not in (*self._tasks.values(), *self._outstanding):
            self._stop(ended)

    def _stop(self, slot: UsedSlot) -> None:
        slot.is_running = False
        self._recycle(slot)

    def _recycle(self, slot: UsedSlot) -> None:
        if not slot.blocks and not slot.is_running:
            assert all(slot.slot is not free for free in self._free), "a gradient slot is free twice"
            slot.slot.release()
            self._free.append(slot.slot)

    def combine(self, command: p.CombineOwn) -> None:
        """Add two partials of one block in place in the left one, and free the right one."""
        mine, c = self._own[command.step, command.block], command.combine
        left, right = mine.pop(c.left), mine.pop(c.right)
        self._arithmetic.add_block(left.slot, right.slot, command.block)
        # The left slot now belongs to the parent, and still holds its partials of other blocks.
        mine[c.parent] = left
        right.blocks.discard(command.block)
        self._recycle(right)

    def lane(self, at: tuple[int, int, Node], shard: int, lane: int) -> Tensor:
        """Return a shard's part of a partial; `at` is (step, block, node)."""
        step, block, node = at
        return self._arithmetic.lane(self._own[step, block][node].slot, shard, lane)

    def checksum(self, at: tuple[int, int, Node], shard: int, lane: int) -> int:
        """Return the checksum of a shard's part of a partial, as of the first call, just after it was complete."""
        # Never computed again, because it would then match memory that has changed since.
        made = self._checksums.setdefault(at, {})
        if (shard, lane) not in made:
            made[shard, lane] = self._arithmetic.checksum(self.lane(at, shard, lane))
        return made[shard, lane]

    def is_intact(self, at: tuple[int, int, Node]) -> bool:
        """Return True if the partial is still as it was sent, or was freed already."""
        step, block, node = at
        if node not in self._own.get((step, block), {}):
            return True
        made = self._checksums.get(at, {}).items()
        return all(self._arithmetic.checksum(self.lane(at, *key)) == checksum for key, checksum in made)

    def void_step(self) -> None:
        """Discard all results of the open step, and those of outstanding computations."""
        # Their slots stay in use: the training loop, or its device, writes into them until they have ended.
        for used in self._outstanding:
            if used is not None:
                used.is_void = True
        self._let_go()

    def end_step(self, step: int) -> None:
        """Free all slots of this step. Later results for it are ignored."""
        # The training loop may still be computing for this step.
        self._ended = step
        self._let_go()

    def _let_go(self) -> None:
        # Each slot once, because it holds partials of many blocks.
        slots = dict.fromkeys(slot for mine in self._own.values() for slot in mine.values())
        self._own.clear()
        self._checksums.clear()
        tasks, self._tasks = self._tasks, {}
        # A slot that is being written is freed when the training loop asks for more.
        for used in tasks.values():
            if used not in self._outstanding:
                used.is_running = False
                slots[used] = None
        for slot in slots:
            slot.blocks.clear()
            self._recycle(slot)


Buffer = TypeVar("Buffer")


class Buffers(Generic[Buffer]):
    """A pool of buffers for reuse, since every step needs the same few kinds.

    `make(like)` makes a new buffer. Buffers with equal `kind(buffer)` can replace one another.
    """

    def __init__(self, make: Callable[[Buffer], Buffer], kind: Callable[[Buffer], Hashable]) -> None:
        self._make = make
        self._kind = kind
        self._free: dict[Hashable, list[Buffer]] = {}
        # By identity: buffers that are equal in value are still two. Holding them here keeps an id from being reused.
        self._lent: dict[int, Buffer] = {}

    def take(self, like: Buffer) -> Buffer:
        """Lend a buffer of the same kind, with any content."""
        # The last one returned is lent first: its pages may still be in the caches.
        free = self._free.get(self._kind(like))
        buffer = free.pop() if free else self._make(like)
        self._lent[id(buffer)] = buffer
        return buffer

    def give_back(self, buffer: Buffer) -> None:
        """Take a buffer back. A buffer that was not lent from here is ignored."""
        # Callers return every buffer that they have finished with; only the pool knows which ones it lent.
        if self._lent.pop(id(buffer), None) is not None:
            self._free.setdefault(self._kind(buffer), []).append(buffer)

    def take_free(self) -> list[Buffer]:
        """Return all buffers that are not lent, and forget them."""
        free, self._free = [each for those in self._free.values() for each in those], {}
        return free

    def owns(self, buffer: Buffer) -> bool:
        """Return True if the buffer is lent now."""
        return id(buffer) in self._lent
