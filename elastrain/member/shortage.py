"""The window without redundancy: which shards have fewer living holders than they should, and since which step."""

from __future__ import annotations

from elastrain.placement import Placement


class Shortage:
    """Owns the shards that are short of holders. Every member counts alike: it may be their primary next."""

    def __init__(self) -> None:
        self.since: dict[int, int] = {}
        """Shard -> the step that was open when it was first seen with too few holders."""

    def look(self, step: int, live: Placement, goal: Placement) -> None:
        """Compare who holds the shards with who should, while `step` is open."""
        short = [
            shard for shard, (now, want) in enumerate(zip(live, goal, strict=True)) if len(now.all) < len(want.all)
        ]
        # What was short before stays so since then, whatever view that was in: else joins would put off the deadline.
        self.since = {shard: self.since.get(shard, step) for shard in short}

    def is_overdue(self, shard: int, step: int) -> bool:
        """Whether `step` is not committed before the shard has its holders: it is the second since they were lost."""
        # One step is granted for copies that nobody waits for; two steps after a loss, the next one may come.
        return self.since.get(shard, step) < step
