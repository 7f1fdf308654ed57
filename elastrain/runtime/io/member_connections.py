"""The connections and files of a member, which it opens before it has a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TextIO

from elastrain.base.environment import Environment, told_devices
from elastrain.comm.shm.heartbeat_page import Lane, Trail
from elastrain.comm.shm.liveness import Beacon
from elastrain.protocol import agent_messages as am
from elastrain.runtime.faults.armed import ArmedFaults
from elastrain.runtime.io import received_cache
from elastrain.runtime.io.agent_link import AgentLink, connect
from elastrain.runtime.io.heartbeat import LoopHeartbeat, show_stacks_on_request
from elastrain.runtime.io.journal import Journal
from elastrain.runtime.io.turns import Turns
from elastrain.runtime.io.work_report import WorkReport


@dataclass(frozen=True, kw_only=True)
class Connections:
    """The connections and files that a member keeps open from `init` to its end."""

    journal: Journal
    beacon: Beacon
    agent: AgentLink
    faults: ArmedFaults
    whereabouts: LoopHeartbeat
    turns: Turns
    stacks: TextIO | None
    """The file that gets this process's stacks on a signal. It stays open as long as the process lives."""


def open_connections(environment: Environment) -> Connections:
    """Open the journal and the beacon, and connect to the launcher if there is one.

    Raises ConnectionError if it does not answer, and RefusedError if it has another secret.
    """
    journal = Journal(environment.run_dir, environment.member)
    beacon = Beacon()
    whereabouts = LoopHeartbeat(Trail(beacon.page, Lane.LOOP))
    agent = AgentLink(environment.member, connect(environment), WorkReport(whereabouts, journal.write))
    received_cache.receive(environment, journal)
    faults = ArmedFaults(journal, lambda number: agent.say(am.Struck(number=number)))
    return Connections(
        journal=journal,
        beacon=beacon,
        agent=agent,
        faults=faults,
        whereabouts=whereabouts,
        turns=Turns(environment, told_devices()[1], whereabouts),
        stacks=show_stacks_on_request(environment.run_dir, environment.member),
    )
