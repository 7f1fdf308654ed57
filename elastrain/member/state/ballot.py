"""Votes and acknowledgements of the open step; both belong to one view and are void in the next.

The commands of the event at hand: the one port through which the parts of a member speak.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from elastrain import protocol as p
from elastrain.job.values import Vote
from elastrain.member.contract import MemberPart
from elastrain.protocol.messages import Message


class Ballot(MemberPart):
    """Owns who has acknowledged which shard of this member's, and who has voted."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all. A new view asks again: who voted in the last one may be gone, and its record with it."""
        self.has_voted = False
        self._acks: dict[int, set[str]] = {}
        self._votes: dict[str, Vote] = {}

    def begin(self, step: int) -> None:
        """Begin with the votes on another step."""
        self.clear()

    def forget_view(self) -> None:
        """Forget all: in the next view all members vote again."""
        self.clear()

    def acknowledge(self, source: str, shards: Collection[int]) -> None:
        for shard in shards:
            self._acks.setdefault(shard, set()).add(source)  # a set: a gradient may come, and be acknowledged, twice

    def acknowledged(self, shard: int) -> set[str]:
        """Members that keep the shard's gradient, and whose state of the step before is verified."""
        return self._acks.get(shard, set())

    def cast(self, me: str, vote: Vote) -> None:
        self.has_voted = True
        self.add(me, vote)

    def add(self, member: str, vote: Vote) -> None:
        self._votes[member] = vote

    def votes(self, members: Collection[str]) -> list[Vote] | None:
        """The votes of all these members, in their order; None while one is missing."""
        # All of them: a record that one member has not voted for could be unknown to it, and undone with the others.
        if not self._votes.keys() >= set(members):
            return None
        return [self._votes[member] for member in members]


class Commands:
    """Commands in the order in which they are to be carried out."""

    def __init__(self) -> None:
        self.is_closed = False
        """Whether this member leaves or has failed: its driver gets no more commands."""
        self._commands: list[p.Command] = []

    def __len__(self) -> int:
        return len(self._commands)

    def do(self, command: p.Command) -> None:
        self._commands.append(command)

    def send(self, to: str, message: Message) -> None:
        self.do(p.SendMessage(to=to, message=message))

    def send_all(self, members: Iterable[str], message: Message) -> None:
        for member in members:
            self.send(member, message)

    def fail(self, kind: str, reason: str) -> None:
        """End with an error; `kind` is its name in elastrain.errors."""
        self.do(p.Fail(kind=kind, reason=reason))
        # At once, in the middle of an event: parts that come after this one must not act on what has failed.
        self.is_closed = True

    def leave(self, *, evicted: bool = False, overruled: bool = False) -> None:
        self.is_closed = True
        self.do(p.Leave(evicted=evicted, overruled=overruled))

    # Taken at once per event, so that a driver carries out all that follows from one before it feeds the next.
    def take(self) -> list[p.Command]:
        """Hand the commands over and begin anew."""
        commands, self._commands = self._commands, []
        return commands
