"""Hooks on modules that a copy of the module does not have: who copies or pickles a model gets a plain one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any


class OriginalsHook:
    """Calls `act` for the module it was put on, and nothing for a copy. `copying` is called before each copy.

    stays: it calls `act` for deep copies, too. A saved model has no such hook.
    """

    def __init__(
        self, act: Callable[..., None], copying: Callable[[], None] = lambda: None, *, stays: bool = False
    ) -> None:
        self._act, self._copying, self._stays = act, copying, stays

    def __call__(self, *given: Any) -> None:
        self._act(*given)

    @property
    def __name__(self) -> str:  # torch.jit.script asks for it
        raise AttributeError(
            "torch.jit.script cannot take a model that is being trained, nor a copy of it: script a copy that was made "
            "before, or the model once its training has ended"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        self._copying()
        # A function of Python's own that does nothing: a file is read where nothing of ours is installed, too.
        return getattr, (nullcontext(), "__exit__")

    def __deepcopy__(self, memo: object) -> Any:
        if self._stays:
            return self
        function, given = self.__reduce__()
        return function(*given)
