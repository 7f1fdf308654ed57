"""The ways to hold activations that are compared: each runs one forward and backward, gradients go to `.grad`."""

from __future__ import annotations

import os
import tempfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first recomputation imports it: two seconds of each process, unless this one has it before
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from elastrain.offload import ActivationOffload
from experiments.offload.models import Model, Run, plainly

NAMES = ("keep", "ours", "recompute", "save_on_cpu", "torch_save")
ONLY_ON_DISK = "torch_save_only_on_disk"
WHY_NOT_DEEPSPEED = (
    "its activation offload (cpu_checkpointing, 0.19.8) moves the inputs of recomputed layers from the accelerator to "
    "host memory: on a CPU both are the same tensor, which it empties, and backward fails for an input of size []"
)


def recomputed(block: nn.Module, *inputs: Tensor) -> Tensor:
    """Layerwise recomputation: only a layer's input is kept."""
    found: Tensor = checkpoint(block, *inputs, use_reentrant=False)
    return found


class TorchSave:
    """The plain way, of PyTorch's tutorial on saved-tensor hooks, around each layer: `torch.save`, `torch.load`.

    Files stay in the page cache, which is memory too, unless they are to be `only_on_disk`.
    """

    def __init__(self, directory: Path, *, only_on_disk: bool = False) -> None:
        self._directory = directory
        self._only_on_disk = only_on_disk
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
        if self._only_on_disk:
            file.flush()
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self.written_bytes += tensor.nbytes
        return file

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        packed.seek(0)
        found: Tensor = torch.load(packed, weights_only=True)
        return found


def step(
    model: Model, tokens: Tensor, blocks: Run, around: AbstractContextManager[Any], *, autocast: bool = False
) -> None:
    """One forward and backward, the same random numbers each time."""
    torch.manual_seed(1)
    with around, torch.autocast(tokens.device.type, dtype=torch.bfloat16, enabled=autocast):
        loss = model(tokens, blocks)
    loss.backward()


def run(
    name: str,
    model: Model,
    tokens: Tensor,
    *,
    offload: ActivationOffload | None,
    coarse: TorchSave,
    autocast: bool = False,
) -> None:
    """One step of the variant of that name; `offload` is what `ours` uses, `coarse` what `torch_save` does."""
    blocks: dict[str, Run] = {"recompute": recomputed, "torch_save": coarse, ONLY_ON_DISK: coarse}
    around: AbstractContextManager[Any] = nullcontext()
    if name == "ours":
        assert offload is not None
        around = offload
    elif name == "save_on_cpu":
        around = save_on_cpu()
    step(model, tokens, blocks.get(name, plainly), around, autocast=autocast)
