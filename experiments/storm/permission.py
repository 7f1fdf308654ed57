"""May this loss happen now? A storm takes no shard's last copy: what the job itself says of its redundancy decides.

Values in, values out.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from experiments.journals import Run

COMMITS_BETWEEN = 2
"""In the newest view, before anything that could be a loss strikes again."""
_SPARE = re.compile(r"every shard survives the loss of (\d+) more")


@dataclass(frozen=True, kw_only=True)
class Permission:
    """A yes or no, and why."""

    yes: bool
    reason: str


@dataclass(kw_only=True)
class Mismatches:
    """Members that a strike may have taken away, until a view says so, or until they were heard again."""

    struck: dict[str, float] = field(default_factory=dict)
    """Member -> when it may be taken for well again; infinity if it was killed."""

    def strike(self, members: Collection[str], until_s: float) -> None:
        for member in members:
            self.struck[member] = max(until_s, self.struck.get(member, 0.0))

    def now(self, run: Run, now_s: float) -> set[str]:
        """Those of the newest view of whom nobody knows yet."""
        inside = run.views[-1].members if run.views else ()
        return {member for member, until_s in self.struck.items() if member in inside and now_s < until_s}


@dataclass(frozen=True, kw_only=True)
class Told:
    """What the job has last said of its redundancy, in a view that had got its commits."""

    members: tuple[str, ...]
    spare: int


def still_told(told: Told | None, later: Iterable[Collection[str]]) -> Told | None:
    """Return what was told, or None if a later view has a newcomer, to which states move from other members."""
    return None if told is None or any(set(view) - set(told.members) for view in later) else told


def may_lose_since(
    members: Collection[str], *, told: Told | None, living: Collection[str], doubts: Collection[str]
) -> Permission:
    """Whether the job must survive this loss beside all who have gone since it told. Copies only come meanwhile."""
    if told is None:
        return Permission(yes=False, reason="the job has not said how redundant it is")
    gone = {*(set(told.members) - set(living)), *doubts, *members}
    if len(gone) > told.spare:
        return Permission(
            yes=False, reason=f"{len(gone)} would be gone, and every shard survived the loss of {told.spare}"
        )
    return Permission(yes=True, reason=f"{len(gone)} of {told.spare} that every shard survived the loss of")


def spare(states: Sequence[Mapping[str, Any]]) -> int | None:
    """How many members all shards survive the loss of, by the most careful agent that knows the newest view.

    None where none of them knows.
    """
    newest = max((int(state["generation"]) for state in states), default=0)
    told = [_spare_of(str(state["redundancy"])) for state in states if int(state["generation"]) == newest]
    known = [number for number in told if number is not None]
    return min(known, default=None)


def _spare_of(words: str) -> int | None:
    if not words:
        return None
    found = _SPARE.match(words)
    return int(found.group(1)) if found else 0


def may_lose(members: Collection[str], *, run: Run, spare: int | None, doubts: Collection[str]) -> Permission:
    """Whether the job must survive that all of these members are lost now, beside those in doubt."""
    if not members:
        return Permission(yes=True, reason="nobody can be lost by it")
    if spare is None:
        return Permission(yes=False, reason="the job does not say how redundant it is")
    gone = {*members, *doubts}
    if len(gone) > spare:
        return Permission(yes=False, reason=f"{len(gone)} would be gone, and every shard survives the loss of {spare}")
    commits = commits_in_newest_view(run)
    if not doubts and commits < COMMITS_BETWEEN:
        return Permission(yes=False, reason=f"{commits} commits since the newest view")
    return Permission(yes=True, reason=f"{len(gone)} of {spare} that every shard survives the loss of")


def commits_in_newest_view(run: Run) -> int:
    if not run.views:
        return 0
    newest = run.views[-1].generation
    return len({p.step for member in run.members.values() for p in member.passed if p.generation == newest})


def commits(run: Run) -> int:
    """Steps that anybody has passed."""
    return max((member.passed[-1].step + 1 for member in run.members.values() if member.passed), default=0)
