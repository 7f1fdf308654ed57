"""Contract of a part of the member's machine, and the table of the handlers of events and messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

from elastrain.job.values import Recovery

Method = TypeVar("Method", bound=Callable[..., object])


def handles(*kinds: type) -> Callable[[Method], Method]:
    """Mark a method of a part as the handler of these types of events or messages.

    The handler of an event takes the event. The handler of a message takes those of `source`, `message` and `payload`
    that it names.
    """

    def mark(method: Method) -> Method:
        vars(method)["handles"] = kinds
        return method

    return mark


class MemberPart(Protocol):
    """Methods that the machine calls on each of its parts. A part overrides those that it needs."""

    handlers: ClassVar[tuple[tuple[type, str, tuple[str, ...]], ...]] = ()
    """(type of event or message, name of the method, its parameters) of each marked method."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        methods = [(name, each) for name, each in vars(cls).items() if "handles" in getattr(each, "__dict__", ())]
        # By name and not as functions, so that a test can replace a method of a part that exists already.
        cls.handlers = tuple(
            (kind, name, method.__code__.co_varnames[1 : method.__code__.co_argcount])
            for name, method in methods
            for kind in vars(method)["handles"]
        )

    def begin(self, step: int) -> None:
        """Forget all data of the step before: `step` is open now."""
        return

    def forget_view(self) -> None:
        """Forget questions, answers and transfers of the last view: some of its members may be gone."""
        return

    def resume(self, recovery: Recovery) -> None:
        """Go on in the new view, and send again what its members may lack."""
        return

    def progress(self) -> bool:
        """Do all work that has become possible. Returns True if any state of the machine was changed."""
        return False

    def why_not_yet(self) -> str:
        """Return what this part must still do before this member may vote on the open step, or ""."""
        return ""


class PartHandler(NamedTuple):
    """The method of a part that handles one type of events or messages."""

    part: MemberPart
    name: str
    takes: tuple[str, ...]

    def __str__(self) -> str:
        return f"{type(self.part).__name__}.{self.name}"

    def take(self, event: object) -> None:
        """Handle an event."""
        getattr(self.part, self.name)(event)

    def hear(self, **arrived: object) -> None:
        """Handle a message: `arrived` has its source, the message and its payload."""
        getattr(self.part, self.name)(*(arrived[name] for name in self.takes))


def joined(kinds: Iterable[type], parts: Iterable[MemberPart]) -> dict[type, PartHandler]:
    """Return the handler of each type. Raises TypeError if a type has no handler, or two."""
    table: dict[type, PartHandler] = {}
    for part in parts:
        for kind, name, takes in part.handlers:
            handler = PartHandler(part, name, takes)
            if kind in table:
                raise TypeError(f"{kind.__name__} has two handlers, {table[kind]} and {handler}: remove one of them")
            table[kind] = handler
    if missing := [kind.__name__ for kind in kinds if kind not in table]:
        raise TypeError(f"{', '.join(missing)}: no part handles this; mark a method of the part with @handles")
    return table
