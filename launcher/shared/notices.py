"""What agents say to each other: one JSON object per line over an authenticated link, checked here.

Facts only (who died, who is suspected, that the work is done, which view stands): views are agreed upon in the store,
never here.
"""

from __future__ import annotations

from typing import TypeAlias

from elastrain.job.world import View
from elastrain.protocol.codec import LineCodec, Tagged


class Beat(Tagged, frozen=True, kw_only=True):
    """The sender's agent lives."""


class Exited(Tagged, frozen=True, kw_only=True):
    """A worker of the sender's node has ended: proof."""

    member: str


class Suspected(Tagged, frozen=True, kw_only=True):
    """A worker of the sender's node (`by`) cannot reach `member`."""

    member: str
    by: str
    reason: str
    generation: int = 0
    link_lost: bool = False


class SomebodyWaits(Tagged, frozen=True, kw_only=True):
    """A member of the sender's node has had nothing to do for a while: it waits for some other one."""


class Spared(Tagged, frozen=True, kw_only=True):
    """Members of the sender's node stand still and alone hold some state: until they go on nobody can be given it."""

    members: tuple[str, ...]


class Hangs(Tagged, frozen=True, kw_only=True):
    """A member of the sender's node hangs, and is about to be ended: the stacks of all members are wanted."""

    reason: str


class Speeds(Tagged, frozen=True, kw_only=True):
    """How long members of the sender's node take for a micro-batch, in seconds."""

    micro_batch_s: dict[str, float]


class Raised(Tagged, frozen=True, kw_only=True):
    """The script raised on `member`, a worker of the sender's node: `micro_batch` is -1 outside of any."""

    member: str
    step: int
    micro_batch: int
    signature: str
    traceback: str


class Stands(Tagged, frozen=True, kw_only=True):
    """The newest view that the sender has heard of, for those who do not reach the store.

    `asks`: the receiver is to say the same, with this number in `answers`: what the network has held may be old.
    """

    view: View
    asks: int = 0
    answers: int = 0


class Ended(Tagged, frozen=True, kw_only=True):
    """A member has passed the end of the job: nobody waits for anybody any more."""


class Digested(Tagged, frozen=True, kw_only=True):
    """A worker of the sender's node has passed the end of the job, with these parameters."""

    member: str
    digest: str


class Leaving(Tagged, frozen=True, kw_only=True):
    """The sender's node was told to go, and does so at the end of the step that its members are in."""


class LastWritten(Tagged, frozen=True, kw_only=True):
    """The last checkpoint before the job is stopped is complete, or given up: nobody waits for it any more."""


class Left(Tagged, frozen=True, kw_only=True):
    """The sender's workers have ended well, and its agent goes: nothing is lost with it."""


class Over(Tagged, frozen=True, kw_only=True):
    """The job has ended for everyone."""

    code: int
    sentence: str
    detail: str = ""
    lost: bool = False
    """The state is gone: a durable checkpoint is the way back."""


class Ask(Tagged, frozen=True, kw_only=True):
    """A fault that the operator asked for elsewhere, aimed at the receiver's node or one of its workers."""

    line: str
    """As after `elastrain inject`."""


Notice: TypeAlias = (
    Beat
    | Exited
    | Suspected
    | SomebodyWaits
    | Spared
    | Hangs
    | Speeds
    | Raised
    | Stands
    | Ended
    | Digested
    | Leaving
    | LastWritten
    | Left
    | Over
    | Ask
)
NOTICE: LineCodec[Notice] = LineCodec(Notice)
