"""A loader of torch in a job: the samples of the job's own loader, or a sentence that names what cannot be kept."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import elastrain
from elastrain.errors import ConfigError


class Squares:
    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.stack([torch.tensor(float(i)), torch.rand(())])


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(24))


class OwnLoop(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter([])


def read(loader: elastrain.DataLoader, steps: int = 8) -> list[list[list[float]]]:
    loader.bind(seed=5)
    loader.start(0, lambda step: range(loader.micro_batches))
    try:
        return [loader.get(step, m).tolist() for step in range(steps) for m in range(loader.micro_batches)]
    finally:
        loader.close()


def doubled(samples: list[torch.Tensor]) -> torch.Tensor:
    return 2 * torch.stack(samples)


@pytest.mark.parametrize(
    ("of_torch", "of_job"),
    [
        ({"shuffle": True}, {}),
        ({}, {"shuffle": False}),
        ({"shuffle": True, "drop_last": True}, {"drop_last": True}),
        ({"shuffle": True, "num_workers": 2, "prefetch_factor": 3}, {"num_workers": 2}),
        ({"shuffle": True, "collate_fn": doubled}, {"collate_fn": doubled}),
        ({"shuffle": True, "generator": 11}, {"generator": 11}),
        ({"sampler": RandomSampler(Squares())}, {}),  # type: ignore[arg-type]
        ({"sampler": [3, 1, 2, 0, 7]}, {"sampler": [3, 1, 2, 0, 7]}),
    ],
    ids=["shuffled", "in order", "drop_last", "workers", "collate_fn", "generator", "sampler", "list"],
)
def test_its_samples_are_those_of_the_jobs_own_loader(of_torch: dict[str, Any], of_job: dict[str, Any]) -> None:
    """Random draws of the dataset are equal, too."""
    for options in (of_torch, of_job):
        if "generator" in options:
            options["generator"] = torch.Generator().manual_seed(options["generator"])
    size = 4 if "sampler" in of_job else 16
    given: DataLoader[Any] = DataLoader(Squares(), size, **of_torch)  # type: ignore[arg-type]
    own = elastrain.DataLoader(
        Squares(), global_batch_size=size, micro_batch_size=2, **{"num_workers": 0, "shuffle": None, **of_job}
    )
    taken = elastrain.from_torch(given, micro_batch_size=2)
    assert len(taken) == len(given) == len(own)
    assert read(taken) == read(own)
    assert taken.described() == own.described()


@pytest.mark.parametrize(("size", "parts"), [(64, 8), (16, 8), (12, 6), (8, 8), (7, 7), (22, 2), (13, 1), (1, 1)])
def test_a_batch_is_the_global_batch_in_at_most_eight_equal_parts(size: int, parts: int) -> None:
    loader = elastrain.from_torch(DataLoader(range(100), size))  # type: ignore[arg-type]
    loader.bind(0)
    assert loader.micro_batches == parts
    assert loader.described()["global batch size"] == size


def test_batches_of_a_batch_sampler_are_global_batches() -> None:
    sampler = BatchSampler(SequentialSampler(range(24)), 6, drop_last=False)
    loader = elastrain.from_torch(DataLoader(Squares(), batch_sampler=sampler))  # type: ignore[arg-type]
    assert loader.micro_batches == 6
    assert [sample for batch in read(loader, 4) for sample, _ in batch] == [float(i) for i in range(24)]


def warned(**options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        elastrain.from_torch(DataLoader(Squares(), 4, **options))  # type: ignore[arg-type]
    return [str(each.message) for each in seen]


def test_samplers_that_draw_for_each_epoch_are_named() -> None:
    """They would train on the same draws in each epoch without a word."""
    for sampler in (
        WeightedRandomSampler([1.0] * 24, 24),
        SubsetRandomSampler(range(8)),
        RandomSampler(Squares(), replacement=True),  # type: ignore[arg-type]
        RandomSampler(Squares(), num_samples=8),  # type: ignore[arg-type]
    ):
        assert [type(sampler).__name__ in sentence for sentence in warned(sampler=sampler)] == [True]
    assert warned(shuffle=True) == warned(sampler=[1, 2, 3, 4]) == warned() == []


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ([1, 2], "takes a torch.utils.data.DataLoader; got"),
        (DataLoader(Endless(), 4), "IterableDataset.*streams="),
        (DataLoader(Squares(), None), "batch_size=None"),  # type: ignore[arg-type]
        (OwnLoop(Squares(), 4), "OwnLoop with an __iter__ of its own"),  # type: ignore[arg-type]
        (DataLoader(Squares(), 4, sampler=DistributedSampler(Squares(), 2, 0)), "DistributedSampler"),  # type: ignore[arg-type]
        (
            DataLoader(Squares(), batch_sampler=BatchSampler(SequentialSampler(range(24)), 5, False)),  # type: ignore[arg-type]
            "batches of 4 and 5 samples",
        ),
        (DataLoader(Squares(), 4, num_workers=1, multiprocessing_context="spawn"), "multiprocessing_context='spawn'"),  # type: ignore[arg-type]
        (DataLoader(Squares(), 4, num_workers=1, in_order=False), "in_order=False"),  # type: ignore[arg-type]
        (DataLoader(Squares(), 32, drop_last=True), "drop_last=True leaves nothing"),  # type: ignore[arg-type]
    ],
)
def test_what_a_job_cannot_keep_is_refused_by_name(given: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        elastrain.from_torch(given)


def test_micro_batches_have_to_fill_the_batch() -> None:
    with pytest.raises(ConfigError, match="global_batch_size=4 is not a multiple of micro_batch_size=3"):
        elastrain.from_torch(DataLoader(Squares(), 4), micro_batch_size=3)  # type: ignore[arg-type]


def test_the_loop_goes_over_what_prepare_returned() -> None:
    """The script's own loader would give whole batches, past the job."""
    job = elastrain.init(seed=1)
    model = torch.nn.Linear(2, 1)
    given: DataLoader[Any] = DataLoader(Squares(), 8, shuffle=True)  # type: ignore[arg-type]
    _, _, loader = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), given)
    assert isinstance(loader, elastrain.DataLoader) and len(loader) == len(given)
    with pytest.raises(ConfigError, match="the loader that prepare"):
        next(job.steps(given, until=2))  # type: ignore[arg-type]
    sizes = []
    for step in job.steps(loader, until=2):
        for batch in step:
            sizes.append(len(batch))
            step.backward(model(batch).sum())
    assert sizes == [1] * 16
