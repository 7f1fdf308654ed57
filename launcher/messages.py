"""What workers say to their agent: one JSON object per line, checked here and turned into values.

The agent's own messages are built in `core`. No socket may come in here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

LINE_BYTES_MAX = 1 << 20


class BadMessageError(Exception):
    """A worker said something that no correct worker says."""


@dataclass(frozen=True, kw_only=True)
class Hello:
    """Ready to join: the model is built, the mesh listens."""

    member: str
    pid: int
    address: str
    spec: Mapping[str, Any]
    beacon: bool = False


@dataclass(frozen=True, kw_only=True)
class Suspect:
    """`dead`: the other's process has ended, its robust mutex says so."""

    member: str
    reason: str
    dead: bool = False


@dataclass(frozen=True, kw_only=True)
class Progress:
    """A step was committed. `holders` (shard -> primary, backups…) only when they changed."""

    step: int
    generation: int
    loss: float | None = None
    samples: int | None = None
    at_s: float | None = None
    holders: Mapping[str, tuple[str, ...]] | None = None


@dataclass(frozen=True, kw_only=True)
class Phase:
    step: int
    phase: str


@dataclass(frozen=True, kw_only=True)
class Failed:
    """The user's code raised; the worker ends after this."""

    step: int
    micro_batch: int | None
    signature: str
    traceback: str


@dataclass(frozen=True, kw_only=True)
class LostState:
    """No living member holds the state of some shard."""

    sentence: str


@dataclass(frozen=True, kw_only=True)
class Diverged:
    """What must be equal on two members is not, and no replacement could mend it: going on would keep wrong bits."""

    sentence: str


@dataclass(frozen=True, kw_only=True)
class NoRoom:
    """What the present plan asks of this member does not fit its memory limit; `sentence` says how much is missing."""

    sentence: str


@dataclass(frozen=True, kw_only=True)
class Finished:
    step: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class Struck:
    """A fault on request: the worker is where its whole node was to be killed."""


@dataclass(frozen=True, kw_only=True)
class Note:
    """A line for the event log; its fields are the worker's own."""

    fields: Mapping[str, Any] = field(default_factory=dict)


Message = Hello | Suspect | Progress | Phase | Failed | LostState | Diverged | NoRoom | Finished | Struck | Note


def encode(message: Mapping[str, Any]) -> bytes:
    """One line. Raises ValueError if it is longer than LINE_BYTES_MAX."""
    line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
    if len(line) > LINE_BYTES_MAX:
        raise ValueError(f"a message of {len(line)} bytes is over the limit of {LINE_BYTES_MAX}")
    return line


def decode(line: bytes) -> dict[str, Any]:
    """The JSON object of one line. Raises BadMessageError."""
    try:
        value = json.loads(line)
    except ValueError as error:
        raise BadMessageError(f"not a line of JSON ({error})") from None
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        raise BadMessageError("not an object with a type")
    return value


def parse(line: bytes) -> Message:
    """What a worker's line says. Raises BadMessageError."""
    value = decode(line)
    kind = value.pop("type")
    if kind not in _PARSERS:
        raise BadMessageError(f"unknown type {kind!r}")
    try:
        return _PARSERS[kind](_Fields(value))
    except KeyError as missing:
        raise BadMessageError(f"{kind} without {missing}") from None
    except TypeError as wrong:
        raise BadMessageError(f"{kind}: {wrong}") from None


class _Fields:
    """Typed access: KeyError if missing, TypeError if of the wrong type."""

    def __init__(self, value: Mapping[str, Any]) -> None:
        self.value = value

    def text(self, name: str) -> str:
        return str(_checked(name, self.value[name], str))

    def whole(self, name: str) -> int:
        return int(_checked(name, self.value[name], int))

    def maybe_whole(self, name: str) -> int | None:
        return None if self.value.get(name) is None else self.whole(name)

    def maybe_number(self, name: str) -> float | None:
        came = self.value.get(name)
        return None if came is None else float(_checked(name, came, (int, float)))

    def maybe_text(self, name: str) -> str | None:
        return None if self.value.get(name) is None else self.text(name)

    def holders(self, name: str) -> dict[str, tuple[str, ...]] | None:
        came = self.value.get(name)
        if came is None:
            return None
        return {shard: _names(name, held) for shard, held in _checked(name, came, dict).items()}


def _checked(name: str, value: Any, kind: Any) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r:.80}")
    return value


def _names(name: str, value: Any) -> tuple[str, ...]:
    return tuple(_checked(name, held, str) for held in _checked(name, value, list))


def _hello(f: _Fields) -> Hello:
    return Hello(
        member=f.text("member"),
        pid=f.whole("pid"),
        address=f.text("address"),
        spec=_checked("spec", f.value["spec"], dict),
        beacon=f.value.get("beacon") is True,
    )


def _progress(f: _Fields) -> Progress:
    return Progress(
        step=f.whole("step"),
        generation=f.whole("generation"),
        loss=f.maybe_number("loss"),
        samples=f.maybe_whole("samples"),
        at_s=f.maybe_number("at_s"),
        holders=f.holders("holders"),
    )


def _failed(f: _Fields) -> Failed:
    return Failed(
        step=f.whole("step"),
        micro_batch=f.maybe_whole("micro_batch"),
        signature=f.text("signature"),
        traceback=f.text("traceback"),
    )


_PARSERS: dict[str, Callable[[_Fields], Message]] = {
    "hello": _hello,
    "suspect": lambda f: Suspect(member=f.text("member"), reason=f.text("reason"), dead=f.value.get("dead") is True),
    "progress": _progress,
    "phase": lambda f: Phase(step=f.whole("step"), phase=f.text("phase")),
    "failed": _failed,
    "lost_state": lambda f: LostState(sentence=f.text("sentence")),
    "diverged": lambda f: Diverged(sentence=f.text("sentence")),
    "no_room": lambda f: NoRoom(sentence=f.text("sentence")),
    "finished": lambda f: Finished(step=f.whole("step"), digest=f.text("digest")),
    "struck": lambda f: Struck(),
    "event": lambda f: Note(fields=dict(f.value)),
}
