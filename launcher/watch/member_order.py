"""Orders of the members on the screen."""

from __future__ import annotations

from typing import Any

from elastrain.launcher.watch.now import State, member_rows

ORDERS = ("rank", "node", "micro_batch_s", "memory_bytes", "micro_batches")
"""Names of fields of a member. Ranks and nodes rise; of times, memory and shares the largest comes first."""


def sorted_rows(state: State, order: str) -> list[tuple[dict[str, Any], tuple[str, ...]]]:
    """Return each member with its row, in this order. Members without a value come last."""
    rows = list(zip(state["members"], member_rows(state), strict=True))
    known = [each for each in rows if each[0][order] is not None]
    unknown = [each for each in rows if each[0][order] is None]
    return sorted(known, key=lambda each: each[0][order], reverse=order not in ("rank", "node")) + unknown
