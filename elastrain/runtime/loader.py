"""The user's DataLoader: micro-batches by number, loaded ahead in other processes along the member's plan.

Loading draws from random generators seeded per sample, and never from those of the training process. The processes are
torch's own loader workers; they die with the process that started them. No threads here, and no messages to members.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._utils import ExceptionWrapper
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset, default_collate
from torch.utils.data._utils import signal_handling

from elastrain.batch import DataOrder
from elastrain.errors import ConfigError
from elastrain.keys import collate_key, sample_key

Plan = Callable[[int], Sequence[int]]
"""Step -> the micro-batches that this member is expected to compute, in its order."""
_Request = tuple[int, int] | None
"""`(step, micro-batch)`, or None: nothing to load now."""

_NOT_YET = object()
_LOOKAHEAD_STEPS = 2
_INLINE_LIMIT_BYTES = 256 * 1024
"""Tensors up to this size come through the pipe: sharing one costs a connection, about 0.7 ms; copying, far less."""
_PR_SET_PDEATHSIG = 1
_NUMPY_DTYPES = {torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8}
_NUMPY_DTYPES |= {torch.uint8, torch.bool}


class DataLoader:
    """Describes the data to `job.prepare`. Batch sizes are in samples; the dataset is map-style.

    `num_workers`: loader processes (0: load in the training process). `prefetch`: micro-batches loaded ahead by each.
    Python, NumPy and torch are seeded per (seed, data epoch, sample) before `dataset[i]`, and per micro-batch before
    `collate_fn`. Raises ConfigError.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        shuffle: bool = True,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 1,
        prefetch: int = 2,
    ) -> None:
        _check(dataset, collate_fn, num_workers, prefetch)
        self._unbound = DataOrder(
            dataset_size=len(dataset),
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
            shuffle=shuffle,
        )
        self._order: DataOrder | None = None
        self._dataset = dataset
        self._collate = collate_fn or default_collate
        self._num_workers = num_workers
        self._prefetch = prefetch
        self._queue = _PlanQueue(limit=0)
        self._source: Iterator[Any] | None = None

    @property
    def micro_batches(self) -> int:
        """Micro-batches per step (M)."""
        return self._unbound.micro_batches

    @property
    def order(self) -> DataOrder:
        """Which sample is in which micro-batch. Raises RuntimeError before `bind`."""
        if self._order is None:
            raise RuntimeError("the loader has no seed yet: bind() comes first")
        return self._order

    def bind(self, seed: int) -> None:
        """Fix the order of the samples."""
        fields = ("dataset_size", "global_batch_size", "micro_batch_size", "shuffle")
        self._order = DataOrder(seed=seed, **{name: getattr(self._unbound, name) for name in fields})

    def start(self, step: int, plan: Plan) -> None:
        """Start the processes, from a thread that lives as long as they should, and load ahead from `step` on."""
        if self._source is not None:
            raise RuntimeError("the loader was started before")
        # One more than torch keeps under way: it asks for the next before it hands out the one that came.
        self._queue = _PlanQueue(limit=self._num_workers * self._prefetch + 1)
        self._queue.replan(plan)
        self._queue.advance(step)
        samples = _MicroBatches(self._dataset, self._collate, self.order)
        if self._num_workers == 0:
            self._source = _InThisProcess(samples, self._queue)
        else:
            self._source = _worker_processes(samples, self._queue, self._num_workers, self._prefetch)

    def get(self, step: int, micro_batch: int) -> Any:
        """The collated micro-batch; loaded next, before all others, if it was not ahead.

        Raises what the dataset raised, with its traceback in the message; RuntimeError if the processes died.
        """
        if self._source is None:
            raise RuntimeError("the loader is not running: start() comes first")
        self.order.positions(step, micro_batch)
        self._queue.advance(step)
        self._queue.want((step, micro_batch))
        while (loaded := self._queue.taken((step, micro_batch))) is _NOT_YET:
            self._queue.arrived(_next(self._source))
        for _ in range(self._queue.idle_slots()):
            self._queue.arrived(_next(self._source))
        return _value(loaded)

    def replan(self, plan: Plan) -> None:
        """Load ahead along another plan from now on. What was loaded stays at hand."""
        self._queue.replan(plan)

    def close(self) -> None:
        """End the processes. Does nothing if they are not running."""
        source: Any = self._source
        self._source = None
        if hasattr(source, "_shutdown_workers"):
            if not all(process.is_alive() for process in source._workers):
                _abandon(source)
            source._shutdown_workers()


def _check(dataset: Any, collate_fn: Any, num_workers: Any, prefetch: Any) -> None:
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise ConfigError(
            f"the dataset must be map-style (__getitem__ and __len__), so that any member can load any sample; "
            f"got {type(dataset).__name__}"
        )
    if collate_fn is not None and not callable(collate_fn):
        raise ConfigError(f"collate_fn must be callable; got {type(collate_fn).__name__}")
    for name, value, least in (("num_workers", num_workers, 0), ("prefetch", prefetch, 1)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"{name} must be a whole number of at least {least}; got {value!r}")


def _next(source: Iterator[Any]) -> Any:
    try:
        return next(source)
    except StopIteration:  # would silently end the generator that the training loop iterates over
        raise RuntimeError("the loader processes have ended: see the error before this one") from None


def _value(loaded: Any) -> Any:
    """The micro-batch, as it was before it was sent; or the error with which loading it ended is raised."""
    if isinstance(loaded, _Failed):
        loaded.raise_again()
    return tree_map(_as_tensor, loaded)


class _PlanQueue:
    """What to load next, and what has come. The iterator side is what torch's loader takes its indices from."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._step = 0
        self._plan: Plan = lambda step: ()
        self._urgent: deque[tuple[int, int]] = deque()
        self._in_flight: deque[_Request] = deque()
        self._loaded: dict[tuple[int, int], Any] = {}
        self._delivered: set[tuple[int, int]] = set()

    def replan(self, plan: Plan) -> None:
        self._plan = plan

    def advance(self, step: int) -> None:
        """Loading ahead starts at `step`; what belongs to earlier ones is let go."""
        if step > self._step:
            self._step = step
            self._loaded = {key: loaded for key, loaded in self._loaded.items() if key[0] >= step}
            self._delivered = {key for key in self._delivered if key[0] >= step}

    def want(self, key: tuple[int, int]) -> None:
        if key not in self._loaded and key not in self._in_flight:
            self._urgent.append(key)

    def taken(self, key: tuple[int, int]) -> Any:
        """What was loaded for it, or `_NOT_YET`."""
        loaded = self._loaded.pop(key, _NOT_YET)
        if loaded is not _NOT_YET:
            self._delivered.add(key)
        return loaded

    def arrived(self, loaded: Any) -> None:
        """Results come in the order of the requests."""
        key = self._in_flight.popleft()
        if key is not None:
            self._loaded[key] = loaded

    def idle_slots(self) -> int:
        """Requests at the head that loaded nothing: taking them lets real ones in, when there are some."""
        if self._ahead() is None:
            return 0
        count = 0
        while count < len(self._in_flight) and self._in_flight[count] is None:
            count += 1
        return count

    def __iter__(self) -> Iterator[_Request]:
        while True:
            request = self._urgent.popleft() if self._urgent else self._ahead()
            self._in_flight.append(request)
            yield request

    def _ahead(self) -> _Request:
        busy = sum(key is not None for key in self._in_flight) + len(self._loaded)
        if busy >= self._limit:
            return None
        for step in range(self._step, self._step + _LOOKAHEAD_STEPS):
            for micro_batch in self._plan(step):
                key = (step, micro_batch)
                if key not in self._delivered and key not in self._loaded and key not in self._in_flight:
                    return key
        return None


class _MicroBatches(TorchDataset[Any]):
    """What runs in the loader processes: requests in, collated micro-batches out."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], order: DataOrder) -> None:
        self._dataset, self._collate, self._order = dataset, collate, order

    def __getitem__(self, request: _Request) -> Any:
        if request is None:
            return None
        try:
            return _inlined(self._load(*request))
        except Exception:  # noqa: BLE001 - edge of the loader process: raised again in get(), when it is asked for
            return _Failed()

    def _load(self, step: int, micro_batch: int) -> Any:
        samples = []
        for epoch, sample in self._order.samples(step, micro_batch):
            _seed_all(sample_key(self._order.seed, epoch, sample))
            samples.append(self._dataset[sample])
        _seed_all(collate_key(self._order.seed, step, micro_batch))
        return self._collate(samples)


def _seed_all(key: int) -> None:
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    torch.default_generator.manual_seed(key)


class _InThisProcess:
    """`num_workers=0`: each micro-batch is loaded when it is taken; the default generators stay as they were."""

    def __init__(self, samples: _MicroBatches, queue: _PlanQueue) -> None:
        self._samples, self._requests = samples, iter(queue)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        request = next(self._requests)
        with _generators_kept():
            return self._samples[request]


@contextmanager
def _generators_kept() -> Iterator[None]:
    kept = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])
        torch.default_generator.set_state(kept[2])


def _worker_processes(samples: _MicroBatches, queue: _PlanQueue, num_workers: int, prefetch: int) -> Iterator[Any]:
    parent = os.getpid()
    loader: TorchLoader[Any] = TorchLoader(
        samples,
        batch_size=None,
        sampler=queue,  # endless: it has no length
        num_workers=num_workers,
        prefetch_factor=prefetch,
        collate_fn=_as_it_is,
        worker_init_fn=lambda _: _die_with(parent),
        multiprocessing_context="fork",
        generator=torch.Generator(),  # else torch draws a base seed from the default one
    )
    return iter(loader)


class _Failed:
    """The exception under way, with its traceback as text. Torch would raise a bare wrapper before it is asked for."""

    def __init__(self) -> None:
        self._wrapper = ExceptionWrapper(where="while loading a micro-batch")  # type: ignore[no-untyped-call]

    def raise_again(self) -> None:
        try:
            self._wrapper.reraise()  # type: ignore[no-untyped-call]
        except StopIteration as error:
            raise RuntimeError(str(error)) from None


def _abandon(source: Any) -> None:
    """A killed process may have taken the lock of torch's shutdown event along: an orderly shutdown would never end."""
    if not source._shutdown:
        source._shutdown = True
        signal_handling._remove_worker_pids(id(source))  # type: ignore[attr-defined]
        source._worker_pids_set = False
        for process in source._workers:
            process.kill()


def _as_it_is(data: Any) -> Any:
    return data


class _Inline:
    """A small tensor on its way through the pipe."""

    def __init__(self, tensor: Tensor) -> None:
        self.array = tensor.numpy()


def _inlined(data: Any) -> Any:
    return tree_map(lambda leaf: _Inline(leaf) if _is_small(leaf) else leaf, data)


def _is_small(leaf: Any) -> bool:
    return (
        type(leaf) is Tensor
        and leaf.layout is torch.strided
        and leaf.device.type == "cpu"
        and leaf.dtype in _NUMPY_DTYPES
        and not leaf.requires_grad
        and leaf.nbytes <= _INLINE_LIMIT_BYTES
    )


def _as_tensor(leaf: Any) -> Any:
    return torch.from_numpy(leaf.array) if isinstance(leaf, _Inline) else leaf


def _die_with(parent: int) -> None:
    """In a loader process: be killed when the thread that started it ends, however it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the training process tells them
    torch.set_num_threads(1)
