"""What `core` and the agent around it share: the job's configuration, records of nodes, and the commands.

Plain values; no decision and no I/O may come in here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from msgspec import Struct, field

from elastrain.agent_messages import ToWorker
from elastrain.base.resume import Resume
from elastrain.launcher.faults.fault import Value
from elastrain.launcher.notices import Notice
from elastrain.launcher.offers import DiskOffer
from elastrain.world import Member, View


@dataclass(frozen=True, kw_only=True)
class JobTimes:
    """How long an agent waits for what, in seconds. How they nest stands in the table of deadlines."""

    join_timeout_s: float = 120.0
    """For the least number of nodes; then from the first worker's hello to the last one's."""
    last_call_s: float = 5.0
    """For more nodes once the least number is there."""
    warm_up_s: float = 15.0
    """How long a joiner warms up at low priority at most: until it is a member, the state has fewer copies."""
    restart_counts_s: float = 3600.0
    """A restart no longer counts so long after what was started has committed its first step."""
    suspicion_s: float = 1.0
    leave_timeout_s: float = 2.0
    """How long a worker that must end may take to end by itself (to print its traceback, say)."""
    exit_timeout_s: float = 30.0
    """Likewise after its work is finished; and how long this node then waits for the digests of the others."""
    silence_grace_s: float = 0.5
    """From the first silent node to the judgement: a node that is cut off hears the others fall silent one by one."""
    meet_s: float = 2.0
    """How long a node whose lease ends before it was ever met may take to answer: it may only have been slow."""
    absent_s: float = 6.0
    """How long a node with members in the view may have neither key nor link before they are taken for dead."""
    ask_again_s: float = 0.5
    """When a store that did not answer is asked again."""
    park_timeout_s: float = 3600.0
    """How long this node waits for the store, or for nodes that are only silent, before it ends."""


@dataclass(frozen=True, kw_only=True)
class HangTimes:
    """How long a member may show no sign of life while others wait for it, in seconds."""

    hang_timeout_s: float = 2.5
    """In a micro-batch, or 2.5 median steps; 0: nothing is judged."""
    between_steps_s: float = 30.0
    """In the script's own code between two steps, outside of any phase."""
    first_step_s: float = 600.0
    """In the very first step of the job."""
    join_step_s: float = 60.0
    """In the first step of a member that came later, or 20 median steps; for all until four steps are committed."""
    alike_s: float = 1800.0
    """Where nobody waits, because all stand alike; and whoever alone has some state."""
    stacks_s: float = 0.3
    """How long stacks may take to be written before a member that hangs is ended."""


@dataclass(frozen=True, kw_only=True)
class LeaveTimes:
    """How long a node that is told to go waits before it goes, in seconds."""

    hand_over_s: float = 5.0
    """For the end of the step that its members are in, where others go on."""
    last_checkpoint_s: float = 0.0
    """For one last checkpoint, where nobody goes on; 0: none is written."""
    together_s: float = 0.5
    """For other nodes to say that they were told the same."""


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

    @property
    def signature(self) -> str:
        """Its agent's name in a handshake."""
        return f"agent of {self.name}, start {self.incarnation}"


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


class PutBegun(Struct, frozen=True, kw_only=True):
    """Say in the store that a step has been committed."""


class PutCheckpoint(Struct, frozen=True, kw_only=True):
    """Put into the store that this is the job's newest checkpoint, if this member is still in its view."""

    member: str
    step: int
    name: str
    life: int


class PutRecord(Struct, frozen=True, kw_only=True):
    """Put what this node says of itself, under its lease."""

    record: NodeRecord


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
    | PutBegun
    | PutRecord
    | PutCheckpoint
    | TakeNumber
    | Propose
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
