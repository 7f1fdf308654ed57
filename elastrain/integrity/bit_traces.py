"""Records of single micro-batches, operator by operator, and the first difference between two of them. Pure.

`elastrain doctor --bits` runs a script in several processes, and each of them records the same micro-batches.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

LOOP, MODEL, DATA = "the loop's body", "the model", "the dataset or its collate_fn"
"""Places that no module names: the code around the model, the model's own forward, and the loader."""
ANYWHERE = ""
"""The place of a source that was read in an unknown module."""


@dataclass(frozen=True, kw_only=True)
class OperatorCall:
    """One operator call of a micro-batch, or one of its values: the batch, the loss, or a parameter's gradient."""

    module: str
    """The innermost module that called it, or one of the places above."""
    what: str
    """Name of the operator, such as "aten.mul.Tensor", or of the value."""
    way: str = "forward"
    """"forward", "backward", or "recomputed" for a forward that a checkpoint runs again in a backward."""
    output: int = 0
    """Digest of what the operator returned."""
    inputs: int = 0
    """Digest of its arguments."""
    draws: str = ""
    """The generator that it draws from: "own" or "default"; empty if it draws nothing."""


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """One micro-batch as one process computed it."""

    number: int
    events: tuple[OperatorCall, ...]
    results: Mapping[str, int]
    """Name -> digest of the values that a job uses: the loss, gradients, running statistics, and figures."""
    changed: Mapping[str, str] = field(default_factory=dict)
    """Name of each attribute or buffer that the forward changed -> "number", "tensor" or "thing"."""
    sources: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Module -> sources of values that it read, such as "clock"."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The micro-batches that one process computed, in its order, and its number of threads."""

    threads: int
    micro_batches: tuple[Recorded, ...]

    def to_json(self) -> str:
        """Return the trace as JSON text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Trace:
        """Return the trace that `to_json` wrote. Raises KeyError, TypeError or ValueError for other text."""
        told = json.loads(text)
        made = [
            {**each, "events": tuple(OperatorCall(**event) for event in each["events"])}
            for each in told["micro_batches"]
        ]
        return cls(threads=told["threads"], micro_batches=tuple(Recorded(**each) for each in made))


@dataclass(frozen=True, kw_only=True)
class FirstDifference:
    """Two records of one micro-batch with different results, and the first event in which they differ."""

    one: Recorded
    other: Recorded
    at: OperatorCall
    """The first differing event, as in `one`."""
    same_inputs: bool
    """True if the operator got the same arguments in both, so that the operator itself made the difference."""
    same_way: bool
    """False if the two called different operators from here on."""


def difference(one: Recorded, other: Recorded) -> FirstDifference | None:
    """Return the first difference between two records of a micro-batch, or None if their results are equal.

    Operators whose results do not reach the loss or a gradient may differ.
    """
    if one.results == other.results:
        return None
    # Inputs are not compared here: memory that is about to be overwritten may differ, and what matters comes out again.
    for ours, theirs in zip(one.events, other.events, strict=False):
        same_way = (ours.module, ours.what, ours.way) == (theirs.module, theirs.what, theirs.way)
        if not same_way or ours.output != theirs.output:
            same = same_way and ours.inputs == theirs.inputs
            return FirstDifference(one=one, other=other, at=ours, same_inputs=same, same_way=same_way)
    # Behind equal events only a value that no operator made can differ, such as a weight or another number of them.
    names = [*one.results, *other.results]
    name = next(name for name in names if one.results.get(name) != other.results.get(name))
    return FirstDifference(
        one=one, other=other, at=OperatorCall(module=LOOP, what=name), same_inputs=False, same_way=False
    )


def first_difference(one: Trace, other: Trace) -> FirstDifference | None:
    """Return the first difference of a micro-batch of `other` to the first record of it in `one`, or None."""
    # Reversed, so that of several records of one micro-batch the first one stays.
    first = {each.number: each for each in reversed(one.micro_batches)}
    pairs = ((first[each.number], each) for each in other.micro_batches if each.number in first)
    return next(filter(None, (difference(*pair) for pair in pairs)), None)


def difference_by_place(one: Trace, other: Trace) -> FirstDifference | None:
    """Return the first difference of two traces with one order of micro-batches, or None."""
    return next(filter(None, map(difference, one.micro_batches, other.micro_batches)), None)
