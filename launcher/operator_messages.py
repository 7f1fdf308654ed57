"""What the operator's commands ask an agent over its control socket, and the answer: one line of JSON each."""

from __future__ import annotations

from typing import Any, TypeAlias

from elastrain.codec import LineCodec, Tagged


class AskState(Tagged, frozen=True, kw_only=True):
    """What `elastrain status` shows."""


class AskFault(Tagged, frozen=True, kw_only=True):
    """A fault on request."""

    line: str
    """As after `elastrain inject`; see `faults.grammar`."""
    careful_of: tuple[str, ...] | None = None
    """Only if the job keeps its state, even should these members be lost, too."""


class Answer(Tagged, frozen=True, kw_only=True):
    """`ok`: the request was taken. `sentence` is for the operator; `state` answers `AskState`."""

    ok: bool
    sentence: str = ""
    state: dict[str, Any] = {}  # noqa: RUF012 - msgspec copies it for each value


Request: TypeAlias = AskState | AskFault
REQUEST: LineCodec[Request] = LineCodec(Request)
ANSWER: LineCodec[Answer] = LineCodec(Answer)
