"""What can happen to an agent: the events that `machine.Core` takes, each with the time at which it came.

They come from three sides: this node's workers, the other nodes with the store, and the operator. A log of them replays
an agent exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from msgspec import Struct

from elastrain.base.thread_status import ThreadStatus
from elastrain.job.world import View
from elastrain.launcher.shared.job_values import NodeRecord, Roster
from elastrain.launcher.shared.notices import Notice, Over
from elastrain.protocol.agent_messages import FromWorker


class WorkerStarted(Struct, frozen=True, kw_only=True):
    """A worker's process runs."""

    member: str
    pid: int


class StartFailed(Struct, frozen=True, kw_only=True):
    """A worker's process could not even be started."""

    member: str
    problem: str


class WorkerSpoke(Struct, frozen=True, kw_only=True):
    """A worker has said something; one that has died meanwhile is still heard."""

    member: str
    message: FromWorker


class WorkerMisspoke(Struct, frozen=True, kw_only=True):
    """A worker has sent what is no message of workers."""

    member: str
    problem: str


class ChannelClosed(Struct, frozen=True, kw_only=True):
    """The channel to a worker is closed: it can no longer be told anything."""

    member: str


class MutexBroke(Struct, frozen=True, kw_only=True):
    """The kernel has marked its robust mutex, before it closes anything: the first sign of a death, seen at `at_s`."""

    member: str
    at_s: float


class WorkerDied(Struct, frozen=True, kw_only=True):
    """A worker's process is proven gone (`source`: mutex or pidfd), known at `at_s`. Its exit code may come later."""

    member: str
    source: str
    at_s: float


class SeenThread(Struct, frozen=True, kw_only=True):
    """Where a worker's thread is by its own words, and how long it has waited for a processor in its life."""

    spot: ThreadStatus
    starved_s: float


class Seen(Struct, frozen=True, kw_only=True):
    """One worker from outside. `stopped`: the kernel lets none of its threads run."""

    member: str
    loop: SeenThread
    engine: SeenThread
    stopped: bool


class Looked(Struct, frozen=True, kw_only=True):
    """The agent has looked at all workers that can be seen, as it does several times a second."""

    seen: tuple[Seen, ...]


class WorkerExited(Struct, frozen=True, kw_only=True):
    """The process is reaped; `WorkerDied` came before. `exit_code` < 0 is minus the signal."""

    member: str
    exit_code: int


class NodeCame(Struct, frozen=True, kw_only=True):
    """A node has put a key under its lease, or says something new of itself in it."""

    record: NodeRecord


class LeaseEnded(Struct, frozen=True, kw_only=True):
    """A node's key is gone from the store."""

    node: str


class LinkChanged(Struct, frozen=True, kw_only=True):
    """The agent of another node answers, or no longer does. `closed`: its machine says that the agent is gone."""

    node: str
    up: bool
    reason: str
    closed: bool = False


class NoticeCame(Struct, frozen=True, kw_only=True):
    """Another agent has sent a notice."""

    node: str
    notice: Notice


class NodeLeft(Struct, frozen=True, kw_only=True):
    """A node has gone in good order: its notice says so, or the store, where it went before the agents had met."""

    node: str


class NodeRegistered(Struct, frozen=True, kw_only=True):
    """This node is in the store, as `record` says: the agent begins."""

    record: NodeRecord
    settle_s: float = 0.0
    """How long a store without a history is left to those who may know of the job."""


class RosterStands(Struct, frozen=True, kw_only=True):
    """The store holds the roster: the nodes that begin the job are known."""

    roster: Roster | None
    """None: nothing was put, because nodes have come and gone meanwhile, or the store has lost its data."""
    restored: bool = False
    """It stood before in a store that has lost it: what else was in there is perhaps not put again yet."""


class NumberTaken(Struct, frozen=True, kw_only=True):
    """The store has given the number of a new member, which takes the place that waits longest."""

    number: int


class SpecStands(Struct, frozen=True, kw_only=True):
    """The store holds the spec: what all members must have in common."""

    spec: Mapping[str, Any]


class ViewStands(Struct, frozen=True, kw_only=True):
    """The store holds this view now: one of this agent's, or one that was faster."""

    view: View


class ProposalAnswered(Struct, frozen=True, kw_only=True):
    """What the store holds after a proposal of this agent: it, or another's. None: the store does not answer."""

    view: View | None


class ViewRemoved(Struct, frozen=True, kw_only=True):
    """Somebody has taken the job's keys out of the store, as the last node of a job does."""


class StoreForgot(Struct, frozen=True, kw_only=True):
    """The store has lost its data, and these other nodes have put their keys into it again."""

    nodes: frozenset[str]


class CheckpointAnswered(Struct, frozen=True, kw_only=True):
    """The store names this checkpoint of a member's as the newest; or it may not, for the problem."""

    member: str
    step: int
    problem: str


class FirstCommitStands(Struct, frozen=True, kw_only=True):
    """The store says that a step has been committed; or that one may have been, since it is due."""

    is_made: bool = True
    """False is told behind the view that stands beside it."""


class EndStands(Struct, frozen=True, kw_only=True):
    """The store says how the job ended, before or instead of the notice."""

    over: Over


class StoreWentAway(Struct, frozen=True, kw_only=True):
    """The store does not answer. Steps go on; whether a change waits for it shows when one is wanted."""

    problem: str


class StoreCameBack(Struct, frozen=True, kw_only=True):
    """The store answers again."""


class StopAsked(Struct, frozen=True, kw_only=True):
    """A signal, or a fault of the agent itself. Other nodes go on without this one."""

    code: int
    sentence: str


WorkerEvent: TypeAlias = (
    WorkerStarted
    | StartFailed
    | WorkerSpoke
    | WorkerMisspoke
    | ChannelClosed
    | MutexBroke
    | WorkerDied
    | WorkerExited
    | Looked
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
    | StoreForgot
    | CheckpointAnswered
    | FirstCommitStands
    | EndStands
    | StoreWentAway
    | StoreCameBack
)
Event: TypeAlias = WorkerEvent | NodeEvent | StoreEvent | StopAsked
