"""A checkpoint in the terms of plain PyTorch: whole tensors by the model's names, without shards.

Jobs' checkpoints and imported ones give the same value. Exports are made from it. A job that divides its parameters
into other shards than the checkpoint also starts from it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from elastrain.snapshot.durable.errors import CheckpointError, DamagedError
from elastrain.snapshot.durable.manifest import BUFFERS, MODEL, OPTIMIZER, GroupEntry, ParameterEntry, PieceEntry
from elastrain.snapshot.durable.reading import Checkpoint
from elastrain.snapshot.shard_state import ShardState, Value


@dataclass(frozen=True, kw_only=True)
class PlainState:
    """The tensors of a model and of its optimizer, by name."""

    model: dict[str, Tensor]
    """Parameters, running statistics and buffers, in the model's own shapes and dtypes."""
    masters: dict[str, Tensor]
    """The float32 copies of half-precision parameters, which the optimizer updates."""
    state: dict[str, dict[str, Value]]
    """Parameter -> state that torch.optim keeps for it, in the parameter's shape.

    Parameters that were never stepped are missing.
    """
    groups: tuple[GroupEntry, ...]
    optimizer: str
    """Name of the optimizer's class; empty if unknown."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        entries = [value for entry in self.state.values() for value in entry.values()]
        tensors = [*self.model.values(), *self.masters.values(), *entries]
        return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))


def gather(checkpoint: Checkpoint) -> PlainState:
    """Return the whole state of a checkpoint, in new memory.

    Raises what reading raises, and CheckpointError if pieces do not fit together.
    """
    if MODEL in checkpoint.manifest.attachments:
        return _imported(checkpoint)
    manifest = checkpoint.manifest
    gathering = Gathering(manifest.parameters, [shard.pieces for shard in manifest.shards])
    for shard in checkpoint.read_shards(range(len(manifest.shards))):
        gathering.add(shard)
    buffers = unpack_named(*checkpoint.read_attachment(BUFFERS)) if BUFFERS in checkpoint.manifest.attachments else {}
    state = gathering.state()
    model, masters = gathering.parameters()
    return PlainState(
        model={**model, **buffers},
        masters=masters,
        state=state,
        groups=manifest.groups,
        optimizer=manifest.optimizer,
    )


class Gathering:
    """A collection of whole parameters that is filled shard by shard.

    Args:
        parameters: All parameters and running statistics of the model.
        shards: Pieces of each shard, in the order of the shards.
    """

    def __init__(self, parameters: Sequence[ParameterEntry], shards: Sequence[Sequence[PieceEntry]]) -> None:
        self._parameters = parameters
        self._shards = shards
        self._wholes: dict[tuple[int, str], Tensor] = {}
        """(parameter, entry) -> the whole tensor. The entry of the parameter's own values is ""."""
        self._scalars: dict[tuple[int, str], Value] = {}
        self._filled: dict[tuple[int, str], int] = {}
        """(parameter, entry) -> number of elements added."""

    def add(self, state: ShardState, *, with_values: bool = True, is_intact: Callable[[], bool] = lambda: True) -> bool:
        """Copy the state of one shard. Raises CheckpointError if a scalar differs between pieces of a parameter.

        Args:
            state: The state of the shard.
            with_values: False if only the optimizer's state is wanted, and not the parameters' own values.
            is_intact: Function that is called once the tensors are copied. If it returns False, the copy does not
                count, and another one has to follow.

        Returns:
            What `is_intact` has returned.
        """
        tensors, scalars = self._divided(state, with_values=with_values)
        begun = [(piece.parameter, entry) for piece, entry, part in tensors if self._put(piece, entry, part)]
        if not is_intact():
            for key in begun:
                del self._wholes[key]
            return False
        for piece, entry, _ in tensors:
            key = piece.parameter, entry
            self._filled[key] = self._filled.get(key, 0) + piece.valid_numel
        for piece, entry, value in scalars:
            self._keep(piece, entry, value)
        return True

    def _divided(
        self, state: ShardState, *, with_values: bool
    ) -> tuple[list[tuple[PieceEntry, str, Tensor]], list[tuple[PieceEntry, str, Value]]]:
        """Return the parts of whole tensors in a state, and its scalars."""
        tensors, scalars = list[tuple[PieceEntry, str, Tensor]](), list[tuple[PieceEntry, str, Value]]()
        for number, piece in enumerate(self._shards[state.shard]):
            own = state.parameters[piece.start : piece.start + piece.numel]
            if with_values and own.numel() == piece.numel:
                tensors.append((piece, "", own))
            kept = state.pieces[number] if number < len(state.pieces) else {}
            for entry, value in sorted(kept.items()):
                if isinstance(value, Tensor) and value.dim() == 1 and value.numel() == piece.numel:
                    tensors.append((piece, entry, value))
                else:
                    scalars.append((piece, entry, value))
        return tensors, scalars

    def _keep(self, piece: PieceEntry, entry: str, value: Value) -> None:
        kept = value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
        if not _same(self._scalars.setdefault((piece.parameter, entry), kept), kept):
            raise CheckpointError(
                f"{entry!r} of {self._name(piece.parameter)} differs between its pieces: plain PyTorch has one for all"
            )

    def _put(self, piece: PieceEntry, entry: str, part: Tensor) -> bool:
        """Copy a part into its whole tensor. Returns True if the tensor is new."""
        key = piece.parameter, entry
        is_new = key not in self._wholes
        if is_new:
            self._wholes[key] = _empty(self._parameters[piece.parameter].numel, part.dtype)
        self._wholes[key][piece.offset : piece.offset + piece.valid_numel] = part[: piece.valid_numel]
        return is_new

    def state(self) -> dict[str, dict[str, Value]]:
        """Return the optimizer's state by parameter name. Raises CheckpointError if elements are missing."""
        for (index, entry), filled in self._filled.items():
            if filled != self._parameters[index].numel:
                raise CheckpointError(f"{entry or 'values'} of {self._name(index)}: only {filled} elements are there")
        shaped = {key: whole.view(self._parameters[key[0]].shape) for key, whole in self._wholes.items()}
        found: dict[int, dict[str, Value]] = {}
        for index, entry in sorted({*shaped, *self._scalars}):
            if entry:
                key = index, entry
                found.setdefault(index, {})[entry] = shaped[key] if key in shaped else self._scalars[key]
        return {self._parameters[index].name: kept for index, kept in found.items()}

    def parameters(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return all parameters in the model's shapes and dtypes, and the float32 copies of those in half precision.

        Raises CheckpointError if a parameter lies in no shard.
        """
        model, masters = dict[str, Tensor](), dict[str, Tensor]()
        for index, spec in enumerate(self._parameters):
            dtype: torch.dtype = getattr(torch, spec.dtype)
            if (index, "") not in self._wholes and spec.numel:
                raise CheckpointError(f"{spec.name!r} lies in no shard")
            value = self._wholes.get((index, ""), torch.empty(0, dtype=dtype)).view(spec.shape)
            model[spec.name] = value.to(dtype)
            if dtype != value.dtype and dtype.is_floating_point:
                masters[spec.name] = value
            model.update((other, model[spec.name]) for other in spec.also)
        return model, masters

    def _name(self, index: int) -> str:
        return repr(self._parameters[index].name)


def _empty(numel: int, dtype: torch.dtype) -> Tensor:
    # numpy asks the kernel for huge pages, which take a fraction of the time of small ones when they are first written.
    return torch.from_numpy(np.empty(numel * dtype.itemsize, dtype=np.uint8)).view(dtype)


def _same(one: Value, other: Value) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and one == other


def _imported(checkpoint: Checkpoint) -> PlainState:
    state: dict[str, dict[str, Value]] = {}
    if OPTIMIZER in checkpoint.manifest.attachments:
        for key, value in unpack_named(*checkpoint.read_attachment(OPTIMIZER)).items():
            name, _, entry = key.rpartition(".")
            state.setdefault(name, {})[entry] = value
    return PlainState(
        model=unpack_named(*checkpoint.read_attachment(MODEL)),
        masters={},
        state=state,
        groups=checkpoint.manifest.groups,
        optimizer=checkpoint.manifest.optimizer,
    )


def pack_named(tensors: Mapping[str, Tensor]) -> tuple[str, list[Tensor]]:
    """Return named tensors as an attachment: a JSON text with names and shapes, and 1-D tensors."""
    return (
        json.dumps([{"name": name, "shape": list(tensor.shape)} for name, tensor in tensors.items()]),
        [tensor.detach().contiguous().view(-1) for tensor in tensors.values()],
    )


def unpack_named(text: str, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the tensors that `pack_named` packed. Raises DamagedError if text and tensors do not match."""
    try:
        return {each["name"]: value.view(each["shape"]) for each, value in zip(json.loads(text), tensors, strict=True)}
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        raise DamagedError(f"an attachment is none of named tensors ({error})") from None


def optimizer_state_dict(plain: PlainState, *, by_name: bool = False) -> dict[str, Any]:
    """Return the state in the form of `torch.optim.Optimizer.state_dict`.

    With `by_name`, parameters are named instead of numbered, as `torch.distributed` does it.
    """
    names = [name for group in plain.groups for name in group.parameters]
    keys: dict[str, Any] = {name: name if by_name else number for number, name in enumerate(names)}
    # JSON turned tuples (such as betas) into lists; torch.optim expects tuples.
    hypers = [{n: tuple(v) if isinstance(v, list) else v for n, v in g.hyper.items()} for g in plain.groups]
    groups = zip(plain.groups, hypers, strict=True)
    return {
        "state": {keys[name]: dict(plain.state[name]) for name in names if name in plain.state},
        "param_groups": [{**hyper, "params": [keys[name] for name in g.parameters]} for g, hyper in groups],
    }
