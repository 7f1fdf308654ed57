"""The memory that members on this host read of each other, and how their operations fail: for any thread."""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Callable
from contextlib import suppress

import torch

from elastrain.comm.errors import Aborted, CommError, MemberLost, Timeout
from elastrain.comm.groups.communicator_failure import GroupFailures
from elastrain.comm.groups.driver import Driver
from elastrain.comm.groups.members import FrameKind, send
from elastrain.comm.groups.slot_ring import Location
from elastrain.comm.shm.imports import Imports
from elastrain.comm.shm.segments import Segment
from elastrain.comm.shm.shared_memory import Alarm
from elastrain.comm.wire.mesh import Mesh

RINGS_BODY = struct.Struct("<Q")  # group
_DROP_AFTER_S = 0.2  # unmapping the memory of the dead takes milliseconds or more: the survivors go on first


class HostMemory:
    """Shared memory of one communicator: the `rings.SharedHost` over its mesh, driver and failures.

    `alarm`: rung after every change while a thread waits.
    """

    def __init__(self, mesh: Mesh, driver: Driver, failures: GroupFailures) -> None:
        self.alarm = Alarm()
        self._mesh, self._driver, self._failures = mesh, driver, failures
        self._imports: dict[str, Imports] = {}
        self._announced: set[int] = set()  # my segments that all members were told of
        self._former: list[object] = []  # of views before, with the memory of the dead: to be dropped at `_drop_s`
        self._drop_s = 0.0

    def why_gone(self, member: str) -> MemberLost | None:
        """See rings.SharedHost."""
        return self._failures.why_gone(member)

    def is_linked(self, member: str) -> bool:
        """See rings.SharedHost."""
        return member in self._imports and member not in self._failures.lost

    def is_ahead(self, member: str) -> bool:
        """See rings.SharedHost."""
        return self._mesh.links.is_ahead(member)

    def place(self, tensor: torch.Tensor) -> Location | None:
        """See rings.SharedHost."""
        place = self._mesh.memory.find(tensor)
        if place is None:
            return None
        segment = place.region.segment
        if segment.number not in self._announced:
            self._driver.call(lambda: self._announce(segment))
        return Location(segment=segment.number, offset_bytes=place.offset_bytes)

    def _announce(self, segment: Segment) -> None:
        self._mesh.announce(segment)
        self._announced.add(segment.number)

    def segment(self, member: str, number: int) -> torch.Tensor | None:
        """See rings.SharedHost."""
        imports = self._imports.get(member)
        return None if imports is None else imports.whole(number)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """See rings.SharedHost."""
        return self._mesh.memory.empty(numel, dtype)

    def scratch(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """See rings.SharedHost."""
        return self._mesh.memory.scratch(numel, dtype)

    def show_rings(self, group: int, members: tuple[str, ...], rings: torch.Tensor) -> None:
        """See rings.SharedHost."""

        def run() -> None:
            self._announced.clear()  # they may have had no link when the others were told
            for member in members:
                send(self._mesh, member, FrameKind.RINGS, RINGS_BODY.pack(group), (rings,))

        self._driver.call(run)

    def fail(self, ended: Callable[[], CommError | None], error: MemberLost | Aborted | Timeout) -> CommError:
        """See rings.SharedHost."""

        def run() -> None:
            if ended() is None:
                self._failures.break_off(error)

        with suppress(CommError):  # closed meanwhile, which has ended the caller's generation
            self._driver.call(run)
        return ended() or error

    # Generations; by the communicator's thread

    def renew(self) -> None:
        """Begin a generation: read the memory of the members that it names."""
        self._announced.clear()
        self.drop_later(self._imports)
        self._imports = self._mesh.links.imports()

    def drop_later(self, gone: object) -> None:
        """Keep objects of former generations for a while, because freeing them takes long."""
        self._drop_s = self._drop_s if self._former else time.monotonic() + _DROP_AFTER_S
        self._former.append(gone)

    def drop_former(self) -> None:
        """Free objects of former generations once the delay has passed."""
        if self._former and time.monotonic() >= self._drop_s:
            self._former.clear()

    def next_due_s(self) -> float:
        """When `drop_former` has something to do, in time.monotonic(); inf: nothing is due."""
        if self._former:
            return self._drop_s
        # While a member is lost the thread looks in anyway: so the edit that follows need not wake it for this.
        return time.monotonic() + _DROP_AFTER_S if self._failures.lost else math.inf
