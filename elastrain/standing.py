"""What one member knows of the job, and the few ways in which that is read; the layers of the protocol stand on it.

`Standing` → `Reduction` → `Backing` → `Checking` → `Committing` → `Lifecycle`, each in its own file: one machine, cut
so that each part can be read by itself. No decision lives here.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from elastrain import protocol as p
from elastrain.attempt import Attempt, FinishedGradient
from elastrain.fold import Fold
from elastrain.messages import Message
from elastrain.placement import Holders, Placement
from elastrain.scaling import Scaler
from elastrain.values import Record, Report, Shape
from elastrain.witness import Difference, Verdict
from elastrain.world import View

COPY_BUDGET_BYTES = 8 << 20
"""So many parameters a primary copies per step towards new holders: the vote waits for what is on its way."""
NEVER = -2
"""Version of what was never there; -1 is what the job starts with."""


@dataclass
class HeldShard:
    """A shard's state in this member's hands."""

    version: int = NEVER
    """The step after which it stands, verified (or its own work as primary)."""
    kept: dict[int, FinishedGradient] = field(default_factory=dict)
    """Finished gradients by step, until their update is verified."""
    scratch: dict[int, int] = field(default_factory=dict)
    """Step -> digest of the update made behind, not yet verified."""
    expected: dict[int, int] = field(default_factory=dict)
    """Step -> the primary's digest."""
    owed: dict[int, str] = field(default_factory=dict)
    """Step -> the primary that waits for an acknowledgement."""
    digest: int | None = None
    """Of the state at `version`, when it was last compared or told; None: never."""
    is_copy: bool = False
    """It was copied from its primary as of `version`: equal to that whether right or wrong."""
    primary: str = ""
    """Who told what is expected."""
    difference: Difference | None = None
    """Its update and the primary's are not the same; which is right is being found out."""
    answers: dict[str, int | None] = field(default_factory=dict)
    """What others told of it."""
    askers: set[str] = field(default_factory=set)
    """Who waits for the digest of the update that this member is about to make."""


class Standing:
    """One member's knowledge."""

    def __init__(self, *, me: str, shape: Shape, copy_budget_bytes: int = COPY_BUDGET_BYTES) -> None:
        self.me = me
        self.shape = shape
        self.copy_budget_bytes = copy_budget_bytes
        self.view: View | None = None
        self.newest: View | None = None
        self.committed = -1
        self.record: Record | None = None
        self.base: Placement | None = None
        self._now: tuple[Holders, ...] = ()
        self._my_shards: list[int] = []
        self.goal: Placement = ()
        self.parameters = [NEVER] * len(shape.shards)
        self._missing: set[int] | None = None
        self.held: dict[int, HeldShard] = {}
        self.bound: set[int] = set()
        self.begun = -1
        self.entered = False
        self.recovering = True
        self.attempt = self._new_attempt(0)
        self._out: list[p.Command] = []
        self._reports: dict[str, Report] = {}
        self._later: list[p.Arrived] = []
        self._deferred: list[p.BlockDone] = []
        self._whole: list[int] = []
        self._allowed: frozenset[int] = frozenset()
        self._ready = False
        self._settings = ""
        self._loop_state: tuple[int, str, object] | None = None
        self._newcomers: tuple[str, ...] = ()
        self._copying: dict[tuple[int, str], int] = {}
        self._copies: list[tuple[int, str]] = []
        self._copied_bytes = 0
        self._followers: dict[int, set[str]] = defaultdict(set)
        self._digesting = False
        self._announced = False
        """Whether this primary's digests of the parameters that the job starts with were asked for in this view."""
        self._told: dict[int, tuple[str, int]] = {}
        """Shard -> who published its parameters of the committed step, and their digest there."""
        self._found: dict[int, int] | None = None
        """Shard -> digest of what this member has computed with; None before its last run of the step has ended."""
        self._compared = False
        """Whether the two are known to be equal."""
        self._turn = 0
        """Counts what makes an earlier comparison void."""
        self._asked_turn = -1
        self._verdict: Verdict | None = None
        """This member is known to be wrong: it ends as soon as it is known what it has computed with."""
        self._replaced: dict[int, int] = {}
        """Shard -> digest of what this member computed with until it became its primary."""
        self._broken: dict[int, tuple[str, int, int]] = {}
        """Shard whose copy did not come through -> sender, digest that was told, how often."""
        self._dropping: set[int] = set()
        self._finishing: int | None = None
        self._asked = -1
        """Step in which the training loop asked for work last."""
        self._done: dict[str, int] = {}
        """Member -> step before which its training loop ended."""
        self._going: dict[str, int] = {}
        """Member -> step that its training loop is in, while others have ended before it."""
        self._overruled = False
        """This member's loop would have gone on: the majority has ended before it."""
        self._over = False

    def _do(self, command: p.Command) -> None:
        self._out.append(command)

    def _send(self, to: str, message: Message) -> None:
        self._out.append(p.Send(to=to, message=message))

    def _fail(self, kind: str, reason: str) -> None:
        self._out.append(p.Fail(kind=kind, reason=reason))
        self._over = True

    @property
    def _others(self) -> list[str]:
        return [m for m in self.view.ids if m != self.me] if self.view else []

    @property
    def now(self) -> tuple[Holders, ...]:
        """Who holds what in this view: the committed holders that live."""
        return self._now

    @now.setter
    def now(self, holders: tuple[Holders, ...]) -> None:
        self._now = holders
        self._my_shards = [shard for shard, h in enumerate(holders) if h.primary == self.me]

    def _scaler(self) -> Scaler:
        """The loss scaling of the step after the committed one."""
        return self.shape.loss_scale.start if self.record is None else self.record.next_scaler

    def _mine(self) -> list[int]:
        return self._my_shards

    def _new_attempt(self, step: int) -> Attempt:
        return Attempt(step=step, fold=Fold(self.shape.runs), blocks=self.shape.blocks)

    def _parameters_are_here(self) -> bool:
        if self._missing is None:
            self._missing = {shard for shard, version in enumerate(self.parameters) if version != self.committed}
        return not self._missing

    def _have_parameters(self, shard: int) -> None:
        self.parameters[shard] = self.committed
        if self._missing is not None:
            self._missing.discard(shard)
