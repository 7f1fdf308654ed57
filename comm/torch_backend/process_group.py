"""A group as a `torch.distributed.ProcessGroup`: torch's calls and options in, this package's collectives out.

Sizes and ranks are asked anew at each call, so that an edit of the view changes the same object in place. Tensors of
CUDA devices pass through pinned host memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from elastrain.comm.groups.group import Group
from elastrain.comm.groups.work import Work
from elastrain.comm.torch_backend import concatenated
from elastrain.comm.torch_backend.call_options import as_list, reduction_of, root_of, timing_of
from elastrain.comm.torch_backend.works import TorchWork

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

    def barrier(self, opts: Any = None) -> TorchWork:
        return self._work([self.group.barrier(**timing_of(opts))], [])

    def broadcast(self, tensors: list[Tensor] | Tensor, opts: Any) -> TorchWork:
        root, timing, tensors = root_of(opts), timing_of(opts), as_list(tensors)
        return self._work([self.group.broadcast(t, root=root, **timing) for t in tensors], tensors)

    def allreduce(self, tensors: list[Tensor] | Tensor, opts: Any = None) -> TorchWork:
        reduction, timing, tensors = reduction_of(opts), timing_of(opts), as_list(tensors)
        return self._work([self.group.all_reduce(t, reduction, **timing) for t in tensors], tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any) -> TorchWork:
        reduction, root, timing = reduction_of(opts), opts.rootRank, timing_of(opts)
        return self._work([self.group.reduce(t, reduction, root=root, **timing) for t in tensors], tensors)

    def allgather(self, outs: list[list[Tensor]], tensors: list[Tensor], opts: Any = None) -> TorchWork:
        timing = timing_of(opts)
        works = [self.group.all_gather(o, t, **timing) for o, t in zip(outs, tensors, strict=True)]
        return self._work(works, [t for out in outs for t in out])

    def allgather_coalesced(self, outs: list[list[Tensor]], tensors: list[Tensor], opts: Any = None) -> TorchWork:
        # Here torch gives one list per rank, each with one output per input.
        return self.allgather([list(out) for out in zip(*outs, strict=True)], tensors, opts)

    def reduce_scatter(self, outs: list[Tensor], tensors: list[list[Tensor]], opts: Any = None) -> TorchWork:
        reduction, timing = reduction_of(opts), timing_of(opts)
        works = [self.group.reduce_scatter(o, t, reduction, **timing) for o, t in zip(outs, tensors, strict=True)]
        return self._work(works, outs)

    def gather(self, outs: list[list[Tensor]], tensors: list[Tensor], opts: Any) -> TorchWork:
        out = outs[0] if outs else None
        return self._work([self.group.gather(out, tensors[0], root=opts.rootRank, **timing_of(opts))], out or [])

    def scatter(self, outs: list[Tensor], tensors: list[list[Tensor]], opts: Any) -> TorchWork:
        given = tensors[0] if tensors else None
        return self._work([self.group.scatter(outs[0], given, root=opts.rootRank, **timing_of(opts))], outs)

    def alltoall(self, outs: list[Tensor], tensors: list[Tensor], opts: Any = None) -> TorchWork:
        return self._work([self.group.all_to_all(outs, tensors, **timing_of(opts))], outs)

    all_gather_single = concatenated.all_gather
    all_gather_single_coalesced = concatenated.all_gather_coalesced
    reduce_scatter_single = concatenated.reduce_scatter
    reduce_scatter_single_coalesced = concatenated.reduce_scatter_coalesced
    all_to_all_single = concatenated.all_to_all

    # torch calls some of these by their former names
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def send(self, tensors: list[Tensor], to: int, tag: int) -> TorchWork:
        return self._work([self.group.send(tensor, to, tag=tag) for tensor in tensors], tensors)

    def recv(self, tensors: list[Tensor], of: int, tag: int) -> TorchWork:
        return self._work([self.group.recv(tensor, of, tag=tag) for tensor in tensors], tensors)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> TorchWork:
        return self._work([self.group.recv(tensor, None, tag=tag) for tensor in tensors], tensors)

    def _work(self, works: Sequence[Work], tensors: Sequence[Tensor]) -> TorchWork:
        return TorchWork(works, tensors, self.group)
