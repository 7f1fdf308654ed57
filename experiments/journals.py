"""What a run's folder tells, as values: who computed what and when, who was lost, who resumed.

Reading only; times are monotonic seconds that all processes of one host share. What figures are made of these values
is decided elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Line = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One forward and backward, from the moment its data was there."""

    step: int
    index: int
    run: int
    started_s: float
    ended_s: float


@dataclass(frozen=True, kw_only=True)
class Passed:
    """The moment at which a member held a step's commit record, and what the record says."""

    step: int
    generation: int
    at_s: float
    loss: float | None
    samples: int
    fingerprint: int


@dataclass(frozen=True, kw_only=True)
class View:
    generation: int
    at_s: float
    members: tuple[str, ...]
    reason: str


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A member's last word before it killed itself on request."""

    step: int
    phase: str
    at_s: float


@dataclass(kw_only=True)
class Member:
    """One member's journal, sorted by kind."""

    id: str
    micro_batches: list[MicroBatch] = field(default_factory=list)
    passed: list[Passed] = field(default_factory=list)
    advanced_s: dict[int, float] = field(default_factory=dict)
    """Step -> when this member's loop went on to the next one."""
    edited_s: dict[int, float] = field(default_factory=dict)
    """Generation -> when this member heard of it."""
    resumed_s: dict[int, float] = field(default_factory=dict)
    """Generation -> when this member went on in it, having heard of all its members."""
    lost_s: dict[str, float] = field(default_factory=dict)
    """Peer -> when this member knew of its death."""
    copied_s: list[float] = field(default_factory=list)
    """When this member has sent a shard's state to a new holder, or has taken one."""
    faults: list[Fault] = field(default_factory=list)
    refused: list[tuple[float, str]] = field(default_factory=list)
    """When a fault on request found nothing to strike in this member, and why."""
    ended_at_step: int | None = None
    digest: str | None = None

    def take(self, line: Line) -> None:
        """Add one line; kinds that nobody asks for are passed over."""
        match line["event"]:
            case "micro_batch":
                self.micro_batches.append(
                    MicroBatch(
                        step=line["step"],
                        index=line["micro_batch"],
                        run=line["run"],
                        started_s=line["started_s"],
                        ended_s=line["t"],
                    )
                )
            case "passed":
                self.passed.append(
                    Passed(
                        step=line["step"],
                        generation=line["generation"],
                        at_s=line["t"],
                        loss=line["loss"],
                        samples=line["samples"],
                        fingerprint=line["fingerprint"],
                    )
                )
            case "advance":
                self.advanced_s[line["step"]] = line["t"]
            case "edit":
                self.edited_s[line["generation"]] = line["t"]
            case "resumed":
                self.resumed_s[line["generation"]] = line["t"]
            case "lost":
                self.lost_s.setdefault(line["peer"], line["t"])
            case "copy":
                self.copied_s.append(line["t"])
            case "fault":
                self.faults.append(Fault(step=line["step"], phase=line["phase"], at_s=line["t"]))
            case "fault_refused":
                self.refused.append((line["t"], line["reason"]))
            case "finished":
                self.ended_at_step, self.digest = line["step"], line["digest"]


@dataclass(kw_only=True)
class Run:
    """The log of the agents (of one node or several) and all members' journals."""

    members: dict[str, Member] = field(default_factory=dict)
    views: list[View] = field(default_factory=list)
    pids: dict[str, int] = field(default_factory=dict)
    started_s: dict[str, float] = field(default_factory=dict)
    """Member -> when its process was started."""
    nodes: dict[str, str] = field(default_factory=dict)
    """Member -> its node."""
    agents: dict[str, int] = field(default_factory=dict)
    """Node -> the process of its newest agent."""
    replaces: dict[str, str] = field(default_factory=dict)
    """New member -> the one whose place (slot and node) it has taken."""
    deaths_s: dict[str, float] = field(default_factory=dict)
    """Member -> when the first agent knew that its process had ended."""
    lost_nodes_s: dict[str, float] = field(default_factory=dict)
    """Member -> when its whole node was killed on request."""
    hangs_s: dict[str, float] = field(default_factory=dict)
    """Member -> when it was first taken to hang."""
    silences: list[tuple[str, float]] = field(default_factory=list)
    """(node, when another's agent no longer reached it)."""
    exit_code: int | None = None
    reason: str = ""
    _places: dict[tuple[str, int], str] = field(default_factory=dict)
    _lives: dict[str, int] = field(default_factory=dict)
    """Node -> the life of the job that its agent is in: generations begin anew in each."""
    _newest_view: tuple[int, int] = (0, 0)
    """Life and generation."""

    def take(self, line: Line) -> None:
        """Add one line of an agent's log."""
        match line["event"]:
            case "start":
                self.agents[_node_of(line)] = line["pid"]
                self._lives[_node_of(line)] = line.get("life", 1)
            case "worker_start":
                self._started(line)
            case "view":
                self._viewed(line)
            case "death":
                self.deaths_s.setdefault(line["member"], line["detected_s"])
            case "hang":
                self.hangs_s.setdefault(line["member"], line["t"])
            case "link" if not line["up"]:
                self.silences.append((line["node"], line["t"]))
            case "kill_node":
                gone = {m: line["t"] for m, node in self.nodes.items() if node == line["node"]}
                self.lost_nodes_s.update({m: at_s for m, at_s in gone.items() if m not in self.deaths_s})
            case "end":
                self.exit_code, self.reason = line["exit_code"], line["reason"]

    def _started(self, line: Line) -> None:
        name, node = line["member"], _node_of(line)
        place = (node, line["slot"])
        if place in self._places:
            self.replaces[name] = self._places[place]
        self._places[place] = name
        self.nodes[name], self.pids[name], self.started_s[name] = node, line["pid"], line["t"]
        self.members.setdefault(name, Member(id=name))

    def _viewed(self, line: Line) -> None:
        """Every agent tells each view; the first word counts."""
        found = self._lives.get(_node_of(line), 1), line["generation"]
        if found > self._newest_view:
            self._newest_view = found
            self.views.append(
                View(
                    generation=line["generation"],
                    at_s=line["t"],
                    members=tuple(line["members"]),
                    reason=line["reason"],
                )
            )

    def view_without(self, member: str) -> View | None:
        """The first view that `member` is no longer in."""
        seen = False
        for view in self.views:
            if member in view.members:
                seen = True
            elif seen:
                return view
        return None

    def view_before(self, view: View) -> View:
        return self.views[self.views.index(view) - 1]

    def first_view_with(self, member: str) -> View | None:
        return next((view for view in self.views if member in view.members), None)


def _node_of(line: Line) -> str:
    return str(line.get("source", "agent:node0")).removeprefix("agent:")


class Tail:
    """The whole lines that were added to a file since the last look; the file need not be there yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[Line]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                found = file.read()
        except FileNotFoundError:
            return []
        whole = found[: found.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


class Follower:
    """Keeps a Run up to date with a run's folder while it goes on."""

    def __init__(self, folder: Path) -> None:
        self.run = Run()
        self._folder = folder
        self._events = Tail(folder / "events.jsonl")
        self._tails: dict[str, Tail] = {}

    def look(self) -> Run:
        for line in self._events.read():
            self.run.take(line)
        for member in self.run.members.values():
            tail = self._tails.setdefault(member.id, Tail(self._folder / "members" / f"{member.id}.jsonl"))
            for line in tail.read():
                member.take(line)
        return self.run


def read_run(folder: Path) -> Run:
    """The whole folder of a run under `elastrain run`."""
    return Follower(folder).look()


def read_member(folder: Path, member: str = "m0") -> Member:
    """One journal; also that of a job of one, which has no agent."""
    return member_of(Tail(folder / "members" / f"{member}.jsonl").read(), member)


def run_of(events: Iterable[Line], journals: Mapping[str, Sequence[Line]]) -> Run:
    """A Run from lines in memory."""
    run = Run()
    for line in events:
        run.take(line)
    for name, lines in journals.items():
        run.members[name] = member_of(lines, name)
    return run


def member_of(lines: Iterable[Line], name: str) -> Member:
    member = Member(id=name)
    for line in lines:
        member.take(line)
    return member
