"""Waiting in tests: for something to become true, with a deadline, never for so and so long."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(condition: Callable[[], T], timeout_s: float = 30.0, what: str = "the condition holds") -> T:
    """The first true value of the condition; AssertionError after the deadline."""
    deadline_s = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline_s, f"not within {timeout_s} s: {what}"
        time.sleep(0.002)
    return value
