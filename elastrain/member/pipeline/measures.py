"""Seconds of blocks: what this member measures in its own tasks, and what the votes of all members have told.

Measurements decide nothing by themselves. They reach the planner, and a plan takes effect through a record only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from statistics import median

from elastrain import protocol as p
from elastrain.pipeline.actions import ActionKind
from elastrain.pipeline.planner.step_profile import BlockSeconds, Gauge, Measured

ToldSeconds = tuple[tuple[int, BlockSeconds], ...]
"""(block of the graph, seconds that the member takes for it)."""


class Measures:
    """The times of this member's blocks, and those that members of the view have told."""

    def __init__(self) -> None:
        self.told: dict[str, dict[int, BlockSeconds]] = {}
        """Member -> block of the graph -> seconds, as of its last votes."""
        self._now: dict[ActionKind, dict[int, list[float]]] = {}
        """Seconds of the open step, by kind of action and block."""
        self._gauges: dict[int, dict[ActionKind, Gauge]] = {}
        """Block -> kind -> the medians of the last steps."""
        self.begin()

    def note(self, event: p.Computed) -> None:
        """Note how long an action took."""
        task, took_s = event.action.task, event.took_s
        forward = self._now[ActionKind.FORWARD]
        if event.action.kind is ActionKind.FORWARD:
            for block, seconds in zip(task.blocks, took_s, strict=False):
                forward[block].append(seconds)
            return
        # One time for the whole task: it is divided among the blocks in proportion to their forwards.
        shares = {block: median(forward[block]) for block in task.blocks if forward[block]}
        whole_s = sum(shares.values())
        for block, share_s in shares.items() if took_s and whole_s else ():
            self._now[event.action.kind][block].append(took_s[0] * share_s / whole_s)

    def begin(self) -> None:
        """Take the medians of the step before into the gauges, and begin to measure another step."""
        seen = {block for kind in self._now.values() for block in kind}
        # What a member has not computed for a whole step may take another time by now.
        self._gauges = {block: self._gauges.get(block) or defaultdict(Gauge) for block in seen}
        for kind, blocks in self._now.items():
            for block, seconds in blocks.items():
                if seconds:
                    self._gauges[block][kind].add(median(seconds))
        self._now = {kind: defaultdict(list) for kind in ActionKind}

    def forget_view(self) -> None:
        """Forget what was told: every member tells it anew, because newcomers have heard nothing."""
        self.told = {}
        for gauges in self._gauges.values():
            for gauge in gauges.values():
                gauge.forget_told()

    def news(self) -> ToldSeconds:
        """Return the blocks whose seconds have changed by more than their noise. They count as told then."""
        return tuple(
            (block, _seconds(gauges))
            for block, gauges in sorted(self._gauges.items())
            # All gauges are asked, because each has to note what is told now.
            if {gauge.news() for gauge in gauges.values()} - {None}
        )

    def hear(self, member: str, told: ToldSeconds) -> bool:
        """Note what a member has told in its vote. Returns True if it told anything."""
        self.told.setdefault(member, {}).update(told)
        return bool(told)

    def of(self, held: Mapping[str, Collection[int]]) -> Measured:
        """Return member -> block -> seconds, for the blocks that each member holds now: others may be outdated."""
        told = {member: self.told.get(member, {}) for member in held}
        return {m: {block: s for block, s in its.items() if block in held[m]} for m, its in told.items() if its}


def _seconds(gauges: dict[ActionKind, Gauge]) -> BlockSeconds:
    """Return a block's seconds. A whole backward takes as long for its input as for its parameters."""
    forward_s, back_s, weight_s = (median(gauges[kind].recent or [0.0]) for kind in ActionKind)
    if weight_s == 0.0:
        back_s = weight_s = back_s / 2
    return BlockSeconds(forward_s=forward_s, input_gradient_s=back_s, weight_gradient_s=weight_s)
