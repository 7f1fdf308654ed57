"""A loader of torch in a job: the job's own loader with the same samples, batch and workers."""

from __future__ import annotations

import warnings
from typing import Any

import torch.utils.data as torch_data
from torch.utils.data import RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from elastrain.errors import ConfigError
from elastrain.runtime.loader.loader import DataLoader
from elastrain.runtime.loader.loader_arguments import listed_batches

MICRO_BATCHES_MOST = 8
"""Maximum number of micro-batches that a batch is cut into by itself. It is fixed, because bits depend on it."""
_RANDOM = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def from_torch(loader: torch_data.DataLoader[Any], *, micro_batch_size: int | None = None) -> DataLoader:
    """Return the job's loader of the samples of a loader of torch. One batch of it is the global batch of a step.

    `job.prepare` calls this for a loader of torch. In a script for DDP, `batch_size` is that of one process: give the
    loader the samples of all processes, and no `DistributedSampler`.

    Args:
        loader: Loader of a map-style dataset. Its workers, `collate_fn`, `drop_last`, pinning and timeout stay. With
            `shuffle=True` the seed of its generator chooses the order, or else the job's seed. Other samplers and batch
            samplers are listed once, here, and each epoch has that order.
        micro_batch_size: Samples that a member computes at once. It divides the batch. Default: the batch in equal
            parts, as many as possible, and at most 8. The bits of the result depend on it.

    Raises:
        ConfigError: The loader has no batches, or a property that a job cannot keep.
    """
    if not isinstance(loader, torch_data.DataLoader):
        raise ConfigError(f"elastrain.from_torch(loader) takes a torch.utils.data.DataLoader; got {loader!r:.80}")
    if type(loader).__iter__ is not torch_data.DataLoader.__iter__:
        raise ConfigError(
            f"the loader is a {type(loader).__name__} with an __iter__ of its own, which a job does not call: give a "
            "torch.utils.data.DataLoader of the same dataset"
        )
    check_indexed(loader)
    sampler, size = loader.sampler, loader.batch_size
    if size is None:
        if loader.batch_sampler is None:
            raise ConfigError(
                "the loader has batch_size=None and takes the dataset's items as batches, but a step needs a global "
                "batch to share out: give it a batch_size"
            )
        sampler, size = listed_batches(loader.batch_sampler, len(loader.dataset))  # type: ignore[arg-type]
    if micro_batch_size is None:
        micro_batch_size = _equal_part(size)
    return same_samples(loader, sampler, global_batch_size=size, micro_batch_size=micro_batch_size)


def check_indexed(loader: torch_data.DataLoader[Any]) -> None:
    """Raise ConfigError if the loader's dataset is read in order."""
    if isinstance(loader.dataset, torch_data.IterableDataset):
        raise ConfigError(
            "the training loader reads its data in order (an IterableDataset), and the job has to know its length: "
            "give it a dataset with a length, or write a loop with elastrain.DataLoader(streams=…)"
        )


def same_samples(
    given: torch_data.DataLoader[Any], sampler: Any, *, global_batch_size: int, micro_batch_size: int
) -> DataLoader:
    """Return the job's loader with the dataset, the workers and the order of a loader of torch.

    Warns if the sampler draws another order for each epoch, because it is listed once.
    """
    is_random = isinstance(sampler, RandomSampler) and not _is_partial(sampler, given.dataset)
    is_own = not is_random and not isinstance(sampler, SequentialSampler)
    if is_own and isinstance(sampler, _RANDOM):
        warnings.warn(
            f"the samples of {type(sampler).__name__} are drawn once, and each epoch has the same ones in the same "
            "order: only shuffle=True draws a new order for each epoch",
            stacklevel=3,
        )
    context = given.multiprocessing_context
    return DataLoader(
        given.dataset,
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        shuffle=None if is_own else is_random,
        sampler=sampler if is_own else None,
        collate_fn=given.collate_fn,
        num_workers=given.num_workers,
        prefetch_factor=given.prefetch_factor,
        pin_memory=given.pin_memory,
        persistent_workers=given.persistent_workers,
        drop_last=given.drop_last,
        timeout=given.timeout,
        worker_init_fn=given.worker_init_fn,
        generator=(sampler.generator or given.generator) if is_random else None,
        multiprocessing_context=context and context.get_start_method(),
        pin_memory_device=given.pin_memory_device,
        in_order=given.in_order,
    )


def _is_partial(sampler: RandomSampler, dataset: Any) -> bool:
    """Return True if the sampler does not give each sample of the dataset once."""
    return sampler.replacement or sampler.num_samples != len(dataset)


def _equal_part(size: int) -> int:
    """Return the size of the parts if a batch is cut into as many equal ones as possible."""
    return size // max(count for count in range(1, MICRO_BATCHES_MOST + 1) if size % count == 0)
