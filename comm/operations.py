"""Collectives as objects: the tensors behind the rounds of `algorithms`. No threads, sockets or clocks.

A caller's tensor that lies in shared memory is read by peers in place; any other is staged. After an operation is done
its caller may change the tensor at once: whatever peers still read by then lies in memory of the operation's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from elastrain.comm import algorithms
from elastrain.comm.algorithms import AllReduce, Round

Reduction = Literal["sum", "avg", "min", "max", "prod", "band", "bor", "bxor"]

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
_CHUNK_ELEMENTS = 32 << 10  # so that the inner sums of a chunk stay in the cache
_NOTHING = torch.empty(0)


class Memory(Protocol):
    """Where staged tensors lie."""

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether peers on this host could read the contiguous tensor in place."""

    def scratch(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A 1-D tensor with any content that is not used again while a peer reads it."""


@dataclass(frozen=True, kw_only=True)
class Seat:
    """Where this member sits in its group when an operation begins."""

    rank: int
    world: int
    memory: Memory


class Operation(Protocol):
    """`offer` what the round's sends cut from, `take` every message, then `finish` the round."""

    rounds: tuple[Round, ...]
    words: str  # what it is and on what, for messages; equal on all members, or they disagree

    def offer(self, number: int) -> torch.Tensor: ...

    def take(self, number: int, rank: int, tensor: torch.Tensor) -> None: ...

    def finish(self, number: int) -> None: ...


def _staged(tensor: torch.Tensor, memory: Memory) -> torch.Tensor:
    copy = memory.scratch(tensor.numel(), tensor.dtype) if tensor.numel() else torch.empty(0, dtype=tensor.dtype)
    return copy.copy_(tensor.reshape(-1))


class Barrier:
    words = "barrier"

    def __init__(self, seat: Seat) -> None:
        self.rounds = algorithms.barrier(seat.rank, seat.world)

    def offer(self, number: int) -> torch.Tensor:
        return _NOTHING

    def take(self, number: int, rank: int, tensor: torch.Tensor) -> None:
        pass

    def finish(self, number: int) -> None:
        pass


class Broadcast:
    def __init__(self, seat: Seat, tensor: torch.Tensor, *, root: int) -> None:
        self.words = f"broadcast from rank {root} of {_describe(tensor)}"
        self.rounds = algorithms.broadcast(seat.rank, seat.world, tensor.numel(), root=root)
        self._tensor = tensor
        self._memory = seat.memory

    def offer(self, number: int) -> torch.Tensor:
        return _staged(self._tensor, self._memory)

    def take(self, number: int, rank: int, tensor: torch.Tensor) -> None:
        self._tensor.copy_(tensor.view(self._tensor.shape))

    def finish(self, number: int) -> None:
        pass


class AllGather:
    """`outs[r]` becomes rank r's `tensor`."""

    def __init__(self, seat: Seat, outs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        if len(outs) != seat.world or any(o.shape != tensor.shape or o.dtype != tensor.dtype for o in outs):
            raise ValueError(f"all_gather of {_describe(tensor)} fills {seat.world} tensors of the same kind")
        self.words = f"all_gather of {_describe(tensor)}"
        self.rounds = algorithms.exchange(seat.rank, seat.world, tensor.numel())
        self._outs = outs
        self._offered = _staged(tensor, seat.memory)
        outs[seat.rank].copy_(tensor)

    def offer(self, number: int) -> torch.Tensor:
        return self._offered

    def take(self, number: int, rank: int, tensor: torch.Tensor) -> None:
        self._outs[rank].copy_(tensor.view(self._outs[rank].shape))

    def finish(self, number: int) -> None:
        pass


class ExchangeReduce:
    """all_reduce in one round: everybody folds everything."""

    def __init__(self, seat: Seat, tensor: torch.Tensor, reduction: Reduction) -> None:
        self.words = f"all_reduce ({reduction}) of {_describe(tensor)}"
        self.rounds = algorithms.exchange(seat.rank, seat.world, tensor.numel())
        self._tensor, self._reduction = tensor, reduction
        # A copy that nobody changes: peers may read it after this operation is done.
        self._offered = tensor.reshape(-1).clone()
        self._parts: list[torch.Tensor] = [self._offered] * seat.world

    def offer(self, number: int) -> torch.Tensor:
        return self._offered

    def take(self, number: int, rank: int, tensor: torch.Tensor) -> None:
        self._parts[rank] = tensor

    def finish(self, number: int) -> None:
        out = torch.empty_like(self._offered)
        fold(self._parts, self._reduction, out)
        self._tensor.copy_(out.view(self._tensor.shape))


class ScatterGatherReduce:
    """all_reduce in two rounds: each rank folds one slice of everybody's tensor, then everybody takes all slices.

    When all slices have come, every peer has read its slice of mine: the caller's tensor is free again.
    """

    def __init__(self, seat: Seat, tensor: torch.Tensor, reduction: Reduction) -> None:
        self.words = f"all_reduce ({reduction}) of {_describe(tensor)}"
        self.rounds = algorithms.scatter_gather(seat.rank, seat.world, tensor.numel())
        self._slices = algorithms.cut(tensor.numel(), seat.world)
        self._rank, self._reduction = seat.rank, reduction
        self._memory = seat.memory
        in_place = tensor.is_contiguous() and seat.memory.owns(tensor)
        self._given = tensor.reshape(-1) if in_place else _staged(tensor, seat.memory)
        self._tensor = tensor
        self._result = self._given if in_place else _flat_or_new(tensor)
        self._sum = _NOTHING
        start, stop = self._slices[seat.rank]
        self._parts = [self._given[start:stop]] * seat.world

    def offer(self, number: int) -> torch.Tensor:
        return self._sum if number else self._given

    def take(self, number: int, rank: int, tensor: torch.Tensor) -> None:
        if number == 0:
            self._parts[rank] = tensor
        else:
            start, stop = self._slices[rank]
            self._result[start:stop].copy_(tensor)

    def finish(self, number: int) -> None:
        start, stop = self._slices[self._rank]
        if number == 0:
            own = self._given[start:stop]
            self._sum = self._memory.scratch(stop - start, own.dtype) if stop > start else own.clone()
            fold(self._parts, self._reduction, self._sum)
            self._parts = []
        else:
            self._result[start:stop].copy_(self._sum)
            if self._result.data_ptr() != self._tensor.data_ptr():
                self._tensor.copy_(self._result.view(self._tensor.shape))


def all_reduce(seat: Seat, tensor: torch.Tensor, reduction: Reduction) -> Operation:
    """In place. Raises ValueError for a reduction that the dtype does not have."""
    if reduction not in _COMBINE:
        raise ValueError(f"reductions are {', '.join(_COMBINE)}; got {reduction!r}")
    if reduction.startswith("b") and (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"{reduction} needs integers or booleans; got {tensor.dtype}")
    if reduction in ("min", "max") and tensor.is_complex():
        raise ValueError(f"complex numbers have no {reduction}")
    if reduction == "avg" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"avg needs floating point numbers; got {tensor.dtype}")
    choice, _reason = algorithms.choose_all_reduce(tensor.nbytes, seat.world)
    make = ExchangeReduce if choice is AllReduce.EXCHANGE else ScatterGatherReduce
    return make(seat, tensor, reduction)


def fold(parts: Sequence[torch.Tensor], reduction: Reduction, out: torch.Tensor) -> None:
    """Combine the ranks' flat tensors along `algorithms.tree` into `out`, which overlaps none of them.

    Half precision is accumulated in float32 and rounded once.
    """
    combine, steps = _COMBINE[reduction], algorithms.tree(len(parts))
    widen = out.dtype in (torch.float16, torch.bfloat16)
    for start in range(0, out.numel(), _CHUNK_ELEMENTS):
        piece = slice(start, start + _CHUNK_ELEMENTS)
        sums = [part[piece].float() if widen else part[piece] for part in parts]
        for left, right in steps:
            last = (left, right) == steps[-1] and not widen
            sums[left] = combine(sums[left], sums[right], out=out[piece]) if last else combine(sums[left], sums[right])
        if reduction == "avg":
            sums[0] = sums[0] / len(parts)
        if sums[0].data_ptr() != out[piece].data_ptr():
            out[piece].copy_(sums[0])


def _flat_or_new(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1) if tensor.is_contiguous() else torch.empty(tensor.numel(), dtype=tensor.dtype)


def _describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
