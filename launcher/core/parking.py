"""Waiting for what nobody here can bring about: a store that is away, nodes that are only silent.

A wait says why and since when, and it has an end.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastrain.launcher.core.cluster import Cluster
from elastrain.launcher.core.deadlines import Deadlines, ParkedDue
from elastrain.launcher.core.events import StoreCameBack, StoreWentAway
from elastrain.launcher.core.shutdown import Shutdown
from elastrain.launcher.values import Command, Log


@dataclass(frozen=True, kw_only=True)
class Parked:
    """A change of the view that is wanted and cannot be made."""

    reason: str
    since_s: float
    """Monotonic time of the first reason."""


class Parking:
    """The store's outages, and changes of the view that have to wait."""

    def __init__(self, cluster: Cluster, deadlines: Deadlines, shutdown: Shutdown) -> None:
        self._cluster, self._config = cluster, cluster.config
        self._deadlines, self._shutdown = deadlines, shutdown
        self.parked: Parked | None = None
        """Why a change of the view waits, if one does."""
        self.store_away_since_s: float | None = None
        """Monotonic time since which the store has not answered; None while it does."""

    def on_store_away(self, event: StoreWentAway, now: float) -> list[Command]:
        # The first failed call is news; those that follow are the same outage.
        if self._shutdown.end is not None or self.store_away_since_s is not None:
            return []
        self.store_away_since_s = now
        goes_on = "training goes on, but" if self._cluster.progress.begun else "the first commit waits for it, and"
        say = f"the store does not answer: {goes_on} nobody can leave or join the view until it is back"
        return [Log(event="store_away", fields={"reason": event.problem}, say=say)]

    def on_store_back(self, event: StoreCameBack, now: float) -> list[Command]:
        if self.store_away_since_s is None:
            return []
        away_s, self.store_away_since_s = now - self.store_away_since_s, None
        return [
            Log(event="store_back", fields={"away_s": away_s}, say=f"the store answers again, after {away_s:.0f} s")
        ]

    def park(self, reason: str, now: float) -> list[Command]:
        """Wait for this reason, told once. The time counts from the first reason: later ones do not put the end off."""
        if self.parked is not None and self.parked.reason == reason:
            return []
        self.parked = Parked(reason=reason, since_s=self.parked.since_s if self.parked else now)
        self._deadlines.set_first(ParkedDue(), now + self._config.times.park_timeout_s)
        self._cluster.progress.explain(f"parked: {reason}")
        fields = {"lost": self._cluster.gone_from_view(), "reason": reason}
        return [Log(event="parked", fields=fields, say=f"parked: {reason}")]

    def unpark(self, now: float) -> list[Command]:
        if self.parked is None:
            return []
        parked_s, self.parked = now - self.parked.since_s, None
        self._deadlines.drop(ParkedDue())
        return [Log(event="unparked", fields={"parked_s": parked_s}, say=f"no longer parked, after {parked_s:.1f} s")]

    def on_parked_too_long(self, due: ParkedDue, now: float) -> list[Command]:
        assert self.parked is not None
        limit_s = self._config.times.park_timeout_s
        sentence = f"parked for {limit_s:g} s: {self.parked.reason}. Raise --park-timeout to wait longer"
        # Alone: others may see a majority, or the store, that this node does not.
        return self._shutdown.finish(1, sentence, everywhere=False)
