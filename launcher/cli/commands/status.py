"""Commands `elastrain status` and `top`: the state of a run, alive or ended, for people or (--json) for programs."""

from __future__ import annotations

import json
import sys
import time
from typing import Annotated, Any

import typer

from elastrain.launcher.shared import operator_messages, rundir
from elastrain.launcher.shared.console import RunArgument, RunOption, one_of, print_table
from elastrain.launcher.watch import now as model
from elastrain.launcher.watch.words import duration


def status(
    run: RunArgument = None,
    named: RunOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> int:
    """Show who is a member, how far the job is, and what happened last."""
    state = _state(rundir.find(one_of(run, named)))
    if as_json:
        print(json.dumps(model.told(state, time.time())))
    else:
        _show(state)
    return 0


def top(
    run: RunArgument = None,
    named: RunOption = None,
    every_s: Annotated[float, typer.Option("--every", min=0.1, max=3600.0, help="Seconds.")] = 1.0,
    lines: Annotated[bool, typer.Option("--lines", help="Print lines, also on a terminal.")] = False,
) -> int:
    """Show what `status` shows on a full screen, until the run has ended. Without a terminal, print lines.

    Keys: s sorts, p pauses, j opens a member's journal, q quits.
    """
    folder = rundir.find(one_of(run, named))
    if not lines and sys.stdin.isatty() and sys.stdout.isatty() and _has_textual():
        from elastrain.launcher.watch.top_screen import show_screen

        return show_screen(folder, _state, every_s)
    while True:
        state = _state(folder)
        if sys.stdout.isatty():
            print("\x1b[H\x1b[2J", end="")  # a clear screen
        _show(state)
        if model.is_over(state):
            return 0
        time.sleep(every_s)


def _has_textual() -> bool:
    from importlib.util import find_spec

    return find_spec("textual") is not None


def _state(folder: rundir.RunDir) -> dict[str, Any]:
    return operator_messages.state(folder) | {"run_dir": str(folder.path)}


def _show(state: dict[str, Any]) -> None:
    now = time.time()
    print(f"job         {state['job']} ({state['state']})")
    for name, text in model.figures(state, now):
        print(f"{name:<11} {text}")
    if state["plan"]:
        print("\n".join(model.plan_lines(state["plan"])))
    print(f"run folder  {state['run_dir']}\n")
    if state["members"]:
        print_table(model.MEMBER_COLUMNS, model.member_rows(state))
        print()
    for sentence in model.recovering(state) if not model.is_over(state) else ():
        print(f"recovers: {sentence}")
    for sentence in model.waiting(state):
        print(sentence)
    for reason in model.reasons(state, now):
        print(f"· {duration(reason.ago_s)} ago: {reason.text}")
