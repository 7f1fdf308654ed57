"""What `core` and `agent` exchange: the job's configuration, workers as they are seen, and the commands.

Plain values; no decision and no I/O may come in here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from elastrain.world import View


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    """What the operator asked for, as far as decisions need it."""

    workers: int
    max_restarts: int = 10
    node: str = "node0"
    armed: bool = False
    join_timeout_s: float = 120.0
    suspicion_s: float = 1.0
    leave_timeout_s: float = 2.0
    """How long a worker that must end may take to end by itself (to print its traceback, say)."""
    warm_up_s: float = 15.0
    """How long a joiner warms up at low priority at most: until it is a member, the state has fewer copies."""
    exit_timeout_s: float = 30.0
    """Likewise after its work is finished."""


class Stage(StrEnum):
    """Where a worker is in its life."""

    STARTING = "starting"
    READY = "ready"
    MEMBER = "member"
    FINISHED = "finished"
    GONE = "gone"


@dataclass(kw_only=True)
class Worker:
    """One worker process, as the agent sees it."""

    id: str
    slot: int
    initial: bool
    stage: Stage = Stage.STARTING
    address: str = ""
    pid: int | None = None
    step: int | None = None
    """The newest step that it has committed."""
    phase: str = ""
    redone_steps: int = 0
    finished: bool = False
    refused: bool = False
    ended_by_us: bool = False
    surplus: bool = False
    """It warms up for a job that is over."""
    exit_code: int | None = None
    digest: str = ""

    @property
    def alive(self) -> bool:
        return self.stage is not Stage.GONE


@dataclass(frozen=True, kw_only=True)
class Start:
    """Start a worker process. `warm_up`: at low priority, since others train."""

    member: str
    slot: int
    rank: int
    restarts: int
    warm_up: bool


@dataclass(frozen=True, kw_only=True)
class PutSpec:
    spec: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Propose:
    """Put the view by a transaction; what the store then says comes back through `on_view`."""

    view: View


@dataclass(frozen=True, kw_only=True)
class Tell:
    member: str
    message: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class FullPriority:
    member: str


@dataclass(frozen=True, kw_only=True)
class Kill:
    member: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Log:
    """`say`: also a line on the operator's screen."""

    event: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    say: str = ""


@dataclass(frozen=True, kw_only=True)
class End:
    """The job ends: stop every worker, then exit with `code`. `detail` (a traceback) follows the sentence."""

    code: int
    sentence: str
    detail: str = ""


Command = Start | PutSpec | Propose | Tell | FullPriority | Kill | Log | End
