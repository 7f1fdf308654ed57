"""A log of events replays a member exactly: nothing but events changes what it does next."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastrain import protocol as p
from elastrain.member.member_machine import MemberMachine
from tests.sim.member import Violation
from tests.sim.scenarios import cluster_of
from tests.support.sources import ROOT

Log = list[tuple[p.Event, list[p.Command]]]


def logs_of(seed: int) -> dict[str, tuple[MemberMachine, Log]]:
    """Every member's core in the schedule of this seed, with what it was told and what it commanded."""
    logs: dict[str, tuple[MemberMachine, Log]] = {}
    handle = MemberMachine.handle

    def logged(core: MemberMachine, event: p.Event) -> list[p.Command]:
        commands = handle(core, event)
        logs.setdefault(core.machine.me, (core, []))[1].append((event, list(commands)))
        return commands

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(MemberMachine, "handle", logged)
        cluster = cluster_of(seed)
        logs.clear()  # of the undisturbed job that it is compared with
        cluster = cluster_of(seed)
        cluster.run()
    return logs


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(st.integers(0, 100_000))
def test_a_log_of_events_replays_a_members_commands_exactly(seed: int) -> None:
    try:
        logs = logs_of(seed)
    except Violation:  # the schedules themselves are judged in tests/sim
        return
    for name, (core, log) in logs.items():
        again = MemberMachine(me=name, shape=core.shape, checkpoints=core.machine.checkpointing._plan)
        for number, (event, commands) in enumerate(log):
            assert again.handle(event) == commands, f"seed {seed}: event {number} of {name}: {event}"


def _writes(source: str) -> list[str]:
    """Attributes of a `core` or `machine` that the source assigns to."""
    targets = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)]
    stored = [node.value for node in targets if isinstance(node.ctx, ast.Store)]
    return [text for text in map(ast.unparse, stored) if {"core", "_core", "machine"} & set(text.split("."))]


@pytest.mark.parametrize("path", sorted((ROOT / "elastrain/runtime").glob("*.py")), ids=lambda path: path.name)
def test_nobody_writes_into_a_members_core(path: Path) -> None:
    assert _writes(path.read_text()) == []


def test_a_write_into_the_core_is_found() -> None:
    assert _writes("self._core.budget = 3\nengine.core.views.current = None\nother.core = core") == [
        "self._core",
        "engine.core.views",
    ]
