"""Groups: named lists of members over a communicator, with the collectives that a program calls.

Making a group sends no message: members that use the same name and the same list form a group. An edit of the view
changes every group in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from elastrain.comm.collectives import calls
from elastrain.comm.collectives.devices import HostTensors, is_far, staged_on_host
from elastrain.comm.collectives.reducing import Operation, Participant, Reduction
from elastrain.comm.groups.dispatcher import Dispatcher
from elastrain.comm.groups.members import MemberList
from elastrain.comm.groups.works import Work


class Group:
    """A list of members in rank order, with collectives. Every call returns a Work at once; `wait()` raises its error.

    With `inline`, the calling thread may execute the operation before the call returns. This saves the change of
    threads, for callers that would wait at once.

    A tensor must not be touched between the call and the end of its Work; afterwards it may be changed. Operations of a
    group are executed in the order of the calls, which must be the same on all members.

    Reductions combine the ranks along a fixed binary tree (`hosts.tree`): the ranks of each host first, then the hosts.
    Results are bitwise equal on all members, for all algorithms and sizes, and between runs whose members are placed
    alike. Half precision is accumulated in float32. A large all_reduce of a tensor of `Communicator.empty` is done in
    place. Other tensors are staged; those of accelerators are staged in pinned host memory, on side streams. `wait`
    then makes the caller's stream wait for the results, and the thread only for the other members.
    """

    def __init__(self, dispatcher: Dispatcher, members: MemberList, *, timeout_s: float) -> None:
        """Keep the members, and `timeout_s` for calls without a timeout."""
        self.list = members
        self.timeout_s = timeout_s
        self._dispatcher = dispatcher

    @property
    def name(self) -> str:
        """The group's name."""
        return self.list.name

    @property
    def me(self) -> str:
        """The id of this member."""
        return self.list.me

    @property
    def members(self) -> tuple[str, ...]:
        """Member ids in rank order."""
        return self.list.members

    @property
    def rank(self) -> int:
        """Rank of this member."""
        return self.list.rank

    @property
    def size(self) -> int:
        """Number of members."""
        return self.list.size

    def barrier(self, *, description: str = "barrier", timeout_s: float | None = None, inline: bool = False) -> Work:
        """Wait for all members: the Work ends when each of them has called this.

        `description` must be the same on all members. If it differs, the barrier ends on all of them with Aborted,
        which shows both texts.
        """
        return self._dispatcher.submit(
            self.list,
            lambda participant: calls.barrier(participant, description),
            self._or_default(timeout_s),
            inline=inline,
            barrier=True,
        )

    def roll_call(self, *, timeout_s: float | None = None, inline: bool = False) -> Work:
        """Wait for all members, as `barrier`. Each hears from each, so a Timeout names all that are missing."""
        return self._dispatcher.submit(self.list, calls.roll_call, self._or_default(timeout_s), inline=inline)

    def broadcast(self, tensor: Tensor, *, root: int = 0, timeout_s: float | None = None, inline: bool = False) -> Work:
        """Copy rank `root`'s `tensor` into `tensor` of all other ranks."""
        self._check_rank(root)
        return self._submit(
            lambda participant, host: calls.broadcast(
                participant, host.given(tensor) if participant.rank == root else host.wanted(tensor), root
            ),
            (tensor,),
            timeout_s,
            inline=inline,
        )

    def all_gather(
        self, outs: Sequence[Tensor], tensor: Tensor, *, timeout_s: float | None = None, inline: bool = False
    ) -> Work:
        """Copy rank r's `tensor` into `outs[r]` on every rank. Sizes may differ between ranks."""
        return self._submit(
            lambda participant, host: calls.all_gather(
                participant, [host.wanted(out) for out in outs], host.given(tensor)
            ),
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
        """Copy rank r's `tensor` into `outs[r]` of rank `root`. On other ranks `outs` is None."""
        self._check_rank(root)
        return self._submit(
            lambda participant, host: calls.gather(
                participant, None if outs is None else [host.wanted(out) for out in outs], host.given(tensor), root
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
        """Copy `given[r]` of rank `root` into rank r's `tensor`. On other ranks `given` is None."""
        self._check_rank(root)
        return self._submit(
            lambda participant, host: calls.scatter(
                participant, host.wanted(tensor), None if given is None else [host.given(one) for one in given], root
            ),
            (tensor, *(given or ())),
            timeout_s,
            inline=inline,
        )

    def all_to_all(
        self, outs: Sequence[Tensor], given: Sequence[Tensor], *, timeout_s: float | None = None, inline: bool = False
    ) -> Work:
        """Copy `given[i]` of rank r into `outs[r]` of rank i. Sizes may differ."""
        return self._submit(
            lambda participant, host: calls.all_to_all(
                participant, [host.wanted(out) for out in outs], [host.given(one) for one in given]
            ),
            (*outs, *given),
            timeout_s,
            inline=inline,
        )

    def all_reduce(
        self, tensor: Tensor, reduction: Reduction = "sum", *, timeout_s: float | None = None, inline: bool = False
    ) -> Work:
        """Reduce all ranks' tensors in place. `avg` divides the sum; bitwise reductions need integers or booleans."""
        return self._submit(
            lambda participant, host: calls.all_reduce(participant, host.changed(tensor), reduction),
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
        """Reduce all ranks' tensors into rank `root`'s. The other tensors do not change."""
        self._check_rank(root)
        return self._submit(
            lambda participant, host: calls.reduce(
                participant, host.changed(tensor) if participant.rank == root else host.given(tensor), root, reduction
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
        """Reduce `given[r]` of all ranks into `out` of rank r. Sizes may differ between ranks."""
        return self._submit(
            lambda participant, host: calls.reduce_scatter(
                participant, host.wanted(out), [host.given(one) for one in given], reduction
            ),
            (out, *given),
            timeout_s,
            inline=inline,
        )

    def _submit(
        self,
        make: Callable[[Participant, HostTensors], Operation],
        tensors: Iterable[Tensor],
        timeout_s: float | None,
        *,
        inline: bool,
    ) -> Work:
        operation, landed = staged_on_host(make, tensors)
        return self._dispatcher.submit(self.list, operation, self._or_default(timeout_s), inline=inline, landed=landed)

    def _or_default(self, timeout_s: float | None) -> float:
        return self.timeout_s if timeout_s is None else timeout_s

    def send(self, tensor: Tensor, to: int, *, tag: int = 0) -> Work:
        """Send a copy of the tensor to rank `to`. Messages with the same tag arrive in order."""
        self._check_rank(to)
        is_far(tensor)  # raises for an unsupported device; the tensor is copied before this returns
        return self._dispatcher.post(self.list, tensor, to, tag)

    def recv(self, tensor: Tensor, of: int | None = None, *, tag: int = 0, timeout_s: float | None = None) -> Work:
        """Receive a message with this tag from rank `of` (None: from any rank) into `tensor`."""
        if of is not None:
            self._check_rank(of)
        return self._dispatcher.receive(self.list, tensor, of, tag, self._or_default(timeout_s))

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise ValueError(f"a rank of group {self.name!r} is at least 0 and below {self.size}; got {rank}")
