"""Waiting on words and an alarm at once, and the threads for work that blocks."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable

import pytest

from elastrain.comm.groups.works import ThreadPool
from elastrain.comm.shm.shared_memory import Alarm, futex_wake_all, waits_available

FAR_S = 20.0
waits = pytest.mark.skipif(not waits_available()[0], reason=waits_available()[1])


class _Word:
    def __init__(self) -> None:
        self.word = ctypes.c_uint32(0)
        self.address = ctypes.addressof(self.word)

    def change(self) -> None:
        self.word.value += 1
        futex_wake_all(self.address)


def _waiting(alarm: Alarm, words: list[_Word]) -> threading.Thread:
    """A thread that waits until the alarm or a word is no more what it is now."""
    count, seen = alarm.count, [(word.address, word.word.value) for word in words]

    def run() -> None:
        deadline_s = time.monotonic() + FAR_S
        while alarm.count == count and all(
            word.word.value == value for word, (_, value) in zip(words, seen, strict=True)
        ):
            assert time.monotonic() < deadline_s
            alarm.wait(count, seen, deadline_s)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


@waits
@pytest.mark.parametrize("which", ["alarm", 0, 1])
def test_a_waiter_is_woken_by_the_alarm_and_by_each_word(which: str | int) -> None:
    alarm, words = Alarm(), [_Word(), _Word()]
    thread = _waiting(alarm, words)
    if isinstance(which, int):
        words[which].change()
    else:
        alarm.ring()
    thread.join(FAR_S / 2)  # before it would wake up by itself
    assert not thread.is_alive()


@waits
def test_a_wait_ends_at_once_where_something_has_changed_before_and_at_its_deadline() -> None:
    alarm, word = Alarm(), _Word()
    before_s = time.monotonic()
    alarm.ring()
    alarm.wait(0, [(word.address, 0)], before_s + FAR_S)
    alarm.wait(1, [(word.address, 5)], before_s + FAR_S)
    alarm.wait(1, [(word.address, 0)], before_s - 1)
    assert time.monotonic() < before_s + FAR_S


class _Gate:
    def __init__(self) -> None:
        self.inside, self.go, self.left = (threading.Event() for _ in range(3))

    def __call__(self) -> None:
        self.inside.set()
        assert self.go.wait(FAR_S)
        self.left.set()


def _threads(name: str) -> int:
    return sum(thread.name == name for thread in threading.enumerate())


def test_calls_that_block_run_side_by_side_and_threads_are_given_back() -> None:
    crew, gates = ThreadPool("a crew of a test"), [_Gate() for _ in range(3)]
    for gate in gates:
        crew.do(gate)
    assert all(gate.inside.wait(FAR_S) for gate in gates)  # none waits for another's end
    assert _threads("a crew of a test") == 3
    for gate in gates:
        gate.go.set()
    assert all(gate.left.wait(FAR_S) for gate in gates)
    crew.close()
    assert _threads("a crew of a test") == 0


def test_a_call_and_what_it_holds_is_forgotten_when_it_is_done() -> None:
    crew, done = ThreadPool("another crew"), threading.Event()
    ended: list[Callable[[], None]] = []

    class Held:
        def __del__(self) -> None:
            done.set()

    def call(held: Held) -> None:
        ended.append(lambda: None)

    crew.do((lambda held: lambda: call(held))(Held()))
    assert done.wait(FAR_S) and len(ended) == 1
    crew.close()
