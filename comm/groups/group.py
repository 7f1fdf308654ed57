"""Groups: named lists of members over a communicator, with the collectives that a program calls.

Making a group costs nothing and says nothing to anybody: members that use the same name and the same list belong
together. An edit of the view edits every group in place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from elastrain.comm.collectives import calls
from elastrain.comm.collectives.devices import Here, by_host, is_far
from elastrain.comm.collectives.operations import Operation, Reduction, Seat
from elastrain.comm.groups.work import Received, Work

MakeOperation = Callable[[Seat], Operation]


class Runner(Protocol):
    """What executes operations, in order per group."""

    def submit(
        self, group: Group, make: MakeOperation, timeout_s: float | None, *, inline: bool, barrier: bool = False
    ) -> Work: ...

    def post(self, group: Group, tensor: Tensor, to: int, tag: int) -> Work: ...

    def await_letter(
        self, group: Group, out: Tensor, of: int | None, tag: int, timeout_s: float | None
    ) -> Received: ...


class Group:
    """`members` in rank order. Every call returns at once with a Work; `wait()` raises how it failed.

    With `inline` a call may do the work itself before it returns, which saves the change of threads: for callers that
    would wait at once.

    A tensor must not be touched between the call and the end of its Work, and may be changed right after. Operations on
    one group are executed in the order of the calls, which must be the same on all members.

    Reductions combine the ranks along a fixed binary tree (`hosts.tree`): those of each host first, then the hosts.
    Bitwise equal on all members, for all algorithms and sizes, and between runs whose members are placed alike; half
    precision is accumulated in float32. A large all_reduce of a tensor of `empty` is done in place; other tensors are
    staged, those of CUDA devices in pinned host memory.
    """

    def __init__(self, runner: Runner, *, name: str, me: str, members: Sequence[str], timeout_s: float) -> None:
        self.name = name
        self.timeout_s = timeout_s
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

    def barrier(self, *, words: str = "barrier", timeout_s: float | None = None, inline: bool = False) -> Work:
        """`words`: what all members must agree about; who does not ends it for all, with Aborted that shows both."""
        return self._runner.submit(
            self, lambda seat: calls.barrier(seat, words), timeout_s, inline=inline, barrier=True
        )

    def roll_call(self, *, timeout_s: float | None = None, inline: bool = False) -> Work:
        """A barrier in which everybody tells everybody: its Timeout names all that are missing."""
        return self._runner.submit(self, calls.roll_call, timeout_s, inline=inline)

    def broadcast(self, tensor: Tensor, *, root: int = 0, timeout_s: float | None = None, inline: bool = False) -> Work:
        """`tensor` becomes rank `root`'s, in place."""
        self._check_rank(root)
        return self._submit(
            lambda seat, host: calls.broadcast(
                seat, host.given(tensor) if seat.rank == root else host.wanted(tensor), root
            ),
            (tensor,),
            timeout_s,
            inline=inline,
        )

    def all_gather(
        self, outs: Sequence[Tensor], tensor: Tensor, *, timeout_s: float | None = None, inline: bool = False
    ) -> Work:
        """`outs[r]` becomes rank r's `tensor`; sizes may differ between ranks."""
        return self._submit(
            lambda seat, host: calls.all_gather(seat, [host.wanted(out) for out in outs], host.given(tensor)),
            (*outs, tensor),
            timeout_s,
            inline=inline,
        )

    def gather(
        self,
        outs: Sequence[Tensor] | None,
        tensor: Tensor,
        *,
        root: int = 0,
        timeout_s: float | None = None,
        inline: bool = False,
    ) -> Work:
        """On `root`, `outs[r]` becomes rank r's `tensor`; elsewhere `outs` is None."""
        self._check_rank(root)
        return self._submit(
            lambda seat, host: calls.gather(
                seat, None if outs is None else [host.wanted(out) for out in outs], host.given(tensor), root
            ),
            (*(outs or ()), tensor),
            timeout_s,
            inline=inline,
        )

    def scatter(
        self,
        tensor: Tensor,
        given: Sequence[Tensor] | None,
        *,
        root: int = 0,
        timeout_s: float | None = None,
        inline: bool = False,
    ) -> Work:
        """Rank r's `tensor` becomes `given[r]` of `root`; elsewhere `given` is None."""
        self._check_rank(root)
        return self._submit(
            lambda seat, host: calls.scatter(
                seat, host.wanted(tensor), None if given is None else [host.given(one) for one in given], root
            ),
            (tensor, *(given or ())),
            timeout_s,
            inline=inline,
        )

    def all_to_all(
        self, outs: Sequence[Tensor], given: Sequence[Tensor], *, timeout_s: float | None = None, inline: bool = False
    ) -> Work:
        """`outs[r]` becomes rank r's `given[mine]`; sizes may differ."""
        return self._submit(
            lambda seat, host: calls.all_to_all(
                seat, [host.wanted(out) for out in outs], [host.given(one) for one in given]
            ),
            (*outs, *given),
            timeout_s,
            inline=inline,
        )

    def all_reduce(
        self, tensor: Tensor, reduction: Reduction = "sum", *, timeout_s: float | None = None, inline: bool = False
    ) -> Work:
        """In place. `avg` divides the sum; the bitwise reductions need integers or booleans."""
        return self._submit(
            lambda seat, host: calls.all_reduce(seat, host.changed(tensor), reduction),
            (tensor,),
            timeout_s,
            inline=inline,
        )

    def reduce(
        self,
        tensor: Tensor,
        reduction: Reduction = "sum",
        *,
        root: int = 0,
        timeout_s: float | None = None,
        inline: bool = False,
    ) -> Work:
        """As all_reduce, but only `root`'s tensor changes."""
        self._check_rank(root)
        return self._submit(
            lambda seat, host: calls.reduce(
                seat, host.changed(tensor) if seat.rank == root else host.given(tensor), root, reduction
            ),
            (tensor,),
            timeout_s,
            inline=inline,
        )

    def reduce_scatter(
        self,
        out: Tensor,
        given: Sequence[Tensor],
        reduction: Reduction = "sum",
        *,
        timeout_s: float | None = None,
        inline: bool = False,
    ) -> Work:
        """`out` becomes the reduction of all ranks' `given[mine]`; sizes may differ between ranks."""
        return self._submit(
            lambda seat, host: calls.reduce_scatter(
                seat, host.wanted(out), [host.given(one) for one in given], reduction
            ),
            (out, *given),
            timeout_s,
            inline=inline,
        )

    def _submit(
        self,
        make: Callable[[Seat, Here], Operation],
        tensors: Iterable[Tensor],
        timeout_s: float | None,
        *,
        inline: bool,
    ) -> Work:
        return self._runner.submit(self, by_host(make, tensors), timeout_s, inline=inline)

    def send(self, tensor: Tensor, to: int, *, tag: int = 0) -> Work:
        """Done as soon as the tensor is copied. Messages of one tag arrive in order."""
        self._check_rank(to)
        is_far(tensor)  # refused here, if at all; it is copied before this returns
        return self._runner.post(self, tensor, to, tag)

    def recv(self, tensor: Tensor, of: int | None = None, *, tag: int = 0, timeout_s: float | None = None) -> Received:
        """`tensor` becomes what rank `of` (None: anybody) sent under this tag."""
        if of is not None:
            self._check_rank(of)
        if is_far(tensor):  # the message is written beside what its caller submits: what went before must be done
            torch.cuda.current_stream(tensor.device).synchronize()
        return self._runner.await_letter(self, tensor, of, tag, timeout_s)

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise ValueError(f"a rank of group {self.name!r} is at least 0 and below {self.size}; got {rank}")
