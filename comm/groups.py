"""Groups: named lists of members over a communicator, with the collectives that a program calls.

Making a group costs nothing and says nothing to anybody: members that use the same name and the same list belong
together. An edit of the view edits every group in place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from elastrain.comm.operations import AllGather, Barrier, Broadcast, Operation, Reduction, Seat, all_reduce
from elastrain.comm.work import Work

MakeOperation = Callable[[Seat], Operation]


class Runner(Protocol):
    """What executes operations, in order per group."""

    def submit(self, group: Group, make: MakeOperation, timeout_s: float | None) -> Work: ...


class Group:
    """`members` in rank order. Every call returns at once with a Work; `wait()` raises how it failed.

    A tensor must not be touched between the call and the end of its Work, and may be changed right after. Operations on
    one group are executed in the order of the calls, which must be the same on all members. Tensors of `empty` are read
    by members on this host in place; others are staged.
    """

    def __init__(self, runner: Runner, *, name: str, me: str, members: Sequence[str]) -> None:
        self.name = name
        self.me = me
        self.members = tuple(members)
        self.number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
        self._runner = runner
        if me not in self.members or len(set(self.members)) != len(self.members):
            raise ValueError(f"group {name!r} must list every member once, {me!r} included; got {self.members}")

    @property
    def rank(self) -> int:
        return self.members.index(self.me)

    @property
    def size(self) -> int:
        return len(self.members)

    def barrier(self, *, timeout_s: float | None = None) -> Work:
        return self._runner.submit(self, Barrier, timeout_s)

    def broadcast(self, tensor: torch.Tensor, *, root: int = 0, timeout_s: float | None = None) -> Work:
        """`tensor` becomes rank `root`'s, in place."""
        if not 0 <= root < self.size:
            raise ValueError(f"root is a rank below {self.size}; got {root}")
        return self._runner.submit(self, lambda seat: Broadcast(seat, tensor, root=root), timeout_s)

    def all_gather(self, outs: Sequence[torch.Tensor], tensor: torch.Tensor, *, timeout_s: float | None = None) -> Work:
        """`outs[r]` becomes rank r's `tensor`; all have one shape and dtype."""
        return self._runner.submit(self, lambda seat: AllGather(seat, outs, tensor), timeout_s)

    def all_reduce(self, tensor: torch.Tensor, reduction: Reduction = "sum", *, timeout_s: float | None = None) -> Work:
        """In place. Ranks are combined along a fixed binary tree: bitwise equal on all members and between runs.

        Half precision is accumulated in float32. `avg` divides the sum; the bitwise ones need integers or booleans.
        """
        return self._runner.submit(self, lambda seat: all_reduce(seat, tensor, reduction), timeout_s)
