"""Knowledge of this node about the quorum, shared by the agent's threads: the founding's state, the endpoints."""

from __future__ import annotations

import hashlib
import secrets
import threading
from dataclasses import dataclass, replace

from elastrain.launcher.core.quorum.founding import FoundingState, Named
from elastrain.launcher.quorum.etcd_process import Ports
from elastrain.launcher.quorum.muster import Greeting
from elastrain.launcher.shared import clocks


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Facts of this node that do not change: its job, its name, its place in --join (-1: none), and its ports."""

    job: str
    node: str
    place: int
    ports: Ports

    @property
    def is_named(self) -> bool:
        """True if --join names this host."""
        return self.place >= 0


class NodeStanding:
    """The shared values. Every method may be called in any thread."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self._lock = threading.Lock()
        self._endpoints: tuple[str, ...] = ()
        self._state = FoundingState(me=self._new_instance())

    @property
    def state(self) -> FoundingState:
        """State of this host in the founding."""
        with self._lock:
            return self._state

    @property
    def instance(self) -> str:
        """Name of this agent's present etcd member, or of the one that it could become."""
        return self.state.me.instance

    def endpoints(self) -> tuple[str, ...]:
        """Return the clients' addresses of all etcd members, this node's first. Empty before the quorum works."""
        with self._lock:
            return self._endpoints

    def adopt(self, state: FoundingState) -> None:
        """Replace the state."""
        with self._lock:
            self._state = state

    def use(self, endpoints: tuple[str, ...]) -> None:
        """Replace the endpoints. No endpoint at all changes nothing."""
        own, node = self.identity.ports.client, self.identity.node

        def order(endpoint: str) -> tuple[bool, bytes]:
            # Nodes without a member spread over all members.
            return endpoint != own, hashlib.blake2b(f"{node} {endpoint}".encode()).digest()

        if endpoints:
            with self._lock:
                self._endpoints = tuple(sorted(endpoints, key=order))

    def begin_anew(self) -> None:
        """Take another instance, because the data of the present one is given up."""
        with self._lock:
            self._state = replace(self._state, me=self._new_instance())

    def greet(self) -> Greeting:
        """Return the answer for other hosts."""
        identity = self.identity
        with self._lock:
            return Greeting(
                job=identity.job,
                node=identity.node,
                instance=self._state.me.instance,
                wall_s=clocks.wall_s(),
                state=self._state if identity.is_named or self._state.serves else None,
                endpoints=self._endpoints,
            )

    def _new_instance(self) -> Named:
        identity = self.identity
        name = f"{identity.node}.{secrets.token_hex(6)}"
        return Named(place=identity.place, instance=name, peer=identity.ports.peer)
