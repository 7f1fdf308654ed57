"""The name under which one life of a job goes among processes and in the store: another for each life."""

from __future__ import annotations

_MARK = "~"
"""In no job's name."""


def scope(job: str, life: int) -> str:
    """The job's own name in its first life. Whoever still is in an older life is refused by every handshake."""
    return job if life == 1 else f"{job}{_MARK}{life}"


def life_of(name: str) -> int:
    """The number of the life that goes under this name."""
    return int(name.partition(_MARK)[2] or 1)


def job_of(name: str) -> str:
    """The job's name, of any of its lives."""
    return name.partition(_MARK)[0]
