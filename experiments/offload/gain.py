"""What the memory is good for: the largest micro-batch that fits into a fixed limit, and its samples per second."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from experiments.harness import interleave
from experiments.offload.models import Shape
from experiments.offload.processes import Process
from experiments.offload.worker import Case, Worker

# Of the limit; backward computes with more than saved tensors, and that needs room too.
OFFLOAD_SHARE = 0.6
RSS_NOISE = 1.05
WARM_STEPS = {"keep": 1, "recompute": 1, "ours": 2}  # its first shows the offload what there is to plan


def measure_gain(
    kind: str, shape: Shape, directory: Path, device: str, *, batches: Sequence[int], rounds: int
) -> dict[str, Any]:
    """Best samples per second, optimizer included, in the memory that keeping needs for one sample.

    Memory is the rise of the resident set in one step, for all variants alike. First the largest micro-batch that
    fits is looked for, then the variants take turns at theirs.
    """

    def case(name: str, batch: int, limit_bytes: int) -> Case:
        return Case(
            name=name,
            kind=kind,
            shape=replace(shape, batch=batch),
            directory=directory,
            device=device,
            limit_bytes=int(OFFLOAD_SHARE * limit_bytes) or None,
            min_bytes=64 << 10,
            optimizer=True,
        )

    limit_bytes = _rss_bytes(case("keep", 1, 0))
    assert limit_bytes is not None
    tried: list[dict[str, Any]] = []

    def fits(name: str, batch: int) -> bool:
        rss_bytes = _rss_bytes(case(name, batch, limit_bytes))
        found = rss_bytes is not None and rss_bytes <= limit_bytes * RSS_NOISE
        tried.append({"name": name, "batch": batch, "rss_bytes": rss_bytes, "fits": found})
        return found

    largest = {"keep": 1}  # that is the limit
    for name in ("recompute", "ours"):
        if batch := largest_that(partial(fits, name), batches):
            largest[name] = batch
    processes = {name: Process(Worker, case(name, batch, limit_bytes)) for name, batch in largest.items()}
    for name, process in processes.items():
        for _ in range(WARM_STEPS[name]):
            process.ask("time")
    seconds = interleave(
        {name: lambda process=process: process.ask("time")["wall_s"] for name, process in processes.items()},  # type: ignore[misc]
        rounds=rounds,
    )
    for process in processes.values():
        process.close()
    rates = [{name: largest[name] / seconds[name][index] for name in largest} for index in range(rounds)]
    return {
        "limit_bytes": limit_bytes,
        "largest_batch": largest,
        "samples_per_s": {name: statistics.median(each[name] for each in rates) for name in largest},
        "gain": statistics.median(each.pop("ours", 0.0) / max(each.values()) for each in rates),
        "tried": tried,
    }


def largest_that(fits: Callable[[int], bool], batches: Sequence[int]) -> int | None:
    """The largest of `batches` that fits, None if none does: the larger, the more memory, so it looks in the middle.

    >>> largest_that(lambda batch: batch < 8, (1, 2, 4, 8))
    4
    """
    low, high = 0, len(batches)  # those below `low` fit, those from `high` on do not
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if fits(batches[middle]) else (low, middle)
    return batches[low - 1] if low else None


def _rss_bytes(case: Case) -> int | None:
    """How far one step raises the resident set; None if the memory limit is refused as too small."""
    process = Process(Worker, case)
    try:
        for _ in range(WARM_STEPS[case.name]):
            found = process.ask("memory")
            if found is None:
                return None
        measured: dict[str, int] | None = process.ask("memory")
        return None if measured is None else measured["rss_bytes"]
    finally:
        process.close()
