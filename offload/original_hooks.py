"""Hooks on a module that copies of the module do not inherit: copying or pickling a model gives a plain one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any


class OriginalsHook:
    """A module hook that calls `act` for the original module and does nothing for a copy.

    `copying` is called before each copy or pickle. With `stays`, deep copies keep the hook; pickled models never do.
    """

    def __init__(
        self, act: Callable[..., None], copying: Callable[[], None] = lambda: None, *, stays: bool = False
    ) -> None:
        self._act, self._copying, self._stays = act, copying, stays

    def __call__(self, *given: Any) -> None:
        """Call `act` with the arguments of the hook."""
        self._act(*given)

    @property
    def __name__(self) -> str:  # torch.jit.script asks for it
        """A name that does not exist.

        Raises AttributeError with the remedy, because only `torch.jit.script` reads it.
        """
        raise AttributeError(
            "torch.jit.script cannot take a model that is being trained, nor a copy of it: script a copy that was made "
            "before, or the model once its training has ended"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        self._copying()
        # A function of the standard library that does nothing, so that the file can be read without this package.
        return getattr, (nullcontext(), "__exit__")

    def __deepcopy__(self, memo: object) -> Any:
        if self._stays:
            return self
        function, given = self.__reduce__()
        return function(*given)
