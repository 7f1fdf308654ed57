"""Running statistics of normalisation layers, folded like gradients: who computed what does not show in them.

The hooks that catch what each micro-batch measures, and the arithmetic of what is caught. What lies in a slot and
travels is one affine map per element, as pairs `(keep, add)` side by side in float64: `new = keep · old + add`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from elastrain.errors import ConfigError
from elastrain.job.layout import STATISTICS, Layout, Leaf
from elastrain.offload.original_hooks import OriginalsHook

_NAMES = ("running_mean", "running_var", "num_batches_tracked")


def compose(first: Tensor, second: Tensor, out: Tensor) -> Tensor:
    """The map that applies `first`, then `second`; `out` may be one of them. 1-D of pairs, as in a slot.

    Products and sums are rounded one by one, so the bits do not depend on how long the tensors are.
    """
    kept = first[1::2] * second[0::2]
    torch.add(kept, second[1::2], out=kept)
    torch.mul(first[0::2], second[0::2], out=out[0::2])
    out[1::2].copy_(kept)
    return out


def clear(maps: Tensor) -> None:
    """Make them the maps that change nothing."""
    maps[0::2].fill_(1.0)
    maps[1::2].zero_()


def apply(maps: Tensor, values: Tensor) -> None:
    """Bring `values` (float64, 1-D) to after the step, in place."""
    values.mul_(maps[0::2]).add_(maps[1::2])


def square_norm(maps: Tensor) -> float:
    """They do not count towards the gradient's norm; but NaN or infinity in them makes the step a skipped one."""
    return 0.0 if bool(torch.isfinite(maps).all()) else float("nan")


def tracking(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Path and layer of everything that keeps running statistics. Raises ConfigError for what cannot be folded."""
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
    """Name in the model and value of each running statistic of a layer."""
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
    """What one forward of a layer measured."""

    layer: _Layer
    momentum: float
    values: dict[str, Tensor]


class RunningStatistics:
    """Takes over the running statistics of a model: they lie in the flats that `flat(index)` gives, None if absent.

    While a micro-batch is computed, layers in training measure into scratch; their own buffers stay as the last step
    left them, and are renewed by `refresh`. Recomputed forwards (activation checkpointing) do not count.
    """

    def __init__(self, model: nn.Module, layout: Layout, flat: Callable[[int], Tensor | None]) -> None:
        leaves = {layout.parameters[leaf.parameter].name: leaf for leaf in layout.leaves}
        self._flat = flat
        self._names = [spec.name for spec in layout.parameters]
        self._homes: list[tuple[nn.Module, str, Leaf]] = []
        self._layers: dict[nn.Module, _Layer] = {}
        for path, module in tracking(model):
            names = {name.rpartition(".")[2]: leaves[name] for name, _ in buffers_of(path, module)}
            self._layers[module] = _Layer(module=module, leaves={a: leaf.index for a, leaf in names.items()})
            for attribute, leaf in names.items():
                self._homes.append((module, attribute, leaf))
        for value, home in self._pairs():
            home.copy_(value)
        self._left: list[Tensor] = []
        """Copies of the layers' own buffers, as `refresh` has left them."""
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
        """Before the forward of a micro-batch."""
        self._active = True
        self._measured.clear()

    def take(self) -> list[MeasuredLayer]:
        """After it: what was measured, for `give`. In a pipeline other forwards may come before its backward."""
        measured, self._measured = self._measured, []
        return measured

    def give(self, measured: Iterable[MeasuredLayer], slot: dict[int, Tensor], weight: float = 1.0) -> None:
        """Before its backward: add what was measured to the slot's maps, leaf -> 1-D of pairs.

        weight: of the micro-batch. With 0, what a layer measured is left out if it is not finite.
        Until `end`, forwards that checkpoints compute again measure into scratch, and do not count.
        """
        self._active = True
        for each in measured:
            is_here = slot.keys() >= set(
                each.layer.leaves.values()
            )  # else a stub has stood there, and measured nothing
            if is_here and (weight or all(bool(value.isfinite().all()) for value in each.values.values())):
                _add(each, slot)

    def end(self) -> None:
        """After its backward, or where that comes later, after its forward."""
        self._active = False

    @torch.no_grad()
    def refresh(self) -> None:
        """Let the layers' own buffers be what the last committed step left, for evaluation and `state_dict`."""
        for value, home in self._pairs():
            value.data.copy_(home)  # the same bits where a backward still needs them: no version counter moves

        self._left = [getattr(module, attribute).clone() for module, attribute, _ in self._homes]

    def check_settled(self) -> None:
        """Raise ConfigError if a running statistic was changed outside of the micro-batches since `refresh`."""
        for (module, attribute, leaf), left in zip(self._homes, self._left, strict=False):
            value = getattr(module, attribute)
            if not torch.equal(value, left) and not bool(value.isnan().any()):
                raise ConfigError(
                    f"running statistic {self._names[leaf.parameter]!r} was changed outside of the micro-batches, by a "
                    "forward in training mode or by reset_running_stats(), say, and the next step would undo that: "
                    "call model.eval() before such a forward, and change statistics before or behind the loop"
                )

    def close(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """A layer's own buffer and where its values lie, of those that are here."""
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
def _add(measured: MeasuredLayer, slot: dict[int, Tensor]) -> None:
    """One forward more, in the order in which they were."""
    for attribute, leaf in measured.layer.leaves.items():
        keep, add = slot[leaf][0::2], slot[leaf][1::2]
        value = measured.values[attribute].reshape(-1).double()
        if attribute == "num_batches_tracked":
            add.add_(value)
        else:
            keep.mul_(1.0 - measured.momentum)
            # Not in place: in float64 the value is what the layer's backward has saved.
            add.mul_(1.0 - measured.momentum).add_(value * measured.momentum)


def is_statistics(layout: Layout, shard: int) -> bool:
    """Whether a shard holds running statistics rather than parameters."""
    return layout.flats[layout.shards[shard].flat].group == STATISTICS
