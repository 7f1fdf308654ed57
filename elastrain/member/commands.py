"""The commands of the event at hand: the one port through which the parts of a member speak."""

from __future__ import annotations

from collections.abc import Iterable

from elastrain import protocol as p
from elastrain.messages import Message


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
