"""The quarantine of a node: after too many losses of workers within a time, it gets no more of them."""

from __future__ import annotations

from collections.abc import Sequence

from elastrain.launcher.core.agent_events import AgentPart
from elastrain.launcher.shared.job_values import JobConfig
from elastrain.launcher.shared.places import QuarantineRule


class Quarantine(AgentPart):
    """The times at which this node has lost workers, in this life of the job and in earlier ones."""

    def __init__(self, config: JobConfig) -> None:
        self._node, self._rule = config.node, config.places.quarantine
        self.losses_s: list[float] = [*config.life.losses_s]
        """Monotonic times, the newest last."""

    def note(self, now: float) -> None:
        """Record the loss of a worker."""
        self.losses_s.append(now)

    def reason(self) -> str:
        """Return why this node gets no more workers, or "". The newest loss decides, so a quarantine does not end."""
        return quarantined(self._node, self.losses_s, self._rule)


def quarantined(node: str, losses_s: Sequence[float], rule: QuarantineRule | None) -> str:
    """Return a sentence if the node lost as many workers as the rule allows within the rule's time, else ""."""
    if rule is None:
        return ""
    for first, last in zip(losses_s, losses_s[rule.losses - 1 :], strict=False):
        if last - first <= rule.within_s:
            count = "1 worker was" if rule.losses == 1 else f"{rule.losses} workers were"
            within = duration(rule.within_s)
            return f"{node} is quarantined and gets no more workers: {count} lost within {within} (--quarantine)"
    return ""


def duration(seconds: float) -> str:
    """Return seconds in the largest unit that leaves a whole number, such as "1 h"."""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:g} s"
