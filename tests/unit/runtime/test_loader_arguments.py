"""Arguments of torch's DataLoader: each one works as the docstring says, or is refused by name with the reason."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from elastrain.errors import ConfigError
from elastrain.runtime.loader.loader import DataLoader


class Squares:
    def __init__(self, size: int = 10) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.tensor(i)


def made(dataset: Any = None, **options: Any) -> DataLoader:
    options = {"global_batch_size": 4, "num_workers": 0, **options}
    if "batch_sampler" not in options:
        options.setdefault("micro_batch_size", 2)
    loader = DataLoader(dataset or Squares(), **options)
    loader.bind(seed=3)
    return loader


@contextmanager
def running(loader: DataLoader) -> Iterator[DataLoader]:
    loader.start(0, lambda step: range(loader.micro_batches))
    try:
        yield loader
    finally:
        loader.close()


def flat(batches: list[list[int]]) -> list[int]:
    return [sample for batch in batches for sample in batch]


def read(loader: DataLoader, steps: int) -> list[list[int]]:
    """The samples of each micro-batch of the first steps."""
    with running(loader):
        return [loader.get(step, m).tolist() for step in range(steps) for m in range(loader.micro_batches)]


def test_every_argument_of_torchs_loader_is_taken_or_refused_by_its_name() -> None:
    harmless = {"shuffle": False, "sampler": [0], "batch_sampler": [[0]], "num_workers": 0}
    for name in list(inspect.signature(torch.utils.data.DataLoader).parameters)[1:]:
        if name in harmless:
            made(**{name: harmless[name]})
        else:
            with pytest.raises(ConfigError, match=name):
                made(**{name: object()})


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"batch_size": 4}, "batch_size=4: one worker's batch says nothing"),
        ({"multiprocessing_context": "spawn"}, "forks of a server"),
        ({"in_order": False}, "the bits of a job depend on the order"),
        ({"pin_memory_device": "cuda"}, "pinned for the device of the model"),
        ({"timeout": -1}, "timeout must be a number of seconds from 0 on; got -1"),
        ({"worker_init_fn": 3}, "worker_init_fn must be callable; got int"),
        ({"generator": 3}, "generator must be a torch.Generator; got int"),
        ({"drop_last": 1}, "drop_last must be True or False; got 1"),
        ({"drop_last": True, "global_batch_size": 12}, "leaves nothing of an epoch of 10 samples"),
        ({"prefetch": 2, "prefetch_factor": 4}, "prefetch=2 and prefetch_factor=4 are one argument"),
        ({"sampler": [1, 2], "shuffle": True}, "sampler and shuffle=True both choose the order"),
        ({"sampler": [1], "batch_sampler": [[1]]}, "sampler and batch_sampler both choose the order"),
        ({"sampler": count()}, "sampler gives more than"),
        ({"sampler": []}, "sampler is empty"),
        ({"sampler": ["a"]}, "whole numbers"),
        ({"sampler": [3, 10]}, "sampler gives sample 10, but the dataset has the samples 0 to 9"),
        ({"sampler": 3}, "sampler must be iterable; got int"),
        ({"sampler": DistributedSampler(Squares(), 2, 0)}, "the job shares out the batches itself"),
        ({"batch_sampler": [[1, 2], [3]]}, "batches of 1 and 2 samples"),
        ({"batch_sampler": [[1, 2]], "micro_batch_size": 1}, "batch_sampler gives batches of 2 samples"),
        ({"micro_batch_size": None}, "micro_batch_size must be a whole number"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_reason(options: dict[str, Any], sentence: str) -> None:
    if "sampler" in options and options["sampler"].__class__ is count:
        options = {**options, "dataset": Squares(1)}
    with pytest.raises(ConfigError, match=sentence.replace("(", r"\(")):
        made(**options)


def test_an_unknown_argument_is_a_type_error_as_for_any_function() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        made(nonsense=1)


def test_values_that_change_nothing_are_taken() -> None:
    made(
        multiprocessing_context="fork", in_order=True, pin_memory_device="", persistent_workers=True, prefetch_factor=3
    )


def test_a_sampler_is_read_once_and_chooses_the_order_of_every_epoch() -> None:
    sampler = iter([9, 9, 1, 0])
    assert read(made(sampler=sampler), 2) == [[9, 9], [1, 0]] * 2
    weighted = WeightedRandomSampler([1.0] * 10, 30, generator=torch.Generator().manual_seed(1))
    listed = list(WeightedRandomSampler([1.0] * 10, 30, generator=torch.Generator().manual_seed(1)))
    assert flat(read(made(sampler=weighted), 7)) == listed[:28]


def test_a_batch_sampler_gives_the_micro_batches() -> None:
    batches = BatchSampler(RandomSampler(Squares(), generator=torch.Generator().manual_seed(5)), 2, drop_last=True)
    expected = [
        list(batch)
        for batch in BatchSampler(
            RandomSampler(Squares(), generator=torch.Generator().manual_seed(5)), 2, drop_last=True
        )
    ]
    assert read(made(batch_sampler=batches), 2) == expected[:4]
    assert made(batch_sampler=BatchSampler(SequentialSampler(Squares()), 2, drop_last=True)).order.micro_batch_size == 2


def test_members_compare_what_a_sampler_listed() -> None:
    one, other = made(sampler=[1, 2, 3, 4]), made(sampler=[1, 2, 4, 3])
    assert one.described() == made(sampler=[1, 2, 3, 4]).described() != other.described()
    assert "order of the sampler" not in made().described()


def test_a_generator_chooses_the_order_in_place_of_the_jobs_seed() -> None:
    one, same = (made(generator=torch.Generator().manual_seed(7)) for _ in range(2))
    assert read(one, 3) == read(same, 3) != read(made(generator=torch.Generator().manual_seed(8)), 3)
    assert one.described()["seed of the generator"] == 7


def test_drop_last_leaves_out_what_does_not_fill_a_global_batch() -> None:
    rows = flat(read(made(drop_last=True), 4))
    assert len(set(rows[:8])) == len(set(rows[8:])) == 8
    assert read(made(drop_last=True, shuffle=False), 4)[-2:] == [[4, 5], [6, 7]]


@pytest.mark.parametrize(("options", "steps"), [({}, 3), ({"drop_last": True}, 2), ({"sampler": [0, 1, 2, 3]}, 1)])
def test_the_length_is_the_number_of_steps_to_an_epoch(options: dict[str, Any], steps: int) -> None:
    assert len(made(**options)) == steps


def test_worker_init_fn_is_called_once_in_each_loader_process(tmp_path: Path) -> None:
    def note(number: int) -> None:
        info = get_worker_info()
        (tmp_path / f"{number} of {info.num_workers} {type(info.dataset).__name__}").touch(exist_ok=False)

    read(made(num_workers=2, worker_init_fn=note), 6)
    assert {path.name for path in tmp_path.iterdir()} <= {"0 of 2 Squares", "1 of 2 Squares"}
    assert list(tmp_path.iterdir())


def test_what_worker_init_fn_raises_is_raised_by_the_loader() -> None:
    def broken(number: int) -> None:
        raise ValueError("no such device")

    with running(made(num_workers=1, worker_init_fn=broken)) as loader, pytest.raises(ValueError, match="no such dev"):
        loader.get(0, 0)


def test_a_sample_that_takes_longer_than_the_timeout_is_named() -> None:
    class Slow(Squares):
        def __getitem__(self, i: int) -> torch.Tensor:
            time.sleep(3)
            return torch.tensor(i)

    sentence = r"micro-batch 0 of step 0 did not come .* timeout=0.1 seconds"
    with running(made(Slow(), num_workers=1, timeout=0.1)) as loader, pytest.raises(RuntimeError, match=sentence):
        loader.get(0, 0)
