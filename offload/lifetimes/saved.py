"""What forwards save for their backwards: it leaves and comes back, point by point, as the conductor says.

Until there is a plan, all of it leaves when it is saved, and comes back when it is asked for.
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
"""Saved tensors below it stay: to move them takes longer than to keep them."""


class ComputedAgain(Protocol):
    """A forward whose values were computed again."""

    def held_bytes(self) -> int:
        """What it holds of them now."""


class LeavesWhenTold:
    """A `SpillPlan` that decides nothing. `all_leave`: what is saved leaves at once."""

    reads_ahead = False

    def __init__(self) -> None:
        self.all_leave = True
        self.reason = "the plan of the whole step decides what leaves"
        self.last: PassProfile | None = None

    def spills(self, index: int) -> bool:
        """Whether it leaves when it is saved."""
        return self.all_leave

    def turns(self, count: int) -> Sequence[int]:
        """Backward asks in the reverse order of saving."""
        return range(count)

    def pass_ended(self, profile: PassProfile, device_bytes_per_s: float) -> None:
        """A pass is over."""
        self.last = profile

    def set_limit(self, limit_bytes: int) -> None:
        """Nothing: the one limit is the account's."""


class _PointRecords:
    """What was saved since a point began, and what of that a recomputation of its block would begin from."""

    def __init__(self) -> None:
        self._saved: list[weakref.ref[SpillRecord]] = []
        self._needed: weakref.WeakSet[SpillRecord] = weakref.WeakSet()
        self._block_has_ended = False

    def __len__(self) -> int:
        return len(self._saved)

    def add(self, record: SpillRecord) -> None:
        """One more. What comes after the block's end is not made again by computing the block again."""
        self._saved.append(weakref.ref(record))
        if self._block_has_ended:
            self._needed.add(record)

    def mark_needed(self, before: int, storages: set[int] | None) -> list[SpillRecord]:
        """The block has ended, and began when `before` were saved: needed is all but what it saved in other storages.

        None is no storages: all of it is needed.
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
        """What is not needed and what is, and begin anew."""
        saved = [record for each in self._saved if (record := each()) is not None]
        found = [each for each in saved if each not in self._needed], [each for each in saved if each in self._needed]
        self._saved, self._block_has_ended = [], False
        self._needed.clear()
        return found


class SavedTensors:
    """`place` tells the records of one forward of a block from those of another; a later forward there replaces them.

    `make_room` is asked before something is read that was not fetched in time, `waited` is told of the seconds;
    `stayed` is told of what never left by itself, a parameter it may be, when backward asks for it. Once
    `keeps_all`, no block gives up values to be computed again.
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
        """A forward begins; nothing where one is under way, or where the program has hooks or forbids them."""
        others: object = torch._C._autograd._top_saved_tensors_default_hooks(True)
        forbidden = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()  # by torch.func, say
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
        """The forward is over."""
        if self._entered is not None:
            entered, self._entered = self._entered, None
            entered.__exit__(kind, error, trace)
            compiled_runs.keeps().pop()
            self._offload.__exit__(kind, error, trace)

    def pack(self, tensor: torch.Tensor, is_a_part: bool | None = None) -> StayingTensor | SpillHandle:
        """Take what a forward saves. An alias that was not to stay comes with what `is_part` said of its tensor."""
        saved = self._offload._pack(tensor, is_a_part)
        self._collect(saved)
        return saved

    def _keep(self, value: torch.Tensor) -> KeptValue:
        """What a compiled program saves."""
        saved = self._offload._keep(value)
        self._collect(saved)
        return KeptValue(bring=lambda: self.unpack(saved))

    def _collect(self, saved: StayingTensor | SpillHandle) -> None:
        if isinstance(saved, SpillHandle) and saved.record not in self._known:
            self._known.add(saved.record)
            self._point.add(saved.record)
            self.saved(saved.record.size_bytes)

    def unpack(self, saved: StayingTensor | SpillHandle) -> torch.Tensor:
        """Give it back, in memory. Raises SpillReadError, ModifiedInPlaceError."""
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

    # What blocks say that may be computed again.

    @property
    def is_entered(self) -> bool:
        """Whether a forward is under way whose values are saved here."""
        return self._entered is not None

    @property
    def is_innermost(self) -> bool:
        """Whether no hooks of the program, or of a checkpoint, stand between: only while `is_entered`."""
        return bool(torch._C._autograd._top_saved_tensors_default_hooks(True)[0] == self.pack)

    def collected(self) -> int:
        """How much was collected at this point so far, for `mark_needed`."""
        return len(self._point)

    def mark_needed(self, before: int, storages: set[int] | None) -> list[SpillRecord]:
        """Of what the block has saved since then, what a recomputation begins from: in these storages, or all of it.

        What was saved at this point before, or comes later, is in it: the block itself has not saved that.
        """
        return self._point.mark_needed(before, storages)

    def hold_again(self, forward: ComputedAgain) -> None:
        """Count what this forward holds that was computed again, as long as it does."""
        self._again.add(forward)

    def keep_as(self, place: int | None) -> None:
        """What was saved since the last time belongs to this place, or to none.

        What a recomputation there would begin from belongs to `needed_at(place)`.
        """
        rest, needed = self._point.take()
        if place is not None and (rest or needed):
            self._at[place], self._at[needed_at(place)] = list(map(weakref.ref, rest)), list(map(weakref.ref, needed))

    def let_leave(self, place: int) -> None:
        """Let what was saved there leave memory."""
        self._manager.leave(self._records(place))

    def missing_bytes(self, place: int) -> int:
        """What it takes to bring back what was saved there and has left: the last huge page comes as a whole."""
        out_bytes = sum(each.size_bytes for each in self._records(place) if each.state is State.SPILLED)
        return out_bytes and out_bytes + max(0, HUGE_PAGE_BYTES - self._manager.idle_bytes)

    def bring(self, place: int) -> None:
        """Begin to read it."""
        self._manager.fetch(self._records(place))

    def close(self) -> None:
        """Give the drives' space back. Nothing can be asked for any more."""
        self._offload.close()

    # As custody's account sees it.

    def live_bytes(self) -> int:
        """Memory that saved tensors take, that of reads included."""
        held_bytes = self._manager.live_bytes
        # Asked many times per point: to go through a set of weak references costs more than all the rest.
        return held_bytes + sum(each.held_bytes() for each in self._again) if self._again else held_bytes

    def idle_bytes(self) -> int:
        """Memory for reads that nothing lies in now."""
        return self._manager.idle_bytes

    def moving_bytes(self) -> int:
        """What is on its way out."""
        return self._manager.writing_bytes

    def give_up(self) -> bool:
        """Let everything leave that can. Returns True if a drive is moving something then."""
        return self._manager.give_up() > 0 or self._manager.is_moving()

    def settle(self) -> None:
        """Let all leave that was saved: no operator of this thread is running."""
        self._manager.settle()

    @property
    def _manager(self) -> SpillManager:
        return self._offload.manager

    def _records(self, place: int) -> list[SpillRecord]:
        return [record for each in self._at.get(place, ()) if (record := each()) is not None]
