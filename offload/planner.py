"""Remembers what the last pass showed, and asks the policy again when that no longer holds. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from elastrain.offload import policy
from elastrain.offload.stats import PassProfile, Path

# A plan that spills nothing measures nothing: every so many passes one storage leaves, or a drive that has recovered
# would never be used again.
PROBE_EVERY_PASSES = 8


class SpillPlan(Protocol):
    """What a manager asks: what leaves when it is saved, and in which order backward will ask for it.

    `reads_ahead` False: what has left comes back when it is asked for, or when the plan's owner says so.
    """

    reason: str
    last: PassProfile | None
    reads_ahead: bool

    def spills(self, index: int) -> bool: ...

    def turns(self, count: int) -> Sequence[int]: ...

    def pass_ended(self, profile: PassProfile, device_bytes_per_s: float) -> None: ...

    def set_limit(self, limit_bytes: int) -> None: ...


class Planner:
    """How much of a pass to spill. Until a whole pass was seen: everything, since nothing is known."""

    reads_ahead = True

    def __init__(self, limit_bytes: int | None) -> None:
        self._limit_bytes = limit_bytes
        self._amount: policy.Amount | None = None
        self._basis: policy.Basis | None = None
        self.reason = "no pass was measured yet: everything is spilled"
        self.last: PassProfile | None = None
        self._passes = 0
        self._turns: tuple[int, ...] = ()

    def spills(self, index: int) -> bool:
        """Tell whether the storage that is saved as number `index` of a pass leaves at once."""
        return self._amount is None or index < self._amount.count or (index == 0 and self._probes())

    def _probes(self) -> bool:
        """Tell whether this pass measures the drive although nothing would leave."""
        # Under a limit there is no need: where nothing is spilled, everything fits.
        return self._limit_bytes is None and self._passes % PROBE_EVERY_PASSES == PROBE_EVERY_PASSES - 1

    def turns(self, count: int) -> Sequence[int]:
        """The order in which backward will ask for the storages of a pass: as in the last one, if it saved as many."""
        return self._turns if len(self._turns) == count else range(count)

    def pass_ended(self, profile: PassProfile, device_bytes_per_s: float) -> None:
        """Plan anew if the pass differs from the one that the plan was made of."""
        # An evaluation has no backward, and says nothing of how long a step takes.
        if all(each.path is Path.UNUSED for each in profile.lifetimes):
            return
        self.last = profile
        self._passes += 1
        self._turns = policy.turns([each.needed_s for each in profile.lifetimes])
        basis = policy.Basis(
            forward_s=profile.forward_s,
            total_bytes=profile.saved_bytes,
            count=len(profile.lifetimes),
            device_bytes_per_s=device_bytes_per_s,
        )
        why = "the first pass was measured" if self._basis is None else policy.changed(self._basis, basis)
        if why is None:
            return
        self._basis = basis
        self._choose(why)

    def set_limit(self, limit_bytes: int) -> None:
        """Another limit: choose again from the pass that the present amount was made of."""
        if limit_bytes == self._limit_bytes:
            return
        self._limit_bytes = limit_bytes
        if self._basis is not None:
            self._choose("the limit was changed")

    def _choose(self, why: str) -> None:
        assert self.last is not None and self._basis is not None
        self._amount = policy.choose_amount(
            [policy.Saved(size_bytes=each.size_bytes, saved_s=each.saved_s) for each in self.last.lifetimes],
            forward_s=self._basis.forward_s,
            device_bytes_per_s=self._basis.device_bytes_per_s,
            limit_bytes=self._limit_bytes,
        )
        self.reason = f"{why}: {self._amount.reason}"
