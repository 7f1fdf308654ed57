"""The agent's key, its links, and the events that store and links cause for `core`, in a fixed order.

Nothing is decided here.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass, replace

from elastrain.base.event_loop import EventLoop
from elastrain.comm.wire.secure import Connection
from elastrain.errors import ConfigError
from elastrain.launcher.core import agent_events as ev
from elastrain.launcher.nodes.agent_links import AgentPassport, LinkEvents, Links, listen
from elastrain.launcher.shared import clocks
from elastrain.launcher.shared.job_values import Life, NodeRecord
from elastrain.launcher.shared.notices import Beat, Exited, Notice
from elastrain.launcher.shared.rundir import EventLog
from elastrain.launcher.store.first_commit import FirstCommit
from elastrain.launcher.store.port import Store, StoreError
from elastrain.launcher.store.registry import RegistryEvents, SharedRegistry
from elastrain.launcher.store.standing_keys import News
from elastrain.launcher.store.store_thread import Inbox


@dataclass(frozen=True, kw_only=True)
class ClusterAccess:
    """Settings for access to the other nodes: job, secret, store, this node's address, its keys' time to live."""

    job: str
    """Name of the job in its current life."""
    life: Life
    secret: bytes
    store: Store
    host: str
    key_ttl_s: float
    ports: tuple[int, int] | None = None
    """First and last port at which the agent may listen, or None for any."""


@dataclass(frozen=True, kw_only=True)
class AgentPort:
    """Callbacks to the agent that owns a `PeerAgents`."""

    happen: Callable[[ev.Event], None]
    hear_workers: Callable[[], None]
    """Reads all that this node's workers have sent so far. Their reports about shard holders matter after a loss."""
    nodes: Callable[[], Collection[str]]
    """Returns the other nodes that are not dead."""
    let_read: Callable[[str, Connection], str | None]
    """Lets a worker of another node read from this node's disk, or returns the reason for a refusal."""


class PeerAgents:
    """Access of this agent to the other nodes. `record` gets the endpoint at which this agent listens."""

    def __init__(
        self, loop: EventLoop, log: EventLog, access: ClusterAccess, record: NodeRecord, port: AgentPort
    ) -> None:
        self._log, self._port = log, port
        self._seen: dict[str, NodeRecord] = {}
        self._clocks: set[str] = set()
        """Nodes whose clocks were compared with this host's."""
        self._open = ExitStack()
        inbox = Inbox()
        self._open.callback(inbox.close)
        loop.register(inbox.fd, lambda _events: inbox.deliver())
        listener = _listen(access.host, access.ports)
        host = f"[{access.host}]" if ":" in access.host else access.host
        self.record = replace(record, endpoint=f"{host}:{listener.getsockname()[1]}")
        """Record of this node's record, with its endpoint."""
        passport = AgentPassport(secret=access.secret, job=access.job, record=self.record)
        self._links = Links(loop, inbox, listener, passport, self._link_events())
        self._open.callback(self._links.close)
        heard = RegistryEvents(
            on_news=self._on_news,
            on_trouble=lambda error: log.write("store_trouble", reason=str(error)),
            on_away=self._on_store_away,
        )
        self.registry = SharedRegistry(
            access.store, access.job, inbox, heard, life=access.life, key_ttl_s=access.key_ttl_s
        )
        self._open.callback(lambda: self.registry.close(self._links.answering()))

    def _link_events(self) -> LinkEvents:
        return LinkEvents(
            on_up=lambda node, why: self._on_link(node, why, up=True),
            on_down=lambda node, why, closed: self._on_link(node, why, up=False, closed=closed),
            on_notice=self._on_notice,
            on_reader=self._port.let_read,
            log_refusal=lambda reason: self._log.write("connection_refused", reason=reason),
        )

    def tell(self, notice: Notice, node: str | None) -> None:
        """Send a notice to a node, or to all if `node` is None."""
        self._links.tell(notice, node)

    def next_deadline_s(self) -> float | None:
        """Return the monotonic time of the links' next deadline, or None."""
        return self._links.next_deadline_s()

    def on_tick(self, now: float) -> None:
        """Handle the deadlines of the links that have passed."""
        self._links.on_tick(now)

    def close(self) -> None:
        """Leave the store, then close the links. The other nodes see in the store that this node has left."""
        self._open.close()

    def _on_link(self, node: str, why: str, *, up: bool, closed: bool = False) -> None:
        self._port.hear_workers()
        self._port.happen(ev.LinkChanged(node=node, up=up, reason=why, closed=closed))
        self._links.keep(self._port.nodes())

    def _on_notice(self, node: str, notice: Notice) -> None:
        if isinstance(notice, Exited):
            self._port.hear_workers()
        if isinstance(notice, Beat) and notice.wall_s and node not in self._clocks:
            self._clocks.add(node)
            self._port.happen(ev.ClockHeard(node=node, late_s=clocks.wall_s() - notice.wall_s))
        self._port.happen(ev.NoticeCame(node=node, notice=notice))

    def _on_store_away(self, error: StoreError | None) -> None:
        self._port.happen(ev.StoreCameBack() if error is None else ev.StoreWentAway(problem=str(error)))

    def _on_news(self, news: News) -> None:
        """Turn the store's content into events. Called after every change."""
        name = self.record.name
        others = {other: record for other, record in news.nodes.items() if other != name}
        gone = [other for other in self._seen if other not in others] if news.absence_counts else []
        for record in [record for other, record in others.items() if self._seen.get(other) != record]:
            self._port.happen(ev.NodeCame(record=record))
        if news.first_commit is FirstCommit.MADE:
            self._port.happen(ev.FirstCommitStands())
        if news.spec is not None:
            self._port.happen(ev.SpecStands(spec=dict(news.spec)))
        if news.view is not None:
            self._port.happen(ev.ViewStands(view=news.view))
        if news.first_commit is not FirstCommit.NONE:
            self._port.happen(ev.FirstCommitStands(is_made=False))
        if news.forgot:
            self._port.happen(ev.StoreForgot(nodes=frozenset(others)))
        if news.removed:
            if news.end is not None:  # the end was in the store before the keys were removed
                self._port.happen(ev.EndStands(over=news.end))
            self._port.happen(ev.ViewRemoved())
        if news.roster is not None:
            self._port.happen(ev.RosterStands(roster=news.roster, restored=news.restored))
        if news.end is not None:
            self._port.happen(ev.EndStands(over=news.end))
        for other in [other for other, record in {**self._seen, **others}.items() if record.incarnation in news.left]:
            self._port.happen(ev.NodeLeft(node=other))
        self._links.follow(others)
        for other in gone:
            # Messages that the node sent before its key went come first.
            self._links.hear_all()
            self._port.happen(ev.LeaseEnded(node=other))
        self._seen = {**({} if news.absence_counts else self._seen), **others}
        self._links.keep(self._port.nodes())


def _listen(host: str, ports: tuple[int, int] | None) -> socket.socket:
    try:
        return listen(host, ports)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"--port-range: {error.strerror}") from None
        raise ConfigError(f"--local-addr {host} is no address of this machine: {error}") from None
