"""Who saves for compiled programs in each thread, and whether a program of ours runs there. Imports no compiler."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, eq=False)
class KeptValue:
    """A saved value, wherever its bytes are. `bring` gives it back, in memory, for as long as it is referenced."""

    bring: Callable[[], torch.Tensor]


Keep = Callable[[torch.Tensor], KeptValue]


class _Thread(threading.local):
    def __init__(self) -> None:
        self.keeps: list[Keep] = []
        self.running = self.made = 0


_thread = _Thread()


def keeps() -> list[Keep]:
    """Return who takes what compiled programs of this thread save: the last one."""
    return _thread.keeps


def keep(value: torch.Tensor) -> KeptValue:
    """Keep a value that a compiled program saved: as who entered last in this thread does, or simply in memory."""
    return _thread.keeps[-1](value) if _thread.keeps else KeptValue(bring=lambda: value)


def made_program() -> None:
    """A program of ours was compiled in this thread."""
    _thread.made += 1


def programs_made() -> int:
    """How many programs of ours were compiled in this thread."""
    return _thread.made


@contextmanager
def program() -> Iterator[None]:
    """Around a compiled program of ours."""
    _thread.running += 1
    try:
        yield
    finally:
        _thread.running -= 1


def is_program_running() -> bool:
    """Whether a compiled program of ours runs in this thread."""
    return _thread.running > 0
