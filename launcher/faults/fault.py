"""A fault on request as values: what it is, whom it strikes, where, and for how long. It prints as its own line."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeAlias

RANDOM = "random"
Value: TypeAlias = str | int | float


class Scheme(StrEnum):
    """What kind of thing a target names."""

    MEMBER = "member"
    NODE = "node"
    LINK = "link"
    ETCD = "etcd"


@dataclass(frozen=True, kw_only=True)
class Target:
    """`name` is a member's id, a node's name, "random", or A-B for two simulated nodes; etcd has none."""

    scheme: Scheme
    name: str = ""

    @property
    def is_random(self) -> bool:
        return self.name == RANDOM

    @property
    def nodes(self) -> tuple[str, ...]:
        """Those that it names."""
        ends = {Scheme.NODE: (self.name,), Scheme.LINK: tuple(self.name.split("-"))}
        return ends.get(self.scheme, ())

    def __str__(self) -> str:
        return f"{self.scheme}:{self.name}" if self.name else str(self.scheme)


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Where a fault strikes: at a step, at a phase (of that step, or the first that comes), or at a time; or at once.

    `t_s` counts from the beginning of `elastrain run`; with a phase, the first that comes after that time.
    """

    step: int | None = None
    phase: str | None = None
    t_s: float | None = None

    @property
    def at_once(self) -> bool:
        return self == Moment()

    def __str__(self) -> str:
        told = {"step": self.step, "phase": self.phase, "t": None if self.t_s is None else number(self.t_s)}
        return ",".join(f"{name}={value}" for name, value in told.items() if value is not None)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """`options` are those that were given, in the order of the class; `table.settings` adds the defaults."""

    kind: str
    targets: tuple[Target, ...]
    place: Moment = Moment()
    for_s: float | None = None
    options: tuple[tuple[str, Value], ...] = ()

    @property
    def target(self) -> Target:
        """Of a fault that has one."""
        [target] = self.targets
        return target

    @property
    def member(self) -> str:
        """The id, where a member is its one target."""
        return self.target.name if self.target.scheme is Scheme.MEMBER else ""

    @property
    def node(self) -> str:
        """The name, where a node is its one target."""
        return self.target.name if self.target.scheme is Scheme.NODE else ""

    @property
    def strikes_any_step_of_a_node(self) -> bool:
        """Whether it waits for nothing but a node that comes to its phase."""
        whole_nodes = any(target.scheme is Scheme.NODE for target in self.targets)
        return whole_nodes and self.place.step is None and self.place.t_s is None

    def aimed_at(self, targets: Sequence[Target]) -> Fault:
        return replace(self, targets=tuple(targets))

    def when_due(self) -> Fault:
        """The same when its time has come."""
        return replace(self, place=replace(self.place, t_s=None))

    def struck_at_once(self) -> Fault:
        """The same without a place: it has come to it."""
        return replace(self, place=Moment())

    def singles(self) -> list[Fault]:
        """One fault for each target."""
        return [self.aimed_at([target]) for target in self.targets]

    def __str__(self) -> str:
        words = [self.kind, "--target", ",".join(map(str, self.targets))]
        words += [] if self.place.at_once else ["--at", str(self.place)]
        words += [] if self.for_s is None else ["--for", number(self.for_s)]
        for name, value in self.options:
            words += [f"--{name}", value if isinstance(value, str) else number(value)]
        return shlex.join(words)


def number(value: float) -> str:
    """The shortest text that reads back as the same number."""
    return str(int(value)) if value == int(value) else repr(value)
