"""A group as a `torch.distributed.ProcessGroup`: torch's calls and options in, this package's collectives out.

Sizes and ranks are asked anew at each call, so that an edit of the view changes the same object in place. Tensors of
CUDA devices pass through pinned host memory.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from elastrain.comm.collectives.operations import Reduction
from elastrain.comm.groups.group import Group
from elastrain.comm.groups.work import Work

_REDUCTIONS: tuple[tuple[Any, Reduction], ...] = (
    (dist.ReduceOp.SUM, "sum"),
    (dist.ReduceOp.AVG, "avg"),
    (dist.ReduceOp.MIN, "min"),
    (dist.ReduceOp.MAX, "max"),
    (dist.ReduceOp.PRODUCT, "prod"),
    (dist.ReduceOp.BAND, "band"),
    (dist.ReduceOp.BOR, "bor"),
    (dist.ReduceOp.BXOR, "bxor"),
)


class TorchWork(dist.Work):
    """Several works as one of torch's; `source`: the group whose rank an awaited message came from."""

    def __init__(self, works: Sequence[Work], tensors: Sequence[Tensor], group: Group) -> None:
        super().__init__()
        self._works, self._tensors, self._group = list(works), list(tensors), group
        self._future: torch.futures.Future[list[Tensor]] | None = None

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Raises MemberLost, Aborted, Timeout. The deadline is that of the call: `timeout` can not prolong it."""
        for work in self._works:
            work.wait()
        return True

    def is_completed(self) -> bool:
        return all(work.done for work in self._works)

    def is_success(self) -> bool:
        return self.exception() is None and self.is_completed()

    def exception(self) -> BaseException | None:
        return next((work.error for work in self._works if work.error is not None), None)

    def result(self) -> list[Tensor]:
        return self._tensors

    def synchronize(self) -> None:
        self.wait()

    def _source_rank(self) -> int:
        (work,) = self._works
        return self._group.members.index(work.source)

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        if self._future is None:
            far = sorted({t.device.index for t in self._tensors if t.is_cuda})
            devices = [torch.device("cuda", index) for index in far]
            ended: torch.futures.Future[None] = torch.futures.Future(devices=devices or None)  # type: ignore[arg-type]
            # An error has to be raised inside `then`: set_exception on a future that DDP holds ends the run silently.
            self._future = ended.then(self._outcome)
            _after(self._works, lambda: ended.set_result(None))
        return self._future

    def _outcome(self, _ended: torch.futures.Future[None]) -> list[Tensor]:
        self.wait()
        return self._tensors


def _after(works: list[Work], callback: Any) -> None:
    if works:
        works[0].then(lambda: _after(works[1:], callback))
    else:
        callback()


# torch describes its C++ overloads, of which it calls a subclass only with the first: nothing to check against.
_Base: Any = dist.ProcessGroup


class ProcessGroup(_Base):  # type: ignore[misc] # the base is Any for the reason above
    """What `init_process_group("elastrain")` and `new_group` give. Made by `bootstrap`."""

    def __init__(self, group: Group, name: str, on_shutdown: Any = None) -> None:
        super().__init__(group.rank, group.size)
        self.group = group
        self._name = name
        self._description = ""
        self._on_shutdown = on_shutdown

    # What torch asks about the group

    def getRank(self) -> int:  # noqa: N802 - torch's name
        return self.group.rank

    def getSize(self) -> int:  # noqa: N802 - torch's name
        return self.group.size

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "elastrain"

    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802 - torch's name
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802 - torch's name
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802 - torch's name
        self._description = description

    def shutdown(self) -> None:
        if self._on_shutdown is not None:
            self._on_shutdown()

    # Collectives

    def barrier(self, opts: Any = None) -> TorchWork:
        return self._work([self.group.barrier(timeout_s=_timeout_s(opts), inline=_inline(opts))], [])

    def broadcast(self, tensors: list[Tensor] | Tensor, opts: Any) -> TorchWork:
        root, seconds, tensors = _root(opts), _timeout_s(opts), _list(tensors)
        return self._work(
            [self.group.broadcast(t, root=root, timeout_s=seconds, inline=_inline(opts)) for t in tensors], tensors
        )

    def allreduce(self, tensors: list[Tensor] | Tensor, opts: Any = None) -> TorchWork:
        reduction, seconds, tensors = _reduction(opts), _timeout_s(opts), _list(tensors)
        return self._work(
            [self.group.all_reduce(t, reduction, timeout_s=seconds, inline=_inline(opts)) for t in tensors], tensors
        )

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> TorchWork:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Any) -> TorchWork:
        reduction, root, seconds = _reduction(opts), opts.rootRank, _timeout_s(opts)
        works = [self.group.reduce(t, reduction, root=root, timeout_s=seconds, inline=_inline(opts)) for t in tensors]
        return self._work(works, tensors)

    def allgather(self, outs: list[list[Tensor]], tensors: list[Tensor], opts: Any = None) -> TorchWork:
        seconds = _timeout_s(opts)
        works = [
            self.group.all_gather(o, t, timeout_s=seconds, inline=_inline(opts))
            for o, t in zip(outs, tensors, strict=True)
        ]
        return self._work(works, [t for out in outs for t in out])

    def allgather_coalesced(self, outs: list[list[Tensor]], tensors: list[Tensor], opts: Any = None) -> TorchWork:
        # HostTensors torch gives one list per rank, each with one output per input.
        return self.allgather([list(out) for out in zip(*outs, strict=True)], tensors, opts)

    def all_gather_single(self, out: Tensor, tensor: Tensor, opts: Any = None) -> TorchWork:
        return self.all_gather_single_coalesced([out], [tensor], opts)

    def all_gather_single_coalesced(self, outs: list[Tensor], tensors: list[Tensor], opts: Any = None) -> TorchWork:
        # Stacked or concatenated, the elements come in the same order.
        pieces = [list(_flat(out, "all_gather").chunk(self.group.size)) for out in outs]
        return self._work(self.allgather(pieces, [t.reshape(-1) for t in tensors], opts)._works, outs)

    def reduce_scatter(self, outs: list[Tensor], tensors: list[list[Tensor]], opts: Any = None) -> TorchWork:
        reduction, seconds = _reduction(opts), _timeout_s(opts)
        works = [
            self.group.reduce_scatter(o, t, reduction, timeout_s=seconds, inline=_inline(opts))
            for o, t in zip(outs, tensors, strict=True)
        ]
        return self._work(works, outs)

    def reduce_scatter_single(self, out: Tensor, tensor: Tensor, opts: Any = None) -> TorchWork:
        return self.reduce_scatter_single_coalesced([out], [tensor], opts)

    def reduce_scatter_single_coalesced(self, outs: list[Tensor], tensors: list[Tensor], opts: Any = None) -> TorchWork:
        flat = [_flat(out, "reduce_scatter") for out in outs]
        pieces = [list(tensor.reshape(-1).chunk(self.group.size)) for tensor in tensors]
        return self._work(self.reduce_scatter(flat, pieces, opts)._works, outs)

    def gather(self, outs: list[list[Tensor]], tensors: list[Tensor], opts: Any) -> TorchWork:
        out = outs[0] if outs else None
        work = self.group.gather(out, tensors[0], root=opts.rootRank, timeout_s=_timeout_s(opts), inline=_inline(opts))
        return self._work([work], out or [])

    def scatter(self, outs: list[Tensor], tensors: list[list[Tensor]], opts: Any) -> TorchWork:
        given = tensors[0] if tensors else None
        work = self.group.scatter(outs[0], given, root=opts.rootRank, timeout_s=_timeout_s(opts), inline=_inline(opts))
        return self._work([work], outs)

    def alltoall(self, outs: list[Tensor], tensors: list[Tensor], opts: Any = None) -> TorchWork:
        return self._work(
            [self.group.all_to_all(outs, tensors, timeout_s=_timeout_s(opts), inline=_inline(opts))], outs
        )

    def all_to_all_single(
        self, out: Tensor, tensor: Tensor, out_rows: list[int], rows: list[int], opts: Any = None
    ) -> TorchWork:
        outs, given = _split(out, out_rows, self.group.size), _split(tensor, rows, self.group.size)
        return self._work([self.group.all_to_all(outs, given, timeout_s=_timeout_s(opts), inline=_inline(opts))], [out])

    # torch calls some of these by their former names
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # Messages

    def send(self, tensors: list[Tensor], to: int, tag: int) -> TorchWork:
        return self._work([self.group.send(tensor, to, tag=tag) for tensor in tensors], tensors)

    def recv(self, tensors: list[Tensor], of: int, tag: int) -> TorchWork:
        return self._work([self.group.recv(tensor, of, tag=tag) for tensor in tensors], tensors)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> TorchWork:
        return self._work([self.group.recv(tensor, None, tag=tag) for tensor in tensors], tensors)

    def _work(self, works: Sequence[Work], tensors: Sequence[Tensor]) -> TorchWork:
        return TorchWork(works, tensors, self.group)


def _list(tensors: list[Tensor] | Tensor) -> list[Tensor]:
    """torch's own code, DDP's `join` for one, also calls with a single tensor."""
    return [tensors] if isinstance(tensors, Tensor) else tensors


def _root(opts: Any) -> int:
    return opts if isinstance(opts, int) else int(opts.rootRank)


def _reduction(opts: Any) -> Reduction:
    if opts is None:
        return "sum"
    wanted = getattr(opts, "reduceOp", opts)
    # Not `in`: torch's operators are equal to the members of the enumeration, but hash differently.
    found = [reduction for operator, reduction in _REDUCTIONS if wanted == operator]
    if not found:
        raise ValueError(f"{wanted} is not offered; there are {', '.join(name for _, name in _REDUCTIONS)}")
    return found[0]


def _timeout_s(opts: Any) -> float | None:
    """None: torch's "not set" is negative or absent."""
    seconds = getattr(opts, "timeout", datetime.timedelta(-1)).total_seconds()
    return float(seconds) if seconds > 0 else None


def _inline(opts: Any) -> bool:
    """Whether torch is going to wait at once."""
    return not getattr(opts, "asyncOp", True)


def _flat(tensor: Tensor, what: str) -> Tensor:
    if not tensor.is_contiguous():
        raise ValueError(f"{what} into one tensor needs a contiguous one")
    return tensor.view(-1)


def _split(tensor: Tensor, rows: list[int], world: int) -> list[Tensor]:
    return list(torch.split(tensor, list(rows))) if rows else list(tensor.chunk(world))
