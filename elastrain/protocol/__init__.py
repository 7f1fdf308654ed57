"""Events and commands of a member's machine, under one name: `from elastrain import protocol as p`.

A driver feeds events to `MemberMachine.handle` one at a time, and carries the commands out in order. A new command
needs a class in `commands`, `loop_commands` or `work_commands`, and a place in the union there. `BufferBook` carries it
out if it is work; else the engine and the simulator do.
"""

from elastrain.protocol.commands import *  # noqa: F403  every event and command is meant
from elastrain.protocol.events import *  # noqa: F403  as above
from elastrain.protocol.loop_commands import *  # noqa: F403  as above
from elastrain.protocol.loop_events import *  # noqa: F403  as above
from elastrain.protocol.work_commands import *  # noqa: F403  as above
