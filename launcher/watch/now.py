"""The model of what a job does now: values for `status`, `top` and the metrics, made of the state that agents tell.

Pure functions: a state (see `operator_messages.problem_of`) and the present time in, texts and rows out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastrain.launcher.watch.words import DASH, duration, memory, or_dash, plural, rate

State = Mapping[str, Any]

MEMBER_COLUMNS = ("rank", "id", "node", "pid", "state", "step", "share", "s/micro-batch", "memory")
_IN_ORDER = ("here", "linked")
_WARMING = ("starting", "ready")


def is_over(state: State) -> bool:
    """Return True if the run has ended, or its agent has vanished."""
    return state["exit_code"] is not None or state["state"] == "vanished"


def age_s(state: State, now: float) -> float:
    """Return the age of the state in seconds. `now`: seconds since 1970."""
    return max(0.0, now - float(state["at"]))


def recovering(state: State) -> list[str]:
    """Return one sentence for each thing that recovers now, with its reason."""
    found = [f"the view cannot change for {duration(state['parked_s'])}: {state['parked']}"] if state["parked"] else []
    if state["store_away_s"] is not None:
        found.append(f"the store has not answered for {duration(state['store_away_s'])}; training goes on")
    if state["window"]:
        found.append(f"shards are copied to new holders: {window_words(state['window'])}")
    for member in state["members"]:
        if member["rank"] is None and member["state"] in _WARMING:
            stead = f" in place of {member['replaces']}" if member["replaces"] else ""
            found.append(f"{member['id']} {_warming_words(member['state'])}{stead}")
        elif member["rank"] is not None and member["state"] == "gone":
            found.append(f"{member['id']} is gone, and the members agree on a view without it")
    return found


def _warming_words(state: str) -> str:
    return "starts" if state == "starting" else "is ready and waits for a view"


def waiting(state: State) -> list[str]:
    """Return one sentence for each member that waits for others."""
    return [f"{member['id']} waits: {member['waits_for']}" for member in state["members"] if member["waits_for"]]


def shares(state: State) -> dict[str, float]:
    """Return member -> its share of the micro-batches of a step, between 0 and 1, for the members that have told."""
    told = {m["id"]: m["micro_batches"] for m in state["members"] if m["micro_batches"] is not None}
    total = sum(told.values())
    return {member: count / total for member, count in told.items()} if total else {}


@dataclass(frozen=True, kw_only=True)
class Reason:
    """A reason for what happened, and its age."""

    text: str
    ago_s: float


def reasons(state: State, now: float) -> list[Reason]:
    """Return the newest reasons, the newest last. Ages grow while an ended run's state lies on disk."""
    older_s = age_s(state, now)
    told = zip(state["reasons"], state["reasons_ago_s"], strict=False)
    return [Reason(text=text, ago_s=ago_s + older_s) for text, ago_s in told]


def figures(state: State, now: float) -> list[tuple[str, str]]:
    """Return the job's figures as (name, text), in the order in which people read them."""
    loss = DASH if state["loss"] is None else f"{state['loss']:.4f}"
    until = f" of {state['until']}" if state["until"] is not None else ""
    step = f"{or_dash(state['step'])}{until}, loss {loss}, steps lost {state['steps_lost']}"
    found = [("generation", str(state["generation"])), ("step", step)]
    if state["steps_per_minute"] is not None and not is_over(state):
        left = "" if state["remaining_s"] is None else f", {duration(state['remaining_s'])} to the end"
        found.append(("pace", f"{rate(state['steps_per_minute'])} steps per minute{left}"))
    if state["life"] > 1:
        found.insert(0, ("life", f"{state['life']}, which began with new workers"))
    if state["redone"]:
        found.append(("redone", f"{state['redone']} (block, run) pairs of pipelines, after losses"))
    found.append(("restarts", f"{state['restarts_left']} left"))
    if state["redundancy"]:
        found.append(("redundancy", state["redundancy"]))
    if state["window"]:
        found.append(("window", window_words(state["window"])))
    if state["checkpoint"] is not None:
        ago_s = state["checkpoint_ago_s"]
        ago = "" if ago_s is None else f", {duration(ago_s + age_s(state, now))} ago"
        found.append(("checkpoint", f"step {state['checkpoint']}{ago}"))
    return found + _machines(state)


def _machines(state: State) -> list[tuple[str, str]]:
    found = [("nodes", ", ".join(node_words(node) for node in nodes(state)))] if len(state["nodes"]) > 1 else []
    for device in state["devices"]:
        out = "; no worker is started on it" if device["left_out"] else ""
        often = "once" if device["failures"] == 1 else f"{device['failures']} times"
        found.append(("device", f"{device['device']} has failed {often}{out}"))
    if state["store_away_s"] is not None:
        found.append(("store", f"has not answered for {state['store_away_s']:.0f} s; training goes on"))
    if state["parked"]:
        found.append(("parked", f"for {state['parked_s']:.0f} s: {state['parked']}"))
    return found


def nodes(state: State) -> list[dict[str, Any]]:
    """Return the nodes by name, numbers at the end of names in their order."""
    return sorted(state["nodes"], key=lambda node: (len(node["node"]), node["node"]))


def node_words(node: Mapping[str, Any]) -> str:
    """Return the node's name, with its state in brackets unless it is well."""
    return str(node["node"]) + ("" if node["state"] in _IN_ORDER else f" ({node['state']})")


def member_rows(state: State) -> list[tuple[str, ...]]:
    """Return one row of `MEMBER_COLUMNS` for each member, in the order of the state."""
    share = shares(state)
    return [
        (
            *(or_dash(member[name]) for name in ("rank", "id", "node", "pid", "state", "step")),
            share_words(member, share),
            DASH if member["micro_batch_s"] is None else f"{member['micro_batch_s']:.3g}",
            memory(member["memory_bytes"], member["memory_limit_bytes"]),
        )
        for member in state["members"]
    ]


def share_words(member: Mapping[str, Any], share: Mapping[str, float]) -> str:
    """Return a member's share of the micro-batches in percent, and their number per step."""
    if member["id"] not in share:
        return DASH
    return f"{100 * share[member['id']]:.0f} % ({member['micro_batches']:.3g})"


def plan_lines(plan: Mapping[str, Any]) -> list[str]:
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


def window_words(window: Mapping[str, Any]) -> str:
    """Return a text that says which shards have too few holders, and since when."""
    by_holders: dict[int, list[int]] = {}
    for shard, living in window["shards"].items():
        by_holders.setdefault(living, []).append(int(shard))
    parts = [
        f"{_shards(sorted(shards))} held by {plural(living, 'member')} only"
        for living, shards in sorted(by_holders.items())
    ]
    return f"{', '.join(parts)}; since step {window['since_step']}, {window['since_s']:.1f} s ago"


def _shards(shards: Sequence[int]) -> str:
    named = ", ".join(map(str, shards[:8])) + (" …" if len(shards) > 8 else "")
    return f"shard {named}" if len(shards) == 1 else f"{len(shards)} shards ({named})"


def told(state: State, now: float) -> dict[str, Any]:
    """Return the state as `status --json` prints it, completed by what follows from it."""
    share = shares(state)
    members = [{**member, "share": share.get(member["id"])} for member in state["members"]]
    return {**state, "members": members, "age_s": age_s(state, now), "recovers": recovering(state)}
