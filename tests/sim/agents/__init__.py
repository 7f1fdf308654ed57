"""Agents' production cores in virtual time: nodes and workers are killed, links fall silent, the store goes away.

Members are symbolic (who holds what, which step), but decide with the runtime's own `recovery.decide`. The store is
`JobKeys` over memory; leases, watches and links are modelled with delays, each in its own order. One generator chooses
everything, so a seed replays a schedule exactly.

`schedule` says what is drawn, `actors` who plays, `world` holds clock and cores; `nodes`, `store`, `members` and
`faults` are what happens, `checks` what must hold.
"""

from tests.sim.agents.actors import SimAgent
from tests.sim.agents.schedule import Play, Violation
from tests.sim.agents.world import World, outcome

__all__ = ["Play", "SimAgent", "Violation", "World", "outcome"]
