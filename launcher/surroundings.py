"""What simulated nodes live in (their etcd, their network), and what goes wrong with it for a while on request.

Carried out here, and undone when its time is over. Who asked, and in which words, is not known here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from elastrain.launcher.embedded import EmbeddedEtcd
from elastrain.launcher.events import EventLog
from elastrain.launcher.namespaces.impairments import Impairment, condition
from elastrain.launcher.namespaces.programs import NetworkError
from elastrain.launcher.namespaces.switch import Switch


class Surroundings:
    """`switch`: None where all nodes share this machine's network. Every change is told to `log`."""

    def __init__(self, etcd: EmbeddedEtcd, switch: Switch | None, log: EventLog) -> None:
        self._etcd, self._switch, self._log = etcd, switch, log
        self._impairments: list[Impairment] = []
        self._ends: list[tuple[float, Callable[[], None]]] = []
        """When what is undone, in the order in which it was asked for."""

    @property
    def endpoint(self) -> str:
        return self._etcd.endpoint

    def address(self, node: str) -> str | None:
        """None where the nodes share this machine's network."""
        return self._switch.address(node) if self._switch is not None else None

    def namespace(self, node: str) -> str | None:
        return self._switch.namespace(node) if self._switch is not None else None

    # ---- the network

    def impair(self, impairment: Impairment, until_s: float = math.inf) -> None:
        """Raises NetworkError."""
        self._impairments.append(impairment)
        self._apply("impaired", impairment)
        self._ends.append((until_s, lambda: self._mend(impairment)))

    def _mend(self, impairment: Impairment) -> None:
        self._impairments.remove(impairment)
        self._apply("mended", impairment)

    def _apply(self, event: str, impairment: Impairment) -> None:
        assert self._switch is not None
        self._switch.apply(condition(self._impairments))
        self._tell(event, impairment=str(impairment))

    # ---- etcd

    def stop_etcd(self, until_s: float) -> None:
        """Stopped, with all its threads: connections stand, and nothing answers."""
        self._etcd.stop()
        self._tell("etcd_stopped")
        self._ends.append((until_s, self._let_etcd_go_on))

    def _let_etcd_go_on(self) -> None:
        self._etcd.go_on()
        self._tell("etcd_goes_on")

    def kill_etcd(self, until_s: float, *, data_too: bool) -> None:
        """SIGKILL; it is started again with its data, or, `data_too`, without."""
        self._etcd.kill()
        if data_too:
            self._etcd.forget()
        self._tell("etcd_killed", data_too=data_too)
        self._ends.append((until_s, self._start_etcd_again))

    def _start_etcd_again(self) -> None:
        self._etcd.start_again()
        self._tell("etcd_started_again")

    def compact_etcd(self) -> None:
        """All but the newest revision are forgotten. Raises StoreError."""
        self._tell("etcd_compacted", revision=self._etcd.compact())

    # ---- time

    def next_deadline_s(self) -> float | None:
        return min((due_s for due_s, _ in self._ends), default=None)

    def on_tick(self, now: float) -> None:
        due = [undo for due_s, undo in self._ends if due_s <= now]
        self._ends = [(due_s, undo) for due_s, undo in self._ends if due_s > now]
        for undo in due:
            try:
                undo()
            except NetworkError as error:
                self._tell("not_mended", reason=str(error))

    def _tell(self, event: str, **fields: Any) -> None:
        self._log.write(event, **fields)
