"""A device that fails: from some operation on, torch raises as it does then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class FailingDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate it
    """After `begin(after)`, the first operation after `after` others raises RuntimeError, once; before, none does.

    In the thread of the training loop only. It is never left once it has begun.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self._is_expected = self._is_entered = self._is_in_backward = self._has_failed = False
        self._left: int | None = None
        """Operations that still succeed; None before `begin`."""

    def expect(self) -> None:
        """Any thread: `begin` will be called, perhaps within a backward."""
        self._is_expected = True

    def begin(self, after: int) -> None:
        self._left = after
        if not self._is_in_backward:
            self._enter()

    def around(
        self, backward: Callable[[], AbstractContextManager[None]]
    ) -> Callable[[], AbstractContextManager[None]]:
        """`backward`, in whose hooks `begin` may be called.

        Autograd takes away whatever mode a hook has entered: the mode has to be there before the backward.
        """

        @contextmanager
        def failing() -> Iterator[None]:
            if self._is_expected:
                self._enter()
            self._is_in_backward = True
            try:
                with backward():
                    yield
            finally:
                self._is_in_backward = False
                self._settle()

        return failing

    def _settle(self) -> None:
        """Enter what was begun in a backward that did not expect it; leave what has not begun."""
        if self._left is not None:
            self._enter()
        elif self._is_entered:
            self._is_entered = False
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # as above

    def _enter(self) -> None:
        if not self._is_entered:
            self._is_entered = True
            self.__enter__()  # type: ignore[no-untyped-call]  # as above

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._left == 0 and not self._has_failed:
            self._has_failed = True
            raise RuntimeError(f"device error: unspecified launch failure in {function} (injected)")
        if self._left:
            self._left -= 1
        return function(*args, **(kwargs or {}))
