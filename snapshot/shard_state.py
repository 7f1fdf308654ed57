"""The optimizer state of one shard after a step. Holders keep, copy and compare it, and continue from it.

It consists of plain tensors and scalars with names, and knows nothing of models, members or files. The packed form has
nothing executable: scalars travel as exact JSON text, and 1-D tensors travel beside that text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, TypeVar

import torch
import xxhash
from torch import Tensor

from elastrain.snapshot.digest import checksum, combine, digest

Value = Tensor | float | int | bool | None
"""One entry of a piece's state: a 1-D tensor, a scalar tensor such as `step`, or a plain number."""

T = TypeVar("T")
_FORMAT = 1
_DTYPES = {
    name: getattr(torch, name)
    for name in ("float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_JOIN_LIMIT_BYTES = 1 << 20
_META_LIMIT_BYTES = 64 * 1024 * 1024


@dataclass(kw_only=True)
class ShardState:
    """Parameters and optimizer state of one shard. The optimizer changes them in place.

    `pieces` has one dictionary per piece of the shard: the state that torch.optim keeps for a parameter. The dictionary
    is empty if the piece was never stepped.
    """

    shard: int
    """Number of the shard. This module does not interpret it."""
    version: int = -1
    """The last step that was applied; -1 before the first step."""
    parameters: Tensor
    """The shard's parameters as a 1-D tensor."""
    pieces: list[dict[str, Value]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        values = [value for piece in self.pieces for value in piece.values()]
        return self.parameters.nbytes + sum(value.nbytes for value in values if isinstance(value, Tensor))

    def clone(self) -> ShardState:
        """Return a copy that shares no memory with this state."""
        return ShardState(
            shard=self.shard,
            version=self.version,
            parameters=self.parameters.detach().clone(),
            pieces=[
                {name: v.detach().clone() if isinstance(v, Tensor) else v for name, v in piece.items()}
                for piece in self.pieces
            ],
        )

    def on(self, device: torch.device) -> ShardState:
        """Return the state with its 1-D tensors on a device, which the caller's stream may use. Waits for the copies.

        Tensors that lie there already are not copied. Scalars stay where they are.
        """

        def moved(value: Value) -> Value:
            return value.to(device) if isinstance(value, Tensor) and value.dim() else value

        pieces = [{name: moved(value) for name, value in piece.items()} for piece in self.pieces]
        return replace(self, parameters=self.parameters.to(device), pieces=pieces)

    def digest(self) -> int:
        """Return a digest, in 0..2**64-1, of all fields and entry names. It is equal on every device."""
        meta, tensors = self.pack()
        head = int.from_bytes(blake2b(meta, digest_size=8).digest(), "little")
        return combine([head, *(digest(tensor) for tensor in _joined(tensors))])

    def checksum(self) -> int:
        """Return a faster digest, for holders that compare their states within one job.

        Do not store it: `elastrain.snapshot.digest.checksum` says why.
        """
        meta, tensors = self.pack()
        return combine([xxhash.xxh3_64_intdigest(meta), *(checksum(tensor) for tensor in tensors)])

    def pack(self) -> tuple[bytes, list[Tensor]]:
        """Return `(meta, tensors)` for `unpack`: JSON text, and the 1-D tensors themselves (not copies)."""
        tensors = [self.parameters]
        scalars = _on_host(value for piece in self.pieces for value in piece.values() if _is_scalar(value))
        pieces = [
            {name: _encoded(scalars.get(id(value), value), tensors) for name, value in sorted(piece.items())}
            for piece in self.pieces
        ]
        meta = {
            "format": _FORMAT,
            "shard": self.shard,
            "version": self.version,
            "parameters": _tensor_entry(0, self.parameters),
            "pieces": pieces,
        }
        return json.dumps(meta, separators=(",", ":"), sort_keys=True).encode(), tensors

    @staticmethod
    def described(meta: bytes) -> int | None:
        """Return the shard number in text that `pack` made, or None if the text does not come from `pack`."""
        try:
            found = json.loads(meta)
        except (ValueError, RecursionError):
            return None
        shard = found.get("shard") if isinstance(found, dict) else None
        return shard if isinstance(shard, int) else None

    @staticmethod
    def unpack(meta: bytes, tensors: Sequence[Tensor]) -> ShardState:
        """Return the state that `pack` described. The state uses the given tensors themselves, not copies.

        Raises ValueError if meta and tensors do not fit together exactly.
        """
        return _unpacked(meta, tensors)


def _joined(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Join small tensors of one dtype end to end, so that they need one digest instead of many.

    The meta text is part of the digest too, and says where each tensor begins.
    """
    small = [tensor for tensor in tensors if tensor.nbytes <= _JOIN_LIMIT_BYTES]
    joined = [tensor for tensor in tensors if tensor.nbytes > _JOIN_LIMIT_BYTES]
    dtypes = dict.fromkeys(tensor.dtype for tensor in small)
    return joined + [torch.cat([tensor for tensor in small if tensor.dtype == dtype]) for dtype in dtypes]


def _unpacked(meta: bytes, tensors: Sequence[Tensor]) -> ShardState:
    if len(meta) > _META_LIMIT_BYTES:
        raise ValueError(f"shard state: {len(meta)} bytes of description; at most {_META_LIMIT_BYTES} are taken")
    try:
        described = json.loads(meta)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"shard state: the description is not JSON ({type(error).__name__})") from None
    fields = _dictionary(described, "description")
    if set(fields) != {"format", "shard", "version", "parameters", "pieces"} or fields["format"] != _FORMAT:
        raise ValueError(f"shard state: expected format {_FORMAT} with its five fields; got {sorted(fields)[:8]}")
    taker = _Taker(tensors)
    parameters = taker.take(fields["parameters"])
    if not isinstance(fields["pieces"], list):
        raise ValueError("shard state: pieces must be a list")
    pieces = [
        {name: _decoded(entry, taker) for name, entry in _dictionary(piece, "piece").items()}
        for piece in fields["pieces"]
    ]
    taker.finish()
    shard, version = _integer(fields["shard"], "shard"), _integer(fields["version"], "version")
    if shard < 0 or version < -1:
        raise ValueError(f"shard state: shard {shard} or version {version} is out of range")
    return ShardState(shard=shard, version=version, parameters=parameters, pieces=pieces)


def _tensor_entry(index: int, tensor: Tensor) -> dict[str, Any]:
    return {"tensor": index, "dtype": _name(tensor.dtype), "numel": tensor.numel()}


def _name(dtype: torch.dtype) -> str:
    if dtype not in _NAMES:
        raise ValueError(f"shard state: tensors of {dtype} are not supported; supported are {', '.join(_DTYPES)}")
    return _NAMES[dtype]


def _is_scalar(value: Value) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0


def _on_host(scalars: Iterable[Any]) -> dict[int, Tensor]:
    """Return id -> copy on the host for scalars on a device. Waits once for each of their dtypes."""
    far: dict[torch.dtype, list[Tensor]] = {}
    for scalar in scalars:
        if scalar.device.type != "cpu":
            far.setdefault(scalar.dtype, []).append(scalar)
    return {
        id(scalar): copy
        for same in far.values()
        for scalar, copy in zip(same, torch.stack(same).cpu().unbind(), strict=True)
    }


def _encoded(value: Value, tensors: list[Tensor]) -> dict[str, Any]:
    """Return one entry as JSON, and append a 1-D tensor to `tensors`.

    Floats are written in hexadecimal, which is exact and can express NaN.
    """
    match value:
        case None:
            return {"none": True}
        case bool():
            return {"bool": value}
        case int():
            return {"int": str(value)}
        case float():
            return {"float": value.hex()}
        case Tensor() if value.dim() == 0:
            bits = bytes(value.detach().view(1).view(torch.uint8).tolist())
            return {"scalar": bits.hex(), "dtype": _name(value.dtype)}
        case Tensor() if value.dim() == 1 and value.is_contiguous():
            tensors.append(value)
            return _tensor_entry(len(tensors) - 1, value)
    what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    raise ValueError(f"shard state: cannot pack {what}; expected a number or a contiguous 1-D tensor")


class _Taker:
    """An iterator over the given tensors. It gives each one once, in order, if its description is right."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._next = 0

    def take(self, entry: object) -> Tensor:
        fields = _dictionary(entry, "tensor entry")
        if set(fields) != {"tensor", "dtype", "numel"} or fields["tensor"] != self._next:
            raise ValueError(f"shard state: expected the description of tensor {self._next}; got {str(entry)[:80]}")
        if self._next >= len(self._tensors):
            raise ValueError(f"shard state: tensor {self._next} is described, but only {len(self._tensors)} came")
        tensor = self._tensors[self._next]
        expected = (_dtype(fields["dtype"]), (_integer(fields["numel"], "numel"),))
        if (tensor.dtype, tuple(tensor.shape)) != expected:
            raise ValueError(
                f"shard state: tensor {self._next} should be {expected}; got {tensor.dtype} {tuple(tensor.shape)}"
            )
        self._next += 1
        return tensor

    def finish(self) -> None:
        if self._next != len(self._tensors):
            raise ValueError(f"shard state: {len(self._tensors)} tensors came, {self._next} are described")


def _decoded(entry: object, taker: _Taker) -> Value:
    match entry:
        case {"none": True, **rest} if not rest:
            return None
        case {"bool": bool() as value, **rest} if not rest:
            return value
        case {"int": str() as text, **rest} if not rest and len(text) <= 32:
            return _number(int, text)
        case {"float": str() as text, **rest} if not rest:
            return _number(float.fromhex, text)
        case {"scalar": str() as text, "dtype": name, **rest} if not rest:
            return _scalar(text, _dtype(name))
        case {"tensor": _}:
            return taker.take(entry)
    raise ValueError(f"shard state: unknown entry {str(entry)[:80]}")


def _number(read: Callable[[str], T], text: str) -> T:
    try:
        return read(text)
    except (ValueError, OverflowError):
        raise ValueError(f"shard state: {text[:40]!r} is no number") from None


def _scalar(text: str, dtype: torch.dtype) -> Tensor:
    raw = _number(bytes.fromhex, text)
    if len(raw) != dtype.itemsize or (dtype == torch.bool and raw[0] > 1):
        raise ValueError(f"shard state: a scalar of {dtype} has {dtype.itemsize} bytes; got {len(raw)}")
    return torch.tensor(list(raw), dtype=torch.uint8).view(dtype).view(())


def _dtype(name: object) -> torch.dtype:
    if not isinstance(name, str) or name not in _DTYPES:
        raise ValueError(f"shard state: unknown dtype {str(name)[:40]}")
    dtype = _DTYPES[name]
    assert isinstance(dtype, torch.dtype)
    return dtype


def _dictionary(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"shard state: the {what} must be an object; got {type(value).__name__}")
    return value


def _integer(value: object, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"shard state: {what} must be an integer; got {str(value)[:40]}")
    return value
