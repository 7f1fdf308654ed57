"""The events that `agent_machine.Core` takes with the times at which they came, and the contract of its parts.

Events come from this node's workers, from the other nodes and the store, and from the operator. Replaying a log of them
reproduces every decision of an agent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

from msgspec import Struct

from elastrain.base.thread_status import ThreadStatus
from elastrain.job.world import View
from elastrain.launcher.core.worker_table import Worker
from elastrain.launcher.shared.job_values import Command, NodeRecord, Roster
from elastrain.launcher.shared.notices import Notice, Over
from elastrain.protocol.agent_messages import FromWorker, Progress
from elastrain.protocol.handlers import Handling


class WorkerStarted(Struct, frozen=True, kw_only=True):
    """A worker process was started."""

    member: str
    pid: int


class StartFailed(Struct, frozen=True, kw_only=True):
    """A worker process could not be started."""

    member: str
    problem: str


class WorkerSpoke(Struct, frozen=True, kw_only=True):
    """A worker has sent a message. Messages of a worker that has died since are still handled."""

    member: str
    message: FromWorker


class WorkerMisspoke(Struct, frozen=True, kw_only=True):
    """A worker has sent something that is not a valid message."""

    member: str
    problem: str


class ChannelClosed(Struct, frozen=True, kw_only=True):
    """The channel to a worker is closed: no message can reach the worker any more."""

    member: str


class MutexBroke(Struct, frozen=True, kw_only=True):
    """The kernel has marked the worker's robust mutex as broken, at `at_s`. This is the first sign of a death."""

    member: str
    at_s: float


class WorkerDied(Struct, frozen=True, kw_only=True):
    """A worker process is proven dead since `at_s`; `source` is "mutex", "pidfd" or "sigkill".

    Its exit code may come later.
    """

    member: str
    source: str
    at_s: float


class SeenThread(Struct, frozen=True, kw_only=True):
    """The reported status of one thread of a worker, and its total time spent waiting for a processor so far."""

    spot: ThreadStatus = ThreadStatus()
    starved_s: float = 0.0


class Seen(Struct, frozen=True, kw_only=True):
    """One worker as seen from outside. `stopped`: the kernel runs none of its threads (SIGSTOP, or a debugger)."""

    member: str
    loop: SeenThread
    engine: SeenThread
    device: SeenThread = SeenThread()
    """The device's work. `starved_s` is of the thread that waits for it."""
    stopped: bool


class Looked(Struct, frozen=True, kw_only=True):
    """The agent has read the status of all its running workers. This happens several times a second."""

    seen: tuple[Seen, ...]


class WorkerExited(Struct, frozen=True, kw_only=True):
    """A worker process is reaped; `WorkerDied` came before. A negative `exit_code` is minus the signal number."""

    member: str
    exit_code: int


class NodeCame(Struct, frozen=True, kw_only=True):
    """A node has written its key under its lease, or has changed the record in it."""

    record: NodeRecord


class LeaseEnded(Struct, frozen=True, kw_only=True):
    """A node's key has disappeared from the store."""

    node: str


class LinkChanged(Struct, frozen=True, kw_only=True):
    """The link to another node's agent went up or down.

    `closed`: the other machine refuses the agent's port, so the agent is gone.
    """

    node: str
    up: bool
    reason: str
    closed: bool = False


class NoticeCame(Struct, frozen=True, kw_only=True):
    """Another agent has sent a notice."""

    node: str
    notice: Notice


class ClockHeard(Struct, frozen=True, kw_only=True):
    """Another agent has said what its clock shows. `late_s`: this host's clock minus the other one's, in seconds."""

    node: str
    late_s: float


class NodeLeft(Struct, frozen=True, kw_only=True):
    """A node has left in good order, by its notice or, if it left before the two agents met, by the store."""

    node: str


class NodeRegistered(Struct, frozen=True, kw_only=True):
    """The store holds this node's key, with this `record`. The agent's work starts with this event."""

    record: NodeRecord
    settle_s: float = 0.0
    """Seconds to wait, in a store without a history, for nodes that may know of a running job."""


class RosterStands(Struct, frozen=True, kw_only=True):
    """The store holds the roster, the list of the nodes that begin the job."""

    roster: Roster | None
    """None if nothing was put, because nodes have come or gone meanwhile, or because the store has lost its data."""
    restored: bool = False
    """True if the store had lost its data and the roster was put again. Other keys may still be missing."""


class NumberTaken(Struct, frozen=True, kw_only=True):
    """The store has assigned the number of a new member. The vacancy that waits longest gets it."""

    number: int


class SpecStands(Struct, frozen=True, kw_only=True):
    """The store holds the spec: the settings that all members must have in common."""

    spec: Mapping[str, Any]


class ViewStands(Struct, frozen=True, kw_only=True):
    """The store holds this view now. This agent or another one proposed it."""

    view: View


class ProposalAnswered(Struct, frozen=True, kw_only=True):
    """The view in the store after this agent's proposal: the proposal, or another agent's.

    None if the store does not answer.
    """

    view: View | None


class ViewRemoved(Struct, frozen=True, kw_only=True):
    """Another node has removed the job's keys from the store, as the last node of a job does."""


class StoreForgot(Struct, frozen=True, kw_only=True):
    """The store has lost its data. `nodes` are the other nodes that have put their keys into it again."""

    nodes: frozenset[str]


class CheckpointAnswered(Struct, frozen=True, kw_only=True):
    """The store names this checkpoint of a member as the newest one, or refuses to, with `problem` as the reason."""

    member: str
    step: int
    problem: str


class FirstCommitStands(Struct, frozen=True, kw_only=True):
    """The store knows that a step has been committed, or that the first commit is due and may have been made."""

    is_made: bool = True
    """False if the first commit is only due. That event is sent after the `ViewStands` of the same news."""


class EndStands(Struct, frozen=True, kw_only=True):
    """The store says how the job ended. This may come before the notice of another agent, or without one."""

    over: Over


class StoreWentAway(Struct, frozen=True, kw_only=True):
    """The store does not answer. Steps go on; only a change of the view has to wait for the store."""

    problem: str


class StoreCameBack(Struct, frozen=True, kw_only=True):
    """The store answers again."""


class StopAsked(Struct, frozen=True, kw_only=True):
    """A signal, or an error inside the agent, asks this node to stop. Other nodes go on without this one."""

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
NodeEvent: TypeAlias = NodeCame | LeaseEnded | LinkChanged | NoticeCame | ClockHeard | NodeLeft
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


class AgentPart(Handling, Protocol):
    """A part of the agent's core.

    Each event, deadline, worker's message and notice has one handler, a method of a part that is marked with `handles`.
    The handler takes those of these values that it names: `now`, and `event`, or `due`, or `worker` and `message`, or
    `node` and `notice`. What may concern several parts is told to all of them, by the methods below. A part overrides
    those that it needs. All return commands to carry out, in order.
    """

    def on_view(self, view: View, before: View | None, now: float) -> list[Command]:
        """Adapt to a new view, which the cluster holds already. `before`: the view before it, None at the first."""
        return []

    def on_look(self, event: Looked, now: float) -> list[Command]:
        """Judge by what the agent has seen of its workers."""
        return []

    def on_progress(self, worker: Worker, message: Progress, now: float) -> list[Command]:
        """Handle the report of a worker of this node that it has committed a step."""
        return []

    def follow_up(self) -> list[Command]:
        """Act on what the event that was just handled has changed in other parts."""
        return []

    def forget(self, member: str) -> None:
        """Stop waiting for a worker of this node, because it is dead."""
        return
