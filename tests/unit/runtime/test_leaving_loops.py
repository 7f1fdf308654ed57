"""Whether a generator that is closed can tell a `break` around it from an exception."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest

from elastrain.runtime.training_loop import _is_raising


class _Loop:
    """Endless steps; `raised` says how they were left."""

    def __init__(self) -> None:
        self.raised: bool | None = None

    def steps(self) -> Iterator[int]:
        yield from self._inner()

    def _inner(self) -> Iterator[int]:
        number = 0
        while True:
            try:
                yield number
            except GeneratorExit:
                self.raised = _is_raising(sys._getframe(1))
                raise
            number += 1

    def wrapped(self) -> Iterator[int]:
        """As a progress bar does."""
        for number, _bar in zip(self.steps(), "abcdefgh", strict=False):
            yield number


def _fail() -> None:
    raise ValueError


def _breaks(steps: Callable[[], Iterator[int]]) -> None:
    for number in steps():
        if number == 2:
            break


def _returns(steps: Callable[[], Iterator[int]]) -> None:
    for number in steps():
        if number == 2:
            return


def _breaks_after_an_error_that_it_has_caught(steps: Callable[[], Iterator[int]]) -> None:
    for _number in enumerate(steps()):
        try:
            _fail()
        except ValueError:
            break


def _breaks_with_an_error_that_it_has_kept(steps: Callable[[], Iterator[int]]) -> None:
    kept = []
    for _number in enumerate(steps()):
        try:
            _fail()
        except ValueError as error:
            kept.append(error)
        if kept:
            break


def _returns_with_an_error_that_it_has_kept(steps: Callable[[], Iterator[int]]) -> None:
    kept = []
    for _number in enumerate(steps()):
        try:
            _fail()
        except ValueError as error:
            kept.append(error)
        if kept:
            return


def _closes_with_an_error_that_it_has_kept(steps: Callable[[], Iterator[int]]) -> None:
    stepping, kept = steps(), []
    next(stepping)
    try:
        _fail()
    except ValueError as error:
        kept.append(error)
    stepping.close()  # type: ignore[attr-defined]  # a generator has it


def _closes(steps: Callable[[], Iterator[int]]) -> None:
    stepping = steps()
    next(stepping)
    stepping.close()  # type: ignore[attr-defined]  # a generator has it


def _raises(steps: Callable[[], Iterator[int]]) -> None:
    for number in steps():
        if number == 2:
            _fail()


def _raises_with_another_error_that_it_has_kept(steps: Callable[[], Iterator[int]]) -> None:
    kept = []
    for number in steps():
        try:
            _fail()
        except ValueError as error:
            kept.append(error)
        if number == 2:
            _fail()


def _raises_what_it_has_caught(steps: Callable[[], Iterator[int]]) -> None:
    kept = []
    for _number in enumerate(steps()):
        try:
            _fail()
        except ValueError as error:
            kept.append(error)
            raise


def _raises_what_it_does_not_catch(steps: Callable[[], Iterator[int]]) -> None:
    for _number in enumerate(steps()):
        try:
            _fail()
        except KeyError:
            pass


def _raises_in_a_context(steps: Callable[[], Iterator[int]]) -> None:
    for _number in enumerate(steps()):
        with nullcontext():
            _fail()


def _raises_inside_of_what_tidies_up(steps: Callable[[], Iterator[int]]) -> None:
    for _number in enumerate(steps()):
        try:
            _fail()
        finally:
            _breaks(_Loop().steps)


def _raises_and_catches_outside(steps: Callable[[], Iterator[int]]) -> None:
    try:
        for number in steps():
            if number == 2:
                raise ValueError
    except ValueError:
        pass


@pytest.mark.parametrize("wrap", [_Loop.steps, _Loop.wrapped], ids=["plain", "wrapped"])
@pytest.mark.parametrize(
    ("script", "raised"),
    [
        (_breaks, False),
        (_returns, False),
        (_breaks_after_an_error_that_it_has_caught, False),
        (_breaks_with_an_error_that_it_has_kept, False),
        (_returns_with_an_error_that_it_has_kept, False),
        (_closes, False),
        (_closes_with_an_error_that_it_has_kept, False),
        (_raises, True),
        (_raises_with_another_error_that_it_has_kept, True),
        (_raises_what_it_has_caught, True),
        (_raises_what_it_does_not_catch, True),
        (_raises_in_a_context, True),
        (_raises_inside_of_what_tidies_up, True),
        (_raises_and_catches_outside, True),
    ],
)
def test_a_loop_that_an_exception_leaves_is_told_from_one_that_the_script_leaves(
    script: Callable[[Callable[[], Iterator[int]]], None], raised: bool, wrap: Callable[[_Loop], Iterator[int]]
) -> None:
    loop = _Loop()
    try:
        script(lambda: wrap(loop))
    except ValueError:
        assert raised
    assert loop.raised is raised
