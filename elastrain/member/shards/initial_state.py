"""Reading of the initial state: the shards that were asked for, and those that were read."""

from __future__ import annotations

from collections.abc import Iterable

from elastrain import protocol as p
from elastrain.job.values import Initial
from elastrain.member.contract import MemberPart, handles
from elastrain.member.state.ballot import Commands
from elastrain.member.state.committed import NEVER, Commit
from elastrain.member.state.holdings import Holdings


class InitialState(MemberPart):
    """Part that owns the list of shards whose initial state was read but not yet created here."""

    def __init__(self, me: str, initial: Initial, commit: Commit, holdings: Holdings, out: Commands) -> None:
        self._me = me
        self._initial = initial
        self._commit = commit
        self._holdings = holdings
        self._out = out
        self._is_reading = False
        self._read: set[int] = set()

    def may_be_made(self) -> bool:
        """Return True if all data is here from which the initial state of this member's shards is made."""
        if not self._commit.parameters.are_here():
            return False
        return not self._initial.is_stored or not (self._is_reading or self._missing())

    def read(self) -> bool:
        """Ask for missing data of the stored initial state. Returns True if this call has asked."""
        # Only one request is open at a time. Shards that a later view adds are asked for afterwards, so nothing is read
        # twice.
        if not self._initial.is_stored or self._is_reading:
            return False
        self._is_reading = True
        self._out.do(p.ReadInitial(shards=tuple(self._missing())))
        return True

    def _missing(self) -> list[int]:
        # Only holders that all agree on read. A holder that a later record names gets a copy.
        mine = [shard for shard, holders in enumerate(self._commit.roles.live) if self._me in holders.all]
        return [s for s in mine if s not in self._read and not self._has(s)]

    def _has(self, shard: int) -> bool:
        held = self._holdings.find(shard)
        return held is not None and held.version != NEVER

    @handles(p.InitialRead)
    def on_read(self, event: p.InitialRead) -> None:
        """Note the shards and parameters that were read."""
        self._is_reading = False
        # If other members have committed meanwhile, their parameters count.
        if self._commit.is_initial:
            self._read.update(event.shards)
            self._commit.parameters.have_initial()

    def forget(self, created: Iterable[int]) -> None:
        """Forget that these shards were read, since their states exist now. A dropped state must be read again."""
        self._read.difference_update(created)
