"""The etcd and the network of simulated nodes, and the faults that strike them on request.

Faults are carried out here, and undone when their time is over. An etcd that ends by itself is restarted, because no
other process would do it.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from elastrain.base.event_loop import EventLoop
from elastrain.errors import ConfigError, ElastrainError
from elastrain.launcher.faults.fault import Fault, Scheme
from elastrain.launcher.faults.table import CLASSES, Carrier, lasts_s
from elastrain.launcher.namespaces.impairments import Impairment, condition, impairments
from elastrain.launcher.namespaces.switch import SWITCH, Switch
from elastrain.launcher.shared.console import say
from elastrain.launcher.shared.rundir import EventLog
from elastrain.launcher.simulated.embedded_etcd import EmbeddedEtcd
from elastrain.launcher.store.port import StoreError

_ETCD_AGAIN_S = 0.5


class Infrastructure:
    """The etcd and the network. Every change is written to `log`.

    `switch` is None if all nodes share this machine's network.
    """

    def __init__(self, etcd: EmbeddedEtcd, switch: Switch | None, log: EventLog) -> None:
        self._etcd, self._switch, self._log = etcd, switch, log
        self._impairments: list[Impairment] = []
        self._due: list[tuple[float, Callable[[], None]]] = []
        """Calls for later, with their times, that carry out or undo faults. They have the order of the requests."""

    @property
    def endpoint(self) -> str:
        """Address of etcd."""
        return self._etcd.endpoint

    def address(self, node: str) -> str | None:
        """Return the address of a node, or None if the nodes share this machine's network."""
        return self._switch.address(node) if self._switch is not None else None

    def namespace(self, node: str) -> str | None:
        """Return the network namespace of a node, or None if the nodes share this machine's network."""
        return self._switch.namespace(node) if self._switch is not None else None

    @property
    def carries(self) -> tuple[str, ...]:
        """Fault classes that can be carried out here. Those of the network need nodes with networks of their own."""
        mine = [row for row in CLASSES.values() if row.by is Carrier.LAUNCHER]
        return tuple(row.name for row in mine if self._switch is not None or Scheme.ETCD in row.targets)

    def carry_out(self, fault: Fault, now: float) -> None:
        """Carry out a fault now; its moment is ignored.

        Raises ConfigError if that is not possible, NetworkError and StoreError.
        """
        lasts = lasts_s(fault)
        until_s = math.inf if lasts is None else now + lasts
        match fault.kind:
            case "etcd-stop":
                self._stop_etcd(until_s)
            case "etcd-kill" | "etcd-wipe":
                self._kill_etcd(until_s, data_too=fault.kind == "etcd-wipe")
            case "etcd-compact":
                self._log.write("etcd_compacted", revision=self._etcd.compact())
            case _:
                self._impair(fault, until_s)

    def carry_out_later(self, fault: Fault, at_s: float) -> None:
        """Carry out a fault at a later time. An error is written to the log then."""
        self._due.append((at_s, partial(self.carry_out, fault, at_s)))

    def _impair(self, fault: Fault, until_s: float) -> None:
        if self._switch is None:
            raise ConfigError(f"{fault.kind} needs nodes with networks of their own: start the job with --netns")
        found = impairments(_named(fault, self._switch), self._switch.hosts, SWITCH)
        self._impairments += found
        self._due.append((until_s, partial(self._mend, found)))
        self._apply("impaired", found)

    def _mend(self, found: list[Impairment]) -> None:
        for impairment in found:
            self._impairments.remove(impairment)
        self._apply("mended", found)

    def _apply(self, event: str, found: list[Impairment]) -> None:
        assert self._switch is not None
        self._switch.apply(condition(self._impairments))
        self._log.write(event, impairments=[str(impairment) for impairment in found])

    def watch_etcd(self, loop: EventLoop) -> None:
        """Restart etcd from this loop whenever it ends by itself."""
        self._etcd.watch(loop, self._on_etcd_end)

    def _on_etcd_end(self) -> None:
        """Plan a restart after etcd ended by itself, for example because the machine is short of memory."""
        self._log.write("etcd_ended")
        say("etcd has ended: it is started again, with its data")
        self._due.append((time.monotonic() + _ETCD_AGAIN_S, self._start_etcd_again))

    def _stop_etcd(self, until_s: float) -> None:
        """Suspend etcd with all its threads: connections stay open, and it does not answer."""
        self._etcd.stop()
        self._log.write("etcd_stopped")
        self._due.append((until_s, self._let_etcd_go_on))

    def _let_etcd_go_on(self) -> None:
        self._etcd.go_on()
        self._log.write("etcd_goes_on")

    def _kill_etcd(self, until_s: float, *, data_too: bool) -> None:
        """Kill etcd by SIGKILL. It is restarted later; with `data_too`, without its data."""
        self._etcd.kill()
        if data_too:
            self._etcd.forget()
        self._log.write("etcd_killed", data_too=data_too)
        self._due.append((until_s, self._start_etcd_again))

    def _start_etcd_again(self) -> None:
        self._etcd.start_again()
        self._log.write("etcd_started_again")

    def next_deadline_s(self) -> float | None:
        """Return the time of the next planned call, or None."""
        due_s = min((due_s for due_s, _ in self._due), default=math.inf)
        return due_s if due_s < math.inf else None

    def on_tick(self, now: float) -> None:
        """Make the planned calls whose time has come."""
        due = [call for due_s, call in self._due if due_s <= now]
        self._due = [(due_s, call) for due_s, call in self._due if due_s > now]
        for call in due:
            try:
                call()
            except (ElastrainError, StoreError) as error:
                self._log.write("fault_refused", reason=str(error))


def _named(fault: Fault, switch: Switch) -> Fault:
    """Return the fault with a node in place of each `random`. Raises ConfigError for an unknown node."""
    left = [host for host in switch.hosts if host not in {target.name for target in fault.targets}]
    random.shuffle(left)
    targets = []
    for target in fault.targets:
        if target.is_random and not left:
            raise ConfigError(f"{fault}: there are only {len(switch.hosts)} nodes")
        targets.append(replace(target, name=left.pop()) if target.is_random else target)
    for name in [n for t in targets for n in (t.name.split("-") if t.scheme is Scheme.LINK else [t.name])]:
        if name not in switch.hosts:
            raise ConfigError(f"{fault}: there is no node {name}: there are {', '.join(switch.hosts)}")
    return fault.aimed_at(targets)
