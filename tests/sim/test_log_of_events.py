"""A log of a member's events replays it exactly: nothing else goes into its machine, and nothing else comes out."""

from __future__ import annotations

from collections import defaultdict

import pytest

from elastrain import protocol as p
from elastrain.member.lifecycle import Lifecycle
from tests.sim.scenarios import cluster_of

Log = list[tuple[p.Event, list[p.Command]]]


def logs_of(seed: int, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[Lifecycle, Log], int]:
    """Every member's events with the commands that each led to, and how many members there were."""
    logs: dict[Lifecycle, Log] = defaultdict(list)
    handle = Lifecycle.handle

    def recorded(core: Lifecycle, event: p.Event) -> list[p.Command]:
        commands = handle(core, event)
        logs[core].append((event, list(commands)))
        return commands

    with monkeypatch.context() as patch:
        patch.setattr(Lifecycle, "handle", recorded)
        cluster = cluster_of(seed)
        cluster.run()
    return logs, len(cluster.members)


@pytest.mark.parametrize("seed", range(24))
def test_the_same_events_lead_to_the_same_commands(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logs, members = logs_of(seed, monkeypatch)
    assert len(logs) >= members  # the undisturbed job of one, too
    for core, log in logs.items():
        again = Lifecycle(me=core.machine.me, shape=core.shape)
        for number, (event, commands) in enumerate(log):
            assert again.handle(event) == commands, f"{core.machine.me}, event {number} of {len(log)}: {event}"
