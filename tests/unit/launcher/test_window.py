"""The window without redundancy as status and the event log show it."""

from __future__ import annotations

from elastrain.launcher.core.progress import OpenWindow
from elastrain.launcher.core.worker_table import Worker
from elastrain.launcher.shared.job_values import Log
from elastrain.launcher.watch.now import window_words
from elastrain.protocol.agent_messages import Window


def worker(member: str) -> Worker:
    return Worker(id=member, slot=0, initial=True)


def test_it_opens_with_the_first_word_and_closes_with_the_first_that_nothing_is_short() -> None:
    window = OpenWindow()
    (opened,) = window.on_window(worker("m0"), Window(step=5, short={"0": 1, "1": 1}, since_step=5), 10.0)
    assert isinstance(opened, Log) and opened.fields == {"window": "opened", "member": "m0", "shards": 2, "step": 5}
    assert window.on_window(worker("m1"), Window(step=5, short={"0": 1, "1": 1}, since_step=5), 10.1) == []
    assert window.on_window(worker("m0"), Window(step=6, short={"1": 1}, since_step=5), 11.0) == []
    assert window.described(12.5) == {"shards": {"1": 1}, "since_step": 5, "since_s": 2.5}
    (closed,) = window.on_window(worker("m1"), Window(step=7, short={}), 13.0)
    assert isinstance(closed, Log)
    assert closed.fields == {"window": "closed", "member": "m1", "after_s": 3.0, "after_steps": 2}
    assert window.described(14.0) is None


def test_what_a_slower_member_tells_of_a_step_that_is_over_opens_nothing_again() -> None:
    window = OpenWindow()
    window.on_window(worker("m0"), Window(step=5, short={"0": 1}, since_step=5), 10.0)
    window.on_window(worker("m0"), Window(step=6, short={}), 11.0)
    assert window.on_window(worker("m1"), Window(step=5, short={"0": 1}, since_step=5), 11.1) == []
    assert window.described(12.0) is None


def test_its_words_say_which_shards_how_many_holders_and_since_when() -> None:
    few = {"shards": {"3": 1, "10": 2, "4": 1}, "since_step": 7, "since_s": 1.25}
    assert window_words(few) == (
        "2 shards (3, 4) held by 1 member only, shard 10 held by 2 members only; since step 7, 1.2 s ago"
    )
