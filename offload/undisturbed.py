"""A thread that does for the main thread what must not end half-way.

Python raises KeyboardInterrupt, and what other signal handlers raise, between any two bytecodes of the main thread and
of no other: also inside a lock's `__enter__`, and in finalizers, where it is lost. The main thread therefore hands over
each change to shared state, and only waits for it. What it handed over ends as a whole if the wait is interrupted.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial, wraps
from queue import SimpleQueue
from typing import Any, TypeVar, cast

Method = TypeVar("Method", bound=Callable[..., Any])
Tasks = SimpleQueue[Callable[[], object]]


def soon() -> Callable[[Callable[[], object]], None]:
    """Return the built-in function that hands over a task. Finalizers may call it, at any moment in any thread."""
    global _tasks
    if _tasks is None:
        _tasks = Tasks()
        threading.Thread(target=_serve, args=(_tasks,), name="offload", daemon=True).start()
    return _tasks.put


def _serve(tasks: Tasks) -> None:
    while True:
        try:
            tasks.get()()
        except Exception:  # noqa: BLE001 - the main thread waits for what comes next
            traceback.print_exc()


_tasks: Tasks | None = None
os.register_at_fork(after_in_child=partial(globals().__setitem__, "_tasks", None))  # a child has no such thread


def undisturbed(method: Method) -> Method:
    """Let a method run to its end, whatever interrupts its caller."""

    @wraps(method)
    def whole(*args: Any, **named: Any) -> Any:
        if threading.current_thread() is not threading.main_thread() or sys.is_finalizing():
            return method(*args, **named)
        outcome, ended = list[tuple[Any, BaseException | None]](), threading.Lock()
        ended.acquire()

        def run() -> None:
            nonlocal args, named
            try:
                outcome.append((method(*args, **named), None))
            except BaseException as raised:  # noqa: BLE001 - it is raised in the thread that waits
                outcome.append((None, raised))
            args, named = (), {}
            ended.release()

        soon()(run)
        ended.acquire()
        result, error = outcome.pop()
        try:
            if error is not None:
                raise error
            return result
        finally:
            del error  # its traceback has this frame

    return cast(Method, whole)
