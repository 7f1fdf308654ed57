"""What the frames of a communicator say: their kinds, each named once."""

from __future__ import annotations

import enum


class Kind(enum.IntEnum):
    PART = 0x0101  # of an operation: group, sequence, round, the sender's fence, its words; the tensor
    ABORT = 0x0102  # everything ended: the lost member, if any, and the reason
    FENCE = 0x0103  # the sender's fence, in its shared memory
    LETTER = 0x0104  # a tagged message: group, tag; the tensor
    BOARD = 0x0105  # of a group: the sender's boards, in its shared memory
