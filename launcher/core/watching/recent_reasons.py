"""The newest reasons for what happened in a job, with the times at which the agent gave them."""

from __future__ import annotations

_REASONS_MAX = 8


class RecentReasons:
    """The newest reasons, the newest last. `now_s`: time of the event that the agent handles, monotonic seconds."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._given: list[tuple[float, str]] = []

    def at(self, now_s: float) -> None:
        """Note the time of the event that is handled next."""
        self.now_s = now_s

    def add(self, reason: str) -> None:
        """Add a reason. The oldest ones are dropped."""
        self._given = [*self._given, (self.now_s, reason)][-_REASONS_MAX:]

    @property
    def texts(self) -> list[str]:
        """The reasons, the newest last."""
        return [reason for _, reason in self._given]

    def ago_s(self, now_s: float) -> list[float]:
        """Return the age of each reason in seconds, in the order of `texts`."""
        return [max(0.0, now_s - given_s) for given_s, _ in self._given]
