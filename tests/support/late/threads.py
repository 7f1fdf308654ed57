"""Order between host threads: what a thread knows passes on with what it hands to another thread.

A device does not see that a thread which waited has told another one. `handing_over` declares the methods by which a
class of the product does so; those of the standard library's own classes are declared by `watch_standard_library`.
"""

from __future__ import annotations

import concurrent.futures
import functools
import queue
import threading
import weakref
from collections.abc import Iterable
from typing import Any

from tests.support.late.order import Clock, known, this_thread

_handed: weakref.WeakKeyDictionary[Any, Clock] = weakref.WeakKeyDictionary()
"""Object that passes between threads -> what the threads that gave something knew."""
_guard = threading.Lock()


def handing_over(owner: type, gives: Iterable[str], takes: Iterable[str]) -> None:
    """Let threads that return from `takes` of an object know what those knew that have called `gives` of it."""
    for name in gives:
        setattr(owner, name, _giving(getattr(owner, name)))
    for name in takes:
        setattr(owner, name, _taking(getattr(owner, name)))


def watch_standard_library() -> None:
    handing_over(queue.Queue, ["put"], ["get"])
    handing_over(threading.Event, ["set"], ["wait", "is_set"])
    handing_over(concurrent.futures.Future, ["set_result", "set_exception"], ["result", "exception"])
    handing_over(threading.Thread, ["start"], ["join"])
    start = threading.Thread.start

    def start_knowing(thread: threading.Thread) -> None:
        run = thread.run

        def run_knowing() -> None:
            take(thread)
            try:
                run()
            finally:
                give(thread)

        vars(thread)["run"] = run_knowing
        start(thread)

    vars(threading)["Thread"].start = start_knowing


def give(handed: Any) -> None:
    if clock := known():
        with _guard:
            _handed.setdefault(handed, Clock()).join(clock)


def take(handed: Any) -> None:
    with _guard:
        clock = Clock(_handed.get(handed, {}))
    if clock:
        this_thread().clock.join(clock)


def _giving(method: Any) -> Any:
    @functools.wraps(method)
    def giving(self: Any, *args: Any, **kwargs: Any) -> Any:
        give(self)
        return method(self, *args, **kwargs)

    return giving


def _taking(method: Any) -> Any:
    @functools.wraps(method)
    def taking(self: Any, *args: Any, **kwargs: Any) -> Any:
        taken = method(self, *args, **kwargs)
        take(self)
        return taken

    return taking
