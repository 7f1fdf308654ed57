"""The readers of the streams that this member serves: opened at committed marks, moved forward, closed when not used.

No processes and no libraries: `stream_shares.py` opens readers. The simulation of streams uses this class as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from elastrain.errors import ConfigError
from elastrain.job.streams import StreamMark, StreamOrder, newest, way_to

TRIES = 3
"""Number of times in a row that the process of a reader may end at one micro-batch."""


class ReaderEndedError(RuntimeError):
    """The process of a reader has ended by itself, or was killed."""


class OrderedReader(Protocol):
    """A reader of one stream. It gives the stream's micro-batches in order, without an end."""

    def state(self) -> str:
        """Return the state in front of the micro-batch that `next` gives, whatever was read ahead."""
        ...

    def next(self) -> Any:
        """Return the next micro-batch."""
        ...

    def close(self) -> None:
        """Drop all that was read ahead."""
        ...


Opener = Callable[[int, StreamMark | None, bool], OrderedReader]
"""`(stream, mark, is_exact)` -> reader at the mark, or at the start. Not `is_exact`: it must not trust the data's own
state, and reads the data again up to the mark."""


class _InexactError(Exception):
    """The micro-batch behind a mark is another one than it was."""


class StreamReaders:
    """The open readers of a member, and the newest committed mark of each stream."""

    def __init__(
        self,
        order: StreamOrder,
        open_reader: Opener,
        digest: Callable[[Any], str],
        tell: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self._order, self._open, self._digest, self._tell = order, open_reader, digest, tell
        self._marks: dict[int, StreamMark] = {}
        self._readers: dict[int, tuple[OrderedReader, int]] = {}
        """Stream -> reader, and the micro-batches that it or another reader has given before."""
        self._used: set[int] = set()
        """Streams that were read since the last commit."""
        self._found: list[StreamMark] = []
        """Marks that this member has found and not told yet."""
        self._inexact: set[int] = set()
        """Streams whose states do not restore their places."""

    def read(self, step: int, micro_batch: int) -> Any:
        """Return a micro-batch. A reader whose process has ended is opened again at the last commit.

        Raises:
            ConfigError: The stream gives other data than it did before.
            ReaderEndedError: The reader's process has ended `TRIES` times.
        """
        stream, ended = self._order.stream_of(micro_batch), 0
        self._used.add(stream)
        target, first = self._order.position(step, micro_batch), self._order.position(step, stream)
        while True:
            try:
                return self._read_up(stream, target, first)
            except _InexactError:
                self._drop(stream)
                self._distrust(stream)
            except ReaderEndedError as error:
                self._drop(stream)
                ended += 1
                if ended == TRIES:
                    raise
                self._tell(f"{error}: it is started again, and reads on from the last commit")
            except BaseException:  # the reader may have gone on
                self._drop(stream)
                raise

    def found(self) -> list[StreamMark]:
        """Return the marks that were found since the last call."""
        found, self._found = self._found, []
        return found

    def committed(self, marks: tuple[StreamMark, ...]) -> None:
        """Take the marks of a commit, and close the readers of streams that this member did not read in the step."""
        self._marks = newest(self._marks, marks)
        first: dict[str, int] = {}
        for mark in marks:
            same = first.setdefault(mark.digest, mark.stream)
            if same != mark.stream and not mark.position and mark.stream in self._used:
                self._tell(
                    f"streams {same} and {mark.stream} begin with the same micro-batch: does each read a share of its "
                    "own, by torch.utils.data.get_worker_info() (id: the stream, num_workers: their number)?"
                )
        for stream in [stream for stream in self._readers if stream not in self._used]:
            self._drop(stream)
        self._used.clear()

    @property
    def marks(self) -> Mapping[int, StreamMark]:
        """The newest committed mark of each stream."""
        return self._marks

    def start_from(self, marks: Mapping[int, StreamMark]) -> None:
        """Replace all marks, and close all readers."""
        self.close()
        self._marks = dict(marks)

    def close(self) -> None:
        """Close all readers."""
        for stream in list(self._readers):
            self._drop(stream)

    def _read_up(self, stream: int, target: int, first: int) -> Any:
        mark = self._marks.get(stream)
        reader, at = self._readers.get(stream, (None, None))
        way = way_to(target, at, mark)
        if reader is None or way.opens:
            self._drop(stream)
            reader, at = self._open(stream, way.mark, stream not in self._inexact), target - way.passes
        assert at is not None and at <= target
        for position in range(at, target + 1):
            state = reader.state() if position == first else ""
            self._readers[stream] = reader, position
            try:
                batch = reader.next()
            except ReaderEndedError:
                raise
            except Exception as error:
                if way.mark is None or position > at or stream in self._inexact:
                    raise
                raise _InexactError from error  # a state that its own library cannot read
            self._readers[stream] = reader, position + 1
            if way.mark is not None and position == way.mark.position and self._digest(batch) != way.mark.digest:
                raise _InexactError
            if position == first:
                told = self._digest(batch)
                self._found.append(StreamMark(stream=stream, position=position, state=state, digest=told))
        return batch

    def _distrust(self, stream: int) -> None:
        """Note that a state has not restored its place. Raises ConfigError if no state was used."""
        place = self._marks[stream].position
        if stream in self._inexact:
            raise ConfigError(
                f"stream {stream} gives other data than it did before at its micro-batch {place}: its data must come "
                "in the same order each time that it is read, so seed what shuffles it"
            )
        self._inexact.add(stream)
        self._tell(
            f"stream {stream}: the state of its dataset does not restore the place of its micro-batch {place} (a "
            "shuffle buffer is not part of it, for example), so the data is read again up to there"
        )

    def _drop(self, stream: int) -> None:
        if (known := self._readers.pop(stream, None)) is not None:
            known[0].close()
