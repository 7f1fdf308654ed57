"""The interface between a collective and its executor, and the arithmetic of reductions.

An `Operation` has rounds, offers a tensor in each and takes messages; a `Participant` is the member as an operation
sees it. The operations are in `exchanges`, `pulling` and `two_levels`; `calls` chooses one for each call. Once an
operation is done, its caller may change every tensor: whatever peers still read lies in the operation's own memory.

`fold` combines the ranks' tensors along `algorithms.tree`: bitwise equal on all members and between runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from elastrain.comm.collectives import algorithms, hosts
from elastrain.comm.collectives.algorithms import Round

Reduction = Literal["sum", "avg", "min", "max", "prod", "band", "bor", "bxor"]

CHUNK_BYTES = 4 << 20  # bytes of one chunk of a PulledReduce
NOTHING = torch.empty(0)  # offered in rounds without data
STAGE_BYTES = 4 * CHUNK_BYTES + 64 * 16  # two slices of sums, two chunks, and 64 elements of the widest dtype


class Memory(Protocol):
    """Source of the memory for staged tensors."""

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return True if peers on this host could read the contiguous tensor in place."""

    def scratch(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a 1-D tensor with any content. Its memory is not reused while a peer reads it."""


@dataclass(frozen=True, kw_only=True)
class Participant:
    """A member at the beginning of an operation: its rank, and the memory that the operation may use.

    `hosts`: the host of every rank, empty if all are on one host. `stage`: a function that returns the same
    `STAGE_BYTES` bytes each time, which all members read in place; None if members do not read each other's memory.
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
    """One collective: in each round, `offer` a tensor, `take` every message, then `finish`.

    `description`: the operation and its tensors, for messages. It must be equal on all members, otherwise the operation
    fails. `lends`: the offered tensor is the caller's own, which the caller may change after a failure. Such a tensor
    of a peer has been read before this operation offers its last round.
    """

    lends: bool
    rounds: tuple[Round, ...]
    description: str

    def offer(self, number: int) -> torch.Tensor:
        """Return the tensor from which this round's transfers are cut."""
        ...

    def take(self, number: int, rank: int, tensor: torch.Tensor) -> None:
        """Take a rank's message of this round. Raises ValueError if it does not fit."""
        ...

    def finish(self, number: int) -> None:
        """Complete a round in which all awaited messages were taken."""
        ...


MakeOperation = Callable[[Participant], Operation]
"""Function that makes an operation at the beginning of its execution. The participants are known only then."""


def describe(tensor: torch.Tensor) -> str:
    """Return dtype and shape of a tensor, for messages."""
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
# Small enough for the inner sums of a block to stay in the cache, large enough to outweigh the cost of the calls.
_BLOCK_ELEMENTS, _CONVERTED_BLOCK_ELEMENTS = 128 << 10, 32 << 10


_ACCUMULATED = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
}


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums of this dtype are accumulated.

    It is a wider one for half precision, float8, and unsigned integers that torch cannot add.
    """
    if dtype.is_floating_point and dtype.itemsize == 1:
        return torch.float32
    return _ACCUMULATED.get(dtype, dtype)


def fold(
    parts: Sequence[torch.Tensor],
    reduction: Reduction,
    out: torch.Tensor,
    *,
    steps: Sequence[tuple[int, int]] | None = None,
    count: int | None = None,
) -> None:
    """Reduce flat tensors along `steps` into `out`, which is one of them or overlaps none of them.

    Half precision and float8 are accumulated in float32, and rounded once if `out` has their dtype. The average of
    integers is their sum, which may overflow, divided and rounded toward zero, as NCCL does.

    Args:
        parts: One tensor per rank, or one partial sum per host.
        reduction: Name of the reduction.
        out: Tensor for the result.
        steps: Order of summation, as `algorithms.tree` (the default) gives it.
        count: Number of ranks that the parts stand for, for `avg`; by default one per part.
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
            rounding = None if inner.is_floating_point or inner.is_complex else "trunc"
            total = torch.div(total, count or len(parts), rounding_mode=rounding, out=total if steps else None)
        if total.data_ptr() != target.data_ptr():
            target.copy_(total)


def _places(steps: Sequence[tuple[int, int]], own: int) -> list[int]:
    """Return the part in whose memory each step puts its sum: `own` while that part is in the sum, else the left part.

    So part `own` may share its memory with the result: its elements have been read before the result overwrites them.
    """
    places, in_own = [], own  # the part that stands for the sum containing `own`
    for left, right in steps:
        places.append(own if in_own in (left, right) else left)
        in_own = left if in_own == right else in_own
    return places


def reason_against(reduction: Reduction, dtype: torch.dtype) -> str:
    """Return why this reduction of this dtype is refused, or "" if it works."""
    name = str(dtype).removeprefix("torch.")
    if reduction.startswith("b") and (dtype.is_floating_point or dtype.is_complex):
        return f"{reduction} needs integers or booleans; got {dtype}"
    if reduction in ("min", "max") and dtype.is_complex:
        return f"complex numbers have no {reduction}"
    if reduction == "avg" and dtype is torch.bool:
        return "booleans have no avg: convert them to integers or floating point numbers first"
    if dtype is torch.uint64 and reduction in ("sum", "avg", "min", "max"):
        return f"torch cannot compute the {reduction} of {name}: convert the tensor to int64 or float64 first"
    if dtype is torch.float4_e2m1fn_x2:
        return f"torch cannot compute with {name}: convert the tensor to another dtype first"
    return ""


def check_reduction(reduction: Reduction, tensor: torch.Tensor) -> None:
    """Check that the reduction exists and works for this dtype. Raises ValueError otherwise."""
    if reduction not in _COMBINE:
        raise ValueError(f"reductions are {', '.join(_COMBINE)}; got {reduction!r}")
    if tensor.layout is not torch.strided:
        raise ValueError(f"reductions take dense tensors, and this one is {tensor.layout}: call to_dense() first")
    if reason := reason_against(reduction, tensor.dtype):
        raise ValueError(reason)


def premultiplied(tensor: torch.Tensor, factor: float | torch.Tensor) -> torch.Tensor:
    """Return the tensor times `factor`, rounded once. Raises ValueError if the tensor has integers or booleans."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or reason_against("sum", tensor.dtype):
        raise ValueError(f"premul_sum needs floating point or complex numbers; got {tensor.dtype}")
    wide = accumulate_dtype(tensor.dtype)
    factor = factor.to(wide) if isinstance(factor, torch.Tensor) else factor
    return (tensor.detach().to(wide) * factor).to(tensor.dtype)
