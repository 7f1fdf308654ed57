"""`within`: a model and its optimizer train within a memory limit, whatever they hold; what is idle lies on drives.

Block by block: hooks name the points, custody has what each point uses, the optimizer updates one block at a time.
Autograd makes gradients, which move into their block's piece as they land, so that no bit depends on it.
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
from elastrain.offload.planning import step_profile
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
    """Train within `memory_limit` bytes above what the process holds already, parameters and states left out of that.

    Call `step` of what this returns in place of clipping, `optimizer.step()` and `zero_grad()`. Only that, forwards and
    backwards may touch parameters and states: other code enters `whole()`. Not for several threads.
    `engines` replaces the files in `dirs` (`cuda.host_tier` makes one of host memory), `policy` the way plans are made.
    Where that costs less than a drive, a block's forward is computed again in its backward: what it changes outside of
    the model, a global or a file, it then changes twice, unless `policy.recompute` is false.
    Raises OffloadConfigError where the model cannot be cut into blocks or is within a limit already, the optimizer
    needs whole tensors, or there is no drive; LimitTooSmallError, with the block that needs more, here or after the
    second step.
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
    """The memory that a model's pieces lie in, and who tells how much of it is held."""
    device = next(model.parameters()).device
    return cuda_memory(device) if device.type == "cuda" else (PagePool(limit_bytes), KernelMeter())


class TrainingWithin:
    """Holds a model's parameters, gradients and optimizer states within a limit, together with its activations."""

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
        """Whether it has not ended by `close` or `abandon`."""
        return bool(self._handles)

    def figures(self) -> dict[str, float]:
        """What the plan predicts of a step, and what was moved so far."""
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
        """Leave what was seen of a step, and the present plan, for `elastrain offload show` and `offload plan`.

        A `recording` of a `StepRecorder` is kept with it. Raises OffloadConfigError for what is no path or no
        recording, and before the first plan, which comes after the second step; OSError.
        """
        path = one_path("the file of a profile", file)
        if not isinstance(recording, Recording | None):
            raise OffloadConfigError(f"recording must be what StepRecorder.recording() returned, got {recording!r}")
        kept = self._planning.profile()
        if kept is None:
            raise OffloadConfigError("there is no plan yet: save its profile after the second step")
        step_profile.write(path, replace(kept, recording=recording))

    def step(self, max_grad_norm: float | None = None, *, only_finite: bool = False) -> torch.Tensor | None:
        """Clip all gradients, update, and forget those of the optimizer's parameters. Returns the norm before clipping.

        With `only_finite`, nothing is updated where that norm is infinite or no number, as a `GradScaler` has it. Where
        the plan says so, blocks are updated before they are used next. Raises OffloadConfigError for a norm that is
        none, and after the end.
        """
        bound = within_inputs.norm_bound(max_grad_norm)
        if not self._handles:
            raise OffloadConfigError("the training has ended by close() or abandon(): call within again to go on")
        for piece in self._states.of(Kind.GRADIENT, range(len(self._blocks))):
            piece.written |= piece.memory.access is Access.WRITE  # the last ones of a backward: nobody would tell
        self._custody.release(wholly=True)
        total = self._updates.close_step(list(self._model.parameters()), bound, only_finite=only_finite)
        if self._updates.shows_gradients:
            self._planning.policy = replace(self._planning.policy, orders=(UpdateOrder.AFTER_BACKWARD,))
            self._settle()
            self._updates.run_hooks("post")
            self._updates.forget_updated()
        elif self._planning.order is UpdateOrder.AFTER_BACKWARD:
            self._settle()
        # Until its update nobody may see what a block holds: it is out of date.
        self._custody.hide(each for (_, block), each in self._states.pieces.items() if block in self._updates.due)
        self._conductor.end_point()
        self._planning.step_ended()
        return total

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Parameters and optimizer states in memory, up to date, to be read or written. The limit is off."""
        limit_bytes = self._custody.account.limit_bytes
        try:
            self._bring_all()
            yield
        finally:
            self._custody.account.limit_bytes = limit_bytes
            self._custody.release()
            self._custody.make_room(0)

    def close(self) -> None:
        """Bring all parameters and states back for good, and give the drives' space back."""
        self._bring_all()
        self.abandon()

    def abandon(self) -> None:
        """Give the drives' space back at once, after a fault say: what is out is lost, and touching it is fatal."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()
        self._saved.close()
        for device in self._devices:
            device.close()
        if not any(each.is_open() for each in _TRAININGS):
            interrupts.restore()

    def refuse_another(self, model: nn.Module) -> None:
        """Raises OffloadConfigError where a model has parameters of this one, which has not ended."""
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
        """Hooks of parameters that take gradients: of all at first, later of who was frozen until now."""
        found = [each for each in self._unwatched if each.requires_grad]
        self._unwatched = [each for each in self._unwatched if not each.requires_grad]
        for parameter in found:
            yield parameter.register_hook(lambda grad, p=parameter: self._lands(p, grad))  # type: ignore[no-untyped-call]
            yield parameter.register_post_accumulate_grad_hook(self._landed)  # type: ignore[no-untyped-call]

    def _model_begins(self, _module: nn.Module, _args: Any) -> None:
        interrupts.defer()  # handlers that were set since the last time
        self._states.check_parameters(self._model)
        self._handles += self._hook_up_trained()
        self._updates.update(len(self._blocks) - 1)
        self._custody.acquire(self._rest())
        if torch.is_grad_enabled():
            self._saved.enter()

    def _forward(self, number: int) -> None:
        touched, wanted = self._blocks[number].touches, self._computes_with(number)
        if torch._C._current_graph_task_id() != -1:
            self._custody.acquire(wanted)  # it is computed again, inside its backward
            return
        for block in touched:
            self._updates.update(block)
        self._conductor.arrive(StepStage.FORWARD, number, wanted)

    def _watch(self, number: int, output: Any) -> None:
        """Hear of the block's backward: it begins when a gradient of what the block returned is there."""
        for each in tree_leaves(output):
            if isinstance(each, torch.Tensor) and each.requires_grad and each.grad_fn is not None:
                each.register_hook(lambda _grad: self._backward(number))  # type: ignore[no-untyped-call]

    def _backward(self, number: int) -> None:
        if torch.is_grad_enabled():
            # This backward makes a graph, which saves parameters where no hook of ours sees it.
            self._custody.hold(self._computes_with(number))
        if self._conductor.is_at(StepStage.BACKWARD, number):
            return
        for block in self._blocks[number].touches:
            self._updates.update(block)  # of a forward before the last step: autograd is to see that weights changed
        self._conductor.arrive(StepStage.BACKWARD, number, self._computes_with(number))

    def _lands(self, parameter: nn.Parameter, _grad: torch.Tensor) -> None:
        """Before autograd adds to a gradient that is there, or makes one."""
        self._updates.update(self._states.block_of[parameter])  # due, where the graph is from before the step
        if parameter.grad is not None and not self._states.is_ours(parameter):
            self._states.given.add(parameter)
        elif parameter.grad is not None:
            held = self._states.of(Kind.GRADIENT, [self._states.block_of[parameter]])
            self._custody.acquire(held)
            self._custody.change(held)

    def _landed(self, parameter: nn.Parameter) -> None:
        """Keep what autograd has made; `step` takes what it has added to a tensor of the program."""
        if parameter in self._states.given or parameter.grad is None:
            self._states.given.discard(parameter)
            return
        if not self._states.is_ours(parameter):
            self._states.keep_gradient(parameter)
        self._updates.landed(parameter)

    def _computes_with(self, number: int) -> list[HeldPiece]:
        """The parameters that a block's forward and backward use."""
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
        """Somebody from outside touches what is not there, or is out of date, or has a copy."""
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
