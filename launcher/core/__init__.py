"""The agent's decisions: events in, commands out. `Core` is the entry point, and each part owns its own fields.

No socket, process, file or clock is allowed here. Reading order: `agent_events`, `worker_table`, `cluster`,
`view_changes`, `agent_machine`.
"""

from elastrain.launcher.core.agent_machine import Core

__all__ = ["Core"]
