"""States on their way into a durable checkpoint: copied when there is time, or at once where they are about to change.

What was captured is the checkpoint's own: nothing that the next steps do to a state can be seen in it.

Boundary tensors of the open step that this member has made or received, for its own tasks and for others'.
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
"""State that is copied in one go behind the scenes: it keeps the engine from its messages for that long."""


class Captures:
    """Owns which states are still to be copied, and for which step."""

    def __init__(self, states: StateStore[int], sink: CaptureSink) -> None:
        self._states = states
        self._sink = sink
        self._due: dict[int, tuple[int, int | None]] = {}
        """Shard -> step of which its state is now, and its digest where that is known."""

    @property
    def has_work(self) -> bool:
        """Whether a state is to be captured, and can be now."""
        return bool(self._due) and self._sink.is_ready_for(self._states.size_bytes(next(iter(self._due))))

    def capture(self, command: p.Capture) -> None:
        digests = zip(command.shards, command.digests, strict=True)
        self._due.update({shard: (command.step, digest) for shard, digest in digests})

    def work(self) -> None:
        """Copy some, or have one written where no copy would ever have room."""
        size_bytes = 0
        while size_bytes < COPY_BYTES and self.has_work:
            shard = next(iter(self._due))
            size_bytes += self._states.size_bytes(shard)
            self._pass_on(shard, self._states.copy, is_awaited=False)

    def settle(self, shard: int) -> None:
        """The state is about to change in place, or its memory to be used otherwise: copy it, if it is to be."""
        if shard in self._due:
            self._pass_on(shard, self._states.copy)

    def give_away(self, shard: int) -> None:
        """Another state takes its place: what is to be captured need not be copied."""
        # Moved and not copied: it would be thrown away next. Its successor has memory already, so both are there.
        if shard in self._due:
            self._pass_on(shard, self._states.pop)

    def _pass_on(self, shard: int, captured: Callable[[int], State], *, is_awaited: bool = True) -> None:
        # Here, and only here, a step may wait for the disk: where all the room for copies is taken, or none would do.
        # What no room would do for may wait here while nobody asks for it: its engine would wait as long later.
        of = self._due.pop(shard)
        if self._sink.make_room(self._states.size_bytes(shard), is_awaited=is_awaited):
            self._sink.take(*of, captured(shard))
        else:
            self._sink.lend(*of, self._states[shard])

    def drop(self, step: int) -> None:
        self._due = {shard: due for shard, due in self._due.items() if due[0] != step}


@dataclass(frozen=True, eq=False)
class KeptBoundary:
    """A boundary tensor as its message describes it, and the tensors themselves."""

    message: Boundary
    tensors: Sequence[Tensor]

    @property
    def contribution(self) -> Contribution | None:
        """What came with a gradient of the micro-batch's loss: a task above counts it for its own blocks."""
        return self.message.contribution


class Boundaries:
    """Owns them from when they are made or come until their step is over. The first copy stays."""

    def __init__(self) -> None:
        self._kept: dict[BoundaryName, KeptBoundary] = {}

    def put(self, message: Boundary, tensors: Sequence[Tensor]) -> None:
        """Keep it, unless one of this name is here."""
        # The one that is here may be being read, by this member or by others, and the other has the same bits.
        self._kept.setdefault(message.name, KeptBoundary(message, tensors))

    def __getitem__(self, name: BoundaryName) -> KeptBoundary:
        return self._kept[name]

    def end_step(self, step: int) -> None:
        """Let go of what belongs to this step and to older ones."""
        # No member votes while it has tasks left: whoever holds the record knows that nobody reads these any more.
        self._kept = {name: kept for name, kept in self._kept.items() if name.step > step}
