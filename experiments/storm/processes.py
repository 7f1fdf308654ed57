"""The processes of one run, known by a word in their environment; signals to them; what is left when it has ended."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterable
from pathlib import Path

MARK = "ELASTRAIN_STORM"
"""The variable that every process of a run inherits, whoever started it."""
SETTLE_S = 10.0
"""After the end: how long what is still ending may take."""
STACK_S = 0.5
_SEGMENT = re.compile(rb"/dev/shm/(\S+)")


class Processes:
    """Those whose environment holds this run's mark. Nothing else is ever signalled."""

    def __init__(self, mark: str) -> None:
        self._words = f"{MARK}={mark}".encode()
        self.segments: set[str] = set()
        """Names in /dev/shm that processes of the run were seen to use: others may leave theirs there meanwhile."""

    def all(self) -> list[int]:
        """Zombies have no environment any more and are not among them."""
        return [int(place.name) for place in Path("/proc").glob("[0-9]*") if self.owns(int(place.name))]

    def owns(self, pid: int) -> bool:
        return self._words in _read(pid, "environ").split(b"\0")

    def signal(self, pid: int, number: int) -> bool:
        """False if the process has gone, or was never one of the run."""
        if not self.owns(pid):
            return False
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return False
        return True

    def loaders(self, worker: int) -> list[int]:
        """Forks of a worker, and theirs: the processes below it with its own command line."""
        command, mine = _read(worker, "cmdline"), self.all()
        found = [pid for pid in mine if parent(pid) == worker and _read(pid, "cmdline") == command]
        return sorted(found + [pid for pid in mine if parent(pid) in found])

    def etcd(self) -> list[int]:
        return [pid for pid in self.all() if Path(_read(pid, "cmdline").split(b"\0")[0].decode()).name == "etcd"]

    def note_segments(self) -> None:
        """Look which named shared memory they use. Elastrain's has no name."""
        for pid in self.all():
            self.segments |= {name.decode() for name in _SEGMENT.findall(_read(pid, "maps"))}

    def dump_stacks(self, workers: Iterable[int]) -> None:
        """Workers write theirs to files; agents, which run with PYTHONFAULTHANDLER, to their output, and end by it."""
        known = set(workers)
        for pid in known:
            self.signal(pid, signal.SIGUSR1)
        time.sleep(STACK_S)
        for pid in self.all():
            if pid not in known and parent(pid) not in known and b"python" in _read(pid, "cmdline"):
                self.signal(pid, signal.SIGABRT)
                time.sleep(STACK_S)

    def end(self) -> None:
        """SIGKILL to all, those that are started meanwhile too."""
        for _ in range(20):
            found = self.all()
            for pid in found:
                self.signal(pid, signal.SIGKILL)
            if not found:
                return
            time.sleep(0.1)


def parent(pid: int) -> int:
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    return int(fields[1]) if fields else 0


def name(pid: int) -> str:
    return _read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()[:120]


def leftovers(
    processes: Processes, folder: Path, temporary: Path, job: str, *, settle_s: float = SETTLE_S
) -> tuple[str, ...]:
    """What outlives the job in `folder`, once what is ending has had its time: processes, addresses, files, and shared
    memory that has a name and was seen in one of its processes.
    """
    deadline_s = time.monotonic() + settle_s
    while (left := processes.all()) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    found = [f"process {pid}: {name(pid)}" for pid in left]
    if job and f"elastrain/{job}/" in Path("/proc/net/unix").read_text():
        found.append(f"an address of job {job} in /proc/net/unix")
    own = {"control.sock", "secret", "etcd"}
    found += [f"file {path}" for path in sorted(folder.rglob("*")) if path.name in own or path.is_socket()]
    # Torch's own cache, made by any script that uses its optimizers, with or without elastrain.
    found += [f"file {path}" for path in temporary.iterdir() if not path.name.startswith("torchinductor_")]
    there = processes.segments & set(os.listdir("/dev/shm"))
    return (*found, *(f"shared memory {segment}" for segment in sorted(there)))


def _read(pid: int, file: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{file}").read_bytes()
    except OSError:  # it has just ended
        return b""
