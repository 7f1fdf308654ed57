"""The agent: the process on each node that owns its workers."""
