"""Commands `elastrain status` and `top`: the state of a run, alive or ended, for people or (--json) for programs."""

from __future__ import annotations

import json
import sys
import time
from typing import Annotated, Any

import typer

from elastrain.launcher.shared import operator_messages, rundir
from elastrain.launcher.shared.console import RunArgument, RunOption, one_of, print_table


def status(
    run: RunArgument = None,
    named: RunOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> int:
    """Show who is a member, how far the job is, and what happened last."""
    state = _state(rundir.find(one_of(run, named)))
    if as_json:
        print(json.dumps(state))
    else:
        _show(state)
    return 0


def top(
    run: RunArgument = None,
    named: RunOption = None,
    every_s: Annotated[float, typer.Option("--every", min=0.1, max=3600.0, help="Seconds.")] = 1.0,
) -> int:
    """Show what `status` shows, again and again, until the run has ended."""
    folder = rundir.find(one_of(run, named))
    while True:
        state = _state(folder)
        if sys.stdout.isatty():
            print("\x1b[H\x1b[2J", end="")  # a clear screen
        _show(state)
        if state["exit_code"] is not None or state["state"] == "vanished":
            return 0
        time.sleep(every_s)


def _state(folder: rundir.RunDir) -> dict[str, Any]:
    return operator_messages.state(folder) | {"run_dir": str(folder.path)}


def _show(state: dict[str, Any]) -> None:
    print(f"job         {state['job']} ({state['state']})")
    if state["life"] > 1:
        print(f"life        {state['life']}, which began with new workers")
    print(f"generation  {state['generation']}")
    loss = "-" if state["loss"] is None else f"{state['loss']:.4f}"
    print(f"step        {_or_dash(state['step'])}, loss {loss}, steps lost {state['steps_lost']}")
    if state["redone"]:
        print(f"redone      {state['redone']} (block, run) pairs of pipelines, after losses")
    if state["plan"]:
        print("\n".join(plan_lines(state["plan"])))
    print(f"restarts    {state['restarts_left']} left")
    if state["redundancy"]:
        print(f"redundancy  {state['redundancy']}")
    if state.get("window"):
        print(f"window      {window_words(state['window'])}")
    if len(state["nodes"]) > 1:
        nodes = sorted(state["nodes"], key=lambda node: (len(node["node"]), node["node"]))
        print(f"nodes       {', '.join(_node(node) for node in nodes)}")
    for device in state["devices"]:
        out = "; no worker is started on it" if device["left_out"] else ""
        print(f"device      {device['device']} has failed {_times(device['failures'])}{out}")
    if state["store_away_s"] is not None:
        print(f"store       has not answered for {state['store_away_s']:.0f} s; training goes on")
    if state["parked"]:
        print(f"parked      for {state['parked_s']:.0f} s: {state['parked']}")
    print(f"run folder  {state['run_dir']}\n")
    if state["members"]:
        columns = ("rank", "id", "node", "pid", "state", "step")
        print_table(columns, [[_or_dash(member[column]) for column in columns] for member in state["members"]])
        print()
    for member in (each for each in state["members"] if each.get("waits_for")):
        print(f"{member['id']} waits: {member['waits_for']}")
    for reason in state["reasons"]:
        print(f"· {reason}")


def plan_lines(plan: dict[str, Any]) -> list[str]:
    """Return a line for the last decision about pipelines, and one for each of them. Blocks are counted from 0."""
    lines = [f"plan        since step {plan['step']}; last decision: {plan['reason'] or '-'}"]
    for each in plan["pipelines"]:
        parts = [
            f"{member} blocks {begin}-{end - 1}" + (f" at speed {speed:.2f}" if speed else "")
            for member, (begin, end) in each["blocks"].items()
            for speed in [plan["speeds"].get(member)]
        ]
        lines.append(f"            {each['runs']} runs: {', '.join(parts)}")
    return lines


def window_words(window: dict[str, Any]) -> str:
    """Return a text that says which shards have too few holders, and since when."""
    by_holders: dict[int, list[int]] = {}
    for shard, living in window["shards"].items():
        by_holders.setdefault(living, []).append(int(shard))
    parts = [
        f"{_shards(sorted(shards))} held by {living} {'member' if living == 1 else 'members'} only"
        for living, shards in sorted(by_holders.items())
    ]
    return f"{', '.join(parts)}; since step {window['since_step']}, {window['since_s']:.1f} s ago"


def _shards(shards: list[int]) -> str:
    named = ", ".join(map(str, shards[:8])) + (" …" if len(shards) > 8 else "")
    return f"shard {named}" if len(shards) == 1 else f"{len(shards)} shards ({named})"


def _node(node: dict[str, Any]) -> str:
    """Return the node's name, with its state in brackets unless it is well."""
    return str(node["node"]) + ("" if node["state"] in ("here", "linked") else f" ({node['state']})")


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def _or_dash(value: object) -> str:
    return "-" if value is None or value == "" else str(value)
