"""Carries out the protocol's commands on tensors: the member's books (`elastrain.buffers.buffer_book`) over its memory.

Called by one thread only (the engine's). Decides nothing, sends nothing, waits for nothing. What a message refers to
lies in this member's shared memory and is not changed before the protocol says that nobody reads it any more.
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
from elastrain.runtime.durable.checkpoint_parts import Room
from elastrain.runtime.durable.member_checkpoints import Checkpoints
from elastrain.runtime.durable.stored_initial import StoredInitial
from elastrain.runtime.model.flat_model import ModelState
from elastrain.runtime.model.flats import Allocate, in_private_memory
from elastrain.runtime.model.gradients import GradientMemory, GradientSlot
from elastrain.runtime.model.optimizer import Hyper, PieceOptimizer
from elastrain.runtime.tensors.spilled_states import StateSpill
from elastrain.runtime.tensors.tensor_arithmetic import TensorArithmetic
from elastrain.snapshot.store import SnapshotStore


class Executor:
    """Owns the books of a worker, and says how much memory all of it takes."""

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
        self.checkpoints: Checkpoints | None = None
        """None where this member was not told where to write any."""
        self.layout = layout
        self.model = model
        self.optimizer = optimizer
        self.states: SnapshotStore[int] = SnapshotStore(self._home)
        self._stores = (self.states, SnapshotStore[tuple[int, int]](self._home))
        self._tensors = TensorArithmetic(
            layout=layout, model=model, optimizer=optimizer, allocate=allocate, max_grad_norm=max_grad_norm
        )
        self.books = BufferBook(
            runs=runs,
            lanes=[len(blocks) for blocks in model.lanes()],
            arithmetic=self._tensors,
            states=self._stores[0],
            scratch=self._stores[1],
        )
        self._check_bytes = 0
        self._stored: StoredInitial | None = None

    def start_from(self, stored: StoredInitial) -> None:
        """The job starts from a checkpoint: initial states come from there."""
        self._stored = self._tensors.stored = stored

    def check_slot(self) -> GradientSlot:
        """For a micro-batch of another member's, which counts for nothing: it lasts as long as the check."""
        # No other member reads it, and it is gone when it is let go.
        slot = GradientSlot(GradientMemory(self.layout, in_private_memory))
        self._check_bytes = slot.nbytes
        return slot

    def check_is_over(self) -> None:
        """The memory of the check's slot counts until its step is committed."""
        self._check_bytes = 0

    @property
    def hyper(self) -> dict[int, Hyper]:
        """Step -> the optimizer's settings in it, from when the training loop enters it until later ones are over."""
        return self._tensors.hyper

    def warm_up(self) -> None:
        """Get the first slot's memory before somebody waits for it; in pipelines no slot has all blocks."""
        if not self.model.gradients.apart:
            self.books.slots.start_run().begin_run()
            self.books.slots.end_run()

    def carry_out(self, command: p.Command) -> p.Event | None:
        """Do the work of one command, on tensors."""
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

    def _write(self, command: p.Command) -> p.Event | None:
        """Of checkpoints; other nodes may have been told to write them where this one was not."""
        if self.checkpoints is not None:
            self.checkpoints.carry_out(command)
        elif isinstance(command, p.BeginPart):
            problem = "this node was not told where to write checkpoints (--checkpoint-dir)"
            return p.PartWritten(step=command.step, shards=(), told=(), problem=problem)
        return None

    def begin_step(self, step: int, hyper: Hyper, loop_payload: Callable[[], list[Tensor]]) -> None:
        """The loop has come to a step's micro-batches, with these settings and tensors of its state."""
        self.hyper[step] = hyper
        if self.checkpoints is not None:
            self.checkpoints.use_loop(loop_payload)

    def resumed(self) -> None:
        """A view is in order. Raises ConfigError where the place of its checkpoints is another job's."""
        if self.checkpoints is not None:
            self.checkpoints.begin()

    def checkpoint_settled(self, message: am.CheckpointSettled) -> None:
        """The agent has answered whether a checkpoint may become visible."""
        if self.checkpoints is not None:
            self.checkpoints.settled(message)

    def is_checkpoint_due(self, view: View | None, now_s: float) -> bool:
        """By the clock of the member of lowest rank."""
        return self.checkpoints is not None and self.checkpoints.is_due(view, now_s)

    def write_checkpoints(self, checkpoints: Checkpoints) -> None:
        """What is captured goes there."""
        self.checkpoints = checkpoints
        self.books.capture_into(checkpoints.captured)

    def keep_outside(self, devices: Sequence[Device], shards: frozenset[int]) -> None:
        """From now on the states of these shards lie on the devices, all others in memory."""
        spill = StateSpill(devices)
        for store in self._stores:
            store.use(spill, shards)

    @property
    def slot_bytes(self) -> int:
        """One copy of all gradients."""
        return self.model.gradients.copy_bytes

    def gradients_bytes(self) -> int:
        """Slots, sums, kept gradients, and scratch of updates."""
        slots_bytes = self.model.gradients.nbytes + self._check_bytes
        return slots_bytes + self._tensors.buffers_bytes + self.optimizer.scratch_bytes

    def states_bytes(self) -> tuple[int, int]:
        """Shard states in memory, beside the model's own parameters, and on disk."""
        return sum(s.memory_bytes() for s in self._stores), sum(s.disk_bytes() for s in self._stores)

    def memory_bytes(self) -> int:
        """All that this class and the model hold in memory; not the states that wait for a checkpoint's disk."""
        return self.model.nbytes + self.gradients_bytes() + self.states_bytes()[0]

    @property
    def captures(self) -> Room | None:
        """For states that wait for a checkpoint's disk; None where no checkpoint is written."""
        return None if self.checkpoints is None else self.checkpoints.captured.room

    def _home(self, shard: int) -> Tensor:
        its = self.layout.shards[shard]
        return self.model.parameters_of(its) if self.model.has(its) else torch.empty(0)
