"""The row about device memory that peers read in place: the bytes that still go through the host."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from experiments.accelerator.jobs import Ran, total
from experiments.accelerator.measures import METERED, Bench


def carried_in_place(bench: Bench) -> Mapping[str, Any]:
    """Count the bytes between host and device for what travels within a node.

    There is a job of four, one of three with backups, and a pipeline of three. What a member keeps in its host memory
    for other members' shards travels no further, so it is counted apart. The pipeline has some of it without backups,
    too: a member that gets a shard keeps it as a backup until it is the primary. Raises RuntimeError if members read
    nothing in place.
    """
    three = replace(METERED, members=3, shared="trusted")
    jobs = {
        name: bench.run(name, training, stages)
        for name, training, stages in (
            ("shared_of_four", replace(three, model="wide", members=4, backups=0), 1),
            ("shared_with_backups", replace(three, backups="all"), 1),
            ("shared_of_stages", replace(three, backups=0), 3),
        )
    }
    for ran in jobs.values():
        if not all(reads_in_place(ran).values()):
            raise RuntimeError(f"members read nothing in place: {reads_in_place(ran)}")
    last = [lines[-1] for ran in jobs.values() for lines in ran.facts.values()]
    sums = total([{name: each.get(name, 0) for name in ("bytes_out", "bytes_in", "backup_bytes")} for each in last])
    return {
        "shared_carried": sums["bytes_out"] + sums["bytes_in"] - sums["backup_bytes"],
        "shared_carried_where": dict(total([each["carried_at"] for each in last])),
        "shared_backup_mb": sums["backup_bytes"] / 1e6,
        "shared_read_mb": sum(each.get("wanted_in", 0) for each in last) / 1e6,
    }


def reads_in_place(ran: Ran) -> dict[str, bool]:
    """Return member -> whether its journal says that it reads peers' device memory in place."""
    found = {}
    for path in sorted(ran.folder.glob("members/*.jsonl")):
        told = [json.loads(line) for line in path.read_text().splitlines() if '"device_memory"' in line]
        found[path.stem] = any(line.get("read_in_place") for line in told)
    return found
