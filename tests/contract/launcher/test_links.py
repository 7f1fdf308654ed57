"""Links between agents over real sockets: who dials before the other knows of it hears that the other lives."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest

from elastrain.base.event_loop import EventLoop
from elastrain.launcher.nodes.agent_links import AgentPassport, LinkEvents, Links, listen
from elastrain.launcher.shared.job_values import NodeRecord
from elastrain.launcher.shared.notices import Beat, Ended, Notice
from elastrain.launcher.store.store_thread import Inbox

WAIT_S = 30.0


@dataclass(kw_only=True)
class Agent:
    record: NodeRecord
    loop: EventLoop
    links: Links
    came: list[str] = field(default_factory=list)
    went: list[str] = field(default_factory=list)
    heard: list[Notice] = field(default_factory=list)


def _agent(name: str, incarnation: int, stack: ExitStack) -> Agent:
    loop, inbox, listener = EventLoop(), Inbox(), listen("127.0.0.1")
    stack.callback(inbox.close)
    loop.register(inbox.fd, lambda _events: inbox.deliver())
    endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
    record = NodeRecord(name=name, incarnation=incarnation, endpoint=endpoint, workers=1)
    events = LinkEvents(
        on_up=lambda node, why: agent.came.append(node),
        on_down=lambda node, why, closed: agent.went.append(node),
        on_notice=lambda node, notice: agent.heard.append(notice),
        on_reader=lambda name, connection: "nobody reads here",
        log_refusal=lambda reason: None,
    )
    links = Links(loop, inbox, listener, AgentPassport(secret=b"s" * 32, job="job", record=record), events)
    stack.callback(links.close)
    agent = Agent(record=record, loop=loop, links=links)
    return agent


@pytest.fixture
def agents() -> Iterator[tuple[Agent, Agent]]:
    """The earlier one, and the later one, which dials."""
    with ExitStack() as stack:
        yield _agent("node0", 1, stack), _agent("node1", 2, stack)


def _until(agents: tuple[Agent, Agent], holds: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < end_s
        for agent in agents:
            agent.loop.turn(time.monotonic() + 0.01)


def test_an_agent_that_has_not_heard_of_the_dialler_yet_beats(agents: tuple[Agent, Agent]) -> None:
    earlier, later = agents
    later.links.follow({"node0": earlier.record})
    _until(agents, lambda: sum(isinstance(notice, Beat) for notice in later.heard) >= 2)
    assert later.links.answering() == {"node0": 1} and later.went == []
    assert earlier.came == []
    later.links.tell(Ended())
    earlier.links.follow({"node1": later.record})
    _until(agents, lambda: any(isinstance(notice, Ended) for notice in earlier.heard))
    assert earlier.came == ["node1"] and later.went == earlier.went == []


def test_an_agent_that_has_not_heard_of_the_dialler_yet_tells_it_what_it_tells_all(
    agents: tuple[Agent, Agent],
) -> None:
    earlier, later = agents
    later.links.follow({"node0": earlier.record})
    _until(agents, lambda: any(isinstance(notice, Beat) for notice in later.heard))  # it is at the earlier one's door
    earlier.links.tell(Ended(), "node7")
    earlier.links.tell(Ended())
    _until(agents, lambda: any(isinstance(notice, Ended) for notice in later.heard))
    assert sum(isinstance(notice, Ended) for notice in later.heard) == 1 and earlier.came == []
