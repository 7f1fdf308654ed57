"""Faults on request: the words of `elastrain inject`, from the command line and from a faults file.

Parsing and checking only; who carries a fault out is decided in `core`.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

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
    if scheme == "node":
        step, phase = _place(at) if at is not None else (None, None)
        return Fault(kind=kind, node=name, step=step, phase=phase)
    step, phase = _place(at) if at is not None else (None, None)
    return Fault(kind=kind, member=name, step=step, phase=phase)


def read_faults(path: Path) -> tuple[Fault, ...]:
    """One fault per line, as after `elastrain inject`; '#' begins a comment. Raises ConfigError (with line)."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the faults file {path} can not be read: {error}") from None
    faults = []
    for number, line in enumerate(lines, start=1):
        try:
            words = shlex.split(line, comments=True)
            if words:
                faults.append(_from_words(words))
        except ValueError as error:  # ConfigError is one
            raise ConfigError(f"{path}, line {number}: {error}") from None
    return tuple(faults)


def _from_words(words: list[str]) -> Fault:
    kind, *rest = words
    options: dict[str, str] = {}
    while rest:
        name, *rest = rest
        name, equals, value = name.partition("=")
        if not equals:
            if not rest:
                raise ConfigError(f"{name} needs a value")
            value, *rest = rest
        if name not in ("--target", "--at") or name in options:
            raise ConfigError(
                f"{name!r} is unknown or given twice: a line is CLASS --target member:ID --at step=N,phase=P"
            )
        options[name] = value
    if "--target" not in options:
        raise ConfigError("--target is missing: write --target member:ID")
    if "--at" not in options and kind in CLASSES:
        raise ConfigError("--at is missing: in a file every fault needs a place, such as --at step=3,phase=backward")
    return make_fault(kind, options["--target"], options.get("--at"))


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
