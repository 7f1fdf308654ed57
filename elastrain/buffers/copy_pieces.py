"""Pieces of copies: those of this member's states that are being sent, and those of other states that have come."""

from __future__ import annotations

from elastrain import protocol as p
from elastrain.buffers.port import Arithmetic, State, StateStore, Tensor


class CopyPieces:
    """Owner of the copies that have come or gone in part. In the next step they begin anew."""

    def __init__(self, arithmetic: Arithmetic, states: StateStore[int]) -> None:
        self._arithmetic, self._states = arithmetic, states
        self._coming: dict[int, list[list[Tensor]]] = {}
        """Shard -> pieces of its copy that have come so far."""
        self._read: dict[int, State] = {}
        """Shard -> state on a drive that was read for a copy, of which some pieces are still to be sent."""

    def of(self, shard: int, part: tuple[int, int]) -> list[Tensor]:
        """Return a piece of the packed state, to be sent."""
        state = self._read.pop(shard, None) if part[0] else None
        # A state on a drive is read once for all pieces.
        state = self._states[shard] if state is None else state
        if shard in self._states.outside and part[0] + 1 < part[1]:
            self._read[shard] = state
        return self._arithmetic.pack(state, part=part)

    def take(self, command: p.TakeCopy) -> bool:
        """Keep a piece of a copy. Returns True if all pieces are here."""
        number, count = command.part
        pieces = self._coming.setdefault(command.shard, [])
        if number == 0:
            pieces.clear()
        pieces.append(command.payload if count == 1 else self._arithmetic.taken_piece(command.payload))
        return number + 1 == count

    def whole(self, shard: int) -> tuple[State, int]:
        """Return the state whose pieces are all here, and the digest that came with it."""
        return self._arithmetic.unpack(*self._coming.pop(shard))

    def end_step(self) -> None:
        """Forget all pieces."""
        self._coming.clear()
        self._read.clear()
