"""The executor of the protocol's commands on tensors: the buffer book (`elastrain.buffers.buffer_book`) and its memory.

Only the engine's thread calls it. Decides nothing, sends nothing, waits for nothing. Tensors that a message refers to
lie in this member's shared memory. They do not change until the protocol says that no peer reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from elastrain import protocol as p
from elastrain.buffers.buffer_book import BufferBook
from elastrain.job.layout import Layout
from elastrain.job.world import View
from elastrain.offload.drives.device import Device
from elastrain.protocol import agent_messages as am
from elastrain.runtime.carrying.tensor_memory import TensorMemory
from elastrain.runtime.durable.checkpoint_parts import Room
from elastrain.runtime.durable.member_checkpoints import Checkpoints
from elastrain.runtime.durable.stored_initial import StoredInitial
from elastrain.runtime.model.flat_model import ModelState
from elastrain.runtime.model.gradients import GradientMemory, GradientSlot
from elastrain.runtime.model.optimizer import Hyper, PieceOptimizer
from elastrain.runtime.tensors.spilled_states import StateSpill
from elastrain.runtime.tensors.tensor_arithmetic import TensorArithmetic
from elastrain.snapshot.states_on_host import StatesOnHost
from elastrain.snapshot.store import SnapshotStore


class Executor:
    """The owner of a worker's buffer book, shard states and checkpoint writer. It counts the memory of all of them."""

    def __init__(
        self,
        *,
        layout: Layout,
        runs: int,
        model: ModelState,
        optimizer: PieceOptimizer,
        memory: TensorMemory,
        max_grad_norm: float | None,
    ) -> None:
        self.checkpoints: Checkpoints | None = None
        """Writer of checkpoints, or None if this member was not told where to write any."""
        self.layout = layout
        self.memory = memory
        self.model = model
        self.optimizer = optimizer
        self.states: SnapshotStore[int] = SnapshotStore(self._home)
        self._stores = (self.states, SnapshotStore[tuple[int, int]](self._home))
        if not memory.port.is_host:
            # Of both stores, because states move from one to the other.
            on_host = StatesOnHost(memory.port)
            for store in self._stores:
                store.keep_backups_in(on_host)
        self._tensors = TensorArithmetic(
            layout=layout, model=model, optimizer=optimizer, memory=memory, max_grad_norm=max_grad_norm
        )
        self.books = BufferBook(
            runs=runs,
            lanes=[len(blocks) for blocks in model.lanes()],
            arithmetic=self._tensors,
            states=self._stores[0],
            scratch=self._stores[1],
        )
        self._check_bytes = 0
        self._check_slots: list[GradientSlot] = []
        self._stored: StoredInitial | None = None

    def start_from(self, stored: StoredInitial) -> None:
        """Take initial states from the checkpoint that the job starts from."""
        self._stored = self._tensors.stored = stored

    def check_slot(self) -> GradientSlot:
        """Return a new slot for a micro-batch that is recomputed to check another member."""
        # In private memory, because no peer reads it. It is freed with the last reference, and on a device not before
        # the step is committed: by then the stream that has allocated it has waited for the loop's.
        slot = GradientSlot(GradientMemory(self.layout, self.memory.private))
        if not self.memory.port.is_host:
            self._check_slots.append(slot)
        self._check_bytes = slot.nbytes * max(1, len(self._check_slots))
        return slot

    def check_is_over(self) -> None:
        """Stop counting the memory of the check's slot, once its step is committed."""
        self._check_bytes = 0
        self._check_slots.clear()

    @property
    def hyper(self) -> dict[int, Hyper]:
        """Step -> its hyperparameters, from the loop's entry into the step until a later step is over."""
        return self._tensors.hyper

    def warm_up(self) -> None:
        """Allocate the first slot before other members wait for it. Not in pipelines, where no slot has all blocks."""
        if not self.model.gradients.apart:
            self.books.slots.start_run().begin_run()
            self.books.slots.end_run()

    def carry_out(self, command: p.Command) -> p.Event | None:
        """Carry out one command on tensors. Returns the event that answers it, if any."""
        if isinstance(command, p.BeginPart | p.CaptureLoop | p.WriteManifest | p.EndCheckpoint | p.Passed):
            return self._write(command)
        with nullcontext() if self._stored is None else self._stored.making_way(command):
            result = self.books.carry_out(command)
        if self._stored is not None:
            self._stored.carry_out(command)
        if isinstance(command, p.EndAttempt):
            for over in [at for at in list(self.hyper) if at < command.step]:
                del self.hyper[over]
        return result

    def trim(self, slots: int) -> None:
        """Free the gradients' memory that a plan with this number of slots does not need, now or once it is free."""
        self.books.trim(slots)

    def _write(self, command: p.Command) -> p.Event | None:
        """Carry out a command about checkpoints. A node without a directory for them answers that it cannot write."""
        if self.checkpoints is not None:
            self.checkpoints.carry_out(command)
        elif isinstance(command, p.BeginPart):
            problem = "this node was not told where to write checkpoints (--checkpoint-dir)"
            return p.PartWritten(step=command.step, shards=(), told=(), problem=problem)
        return None

    def begin_step(self, step: int, hyper: Hyper, loop_payload: Callable[[], list[Tensor]]) -> None:
        """Keep the hyperparameters and the loop's state of the step whose micro-batches the loop has reached."""
        self.hyper[step] = hyper
        if self.checkpoints is not None:
            self.checkpoints.use_loop(loop_payload)

    def resumed(self) -> None:
        """Start checkpoints once a view is in order. Raises ConfigError if their place belongs to another job."""
        if self.checkpoints is not None:
            self.checkpoints.begin()

    def checkpoint_settled(self, message: am.CheckpointSettled) -> None:
        """Pass on the agent's answer to the question if a checkpoint may become visible."""
        if self.checkpoints is not None:
            self.checkpoints.settled(message)

    def is_checkpoint_due(self, view: View | None, now_s: float) -> bool:
        """Return True if a periodic checkpoint is due. The member of lowest rank decides that by its clock."""
        return self.checkpoints is not None and self.checkpoints.is_due(view, now_s)

    def write_checkpoints(self, checkpoints: Checkpoints) -> None:
        """Send captured states to this writer."""
        self.checkpoints = checkpoints
        self.books.capture_into(checkpoints.captured)

    def keep_outside(
        self, drives: Sequence[Device], shards: frozenset[int], *, tier: Device | None = None, backups: bool = False
    ) -> None:
        """Keep the states of these shards on the drives, and all others in memory.

        Args:
            drives: Drives that take the states.
            shards: Shards whose states leave.
            tier: Host memory that is filled before the drives.
            backups: In a job on a device, whether the shards are those that the member holds in host memory as a
                backup. Otherwise they are those that lie on the device.
        """
        spill = StateSpill(drives, port=self.memory.port, tier=tier)
        for store in self._stores:
            store.use(spill, shards, backups=backups)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one copy of all gradients."""
        return self.model.gradients.copy_bytes

    def gradients_bytes(self) -> int:
        """Return the bytes of slots, sums, kept gradients and scratch of updates."""
        slots_bytes = self.model.gradients.nbytes + self._check_bytes
        return slots_bytes + self._tensors.buffers_bytes + self.optimizer.scratch_bytes

    def states_bytes(self) -> tuple[int, int]:
        """Return the bytes of shard states in memory (without the model's own parameters) and on disk.

        In a job on a device, memory means the device's, and backups in host memory are not counted.
        """
        return sum(s.memory_bytes() for s in self._stores), sum(s.disk_bytes() for s in self._stores)

    def backups_bytes(self) -> int:
        """Return the bytes of shard states that lie in host memory, in a job on a device."""
        return sum(store.host_bytes() for store in self._stores)

    def memory_bytes(self) -> int:
        """Return the bytes that this class and the model hold, without states that wait for a checkpoint's disk.

        In a job on a device, they are bytes of the device.
        """
        return self.model.nbytes + self.gradients_bytes() + self.states_bytes()[0]

    @property
    def captures(self) -> Room | None:
        """The memory for states that wait for a checkpoint's disk, or None if no checkpoints are written."""
        return None if self.checkpoints is None else self.checkpoints.captured.room

    def _home(self, shard: int) -> Tensor:
        its = self.layout.shards[shard]
        return self.model.parameters_of(its) if self.model.has(its) else torch.empty(0)
