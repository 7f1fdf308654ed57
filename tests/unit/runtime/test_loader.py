"""The user's loader: right samples, seeded draws, errors that arrive, processes that end."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest
import torch
from torch.utils._pytree import tree_flatten
from torch.utils.data import IterableDataset

from elastrain.errors import ConfigError
from elastrain.runtime.loader.loader import DataLoader

torch.set_num_threads(1)


class Numbers:
    """Sample i is i, with what each kind of generator draws beside it."""

    def __init__(self, size: int = 40, broken: int | None = None) -> None:
        self.size, self.broken = size, broken

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.broken:
            raise OSError(f"sample {index} is broken")
        draws = [torch.rand(()).item(), random.random(), np.random.rand()]
        return torch.tensor([index, *draws], dtype=torch.float64)


class Pair(NamedTuple):
    small: torch.Tensor
    large: torch.Tensor


class Served(Numbers):
    """Tells which process loads."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, os.getpid()])


def _everything(step: int) -> range:
    return range(4)


def _loader(dataset: Any = None, **options: Any) -> DataLoader:
    options = {"global_batch_size": 8, "micro_batch_size": 2, **options}
    loader = DataLoader(dataset or Numbers(), **options)
    loader.bind(seed=5)
    return loader


@contextmanager
def _running(loader: DataLoader, plan: Any = _everything) -> Iterator[DataLoader]:
    loader.start(0, plan)
    try:
        yield loader
    finally:
        loader.close()


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_each_micro_batch_holds_the_samples_of_the_order(num_workers: int) -> None:
    with _running(_loader(num_workers=num_workers)) as loader:
        for step in range(4):
            for m in range(loader.micro_batches):
                expected = [sample for _, sample in loader.order.samples(step, m)]
                assert loader.get(step, m)[:, 0].tolist() == expected


def test_draws_depend_on_the_sample_and_not_on_who_loads_it() -> None:
    with _running(_loader(num_workers=0)) as here:
        expected = {(s, m): here.get(s, m) for s in range(2) for m in range(4)}
    with _running(_loader(num_workers=2), plan=lambda step: [3, 1]) as there:
        for (step, m), data in reversed(expected.items()):
            assert torch.equal(there.get(step, m), data)
    assert len({row for data in expected.values() for row in data[:, 1].tolist()}) == 16


def test_a_data_epoch_draws_anew() -> None:
    with _running(_loader(Numbers(8), num_workers=0, shuffle=False)) as loader:
        first, second = loader.get(0, 0), loader.get(1, 0)
    assert torch.equal(first[:, 0], second[:, 0])
    assert not torch.equal(first[:, 1:], second[:, 1:])


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_default_generators_are_never_drawn_from(num_workers: int) -> None:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[union-attr]
    with _running(_loader(num_workers=num_workers)) as loader:
        loader.get(0, 0)
        loader.get(0, 3)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]  # type: ignore[union-attr]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_collate_fn_draws_from_the_micro_batch(num_workers: int) -> None:
    def collate(samples: list[Any]) -> float:
        return torch.rand(()).item()

    with _running(_loader(num_workers=num_workers, collate_fn=collate)) as loader:
        first = [loader.get(0, m) for m in range(4)]
        again = [loader.get(0, m) for m in range(4)]
    assert first == again
    assert len(set(first)) == 4


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_in_the_dataset_reaches_the_caller_who_asked_for_it(num_workers: int) -> None:
    with _running(_loader(Numbers(broken=3), num_workers=num_workers, shuffle=False)) as loader:
        assert loader.get(0, 0)[:, 0].tolist() == [0, 1]  # the broken one was loaded ahead meanwhile
        with pytest.raises(OSError, match="sample 3 is broken") as caught:
            loader.get(0, 1)
        assert "__getitem__" in str(caught.value), "the dataset's traceback is missing"
        with pytest.raises(OSError, match="sample 3 is broken"):
            loader.get(0, 1)
        assert loader.get(0, 2)[:, 0].tolist() == [4, 5]


def test_loading_happens_in_another_process_and_ahead() -> None:
    with _running(_loader(Served(), num_workers=1)) as loader:
        assert loader.get(0, 0)[0, 1] != os.getpid()


def test_data_of_any_make_arrives_as_it_left() -> None:
    def collate(samples: list[Any]) -> Any:
        x = torch.stack(samples)
        kinds = [torch.float64, torch.bfloat16, torch.bool, torch.complex64]
        return {
            "pair": Pair(x, torch.ones(200_000)),
            "kinds": [x.to(kind) for kind in kinds],
            "strided": x.T,
            "empty": (torch.zeros(0, 3), torch.tensor(4)),
            "other": [np.ones(2), "word", None, 3.5],
        }

    with _running(_loader(num_workers=1, collate_fn=collate)) as loader:
        there = loader.get(0, 1)
    with _running(_loader(num_workers=0, collate_fn=collate)) as loader:
        here = loader.get(0, 1)
    mine, theirs = tree_flatten(there), tree_flatten(here)
    assert str(mine[1]) == str(theirs[1])
    for a, b in zip(mine[0], theirs[0], strict=True):
        assert type(a) is type(b)
        if isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype and torch.equal(a, b) and a.stride() == b.stride()
        else:
            assert np.array_equal(a, b)
    for leaf in mine[0]:
        if isinstance(leaf, torch.Tensor):
            leaf.zero_()  # it can be written


def test_a_micro_batch_outside_of_the_plan_is_loaded_next() -> None:
    with _running(_loader(num_workers=1), plan=lambda step: []) as loader:
        for step, m in [(0, 2), (3, 1), (3, 1), (1, 0)]:
            expected = [sample for _, sample in loader.order.samples(step, m)]
            assert loader.get(step, m)[:, 0].tolist() == expected


def test_a_new_plan_is_followed() -> None:
    told, tell = os.pipe()

    class Told(Numbers):
        def __getitem__(self, index: int) -> torch.Tensor:
            os.write(tell, bytes([index]))
            return torch.tensor([index])

    planned = [0]
    with _running(_loader(Told(), shuffle=False, num_workers=1, prefetch=1), plan=lambda step: planned) as loader:
        loader.get(0, 0)
        assert list(os.read(told, 2) + os.read(told, 1) + os.read(told, 1)) == [0, 1, 8, 9], "loaded ahead"
        planned[:] = [3]
        loader.get(1, 3)
        loader.get(2, 3)
        loader.get(3, 3)
    os.close(tell)
    with os.fdopen(told, "rb") as rest:
        assert list(rest.read())[:6] == [14, 15, 22, 23, 30, 31], "not the new plan, or something loaded twice"


def test_what_was_loaded_ahead_is_bounded() -> None:
    class Counting(Numbers):
        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.tensor([index])

    with _running(_loader(Counting(4000), num_workers=2, prefetch=2)) as loader:
        for step in range(60):  # urgent requests push what was planned into the cache
            loader.get(step, 3)
        assert len(loader._source._schedule._loaded) <= 4


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"micro_batch_size": 3}, "not a multiple"),
        ({"global_batch_size": 0}, "at least 1"),
        ({"num_workers": -1}, "num_workers"),
        ({"num_workers": True}, "num_workers"),
        ({"prefetch": 0}, "prefetch"),
        ({"collate_fn": 3}, "collate_fn"),
        ({"dataset": []}, "dataset_size"),
        ({"dataset": iter([1])}, "map-style"),
    ],
)
def test_bad_input_is_refused_with_one_sentence(options: dict[str, Any], sentence: str) -> None:
    given = {"dataset": Numbers(), "global_batch_size": 8, "micro_batch_size": 2, **options}
    with pytest.raises(ConfigError, match=sentence):
        DataLoader(**given)


def test_an_iterable_dataset_is_refused() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter([1])

    with pytest.raises(ConfigError, match="map-style"):
        DataLoader(Stream(), global_batch_size=1, micro_batch_size=1)


def test_calls_out_of_order_are_named() -> None:
    unbound = DataLoader(Numbers(), global_batch_size=8, micro_batch_size=2)
    with pytest.raises(RuntimeError, match="bind"):
        _ = unbound.order
    loader = _loader(num_workers=0)
    with pytest.raises(RuntimeError, match="start"):
        loader.get(0, 0)
    loader.start(0, _everything)
    with pytest.raises(RuntimeError, match="started before"):
        loader.start(0, _everything)
    with pytest.raises(ValueError, match="no micro-batch 4"):
        loader.get(0, 4)


def test_close_ends_the_processes_and_the_loader_can_start_again() -> None:
    loader = _loader(Served(), num_workers=1)
    with _running(loader):
        pid = int(loader.get(0, 0)[0, 1])
    assert not psutil.pid_exists(pid)
    loader.close()
    with _running(loader):
        assert loader.get(2, 1)[0, 1] != pid


@pytest.mark.parametrize(
    ("victim", "words"), [("loader", "it is started again"), ("fork_server", "the training process")]
)
def test_a_process_of_the_loader_that_was_killed_changes_nothing(victim: str, words: str) -> None:
    others = psutil.Process().children()
    with _running(_loader(num_workers=0)) as loader:
        right = [loader.get(step, 0) for step in range(9)]
    told: list[str] = []
    loader = _loader(num_workers=1)
    loader.start(0, _everything, told.append)
    try:
        for step in range(9):
            assert torch.equal(loader.get(step, 0), right[step])
            if step == 2:
                (server,) = (process for process in psutil.Process().children() if process not in others)
                (loading,) = server.children()
                os.kill({"loader": loading, "fork_server": server}[victim].pid, signal.SIGKILL)
        for step in range(9, 500):  # the death is noticed when something is asked for, and a busy machine kills late
            if told:
                break
            time.sleep(0.02)
            loader.get(step, 0)
    finally:
        loader.close()
    assert len(told) == 1 and "was killed by SIGKILL" in told[0] and words in told[0]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_dataset_that_raises_stop_iteration_does_not_end_the_training_loop(num_workers: int) -> None:
    class Ended(Numbers):
        def __getitem__(self, index: int) -> torch.Tensor:
            raise StopIteration("no more")

    with _running(_loader(Ended(), num_workers=num_workers)) as loader, pytest.raises(RuntimeError, match="no more"):
        loader.get(0, 0)


@pytest.mark.slow
def test_loader_processes_die_with_the_training_process() -> None:
    code = """
        import time, torch
        from elastrain.runtime.loader.loader import DataLoader
        from tests.unit.runtime.test_loader import Served
        loader = DataLoader(Served(), global_batch_size=4, micro_batch_size=2, num_workers=2)
        loader.bind(seed=0)
        loader.start(0, lambda step: range(2))
        print(int(loader.get(0, 0)[0, 1]), int(loader.get(0, 1)[0, 1]), flush=True)
        time.sleep(60)
    """
    root = Path(__file__).resolve().parents[3]
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, cwd=root, text=True
    ) as parent:
        assert parent.stdout is not None
        children = {int(pid) for pid in parent.stdout.readline().split()}
        assert len(children) == 2
        ends = [os.pidfd_open(pid) for pid in children]  # readable once the process has ended
        parent.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + 1
        ended = [bool(select.select([end], [], [], max(0, deadline - time.monotonic()))[0]) for end in ends]
        for end in ends:
            os.close(end)
    assert ended == [True, True]


class Deadly(Numbers):
    """A sample that ends whatever loads it, another one that does so once."""

    def __init__(self, once: Path) -> None:
        super().__init__()
        self.once = once

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        if index == 8 and not self.once.exists():
            self.once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_a_sample_that_kills_its_loader_a_second_time_is_named(tmp_path: Path) -> None:
    told: list[str] = []
    loader = DataLoader(Deadly(tmp_path / "once"), global_batch_size=8, micro_batch_size=4, shuffle=False)
    loader.bind(0)
    loader.start(0, lambda step: (), told.append)
    try:
        with pytest.raises(
            RuntimeError, match=r"2 loader processes died .* loaded sample 9 of micro-batch 0 of step 1"
        ):
            loader.get(1, 0)
    finally:
        loader.close()
    assert len(told) == 3, "once sample 8, which is loaded by the next one, then twice sample 9"
