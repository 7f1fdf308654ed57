"""The ways to hold activations that are compared: each runs one forward and backward, gradients go to `.grad`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from elastrain.offload import ActivationOffload
from experiments.offload.models import Model, plainly

Step = Callable[[], None]


def recomputed(block: nn.Module, *inputs: Tensor) -> Tensor:
    """Layerwise recomputation: only a layer's input is kept."""
    found: Tensor = checkpoint(block, *inputs, use_reentrant=False)
    return found


class TorchSave:
    """The plain way, of PyTorch's tutorial on saved-tensor hooks, around each layer: `torch.save`, `torch.load`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.written_bytes = 0

    def __call__(self, block: nn.Module, *inputs: Tensor) -> Tensor:
        with saved_tensors_hooks(self._pack, self._unpack):
            found: Tensor = block(*inputs)
            return found

    def _pack(self, tensor: Tensor) -> Any:
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter) or tensor.nbytes < 256 << 10:
            return tensor.detach()
        file = tempfile.NamedTemporaryFile(dir=self._directory, suffix=".pt")  # noqa: SIM115 - deleted with the graph
        torch.save(tensor.detach(), file)
        self.written_bytes += tensor.nbytes
        return file

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        packed.seek(0)
        found: Tensor = torch.load(packed, weights_only=True)
        return found


def step(model: Model, tokens: Tensor, run: Any, around: AbstractContextManager[Any]) -> None:
    """One forward and backward, the same random numbers each time."""
    torch.manual_seed(1)
    with around:
        loss = model(tokens, run)
    loss.backward()


def make(model: Model, tokens: Tensor, *, offload: ActivationOffload, directory: Path) -> dict[str, Step]:
    """The variants by name."""
    coarse = TorchSave(directory)
    return {
        "keep": lambda: step(model, tokens, plainly, nullcontext()),
        "ours": lambda: step(model, tokens, plainly, offload),
        "recompute": lambda: step(model, tokens, recomputed, nullcontext()),
        "save_on_cpu": lambda: step(model, tokens, plainly, save_on_cpu()),
        "torch_save": lambda: step(model, tokens, coarse, nullcontext()),
    }
