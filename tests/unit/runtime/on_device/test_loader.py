"""The user's loader in a job on a device: what it draws, what it pins, and what a forked process may not do."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from elastrain.errors import ConfigError
from elastrain.runtime.loader import loader as room
from elastrain.runtime.loader.loader import DataLoader
from tests.support import late

DEVICE = "late"  # named later: only the process that runs the tests has the device


class OfDevice:
    """A dataset that uses the device in one of several ways."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.held = torch.arange(20.0, device="late")
        self.rows = [torch.ones(2, device="late") for _ in range(20)]

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        match self.how:
            case "moves":
                return torch.ones(2).to("late")
            case "draws":
                return torch.rand(2, device="late")
            case "reads what it holds":
                return self.held[index] * 2
            case "hides the error":
                try:
                    return self.held[index].item()
                except RuntimeError:
                    raise ValueError("no sample") from None
            case _:
                return self.rows[index]


def _same(batch: Any) -> Any:
    return batch


@contextmanager
def _running(dataset: Any, device: str = DEVICE, **options: Any) -> Iterator[DataLoader]:
    options = {"global_batch_size": 4, "micro_batch_size": 2, "num_workers": 1, **options}
    loader = DataLoader(dataset, **options)
    loader.bind(seed=5)
    loader.start(0, lambda step: (), device=torch.device(device))
    try:
        yield loader
    finally:
        loader.close()


@pytest.mark.parametrize("how", ["moves", "draws", "reads what it holds", "hands out what it holds", "hides the error"])
def test_a_dataset_that_touches_the_device_in_a_loader_process_ends_with_one_sentence(how: str) -> None:
    collate = _same if how == "hands out what it holds" else None
    with (
        _running(OfDevice(how), collate_fn=collate) as loader,
        pytest.raises(
            ConfigError, match=r"^the dataset or collate_fn uses a device in a loader process .*num_workers=0$"
        ),
    ):
        loader.get(0, 0)


@pytest.mark.parametrize("how", ["moves", "draws", "reads what it holds"])
def test_in_the_training_process_a_dataset_may_use_the_device(how: str) -> None:
    with _running(OfDevice(how), num_workers=0) as loader:
        assert loader.get(0, 0).device.type == "late"


def test_what_a_dataset_draws_on_the_device_depends_on_the_sample_alone() -> None:
    def drawn(*order: int) -> torch.Tensor:
        with _running(OfDevice("draws"), num_workers=0) as loader:
            return torch.stack([loader.get(0, micro_batch) for micro_batch in order]).cpu()

    assert torch.equal(drawn(0, 1), drawn(1, 0).flip(0))


def test_an_error_that_is_not_the_devices_keeps_its_own_words() -> None:
    class Broken(OfDevice):
        def __getitem__(self, index: int) -> Any:
            raise RuntimeError("subprocess of mine")

    with _running(Broken("")) as loader, pytest.raises(RuntimeError, match="subprocess of mine"):
        loader.get(0, 0)


class Pairs:
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.full((3,), float(index)), "name": str(index)}


@contextmanager
def _pinning(pin: Callable[[Any], Any]) -> Iterator[None]:
    kept = room.pin_memory
    room.pin_memory = pin
    try:
        yield
    finally:
        room.pin_memory = kept


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_batch_is_pinned_by_torchs_function_if_the_job_is_on_a_device(num_workers: int) -> None:
    seen: list[Any] = []

    def pin(batch: Any) -> Any:
        seen.append(batch)
        return {"pinned": batch}

    with _pinning(pin), _running(Pairs(), num_workers=num_workers, pin_memory=True) as loader:
        assert loader.get(0, 1) == {"pinned": seen[0]}
    for options in ({}, {"pin_memory": True, "device": "cpu"}):
        with _pinning(pin), _running(Pairs(), num_workers=num_workers, **options) as loader:
            assert set(loader.get(0, 1)) == {"x", "name"}
    assert len(seen) == 1


def test_a_device_that_pins_no_memory_gets_the_same_batches_and_a_warning_once() -> None:
    with warnings.catch_warnings(record=True) as told, _running(Pairs(), pin_memory=True) as loader:
        warnings.simplefilter("always")
        batches = [loader.get(0, micro_batch) for micro_batch in (0, 1)]
    assert [str(each.message)[:39] for each in told] == ["pin_memory=True has no effect from now "]
    assert all(batch["x"].shape == (2, 3) for batch in batches)


def test_an_error_of_the_device_is_not_taken_for_memory_that_cannot_be_pinned() -> None:
    def pin(batch: Any) -> Any:
        return torch.zeros(1, device="late")

    with _pinning(pin), _running(Pairs(), pin_memory=True) as loader:
        late.fail_at(1)
        with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
            loader.get(0, 0)


def test_pin_memory_takes_a_truth_value() -> None:
    with pytest.raises(ConfigError, match="pin_memory must be True or False; got 'cuda'"):
        DataLoader(Pairs(), global_batch_size=4, micro_batch_size=2, pin_memory="cuda")  # type: ignore[arg-type]


class OfDefault:
    """A dataset whose tensors lie where torch puts them."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return torch.randn(2), index


@pytest.mark.parametrize("is_large", [False, True])
def test_with_a_default_device_loader_processes_make_the_same_batches_in_host_memory(is_large: bool) -> None:
    def collate(samples: Any) -> Any:
        made = torch.utils.data.default_collate(samples)
        return [made, torch.ones(1 << 20)] if is_large else made

    with _running(OfDefault(), collate_fn=collate) as loader:
        plain = loader.get(0, 1)
    with torch.device("late"), _running(OfDefault(), collate_fn=collate) as loader:
        batch = loader.get(0, 1)
    tensors = [*batch[0], batch[1]] if is_large else batch
    assert {each.device.type for each in tensors} == {"cpu"}
    assert all(map(torch.equal, tensors, [*plain[0], plain[1]] if is_large else plain))
