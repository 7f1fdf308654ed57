"""Whole jobs in virtual time: the production cores of members *and* agents, with their shells, under one seed.

A member is its `MemberMachine`, its ledger (over symbols) and the worker's own `Engine`; an agent is its `Core`, its
`CommandRunner`, `PeerAgents`, `SharedRegistry`, `NodeEnd` and `JobKeys`. Modelled are processes and their deaths, the
network, etcd, the clock, and the user's training loop. See README.md beside this file.
"""

from tests.sim.job.schedule import Schedule, draw
from tests.sim.job.world import World

__all__ = ["Schedule", "World", "draw"]
