"""Monitor of this node's workers from outside: their heartbeat pages, the kernel's view of them, and their stacks.

No check needs the worker's interpreter, which may hang. `core.hang_detector` decides what follows.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from elastrain.base.processes import scheduled, state_of
from elastrain.base.thread_status import Station
from elastrain.comm.shm import group_trails
from elastrain.comm.shm.heartbeat_page import STACKS_SIGNAL, Lane, read
from elastrain.comm.shm.liveness import Watcher
from elastrain.launcher.core import agent_events as ev

_LOOK_EVERY_S = 0.1


@dataclass(frozen=True, kw_only=True)
class WatchedWorker:
    """A running worker that has sent its beacon."""

    pid: int
    watcher: Watcher


class WorkerMonitor:
    """The monitor. `workers` returns those that can be observed now; `happen` takes the observations."""

    def __init__(
        self, workers: Callable[[], Mapping[str, WatchedWorker]], happen: Callable[[ev.Event], None], folder: Path
    ) -> None:
        self._workers, self._happen = workers, happen
        self.folder = folder
        """Folder in which workers write their stacks, one file each."""
        self._due_s = time.monotonic() + _LOOK_EVERY_S

    def next_deadline_s(self) -> float | None:
        """Return the monotonic time of the next observation, or None without workers."""
        return self._due_s if self._workers() else None

    def on_tick(self, now: float) -> None:
        """Observe all workers if it is time, and report the result."""
        if now < self._due_s:
            return
        self._due_s = now + _LOOK_EVERY_S
        seen = tuple(_look(member, worker) for member, worker in self._workers().items())
        if seen:
            self._happen(ev.Looked(seen=seen))

    def take_stacks(self, reason: str) -> dict[str, str]:
        """Have each worker append the stacks of its threads to its file in `folder`.

        Above the stacks the agent writes the reason and a line about the worker: its place in the script, its state in
        the kernel, and the last operation of each torch.distributed group that it made. Returns these lines by member.
        """
        at, said = time.strftime("%H:%M:%S"), dict[str, str]()
        for member, worker in self._workers().items():
            seen = _look(member, worker)
            groups = group_trails.read(self.folder / f"{member}.groups")
            said[member] = "; ".join([_said(seen), _kernel_says(worker.pid), *groups])
            head = f"\n---- {at} {reason}\n{member}: {said[member]}\n"
            try:
                fd = os.open(self.folder / f"{member}.txt", os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
            except OSError:  # a worker without the file does not handle the signal, which would kill it
                continue
            with suppress(OSError), os.fdopen(fd, "wb", 0) as file:  # its disk may be full
                file.write(head.encode())
            os.kill(worker.pid, STACKS_SIGNAL)
        return said


def _look(member: str, worker: WatchedWorker) -> ev.Seen:
    loop, engine, device = (_seen(worker, lane) for lane in (Lane.LOOP, Lane.ENGINE, Lane.DEVICE))
    stopped = state_of(worker.pid) in ("T", "t")
    return ev.Seen(member=member, loop=loop, engine=engine, device=device, stopped=stopped)


def _seen(worker: WatchedWorker, lane: Lane) -> ev.SeenThread:
    spot = read(worker.watcher.page, lane)
    return ev.SeenThread(spot=spot, starved_s=scheduled(worker.pid, spot.thread).waited_s if spot.thread else 0.0)


def _kernel_says(pid: int) -> str:
    try:
        where = Path(f"/proc/{pid}/wchan").read_text()
    except OSError:
        where = ""
    state = state_of(pid) or "?"
    cannot = "; a stopped process cannot write down its stacks" if state in "Tt" else ""
    return f"state {state}, in the kernel's {where if where not in ('', '0') else '(nowhere)'}{cannot}"


def _said(seen: ev.Seen) -> str:
    loop = seen.loop.spot
    name = f" ({loop.name})" if loop.name else ""
    engine = seen.engine.spot
    last = engine.name + (f" of step {engine.step}" if engine.step >= 0 else "")
    said = f"its loop is {loop.place.name.lower()}{name} in step {loop.step}, its engine's last operation {last}"
    device = seen.device.spot
    if not device.name:
        return said
    busy = (
        f"work of step {device.step} to finish" if device.place is not Station.WAITING else "finished its loop's work"
    )
    return f"{said}, its device {device.name} has {busy}"
