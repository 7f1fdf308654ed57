"""Keys of the random streams: 63-bit numbers out of the job's seed and of what is drawn for. Pure values only.

A key never depends on who computes, so that any member draws the same numbers.
"""

from __future__ import annotations

from hashlib import blake2b
from struct import pack


def block_key(seed: int, step: int, micro_batch: int, block: str) -> int:
    """For what a block's forward draws in one micro-batch. `""` stands for everything outside of named blocks."""
    return _key(b"block", pack("<qqq", _int64(seed), step, micro_batch) + block.encode())


def sample_key(seed: int, data_epoch: int, sample: int) -> int:
    """For what a dataset draws while it makes one sample."""
    return _key(b"sample", pack("<qqq", _int64(seed), data_epoch, sample))


def collate_key(seed: int, step: int, micro_batch: int) -> int:
    """For what `collate_fn` draws while it makes one micro-batch."""
    return _key(b"collate", pack("<qqq", _int64(seed), step, micro_batch))


def _int64(seed: int) -> int:
    """Any seed as a signed 64-bit number, as torch takes them."""
    return ((seed + (1 << 63)) & ((1 << 64) - 1)) - (1 << 63)


def _key(kind: bytes, message: bytes) -> int:
    return int.from_bytes(blake2b(message, digest_size=8, person=kind).digest(), "little") >> 1
