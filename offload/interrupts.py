"""Protection against exceptions that signal handlers raise in the middle of this package's code.

Python calls signal handlers in the main thread, between any two bytecodes; `KeyboardInterrupt` comes from one. `defer`
delays the program's handlers until this package's code has returned. `Entrance` installs and removes saved-tensor hooks
without a bytecode in between, so that an interrupt cannot leave them half installed.

Only `within` uses `defer`, because a step calls the program's optimizer and hooks, which have to run in the main
thread. `save_on_disk` leaves the program's handlers alone: it hands each change of its state to another thread
(`activations/deferred.py`).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from operator import call
from pathlib import Path
from types import FrameType, MethodType
from typing import Any

import torch

from elastrain.offload import compiled_runs

_OWN = str(Path(__file__).parent) + os.sep


class DeferredHandler:
    """A signal handler that waits if code of this package is running.

    It is called when that code returns to its caller.
    """

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Call the handler now, or arrange the call if a frame of this package is on the stack."""
        caller, under_way = None, frame
        while under_way is not None:
            if under_way.f_code.co_filename.startswith(_OWN):
                caller = under_way.f_back
            under_way = under_way.f_back
        if caller is None:
            self.handler(number, frame)
        else:
            self._wait_for(caller, number)

    def _wait_for(self, caller: FrameType, number: int) -> None:
        """Call the handler before the caller's next bytecode, by a trace function.

        Afterwards restore the previous tracer.
        """
        traced, opcodes, all_traced = caller.f_trace, caller.f_trace_opcodes, sys.gettrace()

        def goes_on(frame: FrameType, _event: str, _value: object) -> Any:
            frame.f_trace, frame.f_trace_opcodes = traced, opcodes
            sys.settrace(all_traced)
            self.handler(number, frame)
            return frame.f_trace

        caller.f_trace, caller.f_trace_opcodes = goes_on, True
        if all_traced is None:
            sys.settrace(lambda *_: None)


def defer() -> None:
    """Wrap all signal handlers that the program has set so far. Does nothing outside the main thread."""
    for number in signal.valid_signals() if _is_main() else ():
        handler = signal.getsignal(number)
        if callable(handler) and not isinstance(handler, DeferredHandler):
            signal.signal(number, DeferredHandler(handler))


def restore() -> None:
    """Set the program's own handlers again."""
    for number in signal.valid_signals() if _is_main() else ():
        if isinstance(handler := signal.getsignal(number), DeferredHandler):
            signal.signal(number, handler.handler)


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


Hook = Callable[..., Any]


class Entrance:
    """Saved-tensor hooks of one `with` block at a time.

    `next_block` refers to the block that is about to install them.
    """

    def __init__(self) -> None:
        self.next_block: weakref.ref[object] | None = None
        self._block: weakref.ref[object] | None = None
        self._is_in = False

    @property
    def is_entered(self) -> bool:
        """True while the hooks are installed.

        Removes hooks that a block left behind because it was interrupted at its end.
        """
        if self._block and self._block() is None:
            self.leave()
        return self._is_in

    def enter(self, pack: Hook, unpack: Hook, keep: compiled_runs.Keep) -> None:
        """Install the hooks. `keep` takes the values that compiled programs save."""
        self._block = self.next_block if self.next_block and self.next_block() else None
        push = partial(torch._C._autograd._push_saved_tensors_default_hooks, pack, unpack)
        _at_once(push, partial(compiled_runs.keeps().append, keep), partial(setattr, self, "_is_in", True))

    def leave(self) -> None:
        """Remove the hooks if they are installed."""
        if self._is_in:
            pop = torch._C._autograd._pop_saved_tensors_default_hooks
            _at_once(pop, compiled_runs.keeps().pop, partial(setattr, self, "_is_in", False))
        self._block = None


class KeptByItsBlock:
    """Descriptor for `__exit__` that gives each `with` block a bound method of its own, which lives only as long as it.

    `Entrance` keeps a weak reference to that bound method. When it is dead, the block has ended, even by an interrupt.
    """

    def __init__(self, method: Callable[..., None]) -> None:
        self._method = method

    def __get__(self, owner: Any, kind: type) -> Callable[..., None]:
        if owner is None:
            return self._method
        bound = MethodType(self._method, owner)
        owner.entrance.next_block = weakref.ref(bound)
        return bound


def _at_once(*calls: Callable[[], object]) -> None:
    """Call built-in functions one after the other, with no bytecode between them."""
    deque(map(call, calls), maxlen=0)
