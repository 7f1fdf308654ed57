"""Streams of data that can only be read in order: who reads which place, and what has to be read again. Pure.

A job has a fixed number of streams. Micro-batch `m` of each step belongs to stream `m mod S`, so the place of every
micro-batch in its stream is known without reading. A member that takes a stream over restores the reader's state at a
mark that was committed, and reads from there up to the place. What another member had read ahead has no effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elastrain.base.arithmetic import MASK
from elastrain.errors import ConfigError
from elastrain.job.batch import check_sizes, sample_fingerprint


@dataclass(frozen=True, kw_only=True)
class StreamMark:
    """The state of a stream's reader at one place. It is a fact about the data, whichever member found it."""

    stream: int
    position: int
    """Micro-batches that the stream has given before."""
    state: str
    """The reader's state there, as JSON."""
    # A state that does not restore the place exactly would change the data silently.
    digest: str
    """Digest of the micro-batch that comes next, to compare after the state was restored."""


@dataclass(frozen=True, kw_only=True)
class StreamOrder:
    """The places of micro-batches in streams. Steps, micro-batches and streams count from 0."""

    streams: int
    global_batch_size: int
    micro_batch_size: int
    seed: int = 0
    drop_last: bool = False
    """True to leave out, in each epoch of a stream, the samples that do not fill a micro-batch."""

    def __post_init__(self) -> None:
        check_sizes(
            streams=self.streams, global_batch_size=self.global_batch_size, micro_batch_size=self.micro_batch_size
        )
        if self.streams > self.micro_batches:
            raise ConfigError(
                f"streams={self.streams}, but a step has only {self.micro_batches} micro-batches, so that some streams "
                "would never be read: use fewer streams or smaller micro-batches"
            )

    @property
    def micro_batches(self) -> int:
        """Micro-batches per step (M)."""
        return self.global_batch_size // self.micro_batch_size

    def stream_of(self, micro_batch: int) -> int:
        """Return the stream of a micro-batch. The first micro-batch of stream s in each step is s."""
        return micro_batch % self.streams

    def position(self, step: int, micro_batch: int) -> int:
        """Return the number of micro-batches that the stream gives before this one."""
        per_step = len(range(self.stream_of(micro_batch), self.micro_batches, self.streams))
        return step * per_step + micro_batch // self.streams

    def positions(self, step: int, micro_batch: int) -> range:
        """Return the numbers of the micro-batch's samples in its stream."""
        if not (0 <= micro_batch < self.micro_batches and step >= 0):
            raise ValueError(f"no micro-batch {micro_batch} in step {step}: there are {self.micro_batches} per step")
        start = self.position(step, micro_batch) * self.micro_batch_size
        return range(start, start + self.micro_batch_size)

    def epoch(self, step: int) -> int:
        """Raise ConfigError, because each stream has epochs of its own, of unknown length."""
        raise ConfigError("step.epoch is not known with streams, which have epochs of their own: count steps")

    def fingerprint(self, step: int, micro_batch: int) -> int:
        """Sum up fingerprints of the samples' places, mod 2**64. Sums over a step show if each was used once."""
        stream = self.stream_of(micro_batch)
        return sum(sample_fingerprint(stream, number) for number in self.positions(step, micro_batch)) & MASK

    def described(self) -> dict[str, Any]:
        """Return what decides the places, by name, for members to compare."""
        return {
            "streams": self.streams,
            "global batch size": self.global_batch_size,
            "micro-batch size": self.micro_batch_size,
            "drop_last": self.drop_last,
        }


@dataclass(frozen=True, kw_only=True)
class Way:
    """The way of a reader to a place."""

    mark: StreamMark | None
    """Mark at which a reader is opened; None: the start of the stream, or no reader is opened."""
    opens: bool
    """True if a new reader replaces the open one."""
    passes: int
    """Micro-batches that are read and dropped on the way."""


def way_to(target: int, at: int | None, mark: StreamMark | None) -> Way:
    """Decide how to come to the place `target` of a stream.

    Args:
        target: Place of the micro-batch that is needed.
        at: Place of the reader that is open here; None if none is.
        mark: Newest committed mark of the stream, if there is one.
    """
    start = mark.position if mark is not None and mark.position <= target else 0
    # A reader cannot go back: the same micro-batch may be needed again, for a check or after a loss. And if it has
    # fallen behind the mark, opening another one reads less.
    if at is not None and start <= at <= target:
        return Way(mark=None, opens=False, passes=target - at)
    return Way(mark=mark if start else None, opens=True, passes=target - start)


def newest(known: Mapping[int, StreamMark], committed: tuple[StreamMark, ...]) -> dict[int, StreamMark]:
    """Return the newest mark of each stream. A stream whose reader was lost in the step keeps the mark before."""
    marks = dict(known)
    for mark in committed:
        if mark.stream not in marks or mark.position > marks[mark.stream].position:
            marks[mark.stream] = mark
    return marks


def combine_marks(told: tuple[tuple[StreamMark, ...], ...]) -> tuple[StreamMark, ...]:
    """Combine the marks in the votes of a step, in rank order, into one mark of each stream."""
    marks: dict[int, StreamMark] = {}
    for mark in (mark for one in told for mark in one):
        marks.setdefault(mark.stream, mark)
    return tuple(marks[stream] for stream in sorted(marks))
