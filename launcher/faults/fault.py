"""A fault as a value: class, targets, moment, duration and options. `str(fault)` is the line a user would write."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeAlias

RANDOM = "random"
"""Target name for a member or node that is chosen at random."""
Value: TypeAlias = str | int | float


class Scheme(StrEnum):
    """The kind of a target."""

    MEMBER = "member"
    NODE = "node"
    LINK = "link"
    ETCD = "etcd"


@dataclass(frozen=True, kw_only=True)
class Target:
    """A target of a fault.

    `name` is a member's id, a node's name, "random", or A-B for a link between two simulated nodes. It is empty for
    etcd.
    """

    scheme: Scheme
    name: str = ""

    @property
    def is_random(self) -> bool:
        """True if the member or node is chosen at random."""
        return self.name == RANDOM

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes that the target names: one, the two ends of a link, or none."""
        ends = {Scheme.NODE: (self.name,), Scheme.LINK: tuple(self.name.split("-"))}
        return ends.get(self.scheme, ())

    def __str__(self) -> str:
        return f"{self.scheme}:{self.name}" if self.name else str(self.scheme)


@dataclass(frozen=True, kw_only=True)
class Moment:
    """The moment at which a fault strikes. An empty moment means at once.

    A fault strikes at a step, at a phase, or at a time. A phase belongs to `step` if that is given; else it is the next
    such phase, after `t_s` if that is given. `t_s` counts from the start of `elastrain run`.
    """

    step: int | None = None
    phase: str | None = None
    t_s: float | None = None

    @property
    def at_once(self) -> bool:
        """True if the fault strikes at once."""
        return self == Moment()

    def __str__(self) -> str:
        told = {"step": self.step, "phase": self.phase, "t": None if self.t_s is None else number(self.t_s)}
        return ",".join(f"{name}={value}" for name, value in told.items() if value is not None)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault. `kind` is the name of its class in `table.CLASSES`.

    `options` has only the options that the user gave, in the order of the class. `table.settings` adds the defaults.
    """

    kind: str
    targets: tuple[Target, ...]
    place: Moment = Moment()
    for_s: float | None = None
    options: tuple[tuple[str, Value], ...] = ()

    @property
    def target(self) -> Target:
        """The only target of the fault. Raises ValueError if there are several."""
        [target] = self.targets
        return target

    @property
    def member(self) -> str:
        """Id of the member if it is the only target, else empty."""
        return self.target.name if self.target.scheme is Scheme.MEMBER else ""

    @property
    def node(self) -> str:
        """Name of the node if it is the only target, else empty."""
        return self.target.name if self.target.scheme is Scheme.NODE else ""

    @property
    def strikes_any_step_of_a_node(self) -> bool:
        """True if the targets are nodes, and neither a step nor a time is given."""
        whole_nodes = any(target.scheme is Scheme.NODE for target in self.targets)
        return whole_nodes and self.place.step is None and self.place.t_s is None

    def aimed_at(self, targets: Sequence[Target]) -> Fault:
        """Return the same fault with other targets."""
        return replace(self, targets=tuple(targets))

    def when_due(self) -> Fault:
        """Return the same fault without its time, once that time has come."""
        return replace(self, place=replace(self.place, t_s=None))

    def struck_at_once(self) -> Fault:
        """Return the same fault without its moment, once that moment has come."""
        return replace(self, place=Moment())

    def singles(self) -> list[Fault]:
        """Return one fault for each target."""
        return [self.aimed_at([target]) for target in self.targets]

    def __str__(self) -> str:
        words = [self.kind, "--target", ",".join(map(str, self.targets))]
        words += [] if self.place.at_once else ["--at", str(self.place)]
        words += [] if self.for_s is None else ["--for", number(self.for_s)]
        for name, value in self.options:
            words += [f"--{name}", value if isinstance(value, str) else number(value)]
        return shlex.join(words)


def number(value: float) -> str:
    """Return the shortest text that reads back as the same number."""
    return str(int(value)) if value == int(value) else repr(value)
