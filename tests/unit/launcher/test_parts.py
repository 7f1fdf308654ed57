"""An agent's core cannot be made where an event has no handler, or two; all its parts are told what concerns many."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import pytest

from elastrain.launcher.core import Core
from elastrain.launcher.core import agent_events as ev
from elastrain.launcher.core import deadlines as dl
from elastrain.launcher.core.stragglers import Stragglers
from elastrain.launcher.shared import notices
from elastrain.protocol import agent_messages as am
from tests.support.agents import job_config

UNIONS = [(ev, "Event"), (dl, "Due"), (am, "FromWorker"), (notices, "Notice")]
OFFERED = {
    "Event": {"event", "now"},
    "Due": {"due", "now"},
    "FromWorker": {"worker", "message", "now"},
    "Notice": {"node", "notice", "now"},
}


@dataclass(frozen=True)
class Planted:
    """A type that no part handles."""


def core() -> Core:
    return Core(job_config(workers=1), (), choose=lambda members: members[-1])


@pytest.mark.parametrize(("module", "union"), UNIONS)
def test_a_type_without_a_handler_is_found_at_construction(
    module: object, union: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, union, getattr(module, union) | Planted)
    with pytest.raises(TypeError, match="Planted: no part handles this"):
        core()


def test_a_second_handler_of_a_type_is_found_at_construction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stragglers, "handlers", (*Stragglers.handlers, (ev.StopAsked, "on_speeds", ())))
    with pytest.raises(TypeError, match=r"StopAsked has two handlers, Stopping.on_stop and Stragglers.on_speeds"):
        core()


@pytest.mark.parametrize(("module", "union"), UNIONS)
def test_every_handler_takes_what_it_is_offered(module: object, union: str) -> None:
    handlers = core()._handlers
    for kind in get_args(getattr(module, union)):
        assert set(handlers[kind].takes) <= OFFERED[union], f"{handlers[kind]} takes something else"


def test_every_part_is_in_the_list_that_is_told() -> None:
    made = {each for each in ev.AgentPart.__subclasses__() if each.__module__.startswith("elastrain.launcher.core.")}
    assert made - {type(part) for part in core().parts} == {Core}, "it tells the others"
