"""A lock for finalizers, which must not wait: they leave a note, on which the holder of the lock acts.

Finalizers of tensors and graph nodes run in any thread at any time, also in a thread that holds the lock: one that
waited for it would wait for ever. They also must not be interrupted, so that they are no code of Python's: a weak
reference puts itself among the notes.

A thread that does for the main thread what must not end half-way.

Python raises KeyboardInterrupt, and what other signal handlers raise, between any two bytecodes of the main thread and
of no other: also inside a lock's `__enter__`, and in finalizers, where it is lost. The main thread therefore hands over
each change to shared state, and only waits for it. What it handed over ends as a whole if the wait is interrupted.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial, wraps
from queue import SimpleQueue
from types import TracebackType
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


# A note can slip in between the last look and the wait; a waiter looks again after this long.
LOOK_AGAIN_S = 0.02


class _Wake(weakref.ref[Any]):
    """A task for when an object is gone: act on the lock's notes."""

    __slots__ = ("lock",)
    lock: weakref.ref[DeferredLock]

    def __call__(self) -> None:
        lock = self.lock()
        if lock is not None and lock.has_notes:
            with lock:
                pass


class Watched(weakref.ref[Any]):
    """A weak reference that becomes a note when its object is gone. Who watches keeps it until then.

    `act` is called with it then, the lock held; `about` is for `act`.
    """

    __slots__ = ("_wake", "about", "act")
    _wake: _Wake
    about: Any
    act: Callable[[Watched], None]


class DeferredLock:
    """Holds the lock as a context manager; notes are acted on after entering, and before leaving.

    `after_notes` is called, with the lock held, whenever notes were acted on. The main thread enters by way of
    `undisturbed` only.
    """

    def __init__(self, after_notes: Callable[[], None]) -> None:
        self._after_notes = after_notes
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waiting = 0
        self._notes: deque[Watched] = deque()

    def __enter__(self) -> None:
        self._lock.acquire()
        try:
            self.act()
        except BaseException:
            self._lock.release()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.act()
        finally:
            self._lock.release()

    @property
    def has_notes(self) -> bool:
        """Tell whether there are notes on which nobody has acted to the end."""
        return bool(self._notes)

    def watch(self, thing: object, act: Callable[[Watched], None], about: object) -> Watched:
        """Call `act` when `thing` is gone: at once if the lock is free, else when its holder lets go."""
        wake = _Wake(thing, soon())
        wake.lock = weakref.ref(self)
        note = Watched(thing, self._notes.append)  # made last, called first
        note._wake, note.act, note.about = wake, act, about
        return note

    def act(self) -> None:
        """Act on the notes. The lock is held."""
        # Called for every saved tensor: nothing else is done where there are no notes.
        if not self._notes:
            return
        while self._notes:
            try:
                self._notes[0].act(self._notes[0])
            finally:
                self._notes.popleft()
        self.tell()
        self._after_notes()

    def tell(self) -> None:
        """Wake the threads that wait. The lock is held."""
        if self._waiting:
            self._changed.notify_all()

    def wait(self) -> None:
        """Let others hold the lock until something changes, or a moment has passed. The lock is held."""
        self.act()
        self._waiting += 1
        try:
            self._changed.wait(LOOK_AGAIN_S)
        finally:
            self._waiting -= 1
        self.act()
