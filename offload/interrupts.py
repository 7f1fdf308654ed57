"""Signal handlers of the program wait while code of this package runs: their exceptions would leave it half done.

Python calls handlers in the main thread, between any two instructions. `KeyboardInterrupt` is raised by one.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

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
