"""Waiting for what nobody here can bring about: a store that is away, nodes that are only silent. A layer of `core`.

Who waits says why and since when, and not for ever.
"""

from __future__ import annotations

from elastrain.launcher.ending import Ending
from elastrain.launcher.values import Command, Log, Parked


class Parking(Ending):
    """The store's outages, and changes of the view that have to wait."""

    def on_store_away(self, problem: str, now: float) -> list[Command]:
        """The store does not answer. Steps go on; whether a change waits for it shows when one is wanted."""
        if self.end is not None or self.store_away_since_s is not None:
            return []
        self.store_away_since_s = now
        say = "the store does not answer: training goes on, but nobody can leave or join the view until it is back"
        return [Log(event="store_away", fields={"reason": problem}, say=say)]

    def on_store_back(self, now: float) -> list[Command]:
        if self.store_away_since_s is None:
            return []
        away_s, self.store_away_since_s = now - self.store_away_since_s, None
        return [
            Log(event="store_back", fields={"away_s": away_s}, say=f"the store answers again, after {away_s:.0f} s")
        ]

    def _park(self, reason: str, now: float) -> list[Command]:
        """The view should change and can not. Told once per reason; the time counts from the first."""
        if self.parked is not None and self.parked.reason == reason:
            return []
        self.parked = Parked(reason=reason, since_s=self.parked.since_s if self.parked else now)
        self._deadlines_s.setdefault("parked", now + self.config.park_timeout_s)
        self._reason(f"parked: {reason}")
        fields = {"lost": self._gone(), "reason": reason}
        return [Log(event="parked", fields=fields, say=f"parked: {reason}")]

    def _unpark(self, now: float) -> list[Command]:
        if self.parked is None:
            return []
        parked_s, self.parked = now - self.parked.since_s, None
        self._deadlines_s.pop("parked", None)
        return [Log(event="unparked", fields={"parked_s": parked_s}, say=f"no longer parked, after {parked_s:.1f} s")]

    def _on_parked_too_long(self) -> list[Command]:
        assert self.parked is not None
        limit_s = self.config.park_timeout_s
        sentence = f"parked for {limit_s:g} s: {self.parked.reason}. Raise --park-timeout to wait longer"
        return self._finish(1, sentence, everywhere=False)

    def _gone(self) -> list[str]:
        """Members of the view that are proven dead."""
        return [m for m in (self.view.ids if self.view else ()) if not self.is_alive(m)]
