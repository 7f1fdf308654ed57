"""What the manager knows of each saved storage and of each pass: plain holders. Their owner's lock guards them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from elastrain.offload.account import Watched
from elastrain.offload.device import Copy, Device
from elastrain.offload.errors import OffloadError
from elastrain.offload.queue import IoRequest
from elastrain.offload.residency import State
from elastrain.offload.stats import Lifetime, PassProfile, Path
from elastrain.offload.transfer import ready_event


class SpillRecord:
    """One saved storage of one pass. Everything but the constants belongs to the manager's lock."""

    def __init__(self, storage: torch.UntypedStorage, *, version: int, dtype: str, module: str, pinned: bool) -> None:
        self.size_bytes = storage.nbytes()
        self.place = storage.device
        self.ready = ready_event(storage)
        self.version = version
        self.dtype = dtype
        self.module = module
        self.pinned = pinned
        self.state = State.PINNED if pinned else State.RESIDENT
        self.storage: torch.UntypedStorage | None = storage
        self.original = weakref.ref(storage)
        self.copy: Copy | None = None
        self.device: Device | None = None
        self.request: IoRequest | None = None
        self.fault: OffloadError | None = None
        self.watched: list[Watched] = []
        self.handles = 0
        self.held = 0  # by operators that may still fill it: no copy of it would be good
        self.wants_to_leave = False
        self.looked_at = 0  # how often the memory was to be compared with the copy
        self.newer: torch.UntypedStorage | None = None  # the memory, where an outdated copy is being read
        self.index = self.turn = -1
        self.spilled = False
        self.path = Path.UNUSED
        self.saved_s = self.stalled_s = self.released_s = self.waited_s = 0.0
        self.needed_s: float | None = None

    @property
    def kind(self) -> str:
        """What compresses alike: the dtype and the type of module, which the trail gives as "name (Type)"."""
        return f"{self.dtype} {self.module.rpartition('(')[2].rstrip(')')}"

    def lifetime(self) -> Lifetime:
        """What happened to it, as a value."""
        return Lifetime(
            index=self.index,
            size_bytes=self.size_bytes,
            dtype=self.dtype,
            module=self.module,
            saved_s=self.saved_s,
            needed_s=self.needed_s,
            released_s=self.released_s,
            path=self.path,
            waited_s=self.waited_s,
            stalled_s=self.stalled_s,
        )


class Pass:
    """The storages of one forward, in the order of saving."""

    def __init__(self, number: int, began_s: float) -> None:
        self.number = number
        self.began_s = began_s
        self.records: list[SpillRecord] = []
        self.open = 0
        self.unneeded = 0
        self.collecting = True
        self.in_backward = False
        self.turns: Sequence[int] = ()  # indices of records by their turn, from when backward begins
        self.ahead = -1  # no turn above it is on disk only
        self.peak_bytes = self.largest_bytes = self.saved_bytes = 0
        self.save_stall_s = self.need_stall_s = 0.0
        self.timeline: list[tuple[float, int]] = []

    def begin_backward(self, turns: Sequence[int]) -> None:
        """From now on storages are needed, probably those with the highest turn first."""
        self.in_backward, self.collecting = True, False
        self.turns, self.ahead = turns, len(turns) - 1
        for turn, index in enumerate(turns):
            self.records[index].turn = turn

    def in_turn(self, turn: int) -> SpillRecord:
        """The storage that backward is to ask for then."""
        return self.records[self.turns[turn]]

    def profile(self, total_s: float) -> PassProfile:
        """The finished pass as a value."""
        spilled_bytes = sum(each.size_bytes for each in self.records if each.spilled)
        return PassProfile(
            number=self.number,
            forward_s=max((each.saved_s for each in self.records), default=0.0),
            total_s=total_s,
            saved_bytes=self.saved_bytes,
            spilled_bytes=spilled_bytes,
            peak_bytes=self.peak_bytes,
            save_stall_s=self.save_stall_s,
            need_stall_s=self.need_stall_s,
            lifetimes=tuple(each.lifetime() for each in self.records),
            timeline=tuple(self.timeline),
        )


class Totals:
    """Counters since the first pass."""

    def __init__(self) -> None:
        self.passes = self.saved_bytes = self.shared_bytes = 0
        self.forwarded_bytes = self.evicted_bytes = self.peak_bytes = 0
        self.save_stall_s = self.need_stall_s = 0.0
