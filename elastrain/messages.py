"""What members say to each other during a step: frozen values, and at the end of this file their JSON form.

A message carries decisions and names only; numbers (gradients, parameters, state) travel beside it as tensors, in the
order in which the message names their shards. `Report` and `Vote` are sent as they are: what is decided over lives in
values.py. Nothing here decides anything.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, TypeAlias, get_args

from elastrain.fold import Node
from elastrain.placement import Holders
from elastrain.scaling import Scaler
from elastrain.values import Check, Contribution, Record, Report, Vote


@dataclass(frozen=True, kw_only=True)
class Partial:
    """A node of the fold of one block, for the shards that the receiver answers for."""

    step: int
    block: int
    node: Node
    contribution: Contribution
    touched: int
    """Bit mask over the block's leaves: which got a gradient at all."""
    lanes: tuple[tuple[int, int], ...]
    """(shard, lane) of each tensor."""


@dataclass(frozen=True, kw_only=True)
class Gradient:
    """Finished gradients, from the primary to its backups."""

    step: int
    shards: tuple[int, ...]
    contribution: Contribution
    touched: tuple[tuple[int, ...], ...]
    """Per shard and lane, the folded bit masks."""
    square_norms: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Ack:
    """The backup keeps these gradients, and its state of `step - 1` is verified."""

    step: int
    shards: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Publish:
    """New parameters; `record` is None only for the parameters that the job starts with (step -1)."""

    step: int
    record: Record | None
    shards: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Digests:
    """What a primary's shards are worth after `step`, for others to compare with what they have."""

    step: int
    digests: tuple[tuple[int, int], ...]
    """(shard, digest of its state): for backups."""
    parameters: tuple[tuple[int, int], ...]
    """(shard, digest of its parameters as they were published): for all who compute with them."""


@dataclass(frozen=True, kw_only=True)
class ShardCopy:
    """A shard's whole state as of `step`, for a member that is to become a holder."""

    step: int
    shard: int
    digest: int | None
    """Of that state when it was last compared; None: the one that comes with the tensors has to do."""


@dataclass(frozen=True, kw_only=True)
class Copied:
    """The copy was taken; `intact` says whether its digest is the one that came with it."""

    step: int
    shard: int
    intact: bool


@dataclass(frozen=True, kw_only=True)
class Doubt:
    """The sender has something else than the shard's primary told: what has the receiver, now, after `step`?"""

    step: int
    shard: int
    parameters: bool
    """Of the parameters as published, else of the state."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The answer to a doubt; None: the receiver has nothing to compare."""

    step: int
    shard: int
    parameters: bool
    digest: int | None


@dataclass(frozen=True, kw_only=True)
class LoopHandover:
    """What a newcomer's training loop needs to enter `step`: schedulers, registered objects. Tensors travel beside."""

    step: int
    state: str


@dataclass(frozen=True, kw_only=True)
class EndsBefore:
    """The training loop of this member has ended before `step`."""

    step: int


@dataclass(frozen=True, kw_only=True)
class GoesOn:
    """The training loop of this member is in `step`, before which others have ended."""

    step: int


Message: TypeAlias = (
    Report
    | Partial
    | Gradient
    | Ack
    | Vote
    | Publish
    | Digests
    | ShardCopy
    | Copied
    | Doubt
    | Evidence
    | LoopHandover
    | EndsBefore
    | GoesOn
)

# ------------------------------------------------------------------------------------------------------- the JSON form

KINDS: dict[type, int] = {kind: number for number, kind in enumerate(get_args(Message), start=1)}
_ENCODER = json.JSONEncoder(separators=(",", ":"), default=vars)
"""Tuples become lists, dataclasses become objects; made once, since every message passes through it."""
_BY_NUMBER = {number: kind for kind, number in KINDS.items()}


def encode(message: Message) -> tuple[int, bytes]:
    """`(kind, body)`. Floats are written so that they read back exactly."""
    return KINDS[type(message)], _ENCODER.encode(vars(message)).encode()


def decode(kind: int, body: bytes) -> Message:
    """Inverse of `encode`. Raises ValueError on anything that is not such a message."""
    cls = _BY_NUMBER.get(kind)
    if cls is None:
        raise ValueError(f"message kind {kind} is unknown")
    try:
        fields = json.loads(body)
        message: Message = cls(**{name: _rebuild(name, value) for name, value in fields.items()})
    except (TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
        raise ValueError(f"malformed {cls.__name__} message: {error}") from error
    return message


def _rebuild(name: str, value: Any) -> Any:
    if value is None:
        return None
    if name == "contribution":
        return Contribution(**value)
    if name == "record":
        return Record(**{key: _rebuild(key, item) for key, item in value.items()})
    if name in ("scaler", "next_scaler"):
        return Scaler(**value)
    if name == "checks":
        return tuple(Check(**{key: _rebuild(key, item) for key, item in check.items()}) for check in value)
    if name == "roles":
        return tuple((shard, _holders(holders)) for shard, holders in value)
    if name == "base":
        return tuple(_holders(holders) for holders in value)
    return _tuples(value)


def _holders(value: dict[str, Any]) -> Holders:
    return Holders(value["primary"], tuple(value["backups"]))


def _tuples(value: Any) -> Any:
    # A comprehension, not a generator: half the time of decoding was spent in switching between frames.
    return tuple([_tuples(item) if type(item) is list else item for item in value]) if type(value) is list else value
