"""Votes and acknowledgements of the open step, and the list of commands of the event at hand.

Votes and acknowledgements belong to one view and are void in the next. `Commands` is the only output of a member's
parts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from elastrain import protocol as p
from elastrain.job.values import Vote
from elastrain.member.contract import MemberPart
from elastrain.protocol.messages import Message


class Ballot(MemberPart):
    """Part that owns the votes, and the acknowledgements of this member's shards."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all votes and acknowledgements. A voter of the last view may be lost, and its record with it."""
        self.has_voted = False
        self._acks: dict[int, set[str]] = {}
        self._votes: dict[str, Vote] = {}

    def begin(self, step: int) -> None:
        """Begin with the votes on another step."""
        self.clear()

    def forget_view(self) -> None:
        """Forget all votes: in the next view all members vote again."""
        self.clear()

    def acknowledge(self, source: str, shards: Collection[int]) -> None:
        """Note that a member has stored the gradients of these shards."""
        for shard in shards:
            self._acks.setdefault(shard, set()).add(source)  # a set: a gradient may come, and be acknowledged, twice

    def acknowledged(self, shard: int) -> set[str]:
        """Return the members that have the shard's gradient and the verified state of the step before."""
        return self._acks.get(shard, set())

    def cast(self, me: str, vote: Vote) -> None:
        """Add this member's own vote."""
        self.has_voted = True
        self.add(me, vote)

    def add(self, member: str, vote: Vote) -> None:
        """Add a member's vote."""
        self._votes[member] = vote

    def votes(self, members: Collection[str]) -> list[Vote] | None:
        """Return the votes of all these members, in their order. None while a vote is missing."""
        # All votes are needed. A member that has not voted may not know the record, and could undo it with others.
        return None if self.missing(members) else [self._votes[member] for member in members]

    def missing(self, members: Iterable[str]) -> list[str]:
        """Return those of the members that have not voted."""
        return [member for member in members if member not in self._votes]


class Commands:
    """List of commands, in the order in which the driver carries them out."""

    def __init__(self) -> None:
        self.is_closed = False
        """True if this member leaves or has failed. Its driver gets no more commands."""
        self._commands: list[p.Command] = []

    def __len__(self) -> int:
        return len(self._commands)

    def do(self, command: p.Command) -> None:
        """Add a command."""
        self._commands.append(command)

    def send(self, to: str, message: Message) -> None:
        """Add the command to send a message to one member."""
        self.do(p.SendMessage(to=to, message=message))

    def send_all(self, members: Iterable[str], message: Message) -> None:
        """Add commands to send a message to each of these members."""
        for member in members:
            self.send(member, message)

    def fail(self, kind: str, reason: str) -> None:
        """End this member with an error. `kind` is the name of its class in elastrain.errors."""
        self.do(p.Fail(kind=kind, reason=reason))
        # This works at once, in the middle of an event: parts that come later must not act on what has failed.
        self.is_closed = True

    def leave(self, *, evicted: bool = False, overruled: bool = False) -> None:
        """Add the command to leave the job. The list is closed."""
        self.is_closed = True
        self.do(p.Leave(evicted=evicted, overruled=overruled))

    # All commands of one event are taken together, so that a driver carries them out before the next event.
    def take(self) -> list[p.Command]:
        """Return the commands, and begin with an empty list."""
        commands, self._commands = self._commands, []
        return commands
