"""Messages of moves of blocks between members of pipelines."""

from __future__ import annotations

from dataclasses import dataclass


# Sent after all publishes that members wait for, and in pieces, because boundary tensors go by the same link.
@dataclass(frozen=True, kw_only=True)
class ShadowPiece:
    """A piece of a shard's parameters after `step`, for a shadow. It need not be read."""

    step: int
    shard: int
    part: tuple[int, int]
    """The piece's number, and the number of pieces. They are equally large up to one element."""
