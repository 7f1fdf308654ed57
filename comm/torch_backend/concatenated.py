"""Collectives whose ranks' parts lie in one tensor, one after the other: cut in parts, they are those of lists.

Functions of a ProcessGroup, which binds them under torch's names.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from elastrain.comm.torch_backend.call_options import timing_of
from elastrain.comm.torch_backend.works import TorchWork


def all_gather(group: Any, out: Tensor, tensor: Tensor, opts: Any = None) -> TorchWork:
    return all_gather_coalesced(group, [out], [tensor], opts)


def all_gather_coalesced(group: Any, outs: list[Tensor], tensors: list[Tensor], opts: Any = None) -> TorchWork:
    # Stacked or concatenated, the elements come in the same order.
    pieces = [list(_flat(out, "all_gather").chunk(group.group.size)) for out in outs]
    return TorchWork(group.allgather(pieces, [t.reshape(-1) for t in tensors], opts).works, outs, group.group)


def reduce_scatter(group: Any, out: Tensor, tensor: Tensor, opts: Any = None) -> TorchWork:
    return reduce_scatter_coalesced(group, [out], [tensor], opts)


def reduce_scatter_coalesced(group: Any, outs: list[Tensor], tensors: list[Tensor], opts: Any = None) -> TorchWork:
    flat = [_flat(out, "reduce_scatter") for out in outs]
    pieces = [list(tensor.reshape(-1).chunk(group.group.size)) for tensor in tensors]
    return TorchWork(group.reduce_scatter(flat, pieces, opts).works, outs, group.group)


def all_to_all(
    group: Any, out: Tensor, tensor: Tensor, out_rows: list[int], rows: list[int], opts: Any = None
) -> TorchWork:
    outs, given = _split(out, out_rows, group.group.size), _split(tensor, rows, group.group.size)
    return TorchWork([group.group.all_to_all(outs, given, **timing_of(opts))], [out], group.group)


def _flat(tensor: Tensor, what: str) -> Tensor:
    if not tensor.is_contiguous():
        raise ValueError(f"{what} into one tensor needs a contiguous one")
    return tensor.view(-1)


def _split(tensor: Tensor, rows: list[int], world: int) -> list[Tensor]:
    return list(torch.split(tensor, list(rows))) if rows else list(tensor.chunk(world))
