"""A parser of faults: `CLASS --target … --at … --for … --OPTION …`, equal at the shell, in files and on the wire.

Every error is one sentence that says what was expected. Only `read_faults`, which reads a file of such lines, does I/O.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from elastrain.errors import ConfigError
from elastrain.job.world import PHASES
from elastrain.launcher.faults.fault import RANDOM, Fault, Moment, Scheme, Target, Value, number
from elastrain.launcher.faults.table import CLASSES, DAY, FaultClass, Lasting, Option

_NAME = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.-]*")
_LINK = re.compile(r"(?!(.*)-\1$)[A-Za-z0-9_.]+-[A-Za-z0-9_.]+")
"""Pattern of `A-B` with two different names. Names of simulated nodes have no hyphen."""
SHAPES = (
    f"member:ID, such as member:m1, member:{RANDOM}, node:NAME, node:{RANDOM}, link:node0-node1, or etcd; several with "
    "commas"
)
"""Forms of targets, for error messages."""


def parse(line: str) -> Fault:
    """Return the fault of a line. Raises ConfigError."""
    return from_words(split(line))


def split(line: str) -> list[str]:
    """Split a line into words as a shell does; '#' begins a comment. Raises ConfigError."""
    try:
        return shlex.split(line, comments=True)
    except ValueError as error:
        raise ConfigError(f"{line!r} is not understood: {error}") from None


def from_words(words: Sequence[str]) -> Fault:
    """Return the fault of the words of a line. Raises ConfigError."""
    kind, *rest = words
    row = CLASSES.get(kind)
    if row is None:
        raise ConfigError(f"unknown fault class {kind!r}: known are {', '.join(CLASSES)}")
    flags = _flags(row, rest)
    place = _place(row, flags.pop("at")) if "at" in flags else Moment()
    targets = _targets(row, flags.pop("target", None))
    for_s = _seconds(row, flags.pop("for")) if "for" in flags else None
    options = tuple((each.name, _value(row, each, flags[each.name])) for each in row.options if each.name in flags)
    return Fault(kind=kind, targets=targets, place=place, for_s=for_s, options=options)


def _flags(row: FaultClass, words: list[str]) -> dict[str, str]:
    """Return name -> value of each `--name value` and `--name=value`."""
    known = ["target", "at", *([] if row.lasting is Lasting.NO else ["for"]), *(each.name for each in row.options)]
    found: dict[str, str] = {}
    while words:
        flag, *words = words
        flag, equals, value = flag.partition("=")
        name = flag.removeprefix("--")
        if not flag.startswith("--") or name not in known:
            takes = ", ".join(f"--{each}" for each in known)
            raise ConfigError(f"{flag!r} is unknown for {row.name}, which takes {takes}")
        if name in found:
            raise ConfigError(f"{flag} is given twice")
        if not equals:
            if not words:
                raise ConfigError(f"{flag} needs a value")
            value, *words = words
        found[name] = value
    return found


def _targets(row: FaultClass, text: str | None) -> tuple[Target, ...]:
    if text is None:
        if row.targets == (Scheme.ETCD,):
            return (Target(scheme=Scheme.ETCD),)
        raise ConfigError(f"--target is missing: write --target {_shapes(row)}")
    targets = tuple(_target(row, part) for part in text.split(","))
    named = [target for target in targets if not target.is_random]
    if len(set(named)) < len(named):
        raise ConfigError(f"--target {text} names one thing twice: name each once")
    if len({target.scheme for target in targets}) > 1:
        raise ConfigError(f"--target {text} mixes kinds: name members, or nodes")
    return targets


def _target(row: FaultClass, text: str) -> Target:
    scheme, colon, name = text.partition(":")
    if scheme not in list(Scheme) or not _is_name(Scheme(scheme), name, colon):
        raise ConfigError(f"unknown target {text!r}: write {SHAPES}")
    if Scheme(scheme) not in row.targets:
        what = scheme if scheme == Scheme.ETCD else f"a {scheme}"
        raise ConfigError(f"{row.name} does not strike {what}: write --target {_shapes(row)}")
    return Target(scheme=Scheme(scheme), name=name)


def _is_name(scheme: Scheme, name: str, colon: str) -> bool:
    if scheme is Scheme.ETCD:
        return not colon
    return bool((_LINK if scheme is Scheme.LINK else _NAME).fullmatch(name))


def _shapes(row: FaultClass) -> str:
    shapes = {Scheme.MEMBER: "member:ID", Scheme.NODE: "node:NAME", Scheme.LINK: "link:A-B", Scheme.ETCD: "etcd"}
    return " or ".join(shapes[scheme] for scheme in row.targets)


def _place(row: FaultClass, text: str) -> Moment:
    found: dict[str, str] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in ("step", "phase", "t") or name in found or not _fits(name, value):
            raise ConfigError(
                f"--at {text!r} is not understood: write step=N, phase=P, or step=N,phase=P, N from 0 on; "
                "or t=SECONDS since the start of the job, also with phase=P"
            )
        found[name] = value
    if "t" in found and "step" in found:
        raise ConfigError(f"--at {text!r}: a time cannot be combined with a step")
    return Moment(
        step=int(found["step"]) if "step" in found else None,
        phase=_phase(row, found["phase"]) if "phase" in found else None,
        t_s=float(found["t"]) if "t" in found else None,
    )


def _fits(name: str, value: str) -> bool:
    if name == "step":
        return value.isascii() and value.isdigit()
    return name == "phase" or (_float(value) is not None and 0 <= float(value) <= 365 * DAY)


def _phase(row: FaultClass, phase: str) -> str:
    if phase not in PHASES:
        raise ConfigError(f"unknown phase {phase!r}: known are {', '.join(PHASES)}")
    if phase not in row.phases:
        raise ConfigError(f"{row.name} does not strike in phase {phase}: it does in {', '.join(row.phases)}")
    return phase


def _seconds(row: FaultClass, text: str) -> float:
    value = _float(text)
    if value is None or not 0 < value <= DAY:
        raise ConfigError(f"--for {text!r}: write a number of seconds, more than 0 and at most {DAY:g}")
    return value


def _value(row: FaultClass, option: Option, text: str) -> Value:
    if isinstance(option.default, str):
        return _word(row, option, text)
    value = _float(text)
    fits = value is not None and option.least <= value <= option.most and (not option.is_whole or value == int(value))
    if value is None or not fits:
        kind = "a whole number" if option.is_whole else "a number"
        raise ConfigError(
            f"--{option.name} {text!r} of {row.name}: write {kind} from {number(option.least)} to {number(option.most)}"
        )
    return int(value) if option.is_whole else value


def _word(row: FaultClass, option: Option, text: str) -> str:
    if len(option.choices) > 1 and text not in option.choices:
        raise ConfigError(f"--{option.name} {text!r} of {row.name}: write one of {', '.join(option.choices)}")
    return text


def _float(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def read_faults(path: Path) -> tuple[Fault, ...]:
    """Read a file with one fault per line, written as after `elastrain inject`. '#' begins a comment.

    Raises ConfigError, which names the line.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the faults file {path} cannot be read: {error}") from None
    faults = []
    for place, line in enumerate(lines, start=1):
        try:
            words = split(line)
            if words:
                faults.append(_placed(from_words(words)))
        except ConfigError as error:
            raise ConfigError(f"{path}, line {place}: {error}") from None
    return tuple(faults)


def _placed(fault: Fault) -> Fault:
    if fault.place.at_once:
        raise ConfigError(
            "--at is missing: in a file every fault needs a place, such as --at step=3,phase=backward or --at t=10"
        )
    return fault
