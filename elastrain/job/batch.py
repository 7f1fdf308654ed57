"""The order of the samples, and the keys of all random streams: pure functions of the job's spec.

Samples come from the endless concatenation of the epochs' permutations, one global batch at a time. So each sample is
used exactly once per epoch, whatever the remainder. Each sample is computed by its index: there is no dataset, no
random state, and no table in memory. A key is a 63-bit number made of the job's seed and the purpose. It never depends
on which member computes, so any member draws the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from struct import pack

from elastrain.base.arithmetic import GOLDEN, MASK, mix
from elastrain.base.resume import SKIPPED
from elastrain.errors import ConfigError

_ROUNDS = 6


@dataclass(frozen=True, kw_only=True)
class DataOrder:
    """The order of the samples. Steps and micro-batches count from 0; batch sizes are in samples."""

    dataset_size: int
    global_batch_size: int
    micro_batch_size: int
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    """True to leave out, in each epoch, the samples that do not fill a global batch."""
    listed: Sequence[int] | None = field(default=None, repr=False)
    """The samples of each epoch in their order, as a sampler has listed them; None: all samples of the dataset."""
    behind: int = 0
    """Steps of an earlier job, whose samples are used already: step 0 goes on behind them."""

    def __post_init__(self) -> None:
        check_sizes(
            dataset_size=self.dataset_size,
            global_batch_size=self.global_batch_size,
            micro_batch_size=self.micro_batch_size,
        )
        if not self.epoch_size:
            raise ConfigError(
                f"drop_last=True leaves nothing of an epoch of {self._listed_size} samples, because they do not fill a "
                f"global batch of {self.global_batch_size}: choose drop_last=False or a smaller global batch"
            )

    @property
    def micro_batches(self) -> int:
        """Micro-batches per step (M)."""
        return self.global_batch_size // self.micro_batch_size

    @property
    def epoch_size(self) -> int:
        """Samples that an epoch uses."""
        return self._listed_size - (self._listed_size % self.global_batch_size if self.drop_last else 0)

    @property
    def steps_per_epoch(self) -> int:
        """Steps that it takes to use every sample of an epoch once, rounded up."""
        return -(-self.epoch_size // self.global_batch_size)

    def epoch(self, step: int) -> int:
        """Return the number of the epoch that the step's first sample belongs to."""
        return (self.behind + step) * self.global_batch_size // self.epoch_size

    def described(self) -> dict[str, int | str | bool]:
        """Return what decides the order besides the seed, by name, for members to compare."""
        found: dict[str, int | str | bool] = {
            "dataset size": self.dataset_size,
            "global batch size": self.global_batch_size,
            "micro-batch size": self.micro_batch_size,
            "shuffle": self.shuffle,
        }
        if self.drop_last:
            found["drop_last"] = True
        if self.behind:
            found[SKIPPED] = self.behind
        if self.listed is not None:
            found["order of the sampler"] = blake2b(repr(tuple(self.listed)).encode(), digest_size=8).hexdigest()
        return found

    def positions(self, step: int, micro_batch: int) -> range:
        """Return the micro-batch's positions in the endless concatenation of the epochs."""
        if not (0 <= micro_batch < self.micro_batches and step >= 0):
            raise ValueError(f"no micro-batch {micro_batch} in step {step}: there are {self.micro_batches} per step")
        # Global batches cut the concatenation, not the epoch. So no remainder is dropped, and no step is smaller.
        start = (self.behind + step) * self.global_batch_size + micro_batch * self.micro_batch_size
        return range(start, start + self.micro_batch_size)

    def samples(self, step: int, micro_batch: int) -> tuple[tuple[int, int], ...]:
        """Return `(data epoch, sample index)` of each sample, in order."""
        return tuple(self._sample(position) for position in self.positions(step, micro_batch))

    def fingerprint(self, step: int, micro_batch: int) -> int:
        """Sum up the samples' fingerprints, mod 2**64.

        Sums over all micro-batches show if each sample was used once.
        """
        return sum(sample_fingerprint(epoch, sample) for epoch, sample in self.samples(step, micro_batch)) & MASK

    def _sample(self, position: int) -> tuple[int, int]:
        epoch, index = divmod(position, self.epoch_size)
        if self.listed is not None:
            return epoch, self.listed[index]
        # Mixed twice, so that seed 1 in epoch 0 is not seed 0 in epoch 1.
        key = mix(self._seed_key ^ mix(epoch + GOLDEN))
        return epoch, permuted(index, self.dataset_size, key) if self.shuffle else index

    @property
    def _listed_size(self) -> int:
        return self.dataset_size if self.listed is None else len(self.listed)

    @cached_property
    def _seed_key(self) -> int:
        return mix(self.seed)


def check_sizes(*, global_batch_size: int, micro_batch_size: int, **others: int) -> None:
    """Raise ConfigError unless all are whole numbers from 1 on, and micro-batches fill the global batch."""
    sizes = {**others, "global_batch_size": global_batch_size, "micro_batch_size": micro_batch_size}
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{name} must be a whole number of at least 1; got {value!r}")
    # A shorter last micro-batch would need its own scale and its own kernels, and so give other bits.
    if global_batch_size % micro_batch_size:
        raise ConfigError(
            f"global_batch_size={global_batch_size} is not a multiple of micro_batch_size={micro_batch_size}: choose "
            "sizes that divide"
        )


def sample_fingerprint(data_epoch: int, sample: int) -> int:
    """Return the term that one use of a sample adds to the fingerprint: 0..2**64-1."""
    # The epoch is part of it. Else a sample used twice in one epoch and never in the next would look right.
    return mix(mix(data_epoch + GOLDEN) + sample)


def permuted(index: int, size: int, key: int) -> int:
    """Return the place of `index` in a permutation of `0..size-1` that the 64-bit key chooses.

    A balanced Feistel network on the next even number of bits. Results outside of the range are sent through again
    ("cycle walking"; Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002), in less than four passes on
    average.
    """
    # Computed per index: a stored permutation of a large data set would take memory, and newcomers would need a copy.
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    half_mask = (1 << half_bits) - 1
    while True:
        left, right = index >> half_bits, index & half_mask
        for round_ in range(_ROUNDS):
            left, right = right, left ^ (mix(key + round_ * GOLDEN + right) & half_mask)
        index = left << half_bits | right
        if index < size:
            return index


def block_key(seed: int, step: int, micro_batch: int, block: str, entry: int = 0, *, aside: bool = False) -> int:
    """Return the key of a block's random draws in one micro-batch. Block `""` is all code outside of named blocks.

    entry: number of times that the micro-batch has entered the block before.
    aside: True for an entry outside of training, such as an evaluation.
    """
    # One key per entry, not one per micro-batch: a recomputation in backward enters the block alone, and has to draw
    # the same mask whatever was drawn in between. The first entry's salt of zeros has the same effect as no salt.
    message = pack("<qqq", _int64(seed), step, micro_batch) + block.encode()
    return _key(b"block", message, salt=pack("<QQ", entry, aside))


def sample_key(seed: int, data_epoch: int, sample: int) -> int:
    """Return the key of a dataset's random draws for one sample."""
    # By sample and not by micro-batch, so that the batch size does not change how a sample is augmented.
    return _key(b"sample", pack("<qqq", _int64(seed), data_epoch, sample))


def collate_key(seed: int, step: int, micro_batch: int) -> int:
    """Return the key of the random draws of `collate_fn` for one micro-batch."""
    return _key(b"collate", pack("<qqq", _int64(seed), step, micro_batch))


def stream_key(seed: int, stream: int, number: int, purpose: int = 0) -> int:
    """Return the key of the random draws for sample `number` of a stream, or of another thing that `purpose` counts."""
    return _key(b"stream", pack("<qqq", _int64(seed), stream, number), salt=pack("<Q", purpose))


def _int64(seed: int) -> int:
    """Reduce any seed to a signed 64-bit number, as torch does."""
    return ((seed + (1 << 63)) & ((1 << 64) - 1)) - (1 << 63)


def _key(kind: bytes, message: bytes, salt: bytes = b"") -> int:
    # A cryptographic hash, so that neighbouring steps and micro-batches get unrelated streams. The kind separates uses
    # of the same numbers. Without its last bit the key fits all generators, also those that take signed seeds.
    return int.from_bytes(blake2b(message, digest_size=8, person=kind, salt=salt).digest(), "little") >> 1
