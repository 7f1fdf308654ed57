"""Which of the parameters that this member computes with are those of the committed step.

A member that computes some blocks only needs the parameters of those alone: `needed` is the one place that says which,
and the comparison of what was published, the loop and the vote all ask it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

NEVER = -2
"""Version of what was never there; the initial state's is -1, or the step of the checkpoint that it comes from."""


class Parameters:
    """Owns the version of each shard's parameters in the model."""

    def __init__(self, shards: int, step: int) -> None:
        self.versions = [NEVER] * shards
        """Per shard, the step after which its parameters stand."""
        self._step = step
        self._needed: Collection[int] = range(shards)
        self._missing: set[int] | None = None
        """Shards with another version than `_step`; None: to be counted anew. Asked for several times per event."""

    def needed(self) -> Collection[int]:
        """Shards whose parameters this member computes with, ascending: all, unless it has some blocks only."""
        return self._needed

    def need(self, shards: Iterable[int]) -> None:
        """From now on this member computes with these shards, ascending, and with no others."""
        # Versions stay: of shards that were published here it has those of this step, needed or not.
        self._needed = tuple(shards)
        self._missing = None

    def expect(self, step: int) -> None:
        """From now on the parameters of `step` are those that count."""
        self._step = step
        # Versions stay: what lies in the model is of the step before until new parameters are taken.
        self._missing = None

    def have(self, shard: int) -> None:
        """The shard's parameters of the expected step are in the model."""
        self.versions[shard] = self._step
        # Not counted anew: a publish of a thousand shards asks a thousand times.
        if self._missing is not None:
            self._missing.discard(shard)

    def lose(self, shard: int) -> None:
        """What is in the model of the shard is not to be computed with."""
        self.versions[shard] = NEVER
        self._missing = None

    def have_initial(self) -> None:
        """What this member has made or read is what the job starts with."""
        self.versions = [self._step] * len(self.versions)
        self._missing = None

    # Exactly this version: newer parameters than those of the committed step cannot be here before its record.
    def has(self, shard: int) -> bool:
        return self.versions[shard] == self._step

    def are_here(self) -> bool:
        if self._missing is None:
            self._missing = {shard for shard in self.needed() if not self.has(shard)}
        return not self._missing
