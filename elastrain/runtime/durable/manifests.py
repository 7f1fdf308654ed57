"""The manifest of a checkpoint, made from layout, optimizer, commit record and written parts. Values only."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from torch import Tensor, nn
from torch.optim import Optimizer

from elastrain.job.layout import Layout, Shard, round_up
from elastrain.job.values import Record
from elastrain.pipeline.stubs.naming import plain_name
from elastrain.snapshot.durable.errors import CheckpointError
from elastrain.snapshot.durable.manifest import GroupEntry, Manifest, ParameterEntry, Part, PieceEntry, ShardEntry
from elastrain.snapshot.durable.plain import Gathering
from elastrain.snapshot.durable.writing import Written

_WRITTEN = msgspec.json.Decoder(Written)


@dataclass(frozen=True, kw_only=True)
class Begin:
    """The part of a manifest about the job. `hyper` has the hyperparameters of each parameter group after the step."""

    job: str
    life: int
    time_s: float
    spec: Mapping[str, Any]
    hyper: Sequence[Mapping[str, Any]]
    changes: tuple[str, ...]


class Described:
    """The part of a manifest that never changes: parameter names, shapes and groups."""

    def __init__(self, layout: Layout, model: nn.Module, optimizer: Optimizer) -> None:
        self._layout = layout
        self._model = model
        self._optimizer = type(optimizer).__name__
        named = {plain_name(n): q for n, q in model.named_parameters(remove_duplicate=False)}
        known = {spec.name for spec in layout.parameters}
        names = {id(parameter): name for name, parameter in named.items() if name in known}
        groups = ([id(each) for each in group["params"]] for group in optimizer.param_groups)
        self._groups = [tuple(names[each] for each in group if each in names) for group in groups]
        state = {plain_name(name): value for name, value in model.state_dict().items()}
        self._parameters = tuple(
            # The model's dtype, because shards keep running statistics in a wider dtype.
            ParameterEntry(
                name=s.name,
                shape=s.shape,
                dtype=str(state[s.name].dtype).removeprefix("torch."),
                group=s.flat_group,
                also=_also(s.name, state),
            )
            for s in layout.parameters
        )

    def buffers(self, kept: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """Return the model's buffers that are no running statistics. Values in `kept` take precedence."""
        known = {name for entry in self._parameters for name in (entry.name, *entry.also)}
        # With `keep_vars`, because in a pipeline a plain state_dict() raises if this member lacks some blocks.
        state = {plain_name(name): value for name, value in self._model.state_dict(keep_vars=True).items()}
        found = {name: kept.get(name, value) for name, value in state.items() if name not in known}
        return {name: value for name, value in found.items() if value is not None}

    def gathering(self) -> Gathering:
        """Return an empty collection of whole parameters, which takes the states of all shards."""
        return Gathering(self._parameters, [self._pieces(shard) for shard in self._layout.shards])

    def manifest(
        self, begin: Begin, record: Record, told: Sequence[str], attachments: Mapping[str, tuple[Part, ...]]
    ) -> Manifest:
        """Return the manifest of a checkpoint. `told` has the `Written` texts of all writers.

        Raises CheckpointError if the copies of a shard differ.
        """
        copies: dict[int, list[Written]] = {}
        for each in told:
            written = _WRITTEN.decode(each)
            copies.setdefault(written.shard, []).append(written)
        groups = [GroupEntry(parameters=n, hyper=dict(h)) for n, h in zip(self._groups, begin.hyper, strict=True)]
        return Manifest(
            job=begin.job,
            life=begin.life,
            step=record.step,
            time_s=begin.time_s,
            spec=dict(begin.spec),
            changes=begin.changes,
            counters=_counters(record),
            optimizer=self._optimizer,
            parameters=self._parameters,
            groups=tuple(groups),
            shards=tuple(self._shard(shard, copies.get(shard.index, [])) for shard in self._layout.shards),
            attachments=dict(attachments),
        )

    def _shard(self, shard: Shard, copies: Sequence[Written]) -> ShardEntry:
        if len({copy.digest for copy in copies}) > 1:  # no reader could decide which one is right
            files = " and ".join(copy.part.file for copy in copies)
            raise CheckpointError(f"the copies of shard {shard.index} in {files} differ")
        return ShardEntry(
            index=shard.index,
            block=self._layout.blocks[shard.block],
            dtype=shard.master_dtype,
            numel=shard.numel,
            pieces=tuple(self._pieces(shard)),
            digest=copies[0].digest if copies else 0,
            parts=tuple(copy.part for copy in copies),
        )

    def _pieces(self, shard: Shard) -> list[PieceEntry]:
        """Return all pieces of a shard.

        The pieces in the layout are fewer: only those that the optimizer steps.
        """
        found = []
        for leaf in self._layout.leaves:
            start, stop = max(shard.start, leaf.start), min(shard.stop, leaf.start + round_up(leaf.numel))
            if leaf.flat != shard.flat or start >= stop:
                continue
            valid = max(0, min(stop, leaf.start + leaf.numel) - start)
            offset = min(start - leaf.start, leaf.numel)
            found.append(
                PieceEntry(
                    parameter=leaf.parameter,
                    start=start - shard.start,
                    numel=stop - start,
                    valid_numel=valid,
                    offset=offset,
                )
            )
        return found


def hyper_of(loop: str) -> list[dict[str, Any]]:
    """Return the hyperparameters of each parameter group from the text of the loop's state."""
    hyper: list[dict[str, Any]] = json.loads(loop)["hyper"]
    return hyper


def _counters(record: Record) -> dict[str, Any]:
    counted = record.contribution
    return {
        "loss": counted.loss / counted.weight if counted.weight else None,
        "samples": counted.samples,
        "skipped": record.skipped,
        "scaler": msgspec.to_builtins(record.next_scaler),
    }


def _also(name: str, state: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Return the other names in a `state_dict` that share the memory of `name`."""
    mine = state[name]
    same = [key for key, value in state.items() if value.data_ptr() == mine.data_ptr() and value.shape == mine.shape]
    return tuple(key for key in same if key != name) if mine.numel() else ()
