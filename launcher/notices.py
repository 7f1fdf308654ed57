"""What agents say to each other: one JSON object per line over an authenticated link, checked here.

Facts only (who died, who is suspected, that the work is done): views are agreed upon in the store, never here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from elastrain.launcher.messages import BadMessageError


@dataclass(frozen=True, kw_only=True)
class Beat:
    """The sender's agent lives."""


@dataclass(frozen=True, kw_only=True)
class Exited:
    """A worker of the sender's node has ended: proof."""

    member: str


@dataclass(frozen=True, kw_only=True)
class Suspected:
    """A worker of the sender's node (`by`) can not reach `member`."""

    member: str
    by: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Raised:
    """The script raised on `member`, a worker of the sender's node: `micro_batch` is -1 outside of any."""

    member: str
    step: int
    micro_batch: int
    signature: str
    traceback: str


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A member has passed the end of the job: nobody waits for anybody any more."""


@dataclass(frozen=True, kw_only=True)
class Digested:
    """A worker of the sender's node has passed the end of the job, with these parameters."""

    member: str
    digest: str


@dataclass(frozen=True, kw_only=True)
class Left:
    """The sender's workers have ended well, and its agent goes: nothing is lost with it."""


@dataclass(frozen=True, kw_only=True)
class Over:
    """The job has ended for everyone."""

    code: int
    sentence: str
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A fault that the operator asked for elsewhere, aimed at the receiver's node or one of its workers."""

    kind: str
    target: str
    at: str = ""


Notice = Beat | Exited | Suspected | Raised | Ended | Digested | Left | Over | Ask
_KINDS: dict[str, type[Notice]] = {
    kind.__name__.lower(): kind for kind in (Beat, Exited, Suspected, Raised, Ended, Digested, Left, Over, Ask)
}


def spell(notice: Notice) -> dict[str, Any]:
    """The JSON object for `channel.Channel.send`."""
    return {"type": type(notice).__name__.lower(), **vars(notice)}


def read(value: Mapping[str, Any]) -> Notice:
    """Raises BadMessageError."""
    kind = _KINDS.get(value["type"])
    if kind is None:
        raise BadMessageError(f"unknown notice {value['type']!r:.40}")
    wanted = {field.name: int if field.type == "int" else str for field in fields(kind)}
    given = {name: came for name, came in value.items() if name != "type"}
    if given.keys() - wanted.keys() or any(type(given[name]) is not wanted[name] for name in given):
        raise BadMessageError(f"the fields of {value['type']!r:.40} are not as agreed")
    try:
        return kind(**given)
    except TypeError as missing:
        raise BadMessageError(f"{value['type']}: {missing}") from None
