"""Which blocks of a model are on this member: those whose parameters have memory here, and values in it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from elastrain.errors import ConfigError
from elastrain.layout import Layout
from elastrain.pipeline.stubs.absent import ON_RANK_0
from elastrain.runtime.flats import ParameterMemory


class HeldBlocks:
    """Owns which values are still to come, and whether the loop has left the model partial."""

    def __init__(self, layout: Layout, readers: Mapping[int, Collection[int]], memory: ParameterMemory) -> None:
        """`readers`: by flat, the blocks that read it."""
        self._layout, self._readers, self._memory = layout, readers, memory
        self._awaited: set[int] = set()
        """Shards of blocks that came, and have no values yet."""
        self.are_left_partial = False
        """The loop is over, and no more blocks come, though not all are here."""

    def hold(self, flats: Collection[int]) -> None:
        """Have memory for these flats and no others; what is new there has no values yet."""
        before, shards = set(self._memory.flats), self._layout.shards
        # First: the main thread may ask at any moment what is here.
        new = {s.index for s in shards if s.flat in flats and s.flat not in before and s.numel}
        self._awaited = new | {shard for shard in self._awaited if shards[shard].flat in flats}
        self._memory.hold(flats)

    def came(self, shard: int) -> None:
        """The shard's values are written."""
        self._awaited.discard(shard)

    def coming(self) -> set[int]:
        """Flats with memory here whose values are still to come. For any thread."""
        return {self._layout.shards[shard].flat for shard in tuple(self._awaited)}

    def has(self, block: int) -> bool:
        """Whether all that the block reads is here: its memory, and its values."""
        here = self._memory.flats.keys() - self.coming()
        return all(flat in here for flat, readers in self._readers.items() if block in readers)

    def missing(self) -> str | None:
        """Name the first block that is absent, or has no values yet; None where the whole model is here."""
        # Asked once per block: meanwhile values may come from another thread.
        return next((block for number, block in enumerate(self._layout.blocks) if not self.has(number)), None)

    def leave(self) -> bool:
        """The loop is over, and no more blocks come. Returns whether that leaves the model partial."""
        self.are_left_partial = self.missing() is not None
        return self.are_left_partial

    def check_are_all(self, what: str) -> None:
        """Raises ConfigError, naming `what`, where a block is absent, or has no values yet."""
        missing = self.missing()
        if missing is None:
            return
        if self.are_left_partial:
            raise ConfigError(f"{what} needs all parameters: block {missing!r} is not on this member, {ON_RANK_0}")
        raise ConfigError(
            f"{what} needs all parameters, and this member of a pipeline does not have block {missing!r} now: use it "
            "behind the loop over job.steps(…), where rank 0 has all blocks, and every member that has room for them; "
            "in the loop there are step.loss and step.grad_norm, and job.checkpoint() writes everything"
        )
