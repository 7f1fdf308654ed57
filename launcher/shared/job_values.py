"""Values that the decisions in `core` and the agent around them share: configuration, node records, and commands.

Pure: plain values only, no decisions and no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from msgspec import Struct, field

from elastrain.base.resume import Resume
from elastrain.base.told_devices import ToldDevices
from elastrain.decisions.blame import Failure
from elastrain.job.world import Member, View
from elastrain.launcher.faults.fault import Value
from elastrain.launcher.shared.checkpoint_inventory import DiskOffer
from elastrain.launcher.shared.notices import Notice
from elastrain.launcher.shared.places import Least, NodePlaces
from elastrain.launcher.shared.times import HangTimes, JobTimes, LeaveTimes
from elastrain.protocol.agent_messages import ToWorker

_RESTARTS_MAX = 10


@dataclass(frozen=True, kw_only=True)
class Life:
    """One life of the job. Each life after the first continues from a durable checkpoint."""

    number: int = 1
    step: int = -1
    """Committed step from which the life continues; -1 for a life that begins as the command says."""
    first_member: int = 0
    """Number of its first member. Lower numbers belong to earlier lives."""
    barren: int = 0
    """Number of lives directly before this one that ended without a newer checkpoint than they began with."""
    restarts: int = 0
    """Number of earlier lives that ended because all workers of a script without `job.steps` were started again."""
    resume: Resume | None = None
    """Checkpoint that this node would start from, or None for a fresh start. The choice in the roster overrides it."""
    start: str = ""
    """One line about that checkpoint, or "" if the user asked for no checkpoints."""
    offers: tuple[DiskOffer, ...] = ()
    """Checkpoints on this node's own disk, if disks are local. All nodes choose one of them together."""
    named: str = ""
    """Checkpoint that the user asked for by name, or "". The job does not begin without it."""
    device_failures: tuple[Failure, ...] = ()
    """Failures of devices that this node knows from earlier lives."""
    losses_s: tuple[float, ...] = ()
    """Monotonic times at which this node lost workers in earlier lives."""

    @property
    def is_first(self) -> bool:
        """True if no earlier life had any state. The command's options then still say how the job begins."""
        return self.number == 1 + self.restarts


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    """Settings of the job that decisions depend on."""

    workers: int
    """Number of workers on this node."""
    max_restarts: int | None = None
    """Limit of restarts that the user has set, or None."""
    node: str = "node0"
    incarnation: int = 0
    """Number of this start of the node's agent. A node that returns has a higher one."""
    least: Least = Least()
    places: NodePlaces = NodePlaces()
    armed: bool = False
    """True if fault injection is allowed."""
    began_s: float = 0.0
    """Monotonic time at which the job was started on this node. Fault times count from it."""
    times: JobTimes = JobTimes()
    hangs: HangTimes = HangTimes()
    life: Life = Life()
    leave: LeaveTimes = LeaveTimes()

    @property
    def restarts_allowed(self) -> int:
        """Limit of restarts of this node's workers, or of all workers of a script without `job.steps`."""
        return _RESTARTS_MAX if self.max_restarts is None else self.max_restarts

    @property
    def alone(self) -> bool:
        """True if the job has one node for its whole duration, so that no other agent takes part."""
        return self.places.nodes + self.places.spares == 1


def signature_of(node: str, incarnation: int) -> str:
    """Return the name of one incarnation of a node's agent, as used in handshakes."""
    return f"agent of {node}, start {incarnation}"


@dataclass(frozen=True, kw_only=True)
class NodeRecord:
    """A node's description of itself in the store, under its lease.

    `ready` lists its first workers in the order of their slots, once all of them are ready.
    """

    name: str
    incarnation: int
    workers: int
    endpoint: str = ""
    """Address at which its agent listens: HOST:PORT."""
    master_port: int = 0
    """Free port on its host, for scripts that call init_process_group themselves."""
    ready: tuple[Member, ...] = ()
    offers: tuple[DiskOffer, ...] = ()
    """Checkpoints on its own disk from which the job could start."""
    spare: bool = False
    """True while the node waits for a place, without workers."""
    has_roster: bool = False
    """True if the node knows the roster, and restores it after a data loss. Published after a loss, or with `ready`."""
    asks: tuple[str, ...] = ()
    """Signatures of nodes without a lease that do not answer this node. The other nodes then probe them."""
    reaches: tuple[str, ...] = ()
    """Signatures of the nodes in other nodes' `asks` that answer this node."""
    misses: tuple[str, ...] = ()
    """Signatures of the nodes in other nodes' `asks` that do not answer this node."""

    @property
    def signature(self) -> str:
        """Name of its agent in a handshake."""
        return signature_of(self.name, self.incarnation)


@dataclass(frozen=True, kw_only=True)
class Roster:
    """The nodes that begin a life of the job, in the order of their ranks. The store accepts it once.

    Workers are numbered m0, m1, … in the first life; later lives continue the numbering.
    """

    nodes: tuple[NodeRecord, ...]
    first_member: int = 0
    resume: Resume | None = None
    """Checkpoint that all workers start from, chosen by the node that made the roster."""
    start: str = ""
    """One line about that choice."""

    @property
    def first_step(self) -> int:
        """Number of the first step that the life computes."""
        return 0 if self.resume is None else self.resume.step + 1

    @property
    def workers(self) -> int:
        """Number of workers on all nodes of the roster."""
        return sum(node.workers for node in self.nodes)

    def first_rank(self, name: str, incarnation: int) -> int | None:
        """Return the rank of the node's first worker, or None if this incarnation is not in the roster."""
        rank = 0
        for node in self.nodes:
            if (node.name, node.incarnation) == (name, incarnation):
                return rank
            rank += node.workers
        return None


class Start(Struct, frozen=True, kw_only=True):
    """Command: start a worker process. `warm_up` starts it at low priority, because other workers train meanwhile."""

    member: str
    slot: int
    rank: int
    restarts: int
    warm_up: bool
    world_size: int
    group_rank: int = 0
    group_world_size: int = 1
    wrong: str = ""
    """Injected fault: the property in which the worker should not fit the job."""
    resume: Resume | None = None
    """Checkpoint that the job starts from."""
    devices: ToldDevices | None = None
    """The accelerators that it will see, as far as they are known; None if nothing is."""


class PutSpec(Struct, frozen=True, kw_only=True):
    """Command: put the spec if there is none. The spec that the store then holds comes back as `SpecStands`."""

    spec: Mapping[str, Any]


class PutRoster(Struct, frozen=True, kw_only=True):
    """Command: put the roster if there is none. The one that the store then holds comes back as `RosterStands`."""

    roster: Roster


class PutDue(Struct, frozen=True, kw_only=True):
    """Command: record in the store that the first commit is due. The answer is the event `FirstCommitStands`."""


class PutBegun(Struct, frozen=True, kw_only=True):
    """Command: record in the store that a step has been committed."""


class PutCheckpoint(Struct, frozen=True, kw_only=True):
    """Command: record the job's newest checkpoint in the store, if this member is still in its view."""

    member: str
    step: int
    name: str
    life: int


class PutRecord(Struct, frozen=True, kw_only=True):
    """Command: put this node's record under its lease. `if_lost`: only when its lost key is written again."""

    record: NodeRecord
    if_lost: bool = False


class TakeNumber(Struct, frozen=True, kw_only=True):
    """Command: take an unused number for a new member. It comes back as `NumberTaken`."""


class Propose(Struct, frozen=True, kw_only=True):
    """Command: put the view by a transaction. The view that the store then holds comes back as `ProposalAnswered`."""

    view: View


class TellNodes(Struct, frozen=True, kw_only=True):
    """Command: send a notice to one other agent, or to all of them if `node` is None."""

    message: Notice
    node: str | None = None


class KillNode(Struct, frozen=True, kw_only=True):
    """Command: kill every worker's process group and then the agent, as if the node lost power."""

    reason: str


class Remember(Struct, frozen=True, kw_only=True):
    """Command: keep a view that another agent reported, and put it again if the store has lost it or loses it."""

    view: View


class Tell(Struct, frozen=True, kw_only=True):
    """Command: send a message to one of this node's workers."""

    member: str
    message: ToWorker


class FullPriority(Struct, frozen=True, kw_only=True):
    """Command: give a worker the normal priority, or with `ahead` a higher one.

    `ahead` is for the first step of a newcomer: it is slower, and all members wait for its end.
    """

    member: str
    ahead: bool = False


class TakeStacks(Struct, frozen=True, kw_only=True):
    """Command: write down the stacks of this node's workers. `tell`: also print the reason on the screen."""

    reason: str
    tell: bool = False


class Kill(Struct, frozen=True, kw_only=True):
    """Command: kill a worker."""

    member: str
    reason: str


class Strike(Struct, frozen=True, kw_only=True):
    """Command: carry out an injected fault on a worker of this node, or on the node itself."""

    kind: str
    member: str
    """The worker to strike, or "" for the node."""
    for_s: float | None
    options: Mapping[str, Value]
    at: str = ""
    """Member that has reported that it reached the place of the fault."""


class AskLauncher(Struct, frozen=True, kw_only=True):
    """Command: ask the launcher of simulated nodes to carry out a fault of the network or of etcd."""

    line: str


class Log(Struct, frozen=True, kw_only=True):
    """Command: write an event to the log. A non-empty `say` is also printed on the operator's screen."""

    event: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    say: str = ""


class End(Struct, frozen=True, kw_only=True):
    """Command: stop every worker of this node, then exit with `code`. `detail` (a traceback) follows the sentence.

    `everywhere`: the job is over, and the other nodes end for the same reason. `job_is_over`: late nodes must learn
    that the job is over; also set if every node ends for a reason of its own, such as finished work. `lost`: no member
    has the state, or it is unknown which member has the right one, so only a durable checkpoint can restore it.
    `again`: no member had any state, and another life starts all workers again; `lost` is then set too.
    """

    code: int
    sentence: str
    detail: str = ""
    everywhere: bool = True
    job_is_over: bool = True
    lost: bool = False
    again: bool = False


Command = (
    Start
    | PutSpec
    | PutRoster
    | PutDue
    | PutBegun
    | PutRecord
    | PutCheckpoint
    | TakeNumber
    | Propose
    | Remember
    | Tell
    | TellNodes
    | FullPriority
    | TakeStacks
    | Kill
    | KillNode
    | Strike
    | AskLauncher
    | Log
    | End
)
