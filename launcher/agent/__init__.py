"""The agent: the process on each node that starts, watches and stops its workers."""
