"""The handle of something that another thread does."""

from __future__ import annotations

import threading

import pytest

from elastrain.comm.errors import Aborted
from elastrain.comm.groups.works import Work

_FAR_S = 20.0


def test_all_who_wait_go_on_when_it_is_done_and_nobody_waits_afterwards() -> None:
    work, came = Work(), threading.Barrier(5)

    def wait() -> None:
        came.wait(_FAR_S)
        work.wait()

    waiters = [threading.Thread(target=wait, daemon=True) for _ in range(4)]
    for waiter in waiters:
        waiter.start()
    came.wait(_FAR_S)
    assert not work.done and all(waiter.is_alive() for waiter in waiters)
    work.finish()
    for waiter in waiters:
        waiter.join(_FAR_S)
        assert not waiter.is_alive()
    work.wait()
    assert work.done and work.error is None


def test_each_waiter_gets_an_error_of_its_own() -> None:
    work, error = Work(), Aborted("the view changed")
    work.finish(error)
    raised = []
    for _ in range(2):
        with pytest.raises(Aborted, match="the view changed") as caught:
            work.wait()
        raised.append(caught.value)
    assert work.error is error and error not in raised and raised[0] is not raised[1]


def test_what_follows_is_called_once_whether_it_was_asked_for_before_or_after_the_end() -> None:
    called: list[str] = []
    work = Work()
    work.then(lambda: called.append("before"))
    work.finish()
    work.then(lambda: called.append("after"))
    assert called == ["before", "after"]
