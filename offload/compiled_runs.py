"""Per-thread registry of compiled programs (`backend="elastrain"`) and of the functions that keep their saved values.

Tells whether such a program is running in the current thread, and how many were compiled there. Imports no compiler.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, eq=False)
class KeptValue:
    """A saved value, in memory or on disk.

    `bring` returns it in memory; it stays there while the result is referenced.
    """

    bring: Callable[[], torch.Tensor]


Keep = Callable[[torch.Tensor], KeptValue]


class _Thread(threading.local):
    def __init__(self) -> None:
        self.keeps: list[Keep] = []
        self.running = self.made = 0


_thread = _Thread()


def keeps() -> list[Keep]:
    """Return this thread's stack of functions that keep saved values of compiled programs. The last one is in use."""
    return _thread.keeps


def keep(value: torch.Tensor) -> KeptValue:
    """Keep a saved value with the thread's innermost keep function. Without one, keep it in memory."""
    return _thread.keeps[-1](value) if _thread.keeps else KeptValue(bring=lambda: value)


def made_program() -> None:
    """Count a program that our backend compiled in this thread."""
    _thread.made += 1


def programs_made() -> int:
    """Return how many programs our backend compiled in this thread."""
    return _thread.made


@contextmanager
def program() -> Iterator[None]:
    """Mark the thread as running one of our compiled programs, for the time of a `with` block."""
    _thread.running += 1
    try:
        yield
    finally:
        _thread.running -= 1


def is_program_running() -> bool:
    """Return True if one of our compiled programs runs in this thread."""
    return _thread.running > 0
