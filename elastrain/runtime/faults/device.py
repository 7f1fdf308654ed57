"""A device that fails: from some operation on, torch raises as it does then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class FailingDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate it
    """Begun in one thread and never left: the first operation after `after` others raises RuntimeError, once.

    The operations of a backward that this thread runs count too.
    """

    def __init__(self, after: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self._left = after
        self._has_failed = False

    def begin(self) -> None:
        """In the calling thread, from now on."""
        self.__enter__()  # type: ignore[no-untyped-call]  # as above

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._left == 0 and not self._has_failed:
            self._has_failed = True
            raise RuntimeError(f"device error: unspecified launch failure in {function} (injected)")
        self._left = max(0, self._left - 1)
        return function(*args, **(kwargs or {}))
