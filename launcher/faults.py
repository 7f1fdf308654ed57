"""Faults on request, in the words of `elastrain inject`. Values; who carries a fault out is decided in `core`."""

from __future__ import annotations

from dataclasses import dataclass

from elastrain.errors import ConfigError
from elastrain.world import PHASES

CLASSES = ("kill",)
"""The classes that exist: `kill` is SIGKILL to the worker and everything in its process group."""

RANDOM = "random"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """`member` is an id or "random"; or `node` names a node. Without `step` and `phase` it happens at once."""

    kind: str
    member: str = ""
    node: str = ""
    step: int | None = None
    phase: str | None = None

    @property
    def at_once(self) -> bool:
        return self.step is None and self.phase is None

    @property
    def target(self) -> str:
        return f"node:{self.node}" if self.node else f"member:{self.member}"

    @property
    def at(self) -> str:
        places = [f"step={self.step}"] if self.step is not None else []
        return ",".join(places + ([f"phase={self.phase}"] if self.phase is not None else []))

    def __str__(self) -> str:
        return f"{self.kind} --target {self.target}" + (f" --at {self.at}" if self.at else "")


def make_fault(kind: str, target: str, at: str | None) -> Fault:
    """From the words of the command line. Raises ConfigError."""
    if kind not in CLASSES:
        raise ConfigError(f"unknown fault class {kind!r}: known are {', '.join(CLASSES)}")
    scheme, _, name = target.partition(":")
    if scheme not in ("member", "node") or not name:
        raise ConfigError(
            f"unknown target {target!r}: write member:ID, such as member:m1, member:{RANDOM}, or node:NAME"
        )
    step, phase = _place(at) if at is not None else (None, None)
    member, node = (name, "") if scheme == "member" else ("", name)
    return Fault(kind=kind, member=member, node=node, step=step, phase=phase)


def _place(at: str) -> tuple[int | None, str | None]:
    step: int | None = None
    phase: str | None = None
    for part in at.split(","):
        name, _, value = part.partition("=")
        if name == "step" and step is None and value.isascii() and value.isdigit():
            step = int(value)
        elif name == "phase" and phase is None:
            if value not in PHASES:
                raise ConfigError(f"unknown phase {value!r}: known are {', '.join(PHASES)}")
            phase = value
        else:
            raise ConfigError(f"--at {at!r} is not understood: write step=N, phase=P, or step=N,phase=P, N from 0 on")
    return step, phase
