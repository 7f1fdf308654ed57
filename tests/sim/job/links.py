"""Links between agents: who answers whom. In the place of `launcher.links`, with its port."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from elastrain.launcher.nodes.agent_links import BEAT_S, SILENCE_S
from elastrain.launcher.shared.job_values import NodeRecord
from elastrain.launcher.shared.notices import Notice
from tests.sim.job.network import Stream

if TYPE_CHECKING:
    from tests.sim.job.agent import AgentProcess

_DIAL_AGAIN_S = 0.4


@dataclass(kw_only=True, eq=False)
class SimLink:
    """To the agent of another node, as this one sees it."""

    record: NodeRecord
    to: AgentProcess | None = None
    """The other end of the connection, while there is one."""
    stream: Stream | None = None
    up: bool = False
    silent_since: int = 0
    """Counts silences, so that an older one says nothing about a newer one."""


class SimLinks:
    """One agent's."""

    def __init__(self, agent: AgentProcess, events: Any) -> None:
        self._agent, self._events, self._world = agent, events, agent.world
        self.links: dict[str, SimLink] = {}
        self._early: dict[tuple[str, int], list[Notice]] = {}
        """Name and incarnation of an agent that has dialled before the store's news of it -> what it has said."""
        self._to_early: dict[AgentProcess, Stream] = {}
        """Agents that have dialled this one before it has news of them, and what it tells them."""
        agent.links = self

    # ---- the port

    def follow(self, records: Mapping[str, NodeRecord]) -> None:
        for name, record in records.items():
            known = self.links.get(name)
            if known is not None and known.record.incarnation == record.incarnation:
                known.record = record
                continue
            if known is not None:
                self._hang_up(known)
            self.links[name] = SimLink(record=record)
            self._agent.later(self._world.clock.soon(), lambda name=name: self.dial(name))  # type: ignore[misc]

    def keep(self, nodes: Collection[str]) -> None:
        for name in [name for name in self.links if name not in nodes]:
            self._hang_up(self.links.pop(name))

    def answering(self) -> dict[str, int]:
        return {name: link.record.incarnation for name, link in self.links.items() if link.up}

    def tell(self, notice: Notice, node: str | None = None) -> None:
        for name, link in list(self.links.items()):
            if node in (None, name) and link.stream is not None:
                link.stream.send(notice)
                if self._world.clock.rng.random() < 0.03:  # it is told again where a link was lost and is there again
                    link.stream.send(notice)
        for other in self._who_has_dialled_early() if node is None else []:
            self._stream_to_early(other).send(notice)

    def hear_all(self) -> None:
        for link in list(self.links.values()):
            back = link.to.links.links.get(self._agent.node) if link.to is not None else None
            is_open = back is not None and back.to is self._agent
            if (
                is_open
                and back.stream is not None
                and not self._world.network.is_cut(link.record.name, self._agent.node)
            ):
                back.stream.drain()

    def next_deadline_s(self) -> float | None:
        return None

    def on_tick(self, now: float) -> None: ...

    def close(self) -> None:
        early = self._who_has_dialled_early()
        for link in self.links.values():
            self._hang_up(link)
        for other in early:
            self._close_in_good_order(self._stream_to_early(other), other)

    def _who_has_dialled_early(self) -> list[AgentProcess]:
        """Agents that have a connection to this one, which it does not know of."""
        living = [agent for agent in self._world.living_agents() if agent.links is not None]
        ends = [(agent, agent.links.links.get(self._agent.node)) for agent in living]
        connected = [agent for agent, end in ends if end is not None and end.to is self._agent]
        known = {link.to for link in self.links.values()}  # perhaps its predecessor, which died in silence
        return [agent for agent in connected if agent not in known]

    # ---- connections

    def dial(self, name: str) -> None:
        """The later of two agents dials, and hears the earlier one even before that one has news of it."""
        link, other = self.links.get(name), self._world.agents.get(name)
        if link is None or link.to is not None:
            return
        there = other is not None and other.incarnation == link.record.incarnation
        if (
            other is None
            or not there
            or not other.runs
            or other.links is None
            or not self._world.network.reach_each_other(self._agent.node, name)
        ):
            if other is not None and there and self._is_refused(other):
                self._down(link, "its agent's port is closed", closed=True)
            self._agent.later(_DIAL_AGAIN_S, lambda: self.dial(name))
            return
        back = other.links.links.get(self._agent.node)
        if back is not None and back.record.incarnation == self._agent.incarnation:
            self._connect(link, other)
            if back.to is not self._agent:
                other.links._connect(back, self._agent)
            self._hear_early(other)
        elif link.record.incarnation < self._agent.incarnation:
            self._connect(link, other)
        else:
            self._agent.later(_DIAL_AGAIN_S, lambda: self.dial(name))

    def _hear_early(self, other: AgentProcess) -> None:
        """Hear what it said before this agent knew of it."""
        for notice in self._early.pop((other.node, other.incarnation), []):
            self.hear(other, notice)

    def _is_refused(self, other: AgentProcess) -> bool:
        """Its machine says that nobody listens there any more."""
        gone = not other.alive and not other.vanished
        return gone and self._world.network.reach_each_other(self._agent.node, other.node)

    def _connect(self, link: SimLink, other: AgentProcess) -> None:
        link.to, link.stream = other, self._to_early.pop(other, None) or self._stream_to(other)
        link.silent_since += 1
        self._up(link, "its agent answers")

    def _stream_to(self, other: AgentProcess) -> Stream:
        return Stream(
            self._world.network, self._agent.node, other, lambda notice: other.links.hear(self._agent, notice)
        )

    def _stream_to_early(self, other: AgentProcess) -> Stream:
        if other not in self._to_early:
            self._to_early[other] = self._stream_to(other)
        return self._to_early[other]

    def hear(self, source: AgentProcess, notice: Notice) -> None:
        link = self.links.get(source.node)
        if link is None or link.record.incarnation < source.incarnation:
            self._early.setdefault((source.node, source.incarnation), []).append(notice)
        elif link.to is source and self._agent.alive:
            self._up(link, "its agent answers again")
            if not source.runs:  # the network held it: there will be nothing after it
                self.begin_silence(source.node)
            self._agent.in_loop(lambda: self._events.on_notice(source.node, notice))

    def _up(self, link: SimLink, why: str) -> None:
        if not link.up:
            link.up = True
            self._agent.in_loop(lambda: self._events.on_up(link.record.name, why))

    def _down(self, link: SimLink, why: str, *, closed: bool) -> None:
        if link.up and self.links.get(link.record.name) is link:
            link.up = False
            self._agent.in_loop(lambda: self._events.on_down(link.record.name, why, closed))

    def _hang_up(self, link: SimLink) -> None:
        """This end closes the connection: the other end sees that, once it has read what came before."""
        other, stream, link.to, link.stream = link.to, link.stream, None, None
        if other is None or stream is None:
            return
        end = other.links.links.get(self._agent.node)
        if end is not None and end.to is self._agent:
            self._close_in_good_order(stream, other)

    def _close_in_good_order(self, stream: Stream, other: AgentProcess) -> None:
        stream._receive = lambda item: other.links.hang_up_of(self._agent, item)
        stream.send(None)

    def hang_up_of(self, source: AgentProcess, item: Notice | None) -> None:
        if item is not None:
            self.hear(source, item)
            return
        self.lose(source, closed=not self._world.agent_lives(source))

    def lose(self, source: AgentProcess, *, closed: bool) -> None:
        """The connection to that agent is gone."""
        link = self.links.get(source.node)
        if link is None or link.to is not source:
            return
        link.to, link.stream = None, None
        link.silent_since += 1
        if closed:
            self._down(link, "its agent's port is closed", closed=True)
        else:
            turn = link.silent_since
            self._agent.later(SILENCE_S, lambda: self._silent(link, turn))
        self._agent.later(_DIAL_AGAIN_S, lambda: self.dial(source.node))

    # ---- silence

    def begin_silence(self, source: str) -> None:
        """From now on nothing comes from that node."""
        link = self.links.get(source)
        if link is None or link.to is None:
            return
        link.silent_since += 1
        turn = link.silent_since
        self._agent.later(SILENCE_S - self._world.clock.rng.uniform(0, BEAT_S), lambda: self._silent(link, turn))

    def end_silence(self, source: str) -> None:
        """Its next beat comes through."""
        link = self.links.get(source)
        if link is None or link.to is None or not link.to.alive:  # who has died meanwhile stays silent
            return
        link.silent_since += 1
        turn, to = link.silent_since, link.to

        def beat() -> None:
            if link.silent_since == turn and link.to is to and to.runs:
                self._up(link, "its agent answers again")

        self._agent.later(self._world.clock.rng.uniform(0, BEAT_S), beat)

    def _silent(self, link: SimLink, turn: int) -> None:
        if link.silent_since == turn:
            self._down(link, f"nothing was heard of it for {SILENCE_S:g} s", closed=False)
