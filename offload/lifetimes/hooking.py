"""Hooks on modules that a copy of the module does not have: who copies or pickles a model gets a plain one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class OriginalsHook:
    """Calls `act` for the module it was put on, and nothing for a copy."""

    def __init__(self, act: Callable[..., None] = lambda *_: None) -> None:
        self._act = act

    def __call__(self, *given: Any) -> None:
        self._act(*given)

    def __reduce__(self) -> tuple[type[OriginalsHook], tuple[()]]:
        return OriginalsHook, ()
