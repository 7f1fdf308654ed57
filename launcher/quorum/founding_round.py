"""Rounds of the founding: this node asks the named hosts, decides by `core.quorum.founding`, and starts its etcd."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from elastrain.errors import ConfigError
from elastrain.launcher.core.quorum.founding import GRACE_S, Charter, HeardState, Outlook, step
from elastrain.launcher.quorum.certificates import Pair
from elastrain.launcher.quorum.etcd_admin import EtcdAdmin
from elastrain.launcher.quorum.etcd_process import EtcdProcess, Membership
from elastrain.launcher.quorum.join_hosts import HostAddresses, JoinHosts
from elastrain.launcher.quorum.muster import Greeting, UnreachableError, ask
from elastrain.launcher.quorum.node_standing import NodeStanding
from elastrain.launcher.shared import clocks
from elastrain.launcher.shared.times import wrong_clock
from elastrain.launcher.store.port import StoreError


class FoundingRounds:
    """The rounds until this node is in a quorum. `needs_all`: no quorum is founded without every named host."""

    def __init__(
        self, standing: NodeStanding, join: JoinHosts, etcd: EtcdProcess, pair: Pair, *, needs_all: bool
    ) -> None:
        self._standing, self._join, self._etcd, self._pair = standing, join, etcd, pair
        self._admin = EtcdAdmin(pair)
        self._grace_s = math.inf if needs_all else GRACE_S
        self._began_s = time.monotonic()
        self._heard: dict[int, tuple[Greeting, float]] = {}
        self._trouble: dict[int, str] = {}
        # A thread for each question, and one for each name that is looked up meanwhile.
        self._pool = ThreadPoolExecutor(2 * len(join.hosts), thread_name_prefix="elastrain-ask")
        self._addresses = HostAddresses(join, self._pool)

    def close(self) -> None:
        """End the threads that ask."""
        self._pool.shutdown(wait=False)

    def play(self) -> bool:
        """Play one round. Returns True once this node is in a quorum that works.

        Raises StrangerError and ConfigError if a named host can never belong to this job.
        """
        self._ask_all()
        if self._join.place is None:
            return self._enter_any()
        now = time.monotonic()
        outlook = Outlook(
            named=len(self._join.hosts),
            heard={
                place: HeardState(state=greeting.state, age_s=now - at_s)
                for place, (greeting, at_s) in self._heard.items()
                if greeting.state is not None
            },
            waited_s=now - self._began_s,
            grace_s=self._grace_s,
            fresh_token=f"{self._standing.identity.job}.{secrets.token_hex(8)}",
        )
        before, founding = self._standing.state, step(self._standing.state, outlook)
        started = founding.state.started
        if founding.joins is not None:
            return self._enter_any()
        if before.started is None and started is not None:
            cluster = tuple((member.instance, member.peer) for member in started.members)
            self._etcd.start(Membership(name=before.me.instance, cluster=cluster, token=started.token, is_new=True))
        self._standing.adopt(founding.state)
        return started is not None and self._serves(started)

    def trouble(self) -> str:
        """Return what keeps the quorum from being founded, in words."""
        for greeting, _ in self._heard.values():
            if greeting.state is not None and greeting.state.serves:
                return (
                    f"node {greeting.node} is in a quorum that does not answer: if most of its members are lost for "
                    "good, end that node, and start all nodes again"
                )
        if self._trouble:
            return "; ".join(self._trouble[place] for place in sorted(self._trouble))
        if self._etcd.is_started:
            return f"etcd here does not work with the others: {self._etcd.last_words()}"
        return "the named hosts answer, and have no quorum yet"

    def _ask_all(self) -> None:
        places = [place for place in range(len(self._join.hosts)) if place != self._join.place]
        for place, answer in zip(places, self._pool.map(self._ask, places), strict=True):
            if isinstance(answer, Greeting):
                self._trouble.pop(place, None)
                self._heard[place] = (answer, time.monotonic())
                self._check(place, answer)
            else:
                self._trouble[place] = f"host {self._join.hosts[place].name} of --join cannot be reached: {answer}"
        _check_twins(self._join, self._heard)

    def _ask(self, place: int) -> Greeting | UnreachableError:
        address = self._addresses.of(place)
        try:
            if not address:
                raise UnreachableError("its name has no address yet")
            return ask(address, self._join.port, self._pair, self._standing.greet())
        except UnreachableError as error:
            self._addresses.renew(place)
            return error

    def _check(self, place: int, answer: Greeting) -> None:
        name, identity = self._join.hosts[place].name, self._standing.identity
        if answer.instance == self._standing.instance:
            raise ConfigError(f"--join: {name} is this host under another name: name it once")
        if answer.node == identity.node:
            raise ConfigError(f"node {answer.node} of {name} has the name of this node: choose another --node-name")
        if sentence := wrong_clock(clocks.wall_s() - answer.wall_s, name):
            raise ConfigError(sentence)

    def _serves(self, charter: Charter) -> bool:
        """Return True if etcd here works with a majority of the charter."""
        try:
            members = self._admin.members([self._standing.identity.ports.client])
        except StoreError:
            return False
        self._standing.use(tuple(member.client for member in members if member.client))
        self._standing.adopt(replace(self._standing.state, started=charter, serves=True))
        return True

    def _enter_any(self) -> bool:
        """Take part in a quorum that a named host knows. Returns False if none works."""
        for greeting, _ in self._heard.values():
            state = greeting.state
            if state is None or not state.serves or state.started is None or not self._works(greeting.endpoints):
                continue
            if self._etcd.is_started:  # for a charter whose quorum has never worked
                self._etcd.stop()
                self._standing.begin_anew()
            self._standing.use(greeting.endpoints)
            self._standing.adopt(replace(self._standing.state, promised=None, started=state.started, serves=True))
            return True
        return False

    def _works(self, endpoints: Sequence[str]) -> bool:
        try:
            return bool(self._admin.members(endpoints))
        except StoreError:
            return False


def _check_twins(join: JoinHosts, heard: dict[int, tuple[Greeting, float]]) -> None:
    """Raise ConfigError if two named hosts are one."""
    seen: dict[str, int] = {}
    for place, (greeting, _) in heard.items():
        twin = seen.setdefault(greeting.instance, place)
        if twin != place:
            raise ConfigError(
                f"--join names one host twice: {join.hosts[twin].name} and {join.hosts[place].name} are answered by "
                f"node {greeting.node}"
            )
