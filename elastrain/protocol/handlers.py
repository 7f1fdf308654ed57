"""Tables of the handlers of events and messages. Each part of a machine marks its methods; the machine joins them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

Method = TypeVar("Method", bound=Callable[..., object])


def handles(*kinds: type) -> Callable[[Method], Method]:
    """Mark a method of a part as the handler of these types.

    Of the values that the machine offers, it takes those whose names are the names of its parameters.
    """

    def mark(method: Method) -> Method:
        vars(method)["handles"] = kinds
        return method

    return mark


class Handling(Protocol):
    """A part of a machine, with a table of its marked methods."""

    handlers: ClassVar[tuple[tuple[type, str, tuple[str, ...]], ...]] = ()
    """(type of event or message, name of the method, its parameters) of each marked method."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # By name and not as functions, so that a test can replace a method of a part that exists already.
        cls.handlers = tuple(
            (kind, name, method.__code__.co_varnames[1 : method.__code__.co_argcount])
            for name, method in vars(cls).items()
            for kind in getattr(method, "__dict__", {}).get("handles", ())
        )


class PartHandler(NamedTuple):
    """The method of a part that handles one type of events or messages."""

    part: Handling
    name: str
    takes: tuple[str, ...]

    def __str__(self) -> str:
        return f"{type(self.part).__name__}.{self.name}"

    def hear(self, **offered: object) -> Any:
        """Call the method with those of the offered values that it takes, and return what it returns."""
        return getattr(self.part, self.name)(*(offered[name] for name in self.takes))


def joined(kinds: Iterable[type], parts: Iterable[Handling]) -> dict[type, PartHandler]:
    """Return the handler of each type. Raises TypeError if a type has no handler, or two."""
    table: dict[type, PartHandler] = {}
    for part in parts:
        for kind, name, takes in part.handlers:
            handler = PartHandler(part, name, takes)
            if (first := table.setdefault(kind, handler)) is not handler:
                raise TypeError(f"{kind.__name__} has two handlers, {first} and {handler}: remove one of them")
    if missing := [kind.__name__ for kind in kinds if kind not in table]:
        raise TypeError(f"{', '.join(missing)}: no part handles this; mark a method of the part with @handles")
    return table
