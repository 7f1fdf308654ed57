"""What the agent decides: events in, commands out. `machine.Core` is the door; each part is a file and owns its fields.

Values in, values out: no socket, process, file or clock may come in here. Reading order: `events`, `stages`,
`cluster`, `view_changes`, `machine`.
"""

from elastrain.launcher.core.agent_machine import Core

__all__ = ["Core"]
