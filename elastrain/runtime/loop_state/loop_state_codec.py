"""The codec of state for newcomers: plain data becomes a JSON tree, tensors and arrays become bytes; no code is sent.

The training loop's thread makes the tree in every step. Bytes of tensors are copied to host memory only for a newcomer.
ConfigError is raised if a tensor was changed between these two moments.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from elastrain.device import device_of, is_accelerator
from elastrain.errors import ConfigError
from elastrain.runtime.loop_state.device_reads import DeviceReads

Tree = Any
"""A value that JSON can represent."""
_CODE = (FunctionType, BuiltinFunctionType, MethodType, partial, type)
_TENSORS = (Tensor, nn.Parameter, nn.Buffer)
_ALIGN = 16
_ARRAY_KINDS = "biufcSUmM"
_LOOKED_AT = 32
"""Number of tensors that enter the digest of one step. The other tensors have their turn in the next steps."""


@dataclass(frozen=True)
class _Bulk:
    """A tensor that is sent as bytes. `version` counts its in-place changes, and `start` is its first byte."""

    name: str
    tensor: Tensor
    start: int
    version: int

    @property
    def is_unchanged(self) -> bool:
        return self.tensor.is_inference() or self.tensor._version == self.version


class Packer:
    """An encoder that turns values into JSON trees and collects the tensors that are sent as bytes."""

    def __init__(self, *, with_code: bool = True) -> None:
        """Make an encoder. `with_code`: functions and types are left to the script of the receiver, not refused."""
        self._with_code = with_code
        self._bulk: list[_Bulk] = []
        self.size_bytes = 0
        self.devices: set[torch.device] = set()
        """The accelerators on which packed tensors lie."""

    def pack(self, name: str, value: Any) -> Tree:
        """Return the tree of `value`. Raises ConfigError, with `name` and the place in it, for values not data."""
        if isinstance(value, np.generic | np.ndarray):
            return self._array(name, value)
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if isinstance(value, Tensor):
            return self._tensor(name, value)
        if isinstance(value, Mapping):
            pairs = [[self.pack(f"{name} key", k), self.pack(f"{name}[{k!r}]", v)] for k, v in value.items()]
            return {"dict": pairs}
        if isinstance(value, list | tuple | deque):
            items = [self.pack(f"{name}[{i}]", item) for i, item in enumerate(value)]
            if isinstance(value, deque):
                return {"deque": items, "maxlen": value.maxlen}
            return {"tuple": items} if isinstance(value, tuple) else items
        if isinstance(value, set | frozenset):
            return {kind.__name__: sorted((self.pack(name, item) for item in value), key=repr)}
        if isinstance(value, bytes):
            return {"bytes": value.hex()}
        if isinstance(value, complex):
            return {"complex": [value.real, value.imag]}
        if isinstance(value, _CODE) and self._with_code:
            return {"code": None}  # every member has the same code from its script
        raise ConfigError(
            f"{name} is a {kind.__module__}.{kind.__qualname__}, which cannot be carried to other members: "
            "tensors, NumPy arrays, numbers, words, and lists, tuples, sets and dicts of them can"
        )

    def _tensor(self, name: str, value: Tensor) -> Tree:
        problem = None
        if type(value) not in _TENSORS:
            problem = f"a {type(value).__name__}"
        elif value.layout is not torch.strided or value.is_quantized or value.is_meta or value.is_nested:
            problem = f"a tensor of layout {value.layout} on {value.device}"
        if problem:
            raise ConfigError(f"{name} is {problem}, which cannot be carried to other members: use dense ones")
        what: Tree = {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
        if is_accelerator(value.device):
            what["far"] = True  # not the device's name: another member has another, and a resumed job perhaps none
            self.devices.add(value.device)
        return {"tensor": self._beside(name, value.detach()), **what}

    def _array(self, name: str, value: np.ndarray[Any, Any] | np.generic) -> Tree:
        array = np.array(value, order="C")
        if array.dtype.kind not in _ARRAY_KINDS:
            raise ConfigError(
                f"{name} is a NumPy array of {array.dtype}, which cannot be carried to others: use numbers"
            )
        raw = torch.from_numpy(np.frombuffer(array.tobytes(), dtype=np.uint8).copy())
        what = {"dtype": array.dtype.str, "shape": list(array.shape), "scalar": isinstance(value, np.generic)}
        return {"array": self._beside(name, raw), **what}

    def _beside(self, name: str, tensor: Tensor) -> int:
        start = -(-self.size_bytes // _ALIGN) * _ALIGN
        self.size_bytes = start + tensor.nbytes
        version = 0 if tensor.is_inference() else tensor._version
        self._bulk.append(_Bulk(name=name, tensor=tensor, start=start, version=version))
        return start

    def check(self) -> None:
        """Raise ConfigError if a tensor was changed in place since it was packed."""
        for bulk in self._bulk:
            if not bulk.is_unchanged:
                raise ConfigError(
                    f"{bulk.name} was changed before its step was committed: a member that joins in this step could "
                    "not get what it was at the start. Change what is registered after `for batch in step`"
                )

    @torch.no_grad()
    def payload(self) -> list[Tensor]:
        """Return all bytes in one host tensor, for `unpack` on another member. Waits for devices.

        The calling thread's stream has to come after the work that made the tensors.

        Raises:
            ConfigError: As `check` does.
        """
        self.check()
        whole = torch.zeros(self.size_bytes, dtype=torch.uint8, device="cpu")
        for bulk in self._bulk:
            if bulk.tensor.nbytes:
                target = whole[bulk.start : bulk.start + bulk.tensor.nbytes]
                target.copy_(_bytes_of(bulk.tensor), non_blocking=True)
        for device in self.devices:
            device_of(device).synchronize()
        return [whole] if self.size_bytes else []

    @torch.no_grad()
    def look(self, step: int, reads: DeviceReads) -> Callable[[], str]:
        """Return a function that returns a short digest of some values of some tensors, after `reads.fetch`.

        The choice changes with each step. Members that differ in any tensor find out after a few steps.
        """
        rounds = max(1, -(-len(self._bulk) // _LOOKED_AT))
        hasher = blake2b(digest_size=4)
        for bulk in self._bulk[step % rounds :: rounds]:
            flat = bulk.tensor.reshape(-1)
            if flat.numel():
                looked_at = _bytes_of(flat[:: max(1, flat.numel() // 7)])
                reads.ask(looked_at, lambda raw: hasher.update(raw.numpy().tobytes()))
        return hasher.hexdigest


@dataclass(frozen=True)
class _Came:
    """The bytes that came, and the device for tensors that were on an accelerator; None: all stay in host memory."""

    whole: Tensor | None
    device: torch.device | None


def unpack(tree: Tree, whole: Tensor | None, own: Any = None, device: torch.device | None = None) -> Any:
    """Return the packed value with its original bits and types.

    Args:
        tree: Result of `Packer.pack`.
        whole: The bytes of the tensors.
        own: This member's value. It provides functions, and the devices of its tensors.
        device: Device of tensors that were on an accelerator and that `own` lacks. None: leave all in host memory.

    Raises:
        ConfigError: If `tree` and `own` do not fit, or if `Packer` did not make the tree.
    """
    try:
        return _unpack(tree, _Came(whole, device), own)
    except (ConfigError, torch.AcceleratorError, torch.OutOfMemoryError):
        raise
    except (ValueError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        raise ConfigError(
            f"the state that came for this member is none that a member packs ({error}): run the same script on all"
        ) from None


def _unpack(tree: Tree, came: _Came, own: Any = None) -> Any:
    if isinstance(tree, list):
        return [_unpack(item, came, _at(own, i)) for i, item in enumerate(tree)]
    if not isinstance(tree, dict):
        return tree
    match tree:
        case {"dict": pairs}:
            keys = [_unpack(key, came) for key, _ in pairs]
            return {key: _unpack(item, came, _of(own, key)) for key, (_, item) in zip(keys, pairs, strict=True)}
        case {"tuple": items}:
            return tuple(_unpack(item, came, _at(own, i)) for i, item in enumerate(items))
        case {"deque": items, "maxlen": maxlen}:
            return deque((_unpack(item, came, _at(own, i)) for i, item in enumerate(items)), maxlen)
        case {"set": items}:
            return {_unpack(item, came) for item in items}
        case {"frozenset": items}:
            return frozenset(_unpack(item, came) for item in items)
        case {"bytes": text}:
            return bytes.fromhex(text)
        case {"complex": [real, imaginary]}:
            return complex(real, imaginary)
        case {"tensor": start, "dtype": dtype, "shape": shape}:
            kind = getattr(torch, dtype)
            if not isinstance(kind, torch.dtype):
                raise TypeError(f"torch.{dtype} is no dtype")
            made = _cut(came.whole, start, torch.Size(shape).numel() * kind.itemsize).view(kind).reshape(shape)
            return _placed(made, own, came.device if tree.get("far") else None) if came.device else made
        case {"array": start, "dtype": dtype, "shape": shape, "scalar": scalar}:
            _check_kind(np.dtype(dtype))
            size_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
            array = _cut(came.whole, start, size_bytes).numpy().view(dtype).reshape(shape)
            return array[()] if scalar else array
        case {"code": None} if isinstance(own, _CODE):
            return own
    raise ConfigError("the state that came for this member is of another kind than its own: run the same script on all")


def _check_kind(dtype: np.dtype[Any]) -> None:
    """Raise TypeError unless the dtype is of numbers, texts or times. Arrays of objects cannot be sent as bytes."""
    if dtype.kind not in _ARRAY_KINDS:
        raise TypeError(f"arrays of {dtype} do not travel")


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, on its device."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8)


def _placed(made: Tensor, own: Any, far: torch.device | None) -> Tensor:
    """Move a tensor to the device of this member's own one, or else to `far`, or leave it in host memory."""
    return made.to(own.device if isinstance(own, Tensor) else far or made.device)


def _cut(whole: Tensor | None, start: int, size_bytes: int) -> Tensor:
    if not size_bytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    if whole is None or start + size_bytes > whole.numel():
        raise ConfigError("the state that came for this member lacks bytes: run the same script on all members")
    return whole[start : start + size_bytes].clone()


def _at(own: Any, index: int) -> Any:
    return own[index] if isinstance(own, list | tuple | deque) and index < len(own) else None


def _of(own: Any, key: Any) -> Any:
    return own.get(key) if isinstance(own, Mapping) else None
