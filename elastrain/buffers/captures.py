"""States captured for a durable checkpoint, and boundary tensors of the open step.

A state is copied in the background, or at once if it is about to change. The checkpoint then owns the copy, and later
steps cannot affect it. Boundary tensors are those that this member has made or received.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from elastrain import protocol as p
from elastrain.buffers.port import CaptureSink, State, StateStore, Tensor
from elastrain.job.values import Contribution
from elastrain.pipeline.pipeline_plan import BoundaryName
from elastrain.protocol.messages import Boundary

COPY_BYTES = 4 << 20
"""Bytes of state copied in one go in the background. The engine handles no messages meanwhile."""


class Captures:
    """The queue of states to be copied for a checkpoint, each with its step."""

    def __init__(self, states: StateStore[int], sink: CaptureSink) -> None:
        self._states = states
        self._sink = sink
        self._due: dict[int, tuple[int, int | None]] = {}
        """Shard -> step of its present state, and its digest if known."""

    @property
    def has_work(self) -> bool:
        """True if a state is to be captured and can be now."""
        return bool(self._due) and self._sink.is_ready_for(self._states.size_bytes(next(iter(self._due))))

    def capture(self, command: p.Capture) -> None:
        """Queue the present states of these shards."""
        digests = zip(command.shards, command.digests, strict=True)
        self._due.update({shard: (command.step, digest) for shard, digest in digests})

    def work(self) -> None:
        """Copy some states, or have one written if there will never be room for a copy."""
        size_bytes = 0
        while size_bytes < COPY_BYTES and self.has_work:
            shard = next(iter(self._due))
            size_bytes += self._states.size_bytes(shard)
            self._pass_on(shard, self._states.copy_to_host, is_awaited=False)

    def settle(self, shard: int) -> None:
        """Copy the state, if it is queued, because it or its memory is about to change."""
        if shard in self._due:
            self._pass_on(shard, self._states.copy_to_host)

    def give_away(self, shard: int) -> None:
        """Pass the queued state on without a copy, because another state replaces it."""
        # Moved, because it would be freed next. Its successor has memory already, so both exist.
        if shard in self._due:
            self._pass_on(shard, self._states.take_out)

    def _pass_on(self, shard: int, captured: Callable[[int], State], *, is_awaited: bool = True) -> None:
        # Only here a step may wait for the disk: when all room for copies is used, or a copy would never have room. In
        # the last case the work may wait here in the background, because the engine would wait as long later.
        of = self._due.pop(shard)
        if self._sink.make_room(self._states.size_bytes(shard), is_awaited=is_awaited):
            self._sink.take(*of, captured(shard))
        else:
            self._sink.lend(*of, self._states[shard])

    def drop(self, step: int) -> None:
        """Remove the states of this step from the queue."""
        self._due = {shard: due for shard, due in self._due.items() if due[0] != step}


@dataclass(frozen=True, eq=False)
class KeptBoundary:
    """A boundary tensor as its message describes it, with its tensors."""

    message: Boundary
    tensors: Sequence[Tensor]

    @property
    def contribution(self) -> Contribution | None:
        """Contribution sent with a gradient. A task above counts it for its own blocks."""
        return self.message.contribution


class Boundaries:
    """Owner of the boundary tensors until their step is over. The first copy of each stays."""

    def __init__(self) -> None:
        self._kept: dict[BoundaryName, KeptBoundary] = {}

    def put(self, message: Boundary, tensors: Sequence[Tensor]) -> None:
        """Keep the tensors, unless some of this name are here already."""
        # The present ones may be in use by readers, and the new ones have the same bits.
        self._kept.setdefault(message.name, KeptBoundary(message, tensors))

    def __getitem__(self, name: BoundaryName) -> KeptBoundary:
        return self._kept[name]

    def change(self, command: p.TakeBoundary | p.DropBoundaries) -> None:
        """Keep what has arrived, or free these boundary tensors, as far as they are here."""
        if isinstance(command, p.TakeBoundary):
            self.put(command.message, command.payload)
            return
        for name in command.names:
            self._kept.pop(name, None)

    def end_step(self, step: int) -> None:
        """Free the boundary tensors of this step and of older ones."""
        # No member votes while it has tasks left, so after the commit no member reads them.
        self._kept = {name: kept for name, kept in self._kept.items() if name.step > step}
