"""Training of a model and its optimizer within a memory limit. Idle tensors lie on drives.

Hooks mark the points of each block. The piece store loads the pieces of each point, and the optimizer updates one block
at a time. Gradients are made by autograd and then moved into their block's piece, so all bits stay the same.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from elastrain.offload import interrupts
from elastrain.offload.activations.hooks import ActivationOffload, OffloadConfig
from elastrain.offload.drives.device import Device
from elastrain.offload.drives.port import IoEngine
from elastrain.offload.drives.posix import PosixEngine
from elastrain.offload.drives.residency import State
from elastrain.offload.errors import OffloadConfigError
from elastrain.offload.inputs import directories, one_path, whole_bytes
from elastrain.offload.lifetimes import within_inputs
from elastrain.offload.lifetimes.block_states import BlockStates
from elastrain.offload.lifetimes.blocks import blocks_of
from elastrain.offload.lifetimes.conductor import Conductor
from elastrain.offload.lifetimes.measuring import PointMeter, StandingWatch
from elastrain.offload.lifetimes.piece_store import PieceStore
from elastrain.offload.lifetimes.pieces import page_faults, process_heap
from elastrain.offload.lifetimes.pieces.cuda import cuda_memory
from elastrain.offload.lifetimes.pieces.pages import PagePool
from elastrain.offload.lifetimes.pieces.piece_memory import Access, HeldPiece, MemoryMeter, MemoryPool, RoomAccount
from elastrain.offload.lifetimes.pieces.process_heap import KernelMeter
from elastrain.offload.lifetimes.recompute import BlockForward, can_be_computed_again
from elastrain.offload.lifetimes.replanning import Planning
from elastrain.offload.lifetimes.saved import SAVED_BYTES, LeavesWhenTold, SavedTensors
from elastrain.offload.lifetimes.updates import Updates
from elastrain.offload.original_hooks import OriginalsHook
from elastrain.offload.planning import profile
from elastrain.offload.planning.orders import StepStage, UpdateOrder
from elastrain.offload.planning.plan_search import Policy
from elastrain.offload.planning.plan_values import Kind
from elastrain.offload.planning.step_recording import Recording

UNLIMITED_BYTES = 1 << 62
_TRAININGS = weakref.WeakSet["TrainingWithin"]()


def within(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    dirs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    memory_limit: int,
    engines: Sequence[IoEngine | Device] | None = None,
    policy: Policy | None = None,
) -> TrainingWithin:
    """Train within `memory_limit` bytes for parameters, gradients, optimizer states and activations together.

    Other memory that the process holds already does not count. Call `step` of the returned object in place of clipping,
    `optimizer.step()` and `zero_grad()`. Only this call, forwards and backwards may use parameters and states: other
    code enters `whole()`. Use one thread only. `engines` replaces the files in `dirs` (`cuda.host_tier` makes one of
    host memory); `policy` sets how plans are made. A block's forward runs again in its backward if that costs less than
    a drive. Then it changes globals or files twice, unless `policy.recompute` is False. Raises OffloadConfigError if
    the model cannot be cut into blocks or is in `within` already, the optimizer needs whole tensors, or there is no
    drive. Raises LimitTooSmallError, here or after the second step, if a block needs more.
    """
    within_inputs.check_model(model)
    within_inputs.check_optimizer(model, optimizer)
    interrupts.defer()
    limit_bytes = whole_bytes("memory_limit", memory_limit)
    within_inputs.check_limit(blocks_of(model), limit_bytes)
    for each in _TRAININGS:
        each.refuse_another(model)
    config = OffloadConfig(dirs=directories(dirs), min_bytes=SAVED_BYTES)
    found = [PosixEngine(each) for each in config.dirs] if engines is None else engines
    within_inputs.check_drives(found, policy)
    process_heap.give_back_what_is_freed()
    devices = [each if isinstance(each, Device) else Device(each) for each in found]
    told = LeavesWhenTold()
    offload = ActivationOffload(config, engines=devices, plan=told)
    training = TrainingWithin(model, optimizer, limit_bytes, SavedTensors(offload, told), devices)
    training._planning.policy = policy or Policy()
    if training._planning.policy.recompute:
        training._let_blocks_be_computed_again()
    return training


def memory_for(model: nn.Module, limit_bytes: int) -> tuple[MemoryPool, MemoryMeter]:
    """Return the memory pool for a model's pieces, and the meter of the process's memory."""
    device = next(model.parameters()).device
    return cuda_memory(device) if device.type == "cuda" else (PagePool(limit_bytes), KernelMeter())


class TrainingWithin:
    """A training that keeps parameters, gradients, optimizer states and activations within a memory limit."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        limit_bytes: int,
        saved: SavedTensors,
        devices: Sequence[Device],
    ) -> None:
        self._model = model
        self._saved = saved
        self._devices = devices
        self._blocks = blocks_of(model)
        pool, meter = memory_for(model, limit_bytes)
        base_bytes = meter.own_bytes()[0]
        self._custody = PieceStore(devices, RoomAccount(limit_bytes, saved), pool)
        self._states = BlockStates(self._blocks, optimizer, self._custody)
        points = PointMeter(self._custody, meter, base_bytes - self._states.adopted_bytes)
        watch = StandingWatch(self._custody, saved, devices)
        self._conductor = Conductor(self._custody, self._states.pieces, saved, points, watch)
        self._custody.next_use = self._conductor.next_use
        saved.make_room, saved.waited = self._custody.make_room, self._custody.has_waited
        saved.stayed = lambda tensor: self._custody.acquire(self._states.holding(tensor))
        self._updates = Updates(optimizer, self._states, self._custody, self._conductor)
        freed = process_heap.FreedMemory(
            can_stay=isinstance(meter, KernelMeter) and not any(each.is_open() for each in _TRAININGS)
        )
        self._planning = Planning(limit_bytes, self._states, self._conductor, devices, freed)
        self._optimizer = optimizer
        self._unwatched = [each for block in self._blocks for each in block.parameters]
        self._handles = list(self._hook_up())
        page_faults.SERVER.watch(self._serve)
        _TRAININGS.add(self)

    @property
    def reason(self) -> str:
        """The present plan, in words."""
        return self._planning.reason

    def is_open(self) -> bool:
        """Return True until `close` or `abandon`."""
        return bool(self._handles)

    def figures(self) -> dict[str, float]:
        """Return the plan's predictions for a step, and totals of bytes moved and seconds waited so far."""
        carried = self._conductor.carried
        played = None if carried is None else carried.plan.played
        return {
            "predicted_s": 0.0 if played is None else played.step_s,
            "predicted_written_bytes": 0 if played is None else played.written_bytes,
            "written_bytes": sum(each.writes.moved_bytes for each in self._devices),
            "read_bytes": sum(each.reads.moved_bytes for each in self._devices),
            "waited_s": self._custody.waited_s,
            "computed_again": self._conductor.times_again,
            "most_bytes": self._custody.account.most_bytes,
        }

    def save_profile(self, file: str | os.PathLike[str], recording: Recording | None = None) -> None:
        """Write a measured step and the present plan to a file, for `elastrain offload show` and `offload plan`.

        A `recording` of a `StepRecorder` is stored with it. Raises OffloadConfigError for an argument of a wrong type,
        or before the first plan, which is made after the second step. Raises OSError.
        """
        path = one_path("the file of a profile", file)
        if not isinstance(recording, Recording | None):
            raise OffloadConfigError(f"recording must be what StepRecorder.recording() returned, got {recording!r}")
        kept = self._planning.profile()
        if kept is None:
            raise OffloadConfigError("there is no plan yet: save its profile after the second step")
        profile.write(path, replace(kept, recording=recording))

    def step(self, max_grad_norm: float | None = None, *, only_finite: bool = False) -> torch.Tensor | None:
        """Clip all gradients, update the parameters, and drop the gradients; return the norm before clipping.

        With `only_finite`, an infinite or NaN norm skips the update, as with a `GradScaler`. Under some plans, blocks
        are updated just before their next use. Raises OffloadConfigError if `max_grad_norm` is invalid, or the training
        has ended.
        """
        bound = within_inputs.norm_bound(max_grad_norm)
        if not self._handles:
            raise OffloadConfigError("the training has ended by close() or abandon(): call within again to go on")
        for piece in self._states.of(Kind.GRADIENT, range(len(self._blocks))):
            piece.written |= piece.memory.access is Access.WRITE  # the end of a backward, which no fault reports
        self._custody.release(wholly=True)
        total = self._updates.close_step(list(self._model.parameters()), bound, only_finite=only_finite)
        if self._updates.shows_gradients:
            self._planning.policy = replace(self._planning.policy, orders=(UpdateOrder.AFTER_BACKWARD,))
            self._settle()
            self._updates.run_hooks("post")
            self._updates.forget_updated()
        elif self._planning.order is UpdateOrder.AFTER_BACKWARD:
            self._settle()
        # Values of a block are out of date until its update, so no code may read them.
        self._custody.hide(each for (_, block), each in self._states.pieces.items() if block in self._updates.due)
        self._conductor.end_point()
        self._planning.step_ended()
        return total

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Keep all parameters and optimizer states in memory, up to date and writable. The limit is off meanwhile."""
        limit_bytes = self._custody.account.limit_bytes
        try:
            self._bring_all()
            yield
        finally:
            self._custody.account.limit_bytes = limit_bytes
            self._custody.release()
            self._custody.make_room(0)

    def close(self) -> None:
        """Bring all parameters and states back to memory, end the training, and free the space on the drives."""
        self._bring_all()
        self.abandon()

    def abandon(self) -> None:
        """End the training and free the drives' space, after a fault say.

        Touching a tensor that is out is fatal then.
        """
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()
        self._saved.close()
        for device in self._devices:
            device.close()
        if not any(each.is_open() for each in _TRAININGS):
            interrupts.restore()

    def refuse_another(self, model: nn.Module) -> None:
        """Raise OffloadConfigError if the model shares parameters with this training, which is open."""
        if self._handles and any(each in self._states.block_of for each in model.parameters()):
            raise OffloadConfigError(
                f"{type(model).__name__} trains within a limit already: close() what `within` returned before"
            )

    def _let_blocks_be_computed_again(self) -> None:
        for number, block in enumerate(self._blocks):
            if block.module is not None and can_be_computed_again(block.module):
                wanted = partial(self._computes_with, number)
                self._handles.append(BlockForward(number, block, self._saved, self._conductor, wanted).install())

    def _hook_up(self) -> Iterator[Any]:
        yield self._model.register_forward_pre_hook(OriginalsHook(self._model_begins))
        yield self._model.register_forward_hook(OriginalsHook(lambda *_: self._saved.leave()), always_call=True)
        yield self._model.register_state_dict_pre_hook(OriginalsHook(self._settle))  # type: ignore[no-untyped-call]
        yield self._optimizer.register_state_dict_pre_hook(self._settle)
        yield self._optimizer.register_load_state_dict_pre_hook(self._settle)
        yield self._optimizer.register_step_pre_hook(self._updates.refuse_foreign_step)
        for number, block in enumerate(self._blocks):
            if block.module is not None:
                begins = OriginalsHook(lambda _m, _i, number=number: self._forward(number))
                ends = OriginalsHook(lambda _m, _i, out, number=number: self._watch(number, out))
                yield block.module.register_forward_pre_hook(begins)
                yield block.module.register_forward_hook(ends)
        yield from self._hook_up_trained()

    def _hook_up_trained(self) -> Iterator[Any]:
        """Register gradient hooks of trained parameters that have none: all at first, thawed ones later."""
        found = [each for each in self._unwatched if each.requires_grad]
        self._unwatched = [each for each in self._unwatched if not each.requires_grad]
        for parameter in found:
            yield parameter.register_hook(lambda grad, p=parameter: self._lands(p, grad))  # type: ignore[no-untyped-call]
            yield parameter.register_post_accumulate_grad_hook(self._landed)  # type: ignore[no-untyped-call]

    def _model_begins(self, _module: nn.Module, _args: Any) -> None:
        interrupts.defer()  # handlers that the program has set since the last forward
        self._states.check_parameters(self._model)
        self._handles += self._hook_up_trained()
        self._updates.update(len(self._blocks) - 1)
        self._custody.acquire(self._rest())
        if torch.is_grad_enabled():
            self._saved.enter()

    def _forward(self, number: int) -> None:
        touched, wanted = self._blocks[number].touches, self._computes_with(number)
        if torch._C._current_graph_task_id() != -1:
            self._custody.acquire(wanted)  # a recomputation inside the backward
            return
        for block in touched:
            self._updates.update(block)
        self._conductor.arrive(StepStage.FORWARD, number, wanted)

    def _watch(self, number: int, output: Any) -> None:
        """Register hooks on the block's outputs. The block's backward begins when one of them gets its gradient."""
        for each in tree_leaves(output):
            if isinstance(each, torch.Tensor) and each.requires_grad and each.grad_fn is not None:
                each.register_hook(lambda _grad: self._backward(number))  # type: ignore[no-untyped-call]

    def _backward(self, number: int) -> None:
        if torch.is_grad_enabled():
            # This backward makes a graph, whose saved parameters no hook of this class sees.
            self._custody.hold(self._computes_with(number))
        if self._conductor.is_at(StepStage.BACKWARD, number):
            return
        for block in self._blocks[number].touches:
            self._updates.update(block)  # from a forward before the last step: autograd must see that weights changed
        self._conductor.arrive(StepStage.BACKWARD, number, self._computes_with(number))

    def _lands(self, parameter: nn.Parameter, _grad: torch.Tensor) -> None:
        """Prepare for autograd to make a gradient, or to add to an existing one."""
        self._updates.update(self._states.block_of[parameter])  # due if the graph is from before the step
        if parameter.grad is not None and not self._states.is_ours(parameter):
            self._states.given.add(parameter)
        elif parameter.grad is not None:
            held = self._states.of(Kind.GRADIENT, [self._states.block_of[parameter]])
            self._custody.acquire(held)
            self._custody.change(held)

    def _landed(self, parameter: nn.Parameter) -> None:
        """Keep a gradient that autograd has made. `step` handles those that it added to tensors of the program."""
        if parameter in self._states.given or parameter.grad is None:
            self._states.given.discard(parameter)
            return
        if not self._states.is_ours(parameter):
            self._states.keep_gradient(parameter)
        self._updates.landed(parameter)

    def _computes_with(self, number: int) -> list[HeldPiece]:
        """Return the parameter pieces that a block's forward and backward use."""
        return [*self._states.of(Kind.PARAMETER, self._blocks[number].touches), *self._rest()]

    def _rest(self) -> list[HeldPiece]:
        return self._states.of(Kind.PARAMETER, [len(self._blocks) - 1])

    def _bring_all(self) -> None:
        self._settle()
        self._conductor.end_point()
        self._custody.account.limit_bytes = UNLIMITED_BYTES
        held = [piece for piece in self._states.pieces.values() if piece.state is not State.DROPPED]
        self._custody.acquire(held)
        self._custody.change(held)

    def _serve(self, address: int) -> bool:
        """Serve a page fault: load the piece at this address, up to date. Returns False for an unknown address."""
        found = self._states.at(address) if self._handles else None
        if found is None:
            return False
        (_, block), piece = found
        self._updates.update(block)
        self._custody.serve(piece)
        return True

    def _settle(self, *_: Any) -> None:
        for block in range(len(self._blocks)):
            self._updates.update(block)
