"""The store of pieces: the residency state of each piece, and room for all of them within one limit.

The training thread asks; devices move bytes in threads of their own. The store waits for any piece that is wanted, even
against the plan: a step that differs from its plan is slower but still correct. Every read is checked against
checksums.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from elastrain.offload.drives import residency
from elastrain.offload.drives.device import Device
from elastrain.offload.drives.request_queue import Urgency
from elastrain.offload.drives.residency import State
from elastrain.offload.errors import LimitTooSmallError, OffloadError, PieceLostError, SpillWriteError
from elastrain.offload.lifetimes.moving import PieceMover
from elastrain.offload.lifetimes.pieces.piece_memory import Access, HeldPiece, MemoryPool, RoomAccount
from elastrain.offload.lifetimes.pieces.process_heap import undisturbed_s
from elastrain.offload.planning.plan_values import Kind

_IN_MEMORY = residency.MEMORY
_USABLE = (State.RESIDENT, State.RELOADED, State.FORWARDED)
LOOK_AGAIN_S = 0.002
USED_TOGETHER = 2
"""Number of served pieces that stay pinned while another piece is served, since one operator may need them together."""


class PieceStore:
    """The store that keeps pieces within an account's limit.

    `next_use` returns the number of points until a piece's next use. The piece with the farthest next use leaves first.
    """

    def __init__(
        self, devices: Sequence[Device], account: RoomAccount, pool: MemoryPool, *, deadline_s: float = 60.0
    ) -> None:
        self.account = account
        self.next_use: Callable[[HeldPiece], int] = lambda _: 0
        self.waited_s = 0.0
        self._deadline_s = deadline_s
        self._pool = pool
        self._changed = threading.Condition()  # its lock is reentrant
        self._mover = PieceMover(devices, account, pool, self._changed)
        self._pieces: list[HeldPiece] = []
        self._pinned: set[HeldPiece] = set()
        self._kept: set[HeldPiece] = set()
        self._served: list[HeldPiece] = []  # pinned while there is room
        self._used_together = 0

    # Requests of the training thread.

    def adopt(self, name: str, kind: Kind, size_bytes: int) -> HeldPiece:
        """Create a piece with memory, and pin it. The caller fills it. Raises LimitTooSmallError."""
        with self._changed:
            self._make_room(size_bytes)
            piece = HeldPiece(name, kind, self._pool.make(size_bytes))
            self._pieces.append(piece)
            self._pinned.add(piece)
            self.account.add(piece.size_bytes)
            self.trim()  # it got fresh pages, so parked ones may be over the limit
            return piece

    def acquire(self, pieces: Iterable[HeldPiece]) -> None:
        """Load pieces into memory, and pin them until `release`. Raises PieceLostError or LimitTooSmallError."""
        wanted = list(pieces)
        with self._changed:
            self._pinned.update(wanted)
            for piece in wanted:
                piece.leaving = False
            if missing := [piece for piece in wanted if not self._is_ready(piece)]:
                for piece in missing:
                    self._start_read(piece, urgent=True)
                for piece in missing:
                    self._wait_for(partial(self._is_ready, piece), f"reading {piece.name}")
            for piece in wanted:
                piece.show()

    def begin(self, piece: HeldPiece) -> None:
        """Load a piece and pin it. A dropped piece gets memory with undefined content."""
        with self._changed:
            self._pinned.add(piece)
            self._served = [*(each for each in self._served if each is not piece), piece]
            if piece.state is not State.DROPPED:
                self.acquire([piece])
                return
            self.account.came(piece.size_bytes)
            self._make_room(piece.size_bytes)
            self._mover.take_memory(piece)
            piece.state = State.RESIDENT

    def change(self, pieces: Iterable[HeldPiece]) -> None:
        """Prepare pinned pieces for a change: wait for running writes, and drop the copies on drives.

        Warns of failed writes as `release` does, since no later call might do it.
        """
        with self._changed:
            for piece in pieces:
                self._wait_for(lambda piece=piece: piece.state is not State.FORWARDED, f"writing {piece.name}")  # type: ignore[misc]
                if piece.state is State.RELOADED:
                    self._mover.apply(piece, residency.Outdated())
                piece.open()
            untold = self._mover.take_untold()
        _warn_of(untold)

    def drop(self, piece: HeldPiece, *, for_good: bool = False) -> None:
        """Free a piece's memory and copies, since its content is not needed any longer.

        With `for_good`, forget the piece.
        """
        with self._changed:
            self._wait_for(lambda: piece.state not in residency.IN_FLIGHT, f"moving {piece.name}")
            self._pinned.discard(piece)
            if piece.state is not State.DROPPED:
                self._mover.apply(piece, residency.Release())
            if for_good:
                self._kept.discard(piece)
                self._pieces.remove(piece)

    def release(self, *, wholly: bool = False) -> None:
        """Unpin all pieces at the start of a point. With `wholly`, also unpin those of `hold`.

        Warns of failed writes to drives. Training goes on as long as memory has room for these pieces.
        """
        with self._changed:
            if wholly:
                self._kept.clear()
            for piece in self._pinned:
                piece.close()
            self._pinned, self._served = set(self._kept), []
            untold = self._mover.take_untold()
        _warn_of(untold)

    def hold(self, pieces: Iterable[HeldPiece]) -> None:
        """Load pieces and keep them pinned until `release` is called with `wholly`."""
        wanted = list(pieces)
        self._kept.update(wanted)
        self.acquire(wanted)

    # Requests from page faults.

    def serve(self, piece: HeldPiece) -> None:
        """Load a piece that code outside of training touches. Make it writable if it was readable before.

        Raises the errors of `acquire`, and PieceLostError if the piece was dropped.
        """
        with self._changed:
            if piece.state is State.DROPPED:
                raise PieceLostError(f"{piece.name} are gone, since step() has used them: keep a copy before it")
            piece.written |= (shown := piece.memory.access is not Access.NONE)
            self._served = [*(each for each in self._served if each is not piece), piece]
            self._used_together = USED_TOGETHER
            try:
                self.acquire([piece])
            finally:
                self._used_together = 0
            if shown:
                self.change([piece])

    def hide(self, pieces: Iterable[HeldPiece]) -> None:
        """Protect pieces from any access until they are acquired again, in memory or not."""
        with self._changed:
            for piece in pieces:
                self._wait_for(lambda piece=piece: piece.state is not State.FORWARDED, f"writing {piece.name}")  # type: ignore[misc]
                if piece not in self._pinned:
                    piece.memory.allow(Access.NONE)

    # Requests of the plan.

    def copy_out(self, piece: HeldPiece) -> None:
        """Write a copy of a piece that stays in memory."""
        with self._changed:
            if piece.state is State.RESIDENT and piece.fault is None:
                self._mover.apply(piece, residency.CopyOut())

    def let_leave(self, piece: HeldPiece) -> None:
        """Let a piece leave memory as soon as its copy is written."""
        with self._changed:
            if piece in self._pinned or piece.state not in _IN_MEMORY or piece.fault is not None:
                return
            piece.leaving = True
            if piece.state is State.RESIDENT:
                self._mover.apply(piece, residency.CopyOut())
            self._mover.leave_if_written(piece)

    def bring(self, piece: HeldPiece) -> bool:
        """Start to read a piece if there is room for it now. Returns False if there is not."""
        with self._changed:
            piece.leaving = False
            if piece.state is not State.SPILLED:
                return True
            if self.account.missing_bytes(piece.size_bytes):
                return False
            self._start_read(piece, urgent=False)
            return True

    def make_room(self, size_bytes: int) -> None:
        """Wait until `size_bytes` more fit. The piece with the farthest next use leaves first."""
        with self._changed:
            self._make_room(size_bytes)

    def has_waited(self, seconds: float) -> None:
        """Add seconds for which other code has waited for a drive."""
        self.waited_s += seconds

    def clear(self) -> None:
        """Remove all pieces that are not pinned, and wait for all writes.

        Used while the memory of points is unknown.
        """
        with self._changed:
            until_s = time.monotonic() + self._deadline_s
            while self._evict():
                pass
            while self._is_moving():
                self._wait_once(until_s, "writing what is not used now")

    def accounted_bytes(self) -> int:
        """Return the known bytes of memory: of pieces, of others, and of buffers and parked pages without content."""
        return self.account.held() + self.account.others.idle_bytes() + self._pool.parked_bytes

    def trim(self, *, wholly: bool = False) -> None:
        """Give parked pages back to the kernel until the limit is kept. With `wholly`, give all of them back."""
        with self._changed:
            self._pool.trim(0 if wholly else self.account.limit_bytes - self.account.total())

    # Room. The caller holds the lock.

    def _make_room(self, size_bytes: int) -> None:
        """Wait until `size_bytes` more fit.

        Removes the pieces with the farthest next use. Raises LimitTooSmallError.
        """
        until_s = time.monotonic() + self._deadline_s
        while missing_bytes := self.account.missing_bytes(size_bytes):
            going = sum(piece.size_bytes for piece in self._pieces if piece.leaving)
            if missing_bytes > going + self.account.others.moving_bytes() and self._evict():
                continue
            if self._is_moving() or self.account.others.give_up():
                self._wait_once(until_s, "making room")
            elif self.account.held() + size_bytes <= self.account.limit_bytes:
                break  # a mere expectation is no reason to refuse; it stays counted, or reads ahead would take its room
            elif len(self._served) > self._used_together:
                self._pinned.discard(self._served.pop(0))
            else:
                raise _refusal(self._pieces, self._pinned, self.account, size_bytes)
        self._pool.trim(self.account.limit_bytes - self.account.total())

    def _is_moving(self) -> bool:
        moving = any(piece.state in residency.IN_FLIGHT for piece in self._pieces)
        return moving or self.account.others.moving_bytes() > 0

    def _evict(self) -> bool:
        """Let the piece with the farthest next use leave, at once if its copy is valid. Returns False if none can."""
        still = [each for each in self._pieces if each.state in _USABLE and not each.leaving and each.fault is None]
        idle = [each for each in still if each not in self._pinned]
        if not idle:
            return False
        piece = max(idle, key=self.next_use)
        piece.leaving = True
        if piece.state is State.RESIDENT:
            self._mover.apply(piece, residency.CopyOut())
        self._mover.leave_if_written(piece)
        return True

    def _is_ready(self, piece: HeldPiece) -> bool:
        if piece.state is State.FAILED:
            raise PieceLostError(
                f"{piece.name} did not come back ({piece.fault}): training cannot go on; start from a checkpoint"
            )
        return piece.state in _USABLE

    def _wait_for(self, is_done: Callable[[], bool], what: str) -> None:
        until_s = time.monotonic() + self._deadline_s
        while not is_done():
            self._wait_once(until_s, what)

    def _wait_once(self, until_s: float, what: str) -> None:
        if time.monotonic() > until_s:
            raise PieceLostError(f"{what} did not end within {self._deadline_s} s: look at the drive, or use another")
        began_s = undisturbed_s()
        # Other memory sends no notification when a move has ended.
        others_move = self.account.others.moving_bytes() > 0 or not self._is_moving()
        self._changed.wait(LOOK_AGAIN_S if others_move else 0.2)
        self.waited_s += undisturbed_s() - began_s

    def _start_read(self, piece: HeldPiece, *, urgent: bool) -> None:
        if piece.state is State.READING:
            self._mover.apply(piece, residency.Need())
        if piece.state is not State.SPILLED:
            return
        if urgent:
            self._make_room(piece.size_bytes)
        self._mover.start_read(piece, Urgency.DEMAND if urgent else Urgency.PREFETCH)


def _warn_of(untold: Sequence[str]) -> None:
    for each in untold:
        warnings.warn(each, RuntimeWarning, stacklevel=3)


def _refusal(
    pieces: Iterable[HeldPiece], pinned: Iterable[HeldPiece], account: RoomAccount, size_bytes: int
) -> OffloadError:
    """Return the error for a lack of room: a drive's write fault, or LimitTooSmallError."""
    faults = (piece.fault for piece in pieces if isinstance(piece.fault, SpillWriteError))
    together = " with ".join(sorted(piece.name for piece in pinned))
    return next(faults, None) or LimitTooSmallError(
        account.limit_bytes, account.total() + size_bytes, together, before_a_plan=True
    )
