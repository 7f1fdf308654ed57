"""The journal of one member on the screen of `elastrain top`: its newest lines, which grow while it is open."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.screen import Screen
from textual.widgets import Footer, RichLog, Static

from elastrain.launcher.shared.rundir import RunDir
from elastrain.launcher.watch.journal_tail import JournalTail, line_words

_EVERY_S = 1.0


class JournalScreen(Screen[None]):
    """The screen of one member's journal."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape", "app.pop_screen", "Back"), ("q", "app.pop_screen", "Back")]

    def __init__(self, folder: RunDir, member: str) -> None:
        super().__init__()
        self._member = member
        self._tail = JournalTail(folder.journals / "members" / f"{member}.jsonl")

    def compose(self) -> ComposeResult:
        """Lay out the title and the lines."""
        yield Static(f"journal of {self._member}  (Esc: back)", markup=False)
        yield RichLog(id="journal", wrap=False, max_lines=2000)
        yield Footer()

    def on_mount(self) -> None:
        """Show what is there, and go on."""
        self._grow()
        self.set_interval(_EVERY_S, self._grow)

    def _grow(self) -> None:
        log = self.query_one(RichLog)
        for line in self._tail.take():
            log.write(Text(line_words(line)))
        if self._tail.problem:
            log.write(Text(self._tail.problem))
            self._tail.problem = ""
