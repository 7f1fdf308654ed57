"""Streams of a loader: shares, seeded draws, states, epochs, and data without a state, read by torchdata."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from elastrain.errors import ConfigError
from elastrain.job.streams import combine_marks
from elastrain.runtime.loader.loader import DataLoader

pytest.importorskip("torchdata", reason="the group integrations is not installed")


class Lines(IterableDataset[Any]):
    """Numbers 0 to size - 1, shared out as torch's loader processes do it, with a draw beside each. It has no state."""

    def __init__(self, size: int = 22) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        for i in range(info.id, self.size, info.num_workers):
            yield torch.tensor([i, random.random(), torch.rand(()).item()], dtype=torch.float64)


class Stateful(Lines):
    """The same with a state of its iterator. It notes what it reads."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        return Place(range(info.id, self.size, info.num_workers))


class Place:
    def __init__(self, rows: range) -> None:
        self.rows, self.at = rows, 0

    def __iter__(self) -> Place:
        return self

    def __next__(self) -> Any:
        if self.at == len(self.rows):
            raise StopIteration
        self.at += 1
        i = self.rows[self.at - 1]
        return torch.tensor([i, random.random(), torch.rand(()).item()], dtype=torch.float64)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Whole(IterableDataset[Any]):
    """The state belongs to the dataset, which forgets a buffer as the shuffle buffers of `datasets` do."""

    def __init__(self, forgets: int = 0) -> None:
        self.at, self.start, self.forgets = 0, 0, forgets

    def __iter__(self) -> Iterator[Any]:
        for i in range(self.start, 40):
            self.at = i + 1
            yield torch.tensor([float(i), 0.0])

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at + self.forgets}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["at"]


class Held(Lines):
    """Lines that come only while a file is not there."""

    def __init__(self, hold: Path) -> None:
        super().__init__()
        self.hold = hold

    def __iter__(self) -> Iterator[Any]:
        for each in super().__iter__():
            while self.hold.exists():
                time.sleep(0.02)
            yield each


def made(dataset: Any, told: list[str] | None = None, **options: Any) -> DataLoader:
    options = {"global_batch_size": 8, "micro_batch_size": 2, "streams": 2, "num_workers": 0, **options}
    loader = DataLoader(dataset, **options)
    loader.bind(seed=4)
    loader.start(0, lambda step: (), [].append if told is None else told.append)
    return loader


def steps(loader: DataLoader, first: int, last: int) -> list[Any]:
    """Read and commit whole steps."""
    found = []
    for step in range(first, last):
        found += [loader.get(step, m) for m in range(loader.micro_batches)]
        loader.committed(combine_marks((tuple(loader.marks_found()),)))
    return found


def state(loader: DataLoader) -> Any:
    (part,) = loader.carried().values()
    return part.state_dict()


def begin_from(loader: DataLoader, saved: Any) -> DataLoader:
    (part,) = loader.carried().values()
    part.load_state_dict(saved)
    return loader


def alike(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    "dataset",
    [Lines(), Stateful(), [Whole(), Whole()], [Whole(3), Whole(3)]],
    ids=["no state", "iterator", "dataset", "forgets"],
)
@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_resumes_at_every_step_give_what_an_undisturbed_reader_gives(dataset: Any, num_workers: int) -> None:
    loader = made(dataset, num_workers=num_workers)
    expected = steps(loader, 0, 7)
    loader.close()
    loader = made(dataset, num_workers=num_workers)
    found = []
    for step in range(7):  # each resume from the one before
        found += steps(loader, step, step + 1)
        saved = state(loader)
        loader.close()
        loader = begin_from(made(dataset, num_workers=num_workers), saved)
    loader.close()
    assert alike(found, expected)


def test_a_stream_for_each_micro_batch_gives_each_sample_once_in_an_epoch() -> None:
    rows = torch.cat(steps(made(Lines(24)), 0, 3))[:, 0]
    assert sorted(rows.tolist()) == list(range(24))


def test_draws_depend_on_stream_and_sample_and_not_on_the_process() -> None:
    here, apart = made(Lines()), made(Lines(), num_workers=1)
    assert alike(steps(here, 0, 2), steps(apart, 0, 2))
    apart.close()
    before = random.getstate(), torch.get_rng_state()
    steps(here, 2, 3)
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


def test_an_epoch_is_followed_by_the_next_with_other_draws() -> None:
    rows = torch.cat(steps(made(Lines(8), streams=1), 0, 2))
    assert rows[:8, 0].tolist() == rows[8:, 0].tolist() == list(range(8))
    assert not torch.equal(rows[:8, 1], rows[8:, 1])


def test_drop_last_leaves_out_what_fills_no_micro_batch() -> None:
    rows = torch.cat(steps(made(Lines(7), streams=1, drop_last=True), 0, 2))[:, 0]
    assert rows.tolist() == [0, 1, 2, 3, 4, 5] * 2 + [0, 1, 2, 3]


def test_data_without_a_state_says_how_far_it_is_read_again_and_that_it_has_none() -> None:
    told: list[str] = []
    loader = made(Lines(200), told)
    steps(loader, 0, 3)
    assert told == [told[0]]
    assert told[0].startswith("stream 0 of 2 (Lines) has neither a state")
    later: list[str] = []
    steps(begin_from(made(Lines(200), later), state(loader)), 3, 4)
    assert later == [f"stream {s} of 2 is read again up to its place, 8 samples of its epoch" for s in range(2)]


def test_a_state_that_forgets_samples_is_noticed_and_told() -> None:
    told: list[str] = []
    loader = made([Whole(3), Whole(3)])
    steps(loader, 0, 3)
    steps(begin_from(made([Whole(3), Whole(3)], told), state(loader)), 3, 4)
    assert "stream 0: the state of its dataset does not restore the place of its micro-batch 4" in told[0]


def test_streams_that_read_the_same_data_are_told() -> None:
    told: list[str] = []
    steps(made(Whole(), told), 0, 1)
    assert told[0].startswith("streams 0 and 1 begin with the same micro-batch: does each read a share")


def test_the_process_of_a_stream_sees_one_machine_and_ends_with_the_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    class Seen(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            while True:
                yield {"pid": os.getpid(), "size": int(os.environ["WORLD_SIZE"])}

    monkeypatch.setenv("WORLD_SIZE", "2")
    loader = made(Seen(), num_workers=1)
    batch = loader.get(0, 0)
    assert batch["size"].tolist() == [1, 1]
    assert batch["pid"][0].item() != os.getpid()
    loader.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int(batch["pid"][0]), 0)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["between two steps", "before it is ready", "while it is waited for"])
def test_the_process_of_a_stream_that_is_killed_is_started_again_and_no_sample_is_missing(
    moment: str, tmp_path: Path
) -> None:
    expected, told = steps(made(Lines()), 0, 4), list[str]()
    data = Held(tmp_path / "hold")
    loader = made(data, told, num_workers=1)
    found = steps(loader, 0, 1)
    if moment != "before it is ready":
        found += steps(loader, 1, 2)
    victim = loader._source.readers._readers[0][0]._loader._iterator._workers[0].pid
    if moment == "while it is waited for":
        data.hold.touch()
        threading.Timer(1.0, lambda: (os.kill(victim, signal.SIGKILL), data.hold.unlink())).start()
    else:
        os.kill(victim, signal.SIGKILL)
        time.sleep(0.2)  # torch's handler of SIGCHLD would raise here
    found += steps(loader, len(found) // 4, 4)
    loader.close()
    assert alike(found, expected)
    assert sum("is started again, and reads on from the last commit" in each for each in told) == 1


@pytest.mark.slow
def test_a_stream_whose_process_always_ends_is_an_error_that_says_so() -> None:
    class Ends(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            os._exit(3)

    loader = made(Ends(), num_workers=1)
    with pytest.raises(RuntimeError, match="stream 0"):
        loader.get(0, 0)
    loader.close()


@pytest.mark.slow
def test_a_reader_that_is_busy_is_closed_soon(tmp_path: Path) -> None:
    data = Held(tmp_path / "hold")
    loader = made(data, num_workers=1)
    loader.get(0, 0)
    data.hold.touch()
    loader.get(0, 0 + 2)
    begun_s = time.monotonic()
    loader.close()
    assert time.monotonic() - begun_s < 3.0


@pytest.mark.parametrize(
    ("dataset", "options", "sentence"),
    [
        (Lines(), {"streams": None}, "data that can only be read in order needs streams="),
        (Lines(), {"streams": 0}, "streams must be a whole number of at least 1; got 0"),
        (Lines(), {"streams": 5}, "a step has only 4 micro-batches"),
        (Lines(), {"num_workers": 2}, "each stream is read by one process"),
        (Lines(), {"sampler": [1]}, "sampler chooses samples by index, but streams=2"),
        (Lines(), {"shuffle": True}, "shuffle=True chooses samples by index"),
        ((i for i in range(9)), {}, "which can be read only once"),
        (range(9), {}, "range is map-style"),
        ([Lines(), Lines(), Lines()], {}, "3 datasets were given for streams=2"),
        ([Lines()], {}, "1 datasets were given for streams=2"),
        (3, {}, "an object whose iter"),
    ],
)
def test_what_is_no_stream_is_refused(dataset: Any, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        made(dataset, **options)


def test_a_stream_without_samples_is_refused() -> None:
    with pytest.raises(ConfigError, match="stream 1 of 2 has 0 samples in epoch 0"):
        steps(made(Lines(1)), 0, 1)


def test_streams_have_no_length() -> None:
    with pytest.raises(TypeError, match="count steps"):
        len(made(Lines()))


def test_a_state_from_the_training_process_is_restored_in_a_process_of_its_own() -> None:
    dataset = [Whole(), Whole()]
    loader = made(dataset)
    steps(loader, 0, 2)
    apart = begin_from(made(dataset, num_workers=1), state(loader))
    assert alike(steps(apart, 2, 4), steps(loader, 2, 4))
    apart.close()


def test_a_stateful_dataset_that_cannot_be_copied_is_refused() -> None:
    dataset = Whole()
    dataset.rows = (i for i in range(3))  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"Whole cannot be copied .* make what cannot be copied in its __iter__"):
        steps(made(dataset), 0, 1)
