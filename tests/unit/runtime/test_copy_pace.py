"""Copies take idle processors, and of busy ones a fiftieth: the bucket alone, and what it lets through an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from elastrain.comm.wire.addresses import Frame
from elastrain.protocol.messages import KINDS, Publish, ShardCopy
from elastrain.runtime.engine.copy_pace import BUSY_LINK_S, LOOK_S, SHARE, CopyPace, CopyTraffic

COPY_S = 0.01


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def copied_s(pace: CopyPace, clock: Clock, *, idle_cores: float, for_s: float) -> float:
    """Seconds that taking copies costs where each takes 10 ms and another one always waits."""
    spent_s, until_s = 0.0, clock.now_s + for_s
    while clock.now_s < until_s:
        if pace.should_look():
            pace.look(idle_cores)
        if pace.allowed_bytes():
            clock.now_s += COPY_S
            pace.spent(COPY_S)
            spent_s += COPY_S
        else:
            clock.now_s += pace.wait_s()
    return spent_s


@pytest.mark.parametrize("micro_batch_s", [0.005, 0.1, 5.0])
def test_of_processors_that_all_compute_copies_take_a_fiftieth(micro_batch_s: float) -> None:
    clock = Clock()
    pace = CopyPace(clock)
    pace.computed(micro_batch_s)
    assert copied_s(pace, clock, idle_cores=0.0, for_s=50.0) <= SHARE * 50.0 + COPY_S


def test_what_is_idle_is_taken_step_by_step_and_given_back_at_once() -> None:
    clock = Clock()
    pace = CopyPace(clock)
    taken = copied_s(pace, clock, idle_cores=2.0, for_s=3.0)
    assert taken > 1.5
    assert copied_s(pace, clock, idle_cores=0.0, for_s=10 * LOOK_S) < 5 * LOOK_S
    assert copied_s(pace, clock, idle_cores=0.0, for_s=10.0) <= SHARE * 10.0 + 2 * COPY_S


def test_a_long_silence_saves_no_more_than_one_micro_batch_grants() -> None:
    clock = Clock()
    pace = CopyPace(clock)
    pace.computed(1.0)
    clock.now_s = 1000.0
    assert 0 < copied_s(pace, clock, idle_cores=0.0, for_s=COPY_S) <= 2 * SHARE + COPY_S


def test_how_many_bytes_go_follows_from_what_the_last_ones_took() -> None:
    clock = Clock()
    pace = CopyPace(clock)
    pace.computed(1.0)
    for _ in range(20):
        pace.spent(0.01, 4_000_000)  # and as long again for the socket: 200 MB/s
        clock.now_s += 10.0
    assert pace.allowed_bytes() == pytest.approx(SHARE * 200e6, rel=0.01)


@dataclass
class Core:
    """Gives whatever it is allowed to."""

    takers: frozenset[str] = frozenset({"m1"})
    sent_bytes: int = 0


def frame(kind: type) -> Frame:
    return Frame(source="m1", generation=1, kind=KINDS[kind], body=b"", tensors=())


def traffic(
    *, clock: Clock, computing: list[bool], giver: Any = None, busy: Callable[[], frozenset[str]] = frozenset
) -> CopyTraffic:
    return CopyTraffic(
        giver or Core(takers=frozenset()),
        clock=clock,
        idle_cores=lambda: 0.0,
        is_computing=lambda: computing[0],
        busy=busy,
    )


def test_copies_wait_for_their_turn_while_the_loop_computes_and_nothing_else_does() -> None:
    clock, computing = Clock(), [True]
    copies = traffic(clock=clock, computing=computing)
    came = [frame(ShardCopy), frame(Publish), frame(ShardCopy)]
    assert [f.kind for f in copies.in_turn(came)] == [KINDS[Publish]]
    assert copies.wait_s(0.5) < 0.5  # the engine comes back for them
    clock.now_s += copies.wait_s(0.5)
    handed = copies.in_turn([])
    assert next(handed).kind == KINDS[ShardCopy]
    clock.now_s += COPY_S
    assert list(handed) == []  # the second one pays the debt of the first
    computing[0] = False
    assert copies.wait_s(0.5) == 0.0
    assert [f.kind for f in copies.in_turn([])] == [KINDS[ShardCopy]]


def test_what_may_be_sent_is_asked_for_only_while_something_is_to_be_sent() -> None:
    clock, giver = Clock(), Core(takers=frozenset())
    copies = traffic(clock=clock, computing=[True], giver=giver)
    clock.now_s = 1.0
    assert list(copies.allowances()) == []
    assert copies.wait_s(0.5) == 0.5
    giver.takers = frozenset({"m1"})
    (allowed,) = copies.allowances()
    assert allowed.parameters_bytes > 0


def test_no_copy_is_queued_behind_what_its_link_has_not_sent() -> None:
    clock, giver, busy = Clock(), Core(takers=frozenset({"m1", "m2"})), frozenset({"m1"})
    copies = traffic(clock=clock, computing=[True], giver=giver, busy=lambda: busy)
    clock.now_s = 1.0
    (allowed,) = copies.allowances()
    assert allowed.busy == {"m1"}
    giver.takers = busy
    clock.now_s = 2.0
    assert list(copies.allowances()) == []
    assert copies.wait_s(0.5) == BUSY_LINK_S, "the engine looks at the link again"
