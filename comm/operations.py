"""Collectives as objects: the tensors behind the rounds of `algorithms`. No threads, sockets or clocks.

After an operation is done its caller may change every tensor at once: whatever peers still read by then lies in memory
of the operation's own. Sums are made along `algorithms.tree` and are bitwise equal on all members and between runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from elastrain.comm import algorithms
from elastrain.comm.algorithms import AllReduce, Partners, Round, Send

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
CHUNK_BYTES = 4 << 20  # of a PulledReduce
STAGE_BYTES = 4 * CHUNK_BYTES + 64 * 16  # two chunks, two slices of sums, and 64 elements of the widest dtype
_CHUNK_ELEMENTS = 32 << 10  # so that the inner sums of a chunk stay in the cache


class Memory(Protocol):
    """Where staged tensors lie. `pulls`: all members of the group read each other's memory."""

    pulls: bool

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether peers on this host could read the contiguous tensor in place."""

    def scratch(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A 1-D tensor with any content that is not used again while a peer reads it."""

    def stage(self) -> torch.Tensor:
        """`STAGE_BYTES` bytes that all members read in place, always the same. Only where `pulls`."""


@dataclass(frozen=True, kw_only=True)
class Seat:
    """Where this member sits in its group when an operation begins."""

    rank: int
    world: int
    memory: Memory


class Operation(Protocol):
    """`offer` what the round's sends cut from, `take` every message, then `finish` the round.

    `words`: what it is and on what, for messages; equal on all members, or they disagree. `take` raises ValueError for
    a message that does not fit.
    """

    rounds: tuple[Round, ...]
    words: str

    def offer(self, number: int) -> torch.Tensor: ...

    def take(self, number: int, rank: int, tensor: torch.Tensor) -> None: ...

    def finish(self, number: int) -> None: ...


class Barrier:
    def __init__(self, seat: Seat, words: str = "barrier") -> None:
        self.words = words
        self.rounds = algorithms.barrier(seat.rank, seat.world)

    def offer(self, number: int) -> torch.Tensor:
        return torch.empty(0)

    def take(self, number: int, rank: int, tensor: torch.Tensor) -> None:
        pass

    def finish(self, number: int) -> None:
        pass


class Exchange:
    """One round in which each partner gets a tensor and gives one. `given` and `wanted` are by rank; mine is copied."""

    def __init__(
        self,
        seat: Seat,
        words: str,
        partners: Partners,
        *,
        given: Mapping[int, torch.Tensor],
        wanted: Mapping[int, torch.Tensor],
    ) -> None:
        self.words = words
        self._wanted = wanted
        self._staged, places = _stage({id(given[to]): given[to] for to in partners.to}, seat.memory)
        sends = tuple(Send(to=to, start=places[id(given[to])][0], stop=places[id(given[to])][1]) for to in partners.to)
        self.rounds: tuple[Round, ...] = (Round(sends=sends, awaits=partners.of),)
        if seat.rank in wanted and seat.rank in given:
            self.take(0, seat.rank, given[seat.rank])

    def offer(self, number: int) -> torch.Tensor:
        return self._staged

    def take(self, number: int, rank: int, tensor: torch.Tensor) -> None:
        wanted = self._wanted[rank]
        if tensor.numel() != wanted.numel() or (tensor.numel() and tensor.dtype != wanted.dtype):
            raise ValueError(f"{_describe(wanted)} wanted from rank {rank}, {_describe(tensor)} given")
        if wanted.numel():
            wanted.copy_(tensor.view(wanted.shape))

    def finish(self, number: int) -> None:
        pass


class ExchangeReduce(Exchange):
    """As Exchange, but what is received is folded into `out`; rank r gives one of my kind for it."""

    def __init__(
        self,
        seat: Seat,
        words: str,
        partners: Partners,
        *,
        given: Mapping[int, torch.Tensor],
        out: torch.Tensor | None,
        reduction: Reduction,
    ) -> None:
        super().__init__(seat, words, partners, given=given, wanted={})
        self._out, self._reduction = out, reduction
        # `out` may be the tensor that is given: it is written only when all parts are there.
        self._parts: dict[int, torch.Tensor] = {} if out is None else {seat.rank: given[seat.rank].reshape(-1)}

    def take(self, number: int, rank: int, tensor: torch.Tensor) -> None:
        own = next(iter(self._parts.values()))
        if tensor.numel() != own.numel() or (tensor.numel() and tensor.dtype != own.dtype):
            raise ValueError(f"{_describe(own)} is reduced here, rank {rank} gives {_describe(tensor)}")
        self._parts[rank] = tensor

    def finish(self, number: int) -> None:
        if self._out is not None and self._out.numel():
            summed = torch.empty(self._out.numel(), dtype=self._out.dtype)
            fold([self._parts[rank] for rank in sorted(self._parts)], self._reduction, summed)
            self._out.copy_(summed.view(self._out.shape))


class ScatterGatherReduce:
    """all_reduce in two rounds: each rank folds one slice of everybody's tensor, then everybody takes all slices.

    When all slices have come, every peer has read its slice of mine: the caller's tensor is free again. So a tensor in
    shared memory needs no staging.
    """

    def __init__(self, seat: Seat, words: str, tensor: torch.Tensor, reduction: Reduction) -> None:
        self.words = words
        self.rounds = algorithms.scatter_gather(seat.rank, seat.world, tensor.numel())
        self._slices = algorithms.cut(tensor.numel(), seat.world)
        self._rank, self._reduction = seat.rank, reduction
        self._memory = seat.memory
        in_place = tensor.is_contiguous() and seat.memory.owns(tensor)
        self._given = tensor.view(-1) if in_place else _stage({0: tensor}, seat.memory)[0]
        self._tensor = tensor
        self._result = tensor.view(-1) if tensor.is_contiguous() else torch.empty(tensor.numel(), dtype=tensor.dtype)
        self._sum = self._given[:0]
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
            if stop > start:
                self._sum = self._memory.scratch(stop - start, self._given.dtype)
                fold(self._parts, self._reduction, self._sum)
            self._parts = []
        else:
            self._result[start:stop].copy_(self._sum)
            if not self._tensor.is_contiguous():
                self._tensor.copy_(self._result.view(self._tensor.shape))


def roll_call(seat: Seat) -> Operation:
    nothing = dict.fromkeys(range(seat.world), torch.empty(0))
    partners = algorithms.all_to_all(seat.rank, seat.world)
    return Exchange(seat, "roll call", partners, given=nothing, wanted=nothing)


class PulledReduce:
    """all_reduce where all members read each other's memory: in chunks that stay in the caches, three stages at once.

    In turn t a rank copies chunk t of its tensor to where the others see it, folds its slice of chunk t - 1 from all
    ranks, and takes the others' sums of chunk t - 2. Of everything there are two places: what is written over in turn
    t was read by the others before they published turn t - 1.

    A tensor in shared memory is read and summed in place. The others take the sums from there, so its rank also waits
    until all have published the last turn, by which they have.
    """

    def __init__(self, seat: Seat, words: str, tensor: torch.Tensor, reduction: Reduction) -> None:
        self.words = words
        self._tensor, self._reduction = tensor, reduction
        self._flat = tensor.view(-1) if tensor.is_contiguous() else tensor.reshape(-1)
        self._in_place = tensor.is_contiguous() and seat.memory.owns(tensor)
        self._rank, self._world = seat.rank, seat.world
        self._chunk = CHUNK_BYTES // tensor.itemsize
        self._chunks = algorithms.chunks(tensor.numel(), self._chunk)
        # Its length tells whether a rank offers its tensor or its stage.
        self._stage_numel = 4 * self._chunk + (64 if tensor.numel() == 4 * self._chunk else 0)
        self._stage = self._flat if self._in_place else seat.memory.stage().view(tensor.dtype)[: self._stage_numel]
        self._offered = self._flat if self._in_place else self._stage
        self._parts: dict[int, torch.Tensor] = {}
        self.rounds = algorithms.pipeline(
            seat.rank, seat.world, len(self._chunks), len(self._offered), stays=self._in_place
        )

    def offer(self, number: int) -> torch.Tensor:
        self._stage_chunk(number)
        self._fold_chunk(number - 1)
        self._gather_chunk(number - 2)
        return self._offered

    def take(self, number: int, rank: int, tensor: torch.Tensor) -> None:
        if tensor.dtype != self._flat.dtype or tensor.numel() not in (self._flat.numel(), self._stage_numel):
            raise ValueError(f"{_describe(self._flat)} is reduced here, rank {rank} gives {_describe(tensor)}")
        self._parts[rank] = tensor

    def finish(self, number: int) -> None:
        if number == len(self.rounds) - 1 and not self._tensor.is_contiguous():
            self._tensor.copy_(self._flat.view(self._tensor.shape))

    def _slices(self, index: int) -> tuple[int, tuple[tuple[int, int], ...]]:
        """Where the chunk begins, and the ranks' slices in it."""
        start, stop = self._chunks[index]
        return start, algorithms.cut(stop - start, self._world)

    def _stage_chunk(self, index: int) -> None:
        if self._in_place or index >= len(self._chunks):
            return
        start, slices = self._slices(index)
        place = self._stage[(2 + index % 2) * self._chunk :]
        mine, last = slices[self._rank], slices[-1][1]
        for first, end in ((0, mine[0]), (mine[1], last)):  # nobody asks for my own slice
            if end > first:
                place[first:end].copy_(self._flat[start + first : start + end])

    def _fold_chunk(self, index: int) -> None:
        if not 0 <= index < len(self._chunks):
            return
        start, slices = self._slices(index)
        first, end = slices[self._rank]
        if end == first:
            return
        own = self._flat[start + first : start + end]
        parts = [own] * self._world
        for rank, tensor in self._parts.items():
            at = start if tensor.numel() == self._flat.numel() else (2 + index % 2) * self._chunk
            parts[rank] = tensor[at + first : at + end]
        fold(parts, self._reduction, own)
        if not self._in_place:
            self._stage[index % 2 * self._chunk :][: end - first].copy_(own)

    def _gather_chunk(self, index: int) -> None:
        if not 0 <= index < len(self._chunks):
            return
        start, slices = self._slices(index)
        for rank, tensor in self._parts.items():
            first, end = slices[rank]
            if end > first:
                at = start + first if tensor.numel() == self._flat.numel() else index % 2 * self._chunk
                self._flat[start + first : start + end].copy_(tensor[at : at + end - first])


def broadcast(seat: Seat, tensor: torch.Tensor, root: int) -> Operation:
    partners = algorithms.one_to_others(seat.rank, seat.world, root)
    words = f"broadcast from rank {root} of {_describe(tensor)}"
    return Exchange(seat, words, partners, given=dict.fromkeys(partners.to, tensor), wanted={root: tensor})


def all_gather(seat: Seat, outs: Sequence[torch.Tensor], tensor: torch.Tensor) -> Operation:
    _check_count("all_gather", outs, seat)
    given, wanted = dict.fromkeys(range(seat.world), tensor), dict(enumerate(outs))
    return Exchange(
        seat, f"all_gather of {tensor.dtype}", algorithms.all_to_all(seat.rank, seat.world), given=given, wanted=wanted
    )


def gather(seat: Seat, outs: Sequence[torch.Tensor] | None, tensor: torch.Tensor, root: int) -> Operation:
    if seat.rank == root:
        _check_count("gather", outs or (), seat)
    partners = algorithms.others_to_one(seat.rank, seat.world, root)
    given, wanted = dict.fromkeys([*partners.to, seat.rank], tensor), dict(enumerate(outs or ()))
    return Exchange(seat, f"gather to rank {root} of {tensor.dtype}", partners, given=given, wanted=wanted)


def scatter(seat: Seat, tensor: torch.Tensor, given: Sequence[torch.Tensor] | None, root: int) -> Operation:
    if seat.rank == root:
        _check_count("scatter", given or (), seat)
    partners = algorithms.one_to_others(seat.rank, seat.world, root)
    words = f"scatter from rank {root} of {tensor.dtype}"
    return Exchange(seat, words, partners, given=dict(enumerate(given or ())), wanted={root: tensor})


def all_to_all(seat: Seat, outs: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> Operation:
    _check_count("all_to_all", outs, seat)
    _check_count("all_to_all", given, seat)
    partners = algorithms.all_to_all(seat.rank, seat.world)
    return Exchange(
        seat, f"all_to_all of {given[0].dtype}", partners, given=dict(enumerate(given)), wanted=dict(enumerate(outs))
    )


def reduce(seat: Seat, tensor: torch.Tensor, root: int, reduction: Reduction) -> Operation:
    _check_reduction(reduction, tensor)
    partners = algorithms.others_to_one(seat.rank, seat.world, root)
    words = f"reduce ({reduction}) to rank {root} of {_describe(tensor)}"
    given = dict.fromkeys([*partners.to, seat.rank], tensor)
    out = tensor if seat.rank == root else None
    return ExchangeReduce(seat, words, partners, given=given, out=out, reduction=reduction)


def reduce_scatter(seat: Seat, out: torch.Tensor, given: Sequence[torch.Tensor], reduction: Reduction) -> Operation:
    _check_reduction(reduction, out)
    _check_count("reduce_scatter", given, seat)
    partners = algorithms.all_to_all(seat.rank, seat.world)
    words = f"reduce_scatter ({reduction}) of {out.dtype}"
    return ExchangeReduce(seat, words, partners, given=dict(enumerate(given)), out=out, reduction=reduction)


def all_reduce(seat: Seat, tensor: torch.Tensor, reduction: Reduction) -> Operation:
    _check_reduction(reduction, tensor)
    words = f"all_reduce ({reduction}) of {_describe(tensor)}"
    choice, _reason = algorithms.choose_all_reduce(tensor.nbytes, seat.world, pulled=seat.memory.pulls)
    if choice is AllReduce.SCATTER_GATHER:
        return ScatterGatherReduce(seat, words, tensor, reduction)
    if choice is AllReduce.PIPELINE:
        return PulledReduce(seat, words, tensor, reduction)
    partners = algorithms.all_to_all(seat.rank, seat.world)
    given = dict.fromkeys(range(seat.world), tensor)
    return ExchangeReduce(seat, words, partners, given=given, out=tensor, reduction=reduction)


def fold(parts: Sequence[torch.Tensor], reduction: Reduction, out: torch.Tensor) -> None:
    """Combine the ranks' flat tensors along `algorithms.tree` into `out`, which is one of them or overlaps none.

    Half precision is accumulated in float32 and rounded once.
    """
    combine, steps = _COMBINE[reduction], algorithms.tree(len(parts))
    widen = out.dtype in (torch.float16, torch.bfloat16)
    inner = torch.float32 if widen else out.dtype
    sums = {left: torch.empty(min(_CHUNK_ELEMENTS, out.numel()), dtype=inner) for left, _ in steps[:-1]}
    for start in range(0, out.numel(), _CHUNK_ELEMENTS):
        target = out[start : start + _CHUNK_ELEMENTS]
        now = [part[start : start + _CHUNK_ELEMENTS] for part in parts]
        if widen:
            now = [part.float() for part in now]
        for left, right in steps[:-1]:
            now[left] = combine(now[left], now[right], out=sums[left][: target.numel()])
        if steps and not widen:
            total = combine(now[steps[-1][0]], now[steps[-1][1]], out=target)
        else:
            total = combine(now[steps[-1][0]], now[steps[-1][1]]) if steps else now[0]
        if reduction == "avg":
            total = torch.div(total, len(parts), out=total) if total is target else total / len(parts)
        if total is not target and total.data_ptr() != target.data_ptr():
            target.copy_(total)


def _stage(tensors: Mapping[int, torch.Tensor], memory: Memory) -> tuple[torch.Tensor, dict[int, tuple[int, int]]]:
    """Copy tensors of one dtype one after the other; returns the copy and where each lies in it."""
    places: dict[int, tuple[int, int]] = {}
    total, dtype = sum(tensor.numel() for tensor in tensors.values()), torch.float32
    for key, tensor in tensors.items():
        start = max((stop for _, stop in places.values()), default=0)
        places[key], dtype = (start, start + tensor.numel()), tensor.dtype
    staged = memory.scratch(total, dtype) if total else torch.empty(0, dtype=dtype)
    for key, tensor in tensors.items():
        start, stop = places[key]
        staged[start:stop].view(tensor.shape).copy_(tensor)
    return staged, places


def _check_count(what: str, tensors: Sequence[torch.Tensor], seat: Seat) -> None:
    if len(tensors) != seat.world:
        raise ValueError(f"{what} needs one tensor for each of {seat.world} ranks; got {len(tensors)}")


def _check_reduction(reduction: Reduction, tensor: torch.Tensor) -> None:
    if reduction not in _COMBINE:
        raise ValueError(f"reductions are {', '.join(_COMBINE)}; got {reduction!r}")
    if reduction.startswith("b") and (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"{reduction} needs integers or booleans; got {tensor.dtype}")
    if reduction in ("min", "max") and tensor.is_complex():
        raise ValueError(f"complex numbers have no {reduction}")
    if reduction == "avg" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"avg needs floating point numbers; got {tensor.dtype}")


def _describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
