"""What a collective is to its executor: rounds, what is offered and taken in each, and the memory that it may use.

The kinds of operations are in `exchanges` and `pulling`; which one a call becomes is in `collectives`. After an
operation is done its caller may change every tensor at once: whatever peers still read by then lies in memory of the
operation's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from elastrain.comm.collectives import hosts
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
