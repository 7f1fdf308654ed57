"""Values that forwards save for backward. They leave memory and come back point by point, as the conductor decides.

Before the first plan, every value leaves when it is saved, and comes back when backward asks for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol

import torch

from elastrain.offload import compiled_runs
from elastrain.offload.activations.hooks import ActivationOffload
from elastrain.offload.activations.identity import SpillHandle, StayingTensor
from elastrain.offload.activations.manager import SpillManager
from elastrain.offload.activations.pass_records import SpillRecord
from elastrain.offload.compiled_runs import KeptValue
from elastrain.offload.drives.host_buffers import HUGE_PAGE_BYTES
from elastrain.offload.drives.residency import State
from elastrain.offload.lifetimes.pieces.process_heap import undisturbed_s
from elastrain.offload.planning.orders import needed_at
from elastrain.offload.planning.profile import PassProfile

SAVED_BYTES = 32 << 10
"""Saved tensors below this size stay in memory, since moving them takes longer than it helps."""


class ComputedAgain(Protocol):
    """A forward whose saved values were computed again."""

    def held_bytes(self) -> int:
        """Return the bytes of recomputed values that it holds now."""


class LeavesWhenTold:
    """A `SpillPlan` without decisions of its own. If `all_leave` is True, each storage leaves when it is saved."""

    reads_ahead = False

    def __init__(self) -> None:
        self.all_leave = True
        self.reason = "the plan of the whole step decides what leaves"
        self.last: PassProfile | None = None

    def spills(self, index: int) -> bool:
        """Return True if a storage leaves when it is saved."""
        return self.all_leave

    def turns(self, count: int) -> Sequence[int]:
        """Return the storages in the order of saving; backward asks for them in reverse."""
        return range(count)

    def pass_ended(self, profile: PassProfile, device_bytes_per_s: float) -> None:
        """Keep the profile of a pass that has ended."""
        self.last = profile

    def set_limit(self, limit_bytes: int) -> None:
        """Do nothing, since `RoomAccount` holds the only limit."""


class _PointRecords:
    """Records saved since a point began, and those of them that a recomputation of the block needs as inputs."""

    def __init__(self) -> None:
        self._saved: list[weakref.ref[SpillRecord]] = []
        self._needed: weakref.WeakSet[SpillRecord] = weakref.WeakSet()
        self._block_has_ended = False

    def __len__(self) -> int:
        return len(self._saved)

    def add(self, record: SpillRecord) -> None:
        """Add a record.

        After the block's end it counts as needed, since computing the block again would not make it.
        """
        self._saved.append(weakref.ref(record))
        if self._block_has_ended:
            self._needed.add(record)

    def mark_needed(self, before: int, storages: set[int] | None) -> list[SpillRecord]:
        """Mark as needed what the block did not save itself, or saved in one of `storages`; return these records.

        `before` is the number of records when the block began. With `storages` None all records are needed. Called when
        the block has ended.
        """
        found = []
        for number, each in enumerate(self._saved):
            record = each()
            memory = None if record is None else record.origin.memory()
            stays = number < before or storages is None or (memory is not None and memory._cdata in storages)
            if record is not None and stays:
                found.append(record)
        self._needed.update(found)
        self._block_has_ended = True
        return found

    def take(self) -> tuple[list[SpillRecord], list[SpillRecord]]:
        """Return the records that are not needed, and those that are, and start with an empty list."""
        saved = [record for each in self._saved if (record := each()) is not None]
        found = [each for each in saved if each not in self._needed], [each for each in saved if each in self._needed]
        self._saved, self._block_has_ended = [], False
        self._needed.clear()
        return found


class SavedTensors:
    """The tensors that forwards of a model save, grouped by the place of the forward.

    A later forward replaces its group. `make_room` is called before a read that did not start in time, and `waited`
    with the seconds of that read. `stayed` is called with a tensor that never left by itself, such as a parameter, when
    backward asks for it. With `keeps_all`, no block drops values to compute them again.
    """

    def __init__(self, offload: ActivationOffload, told: LeavesWhenTold) -> None:
        self.told = told
        self.keeps_all = False
        self.saved: Callable[[int], None] = lambda _: None
        self.make_room: Callable[[int], None] = lambda _: None
        self.waited: Callable[[float], None] = lambda _: None
        self.stayed: Callable[[torch.Tensor], None] = lambda _: None
        self._offload = offload
        self._point = _PointRecords()
        self._at: dict[int, list[weakref.ref[SpillRecord]]] = {}
        self._known: weakref.WeakSet[SpillRecord] = weakref.WeakSet()
        self._again: weakref.WeakSet[ComputedAgain] = weakref.WeakSet()
        self._entered: torch.autograd.graph.saved_tensors_hooks | None = None

    def enter(self) -> None:
        """Install the hooks for a forward.

        Do nothing if one is running, or if the program has own hooks or forbids hooks.
        """
        others: object = torch._C._autograd._top_saved_tensors_default_hooks(True)
        forbidden = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()  # for example by torch.func
        if self._entered is None and others is None and forbidden is None:
            self._offload.__enter__()
            compiled_runs.keeps().append(self._keep)
            self._entered = torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)
            self._entered.__enter__()

    def leave(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        """Remove the hooks after the forward."""
        if self._entered is not None:
            entered, self._entered = self._entered, None
            entered.__exit__(kind, error, trace)
            compiled_runs.keeps().pop()
            self._offload.__exit__(kind, error, trace)

    def pack(self, tensor: torch.Tensor, is_a_part: bool | None = None) -> StayingTensor | SpillHandle:
        """Save a tensor of a forward.

        For an alias of a tensor, `is_a_part` is the result of `is_part` for that tensor.
        """
        saved = self._offload._pack(tensor, is_a_part)
        self._collect(saved)
        return saved

    def _keep(self, value: torch.Tensor) -> KeptValue:
        """Save a value of a compiled program."""
        saved = self._offload._keep(value)
        self._collect(saved)
        return KeptValue(bring=lambda: self.unpack(saved))

    def _collect(self, saved: StayingTensor | SpillHandle) -> None:
        if isinstance(saved, SpillHandle) and saved.record not in self._known:
            self._known.add(saved.record)
            self._point.add(saved.record)
            self.saved(saved.record.size_bytes)

    def unpack(self, saved: StayingTensor | SpillHandle) -> torch.Tensor:
        """Return a saved tensor, in memory. Raises SpillReadError or ModifiedInPlaceError."""
        if isinstance(saved, StayingTensor):
            tensor = self._offload._unpack(saved)
            self.stayed(tensor)
            return tensor
        if saved.record.state not in (State.SPILLED, State.READING):
            return self._offload._unpack(saved)
        if saved.record.state is State.SPILLED:
            self.make_room(saved.record.size_bytes)
        began_s = undisturbed_s()
        tensor = self._offload._unpack(saved)
        self.waited(undisturbed_s() - began_s)
        return tensor

    # Calls from blocks that may be computed again.

    @property
    def is_entered(self) -> bool:
        """True if a forward is running whose values are saved here."""
        return self._entered is not None

    @property
    def is_innermost(self) -> bool:
        """True if no hooks of the program or of a checkpoint are installed above these.

        Valid only while `is_entered`.
        """
        return bool(torch._C._autograd._top_saved_tensors_default_hooks(True)[0] == self.pack)

    def collected(self) -> int:
        """Return the number of records saved at this point so far, for `mark_needed`."""
        return len(self._point)

    def mark_needed(self, before: int, storages: set[int] | None) -> list[SpillRecord]:
        """Return the records that a recomputation of the block starts from: those in `storages`, or all if it is None.

        Records that were saved at this point before the block began, or after its end, are also needed, since the block
        itself does not make them.
        """
        return self._point.mark_needed(before, storages)

    def hold_again(self, forward: ComputedAgain) -> None:
        """Count the recomputed values that this forward holds, for as long as it holds them."""
        self._again.add(forward)

    def keep_as(self, place: int | None) -> None:
        """Assign the values that were saved since the last call to this place, or to no place.

        The inputs of a recomputation there are assigned to `needed_at(place)`.
        """
        rest, needed = self._point.take()
        if place is not None and (rest or needed):
            self._at[place], self._at[needed_at(place)] = list(map(weakref.ref, rest)), list(map(weakref.ref, needed))

    def let_leave(self, place: int) -> None:
        """Let the values that were saved at this place leave memory."""
        self._manager.leave(self._records(place))

    def missing_bytes(self, place: int) -> int:
        """Return the bytes needed to bring back the place's spilled values.

        The last huge page is allocated as a whole.
        """
        out_bytes = sum(each.size_bytes for each in self._records(place) if each.state is State.SPILLED)
        return out_bytes and out_bytes + max(0, HUGE_PAGE_BYTES - self._manager.idle_bytes)

    def bring(self, place: int) -> None:
        """Start to read the values that were saved at this place."""
        self._manager.fetch(self._records(place))

    def close(self) -> None:
        """Free the space on the drives. No saved value can be read afterwards."""
        self._offload.close()

    # Called by the `RoomAccount`.

    def live_bytes(self) -> int:
        """Return the bytes of memory that saved tensors take, including buffers of running reads."""
        held_bytes = self._manager.live_bytes
        # This runs many times per point. Iterating over a set of weak references costs more than everything else here.
        return held_bytes + sum(each.held_bytes() for each in self._again) if self._again else held_bytes

    def idle_bytes(self) -> int:
        """Return the bytes of read buffers that hold nothing now."""
        return self._manager.idle_bytes

    def moving_bytes(self) -> int:
        """Return the bytes that are being written."""
        return self._manager.writing_bytes

    def give_up(self) -> bool:
        """Start to move everything out of memory that can leave. Returns True if a drive is moving something then."""
        return self._manager.give_up() > 0 or self._manager.is_moving()

    def settle(self) -> None:
        """End the holds on saved values, so that they can leave. No operator of this thread may be running."""
        self._manager.settle()

    @property
    def _manager(self) -> SpillManager:
        return self._offload.manager

    def _records(self, place: int) -> list[SpillRecord]:
        return [record for each in self._at.get(place, ()) if (record := each()) is not None]
