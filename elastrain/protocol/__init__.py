"""Events and commands of a member's machine, under one name: `from elastrain import protocol as p`.

A driver feeds events to `MemberMachine.handle` one at a time, and carries the commands out in order. A new command
needs a class in `commands`, `loop_commands` or `work_commands`, and a place in the union there. `BufferBook` carries it
out if it is work; else the engine and the simulator do.

The classes are imported when the first of them is used: the launcher needs only single modules of this package.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elastrain.protocol.commands import *  # noqa: F403  every event and command is meant
    from elastrain.protocol.events import *  # noqa: F403  as above
    from elastrain.protocol.loop_commands import *  # noqa: F403  as above
    from elastrain.protocol.loop_events import *  # noqa: F403  as above
    from elastrain.protocol.work_commands import *  # noqa: F403  as above


def __getattr__(name: str) -> object:
    """Import all events and commands at the first use of one."""
    if name[0].isupper():  # Python itself asks here for modules that are not imported yet
        from elastrain.protocol import commands, events, loop_commands, loop_events, work_commands

        for module in (commands, events, loop_commands, loop_events, work_commands):
            globals().update({each: value for each, value in vars(module).items() if not each.startswith("_")})
        if name in globals():
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
