"""Micro-batches as bytes, between a loader process and the training process that it was forked from.

Pickle protocol 5 describes the batch; the content of tensors and arrays lies beside the description and is not copied
when the batch is read. Both ends belong to one process tree: nothing from anywhere else is read here.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from elastrain.errors import ConfigError


def encode(batch: Any) -> tuple[bytes, list[memoryview]]:
    """Return the description of a batch, and the content of its tensors and arrays.

    Of a tensor the content travels, never the rest of its storage. Tensors that share memory do not share it
    afterwards; one tensor in two places stays one. Raises ConfigError for what cannot be pickled, with its place, such
    as `batch['x'][0]`.
    """
    try:
        return _pickled(batch)
    except Exception as error:
        place, cause = _culprit(batch, error)
        raise ConfigError(
            f"batch{place}: {str(cause).rstrip('.')}; a loader process cannot hand this over: return tensors, NumPy "
            "arrays, numbers, texts, containers and plain objects of them, or use num_workers=0"
        ) from error


def decode(description: memoryview, buffers: Sequence[memoryview]) -> Any:
    """Return the batch. Its tensors and arrays are views of `buffers`. Raises ValueError if it cannot be made again."""
    try:
        return pickle.loads(description, buffers=buffers)  # noqa: S301 - of this process tree
    except Exception as error:
        raise ValueError(f"what a loader process has handed over cannot be read ({error})") from error


class _Pickler(pickle.Pickler):
    def reducer_override(self, thing: Any) -> Any:
        """Return how a tensor in host memory is made again; everything else is pickled by its own rules."""
        if not isinstance(thing, Tensor) or isinstance(thing, torch.nn.Parameter):
            return NotImplemented
        if thing.requires_grad and not thing.is_leaf:
            raise RuntimeError("a tensor with autograd's history: detach() it in the dataset or collate_fn")
        is_wrapper = type(thing).__torch_dispatch__ is not Tensor.__torch_dispatch__
        is_dense = thing.layout is torch.strided and not thing.is_nested and not thing.is_quantized
        if is_wrapper or not is_dense or thing.device.type != "cpu":
            return NotImplemented
        bare = thing.detach().as_subclass(Tensor).resolve_conj().resolve_neg()
        if not bare.is_contiguous():
            bare = bare.clone()
        flat = bare.as_strided((bare.numel(),), (1,)).view(torch.uint8).numpy()
        how = (bare.dtype, tuple(bare.shape), bare.stride(), thing.requires_grad)
        kind = () if type(thing) is Tensor and not thing.__dict__ else (type(thing), dict(thing.__dict__))
        return _tensor, (pickle.PickleBuffer(flat.data), *how, *kind)


def _pickled(thing: Any) -> tuple[bytes, list[memoryview]]:
    file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    _Pickler(file, protocol=5, buffer_callback=buffers.append).dump(thing)
    return file.getvalue(), [buffer.raw() for buffer in buffers]


def _culprit(thing: Any, error: Exception) -> tuple[str, Exception]:
    """Return the place of the innermost part that cannot be pickled, and the error that it ends with."""
    for key, part in _parts(thing):
        try:
            _pickled(part)
        except RecursionError:
            break
        except Exception as inner:  # noqa: BLE001 - whatever a class of the user raises
            place, cause = _culprit(part, inner)
            return f"[{key!r}]{place}", cause
    return "", error


def _parts(thing: Any) -> list[tuple[Any, Any]]:
    if isinstance(thing, Mapping):
        factory = getattr(thing, "default_factory", None)
        return [*thing.items(), *([] if factory is None else [("default_factory", factory)])]
    if isinstance(thing, list | tuple | set | frozenset):
        return list(enumerate(thing))
    return [] if isinstance(thing, Tensor | type) else list(getattr(thing, "__dict__", {}).items())


def _tensor(
    content: memoryview,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
    *kind: Any,
) -> Tensor:
    """Make a tensor over the content. To autograd it is no view of another tensor, like the tensor that was sent."""
    if math.prod(shape):
        storage = torch.frombuffer(content, dtype=torch.uint8).untyped_storage()
        made = torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, shape, stride)
    else:
        made = torch.empty_strided(shape, stride, dtype=dtype)
    if kind:
        made = made.as_subclass(kind[0])
        made.__dict__.update(kind[1])
    return made.requires_grad_(requires_grad)
