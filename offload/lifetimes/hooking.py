"""Hooks on modules that a copy of the module does not have: who copies or pickles a model gets a plain one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def nothing(*_: Any) -> None:
    """What a copy has in place of a hook."""


def _make_nothing() -> Callable[..., None]:
    return nothing


class OriginalsHook:
    """Calls `act` for the module it was put on."""

    def __init__(self, act: Callable[..., None]) -> None:
        self._act = act

    def __call__(self, *given: Any) -> None:
        self._act(*given)

    def __deepcopy__(self, _memo: dict[int, Any]) -> Callable[..., None]:
        return nothing

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _make_nothing, ()
