"""The row about device memory that peers read in place: the bytes that still go through the host."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from experiments.accelerator.jobs import Ran
from experiments.accelerator.measures import METERED, Bench


def carried_in_place(bench: Bench) -> Mapping[str, Any]:
    """Count the bytes between host and device in jobs of one node: of four members, and of three stages.

    They have no backups, which lie in host memory. Raises RuntimeError if members read nothing in place.
    """
    four = bench.run("shared_of_four", replace(METERED, model="wide", members=4, backups=0, shared="trusted"))
    staged = bench.run("shared_of_stages", replace(METERED, members=3, backups=0, shared="trusted"), stages=3)
    for ran in (four, staged):
        if not all(reads_in_place(ran).values()):
            raise RuntimeError(f"members read nothing in place: {reads_in_place(ran)}")
    carried = [_total(ran, "bytes_out") + _total(ran, "bytes_in") for ran in (four, staged)]
    return {"shared_carried": sum(carried), "shared_read_mb": _total(four, "wanted_in") / 1e6}


def reads_in_place(ran: Ran) -> dict[str, bool]:
    """Return member -> whether its journal says that it reads peers' device memory in place."""
    found = {}
    for path in sorted(ran.folder.glob("members/*.jsonl")):
        told = [json.loads(line) for line in path.read_text().splitlines() if '"device_memory"' in line]
        found[path.stem] = any(line.get("read_in_place") for line in told)
    return found


def _total(ran: Ran, name: str) -> int:
    return sum(lines[-1].get(name, 0) for lines in ran.facts.values())
