"""Compression of pieces of spilled storages with zstd, if measurements show that it saves time.

It does if the drive saves more time than packing and unpacking take on an idle core. The decision is a pure function
with its reason. It is made per class of tensors (dtype and kind of module), and repeated on a sample from time to time.
Checksums cover the bytes before packing, so that they detect a defect here as well as one of the drive.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import zstandard

from elastrain.base.line_files import unpacked
from elastrain.offload.drives.port import IoEngine, round_up

LEVEL = 1
SAMPLE_BYTES = 256 << 10
SAMPLE_EVERY_PIECES = 256
IDLE_CORES_WANTED = 1.0
Piece = list[memoryview]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Measurements of packing and unpacking one piece of a class."""

    plain_bytes: int
    packed_bytes: int
    pack_s: float
    unpack_s: float


def pays(sample: Sample, *, drive_bytes_per_s: float, idle_cores: float) -> tuple[bool, str]:
    """Decide if a class is worth packing, and say why."""
    # Everything that is written is read again, so that the drive saves time twice.
    ratio = sample.packed_bytes / sample.plain_bytes
    spared_s = 2 * (sample.plain_bytes - sample.packed_bytes) / drive_bytes_per_s
    spent_s = sample.pack_s + sample.unpack_s
    told = f"packed to {ratio:.2f}, spares the drive {spared_s * 1e3:.2f} ms and takes {spent_s * 1e3:.2f} ms"
    if idle_cores < IDLE_CORES_WANTED:
        return False, f"{told}: not packed, since no core is idle"
    return spared_s > spent_s, f"{told}: {'packed' if spared_s > spent_s else 'not packed'}"


class IdleCores:
    """Number of idle cores, from the kernel's counters."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._idle_s, self._at_s = _idle_s(), clock()
        self._last = 0.0

    def look(self) -> float:
        """Return the mean number of idle cores since the last measurement, which is at least 0.2 s ago."""
        idle_s, at_s = _idle_s(), self._clock()
        if at_s - self._at_s >= 0.2:  # the counters have steps of 10 ms
            self._last = (idle_s - self._idle_s) / (at_s - self._at_s)
            self._idle_s, self._at_s = idle_s, at_s
        return self._last


def _idle_s() -> float:
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return int(fields[4]) / os.sysconf("SC_CLK_TCK")


class Codec:
    """A writer and reader of pieces through an engine, which packs them if that pays. Safe from several threads.

    A packed piece takes whole pages, at the offset of the plain one. `written_bytes` and `read_bytes` are those that
    the drive really transferred. `reasons` has the last decision for each class.
    """

    def __init__(
        self, engine: IoEngine, *, idle_cores: Callable[[], float], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.written_bytes = self.read_bytes = 0
        self.reasons: dict[str, str] = {}
        self._engine = engine
        self._idle_cores = idle_cores
        self._clock = clock
        self._lock = threading.Lock()
        self._chosen: dict[str, bool] = {}
        self._seen: dict[str, int] = {}
        self._drive = (0, 0.0)  # bytes and seconds of plain writes

    def write(self, offset_bytes: int, piece: Piece, kind: str | None) -> int:
        """Write a piece. Returns its packed size, or 0 if it was written without packing. Raises OSError."""
        if kind is not None and self._packs(kind, piece):
            packed = zstandard.ZstdCompressor(level=LEVEL).compress(b"".join(piece))
            if round_up(len(packed)) < _size(piece):
                pages = memoryview(mmap.mmap(-1, round_up(len(packed))))
                pages[: len(packed)] = packed
                self._engine.write(offset_bytes, [pages])
                self._count(written=pages.nbytes)
                return len(packed)
        began_s = self._clock()
        self._engine.write(offset_bytes, piece)
        self._count(written=_size(piece), plain_s=self._clock() - began_s)
        return 0

    def read(self, offset_bytes: int, piece: Piece, packed_bytes: int) -> None:
        """Fill the piece. Raises OSError, also if packed bytes cannot be unpacked."""
        if not packed_bytes:
            self._engine.read(offset_bytes, piece)
            self._count(read=_size(piece))
            return
        pages = memoryview(mmap.mmap(-1, round_up(packed_bytes)))
        self._engine.read(offset_bytes, [pages])
        self._count(read=pages.nbytes)
        try:
            plain = memoryview(unpacked(pages[:packed_bytes], _size(piece)))
        except zstandard.ZstdError as fault:
            raise OSError(errno.EILSEQ, f"what was packed came back changed ({fault})", self._engine.name) from fault
        for view in piece:
            view[:] = plain[: view.nbytes]
            plain = plain[view.nbytes :]

    def _packs(self, kind: str, piece: Piece) -> bool:
        """Return True if the piece is to be packed.

        Every SAMPLE_EVERY_PIECES-th piece of a class renews the decision.
        """
        with self._lock:
            seen = self._seen[kind] = self._seen.get(kind, -1) + 1
            chosen = self._chosen.get(kind, False)
            bytes_so_far, seconds = self._drive
        if seen % SAMPLE_EVERY_PIECES == 0 and seconds:
            sample = take_sample(max(piece, key=lambda view: view.nbytes)[:SAMPLE_BYTES], self._clock)
            chosen, reason = pays(sample, drive_bytes_per_s=bytes_so_far / seconds, idle_cores=self._idle_cores())
            with self._lock:
                self._chosen[kind], self.reasons[kind] = chosen, reason
        elif not seconds:
            with self._lock:
                self._seen[kind] = -1  # the drive's speed is unknown: the next piece counts as the first
        return chosen

    def _count(self, *, written: int = 0, read: int = 0, plain_s: float = 0.0) -> None:
        with self._lock:
            self.written_bytes += written
            self.read_bytes += read
            if plain_s:
                self._drive = (self._drive[0] + written, self._drive[1] + plain_s)


def take_sample(plain: memoryview, clock: Callable[[], float] = time.monotonic) -> Sample:
    """Pack and unpack the bytes once, and measure it."""
    began_s = clock()
    packed = zstandard.ZstdCompressor(level=LEVEL).compress(plain)
    packed_s = clock()
    unpacked(memoryview(packed), plain.nbytes)
    return Sample(
        plain_bytes=plain.nbytes, packed_bytes=len(packed), pack_s=packed_s - began_s, unpack_s=clock() - packed_s
    )


def _size(piece: Piece) -> int:
    return sum(view.nbytes for view in piece)
