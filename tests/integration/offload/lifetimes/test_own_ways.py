"""Scripts with hooks on saved tensors, functional calls and saved parameters of their own: as in plain training."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad

from elastrain.offload import OffloadConfigError, save_on_disk
from elastrain.offload.lifetimes.within import within
from tests.integration.offload.lifetimes.touching import made, tokens

pytestmark = pytest.mark.usefixtures("small_limits", "one_thread")
STEPS = 4
Loss = Callable[[nn.Module, int], Tensor]


def saved_in_half(model: nn.Module, n: int) -> Tensor:
    def pack(tensor: Tensor) -> Tensor:
        return tensor.bfloat16() if tensor.dtype == torch.float32 and not tensor.requires_grad else tensor

    def unpack(tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.dtype == torch.bfloat16 else tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return model(tokens(n))  # type: ignore[no-any-return]


def moved_first(model: nn.Module, n: int) -> Tensor:
    named = dict(model.named_parameters())
    slopes = torch.autograd.grad(model(tokens(n)), list(named.values()))
    moved = {name: p - 0.1 * slope for (name, p), slope in zip(named.items(), slopes, strict=True)}
    return functional_call(model, moved, (tokens(n + 1),))  # type: ignore[no-any-return]


def weighted_by_slopes(model: nn.Module, n: int) -> Tensor:
    named = {name: p.detach() for name, p in model.named_parameters()}
    slopes = grad(lambda values: functional_call(model, values, (tokens(n),)))(named)
    return model(tokens(n)) / (1 + sum(each.square().sum() for each in slopes.values()))  # type: ignore[no-any-return]


def train(loss: Loss, folder: Path | None) -> list[Tensor]:
    model, optimizer, limit_bytes = made()
    training = within(model, optimizer, dirs=folder, memory_limit=4 * limit_bytes) if folder else None
    for n in range(STEPS):
        loss(model, n).backward()  # type: ignore[no-untyped-call]
        if training:
            training.step()
        else:
            optimizer.step()
            optimizer.zero_grad()
    if training:
        training.close()
    return list(model.parameters())


@pytest.mark.parametrize("loss", [saved_in_half, moved_first, weighted_by_slopes], ids=lambda each: each.__name__)
def test_parameters_are_those_of_plain_training(loss: Loss, tmp_path: Path) -> None:
    for mine, theirs in zip(train(loss, tmp_path), train(loss, None), strict=True):
        assert torch.equal(mine, theirs)


def test_a_saved_parameter_takes_its_own_size(tmp_path: Path) -> None:
    model, optimizer, limit_bytes = made()
    training = within(model, optimizer, dirs=tmp_path, memory_limit=limit_bytes)
    smallest = min(model.parameters(), key=Tensor.numel)
    for end in (lambda: None, training.close):
        end()
        file = io.BytesIO()
        torch.save(smallest, file)
        assert file.tell() < smallest.nbytes + 4096


def test_torch_func_in_the_block_of_save_on_disk_is_refused(tmp_path: Path) -> None:
    offload = save_on_disk(tmp_path)
    with pytest.raises(OffloadConfigError, match=r"^torch\.func\.grad.* call them before it"), offload:
        grad(torch.sum)(torch.ones(3))
    offload.close()
