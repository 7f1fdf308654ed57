"""Faults of a drive and of a program while a piece of one kind is in one state: a drive that strikes when it is told.

`striking` knows which piece each call of the drive is for, since it watches who moves; `DriveFault.strike` is a call of
the kernel that goes wrong. All on real files, with direct I/O.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

from elastrain.offload.activations import mover
from elastrain.offload.drives.posix import Calls, PosixEngine
from elastrain.offload.lifetimes import moving
from elastrain.offload.planning.plan_values import Kind

KINDS = (Kind.PARAMETER, Kind.GRADIENT, Kind.STATE, Kind.ACTIVATION)
PAGE_BYTES = 4096
SLOW_S = 0.05


class Where(Enum):
    """Where a piece is when the fault comes."""

    COPIED = "here while it is written"
    LEAVING = "leaving"
    OUT = "out"
    ARRIVING = "arriving"
    HERE = "here, with a copy"


class DriveFault(Enum):
    """What goes wrong with a drive. What has to do with space lasts, as does a drive that is gone."""

    FULL = "full disk"
    QUOTA = "quota"
    EIO = "input/output error"
    SHORT = "short write or read"
    NOTHING = "a write or read of nothing"
    FLIP = "flipped bytes"
    SLOW = "slow drive"
    GONE = "vanished drive"


LASTING = (DriveFault.FULL, DriveFault.QUOTA, DriveFault.GONE, DriveFault.SLOW)
ERRNO = {
    DriveFault.FULL: errno.ENOSPC,
    DriveFault.QUOTA: errno.EDQUOT,
    DriveFault.EIO: errno.EIO,
    DriveFault.GONE: errno.ENODEV,
}
WRITES_ONLY = (DriveFault.FULL, DriveFault.QUOTA)


def drive_cells() -> Iterator[tuple[Kind, Where, DriveFault]]:
    """All that can be: nothing is written or read of what is out or lies here, so that only its copy can change."""
    for kind in KINDS:
        for where in Where:
            for fault in DriveFault:
                at_rest = where in (Where.OUT, Where.HERE)
                if at_rest and fault not in (DriveFault.FLIP, DriveFault.GONE):
                    continue
                if where is Where.ARRIVING and fault in WRITES_ONLY:
                    continue
                if kind is Kind.ACTIVATION and where is Where.COPIED:
                    continue  # what forwards save is written when it is to leave, and then only
                yield kind, where, fault


class Drive:
    """One drive that strikes once it is armed. `act` is done in the drive's thread instead, where it is given.

    A page that is flipped on the drive may be written again, or given back, before anybody reads it: pages are flipped
    until one is `read_back`.
    """

    def __init__(
        self, kind: Kind, where: Where, fault: DriveFault | None, act: Callable[[], None] | None = None
    ) -> None:
        self.armed, self.struck, self.read_back = False, threading.Event(), threading.Event()
        self._kind, self._where, self._fault, self._act = kind, where, fault, act
        self._now = threading.local()
        self._lock = threading.Lock()
        self._flipped: set[int] = set()  # where, as long as it lies there

    def engine(self, folder: Path) -> PosixEngine:
        """The drive, as files in a folder."""
        return PosixEngine(folder, calls=Calls(pwritev=self._write, preadv=self._read))

    @contextmanager
    def moving(self, kind: Kind, where: Where) -> Iterator[None]:
        """What this thread moves meanwhile."""
        self._now.what = (kind, where)
        try:
            yield
        finally:
            self._now.what = None

    def _write(self, fd: int, views: Sequence[memoryview], offset_bytes: int) -> int:
        with self._lock:
            self._flipped -= self._flipped_in(views, offset_bytes)
        return self._call(os.pwritev, fd, views, offset_bytes, is_write=True)

    def _read(self, fd: int, views: Sequence[memoryview], offset_bytes: int) -> int:
        with self._lock:
            if self._flipped_in(views, offset_bytes):
                self.read_back.set()
        return self._call(os.preadv, fd, views, offset_bytes, is_write=False)

    def _flipped_in(self, views: Sequence[memoryview], offset_bytes: int) -> set[int]:
        end_bytes = offset_bytes + sum(view.nbytes for view in views)
        return {each for each in self._flipped if offset_bytes <= each < end_bytes}

    def _flip(self, fd: int, offset_bytes: int) -> None:
        with self._lock:
            flip(fd, offset_bytes)
            self._flipped.add(offset_bytes)

    def _call(
        self, call: Callable[..., int], fd: int, views: Sequence[memoryview], offset_bytes: int, *, is_write: bool
    ) -> int:
        is_struck = self._is_struck(is_write)
        at_rest = self._where in (Where.OUT, Where.HERE)
        if not is_struck or at_rest:
            moved = call(fd, views, offset_bytes)
            if is_struck:
                self._strike_at_rest(fd, offset_bytes)
            return moved
        if self._act is not None:
            self._act()
        fault = self._fault
        if fault in ERRNO:
            raise OSError(ERRNO[fault], f"planned: {fault.value}")
        if fault is DriveFault.SLOW:
            time.sleep(SLOW_S)
        if fault is DriveFault.NOTHING:
            return 0
        if fault is DriveFault.SHORT:
            return call(fd, [views[0][:PAGE_BYTES]], offset_bytes)
        moved = call(fd, views, offset_bytes)
        if fault is DriveFault.FLIP and is_write:
            self._flip(fd, offset_bytes)
        elif fault is DriveFault.FLIP:
            views[0][0] ^= 1
            self.read_back.set()
        return moved

    def _is_struck(self, is_write: bool) -> bool:
        """Whether this call is the one, or one after it of a fault that lasts."""
        with self._lock:
            flips_on = self._fault is DriveFault.FLIP and not self.read_back.is_set()
            if self.struck.is_set() and not flips_on:
                if self._fault is DriveFault.GONE and self._where in (Where.OUT, Where.HERE):
                    raise OSError(errno.ENODEV, "planned: vanished drive")
                return self._fault in LASTING and (is_write or self._fault not in WRITES_ONLY)
            before = {Where.OUT: Where.LEAVING, Where.HERE: Where.ARRIVING}  # what comes to be there when it has ended
            wanted = (self._kind, before.get(self._where, self._where))
            if not self.armed or getattr(self._now, "what", None) != wanted:
                return False
            self.struck.set()
            return True

    def _strike_at_rest(self, fd: int, offset_bytes: int) -> None:
        if self._act is not None:
            self._act()
        if self._fault is DriveFault.FLIP:
            self._flip(fd, offset_bytes)


def flip(fd: int, offset_bytes: int) -> None:
    """Change one bit on the drive."""
    page = mmap.mmap(-1, PAGE_BYTES)
    os.preadv(fd, [page], offset_bytes)
    page[0] ^= 1
    os.pwritev(fd, [page], offset_bytes)


@contextmanager
def striking(drive: Drive, patch: Any) -> Iterator[Drive]:
    """Let the drive know what is moved; `patch` is pytest's."""
    pieces, records = moving.PieceMover, mover.Mover

    def around(owner: type, name: str, what: Callable[[Any], tuple[Kind, Where]]) -> None:
        real = getattr(owner, name)

        def move(self: Any, moved: Any, *others: Any) -> None:
            with drive.moving(*what(moved)):
                real(self, moved, *others)

        patch.setattr(owner, name, move)

    with patch.context() as patch:
        around(pieces, "_write", lambda each: (each.kind, Where.LEAVING if each.leaving else Where.COPIED))
        around(pieces, "_read", lambda each: (each.kind, Where.ARRIVING))
        around(records, "_write", lambda _: (Kind.ACTIVATION, Where.LEAVING))
        around(records, "_read", lambda _: (Kind.ACTIVATION, Where.ARRIVING))
        yield drive
