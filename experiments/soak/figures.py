"""Whether something grows: samples of a job's processes over time, and what they amount to. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

GROWTH = 1.15
"""The last quarter's median over the second quarter's: what is above has grown. (The first one warms up.)"""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One look. `lasting`: processes that live as long as the job: its launcher, agents, etcd and their helpers."""

    at_s: float
    lasting_bytes: int
    lasting_descriptors: int
    worker_bytes: int
    """Of the largest worker: they come and go, and each begins anew."""
    disk_bytes: int
    """What a run leaves besides its record: etcd's data, temporary files. Journals and logs grow by design."""


def growth(values: Sequence[float]) -> float | None:
    """Median of the last quarter over that of the second; None for fewer than eight values."""
    quarter = len(values) // 4
    if quarter < 2:
        return None
    before, after = statistics.median(values[quarter : 2 * quarter]), statistics.median(values[-quarter:])
    return after / before if before else None


def figures(samples: Sequence[Sample]) -> dict[str, Any]:
    """`grown`: how many of the four have."""
    found = {
        name: growth([getattr(sample, name) for sample in samples])
        for name in ("lasting_bytes", "lasting_descriptors", "worker_bytes", "disk_bytes")
    }
    values: dict[str, Any] = {f"growth_{name}": value for name, value in found.items()}
    values["grown"] = sum(value > GROWTH for value in found.values() if value is not None)
    if samples:
        last = samples[-1]
        values |= {"last_lasting_bytes": last.lasting_bytes, "last_descriptors": last.lasting_descriptors}
        values |= {"last_worker_bytes": last.worker_bytes, "last_disk_bytes": last.disk_bytes}
    return values
