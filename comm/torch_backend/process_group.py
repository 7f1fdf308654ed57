"""A group as a `torch.distributed.ProcessGroup`: torch's calls and options in, this package's collectives out.

Sizes and ranks are read at each call, so an edit of the view changes the same object in place. Tensors of accelerators
pass through pinned host memory. `TorchWork` is the handle of a call. Collectives on one tensor with all ranks' parts
cut it and call those on lists.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from elastrain.comm.collectives.devices import is_far
from elastrain.comm.collectives.reducing import Reduction, premultiplied
from elastrain.comm.groups.group import Group
from elastrain.comm.groups.works import Work
from elastrain.device import device_of

_REDUCTIONS: tuple[tuple[Any, Reduction], ...] = (
    (dist.ReduceOp.SUM, "sum"),
    (dist.ReduceOp.AVG, "avg"),
    (dist.ReduceOp.MIN, "min"),
    (dist.ReduceOp.MAX, "max"),
    (dist.ReduceOp.PRODUCT, "prod"),
    (dist.ReduceOp.BAND, "band"),
    (dist.ReduceOp.BOR, "bor"),
    (dist.ReduceOp.BXOR, "bxor"),
    (dist.ReduceOp.PREMUL_SUM, "sum"),  # of what `given` returns
)


def as_list(tensors: list[Tensor] | Tensor) -> list[Tensor]:
    """Return a list, also for the single tensor that some callers in torch pass, such as the `join` of DDP."""
    return [tensors] if isinstance(tensors, Tensor) else tensors


def root_of(opts: Any) -> int:
    """Return the root rank in the options of a call."""
    return opts if isinstance(opts, int) else int(opts.rootRank)


def reduction_of(opts: Any) -> Reduction:
    """Return the reduction in the options of a call."""
    if opts is None:
        return "sum"
    wanted = getattr(opts, "reduceOp", opts)
    # Not `in`: torch's operators are equal to the members of the enumeration, but hash differently.
    found = [reduction for operator, reduction in _REDUCTIONS if wanted == operator]
    if not found:
        raise ValueError(f"{wanted} is not offered; there are {', '.join(name for _, name in _REDUCTIONS)}")
    return found[0]


def given(tensors: Sequence[Tensor], opts: Any) -> list[Tensor]:
    """Return what enters the reduction: each tensor, for PREMUL_SUM times the factor in the options of the call."""
    wanted = getattr(opts, "reduceOp", opts)
    if wanted is None or wanted != dist.ReduceOp.PREMUL_SUM:
        return list(tensors)
    _, factor = wanted.__getstate__()  # torch offers no other way to read it
    return [premultiplied(tensor, factor) for tensor in tensors]


def enter(tensors: Sequence[Tensor], opts: Any) -> None:
    """Put what enters the reduction into the tensors themselves, for reductions in place."""
    for tensor, entering in zip(tensors, given(tensors, opts), strict=True):
        if entering is not tensor:
            tensor.detach().copy_(entering)


def timing_of(opts: Any) -> dict[str, Any]:
    """Return the keyword arguments `timeout_s` and `inline` from the options of a call.

    `timeout_s` is None for the group's own timeout, which torch expresses as negative or absent.
    """
    seconds = getattr(opts, "timeout", datetime.timedelta(-1)).total_seconds()
    return {"timeout_s": float(seconds) if seconds > 0 else None, "inline": not getattr(opts, "asyncOp", True)}


class TorchWork(dist.Work):
    """Handle of a call for torch, over one or more works. `group`: gives ranks to the senders of messages."""

    def __init__(self, works: Sequence[Work], tensors: Sequence[Tensor], group: Group) -> None:
        super().__init__()
        self.works, self._tensors, self._group = list(works), list(tensors), group
        self._future: torch.futures.Future[list[Tensor]] | None = None

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Wait for all works. Raises MemberLost, Aborted, Timeout.

        The current stream waits for results on a device, and the thread only for the members. The deadline is that of
        the call: `timeout` cannot prolong it.
        """
        for work in self.works:
            work.wait()
        return True

    def is_completed(self) -> bool:
        """Return True once all works have ended."""
        return all(work.done for work in self.works)

    def is_success(self) -> bool:
        """Return True once all works have succeeded."""
        return self.exception() is None and self.is_completed()

    def exception(self) -> BaseException | None:
        """Return the first error, or None."""
        return next((work.error for work in self.works if work.error is not None), None)

    def result(self) -> list[Tensor]:
        """Return the tensors of the call."""
        return self._tensors

    def synchronize(self) -> None:
        """Wait for all works."""
        self.wait()

    def _source_rank(self) -> int:
        (work,) = self.works
        return self._group.members.index(work.source)

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Return a future of the tensors."""
        if self._future is None:
            devices = sorted({each.device for each in self._tensors if is_far(each)}, key=str)
            known = [each for each in devices if _futures_know(each)]
            # `_outcome` runs on streams of torch's own, and whoever waits for the future waits for these. Where torch
            # has no such streams, the caller's stream waits.
            ended: torch.futures.Future[None] = torch.futures.Future(devices=known or None)  # type: ignore[arg-type]
            streams = [device_of(each).current_stream() for each in devices if each not in known]
            # An error has to be raised inside `then`: set_exception on a future that DDP holds ends the run silently.
            self._future = ended.then(lambda _: self._outcome(streams))
            _after(self.works, lambda: ended.set_result(None))
        return self._future

    def _outcome(self, streams: Sequence[Any]) -> list[Tensor]:
        for stream in streams:
            for event in (event for work in self.works for event in work.landed):
                event.wait(stream)
        self.wait()
        return self._tensors


@functools.cache
def _futures_know(device: torch.device) -> bool:
    """Return True if torch gives callbacks of futures a stream of the device to run on."""
    try:
        ended: torch.futures.Future[None] = torch.futures.Future(devices=[device])
        ended.then(lambda _: None)
        ended.set_result(None)
    except RuntimeError:
        return False
    return True


def _after(works: list[Work], callback: Any) -> None:
    if works:
        works[0].then(lambda: _after(works[1:], callback))
    else:
        callback()


def all_gather(group: Any, out: Tensor, tensor: Tensor, opts: Any = None) -> TorchWork:
    """Gather all ranks' tensors into one."""
    return all_gather_coalesced(group, [out], [tensor], opts)


def all_gather_coalesced(group: Any, outs: list[Tensor], tensors: list[Tensor], opts: Any = None) -> TorchWork:
    """Gather several tensors, each into one."""
    # Stacked or concatenated, the elements come in the same order.
    pieces = [list(_flat(out, "all_gather").chunk(group.group.size)) for out in outs]
    return TorchWork(group.allgather(pieces, [t.reshape(-1) for t in tensors], opts).works, outs, group.group)


def concatenated_reduce_scatter(group: Any, out: Tensor, tensor: Tensor, opts: Any = None) -> TorchWork:
    """Reduce all ranks' tensors and keep this rank's part."""
    return concatenated_reduce_scatter_coalesced(group, [out], [tensor], opts)


def concatenated_reduce_scatter_coalesced(
    group: Any, outs: list[Tensor], tensors: list[Tensor], opts: Any = None
) -> TorchWork:
    """Reduce several tensors as `reduce_scatter` does."""
    flat = [_flat(out, "reduce_scatter") for out in outs]
    pieces = [list(tensor.reshape(-1).chunk(group.group.size)) for tensor in tensors]
    return TorchWork(group.reduce_scatter(flat, pieces, opts).works, outs, group.group)


def all_to_all(
    group: Any, out: Tensor, tensor: Tensor, out_rows: list[int], rows: list[int], opts: Any = None
) -> TorchWork:
    """Exchange parts of one tensor with all ranks; rows are the sizes of the parts."""
    outs, given = _split(out, out_rows, group.group.size), _split(tensor, rows, group.group.size)
    return TorchWork([group.group.all_to_all(outs, given, **timing_of(opts))], [out], group.group)


def _flat(tensor: Tensor, what: str) -> Tensor:
    if not tensor.is_contiguous():
        raise ValueError(f"{what} into one tensor needs a contiguous one")
    return tensor.view(-1)


def _split(tensor: Tensor, rows: list[int], world: int) -> list[Tensor]:
    return list(torch.split(tensor, list(rows))) if rows else list(tensor.chunk(world))


# torch describes its C++ overloads, of which it calls a subclass only with the first: nothing to check against.
_Base: Any = dist.ProcessGroup


class ProcessGroup(_Base):  # type: ignore[misc] # the base is Any for the reason above
    """A group as torch sees it: `init_process_group("elastrain")` and `new_group` give one. `bootstrap` makes it."""

    def __init__(self, group: Group, name: str, on_shutdown: Any = None) -> None:
        super().__init__(group.rank, group.size)
        self.group = group
        self._name = name
        self._description = ""
        self._on_shutdown = on_shutdown

    def getRank(self) -> int:  # noqa: N802 - torch's name
        """Return this member's rank."""
        return self.group.rank

    def getSize(self) -> int:  # noqa: N802 - torch's name
        """Return the number of members."""
        return self.group.size

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the name of the backend."""
        return "elastrain"

    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        """Return the name of the group."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802 - torch's name
        """Set the name of the group."""
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802 - torch's name
        """Return the description of the group."""
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802 - torch's name
        """Set the description of the group."""
        self._description = description

    def shutdown(self) -> None:
        """Close the communicator if this is the default group."""
        if self._on_shutdown is not None:
            self._on_shutdown()

    def barrier(self, opts: Any = None) -> TorchWork:
        """See Group.barrier."""
        return self._work([self.group.barrier(**timing_of(opts))], [])

    def broadcast(self, tensors: list[Tensor] | Tensor, opts: Any) -> TorchWork:
        """Broadcast each tensor, see Group.broadcast."""
        root, timing, tensors = root_of(opts), timing_of(opts), as_list(tensors)
        return self._work([self.group.broadcast(t, root=root, **timing) for t in tensors], tensors)

    def allreduce(self, tensors: list[Tensor] | Tensor, opts: Any = None) -> TorchWork:
        """Reduce each tensor, see Group.all_reduce."""
        reduction, timing, tensors = reduction_of(opts), timing_of(opts), as_list(tensors)
        enter(tensors, opts)
        return self._work([self.group.all_reduce(t, reduction, **timing) for t in tensors], tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any) -> TorchWork:
        """Reduce each tensor to the root, see Group.reduce."""
        reduction, root, timing = reduction_of(opts), opts.rootRank, timing_of(opts)
        if root == self.group.rank:
            enter(tensors, opts)
        else:
            tensors = given(tensors, opts)
        return self._work([self.group.reduce(t, reduction, root=root, **timing) for t in tensors], tensors)

    def allgather(self, outs: list[list[Tensor]], tensors: list[Tensor], opts: Any = None) -> TorchWork:
        """Gather each tensor, see Group.all_gather."""
        timing = timing_of(opts)
        works = [self.group.all_gather(o, t, **timing) for o, t in zip(outs, tensors, strict=True)]
        return self._work(works, [t for out in outs for t in out])

    def allgather_coalesced(self, outs: list[list[Tensor]], tensors: list[Tensor], opts: Any = None) -> TorchWork:
        """Gather several tensors; `outs` has one list per rank."""
        # Here torch gives one list per rank, each with one output per input.
        return self.allgather([list(out) for out in zip(*outs, strict=True)], tensors, opts)

    def reduce_scatter(self, outs: list[Tensor], tensors: list[list[Tensor]], opts: Any = None) -> TorchWork:
        """Reduce and scatter, see Group.reduce_scatter."""
        reduction, timing = reduction_of(opts), timing_of(opts)
        parts = [given(each, opts) for each in tensors]
        works = [self.group.reduce_scatter(o, t, reduction, **timing) for o, t in zip(outs, parts, strict=True)]
        return self._work(works, outs)

    def gather(self, outs: list[list[Tensor]], tensors: list[Tensor], opts: Any) -> TorchWork:
        """See Group.gather."""
        out = outs[0] if outs else None
        return self._work([self.group.gather(out, tensors[0], root=opts.rootRank, **timing_of(opts))], out or [])

    def scatter(self, outs: list[Tensor], tensors: list[list[Tensor]], opts: Any) -> TorchWork:
        """See Group.scatter."""
        given = tensors[0] if tensors else None
        return self._work([self.group.scatter(outs[0], given, root=opts.rootRank, **timing_of(opts))], outs)

    def alltoall(self, outs: list[Tensor], tensors: list[Tensor], opts: Any = None) -> TorchWork:
        """See Group.all_to_all."""
        return self._work([self.group.all_to_all(outs, tensors, **timing_of(opts))], outs)

    all_gather_single = all_gather
    all_gather_single_coalesced = all_gather_coalesced
    reduce_scatter_single = concatenated_reduce_scatter
    reduce_scatter_single_coalesced = concatenated_reduce_scatter_coalesced
    all_to_all_single = all_to_all

    # torch calls some of these by their former names
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def send(self, tensors: list[Tensor], to: int, tag: int) -> TorchWork:
        """Send each tensor, see Group.send."""
        return self._work([self.group.send(tensor, to, tag=tag) for tensor in tensors], tensors)

    def recv(self, tensors: list[Tensor], of: int, tag: int) -> TorchWork:
        """Receive each tensor, see Group.recv."""
        return self._work([self.group.recv(tensor, of, tag=tag) for tensor in tensors], tensors)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> TorchWork:
        """Receive each tensor from any rank."""
        return self._work([self.group.recv(tensor, None, tag=tag) for tensor in tensors], tensors)

    def _work(self, works: Sequence[Work], tensors: Sequence[Tensor]) -> TorchWork:
        return TorchWork(works, tensors, self.group)
