"""The cut of a model into blocks, without edits: each block is a module whose tensors leave and come back together.

Each module in a list of modules (`ModuleList`, `Sequential`) is a block. Outside of lists, the largest modules that
hold no such list are blocks. The rest, such as parameters of the model itself, stays in memory for the whole forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from elastrain.offload.errors import OffloadConfigError

ALIGNED_BYTES = 64
"""Alignment of tensors, the same as torch's own. Kernels that treat edges differently then compute the same bits."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelBlock:
    """One block.

    `module` is None for the rest of the model. `touches` are the blocks whose parameters it uses, with itself.
    """

    name: str
    module: nn.Module | None
    parameters: tuple[nn.Parameter, ...]
    touches: tuple[int, ...]


def blocks_of(model: nn.Module) -> tuple[ModelBlock, ...]:
    """Return the blocks in the order of the model's modules, the rest last.

    Raises OffloadConfigError if there is one block.
    """
    owners: dict[nn.Parameter, int] = {}
    found: list[tuple[str, nn.Module | None, list[nn.Parameter]]] = []
    for name, module in _cut(model, ""):
        own = [each for each in module.parameters() if each not in owners]
        owners.update(dict.fromkeys(own, len(found)))
        found.append((name, module, own))
    rest = [each for each in model.parameters() if each not in owners]
    owners.update(dict.fromkeys(rest, len(found)))
    found.append(("the rest of the model", None, rest))
    if len(found) < 3:
        raise OffloadConfigError(
            f"{type(model).__name__} cannot be cut into blocks: put its layers into a ModuleList or a Sequential"
        )
    return tuple(
        ModelBlock(
            name=name,
            module=module,
            parameters=tuple(own),
            touches=tuple(
                sorted({number, *(owners[each] for each in (() if module is None else module.parameters()))})
            ),
        )
        for number, (name, module, own) in enumerate(found)
    )


def _cut(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if not any(True for _ in child.parameters()):
            continue
        if isinstance(module, nn.ModuleList | nn.Sequential) or not any(map(_is_list, child.modules())):
            yield path, child
        else:
            yield from _cut(child, f"{path}.")


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1


@dataclass(frozen=True, kw_only=True)
class PieceView:
    """The place and form of one tensor in a piece's bytes."""

    offset_bytes: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the tensor at this place, as a view of a piece's bytes."""
        offset = (memory.storage_offset() + self.offset_bytes) // self.dtype.itemsize
        return torch.empty(0, dtype=self.dtype, device=memory.device).set_(
            memory.untyped_storage(), offset, self.shape, self.stride
        )

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return True if a tensor has this dtype, shape and stride."""
        return tensor.dtype == self.dtype and tensor.shape == self.shape and tuple(tensor.stride()) == self.stride

    def is_place_of(self, tensor: torch.Tensor, memory: torch.Tensor) -> bool:
        """Return True if a tensor of this form lies at this place already."""
        offset = (memory.storage_offset() + self.offset_bytes) // self.dtype.itemsize
        same = tensor.untyped_storage()._cdata == memory.untyped_storage()._cdata
        return bool(same) and tensor.storage_offset() == offset


def places_of(tensors: Sequence[torch.Tensor]) -> tuple[tuple[PieceView, ...], int]:
    """Return places for tensors one after the other, each aligned, and their size in bytes."""
    end_bytes, found = 0, []
    for tensor in tensors:
        found.append(
            PieceView(offset_bytes=end_bytes, dtype=tensor.dtype, shape=tensor.shape, stride=tuple(tensor.stride()))
        )
        end_bytes += -(-tensor.nbytes // ALIGNED_BYTES) * ALIGNED_BYTES
    return tuple(found), end_bytes
