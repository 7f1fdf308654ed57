"""The event loop: what is ready is served, in turns or in their halves."""

from __future__ import annotations

import os
import threading
import time

from elastrain.base.event_loop import READ, WRITE, EventLoop


def test_a_readable_descriptor_is_served_until_it_is_unregistered() -> None:
    loop, (reader, writer) = EventLoop(), os.pipe()
    seen: list[int] = []
    loop.register(reader, seen.append)
    os.write(writer, b"x")
    loop.turn(time.monotonic() + 20)
    loop.turn(time.monotonic())
    assert seen == [READ, READ]
    loop.unregister(reader)
    loop.unregister(reader)
    loop.turn(time.monotonic())
    assert len(seen) == 2
    loop.close()
    os.close(reader)
    os.close(writer)


def test_what_is_wanted_of_a_descriptor_may_change() -> None:
    loop, (reader, writer) = EventLoop(), os.pipe()
    seen: list[int] = []
    loop.register(writer, seen.append, 0)
    loop.turn(time.monotonic())
    loop.modify(writer, WRITE)
    loop.turn(time.monotonic() + 20)
    assert seen == [WRITE]
    loop.close()
    os.close(reader)
    os.close(writer)


def test_a_descriptor_that_was_opened_anew_under_a_ready_number_is_not_served() -> None:
    loop, (reader, writer), (other, far) = EventLoop(), os.pipe(), os.pipe()
    wrong: list[int] = []

    def replace(_events: int) -> None:
        for fd in (reader, other):
            loop.unregister(fd)
            loop.register(fd, wrong.append)

    loop.register(reader, replace)
    loop.register(other, replace)
    os.write(writer, b"x")
    os.write(far, b"x")
    loop.serve(loop.wait(20))
    assert wrong == []
    loop.close()
    for fd in (reader, writer, other, far):
        os.close(fd)


def test_another_thread_wakes_it() -> None:
    loop = EventLoop()
    timer = threading.Timer(0.05, loop.wake)
    timer.start()
    before_s = time.monotonic()
    loop.turn(None)
    assert time.monotonic() - before_s < 10
    timer.join()
    loop.close()
    loop.wake()
