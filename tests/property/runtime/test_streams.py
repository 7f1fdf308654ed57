"""Streams under losses, joins and resumes at every point: each sample is used once, and planted bugs are found."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastrain.errors import ConfigError
from elastrain.job import streams
from elastrain.job.streams import StreamMark, StreamOrder, combine_marks
from elastrain.runtime.loader import stream_readers
from elastrain.runtime.loader.stream_readers import ReaderEndedError, StreamReaders


class Fake:
    """A reader that has read some micro-batches ahead. `buffer`: what its state forgets, like a shuffle buffer."""

    def __init__(self, stream: int, at: int, buffer: int = 0) -> None:
        self.stream, self.at, self.buffer, self.is_open = stream, at, buffer, True
        self.ahead = [f"{stream}:{at + i}" for i in range(3)]

    def state(self) -> str:
        return str(self.at + self.buffer)

    def next(self) -> str:
        assert self.is_open
        self.at += 1
        self.ahead.append(f"{self.stream}:{self.at + 2}")
        return self.ahead.pop(0)

    def close(self) -> None:
        self.is_open = False


class LosesAhead(Fake):
    """Planted: the state is behind what was read ahead."""

    def state(self) -> str:
        return str(self.at + len(self.ahead))


class StepBefore(Fake):
    """Planted: the state is that of the step before."""

    last = "0"

    def state(self) -> str:
        told, self.last = self.last, str(self.at)
        return told


class Dies(Fake):
    """A reader whose process ends now and then. `calls` counts over all readers."""

    calls = 0

    def next(self) -> str:
        Dies.calls += 1
        if Dies.calls % 53 == 0:  # reading up to any place takes fewer calls
            raise ReaderEndedError("the process of a stream")
        return super().next()


@dataclass
class Job:
    """Members that read the micro-batches of a job, and the marks that its commits have."""

    order: StreamOrder
    kind: Any = Fake
    buffer: int = 0
    told: list[str] = field(default_factory=list)
    passed: int = 0
    members: list[StreamReaders] = field(default_factory=list)
    used: list[str] = field(default_factory=list)

    def joins(self, marks: dict[int, StreamMark]) -> None:
        def opened(stream: int, mark: StreamMark | None, is_exact: bool) -> Any:
            return (
                self.kind(stream, int(mark.state) if mark else 0, self.buffer)
                if is_exact or mark is None
                else (self.kind(stream, mark.position, self.buffer))
            )

        member = StreamReaders(self.order, opened, digest=str, tell=self.told.append)
        member.start_from(marks)
        self.members.append(member)

    def step(self, step: int, draw: random.Random) -> None:
        """Compute a step, with losses at any point of it, then commit it."""
        results: dict[int, str] = {}
        marks = dict(self.members[0].marks)
        todo = list(range(self.order.micro_batches))
        draw.shuffle(todo)
        votes: dict[int, list[StreamMark]] = {}
        while todo:
            micro_batch = todo.pop()
            member = draw.choice(self.members)
            results[micro_batch] = member.read(step, micro_batch)
            votes.setdefault(id(member), []).extend(member.found())
            if len(self.members) > 1 and draw.random() < 0.15:  # a loss, with or without what it has computed
                self.members.remove(member)
                votes.pop(id(member))
                if draw.random() < 0.5:
                    todo += [m for m in results if m not in todo and draw.random() < 0.5]
            if draw.random() < 0.1:
                self.joins(marks)
        committed = combine_marks(tuple(tuple(told) for told in votes.values()))
        for member in self.members:
            member.committed(committed)
        self.used += [results[m] for m in range(self.order.micro_batches)]


def play(seed: int, **options: Any) -> Job:
    draw = random.Random(seed)
    micro_batches = draw.choice([1, 3, 4, 6])
    order = StreamOrder(
        streams=draw.randint(1, micro_batches), global_batch_size=2 * micro_batches, micro_batch_size=2, seed=1
    )
    job = Job(order, **options)
    job.joins({})
    for step in range(6):
        if draw.random() < 0.2:  # all are lost, and another number of members goes on from a checkpoint
            marks = dict(job.members[0].marks)
            job.members.clear()
            for _ in range(draw.randint(1, 3)):
                job.joins(marks)
        job.step(step, draw)
    return job


def expected(order: StreamOrder, steps: int) -> Iterator[str]:
    """Samples that one member reads that is never disturbed."""
    given = dict.fromkeys(range(order.streams), 0)
    for micro_batch in list(range(order.micro_batches)) * steps:
        yield f"{micro_batch % order.streams}:{given[micro_batch % order.streams]}"
        given[micro_batch % order.streams] += 1


def is_right(job: Job) -> bool:
    return job.used == list(expected(job.order, 6)) and not job.told


@given(st.integers(0, 1 << 30))
@settings(max_examples=300)
def test_each_sample_is_used_once_whatever_happens_to_members(seed: int) -> None:
    assert is_right(play(seed))


@given(st.integers(0, 1 << 30))
def test_a_state_without_the_shuffle_buffer_is_noticed_and_the_data_read_again(seed: int) -> None:
    job = play(seed, buffer=2)
    assert job.used == list(expected(job.order, 6))


@given(st.integers(0, 1 << 30))
def test_readers_whose_processes_end_lose_no_sample(seed: int) -> None:
    Dies.calls = 0
    job = play(seed, kind=Dies)
    assert job.used == list(expected(job.order, 6))
    assert len(job.told) == Dies.calls // 53


def test_a_reader_whose_process_ends_again_and_again_is_an_error() -> None:
    class Ends(Fake):
        def next(self) -> str:
            raise ReaderEndedError("the process of stream 0 has ended")

    order = StreamOrder(streams=1, global_batch_size=2, micro_batch_size=2)
    with pytest.raises(ReaderEndedError, match="stream 0"):
        StreamReaders(order, lambda stream, mark, is_exact: Ends(stream, 0), digest=str).read(0, 0)


def test_what_is_not_exact_is_told_once_for_each_stream_and_member() -> None:
    found = [told for seed in range(20) for told in play(seed, buffer=2).told]
    assert found
    assert all("does not restore the place" in told for told in found)


def found_by_seeds(**options: Any) -> bool:
    for seed in range(50):
        try:
            if not is_right(play(seed, **options)):
                return True
        except (ConfigError, AssertionError):
            return True
    return False


@pytest.mark.parametrize("kind", [LosesAhead, StepBefore])
def test_a_planted_reader_is_found(kind: type[Fake]) -> None:
    assert not found_by_seeds()
    assert found_by_seeds(kind=kind)


@pytest.mark.parametrize("bug", ["goes on from behind", "passes one too few", "mark of the step before"])
def test_a_planted_way_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def way_to(target: int, at: int | None, mark: StreamMark | None) -> streams.Way:
        if bug == "goes on from behind" and at is not None:
            return streams.Way(mark=None, opens=False, passes=max(target - at, 0))
        way = streams.way_to(target, at, mark)
        if bug == "passes one too few" and way.opens and way.passes:
            return replace(way, passes=way.passes - 1)
        if bug == "mark of the step before" and way.mark is not None:
            return replace(way, mark=None)
        return way

    monkeypatch.setattr(stream_readers, "way_to", way_to)
    assert found_by_seeds()


def test_data_that_comes_in_another_order_each_time_is_refused() -> None:
    order = StreamOrder(streams=1, global_batch_size=2, micro_batch_size=2)
    mark = StreamMark(stream=0, position=2, state="2", digest="another")
    member = StreamReaders(order, lambda stream, mark, is_exact: Fake(stream, 2), digest=str)
    member.start_from({0: mark})
    with pytest.raises(ConfigError, match="stream 0 gives other data than it did before at its micro-batch 2"):
        member.read(3, 0)


def test_a_reader_that_is_not_used_in_a_step_is_closed() -> None:
    opened: list[Fake] = []

    def open_reader(stream: int, mark: StreamMark | None, is_exact: bool) -> Fake:
        opened.append(Fake(stream, 0))
        return opened[-1]

    member = StreamReaders(StreamOrder(streams=2, global_batch_size=2, micro_batch_size=1), open_reader, digest=str)
    member.read(0, 0)
    member.read(0, 1)
    member.committed(tuple(member.found()))
    member.read(1, 1)
    member.committed(tuple(member.found()))
    assert [each.is_open for each in opened] == [False, True]


def test_streams_that_begin_alike_are_told() -> None:
    told: list[str] = []
    order = StreamOrder(streams=2, global_batch_size=2, micro_batch_size=1)
    member = StreamReaders(order, lambda stream, mark, is_exact: Fake(7, 0), digest=str, tell=told.append)
    for micro_batch in range(2):
        member.read(0, micro_batch)
    member.committed(tuple(member.found()))
    assert told == [told[0]]
    assert told[0].startswith("streams 0 and 1 begin with the same micro-batch")
