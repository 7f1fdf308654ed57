"""Search for a parameter that shares memory with another tensor of the model. Moving one would separate the two."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

WAY_OUT = (
    "share memory without being one parameter, and would come apart, because parameters are moved to other memory: "
    "register one nn.Parameter in both places, or give one of them a copy (.clone())"
)
_KINDS = (Tensor, nn.Parameter, nn.Buffer)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Extent:
    """The byte range `start..stop` of memory that contains all elements of a tensor."""

    name: str
    tensor: Tensor
    start: int
    stop: int
    is_trained: bool


def shared_memory(model: nn.Module, is_trained: Callable[[nn.Parameter], bool]) -> tuple[str, str] | None:
    """Return the names of a trained parameter and of another tensor that share elements, or None if no two do.

    Parameters, buffers, and tensors in attributes of modules (also in lists and dicts there) are searched.
    """
    found: list[_Extent] = []
    named: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in _tensors(model):
        named.setdefault(id(tensor), (name, tensor))
    for name, tensor in named.values():
        if type(tensor) in _KINDS and tensor.layout is torch.strided and tensor.numel() and not tensor.is_meta:
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            start, its = tensor.data_ptr(), isinstance(tensor, nn.Parameter) and is_trained(tensor)
            stop = start + (last + 1) * tensor.element_size()
            found.append(_Extent(name=name, tensor=tensor, start=start, stop=stop, is_trained=its))
    found.sort(key=lambda each: each.start)
    for at, one in enumerate(found):
        for other in found[at + 1 :]:
            if other.start >= one.stop:
                break
            if (one.is_trained or other.is_trained) and _have_common_elements(one, other):
                return (one.name, other.name) if one.is_trained else (other.name, one.name)
    return None


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                yield f"{path}.{name}" if path else name, tensor
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            inside = (
                value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
            )
            # torch's spectral_norm and pruning recompute the tensor beside `<name>_orig` before each forward.
            if f"{name}_orig" not in module._parameters:
                yield from ((f"{path}.{name}" if path else name, each) for each in inside if isinstance(each, Tensor))


def _have_common_elements(one: _Extent, other: _Extent) -> bool:
    """Return True if a byte belongs to both.

    Columns of one matrix, for example, have overlapping ranges but no common byte.
    """
    start, stop = min(one.start, other.start), max(one.stop, other.stop)
    mask = torch.zeros(stop - start, dtype=torch.bool)
    _bytes_of(one, mask, start).fill_(True)
    return bool(_bytes_of(other, mask, start).any())


def _bytes_of(extent: _Extent, mask: Tensor, start: int) -> Tensor:
    tensor, width = extent.tensor, extent.tensor.element_size()
    sizes = [1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    strides = [stride * width for stride in tensor.stride()]
    return mask.as_strided((*sizes, width), (*strides, 1), extent.start - start)
