"""The full screen of `elastrain top`: job, members and reasons, refreshed in place, with keys to sort and pause.

Only this module and `journal_screen` import textual. A thread asks the agents, so that a slow agent never stops a key.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.widgets import DataTable, Footer, Static

from elastrain.errors import ElastrainError
from elastrain.launcher.shared.rundir import RunDir
from elastrain.launcher.watch import now as model
from elastrain.launcher.watch.journal_screen import JournalScreen
from elastrain.launcher.watch.member_order import ORDERS, sorted_rows
from elastrain.launcher.watch.words import duration

Ask = Callable[[RunDir], dict[str, Any]]
_MARKS = {"gone": "✗ ", "left out": "✗ ", "overdue": "✗ ", "starting": "… ", "ready": "… "}
"""Signs before a member's state, so that colour is never the only sign."""
_LEFT_OUT = "pid"
"""Column that only `status` prints, because 80 characters have no room for it."""
_STYLES = {"gone": "red", "left out": "red", "overdue": "red", "starting": "yellow", "ready": "yellow"}


class TopApp(App[int]):
    """The screen. `ask` returns the state of the run, or raises ElastrainError."""

    TITLE = "elastrain top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #job { height: auto; max-height: 11; padding: 0 1; }
    #members { height: 1fr; min-height: 5; }
    #recovers { height: auto; max-height: 5; padding: 0 1; }
    #reasons { height: auto; max-height: 5; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("s", "sort", "Sort"),
        ("p", "pause", "Pause"),
        ("j", "journal", "Journal"),
        ("q", "quit", "Quit"),
    ]

    def __init__(self, folder: RunDir, ask: Ask, every_s: float) -> None:
        super().__init__()
        self._folder, self._ask, self._every_s = folder, ask, every_s
        self._state: dict[str, Any] | None = None
        self._problem = ""
        self._order = ORDERS[0]
        self.is_paused = False

    def compose(self) -> ComposeResult:
        """Lay out the parts from the top to the bottom."""
        yield Static(id="job", markup=False)
        yield DataTable[Text](id="members", cursor_type="row", zebra_stripes=True)
        with VerticalScroll(id="recovers"):
            yield Static(id="recovering", markup=False)
        with VerticalScroll(id="reasons"):
            yield Static(id="reasons-text", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        """Begin to ask."""
        self._table.add_columns(*(name for name in model.MEMBER_COLUMNS if name != _LEFT_OUT))
        self._table.focus()
        self._ask_again()
        self.set_interval(self._every_s, self._ask_again)

    @property
    def _table(self) -> DataTable[Text]:
        return self.screen_stack[0].query_one("#members", DataTable)

    def _ask_again(self) -> None:
        if not self.is_paused and not self._is_asking:
            self.run_worker(self._asked, thread=True, group="ask")

    @property
    def _is_asking(self) -> bool:
        return any(worker.group == "ask" and not worker.is_finished for worker in self.workers)

    def _asked(self) -> None:
        try:
            state, problem = self._ask(self._folder), ""
        except ElastrainError as error:
            state, problem = None, str(error)
        if self.is_running:
            self.call_from_thread(self._take, state, problem)

    def _take(self, state: dict[str, Any] | None, problem: str) -> None:
        """Show a new state. If no agent answers, the last state stays on the screen beside the problem."""
        self._state, self._problem = state or self._state, problem
        if not self.is_paused and self.is_running and self.screen_stack[0].query("#job"):  # else the screen closes
            self._draw()

    def _draw(self) -> None:
        state, now = self._state, time.time()
        job = self.screen_stack[0].query_one("#job", Static)
        if state is None:
            job.update(self._problem or "asking the agents …")
            return
        job.update(self._job_text(state, now))
        self._draw_members(state)
        self._draw_texts(state, now)

    def _job_text(self, state: dict[str, Any], now: float) -> Text:
        over = "; the run is over" if model.is_over(state) else ""
        paused = "  [PAUSED]" if self.is_paused else ""
        lines = [Text(f"{state['job']} ({state['state']}{over}), by {self._order}{paused}", style="bold")]
        lines += [Text(f"{name:<11} {text}") for name, text in model.figures(state, now)]
        lines += [Text(line) for line in (model.plan_lines(state["plan"])[:1] if state["plan"] else ())]
        lines += [Text(f"! {self._problem}", style="bold red")] if self._problem else []
        for line in lines:
            line.no_wrap, line.overflow = True, "ellipsis"
        return Text("\n").join(lines)

    def _draw_members(self, state: dict[str, Any]) -> None:
        table = self._table
        chosen = table.cursor_row
        table.clear()
        for member, row in sorted_rows(state, self._order):
            style = _STYLES.get(member["state"], "")
            cells = dict(zip(model.MEMBER_COLUMNS, row, strict=True))
            cells["state"] = _MARKS.get(member["state"], "") + cells["state"]
            shown = [Text(cell, style=style) for name, cell in cells.items() if name != _LEFT_OUT]
            table.add_row(*shown, key=member["id"])
        table.move_cursor(row=min(chosen, max(0, table.row_count - 1)))

    def _draw_texts(self, state: dict[str, Any], now: float) -> None:
        below = self.screen_stack[0]
        found = [] if model.is_over(state) else [f"recovers: {each}" for each in model.recovering(state)]
        below.query_one("#recovering", Static).update("\n".join([*found, *model.waiting(state)]))
        newest = reversed(model.reasons(state, now))
        told = "\n".join(f"· {duration(each.ago_s)} ago: {each.text}" for each in newest)
        below.query_one("#reasons-text", Static).update(told)

    def action_sort(self) -> None:
        """Sort the members by the next column, and say by which."""
        self._order = ORDERS[(ORDERS.index(self._order) + 1) % len(ORDERS)]
        self._draw()

    def action_pause(self) -> None:
        """Stop to refresh, or go on."""
        self.is_paused = not self.is_paused
        self._draw()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Open the journal of the chosen member."""
        if event.row_key.value is not None:
            self.push_screen(JournalScreen(self._folder, event.row_key.value))

    def action_journal(self) -> None:
        """Open the journal of the member under the cursor, if none is open."""
        if len(self.screen_stack) == 1:
            self._table.action_select_cursor()


def show_screen(folder: RunDir, ask: Ask, every_s: float) -> int:
    """Show the screen until the user quits. Returns the exit code."""
    return TopApp(folder, ask, every_s).run() or 0
