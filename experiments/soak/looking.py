"""Reads what the processes of a job use, from /proc."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from pathlib import Path

from experiments.soak.figures import Sample

RECORD = ("members", "steps", "stacks", "logs", "events.jsonl", "output.log", "run.json", "brake", "enough")
"""Of a run's folder: what tells of the run, and grows with it."""


def look(at_s: float, pids: Iterable[int], workers: Collection[int], folders: Iterable[Path]) -> Sample:
    """`workers`: those of the processes that train, and their loaders."""
    pids = list(pids)
    lasting = [pid for pid in pids if pid not in workers and not _is_below(pid, workers)]
    return Sample(
        at_s=at_s,
        lasting_bytes=sum(map(memory_bytes, lasting)),
        lasting_descriptors=sum(map(descriptors, lasting)),
        worker_bytes=max((memory_bytes(pid) for pid in pids if pid in workers), default=0),
        disk_bytes=sum(map(folder_bytes, folders)),
    )


def memory_bytes(pid: int) -> int:
    """Its own share of what it maps (PSS); 0 if it has gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def descriptors(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0


def folder_bytes(folder: Path) -> int:
    """Blocks in use, the run's record left out; what vanishes meanwhile counts nothing."""
    total = 0
    for path in folder.rglob("*"):
        if path.relative_to(folder).parts[0] in RECORD or path.name == "events.jsonl":
            continue
        try:
            total += path.lstat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total


def _is_below(pid: int, workers: Collection[int]) -> bool:
    """Whether some worker has started it."""
    for _ in range(4):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return True
        pid = int(fields[1])
        if pid in workers:
            return True
    return False
