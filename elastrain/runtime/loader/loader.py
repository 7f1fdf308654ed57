"""The user's DataLoader: micro-batches by number, loaded ahead in other processes along the member's plan.

Loading draws from random generators that are seeded per sample, never from those of the training process. `loading.py`
has the processes, and `packing.py` decides what they load next. No messages to members.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch.utils.data import default_collate
from torch.utils.data._utils.pin_memory import pin_memory

from elastrain.device import DevicePort, device_of
from elastrain.device.same_memory import HOST
from elastrain.job.batch import DataOrder, collate_key, sample_key
from elastrain.job.streams import StreamMark, StreamOrder
from elastrain.runtime.loader import packing
from elastrain.runtime.loader.fork_server import ForkServerEndedError
from elastrain.runtime.loader.loader_arguments import (
    Initiated,
    Loading,
    OrderChoice,
    check_collate,
    check_refused,
    check_switches,
    prefetch_of,
    seed_of,
)
from elastrain.runtime.loader.loading import NO_SAMPLE, Load, LoaderProcesses, LoadFailed, Packed, at_sample
from elastrain.runtime.loader.packing import Plan, Request, Schedule
from elastrain.runtime.loader.seeding import generators_kept, seed_all
from elastrain.runtime.loader.stream_shares import Streamed
from elastrain.runtime.loader.stream_source import StreamSource, check_dataset


class DataLoader:
    """The data of a job, for `job.prepare`. Batch sizes are in samples.

    Python, NumPy and torch are seeded per (seed, data epoch, sample) before `dataset[i]`, and per micro-batch before
    `collate_fn`. `torch.utils.data.get_worker_info()` is None in the loader processes: a sample must not depend on the
    process that loads it, and torch's collate functions would put tensors into named shared memory.

    Arguments of torch's `DataLoader` that are not listed here are refused by name, with the reason.

    Args:
        dataset: A map-style dataset (`__getitem__` and `__len__`); with `streams`, data that is read in order, such as
            an `IterableDataset`, or a list of one for each stream.
        global_batch_size: Samples per step.
        micro_batch_size: Samples per micro-batch. A batch sampler says it itself.
        shuffle: True to shuffle the samples in each epoch. Default: True without a sampler.
        sampler: Indices of the samples of each epoch. They are listed once, here, alike on all members.
        batch_sampler: Likewise, in lists of one size, each of which is a micro-batch.
        collate_fn: Function from a list of samples to a micro-batch; torch's `default_collate` if None.
        num_workers: Number of loader processes; 0 loads in the training process.
        prefetch: Micro-batches that each process loads ahead (default: 2).
        prefetch_factor: Another name of `prefetch`.
        pin_memory: True to put tensors into pinned host memory, from which `tensor.to(device, non_blocking=True)`
            copies without a wait. Other objects are pinned by their method `pin_memory`, as in torch's loader. It has
            no effect in a job on the CPU.
        drop_last: True to leave out, in each epoch, the samples that do not fill a global batch. Default: the global
            batch is filled with samples of the next epoch.
        timeout: Seconds to wait for a micro-batch from a loader process before RuntimeError is raised; 0: no limit.
        worker_init_fn: Function that each loader process calls with its number before it loads. Samples do not see
            the generators that it seeds.
        generator: Generator whose initial seed chooses the order of the samples, in place of the job's seed.
        persistent_workers: Taken and without effect: loader processes live as long as the loop.
        streams: Number of readers of data that can only be read in order. Micro-batch m of each step comes from stream
            `m mod streams`; one stream for each micro-batch reads nothing twice. To the dataset, stream s is loader
            process s of so many. Each member reads the streams of its micro-batches, one process each (`num_workers=1`)
            or in its own. The readers' states are committed with the steps.

    Raises:
        ConfigError: If an argument is not valid.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        global_batch_size: int,
        micro_batch_size: int | None = None,
        shuffle: bool | None = None,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Iterable[Any]] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 1,
        prefetch: int | None = None,
        prefetch_factor: int | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], object] | None = None,
        generator: torch.Generator | None = None,
        persistent_workers: bool = False,
        streams: int | None = None,
        **refused: Any,
    ) -> None:
        check_refused(refused)
        check_collate(collate_fn)
        check_switches(pin_memory=pin_memory, drop_last=drop_last, persistent_workers=persistent_workers)
        self._loading = Loading(num_workers, prefetch_of(prefetch, prefetch_factor), timeout, worker_init_fn)
        check_dataset(dataset, streams, self._loading)
        choice = OrderChoice(shuffle=shuffle, sampler=sampler, batch_sampler=batch_sampler, drop_last=drop_last)
        sizes = (global_batch_size, micro_batch_size)
        self._unbound: DataOrder | StreamOrder
        self._unbound = choice.order(len(dataset), *sizes) if streams is None else choice.of_streams(streams, *sizes)
        self._order: DataOrder | StreamOrder | None = None
        self._streams: StreamSource | None = None
        self._seed = seed_of(generator)
        self._dataset = dataset
        self._collate = collate_fn or default_collate
        self._pins = pin_memory
        self._source: _Source | None = None

    @property
    def micro_batches(self) -> int:
        """Micro-batches per step (M)."""
        return self._unbound.micro_batches

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps that it takes to use every sample once, rounded up.

        If global batches do not divide the dataset, an epoch ends inside a step, and the next one begins in the same
        step, unless `drop_last=True`. So `until=epochs * steps_per_epoch` may train on some samples of one epoch more.
        Raises TypeError with streams, whose length is not known.
        """
        if isinstance(self._unbound, StreamOrder):
            raise TypeError("streams have no length: count steps instead")
        return self._unbound.steps_per_epoch

    def __len__(self) -> int:
        """Return `steps_per_epoch`: global batches, where torch's DataLoader counts the batches of one process."""
        return self.steps_per_epoch

    @property
    def order(self) -> DataOrder | StreamOrder:
        """The order of the samples in micro-batches. Raises RuntimeError before `bind`."""
        if self._order is None:
            raise RuntimeError("the loader has no seed yet: bind() comes first")
        return self._order

    def go_on_behind(self, steps: int) -> None:
        """Leave out the samples of so many steps of an earlier job. Call it before `job.prepare`, without streams."""
        assert isinstance(self._unbound, DataOrder)
        self._unbound = replace(self._unbound, behind=steps)

    def bind(self, seed: int) -> None:
        """Fix the order of the samples. `seed`: that of the job, which a generator of the script replaces."""
        self._order = order = replace(self._unbound, seed=seed if self._seed is None else self._seed)
        if isinstance(order, StreamOrder):
            data = Streamed(self._dataset, order, collate=self._collate, loading=self._loading)
            self._streams = StreamSource(data, order)

    def described(self) -> dict[str, Any]:
        """Return what decides which samples a micro-batch has, by name, for members to compare."""
        return self.order.described() | ({} if self._seed is None else {"seed of the generator": self._seed})

    def start(
        self,
        step: int,
        plan: Plan,
        tell: Callable[[str], None] = lambda sentence: None,
        device: torch.device = HOST.device,
    ) -> None:
        """Start the loader processes, and load ahead from `step` on. The calling thread must live as long as they do.

        Args:
            step: First step.
            plan: Micro-batches that this member expects to compute, by step.
            tell: Takes a sentence for each process that died and is started again.
            device: Device of the model.
        """
        if self._source is not None:
            raise RuntimeError("the loader was started before")
        port = device_of(device)
        self._pins = self._pins and not port.is_host
        if self._streams is not None:
            self._source, self._streams.tell = self._streams, tell
            return
        assert isinstance(self.order, DataOrder)
        here = _InThisProcess(_Samples(self._dataset, self._collate, self.order, port).load)
        if self._loading.num_workers == 0:
            self._source = here
        else:
            count = self._loading.num_workers
            load = Initiated(
                _Samples(self._dataset, self._collate, self.order, HOST).load, self._loading, self._dataset
            )
            schedule: Schedule[Packed] = Schedule(step, plan, ahead=count * self._loading.prefetch)
            processes = LoaderProcesses(load, count, tell)
            self._source = _Ahead(processes, schedule, here, tell, self._loading.timeout_s)

    def get(self, step: int, micro_batch: int) -> Any:
        """Return the collated micro-batch. If it was not loaded ahead, it is loaded before all others.

        Raises what the dataset raised, with its traceback in the message; RuntimeError if processes die of it.
        """
        if self._source is None:
            raise RuntimeError("the loader is not running: start() comes first")
        self.order.positions(step, micro_batch)
        loaded = self._source.get((step, micro_batch))
        if isinstance(loaded, LoadFailed):
            loaded.raise_again()
        return self._pinned(loaded) if self._pins else loaded

    def marks_found(self) -> list[StreamMark]:
        """Return the marks of streams that were found since the last call, for this member's vote."""
        return [] if self._streams is None else self._streams.readers.found()

    def committed(self, marks: tuple[StreamMark, ...]) -> None:
        """Take the marks of a committed step, so that streams are read on from there."""
        if self._streams is not None:
            self._streams.readers.committed(marks)

    def carried(self) -> dict[str, StreamSource]:
        """Return the parts of the loop's state that belong to the loader, by name."""
        return {} if self._streams is None else {"streams of the loader": self._streams}

    def _pinned(self, batch: Any) -> Any:
        """Return the batch in pinned memory, or as it is if the device can pin none. The values are the same."""
        try:
            return pin_memory(batch)  # type: ignore[no-untyped-call]  # of torch
        except RuntimeError as error:
            if isinstance(error, torch.AcceleratorError) and "out of memory" not in str(error):
                raise  # the device is broken, or this is the error of earlier work
            self._pins = False
            why = str(error).partition("\n")[0]
            warnings.warn(
                f"pin_memory=True has no effect from now on: no micro-batch can be pinned ({why})", stacklevel=3
            )
            return batch

    def close(self) -> None:
        """End the processes. Does nothing if they are not running."""
        source, self._source = self._source, None
        if source is not None:
            source.close()


class _Source(Protocol):
    """A source of micro-batches: this process or loader processes."""

    def get(self, request: Request) -> Any:
        """Return the micro-batch, or `LoadFailed` if loading raised."""

    def close(self) -> None: ...


class _Ahead:
    """A source that loads ahead in other processes, along the plan. Uses `here` once no process can be started."""

    def __init__(
        self,
        processes: LoaderProcesses,
        schedule: Schedule[Packed],
        here: _InThisProcess,
        tell: Callable[[str], None],
        timeout_s: float,
    ) -> None:
        self._processes: LoaderProcesses | None = processes
        self._schedule, self._here, self._tell, self._timeout_s = schedule, here, tell, timeout_s or math.inf
        self._ask_ahead(processes)

    def get(self, request: Request) -> Any:
        if self._processes is not None:
            try:
                return self._get(self._processes, request)
            except ForkServerEndedError as error:
                self._tell(f"{error}; from now on the training process loads its micro-batches itself")
                self.close()
        return self._here.get(request)

    def close(self) -> None:
        processes, self._processes = self._processes, None
        if processes is not None:
            processes.close()

    def _get(self, processes: LoaderProcesses, request: Request) -> Any:
        if self._schedule.want(request):
            processes.send(request, urgent=True)
        self._receive(processes)  # a death is reported at once, even if results are waiting
        until_s = time.monotonic() + self._timeout_s
        while (packed := self._schedule.take(request)) is None:
            if (left_s := until_s - time.monotonic()) <= 0:
                step, micro_batch = request
                raise RuntimeError(
                    f"micro-batch {micro_batch} of step {step} did not come from a loader process within "
                    f"timeout={self._timeout_s:g} seconds"
                )
            self._receive(processes, wait_s=left_s)
        self._ask_ahead(processes)
        if isinstance(packed, Exception):
            raise packed
        return packing.unpack(packed)

    def _receive(self, processes: LoaderProcesses, *, wait_s: float = 0.0) -> None:
        for request, packed in processes.receive(wait_s=wait_s):
            self._schedule.arrived(request, packed)
        self._ask_ahead(processes)

    def _ask_ahead(self, processes: LoaderProcesses) -> None:
        for request in self._schedule.ahead():
            processes.send(request)


class _InThisProcess:
    """A source for `num_workers=0`: it loads on request, and leaves the default generators of the CPU unchanged.

    The training loop seeds the generator of its device anew before it computes.
    """

    def __init__(self, load: Load) -> None:
        self._load = load

    def get(self, request: Request) -> Any:
        with generators_kept():
            try:
                return self._load(*request)
            except Exception:  # noqa: BLE001 - raised again by the caller, as if it came from another process
                return LoadFailed()

    def close(self) -> None:
        pass


class _Samples:
    """The loading of a micro-batch from its samples, the same in every process. `port`: device to seed, too."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], order: DataOrder, port: DevicePort) -> None:
        self._dataset, self._collate, self._order, self._port = dataset, collate, order, port

    def load(self, step: int, micro_batch: int) -> Any:
        """Return the collated micro-batch. Changes the state of the default generators."""
        samples, come_to = [], at_sample.get()
        for epoch, sample in self._order.samples(step, micro_batch):
            come_to(sample)
            seed_all(sample_key(self._order.seed, epoch, sample), self._port)
            samples.append(self._dataset[sample])
        come_to(NO_SAMPLE)
        seed_all(collate_key(self._order.seed, step, micro_batch), self._port)
        return self._collate(samples)
