"""Updates of an optimizer on a device: the kernels that it has for them, scalars of states, and parts of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from elastrain.errors import ConfigError
from elastrain.job.layout import Layout
from elastrain.snapshot.shard_state import ShardState

MOST_NUMEL = 64 << 20
"""Elements of gradients that are scaled and applied in one go, at most."""
Groups = list[dict[str, Any]]
Make = Callable[[Groups], Optimizer]


class DeviceUpdates:
    """The updates of a device, as far as they differ from the host's.

    Args:
        layout: The layout of the job.
        make: Makes an optimizer of the script's class.
        groups: Returns its parameter groups with placeholders on the device. The argument says if kernels may be fused.
    """

    def __init__(self, layout: Layout, make: Make, groups: Callable[[bool], Groups]) -> None:
        self.is_fused = True
        """False if the device has no fused kernel of the class."""
        self._layout = layout
        self._numel = sum(shard.numel for shard in layout.shards)
        try:
            self._scalars = [_scalars_there(make, group) for group in groups(True)]
        except RuntimeError as error:
            # Torch has no list of its fused kernels by device. All other errors are the device's, or the script's.
            if not (isinstance(error, NotImplementedError) or "fused" in str(error)):
                raise
            self.is_fused = False
            self._scalars = [_scalars_there(make, group) for group in groups(False)]

    def parts(self, sizes: Sequence[int]) -> list[slice]:
        """Divide gradients of these sizes into parts, so that scaled ones need little memory beside the gradients.

        A part has at most an eighth of them, but single shards and 1/64 of the model are not divided: each part costs
        a call of the optimizer.
        """
        most, starts, numel = min(MOST_NUMEL, max(sum(sizes) // 8, self._numel // 64)), [0], 0
        for index, size in enumerate(sizes):
            if numel and numel + size > most:
                starts.append(index)
                numel = 0
            numel += size
        return [slice(start, stop) for start, stop in zip(starts, [*starts[1:], len(sizes)], strict=True)]

    def copy_scalars_in(self, stepped: Sequence[tuple[ShardState, int, Tensor]]) -> None:
        """Move scalars such as `step` to the device, where its kernels want them, in one copy per dtype.

        Args:
            stepped: State, index of the piece, and parameters of the piece.
        """
        far: dict[torch.dtype, list[tuple[dict[str, Any], str]]] = {}
        for state, index, _ in stepped:
            piece = state.pieces[index]
            for name in self._scalars[self._layout.pieces[state.shard][index].group]:
                scalar = piece.get(name)
                if isinstance(scalar, Tensor) and scalar.device.type == "cpu":
                    far.setdefault(scalar.dtype, []).append((piece, name))
        for places in far.values():
            here = torch.stack([piece[name] for piece, name in places]).to(stepped[0][2].device)
            for (piece, name), scalar in zip(places, here.unbind(), strict=True):
                piece[name] = scalar


def _scalars_there(make: Make, group: dict[str, Any]) -> frozenset[str]:
    """Step a placeholder, and return the names of the scalars that its state has on the device."""
    made = make([group])
    [parameter] = group["params"]
    parameter.grad = torch.zeros_like(parameter)
    made.step()
    tensors = {name: its for name, its in made.state[parameter].items() if isinstance(its, Tensor)}
    for name, its in tensors.items():
        if its.dim() and its.device != parameter.device:
            raise ConfigError(
                f"{type(made).__name__} keeps its state {name!r} on {its.device}, and the parameters are on "
                f"{parameter.device}, from where alone this version sends states to other members: let the optimizer "
                "keep it there, or train on the CPU"
            )
    return frozenset(name for name, its in tensors.items() if not its.dim() and its.device.type != "cpu")
