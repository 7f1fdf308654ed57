"""Signal handlers of the program wait while code of this package runs: their exceptions would leave it half done.

Python calls handlers in the main thread, between any two instructions. `KeyboardInterrupt` is raised by one.

Puts saved-tensor hooks on and takes them off in one step each, so that no interrupt comes between.
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
    """A handler that is called at once, or when the code that called this package goes on."""

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
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
        """Call the handler before the caller's next instruction. A tracer that is there goes on after it."""
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
    """Let all handlers wait that the program has set until now. Python calls them in the main thread only."""
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
    """The hooks of one `with` block at a time. `next_block` is the block that is about to put them on, if one is."""

    def __init__(self) -> None:
        self.next_block: weakref.ref[object] | None = None
        self._block: weakref.ref[object] | None = None
        self._is_in = False

    @property
    def is_entered(self) -> bool:
        """Tell whether they are on. Those of a block that was interrupted at its very end are taken off here."""
        if self._block and self._block() is None:
            self.leave()
        return self._is_in

    def enter(self, pack: Hook, unpack: Hook, keep: compiled_runs.Keep) -> None:
        """Put them on; `keep` takes what compiled programs save."""
        self._block = self.next_block if self.next_block and self.next_block() else None
        push = partial(torch._C._autograd._push_saved_tensors_default_hooks, pack, unpack)
        _at_once(push, partial(compiled_runs.keeps().append, keep), partial(setattr, self, "_is_in", True))

    def leave(self) -> None:
        """Take them off if they are on."""
        if self._is_in:
            pop = torch._C._autograd._pop_saved_tensors_default_hooks
            _at_once(pop, compiled_runs.keeps().pop, partial(setattr, self, "_is_in", False))
        self._block = None


class KeptByItsBlock:
    """A method `__exit__` of which each `with` block keeps an object of its own until it is left, however that is."""

    def __init__(self, method: Callable[..., None]) -> None:
        self._method = method

    def __get__(self, owner: Any, kind: type) -> Callable[..., None]:
        if owner is None:
            return self._method
        bound = MethodType(self._method, owner)
        owner.entrance.next_block = weakref.ref(bound)
        return bound


def _at_once(*calls: Callable[[], object]) -> None:
    """Call built-in functions one after the other, with no bytecode between."""
    deque(map(call, calls), maxlen=0)
