"""The full screen of `elastrain top`, driven by textual's pilot: 80×24, keys, journals, and silent agents."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from elastrain.launcher.shared.operator_messages import NoAnswerError
from elastrain.launcher.shared.rundir import RunDir
from elastrain.launcher.watch.member_order import ORDERS, sorted_rows
from tests.support.watched import a_member, a_state

pytest.importorskip("textual", reason="the extra `watch` is not installed")

from textual.pilot import Pilot
from textual.widgets import DataTable, RichLog

from elastrain.launcher.watch.top_screen import TopApp

EVERY_S = 0.05
Acts = Callable[[TopApp, Pilot[int]], Awaitable[None]]


def played(ask: Callable[[RunDir], dict[str, Any]], acts: Acts, folder: Path = Path("/runs/job")) -> None:
    async def play() -> None:
        app = TopApp(RunDir(path=folder), ask, EVERY_S)
        async with app.run_test(size=(80, 24)) as pilot:
            await acts(app, pilot)

    asyncio.run(play())


def text_of(app: TopApp) -> str:
    """All lines of the screen as they stand in the terminal."""
    return "\n".join("".join(segment.text for segment in strip) for strip in app.screen._compositor.render_strips())


async def until(app: TopApp, pilot: Pilot[int], words: str) -> str:
    for _ in range(400):
        if words in (shown := text_of(app)):
            return shown
        await pilot.pause(0.05)
    raise AssertionError(f"{words!r} never came:\n{text_of(app)}")


def test_80_by_24_show_all_of_it() -> None:
    lost = [a_member("m0", memory_bytes=150_000_000, memory_limit_bytes=200_000_000, micro_batch_s=0.0123)]
    lost += [a_member("m1", rank=1, state="gone"), a_member("m2", rank=None, state="starting", replaces="m1")]
    window = {"shards": {"3": 1}, "since_step": 7, "since_s": 2.0}
    told = {"reasons": ["generation 2: m1 lost"], "reasons_ago_s": [3.0], "window": window}

    async def acts(app: TopApp, pilot: Pilot[int]) -> None:
        await until(app, pilot, "m2 starts in place of m1")
        shown = await until(app, pilot, "q Quit")
        for words in ("41 of 100", "30 steps per minute", "step 40,", "75 % of 200 MB", "0.0123", "window", "m1 lost"):
            assert words in shown, words
        assert "✗ gone" in shown and "… starting" in shown, "colour is not the only sign"
        assert "s Sort" in shown
        assert all(len(line) <= 80 for line in shown.splitlines())

    played(lambda _: a_state(members=lost, **told), acts)


def test_s_sorts_by_the_next_column_and_says_so() -> None:
    members = [a_member("m0", micro_batch_s=0.1), a_member("m1", rank=1, micro_batch_s=0.9), a_member("m2", rank=2)]

    async def acts(app: TopApp, pilot: Pilot[int]) -> None:
        await until(app, pilot, "m2")
        await pilot.press("s", "s")
        await until(app, pilot, "by micro_batch_s")
        table = app.screen_stack[0].query_one(DataTable)
        assert [str(table.get_row_at(row)[1]) for row in range(3)] == ["m1", "m0", "m2"]

    played(lambda _: a_state(members=members), acts)


@pytest.mark.parametrize("order", ORDERS)
def test_each_order_keeps_every_member(order: str) -> None:
    members = [a_member("m0"), a_member("m1", rank=None), a_member("m2", rank=1, micro_batches=1.0, memory_bytes=3)]
    assert {member["id"] for member, _ in sorted_rows(a_state(members=members), order)} == {"m0", "m1", "m2"}


def test_a_paused_screen_stays_as_it_is_and_says_so() -> None:
    steps = iter(range(10_000))

    async def acts(app: TopApp, pilot: Pilot[int]) -> None:
        await until(app, pilot, "running")
        await pilot.press("p")
        before = await until(app, pilot, "[PAUSED]")
        await pilot.pause(10 * EVERY_S)
        assert text_of(app) == before
        await pilot.press("p")
        await pilot.pause(10 * EVERY_S)
        assert "[PAUSED]" not in text_of(app) and text_of(app) != before

    played(lambda _: a_state(step=next(steps)), acts)


def test_an_agent_that_does_not_answer_leaves_the_last_state_and_a_sentence() -> None:
    asked: list[int] = []

    def ask(_: RunDir) -> dict[str, Any]:
        asked.append(1)
        if len(asked) > 1:
            raise NoAnswerError("the agent of /runs/job does not answer within 10 s")
        return a_state()

    async def acts(app: TopApp, pilot: Pilot[int]) -> None:
        shown = await until(app, pilot, "! the agent of /runs/job does not answer")
        assert "41 of 100" in shown and "m1" in shown

    played(ask, acts)


def test_j_opens_a_members_journal_which_grows_and_q_goes_back_then_quits(tmp_path: Path) -> None:
    (tmp_path / "members").mkdir()
    journal = tmp_path / "members" / "m0.jsonl"
    journal.write_text(json.dumps({"t": 1.5, "member": "m0", "event": "passed", "step": 7}) + '\n{"t": 2.0, "ev')

    async def acts(app: TopApp, pilot: Pilot[int]) -> None:
        await until(app, pilot, "m0")
        await pilot.press("j")
        shown = await until(app, pilot, "step=7")
        assert "journal of m0" in shown and app.screen.query_one(RichLog)
        await pilot.press("j")  # nothing more opens
        with journal.open("a") as file:
            file.write('ent": "resumed", "generation": 2}\nnonsense\n')
        await until(app, pilot, "generation=2")
        await pilot.press("q")
        await until(app, pilot, "q Quit")
        await pilot.press("q")
        await pilot.pause(0.2)
        assert app.return_code == 0

    played(lambda _: a_state(), acts, tmp_path)


def test_a_journal_on_another_machine_is_named(tmp_path: Path) -> None:
    async def acts(app: TopApp, pilot: Pilot[int]) -> None:
        await until(app, pilot, "m0")
        await pilot.press("j")
        await until(app, pilot, "no journal can be read on this machine")

    played(lambda _: a_state(), acts, tmp_path)
