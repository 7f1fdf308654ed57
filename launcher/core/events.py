"""What can happen to an agent: the events that `machine.Core` takes, each with the time at which it came.

They come from three sides: this node's workers, the other nodes with the store, and the operator. A log of them replays
an agent exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from elastrain.agent_messages import FromWorker
from elastrain.launcher.notices import Notice, Over
from elastrain.launcher.values import NodeRecord, Roster
from elastrain.world import View

# ---- this node's workers


@dataclass(frozen=True, kw_only=True)
class WorkerStarted:
    """Its process runs."""

    member: str
    pid: int


@dataclass(frozen=True, kw_only=True)
class StartFailed:
    """The process could not even be started."""

    member: str
    problem: str


@dataclass(frozen=True, kw_only=True)
class WorkerSpoke:
    """It said something; a worker that has died meanwhile is still heard."""

    member: str
    message: FromWorker


@dataclass(frozen=True, kw_only=True)
class WorkerMisspoke:
    """It said what no worker says."""

    member: str
    problem: str


@dataclass(frozen=True, kw_only=True)
class ChannelClosed:
    """It can no longer be told anything."""

    member: str


@dataclass(frozen=True, kw_only=True)
class MutexBroke:
    """The kernel has marked its robust mutex, before it closes anything: the first sign of a death, seen at `at_s`."""

    member: str
    at_s: float


@dataclass(frozen=True, kw_only=True)
class WorkerDied:
    """Proof that the process is gone (`source`: mutex or pidfd), known at `at_s`. Its exit code may come later."""

    member: str
    source: str
    at_s: float


@dataclass(frozen=True, kw_only=True)
class WorkerExited:
    """The process is reaped; `WorkerDied` came before. `exit_code` < 0 is minus the signal."""

    member: str
    exit_code: int


# ---- the other nodes


@dataclass(frozen=True, kw_only=True)
class NodeCame:
    """A node has put a key under its lease, or says something new of itself in it."""

    record: NodeRecord


@dataclass(frozen=True, kw_only=True)
class LeaseEnded:
    """A node's key is gone from the store."""

    node: str


@dataclass(frozen=True, kw_only=True)
class LinkChanged:
    """The agent of another node answers, or no longer does. `closed`: its machine says that the agent is gone."""

    node: str
    up: bool
    reason: str
    closed: bool = False


@dataclass(frozen=True, kw_only=True)
class NoticeCame:
    """Another agent spoke."""

    node: str
    notice: Notice


@dataclass(frozen=True, kw_only=True)
class NodeLeft:
    """A node has gone in good order: its notice says so, or the store, where it went before the agents had met."""

    node: str


# ---- the store


@dataclass(frozen=True, kw_only=True)
class NodeRegistered:
    """This node is in the store, as `record` says: the agent begins."""

    record: NodeRecord


@dataclass(frozen=True, kw_only=True)
class RosterStands:
    """The nodes that begin the job are known."""

    roster: Roster


@dataclass(frozen=True, kw_only=True)
class NumberTaken:
    """The number of a new member; it takes the place that waits longest."""

    number: int


@dataclass(frozen=True, kw_only=True)
class SpecStands:
    """What all members must have in common, as the store holds it."""

    spec: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class ViewStands:
    """The store holds this view now: one of this agent's, or one that was faster."""

    view: View


@dataclass(frozen=True, kw_only=True)
class ProposalAnswered:
    """What the store holds after a proposal of this agent: it, or another's. None: the store does not answer."""

    view: View | None


@dataclass(frozen=True, kw_only=True)
class ViewRemoved:
    """Somebody has taken the view out of the store, as the last node of a job does."""


@dataclass(frozen=True, kw_only=True)
class FirstCommitStands:
    """The store says that a step has been committed."""


@dataclass(frozen=True, kw_only=True)
class EndStands:
    """The store says how the job ended, before or instead of the notice."""

    over: Over


@dataclass(frozen=True, kw_only=True)
class StoreWentAway:
    """The store does not answer. Steps go on; whether a change waits for it shows when one is wanted."""

    problem: str


@dataclass(frozen=True, kw_only=True)
class StoreCameBack:
    """The store answers again."""


# ---- the operator


@dataclass(frozen=True, kw_only=True)
class StopAsked:
    """A signal, or a fault of the agent itself. Other nodes go on without this one."""

    code: int
    sentence: str


WorkerEvent: TypeAlias = (
    WorkerStarted | StartFailed | WorkerSpoke | WorkerMisspoke | ChannelClosed | MutexBroke | WorkerDied | WorkerExited
)
NodeEvent: TypeAlias = NodeCame | LeaseEnded | LinkChanged | NoticeCame | NodeLeft
StoreEvent: TypeAlias = (
    NodeRegistered
    | RosterStands
    | NumberTaken
    | SpecStands
    | ViewStands
    | ProposalAnswered
    | ViewRemoved
    | FirstCommitStands
    | EndStands
    | StoreWentAway
    | StoreCameBack
)
Event: TypeAlias = WorkerEvent | NodeEvent | StoreEvent | StopAsked
