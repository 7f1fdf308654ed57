"""Recomputation of blocks: values that a forward saves are dropped at its end, and computed again when backward asks.

`BlockForward` replaces one block's `forward`, so the model is not edited. Inputs and outputs stay with their owners;
other values are dropped, with a checksum of each storage. Recomputed values must have the same checksums, else no
gradient is made from them. The first time, a block is on trial: its values are kept as usual, and compared with
recomputed ones. A block that computes other values, or changes its inputs, is never recomputed.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import xxhash
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from elastrain.offload.activations.identity import (
    SpillHandle,
    StayingTensor,
    VersionWatch,
    has_plain_memory,
    is_part,
    record_of,
    stays_because,
    view_of,
)
from elastrain.offload.drives.host_buffers import bytes_of, tensor_checksum
from elastrain.offload.errors import PieceLostError, SpillReadError, SpillWriteError
from elastrain.offload.lifetimes.blocks import ModelBlock
from elastrain.offload.lifetimes.conditions import ForwardConditions
from elastrain.offload.lifetimes.pieces.piece_memory import HeldPiece
from elastrain.offload.lifetimes.pieces.process_heap import undisturbed_s
from elastrain.offload.lifetimes.saved import SAVED_BYTES, SavedTensors

Packed = StayingTensor | SpillHandle
_UNCHANGING = torch.Tensor | bool | int | float | str | bytes | torch.dtype | torch.device | torch.Size | None


class TrainingAround(Protocol):
    """The training that a block's forward calls. `Conductor` implements it."""

    def is_given_up(self, block: int) -> bool:
        """Return True if the plan has this forward's values computed again."""

    def has_kept(self, needed_bytes: int, given_up_bytes: int) -> None:
        """Note the bytes that a recomputation of an ended forward needs, and the bytes that were dropped."""

    def begins_again(self, wanted: Sequence[HeldPiece], size_bytes: int) -> None:
        """Load these pieces and make room for `size_bytes`.

        Raises PieceLostError, SpillWriteError or LimitTooSmallError.
        """

    def ended_again(self, seconds: float) -> None:
        """Note the seconds of a recomputation that has ended."""


class _HaveAllError(BaseException):
    """A signal that all dropped values exist again, so that the rest of the forward need not run.

    Stays inside this file.
    """


class BlockForward:
    """The replacement of one block's forward. `wanted` returns the pieces that the block computes with.

    `barred` is the reason why it cannot be recomputed, or empty. `trusted` is True after a successful trial.
    """

    def __init__(
        self,
        number: int,
        block: ModelBlock,
        saved: SavedTensors,
        around: TrainingAround,
        wanted: Callable[[], Sequence[HeldPiece]],
    ) -> None:
        assert block.module is not None
        self.number, self.name, self.module = number, block.name, block.module
        self.inner = self.__wrapped__ = block.module.forward
        self.barred, self.trusted = "", False
        self._own = {id(each) for each in block.module.parameters()}
        self.saved, self.around, self.wanted = saved, around, wanted

    def install(self) -> BlockForward:
        """Make the module call this object as its forward."""
        self.module.__dict__["forward"] = self
        return self

    def remove(self) -> None:
        """Give the module its own forward back. Dropped values can still be computed again."""
        if self.module.__dict__.get("forward") is self:
            del self.module.__dict__["forward"]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward, and note or drop what it saves if it can be computed again."""
        is_recorded = torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1
        if torch.compiler.is_compiling() or not is_recorded or not self.saved.is_entered:
            return self.inner(*args, **kwargs)
        if any(id(each) not in self._own for each in self.module.parameters()):
            return self.inner(*args, **kwargs)  # torch.func.functional_call: its tensors are temporary
        if self.barred or self.saved.keeps_all:
            return self.inner(*args, **kwargs)
        if not all(isinstance(each, _UNCHANGING) for each in tree_leaves((args, kwargs))):
            return self.inner(*args, **kwargs)  # for example a cache that each forward adds to
        if self.around.is_given_up(self.number) and self.saved.is_innermost:
            return _DroppedForward(self, args, kwargs, is_trial=not self.trusted).run(args, kwargs)
        before = self.saved.collected()
        output = self.inner(*args, **kwargs)
        self.around.has_kept(self._needed_bytes(before, (args, kwargs), output), 0)
        return output

    def _needed_bytes(self, before: int, inputs: object, output: object) -> int:
        """Return the bytes that a recomputation starts from: saved values that stay, and inputs not saved so far."""
        records = self.saved.mark_needed(before, _storages_of((inputs, output)))
        unsaved = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in _unsaved(inputs)}
        return sum(each.size_bytes for each in records) + sum(unsaved.values())

    def __reduce__(self) -> tuple[Any, tuple[nn.Module, str]]:
        return getattr, (self.module, "forward")  # a copy of the model gets the forward of its class


def can_be_computed_again(module: nn.Module) -> bool:
    """Return True if a block has its class's own forward, and no module inside has hooks or a replaced forward."""
    if "forward" in module.__dict__ or isinstance(module, torch.jit.ScriptModule | torch.jit.ScriptFunction):
        return False
    inside = [each for each in module.modules() if each is not module]
    return not any(each._forward_hooks or each._forward_pre_hooks or "forward" in each.__dict__ for each in inside)


class _SavedValue:
    """The handle that a graph node holds for one value: the value in `kept`, or its number in the recomputation."""

    __slots__ = ("_forward", "_watch", "kept", "number")

    def __init__(self, forward: _DroppedForward, number: int, watch: VersionWatch) -> None:
        self._forward, self.number, self._watch = forward, number, watch
        self.kept: Packed | None = None

    def bring(self) -> torch.Tensor:
        """Return the value. Raises the errors of `_DroppedForward.value`, and ModifiedInPlaceError."""
        self._watch.check()
        return self._forward.value(self.number, self.kept)


class _DroppedForward:
    """One forward whose values are computed again. It lives as long as a graph node holds one of its values."""

    def __init__(self, block: BlockForward, args: object, kwargs: object, *, is_trial: bool) -> None:
        self._block = block
        self._before = block.saved.collected()
        self._is_trial = is_trial
        self._conditions = ForwardConditions(block.module, (args, kwargs))
        leaves, self._form = tree_flatten((args, kwargs))
        self._leaves = [_PackedInput(each, block.saved) if isinstance(each, torch.Tensor) else each for each in leaves]
        self._ends = _storages_of(leaves)
        self._fresh: list[tuple[_SavedValue, torch.Tensor, bool]] = []  # with an alias, and whether it is a part
        self._dropped: dict[int, tuple[object, int]] = {}  # the form and checksum of each value, by its number
        self._found: dict[int, torch.Tensor] = {}
        self._dropped_bytes = 0

    # The first forward.

    def run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run the forward, and drop what it saved."""
        inputs = tree_leaves((args, kwargs))
        was = _sums(inputs)
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                output = self._block.inner(*args, **kwargs)
            if was != _sums(inputs):
                self._block.barred = "it changes what it is given"
            outside = self._ends | _storages_of(output)
            self._give_up(outside)
            if not self._dropped:
                self._block.barred = self._block.barred or "others hold all that it saves"
        finally:
            self._fresh.clear()
        needed = self._block.saved.mark_needed(self._before, outside if self._is_trial else None)
        self._block.around.has_kept(sum(each.size_bytes for each in needed), self._dropped_bytes)
        return output

    def _pack(self, tensor: torch.Tensor) -> Packed | _SavedValue:
        if self._stays(tensor, self._ends):
            return self._block.saved.pack(tensor)
        value = _SavedValue(self, len(self._fresh), VersionWatch(tensor, self._block.name))
        self._fresh.append((value, tensor.detach(), is_part(tensor)))
        return value

    def _unpack(self, packed: Packed | _SavedValue) -> torch.Tensor:
        return packed.bring() if isinstance(packed, _SavedValue) else self._block.saved.unpack(packed)

    @staticmethod
    def _stays(tensor: torch.Tensor, ends: set[int]) -> bool:
        return stays_because(tensor, min_bytes=SAVED_BYTES) is not None or tensor.untyped_storage()._cdata in ends

    def _give_up(self, outside: set[int]) -> None:
        """Drop values that only this forward holds. Outputs, and all values of a trial, are saved as usual."""
        fresh, self._fresh = self._fresh, []
        keys = [tensor.untyped_storage()._cdata for _, tensor, _ in fresh]
        counts, sums = Counter(keys), dict[int, int]()
        for key, (value, tensor, is_a_part) in zip(keys, fresh, strict=True):
            storage = tensor.untyped_storage()
            # Each of our tensors counts once, and the Python storage object once. Another owner might change the
            # values, and no version would show it.
            has_others = torch._C._storage_Use_Count(key) > counts[key] + 1
            if key in outside or self._block.barred or (has_others and not self._is_trial):
                value.kept = self._block.saved.pack(tensor, is_a_part)
                continue
            if key not in sums:
                sums[key] = _checksum(tensor)
                self._dropped_bytes += 0 if self._is_trial else storage.nbytes()
            self._dropped[value.number] = view_of(tensor), sums[key]
            if self._is_trial:
                value.kept = self._block.saved.pack(tensor, is_a_part)

    def value(self, number: int, kept: Packed | None) -> torch.Tensor:
        """Return one value, kept or computed again. Raises SpillReadError if the recomputation gives other values."""
        if self._is_trial and self._dropped:
            self._try()
        if kept is not None:
            return self._block.saved.unpack(kept)
        if number not in self._found:
            self._compute()
        return self._found.pop(number)

    def _try(self) -> None:
        try:
            self._compute()
            self._block.trusted = True
        except (PieceLostError, SpillWriteError):
            raise
        except Exception as other:  # noqa: BLE001 - any error of a model: its values were kept, and nothing is lost
            self._block.barred = str(other) or repr(other)
        self._found.clear()
        self._dropped.clear()

    def _compute(self) -> None:
        block = self._block
        block.around.begins_again(block.wanted(), self._dropped_bytes)
        given = [each.bring() if isinstance(each, _PackedInput) else each for each in self._leaves]
        args, kwargs = tree_unflatten(given, self._form)
        taking, began_s = _Taking(self._dropped, _storages_of(given)), undisturbed_s()
        hooks = torch.autograd.graph.saved_tensors_hooks(taking.pack, taking.unpack)
        with contextlib.suppress(_HaveAllError), self._conditions.restored(), hooks:
            block.inner(*args, **kwargs)
        if not taking.is_as(self._dropped):
            block.saved.keeps_all = True  # other blocks may do the same
            raise SpillReadError(
                f"{block.name} computes other values when it is computed again: forget the gradients and compute the "
                f"micro-batch again, nothing is given up from now on; or train with policy=Policy(recompute=False)"
            )
        self._found = taking.found
        block.saved.hold_again(self)
        block.around.ended_again(undisturbed_s() - began_s)

    def held_bytes(self) -> int:
        """Return the bytes of recomputed values that backward has not asked for yet."""
        storages = [each.untyped_storage() for each in list(self._found.values())]
        return sum({each._cdata: each.nbytes() for each in storages}.values())


class _Taking:
    """A collector of values that a recomputation saves. It stops the forward once all wanted values exist."""

    def __init__(self, wanted: dict[int, tuple[object, int]], ends: set[int]) -> None:
        self.found: dict[int, torch.Tensor] = {}
        self._wanted = wanted
        self._ends = ends
        self._last = max(wanted, default=-1)
        self._count = 0

    def pack(self, tensor: torch.Tensor) -> None:
        if _DroppedForward._stays(tensor, self._ends):
            return
        number, self._count = self._count, self._count + 1
        if number in self._wanted:
            self.found[number] = tensor.detach()
        # A tensor without a grad_fn may be filled by the operator that saves it, so that operator has to end first.
        if number == self._last and tensor.grad_fn is not None:
            raise _HaveAllError

    def unpack(self, _: None) -> torch.Tensor:
        raise SpillReadError("what is computed again has no backward of its own")

    def is_as(self, wanted: dict[int, tuple[object, int]]) -> bool:
        sums: dict[int, int] = {}
        for number, (form, expected) in wanted.items():
            tensor = self.found.get(number)
            if tensor is None or view_of(tensor) != form:
                return False
            key = tensor.untyped_storage()._cdata
            if key not in sums:
                sums[key] = _checksum(tensor)
            if sums[key] != expected:
                return False
        return True


class _PackedInput:
    """One input of the forward, saved like other values for as long as a recomputation may need it."""

    def __init__(self, tensor: torch.Tensor, saved: SavedTensors) -> None:
        self._packed = saved.pack(tensor)
        self._saved = saved
        self._requires_grad = tensor.requires_grad

    def bring(self) -> torch.Tensor:
        """Return the input's values, detached from any graph. Raises ModifiedInPlaceError or SpillReadError."""
        tensor = self._saved.unpack(self._packed)
        return tensor.detach().requires_grad_(self._requires_grad)


def _unsaved(inputs: object) -> list[torch.Tensor]:
    """Return the input tensors that were not saved yet."""
    return [
        each
        for each in _plain(inputs)
        if not stays_because(each, min_bytes=SAVED_BYTES) and record_of(each, pinned=False) is None
    ]


def _plain(tree: object) -> list[torch.Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, torch.Tensor) and has_plain_memory(each)]


def _storages_of(tree: object) -> set[int]:
    return {each.untyped_storage()._cdata for each in _plain(tree)}


def _sums(inputs: object) -> list[int]:
    return [_checksum(each) for each in _plain(inputs)]


def _checksum(tensor: torch.Tensor) -> int:
    """Return the checksum of the tensor's whole storage."""
    storage = tensor.untyped_storage()
    if storage.device.type == "cpu":
        return xxhash.xxh3_64_intdigest(bytes_of(storage))
    return tensor_checksum(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))
