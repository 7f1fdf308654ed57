"""What the memory is good for: the largest micro-batch that fits into a fixed limit, and its samples per second."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.harness import interleave
from experiments.offload.models import Shape
from experiments.offload.processes import Process
from experiments.offload.worker import Case, Worker

# Of the limit; backward computes with more than saved tensors, and that needs room too.
OFFLOAD_SHARE = 0.6
RSS_NOISE = 1.05
BATCHES = (1, 2, 4, 8)
COMPARED = ("keep", "recompute", "ours")


def measure_gain(shape: Shape, directory: Path, *, rounds: int) -> dict[str, Any]:
    """Best samples per second, optimizer included, in the memory that keeping needs for one sample.

    Memory is the rise of the resident set in one step, for all variants alike. First the largest micro-batch that
    fits is looked for, then the variants take turns at theirs.
    """

    def case(name: str, batch: int, limit_bytes: int) -> Case:
        return Case(
            name=name,
            kind="gpt",
            shape=replace(shape, batch=batch),
            directory=directory,
            limit_bytes=int(OFFLOAD_SHARE * limit_bytes) or None,
            min_bytes=64 << 10,
            optimizer=True,
        )

    limit_bytes = _rss_bytes(case("keep", 1, 0))
    assert limit_bytes is not None
    largest = {"keep": 1}  # that is the limit
    tried = []
    for name in COMPARED:
        for batch in BATCHES[1 if name in largest else 0 :]:
            rss_bytes = _rss_bytes(case(name, batch, limit_bytes))
            fits = rss_bytes is not None and rss_bytes <= limit_bytes * RSS_NOISE
            tried.append({"name": name, "batch": batch, "rss_bytes": rss_bytes, "fits": fits})
            if fits:
                largest[name] = batch
            elif name in largest:
                break  # larger ones need more
    processes = {name: Process(Worker, case(name, batch, limit_bytes)) for name, batch in largest.items()}
    for process in processes.values():
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


def _rss_bytes(case: Case) -> int | None:
    """How far one step raises the resident set; None if the memory limit is refused as too small."""
    process = Process(Worker, case)
    try:
        for _ in range(2):
            found = process.ask("memory")
            if found is None:
                return None
        measured: dict[str, int] | None = process.ask("memory")
        return None if measured is None else measured["rss_bytes"]
    finally:
        process.close()
