"""Signal handlers of the program wait until code of this package has ended, and then run in the code that called it."""

from __future__ import annotations

import signal
import sys
import weakref
from collections.abc import Iterator
from functools import partial
from types import FrameType

import pytest
import torch

from elastrain.offload import interrupts
from elastrain.offload.interrupts import _at_once as at_once

NUMBER = signal.SIGUSR1


class OurCode:
    """Code of the package under which a signal comes."""

    def __init__(self) -> None:
        self.ended = 0

    def run(self) -> None:
        at_once(self.interrupted)

    def interrupted(self) -> None:
        signal.raise_signal(NUMBER)
        self.ended += 1


def stops(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@pytest.fixture(autouse=True)
def stopped_by_a_signal() -> Iterator[None]:
    before = signal.signal(NUMBER, stops)
    interrupts.defer()
    yield
    interrupts.restore()
    signal.signal(NUMBER, before)


def test_our_code_ends_before_the_handler_is_called() -> None:
    code, after = OurCode(), False
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        code.run()
        after = True
    assert code.ended == 1 and not after


def test_a_finalizer_of_ours_ends_and_the_exception_is_not_lost_in_it() -> None:
    code, kept = OurCode(), torch.empty(0)
    note = weakref.ref(kept, partial(at_once, code.interrupted))
    after = False
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        del kept
        after = True
    assert code.ended == 1 and not after and note() is None


def test_where_none_of_our_code_runs_the_handler_is_called_at_once() -> None:
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(NUMBER)


def test_who_traces_goes_on_tracing() -> None:
    signal.signal(NUMBER, lambda *_: None)
    interrupts.defer()
    before, seen = sys.gettrace(), list[str]()

    def trace(frame: FrameType, event: str, _value: object) -> None:
        seen.append(frame.f_code.co_name)

    sys.settrace(trace)
    try:
        OurCode().run()
        assert sys.gettrace() is trace
    finally:
        sys.settrace(before)
    assert "interrupted" in seen


def test_the_programs_handlers_come_back() -> None:
    assert isinstance(signal.getsignal(NUMBER), interrupts.DeferredHandler)
    interrupts.restore()
    assert signal.getsignal(NUMBER) is stops
