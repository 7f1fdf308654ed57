"""The end of an agent once its core has decided it: workers get SIGTERM, then SIGKILL, and then are given up."""

from __future__ import annotations

import signal
import time

from elastrain.launcher.agent.worker_processes import WorkerProcesses
from elastrain.launcher.shared.job_values import End, Tell
from elastrain.launcher.shared.notices import Over
from elastrain.launcher.shared.rundir import EventLog
from elastrain.launcher.store.registry import Registry
from elastrain.protocol.agent_messages import Stop

_GIVE_UP_S = 10.0


class NodeEnd:
    """The end and its deadlines. The store learns how this node ends before the node's key is deleted."""

    def __init__(
        self, workers: WorkerProcesses, registry: Registry, log: EventLog, *, incarnation: int, stop_grace_s: float
    ) -> None:
        self._workers, self._registry, self._log = workers, registry, log
        self._incarnation, self._stop_grace_s = incarnation, stop_grace_s
        self.end: End | None = None
        self._kill_due_s: float | None = None
        self._give_up_s: float | None = None

    @property
    def is_over(self) -> bool:
        """True if no worker is left, or if the remaining ones were given up because the kernel does not end them."""
        if self.end is None:
            return False
        given_up = self._give_up_s is not None and self._give_up_s <= time.monotonic()
        return given_up or not self._workers.running

    def begin(self, end: End) -> None:
        """Report the end to the log and the store, and ask all workers to stop."""
        self.end = end
        self._log.write("end", exit_code=end.code, reason=end.sentence)
        if end.job_is_over or end.lost:
            told = Over(code=end.code, sentence=end.sentence, detail=end.detail, lost=end.lost, again=end.again)
            self._registry.put_end(told)
        else:
            self._registry.put_left(self._incarnation, is_done=end.code == 0)
        running = self._workers.running
        for member in running:
            self._workers.tell(Tell(member=member, message=Stop(reason=end.sentence)))
            self._workers.signal(member, signal.SIGTERM)
        if running:
            self._kill_due_s = time.monotonic() + self._stop_grace_s

    def hurry(self) -> None:
        """Kill all workers at once if the end has begun, because the operator has asked again."""
        if self.end is not None:
            self._kill_all()

    def next_deadline_s(self) -> float | None:
        """Return the monotonic time at which `on_tick` or `is_over` has to be looked at next, or None."""
        return min((due_s for due_s in (self._kill_due_s, self._give_up_s) if due_s is not None), default=None)

    def on_tick(self, now: float) -> None:
        """Kill the workers once the grace period is over."""
        if self._kill_due_s is not None and self._kill_due_s <= now:
            self._kill_all()

    def _kill_all(self) -> None:
        self._kill_due_s = None
        if self._give_up_s is None:
            self._give_up_s = time.monotonic() + _GIVE_UP_S
        self._workers.signal_all(signal.SIGKILL)
