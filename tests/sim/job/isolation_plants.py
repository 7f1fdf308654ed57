"""Bugs planted into what is done about nodes out of reach: jobs in which some are so for long must show each."""

from __future__ import annotations

from typing import Any

from elastrain.launcher.core.peer_changes import PeerChanges
from elastrain.launcher.core.suspicions import IndirectProbes, ProbeResult
from elastrain.launcher.shared.job_values import Command
from tests.sim.job import schedule as sc
from tests.sim.job.isolation_schedules import draw_isolations
from tests.sim.job.plants import Plant, Rule, has, planter

PLANTS: dict[str, Plant] = {}

_of_nodes = planter(PLANTS, draw=draw_isolations, kind="isolations", only=has(sc.Isolate, sc.Cut))
_of_losses = planter(PLANTS, draw=draw_isolations, kind="isolations", only=has(sc.Wipe))


@_of_nodes(IndirectProbes, "word_on")
def takes_no_word_of_others(rule: Rule, vouching: IndirectProbes, node: str) -> ProbeResult:
    """A node without a lease lives while another with one reaches it."""
    return ProbeResult.MISSED


@_of_losses(PeerChanges, "on_stands")
def is_in_touch_whatever_it_was_told(rule: Rule, peers: PeerChanges, node: str, *given: Any) -> list[Command]:
    """Only who takes a view that is told, or knows it, has missed nothing."""
    commands: list[Command] = rule(peers, node, *given)
    if node in peers._peers.nodes:
        peers._peers.nodes[node].lost_touch = False
    return commands
