"""Makes the keys of the random streams: 63-bit numbers out of the job's seed and of what is drawn for.

A key never depends on who computes, so that any member draws the same numbers. Pure values only.
"""

from __future__ import annotations

from hashlib import blake2b
from struct import pack


def block_key(seed: int, step: int, micro_batch: int, block: str, entry: int = 0, *, aside: bool = False) -> int:
    """Key what a block's forward draws in one micro-batch; the block `""` is everything outside of named blocks.

    entry: how often the micro-batch has entered the block before. aside: an entry that is not one of the training's.
    """
    # One key per entry, and not one per micro-batch: a recomputation in backward enters the block alone, and has to
    # draw the same mask whatever was drawn in between.
    # A salt of zeros, that of the first entry, is none.
    message = pack("<qqq", _int64(seed), step, micro_batch) + block.encode()
    return _key(b"block", message, salt=pack("<QQ", entry, aside))


def sample_key(seed: int, data_epoch: int, sample: int) -> int:
    """Key what a dataset draws while it makes one sample."""
    # Of the sample and not of the micro-batch, so that batch sizes do not decide how a sample is augmented.
    return _key(b"sample", pack("<qqq", _int64(seed), data_epoch, sample))


def collate_key(seed: int, step: int, micro_batch: int) -> int:
    """Key what `collate_fn` draws while it makes one micro-batch."""
    return _key(b"collate", pack("<qqq", _int64(seed), step, micro_batch))


def _int64(seed: int) -> int:
    """Bring any seed into a signed 64-bit number, as torch does."""
    return ((seed + (1 << 63)) & ((1 << 64) - 1)) - (1 << 63)


def _key(kind: bytes, message: bytes, salt: bytes = b"") -> int:
    # A cryptographic hash: neighbouring steps and micro-batches must not get related streams. The kind separates uses
    # of the same numbers; without its last bit the key fits all generators, those that take signed seeds, too.
    return int.from_bytes(blake2b(message, digest_size=8, person=kind, salt=salt).digest(), "little") >> 1
