"""Looks at where things stand when a point ends: what memory holds by kind, and what was waited for and moved since."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from elastrain.offload import residency
from elastrain.offload.device import Device
from elastrain.offload.lifetimes.custody import PieceCustody
from elastrain.offload.lifetimes.held import HeldPiece
from elastrain.offload.lifetimes.recording import HELD, Standing
from elastrain.offload.lifetimes.saved import SavedTensors
from elastrain.offload.lifetimes.values import Kind


class StandingWatch:
    """Asked once at the end of each point, in the training thread."""

    def __init__(self, custody: PieceCustody, saved: SavedTensors, devices: Sequence[Device]) -> None:
        self._custody = custody
        self._saved = saved
        self._devices = devices
        self._waited_s = 0.0
        self._moved = [(0, 0)] * len(devices)

    def take(self, pieces: Iterable[HeldPiece], extra_bytes: int | None) -> Standing | None:
        """How things stand; None where the point was not looked at closely (`extra_bytes` is None)."""
        waited_s, moved = self._custody.waited_s, [(d.writes.moved_bytes, d.reads.moved_bytes) for d in self._devices]
        waited_before_s, moved_before = self._waited_s, self._moved
        self._waited_s, self._moved = waited_s, moved
        if extra_bytes is None:
            return None
        held = dict.fromkeys(HELD, 0)
        for piece in pieces:
            held[piece.kind] += piece.size_bytes * (piece.state in residency.MEMORY)
        held[Kind.ACTIVATION], held[Kind.TEMPORARY] = self._saved.live_bytes(), extra_bytes
        return Standing(
            held_bytes=tuple(held.values()),
            waited_s=waited_s - waited_before_s,
            moved_bytes=tuple(
                (written - written_before, read - read_before)
                for (written, read), (written_before, read_before) in zip(moved, moved_before, strict=True)
            ),
        )
