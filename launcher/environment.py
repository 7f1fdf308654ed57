"""The environment of a launcher's or agent's process: read, and changed where another library leaves no other way, here
and nowhere else.

What workers are started with is built from this and the operator's options; see `worker_start.environment`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


def home() -> str | None:
    """Where runs are kept, if the user has named a folder."""
    return os.environ.get("ELASTRAIN_HOME")


def inherited(name: str, otherwise: str = "") -> str:
    """What a worker gets under a name that the user may have set."""
    return os.environ.get(name, otherwise)


def without(prefix: str) -> dict[str, str]:
    """All variables but those whose names begin so, for a program that must not see them."""
    return {name: value for name, value in os.environ.items() if not name.startswith(prefix)}


@contextmanager
def set_for_a_moment(name: str, value: str) -> Iterator[str | None]:
    """Libraries that read a variable when they are imported or called (gRPC, torchelastic) take no argument for it.

    Yields what was there before.
    """
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield before
    finally:
        if before is None:
            del os.environ[name]  # the workers' scripts may use it, too
        else:
            os.environ[name] = before


def leave_outer_job() -> None:
    """Forget the worker in which this launcher was started: its workers belong to another job, with other options."""
    if "ELASTRAIN_AGENT" in os.environ:
        kept = ("ELASTRAIN_HOME", *(name for name in os.environ if name.endswith("_MARK")))
        for name in [name for name in os.environ if name.startswith("ELASTRAIN_") and name not in kept]:
            del os.environ[name]


def mark_all_children(mark: Mapping[str, str]) -> None:
    """A fork server copies this process's environment, and takes no other for what it starts."""
    os.environ.update(mark)
