"""Custody of pieces: where each is, as states of the residency table, and room for all of them within one limit.

The training thread asks; devices move bytes in threads of their own. What is wanted is waited for, whatever the plan
said: a step that differs from its plan is slower, never wrong. Every read is checked against its checksums.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from elastrain.offload import residency
from elastrain.offload.device import Copy, Device
from elastrain.offload.errors import LimitTooSmallError, OffloadError, PieceLostError, SpillWriteError
from elastrain.offload.lifetimes.memory import MemoryPool, PieceMemory, Span
from elastrain.offload.lifetimes.values import Kind
from elastrain.offload.queue import IoRequest, Urgency
from elastrain.offload.residency import State

_IN_MEMORY = residency.MEMORY


class HeldPiece:
    """One piece: its addresses, where its bytes are, and who moves them. Custody's lock guards all but the first line.

    `state` DROPPED: it holds nothing that anybody needs, and has no memory.
    """

    def __init__(self, name: str, kind: Kind, memory: PieceMemory) -> None:
        self.name, self.kind, self.memory = name, kind, memory
        self.state = State.RESIDENT
        self.leaving = False
        self.device: Device | None = None
        self.copy: Copy | None = None
        self.request: IoRequest | None = None
        self.fault: OffloadError | None = None

    @property
    def size_bytes(self) -> int:
        """What it takes in memory: whole pages."""
        return self.memory.size_bytes

    @property
    def whole(self) -> Span:
        """All of it."""
        return Span(begin_bytes=0, size_bytes=self.size_bytes)


class RoomAccount:
    """The one limit, and all that counts against it: pieces, what `others()` hold, and what computing now takes."""

    def __init__(self, limit_bytes: int, others: Callable[[], int]) -> None:
        self.limit_bytes = limit_bytes
        self.piece_bytes = self.most_bytes = 0
        self.reserved_bytes = 0  # for what computes now
        self._others = others

    def add(self, more_bytes: int) -> None:
        """Count pieces' memory."""
        self.piece_bytes += more_bytes
        self.most_bytes = max(self.most_bytes, self.total())

    def total(self) -> int:
        """All that counts."""
        return self.piece_bytes + self.reserved_bytes + self._others()

    def held(self) -> int:
        """What is in memory for sure: no estimate."""
        return self.piece_bytes + self._others()


class PieceCustody:
    """Holds pieces within an account's limit.

    `next_use` says how far away a piece's next use is: who is used last makes room first.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        account: RoomAccount,
        pool: MemoryPool,
        *,
        deadline_s: float = 60.0,
    ) -> None:
        self.account = account
        self.next_use: Callable[[HeldPiece], int] = lambda _: 0
        self.waited_s = 0.0
        self._devices = devices
        self._deadline_s = deadline_s
        self._pool = pool
        self._changed = threading.Condition()  # of a lock that its holder may take again
        self._pieces: list[HeldPiece] = []
        self._pinned: set[HeldPiece] = set()

    # What the training thread asks for.

    def adopt(self, name: str, kind: Kind, size_bytes: int) -> HeldPiece:
        """A new piece, with memory, pinned: the caller fills it."""
        with self._changed:
            self._make_room(size_bytes)
            piece = HeldPiece(name, kind, self._pool.make(size_bytes))
            self._pieces.append(piece)
            self._pinned.add(piece)
            self.account.add(piece.size_bytes)
            return piece

    def acquire(self, pieces: Iterable[HeldPiece]) -> None:
        """Have pieces in memory and pin them until `release`. Raises PieceLostError, LimitTooSmallError."""
        wanted = list(pieces)
        with self._changed:
            self._pinned.update(wanted)
            for piece in wanted:
                piece.leaving = False
            missing = [piece for piece in wanted if not self._is_ready(piece)]
            if not missing:
                return
            began_s = time.perf_counter()
            for piece in missing:
                self._start_read(piece, urgent=True)
            for piece in missing:
                self._wait_for(partial(self._is_ready, piece), f"reading {piece.name}")
            self.waited_s += time.perf_counter() - began_s

    def begin(self, piece: HeldPiece) -> None:
        """Have memory for a piece that was dropped, or what is in it, and pin it."""
        with self._changed:
            self._pinned.add(piece)
            if piece.state is not State.DROPPED:
                self.acquire([piece])
                return
            self._make_room(piece.size_bytes)
            self._take_memory(piece)
            piece.state = State.RESIDENT

    def change(self, pieces: Iterable[HeldPiece]) -> None:
        """Before pinned pieces are changed: end what is writing them, and forget copies."""
        with self._changed:
            for piece in pieces:
                began_s = time.perf_counter()
                self._wait_for(lambda piece=piece: piece.state is not State.FORWARDED, f"writing {piece.name}")  # type: ignore[misc]
                self.waited_s += time.perf_counter() - began_s
                if piece.state is State.RELOADED:
                    self._apply(piece, residency.Outdated())

    def drop(self, piece: HeldPiece) -> None:
        """Nobody needs what is in it any more."""
        with self._changed:
            self._wait_for(lambda: piece.state not in residency.IN_FLIGHT, f"moving {piece.name}")
            self._pinned.discard(piece)
            if piece.state is not State.DROPPED:
                self._apply(piece, residency.Release())

    def release(self) -> None:
        """Let go of all pins: another point begins."""
        with self._changed:
            self._pinned.clear()

    # What the plan wishes.

    def copy_out(self, piece: HeldPiece) -> None:
        """Write a copy while the piece stays."""
        with self._changed:
            if piece.state is State.RESIDENT and piece.fault is None:
                self._apply(piece, residency.CopyOut())

    def let_leave(self, piece: HeldPiece) -> None:
        """Let a piece leave memory as soon as its copy is written."""
        with self._changed:
            if piece in self._pinned or piece.state not in _IN_MEMORY or piece.fault is not None:
                return
            piece.leaving = True
            if piece.state is State.RESIDENT:
                self._apply(piece, residency.CopyOut())
            self._leave_if_written(piece)

    def bring(self, piece: HeldPiece) -> bool:
        """Begin to read a piece if there is room for it now; False if there is none."""
        with self._changed:
            piece.leaving = False
            if piece.state is not State.SPILLED:
                return True
            if self.account.total() + piece.size_bytes > self.account.limit_bytes:
                return False
            self._start_read(piece, urgent=False)
            return True

    def shrink(self) -> None:
        """Come back within the limit after more was held, or more is reserved: who is used last leaves."""
        with self._changed:
            self._make_room(0)

    def accounted_bytes(self) -> int:
        """Memory that is known: of pieces, of others, and of pages that are held for nobody."""
        return self.account.held() + self._pool.parked_bytes

    def trim(self) -> None:
        """Hold no more pages for nobody than the limit has room for."""
        with self._changed:
            self._pool.trim(self.account.limit_bytes - self.account.total())

    # Room. The lock is held.

    def _make_room(self, size_bytes: int) -> None:
        """Wait until so much more fits, letting go of what is used last."""
        while self.account.total() + size_bytes > self.account.limit_bytes:
            going = sum(piece.size_bytes for piece in self._pieces if piece.leaving)
            if self.account.total() + size_bytes - going > self.account.limit_bytes and self._evict():
                continue
            if not any(piece.state in residency.IN_FLIGHT for piece in self._pieces):
                if not self.account.reserved_bytes:
                    raise self._refusal(size_bytes)
                self.account.reserved_bytes = 0  # an estimate: what is needed now goes before it
                continue
            self._wait_once(time.monotonic() + self._deadline_s, "making room")
        self._pool.trim(self.account.limit_bytes - self.account.total())

    def _refusal(self, size_bytes: int) -> OffloadError:
        """Why there is no room: a drive takes nothing, or the limit is too small for what is used at a time."""
        faults = (piece.fault for piece in self._pieces if isinstance(piece.fault, SpillWriteError))
        return next(faults, None) or LimitTooSmallError(self.account.limit_bytes, self.account.total() + size_bytes)

    def _evict(self) -> bool:
        """Let one piece more leave: the one that is used last, at once where its copy is good."""
        idle = [
            piece
            for piece in self._pieces
            if piece not in self._pinned
            and not piece.leaving
            and piece.fault is None
            and piece.state in (State.RESIDENT, State.RELOADED, State.FORWARDED)
        ]
        if not idle:
            return False
        piece = max(idle, key=self.next_use)
        piece.leaving = True
        if piece.state is State.RESIDENT:
            self._apply(piece, residency.CopyOut())
        self._leave_if_written(piece)
        return True

    def _leave_if_written(self, piece: HeldPiece) -> None:
        if piece.leaving and piece.state is State.RELOADED:
            piece.leaving = False
            self._apply(piece, residency.Spill())

    def _is_ready(self, piece: HeldPiece) -> bool:
        if piece.state is State.FAILED:
            raise PieceLostError(
                f"{piece.name} did not come back ({piece.fault}): training cannot go on; start from a checkpoint"
            )
        return piece.state in (State.RESIDENT, State.RELOADED, State.FORWARDED)

    def _wait_for(self, is_done: Callable[[], bool], what: str) -> None:
        until_s = time.monotonic() + self._deadline_s
        while not is_done():
            self._wait_once(until_s, what)

    def _wait_once(self, until_s: float, what: str) -> None:
        if time.monotonic() > until_s:
            raise PieceLostError(f"{what} did not end within {self._deadline_s} s: look at the drive, or use another")
        self._changed.wait(0.2)

    # What the table commands. The lock is held.

    def _apply(self, piece: HeldPiece, event: residency.Event) -> None:
        piece.state, commands = residency.advance(piece.state, event)
        for command in commands:
            match command:
                case residency.StartWrite():
                    device = min(self._devices, key=lambda each: each.queued_bytes / each.writes.recent_bytes_per_s)
                    device.queued_bytes += piece.size_bytes
                    piece.device = device
                    self._pool.mark(piece.memory)
                    piece.request = device.queue.submit(Urgency.WRITE, partial(self._write, piece))
                case residency.FreeMemory():
                    self._pool.take_from(piece.memory)
                    self.account.add(-piece.size_bytes)
                    self._changed.notify_all()
                case residency.FreeSlot():
                    if piece.device is not None and piece.copy is not None:
                        piece.device.free(piece.copy.slot)
                    piece.copy = None
                case residency.HastenRead():
                    assert piece.device is not None and piece.request is not None
                    piece.device.queue.hasten(piece.request)

    def _start_read(self, piece: HeldPiece, *, urgent: bool) -> None:
        if piece.state is State.READING:
            self._apply(piece, residency.Need())
        if piece.state is not State.SPILLED:
            return
        if urgent:
            self._make_room(piece.size_bytes)
        device = piece.device
        assert device is not None
        self._take_memory(piece)
        piece.state, _ = residency.advance(piece.state, residency.Prefetch())
        urgency = Urgency.DEMAND if urgent else Urgency.PREFETCH
        piece.request = device.queue.submit(urgency, partial(self._read, piece))

    def _take_memory(self, piece: HeldPiece) -> None:
        self.account.add(piece.size_bytes)
        self._pool.give_to(piece.memory)

    # In a device's thread.

    def _write(self, piece: HeldPiece, request: IoRequest) -> None:
        device = piece.device
        assert device is not None
        copy: Copy | None = None
        event: residency.Event = residency.WriteDone()
        fault: OffloadError | None = None
        try:
            copy = piece.memory.write(device, piece.whole, lambda: request.cancelled)
        except SpillWriteError as known:
            event, fault = residency.WriteFailed(), known
        except Exception as unknown:  # noqa: BLE001 - edge of a thread: an unknown fault must reach the trainer
            event, fault = residency.WriteFailed(), SpillWriteError(f"{device.engine.name}: {unknown!r}")
        with self._changed:
            device.queued_bytes -= piece.size_bytes
            piece.copy, piece.fault = copy, fault
            if fault is not None:
                piece.leaving = False
            self._apply(piece, event)
            self._leave_if_written(piece)
            self._changed.notify_all()

    def _read(self, piece: HeldPiece, request: IoRequest) -> None:
        device, copy = piece.device, piece.copy
        assert device is not None and copy is not None
        event: residency.Event = residency.ReadDone()
        fault: OffloadError | None = None
        try:
            piece.memory.read(device, piece.whole, copy, lambda: request.cancelled)
        except OffloadError as known:
            event, fault = residency.ReadFailed(), known
        except Exception as unknown:  # noqa: BLE001 - edge of a thread: an unknown fault must reach the trainer
            event, fault = residency.ReadFailed(), PieceLostError(f"{device.engine.name}: {unknown!r}")
        with self._changed:
            piece.fault = fault
            self._apply(piece, event)
            self._changed.notify_all()
