"""What `core` and the agent around it share: the job's configuration, records of nodes, and the commands.

Plain values; no decision and no I/O may come in here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from msgspec import Struct, field

from elastrain.base.resume import Resume
from elastrain.job.world import Member, View
from elastrain.launcher.faults.fault import Value
from elastrain.launcher.shared.checkpoint_inventory import DiskOffer
from elastrain.launcher.shared.notices import Notice
from elastrain.launcher.shared.times import HangTimes, JobTimes, LeaveTimes
from elastrain.protocol.agent_messages import ToWorker


@dataclass(frozen=True, kw_only=True)
class Life:
    """One life of the job, as all its nodes know it: each later one goes on from a durable checkpoint."""

    number: int = 1
    step: int = -1
    """The committed step that it goes on from; -1: it begins as the command says."""
    first_member: int = 0
    """The number of its first member: those below are of older lives."""
    barren: int = 0
    """How many lives before it in a row have ended without a newer checkpoint than they began with."""
    resume: Resume | None = None
    """The checkpoint that this node would start it from; None: anew. Only the roster's counts."""
    start: str = ""
    """One line about that; empty where nobody has asked for checkpoints."""
    offers: tuple[DiskOffer, ...] = ()
    """What this node's own disk has, where disks are local: the nodes choose together."""
    named: str = ""
    """What was named to start from then: without it the job does not begin."""


@dataclass(frozen=True, kw_only=True)
class Least:
    """With how many a job begins at least; it goes on with fewer."""

    nodes: int = 1
    members: int = 1
    """Workers of all these nodes: a pipeline is to have so many members."""


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    """What the operator asked for, as far as decisions need it."""

    workers: int
    """On this node."""
    max_restarts: int = 10
    node: str = "node0"
    incarnation: int = 0
    """Rises with every start of any node of the job; tells a returning node from what it was."""
    least: Least = Least()
    nodes_max: int = 1
    armed: bool = False
    """Faults on request are taken."""
    began_s: float = 0.0
    """When the job was started here, monotonic: the times of faults count from then."""
    times: JobTimes = JobTimes()
    hangs: HangTimes = HangTimes()
    life: Life = Life()
    leave: LeaveTimes = LeaveTimes()

    @property
    def alone(self) -> bool:
        """One node, now and later: no other agent takes part."""
        return self.nodes_max == 1


def signature_of(node: str, incarnation: int) -> str:
    """A start of a node by name: that of its agent."""
    return f"agent of {node}, start {incarnation}"


@dataclass(frozen=True, kw_only=True)
class NodeRecord:
    """What a node says of itself under its lease. `ready`: its first workers, in order of slots, once all are ready."""

    name: str
    incarnation: int
    workers: int
    endpoint: str = ""
    """Where its agent listens: HOST:PORT."""
    master_port: int = 0
    """A free port on its host, for scripts that call init_process_group themselves."""
    ready: tuple[Member, ...] = ()
    offers: tuple[DiskOffer, ...] = ()
    """What its own disk has of checkpoints to start from."""
    has_roster: bool = False
    """It knows the job's roster, and puts it again where the store has lost it. Not said before a loss, or `ready`."""
    asks: tuple[str, ...] = ()
    """Nodes, by signature, that have no lease and do not answer this one: do the others reach them?"""
    reaches: tuple[str, ...] = ()
    """Of the nodes that others ask about: those that answer this one."""
    misses: tuple[str, ...] = ()
    """Of the nodes that others ask about: the rest."""

    @property
    def signature(self) -> str:
        """Its agent's name in a handshake."""
        return signature_of(self.name, self.incarnation)


@dataclass(frozen=True, kw_only=True)
class Roster:
    """The nodes that begin a life of the job, in the order of their ranks; written once.

    Its workers are m0, m1, … in the job's first life; numbers go on in later ones.
    """

    nodes: tuple[NodeRecord, ...]
    first_member: int = 0
    resume: Resume | None = None
    """The checkpoint that all its workers start from: chosen by the node that made the roster."""
    start: str = ""
    """One line about that choice."""

    @property
    def first_step(self) -> int:
        """The step that its members begin with."""
        return 0 if self.resume is None else self.resume.step + 1

    @property
    def workers(self) -> int:
        return sum(node.workers for node in self.nodes)

    def first_rank(self, name: str, incarnation: int) -> int | None:
        """The rank of the node's first worker; None for a node (or an incarnation of it) that came later."""
        rank = 0
        for node in self.nodes:
            if (node.name, node.incarnation) == (name, incarnation):
                return rank
            rank += node.workers
        return None


class Start(Struct, frozen=True, kw_only=True):
    """Start a worker process. `warm_up`: at low priority, since others train."""

    member: str
    slot: int
    rank: int
    restarts: int
    warm_up: bool
    world_size: int
    group_rank: int = 0
    group_world_size: int = 1
    wrong: str = ""
    """A fault on request: what of it must not fit the job."""
    resume: Resume | None = None
    """The checkpoint that the job starts from."""


class PutSpec(Struct, frozen=True, kw_only=True):
    """Put the spec if there is none; what the store then holds comes back through `on_spec`."""

    spec: Mapping[str, Any]


class PutRoster(Struct, frozen=True, kw_only=True):
    """Put the roster if there is none; what the store then holds comes back through `on_roster`."""

    roster: Roster


class PutDue(Struct, frozen=True, kw_only=True):
    """Say in the store that the job's first commit is due; that it knows comes back as `FirstCommitStands`."""


class PutBegun(Struct, frozen=True, kw_only=True):
    """Say in the store that a step has been committed."""


class PutCheckpoint(Struct, frozen=True, kw_only=True):
    """Put into the store that this is the job's newest checkpoint, if this member is still in its view."""

    member: str
    step: int
    name: str
    life: int


class PutRecord(Struct, frozen=True, kw_only=True):
    """Put what this node says of itself, under its lease. `if_lost`: when its key was lost, and is written again."""

    record: NodeRecord
    if_lost: bool = False


class TakeNumber(Struct, frozen=True, kw_only=True):
    """Take a number for a new member that this job has not used yet; it comes back through `on_number`."""


class Propose(Struct, frozen=True, kw_only=True):
    """Put the view by a transaction; what the store then says comes back through `on_answer`."""

    view: View


class TellNodes(Struct, frozen=True, kw_only=True):
    """A notice to the other agents: all, or one."""

    message: Notice
    node: str | None = None


class KillNode(Struct, frozen=True, kw_only=True):
    """This node dies now, as if its power were cut: every worker's group, then the agent."""

    reason: str


class Remember(Struct, frozen=True, kw_only=True):
    """Keep a view that another agent has told of, in case the store has lost it, or loses it: it is put again then."""

    view: View


class Tell(Struct, frozen=True, kw_only=True):
    """A message to one of this node's workers."""

    member: str
    message: ToWorker


class FullPriority(Struct, frozen=True, kw_only=True):
    """That of the others; or `ahead` of them, for a newcomer's first step: it is slower, and all wait for its end."""

    member: str
    ahead: bool = False


class TakeStacks(Struct, frozen=True, kw_only=True):
    """Have the stacks of this node's workers written down. `tell`: the reason is said on the screen, too."""

    reason: str
    tell: bool = False


class Kill(Struct, frozen=True, kw_only=True):
    member: str
    reason: str


class Strike(Struct, frozen=True, kw_only=True):
    """A fault on request, to be carried out from outside on a worker of this node, or on the node itself."""

    kind: str
    member: str
    """Empty: the node."""
    for_s: float | None
    options: Mapping[str, Value]
    at: str = ""
    """The member that has come to its place and has said so."""


class AskLauncher(Struct, frozen=True, kw_only=True):
    """A fault of the network or of etcd is due: the launcher of the simulated nodes has them."""

    line: str


class Log(Struct, frozen=True, kw_only=True):
    """`say`: also a line on the operator's screen."""

    event: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    say: str = ""


class End(Struct, frozen=True, kw_only=True):
    """The agent ends: stop every worker, then exit with `code`. `detail` (a traceback) follows the sentence.

    `everywhere`: the job is over, other nodes end for the same reason. `job_is_over`: it is, for a reason of their own
    too (the work is done); nodes that come late are to know. `lost`: no member has the state, or nobody knows who has
    the right one: a durable checkpoint is the way back.
    """

    code: int
    sentence: str
    detail: str = ""
    everywhere: bool = True
    job_is_over: bool = True
    lost: bool = False


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
