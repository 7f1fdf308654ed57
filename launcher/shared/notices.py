"""Notices that agents send each other: one JSON object per line over an authenticated link, validated here.

Notices are facts only, such as a death, a suspicion, the end of the work, or the current view. Views are agreed on in
the store, never through notices.
"""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct

from elastrain.job.world import View
from elastrain.protocol.codec import LineCodec, Tagged


class Beat(Tagged, frozen=True, kw_only=True):
    """A heartbeat: the sender's agent lives. `wall_s`: seconds since 1970 by its host's clock; 0 if it does not say."""

    wall_s: float = 0.0


class Exited(Tagged, frozen=True, kw_only=True):
    """Notice that a worker of the sender's node has ended. This is proof of its death."""

    member: str


class Suspected(Tagged, frozen=True, kw_only=True):
    """Notice that a worker of the sender's node (`by`) cannot reach `member`."""

    member: str
    by: str
    reason: str
    generation: int = 0
    link_lost: bool = False


class MemberWaits(Tagged, frozen=True, kw_only=True):
    """Notice that a member of the sender's node has been idle for a while, because it waits for another member."""


class Spared(Tagged, frozen=True, kw_only=True):
    """Notice that these members of the sender's node hang but hold the only copy of a shard.

    They are not killed, and no member can join until they continue.
    """

    members: tuple[str, ...]


class Hangs(Tagged, frozen=True, kw_only=True):
    """Notice that a member of the sender's node hangs and is about to be killed.

    All nodes write down their stacks first.
    """

    reason: str


class Speeds(Tagged, frozen=True, kw_only=True):
    """Notice with the seconds per micro-batch of members of the sender's node."""

    micro_batch_s: dict[str, float]


class MemberWork(Struct, frozen=True, kw_only=True):
    """Share, micro-batch time and memory of one member; None: not known."""

    micro_batches: float | None = None
    micro_batch_s: float | None = None
    memory_bytes: int | None = None
    memory_limit_bytes: int | None = None


class WorkShared(Tagged, frozen=True, kw_only=True):
    """Notice with the work of members of the sender's node, for people."""

    members: dict[str, MemberWork]


class Raised(Tagged, frozen=True, kw_only=True):
    """Notice that the script raised an exception in `member`, a worker of the sender's node.

    `micro_batch` is -1 if it was raised outside of any micro-batch.
    """

    member: str
    step: int
    micro_batch: int
    signature: str
    traceback: str
    device: str = ""
    """The device that failed, or ""."""


class Stands(Tagged, frozen=True, kw_only=True):
    """Notice with the newest view that the sender knows, for agents that do not reach the store.

    `asks`: a number that the receiver should return in `answers` with its own view. The answer proves that the notice
    is fresh, because the network may have delayed older ones.
    """

    view: View
    asks: int = 0
    answers: int = 0


class Ended(Tagged, frozen=True, kw_only=True):
    """Notice that a member has passed the end of the job, so that members no longer wait for each other."""


class Digested(Tagged, frozen=True, kw_only=True):
    """Notice that a worker of the sender's node has passed the end of the job, with the digest of its parameters."""

    member: str
    digest: str


class Leaving(Tagged, frozen=True, kw_only=True):
    """Notice that the sender's node was told to leave, and does so at the end of its members' current step."""


class StopNode(Tagged, frozen=True, kw_only=True):
    """Notice that the operator wants the receiver's node to stop. `code` is that of a signal with the same effect."""

    code: int
    sentence: str


class LastWritten(Tagged, frozen=True, kw_only=True):
    """Notice that the last checkpoint before the job stops is complete or given up. Nodes need not wait for it."""


class Left(Tagged, frozen=True, kw_only=True):
    """Notice that the sender's workers have ended normally and its agent leaves. No state is lost with this node."""


class Over(Tagged, frozen=True, kw_only=True):
    """Notice that the job has ended on all nodes."""

    code: int
    sentence: str
    detail: str = ""
    lost: bool = False
    """True if the job has lost its state, so that only a durable checkpoint can restore it."""
    again: bool = False
    """True if all workers are started again, because the script has no `job.steps`. `lost` is then set too."""


class Ask(Tagged, frozen=True, kw_only=True):
    """A fault that the operator requested at another node, for the receiver's node or one of its workers."""

    line: str
    """The fault, written as after `elastrain inject`."""


Notice: TypeAlias = (
    Beat
    | Exited
    | Suspected
    | MemberWaits
    | Spared
    | Hangs
    | Speeds
    | WorkShared
    | Raised
    | Stands
    | Ended
    | Digested
    | Leaving
    | StopNode
    | LastWritten
    | Left
    | Over
    | Ask
)
NOTICE: LineCodec[Notice] = LineCodec(Notice)
