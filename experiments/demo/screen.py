"""What the demo shows while it runs: a live table in a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from experiments.demo.story import Claim, sentences
from experiments.journals import Member, Run
from experiments.recovery.figures import loss_curve, of_step

TONES = {"lost": "bold red", "back": "bold green", "": ""}
BARS = "▁▂▃▄▅▆▇█"
STORY_LINES = 10


class Screen(Protocol):
    """Shows a run as it goes on, then the end of the reference."""

    def show(self, run: Run, *, steps: int, note: str = "") -> None: ...

    def close(self) -> None: ...


class LiveScreen:
    """A table that is drawn anew."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._live.start()

    def show(self, run: Run, *, steps: int, note: str = "") -> None:
        self._live.update(picture(run, steps=steps, note=note), refresh=True)

    def close(self) -> None:
        self._live.stop()


class PlainScreen:
    """A line for each thing that happens, and one for every fifth step."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._told = 0
        self._steps = 0
        self._note = ""

    def show(self, run: Run, *, steps: int, note: str = "") -> None:
        told = sentences(run)
        for sentence in told[self._told :]:
            self._console.print(f"{_clock(run, sentence.at_s)}  {sentence.text}", highlight=False)
        self._told = max(self._told, len(told))
        curve = loss_curve(run.members.values())
        for at_s, step, loss in curve[self._steps :]:
            if step % 5 == 0 or step == steps - 1:
                self._console.print(f"{_clock(run, at_s)}  step {step:3d}  loss {loss:.4f}", highlight=False)
        self._steps = len(curve)
        if note and note != self._note and note.endswith("…"):
            self._console.print(note, highlight=False)
        self._note = note

    def close(self) -> None: ...


def picture(run: Run, *, steps: int, note: str = "") -> RenderableType:
    """The whole live view of one moment."""
    curve = loss_curve(run.members.values())
    done = len(curve)
    head = Table.grid(padding=(0, 2))
    head.add_row(
        Text(f"step {done:3d} of {steps}", style="bold"),
        ProgressBar(total=steps, completed=done, width=30),
        Text(f"loss {curve[-1][2]:.3f}" if curve else "", style="bold"),
        Text(sparkline([loss for _, _, loss in curve], width=24), style="cyan"),
    )
    return Group(Text(), head, Text(), _members(run), Text(), _story(run), Text(), Text(note, style="dim"))


def sparkline(values: Sequence[float], *, width: int) -> str:
    """The last `width` values as bars, over the range of all values."""
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = (len(BARS) - 1) / ((high - low) or 1.0)
    return "".join(BARS[round((value - low) * scale)] for value in values[-width:])


def _members(run: Run) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    for title in ("node", "member", "rank", "state", "step", "micro-batches"):
        table.add_column(title, min_width=6)
    for member in run.members.values():
        table.add_row(run.nodes[member.id], *_row(run, member))
    return table


def _row(run: Run, member: Member) -> tuple[RenderableType, ...]:
    view = run.views[-1].members if run.views else ()
    if member.faults:
        fault = member.faults[0]
        return Text(member.id, style="red"), "–", Text(f"killed in {fault.phase}", style="red"), str(fault.step), ""
    if member.digest is not None:
        return Text(member.id, style="green"), "", Text("done", style="green"), str(member.ended_at_step), ""
    if member.id in run.deaths_s:
        return Text(member.id, style="dim"), "–", Text("ended", style="dim"), "", ""
    if member.id not in view:
        what = "warming up" if member.id in run.replaces else "starting"
        return Text(member.id, style="yellow"), "–", Text(what, style="yellow"), "", ""
    step = max(member.advanced_s, default=-1) + 1
    rank = str(view.index(member.id))
    works = Text("■" * len(of_step(member, step)), style="blue")
    return Text(member.id, style="green"), rank, Text("training", style="green"), str(step), works


def _story(run: Run) -> Group:
    told = sentences(run)[-STORY_LINES:]
    lines = [Text(f"{_clock(run, one.at_s)}  {one.text}", style=TONES[one.tone]) for one in told]
    return Group(*lines)


def _clock(run: Run, at_s: float) -> str:
    """Seconds since the training began."""
    return f"{at_s - run.views[0].at_s:6.1f} s" if run.views else ""


def print_proof(console: Console, claims: Sequence[Claim]) -> None:
    table = Table.grid(padding=(0, 2))
    marks = {True: Text("✔", style="bold green"), False: Text("✘", style="bold red"), None: Text(" ")}
    for claim in claims:
        style = "bold red" if claim.holds is False else ""
        table.add_row(marks[claim.holds], claim.what, Text(claim.found, style=style))
    console.print()
    console.print(table)
    console.print()
