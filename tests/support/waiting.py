"""Waiting in tests: for something to become true, with a deadline, never for so and so long."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE = 3.0
"""Factor by which deadlines are extended: tests state what a quiet machine takes, and machines are shared."""


def until(condition: Callable[[], T], timeout_s: float = 30.0, what: str = "the condition holds") -> T:
    """The first true value of the condition; AssertionError after the deadline, which is `PATIENCE` times as late.

    It looks often at first, and the less often the longer it waits: what it waits for needs the processor too.
    """
    begun_s = time.monotonic()
    while not (value := condition()):
        waited_s = time.monotonic() - begun_s
        assert waited_s < PATIENCE * timeout_s, f"not within {PATIENCE * timeout_s} s: {what}"
        time.sleep(min(0.002 + waited_s / 25, 0.04))
    return value
