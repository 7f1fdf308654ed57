"""The mover of pieces, which executes commands of the residency table: memory comes and goes, drives read and write.

All methods run with the piece store's lock held. Only the moving of bytes runs without it, in threads of the devices.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial

from elastrain.offload.activations.mover import done_after
from elastrain.offload.drives import residency
from elastrain.offload.drives.device import Copy, Device, NoSpaceError
from elastrain.offload.drives.port import round_up
from elastrain.offload.drives.request_queue import IoRequest, Urgency
from elastrain.offload.drives.residency import State
from elastrain.offload.errors import OffloadError, PieceLostError, SpillWriteError
from elastrain.offload.lifetimes.pieces.piece_memory import HeldPiece, MemoryPool, PiecePart, RoomAccount, Span

PART_BYTES = 64 << 20
"""Bytes that one request moves. Threads of a drive share a large piece, so copies, checksums and I/O overlap."""


class PieceMover:
    """The mover of all pieces.

    A piece lies on one drive, or is striped: `HeldPiece.shares` are the parts of each drive.
    """

    def __init__(
        self, devices: Sequence[Device], account: RoomAccount, pool: MemoryPool, changed: threading.Condition
    ) -> None:
        self._devices = devices
        self._account = account
        self._pool = pool
        self._changed = changed
        self._untold: list[str] = []

    def take_untold(self) -> list[str]:
        """Return warnings about writes that failed since the last call. Their pieces stay in memory."""
        untold, self._untold = self._untold, []
        return untold

    def apply(self, piece: HeldPiece, event: residency.Event) -> None:
        """Apply an event to a piece, and execute the commands that follow from it."""
        piece.state, commands = residency.advance(piece.state, event)
        for command in commands:
            match command:
                case residency.StartWrite():
                    self._start_write(piece)
                case residency.FreeMemory():
                    self._pool.take_from(piece.memory)
                    self._account.add(-piece.size_bytes)
                    self._changed.notify_all()
                case residency.FreeSlot():
                    self._free(piece)
                case residency.HastenRead():
                    for part in piece.parts:
                        if part.request is not None:
                            part.device.queue.hasten(part.request)

    def leave_if_written(self, piece: HeldPiece) -> None:
        """Free the memory of a leaving piece once its copy is valid."""
        if piece.leaving and piece.state is State.RELOADED:
            piece.leaving = False
            self.apply(piece, residency.Spill())

    def take_memory(self, piece: HeldPiece) -> None:
        """Give memory to a piece.

        Parked pages of the other size are of no use to it, so they are trimmed afterwards.
        """
        self._account.add(piece.size_bytes)
        self._pool.give_to(piece.memory)
        self._pool.trim(self._account.limit_bytes - self._account.total())

    def start_read(self, piece: HeldPiece, urgency: Urgency) -> None:
        """Start to read a piece that is out. The caller has made room for it."""
        self.take_memory(piece)
        piece.state, _ = residency.advance(piece.state, residency.Prefetch())
        piece.moving_parts = len(piece.parts)
        for part in piece.parts:
            part.request = part.device.queue.submit(urgency, partial(self._read, piece, part), piece.memory.mark)

    def _start_write(self, piece: HeldPiece) -> None:
        self._free(piece)
        piece.parts, piece.fault = self._place(piece), None
        piece.moving_parts = len(piece.parts)
        piece.close()
        self._pool.mark(piece.memory)
        for part in piece.parts:
            part.device.queued_bytes += part.span.size_bytes
            part.request = part.device.queue.submit(Urgency.WRITE, partial(self._write, piece, part), piece.memory.mark)

    def _place(self, piece: HeldPiece) -> list[PiecePart]:
        if not piece.shares:
            able = [each for each in self._devices if each.has_room(piece.size_bytes)] or self._devices
            device = min(able, key=lambda each: done_after(each, piece.size_bytes))
            return _parts(device, 0, piece.size_bytes)
        begin_bytes, found = 0, list[PiecePart]()
        for number, (tier, size_bytes) in enumerate(piece.shares, start=1):
            is_last = number == len(piece.shares)
            end_bytes = piece.size_bytes if is_last else min(piece.size_bytes, round_up(begin_bytes + size_bytes))
            found += _parts(self._devices[tier], begin_bytes, end_bytes)
            begin_bytes = end_bytes
        return found

    def _free(self, piece: HeldPiece) -> None:
        for part in piece.parts:
            if part.copy is not None:
                part.device.free(part.copy.slot)
        piece.parts = []

    # Run in a device's thread.

    def _write(self, piece: HeldPiece, part: PiecePart, request: IoRequest) -> None:
        fault: OffloadError | None = None
        copy, device = None, part.device
        try:
            copy, device = self._written(piece, part, request)
        except SpillWriteError as known:
            fault = known
        except Exception as unknown:  # noqa: BLE001 - edge of a thread: an unknown fault must reach the trainer
            fault = SpillWriteError(f"{part.device.engine.name}: {unknown!r}")
        with self._changed:
            part.device.queued_bytes -= part.span.size_bytes
            part.copy, part.device = copy, device
            self._part_ended(piece, fault, residency.WriteDone(), residency.WriteFailed())

    def _written(self, piece: HeldPiece, part: PiecePart, request: IoRequest) -> tuple[Copy, Device]:
        """Write to the planned device, or to any with room: memory tiers may be fragmented, or hold older copies."""
        full: NoSpaceError | None = None
        for device in (part.device, *(each for each in self._devices if each is not part.device)):
            try:
                return piece.memory.write(device, part.span, lambda: request.cancelled), device
            except NoSpaceError as fault:
                full = full or fault
        assert full is not None
        raise full

    def _read(self, piece: HeldPiece, part: PiecePart, request: IoRequest) -> None:
        fault: OffloadError | None = None
        try:
            assert part.copy is not None
            piece.memory.read(part.device, part.span, part.copy, lambda: request.cancelled)
        except OffloadError as known:
            fault = known
        except Exception as unknown:  # noqa: BLE001 - edge of a thread: an unknown fault must reach the trainer
            fault = PieceLostError(f"{part.device.engine.name}: {unknown!r}")
        with self._changed:
            self._part_ended(piece, fault, residency.ReadDone(), residency.ReadFailed())

    def _part_ended(
        self, piece: HeldPiece, fault: OffloadError | None, done: residency.Event, failed: residency.Event
    ) -> None:
        piece.fault = piece.fault or fault
        piece.moving_parts -= 1
        if piece.moving_parts:
            return
        if piece.fault is not None:
            piece.leaving = False
            if isinstance(piece.fault, SpillWriteError):
                self._untold.append(f"{piece.name} stay in memory: {piece.fault}")
        self.apply(piece, done if piece.fault is None else failed)
        self.leave_if_written(piece)
        self._changed.notify_all()


def _parts(device: Device, begin_bytes: int, end_bytes: int) -> list[PiecePart]:
    return [
        PiecePart(device, Span(begin_bytes=begin, size_bytes=min(PART_BYTES, end_bytes - begin)))
        for begin in range(begin_bytes, end_bytes, PART_BYTES)
    ]
