"""Production's shells in virtual time: their clock, their threads, and the loop that they are served by.

While `virtual` is open, the modules named here have the world's clock for `time` and these threads for theirs, so that
the code which runs between two cores is the product's own. Nothing here decides anything.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from elastrain.launcher.agent import command_runner, node_end
from elastrain.launcher.nodes import peer_agents
from elastrain.launcher.store import job_keys, presence, registry, store_thread
from elastrain.launcher.store import store_thread as store_calls
from elastrain.launcher.store.port import StoreError
from elastrain.launcher.store.presence import Presence
from elastrain.launcher.store.registry import LEASE_S
from elastrain.launcher.store.store_thread import _PAUSE_S, Followed
from elastrain.runtime.engine import engine
from elastrain.runtime.io import journal
from elastrain.runtime.loop import exit_report
from tests.sim.job.clock import LaterError
from tests.sim.job.links import SimLinks

if TYPE_CHECKING:
    from tests.sim.job.agent import AgentProcess
    from tests.sim.job.world import World

_building: list[AgentProcess] = []
"""The agent whose parts are being made."""


class VirtualInbox:
    """`Inbox`: what other threads post is done in the agent's loop."""

    fd = -1

    def __init__(self) -> None:
        self._agent = _building[-1]

    def post(self, call: Callable[[], None]) -> None:
        self._agent.later(0.0, lambda: self._agent.in_loop(call))

    def deliver(self) -> None: ...

    def close(self) -> None: ...


class VirtualStoreThread:
    """`StoreThread`: one call after the other, each of which takes its time."""

    def __init__(self, store: Any, inbox: VirtualInbox) -> None:
        self._store, self._inbox, self._agent = store, inbox, _building[-1]
        self._waiting: deque[tuple[Callable[[Any], Any], Callable[[Any], None]]] = deque()
        self._is_busy = False
        self._is_closed = False

    def call(self, work: Callable[[Any], Any], then: Callable[[Any], None]) -> None:
        self._waiting.append((work, then))
        if self._is_closed:
            self._work_off()
        else:
            self._next(self._agent.clock.soon())

    def _next(self, delay_s: float) -> None:
        if not self._is_busy and self._waiting:
            self._is_busy = True
            self._agent.later(delay_s, self._carry_out)

    def _carry_out(self) -> None:
        self._is_busy = False
        if self._is_closed or not self._waiting:
            return
        work, then = self._waiting.popleft()
        client = self._agent.client
        client.blocked_s = 0.0
        try:
            answer = work(self._store)
        except StoreError as error:
            answer = error
        self._is_busy = True
        self._agent.later(client.blocked_s + self._agent.clock.soon(), lambda: self._answer(then, answer))

    def _answer(self, then: Callable[[Any], None], answer: Any) -> None:
        self._is_busy = False
        self._inbox.post(lambda: then(answer))
        self._next(self._agent.clock.soon())

    def settle(self, timeout_s: float) -> bool:
        """At the agent's end: what was asked for is carried out."""
        self._is_closed = True
        self._work_off()
        return True

    def close(self, timeout_s: float) -> bool:
        return True

    def _work_off(self) -> None:
        waiting, self._waiting = self._waiting, deque()
        for work, _ in waiting:
            self._finish(work, tries=int(2 * LEASE_S / 0.1))

    def _finish(self, work: Callable[[Any], Any], tries: int) -> None:
        """The process waits for it, whatever else it has closed."""
        try:
            work(self._store)
        except LaterError as later:
            if tries:
                self._agent.clock.at(later.args[0], lambda: self._finish(work, tries - 1))
        except StoreError:
            pass


ATTEMPT_S = 1.0
"""`attempt_s` of a real client of etcd."""


class VirtualThread:
    """`threading.Thread` of a presence or of what follows a prefix: its turns are taken by the clock."""

    def __init__(self, target: Callable[[], None], **_: Any) -> None:
        self._part: Any = target.__self__  # type: ignore[attr-defined]

    def start(self) -> None:
        if isinstance(self._part, Presence):
            agent, part = _building[-1], self._part
            agent.later(agent.clock.soon(), lambda: _be_present(agent, part))
            agent.presence = part
        elif isinstance(self._part, Followed):
            agent, following = _building[-1], self._part
            agent.later(agent.clock.soon(), lambda: _follow(agent, following))

    def join(self, timeout: float | None = None) -> None:
        if isinstance(self._part, Presence):
            self._part.leave()

    def is_alive(self) -> bool:
        return False


def _be_present(agent: AgentProcess, part: Presence) -> None:
    if part._closed:
        return
    agent.client.blocked_s = 0.0
    wait = part.turn()
    pause_s = part._ttl_s / 3 if wait else 0.001
    _once_tried(agent, agent.client.blocked_s, lambda: agent.later(pause_s, lambda: _be_present(agent, part)))


def _once_tried(agent: AgentProcess, blocked_s: float, then: Callable[[], None]) -> None:
    """Let a call that fails be tried again each second, as `etcd_connection` does: it ends once the store answers."""
    if blocked_s > ATTEMPT_S and not agent.client.is_reached:
        agent.later(ATTEMPT_S, lambda: _once_tried(agent, blocked_s - ATTEMPT_S, then))
    elif agent.client.is_reached:
        then()
    else:
        agent.later(blocked_s, then)


def write_presence(agent: AgentProcess, part: Presence) -> None:
    """Its value has changed: it is woken."""
    agent.later(agent.clock.soon(), lambda: part._closed or (part.turn() and None))


def _follow(agent: AgentProcess, part: Followed) -> None:
    if part._closed.is_set():
        return
    agent.client.blocked_s = 0.0
    watch = part.look()
    if watch is None:
        agent.later(agent.client.blocked_s + _PAUSE_S, lambda: _follow(agent, part))
        return

    # What its thread waits for: then it takes the watch back, and looks again after a pause.
    agent.client.on_broken(lambda: agent.later(_PAUSE_S, lambda: _follow(agent, part)))


class NoLoop:
    """`EventLoop`: nothing is polled."""

    def register(self, *_: Any) -> None: ...

    def unregister(self, *_: Any) -> None: ...


@contextmanager
def building(agent: AgentProcess) -> Iterator[None]:
    _building.append(agent)
    try:
        yield
    finally:
        _building.pop()


class _WakingEvent:
    """`threading.Event` of a presence: to be woken is to take a turn."""

    def __init__(self) -> None:
        self._agent = _building[-1]

    def set(self) -> None:
        part = self._agent.presence
        if part is not None and not part._closed:
            write_presence(self._agent, part)

    def clear(self) -> None: ...


@contextmanager
def virtual(world: World) -> Iterator[None]:
    """While it is open, the shells live in the world's time."""
    threads = SimpleNamespace(Thread=VirtualThread, Event=threading.Event, Lock=threading.Lock)
    waking = SimpleNamespace(Thread=VirtualThread, Event=_WakingEvent, Lock=threading.Lock)
    quiet = SimpleNamespace(excepthook=None)
    with ExitStack() as stack:
        for module in (command_runner, registry, store_calls, node_end, job_keys):
            stack.enter_context(patch.object(module, "time", world.clock))
        stack.enter_context(patch.object(command_runner, "say", lambda sentence: None))
        stack.enter_context(patch.object(registry, "StoreThread", VirtualStoreThread))
        stack.enter_context(patch.object(peer_agents, "Inbox", VirtualInbox))
        stack.enter_context(patch.object(peer_agents, "Links", lambda *given: SimLinks(_building[-1], given[-1])))
        listener = SimpleNamespace(getsockname=lambda: ("127.0.0.1", 1))
        stack.enter_context(patch.object(peer_agents, "_listen", lambda *given: listener))
        stack.enter_context(patch.object(store_thread, "threading", threads))
        stack.enter_context(patch.object(presence, "threading", waking))
        stack.enter_context(patch.object(engine, "threading", threads))
        for module in (journal, exit_report):
            stack.enter_context(patch.object(module, "say", lambda sentence: world.say(f"elastrain: {sentence}\n")))
        stack.enter_context(patch.object(exit_report, "sys", quiet))
        yield
