"""Events and commands of a member's machine, under one name: `from elastrain import protocol as p`.

A driver feeds events to `MemberMachine.handle` one at a time and carries the commands out in order. A new command is a
class in `commands`, a line in its union, and one in the ledger, if it is work, else in the engine and the simulator.
"""

from elastrain.protocol.commands import *  # noqa: F403  every event and command is meant  # noqa: F403  as above
from elastrain.protocol.events import *  # noqa: F403  as above
from elastrain.protocol.work_commands import *  # noqa: F403  as above
