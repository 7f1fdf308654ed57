"""Changes of holders in a job on a device: gradients' memory that is given back, and states that come back.

The engine's thread uses it. `elastrain.memory.coming_back` decides.
"""

from __future__ import annotations

from dataclasses import replace

from elastrain.job.placement import Placement
from elastrain.memory.coming_back import ReturnProgress, are_in_place, coming_back, staying_away
from elastrain.memory.held_shards import Held
from elastrain.memory.member_account import MemberAccount
from elastrain.memory.memory_budget import Fit, Measured
from elastrain.runtime.memory.device_meter import DeviceMeter
from elastrain.runtime.tensors.executor import Executor


class ReturningStates:
    """The member's states outside of the device, from a change of holders until they have come back."""

    def __init__(self, executor: Executor, meter: DeviceMeter) -> None:
        self.outside: frozenset[int] = frozenset()
        """Shards whose states are outside, if this member is their primary."""
        self.has_news = False
        """True if a decision is to be carried out, whatever it says about activations."""
        self._executor = executor
        self._meter = meter
        self._progress = ReturnProgress()

    def begin_view(self, account: MemberAccount) -> int:
        """Free the gradients' memory that a new plan does not need. Returns the bytes that stay besides its own."""
        self._progress = ReturnProgress()
        self._meter.mark()
        self._executor.trim(account.slots)
        return self._surplus_bytes(account)

    def in_place(self, account: MemberAccount, placements: tuple[Placement, Placement]) -> MemberAccount | None:
        """Return the account once all shards have the holders of the view, or None before that, and afterwards.

        placements: holders by the commit that is being carried out, and those to come.
        """
        self._progress = self._progress.measured(is_in_place=are_in_place(*placements))
        # The commit that puts them in place is carried out after this: until the next one their states are still here.
        if not self._progress.clean_steps or are_in_place(*account.placements):
            return None
        self.has_news = True
        self._executor.trim(account.slots)
        return replace(account, placements=placements)

    def gradients_bytes(self, account: MemberAccount) -> int:
        """Return the bytes of gradients under a plan, with memory that is not given back yet."""
        return account.gradients_bytes + self._surplus_bytes(account)

    def away_bytes(self, account: MemberAccount) -> int:
        """Return the bytes of this member's states that are outside."""
        return sum(each.leaves_bytes for each in account.held if each.shard in self.outside)

    def candidates(self, held: tuple[Held, ...], fit: Fit, last: Fit | None) -> tuple[Held, ...]:
        """Return the shards among which a decision chooses those outside. `last`: the one before it in the view."""
        # Where no more leaves than before, no other state takes the place of one that is outside.
        if last is None or fit.shards_on_disk_bytes > last.shards_on_disk_bytes:
            return held
        return tuple(each for each in held if each.shard in self.outside)

    def carried_out(self, outside: frozenset[int]) -> None:
        """Note the shards whose states are outside by the decision that was carried out."""
        self.outside, self.has_news = outside, False

    def decided(self, limit_bytes: int, fit: Fit, measured: Measured, *, is_first: bool) -> Fit:
        """Return the decision after a step: states come back once in a view, and only by measurement.

        Args:
            limit_bytes: The memory limit.
            fit: The estimated decision.
            measured: The step.
            is_first: True if activations were measured for the first time, which states had left for.
        """
        if self._progress.is_due() and measured.kept_to.shards_on_disk_bytes:
            back = coming_back(limit_bytes, measured)
            if back is not None:
                self._progress = replace(self._progress, is_over=True)
                self.has_news = True
                return back
        return fit if is_first else staying_away(fit, measured.kept_to)

    def _surplus_bytes(self, account: MemberAccount) -> int:
        slots_bytes = self._executor.model.gradients.nbytes
        return account.surplus_bytes(slots_bytes, self._executor.gradients_bytes() - slots_bytes)
