"""The number of pieces in which shards travel to members that no other member waits for. Pure.

A link is one queue, so a boundary tensor waits for all that was queued before it. It may stand behind a piece, but not
behind a whole block.
"""

from __future__ import annotations

PIECE_BYTES = 1 << 20
"""Most bytes of a piece."""
STATE_PER_PARAMETER = 4
"""Most bytes of a state per byte of its masters: these, and three moments as AMSGrad has them."""


def parameter_pieces(size_bytes: int) -> int:
    """Return the number of pieces of a shard's parameters, which have `size_bytes`."""
    return max(1, -(-size_bytes // PIECE_BYTES))


def state_pieces(size_bytes: int) -> int:
    """Return the number of pieces of the whole state of a shard, whose masters have `size_bytes`."""
    return parameter_pieces(STATE_PER_PARAMETER * size_bytes)
