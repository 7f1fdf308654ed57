"""A lock that finalizers can use without waiting (`DeferredLock`), and a thread that finishes what is handed to it.

Finalizers of tensors and graph nodes run in any thread at any time, also in a thread that holds the lock. Waiting for
the lock would deadlock there. So a weak reference appends itself to the lock's notes, and the holder of the lock acts
on them. Finalizers must not be interrupted either, which is why no Python code runs in them.

Signal handlers raise exceptions (KeyboardInterrupt) between any two bytecodes of the main thread, also inside a lock's
`__enter__`, and in finalizers, where they are lost. The main thread therefore hands each change of shared state to the
"offload" thread and waits (`undisturbed`). The change is completed even if the wait is interrupted.
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
    """Return the built-in function that queues a task for the "offload" thread.

    Finalizers may call it at any moment, in any thread. The first call starts the thread.
    """
    global _tasks
    if _tasks is None:
        _tasks = Tasks()
        threading.Thread(target=_serve, args=(_tasks,), name="offload", daemon=True).start()
    return _tasks.put


def _serve(tasks: Tasks) -> None:
    while True:
        try:
            tasks.get()()
        except Exception:  # noqa: BLE001 - the main thread waits for later tasks
            traceback.print_exc()


_tasks: Tasks | None = None
os.register_at_fork(after_in_child=partial(globals().__setitem__, "_tasks", None))  # a forked child has no such thread


def undisturbed(method: Method) -> Method:
    """Let a method run to its end even if its caller is interrupted.

    In the main thread, the "offload" thread runs it.
    """

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
            del error  # its traceback refers to this frame: a reference cycle

    return cast(Method, whole)


# A note can arrive between the last look at the notes and a wait. A waiter therefore looks again after this time.
LOOK_AGAIN_S = 0.02


class _Wake(weakref.ref[Any]):
    """Weak reference that is queued as a task when its object is gone. The task acts on the lock's notes."""

    __slots__ = ("lock",)
    lock: weakref.ref[DeferredLock]

    def __call__(self) -> None:
        lock = self.lock()
        if lock is not None and lock.has_notes:
            with lock:
                pass


class Watched(weakref.ref[Any]):
    """Weak reference that becomes a note when its object is gone. Its creator must keep it alive until then.

    `act` is then called with it, with the lock held. `about` is data for `act`.
    """

    __slots__ = ("_wake", "about", "act")
    _wake: _Wake
    about: Any
    act: Callable[[Watched], None]


class DeferredLock:
    """A lock with notes that finalizers leave.

    They are acted on after entering the context manager, and before leaving it.

    `after_notes` is called, with the lock held, whenever notes were acted on. The main thread enters only inside
    methods that are `undisturbed`.
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
        """True if there are notes on which no thread has acted yet."""
        return bool(self._notes)

    def watch(self, thing: object, act: Callable[[Watched], None], about: object) -> Watched:
        """Call `act` when `thing` is gone: at once if the lock is free, else when its holder releases it."""
        wake = _Wake(thing, soon())
        wake.lock = weakref.ref(self)
        note = Watched(thing, self._notes.append)  # Python calls the newest weak reference first
        note._wake, note.act, note.about = wake, act, about
        return note

    def act(self) -> None:
        """Act on the notes. The lock must be held."""
        # Called for every saved tensor, so it must be fast if there are no notes.
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
        """Wake the waiting threads. The lock must be held."""
        if self._waiting:
            self._changed.notify_all()

    def wait(self) -> None:
        """Release the lock until something changes, or for at most `LOOK_AGAIN_S`. The lock must be held."""
        self.act()
        self._waiting += 1
        try:
            self._changed.wait(LOOK_AGAIN_S)
        finally:
            self._waiting -= 1
        self.act()
