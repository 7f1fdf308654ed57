"""What a collective is to its executor: rounds, what is offered and taken in each, and the memory that it may use.

The kinds of operations are in `exchanges` and `pulling`; which one a call becomes is in `collectives`. After an
operation is done its caller may change every tensor at once: whatever peers still read by then lies in memory of the
operation's own.

Combining the ranks' tensors along `algorithms.tree`: bitwise equal on all members and between runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from elastrain.comm.collectives import algorithms, hosts
from elastrain.comm.collectives.algorithms import Round

Reduction = Literal["sum", "avg", "min", "max", "prod", "band", "bor", "bxor"]

CHUNK_BYTES = 4 << 20  # of a PulledReduce
NOTHING = torch.empty(0)  # offered where nothing is
STAGE_BYTES = 4 * CHUNK_BYTES + 64 * 16  # two slices of sums, two chunks, and 64 elements of the widest dtype


class Memory(Protocol):
    """Gives the memory in which staged tensors lie."""

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether peers on this host could read the contiguous tensor in place."""

    def scratch(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A 1-D tensor with any content that is not used again while a peer reads it."""


@dataclass(frozen=True, kw_only=True)
class Participant:
    """A member as an operation sees it when it begins: its rank, and the memory that it may use.

    `hosts`: the host of every rank; none where all are on one. `stage`: gives `STAGE_BYTES` bytes that all members read
    in place, always the same; None where they do not read each other's memory.
    """

    rank: int
    world: int
    memory: Memory
    stage: Callable[[], torch.Tensor] | None = None
    hosts: tuple[int, ...] = ()

    @property
    def tree(self) -> tuple[tuple[int, int], ...]:
        """The order of summation."""
        return hosts.tree(self.hosts or (0,) * self.world)


class Operation(Protocol):
    """`offer` what the round's sends cut from, `take` every message, then `finish` the round.

    `description`: what it is and on what, for messages; equal on all members, or they disagree. `take` raises
    ValueError for a message that does not fit. `lends`: what it offers is its caller's tensor, which may change after a
    failure; such tensors of others have been read before the last round is offered.
    """

    lends: bool
    rounds: tuple[Round, ...]
    description: str

    def offer(self, number: int) -> torch.Tensor: ...

    def take(self, number: int, rank: int, tensor: torch.Tensor) -> None: ...

    def finish(self, number: int) -> None: ...


MakeOperation = Callable[[Participant], Operation]
"""Makes an operation when its turn has come: only then is it known who takes part."""


def describe(tensor: torch.Tensor) -> str:
    """A tensor in messages: its dtype and shape."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


_COMBINE: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "prod": torch.mul,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
# So that the inner sums of a block stay in the cache, and its calls cost less than what they add.
_BLOCK_ELEMENTS, _CONVERTED_BLOCK_ELEMENTS = 128 << 10, 32 << 10


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums of this one are made: float32 for half precision."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def fold(
    parts: Sequence[torch.Tensor],
    reduction: Reduction,
    out: torch.Tensor,
    *,
    steps: Sequence[tuple[int, int]] | None = None,
    count: int | None = None,
) -> None:
    """Combine flat tensors along `steps` into `out`, which is one of them or overlaps none.

    `steps`: as of `algorithms.tree`, the default. `count`: how many ranks the parts are of, for `avg`, if not one each.
    Half precision is accumulated in float32 and rounded once, where `out` is of half precision.
    """
    combine, steps = _COMBINE[reduction], algorithms.tree(len(parts)) if steps is None else steps
    inner = accumulate_dtype(out.dtype)
    converted = any(tensor.dtype != inner for tensor in (*parts, out))
    own = next((rank for rank, part in enumerate(parts) if part.data_ptr() == out.data_ptr()), 0)
    places = _places(steps, own)
    length = _CONVERTED_BLOCK_ELEMENTS if converted else _BLOCK_ELEMENTS
    sums = {place: torch.empty(min(length, out.numel()), dtype=inner) for place in places if converted or place != own}
    for at in range(0, out.numel(), length):  # torch.split takes as long as five slices
        target = out[at : at + length]
        now = [part[at : at + length] for part in parts]
        if converted:
            now = [block.to(inner) for block in now]
        for (left, right), place in zip(steps, places, strict=True):
            there = sums[place][: target.numel()] if place in sums else target
            now[left] = combine(now[left], now[right], out=there)
        total = now[0]
        if reduction == "avg":
            total = torch.div(total, count or len(parts), out=total if steps else None)
        if total.data_ptr() != target.data_ptr():
            target.copy_(total)


def _places(steps: Sequence[tuple[int, int]], own: int) -> list[int]:
    """For each step the part in whose place its sum is made: `own` as long as that part is in the sum, else the left.

    So the place of part `own` can be that of the result: what lies there has been read when something else comes there.
    """
    places, in_own = [], own  # the part that the sum with `own` in it counts as
    for left, right in steps:
        places.append(own if in_own in (left, right) else left)
        in_own = left if in_own == right else in_own
    return places


def check_reduction(reduction: Reduction, tensor: torch.Tensor) -> None:
    """Raises ValueError for a reduction that is not offered, or not for this dtype."""
    if reduction not in _COMBINE:
        raise ValueError(f"reductions are {', '.join(_COMBINE)}; got {reduction!r}")
    if reduction.startswith("b") and (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"{reduction} needs integers or booleans; got {tensor.dtype}")
    if reduction in ("min", "max") and tensor.is_complex():
        raise ValueError(f"complex numbers have no {reduction}")
    if reduction == "avg" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"avg needs floating point numbers; got {tensor.dtype}")
