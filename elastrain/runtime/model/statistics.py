"""Running statistics of normalisation layers, folded like gradients, so that no assignment of work changes them.

Contains the hooks that catch the measurements of each micro-batch, and the arithmetic with them. Slots and messages
hold one affine map per element, as adjacent pairs `(keep, add)` in float64: `new = keep · old + add`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from elastrain.errors import ConfigError
from elastrain.job.layout import STATISTICS, Layout, Leaf
from elastrain.offload.original_hooks import OriginalsHook
from elastrain.pipeline.stubs.naming import plain_name

Ask = Callable[[Tensor, Callable[[Tensor], None]], None]
"""A function that takes values on a device, and a function that gets them later as bytes on the host."""
_NAMES = ("running_mean", "running_var", "num_batches_tracked")


def compose(first: Tensor, second: Tensor, out: Tensor) -> Tensor:
    """Write the map that applies `first`, then `second` to `out`, which may be one of them. All are 1-D of pairs.

    Each product and sum is rounded separately, so the bits do not depend on the length of the tensors.
    """
    kept = first[1::2] * second[0::2]
    torch.add(kept, second[1::2], out=kept)
    torch.mul(first[0::2], second[0::2], out=out[0::2])
    out[1::2].copy_(kept)
    return out


def clear(maps: Tensor) -> None:
    """Reset the maps to the identity (keep 1, add 0)."""
    maps[0::2].fill_(1.0)
    maps[1::2].zero_()


def apply(maps: Tensor, values: Tensor) -> None:
    """Apply the maps of a step to `values` (float64, 1-D), in place."""
    values.mul_(maps[0::2]).add_(maps[1::2])


def square_norm(maps: Tensor) -> float:
    """Return 0, because maps do not count in the gradient norm, or NaN for maps not finite, so the step is skipped."""
    return 0.0 if bool(torch.isfinite(maps).all()) else float("nan")


def tracking(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield path and module of each layer with running statistics. Raises ConfigError for layers that cannot be folded.

    These are SyncBatchNorm and layers without a momentum.
    """
    for path, module in model.named_modules():
        if not isinstance(module, _NormBase) or module.running_mean is None:
            continue
        if isinstance(module, nn.SyncBatchNorm):
            raise ConfigError(
                f"SyncBatchNorm {path!r} measures over members, so the result would depend on how many there are: "
                "use BatchNorm, whose statistics are those of a micro-batch"
            )
        if module.momentum is None:
            raise ConfigError(f"{type(module).__name__} {path!r} averages over all batches: give it a momentum")
        yield path, module


def buffers_of(path: str, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the name in the model and the value of each running statistic of a layer."""
    for name in _NAMES:
        value = getattr(module, name)
        if value is not None:
            yield f"{path}.{name}" if path else name, value


@dataclass(frozen=True, kw_only=True)
class _Layer:
    module: nn.Module
    leaves: dict[str, int]
    """Attribute -> leaf of the layout."""


@dataclass(frozen=True, kw_only=True)
class MeasuredLayer:
    """The measurements of one forward of a layer."""

    layer: _Layer
    momentum: float
    values: dict[str, Tensor]


class RunningStatistics:
    """The running statistics of a model. Their values lie in the flats that `flat(index)` returns (None if absent).

    While a micro-batch is computed, layers in training write their measurements to scratch. Their own buffers keep the
    values of the last step until `refresh`. Recomputed forwards (activation checkpointing) do not count.
    """

    def __init__(self, model: nn.Module, layout: Layout, flat: Callable[[int], Tensor | None]) -> None:
        leaves = {layout.parameters[leaf.parameter].name: leaf for leaf in layout.leaves}
        self._flat = flat
        self._names = [spec.name for spec in layout.parameters]
        self._homes: list[tuple[nn.Module, str, Leaf]] = []
        self._layers: dict[nn.Module, _Layer] = {}
        for path, module in tracking(model):
            names = {n.rpartition(".")[2]: leaves[plain_name(n)] for n, _ in buffers_of(path, module)}
            self._layers[module] = _Layer(module=module, leaves={a: leaf.index for a, leaf in names.items()})
            for attribute, leaf in names.items():
                self._homes.append((module, attribute, leaf))
        for value, home in self._pairs():
            home.copy_(value)
        self._left: list[Tensor] = []
        """Copies of the layers' own buffers after the last `refresh`."""
        self._active = False
        self._measured: list[MeasuredLayer] = []
        self._saved: dict[nn.Module, dict[str, Any]] = {}
        self._hooks = [
            hook
            for module in self._layers
            for hook in (
                module.register_forward_pre_hook(OriginalsHook(self._entering)),
                module.register_forward_hook(OriginalsHook(self._leaving), always_call=True),
            )
        ]

    def begin(self) -> None:
        """Start to catch measurements. Call it before the forward of a micro-batch."""
        self._active = True
        self._measured.clear()

    def take(self) -> list[MeasuredLayer]:
        """Return the measurements of the forward, for `give`. In a pipeline other forwards may come in between."""
        measured, self._measured = self._measured, []
        return measured

    def give(self, measured: Iterable[MeasuredLayer], slot: dict[int, Tensor], weight: float = 1.0) -> None:
        """Add measurements to the maps of a slot. Call it before the backward of the micro-batch.

        Until `end`, forwards that checkpoints recompute measure into scratch, and do not count.

        Args:
            measured: Measurements from `take`.
            slot: Leaf -> map, 1-D of pairs.
            weight: Weight of the micro-batch. With 0, measurements of a layer that are not finite are left out.
        """
        self._active = True
        for each in measured:
            is_here = slot.keys() >= set(
                each.layer.leaves.values()
            )  # if not, a stub stood in the layer's place and measured nothing
            if is_here:
                _add(each, slot, None if weight else [value.isfinite().all() for value in each.values.values()])

    def end(self) -> None:
        """Stop catching measurements, after the backward, or after the forward if the backward comes later."""
        self._active = False

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the values of the last committed step into the layers' own buffers, for evaluation and `state_dict`."""
        for value, home in self._pairs():
            value.data.copy_(home)  # .data, because a pending backward may check the version; its bits do not change

        self._left = [getattr(module, attribute).clone() for module, attribute, _ in self._homes]

    def check_settled(self, ask: Ask | None = None) -> None:
        """Raise ConfigError if a running statistic was changed outside of the micro-batches since `refresh`.

        Args:
            ask: Takes the flags of statistics on a device, and what raises the error. None: this call waits for them.
        """
        flags = [
            _is_changed(getattr(module, name), left)
            for (module, name, _), left in zip(self._homes, self._left, strict=False)
        ]
        there = [flag for flag in flags if isinstance(flag, Tensor)]
        if there and ask is not None:
            ask(torch.stack(there), self._refuse_changed)
        else:
            self._refuse_changed(torch.stack(there).cpu() if there else flags)

    def _refuse_changed(self, flags: Iterable[Tensor | bool]) -> None:
        """Raise ConfigError if one of the flags, in the order of `_homes`, is set."""
        for (_, _, leaf), is_changed in zip(self._homes, flags, strict=False):
            if is_changed:
                raise ConfigError(
                    f"running statistic {self._names[leaf.parameter]!r} was changed outside of the micro-batches, by a "
                    "forward in training mode or by reset_running_stats(), say, and the next step would undo that: "
                    "call model.eval() before such a forward, and change statistics before or behind the loop"
                )

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each layer's own buffer and the part of the flat with its values, if this member has the flat."""
        for module, attribute, leaf in self._homes:
            flat, value = self._flat(leaf.flat), getattr(module, attribute)
            if flat is not None:
                yield value, flat[leaf.start : leaf.start + leaf.numel].view(value.shape)

    def _entering(self, module: Any, inputs: object) -> None:
        if not self._active or not module.training or module in self._saved:
            return
        attributes = self._layers[module].leaves
        self._saved[module] = {"momentum": module.momentum, **{a: module._buffers[a] for a in attributes}}
        for attribute in attributes:
            module._buffers[attribute] = torch.zeros_like(getattr(module, attribute))
        module.momentum = 1.0  # the scratch becomes the measured value itself

    def _leaving(self, module: Any, inputs: object, output: object) -> None:
        saved = self._saved.pop(module, None)
        if saved is None:
            return
        layer = self._layers[module]
        values = {attribute: getattr(module, attribute) for attribute in layer.leaves}
        module.momentum = momentum = saved.pop("momentum")
        module._buffers.update(saved)
        if torch._C._current_graph_task_id() == -1:
            self._measured.append(MeasuredLayer(layer=layer, momentum=momentum, values=values))


@torch.no_grad()
def _add(measured: MeasuredLayer, slot: dict[int, Tensor], conditions: Sequence[Tensor] | None) -> None:
    """Add the measurements of one more forward. Call it in the order of the forwards.

    `conditions`: flags, one for each measurement. Nothing is added unless all are true. No thread waits for a device.
    """
    counts = None if conditions is None else torch.stack(list(conditions)).all()
    for attribute, leaf in measured.layer.leaves.items():
        before = None if counts is None else slot[leaf].clone()
        keep, add = slot[leaf][0::2], slot[leaf][1::2]
        value = measured.values[attribute].reshape(-1).double()
        if attribute == "num_batches_tracked":
            add.add_(value)
        else:
            keep.mul_(1.0 - measured.momentum)
            # Not in place, because in float64 `value` is the tensor that the layer saved for backward.
            add.mul_(1.0 - measured.momentum).add_(value * measured.momentum)
        if counts is not None and before is not None:
            slot[leaf].copy_(torch.where(counts, slot[leaf], before))


def _is_changed(value: Tensor, left: Tensor) -> Tensor | bool:
    """Return True, or a flag on the device, if the value is not what was left, and has no NaN."""
    if value.device.type == "cpu":
        return not torch.equal(value, left) and not bool(value.isnan().any())
    return (value != left).any() & ~value.isnan().any()


def is_statistics(layout: Layout, shard: int) -> bool:
    """Return True if a shard holds running statistics rather than parameters."""
    return layout.flats[layout.shards[shard].flat].group == STATISTICS
