"""What this member needs of the state that the job starts from: what was asked for, and what is read of it."""

from __future__ import annotations

from collections.abc import Iterable

from elastrain import protocol as p
from elastrain.job.values import Initial
from elastrain.member.state.ballot import Commands
from elastrain.member.state.committed import NEVER, Commit
from elastrain.member.state.holdings import Holdings


class InitialState:
    """Owns which shards' states are read, and not yet in custody."""

    def __init__(self, me: str, initial: Initial, commit: Commit, holdings: Holdings, out: Commands) -> None:
        self._me = me
        self._initial = initial
        self._commit = commit
        self._holdings = holdings
        self._out = out
        self._is_reading = False
        self._read: set[int] = set()

    def may_be_made(self) -> bool:
        """Whether all is here from which this member's shards are made; asks for what has to be read."""
        if not self._initial.is_stored:
            return self._commit.parameters.are_here()
        missing = self._missing()
        # One at a time: what a view in between adds is asked for afterwards, and nothing is read twice.
        if not self._is_reading and (missing or not self._commit.parameters.are_here()):
            self._is_reading = True
            self._out.do(p.ReadInitial(shards=tuple(missing)))
        return not self._is_reading

    def _missing(self) -> list[int]:
        # By roles that are agreed on: a holder that a later record names gets a copy, and reads nothing.
        mine = [shard for shard, holders in enumerate(self._commit.roles.live) if self._me in holders.all]
        return [s for s in mine if s not in self._read and not self._has(s)]

    def _has(self, shard: int) -> bool:
        held = self._holdings.find(shard)
        return held is not None and held.version != NEVER

    def on_read(self, event: p.InitialRead) -> None:
        self._is_reading = False
        # Where others have committed meanwhile, it is their parameters that count.
        if self._commit.is_initial:
            self._read.update(event.shards)
            self._commit.parameters.have_initial()

    def forget(self, created: Iterable[int]) -> None:
        """These shards' states are in custody: who drops one of them, and gets it again, has to read it again."""
        self._read.difference_update(created)
