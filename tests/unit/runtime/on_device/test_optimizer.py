"""The sharded optimizer on a device: the bits of torch.optim there, the kernels that there are, and little memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from elastrain.errors import ConfigError
from elastrain.job.layout import Layout, ParameterSpec, cut
from elastrain.runtime.model.optimizer import PieceOptimizer
from elastrain.snapshot.shard_state import ShardState
from tests.support import late


class Own(torch.optim.Optimizer):
    """A user's own class, with a counter on the device."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state.setdefault("count", torch.zeros((), device=parameter.device)).add_(1)
                    parameter.addcdiv_(parameter.grad, state["count"], value=-group["lr"])


class OnHost(torch.optim.Optimizer):
    """A user's own class, which keeps its momentum in host memory."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in (each for each in group["params"] if each.grad is not None):
                momentum = self.state[parameter].setdefault("momentum", torch.zeros(parameter.shape, device="cpu"))
                momentum.mul_(0.9).add_(parameter.grad.cpu())
                parameter.add_(momentum.to(parameter.device), alpha=-group["lr"])


MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "capturable": lambda q: torch.optim.AdamW(q, lr=0.1, capturable=True),
    "capturable with a learning rate there": lambda q: torch.optim.Adam(
        q, lr=torch.tensor(0.1, device="late"), capturable=True, foreach=True
    ),
    "a learning rate there": lambda q: torch.optim.AdamW(q, lr=torch.tensor(0.1, device="late")),
    "not fused": lambda q: torch.optim.AdamW(q, lr=0.1, fused=False),
    "own": Own,
    **{
        name: lambda q, name=name: getattr(torch.optim, name)(q, lr=0.01)  # type: ignore[misc]
        for name in ("ASGD", "Adadelta", "Adagrad", "Adam", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
    },
}
NUMELS = (320, 64, 128)


def _layout(*numels: int) -> Layout:
    specs = [
        ParameterSpec(name=f"p{i}", block="b", shape=(n,), dtype="float32", group=0, requires_grad=True)
        for i, n in enumerate(numels)
    ]
    return cut(specs, blocks=["b"], shard_numel=128)


def _parameters(*numels: int) -> list[Tensor]:
    drawn = torch.Generator("cpu").manual_seed(0)
    return [torch.nn.Parameter(torch.randn(numel, generator=drawn, device="cpu").to("late")) for numel in numels]


def _states(optimizer: PieceOptimizer, layout: Layout, parameters: list[Tensor]) -> list[ShardState]:
    whole = torch.zeros(sum(shard.numel for shard in layout.shards), device="late")
    for leaf, parameter in zip(layout.leaves, parameters, strict=True):
        whole[leaf.start : leaf.start + leaf.numel] = parameter.detach()
    return [optimizer.create(s, whole[s.start : s.stop].clone()) for s in layout.shards]


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("name", MAKERS)
def test_an_optimizer_on_a_device_has_the_bits_of_torch_there(name: str, copied: bool) -> None:
    layout, plain = _layout(*NUMELS), _parameters(*NUMELS)
    theirs = MAKERS[name](plain)
    if theirs.defaults.get("fused", True) is None and not theirs.defaults.get("capturable"):
        own = {key: value for key, value in theirs.defaults.items() if key != "decoupled_weight_decay"}
        theirs = type(theirs)(plain, **{**own, "fused": True})
    ours = PieceOptimizer(MAKERS[name](_parameters(*NUMELS)), layout, elementwise=name == "own")
    states = _states(ours, layout, _parameters(*NUMELS))
    drawn = torch.Generator().manual_seed(1)
    for _ in range(4):
        whole = torch.zeros(sum(shard.numel for shard in layout.shards))
        for leaf, parameter in zip(layout.leaves, plain, strict=True):
            whole[leaf.start : leaf.start + leaf.numel] = torch.randn(leaf.numel, generator=drawn)
            parameter.grad = whole[leaf.start : leaf.start + leaf.numel].to("late")
        theirs.step()
        given = whole if copied else whole.to("late")  # a gradient may come from host memory
        if copied:
            states = [_carried(state) for state in states]
        items = [(state, given[s.start : s.stop], None) for state, s in zip(states, layout.shards, strict=True)]
        ours.apply(items, hyper=ours.hyperparameters())
    made = torch.cat([state.parameters for state in states]).cpu()
    for leaf, parameter in zip(layout.leaves, plain, strict=True):
        assert torch.equal(made[leaf.start : leaf.start + leaf.numel], parameter.detach().cpu())
    assert late.races() == []


def _carried(state: ShardState) -> ShardState:
    text, tensors = state.pack()
    return ShardState.unpack(text, [tensor.cpu().to("late") for tensor in tensors])


def _fails(error: type[Exception], text: str) -> contextlib.AbstractContextManager[Any]:
    return mock.patch("torch._fused_adagrad_", side_effect=error(text))


def test_a_class_without_a_fused_kernel_on_the_device_takes_the_kernels_that_there_are() -> None:
    layout, parameters = _layout(*NUMELS), _parameters(*NUMELS)
    with _fails(NotImplementedError, "Could not run 'aten::_fused_adagrad_' with arguments from this backend"):
        optimizer = PieceOptimizer(torch.optim.Adagrad(parameters, lr=0.1), layout)
        assert not optimizer.hyperparameters()[0].get("fused")
        states = _states(optimizer, layout, parameters)
        items = [(state, torch.ones_like(state.parameters), None) for state in states]
        optimizer.apply(items, hyper=optimizer.hyperparameters())
    assert PieceOptimizer(torch.optim.Adagrad(parameters), layout).hyperparameters()[0]["fused"]


def test_states_in_other_memory_than_the_parameters_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="OnHost keeps its state 'momentum' on cpu, and the parameters are on late:0"):
        PieceOptimizer(OnHost(_parameters(*NUMELS)), _layout(*NUMELS), elementwise=True)


def test_a_users_own_class_is_tried_out_with_a_default_device_too() -> None:
    with torch.device("late"):
        PieceOptimizer(Own(_parameters(*NUMELS)), _layout(*NUMELS), elementwise=True)


def test_an_error_of_the_device_is_not_taken_for_a_kernel_that_is_missing() -> None:
    with _fails(torch.OutOfMemoryError, "out of memory"), pytest.raises(torch.OutOfMemoryError):
        PieceOptimizer(torch.optim.Adagrad(_parameters(*NUMELS)), _layout(*NUMELS))


@pytest.mark.parametrize("share", [1, 1 / 3])
@pytest.mark.parametrize("name", ["Adam", "RMSprop"])
def test_scaled_gradients_need_an_eighth_of_the_members_own_and_only_during_the_update(name: str, share: float) -> None:
    numel = 96 << 10
    layout, parameters = cut(_layout(numel).parameters, blocks=["b"], shard_numel=numel // 96), _parameters(numel)
    optimizer = PieceOptimizer(MAKERS[name](parameters), layout)
    states = _states(optimizer, layout, parameters)
    gradient = torch.ones(numel, device="late")
    items = [(state, gradient[s.start : s.stop], None) for state, s in zip(states, layout.shards, strict=True)]
    mine = items[: int(share * len(items))]
    optimizer.apply(mine, hyper=optimizer.hyperparameters(), factors=(0.5, 0.25))
    device = torch.get_device_module("late")
    before = device.memory_allocated()
    device.reset_peak_memory_stats()
    optimizer.apply(mine, hyper=optimizer.hyperparameters(), factors=(0.5, 0.25))
    assert device.memory_allocated() == before
    kernels = 3 if name == "RMSprop" else 1  # RMSprop's kernels need memory of their own
    assert device.max_memory_allocated() - before <= kernels * int(share * gradient.nbytes) // 8 + 4096
    assert late.races() == []


def test_gradients_are_applied_in_few_calls() -> None:
    layout = cut(_layout(96 << 10).parameters, blocks=["b"], shard_numel=128)
    optimizer = PieceOptimizer(MAKERS["Adam"](_parameters(96 << 10)), layout)
    assert optimizer._device is not None
    for count, most in ((768, 8), (256, 8), (24, 2), (12, 1)):
        parts = optimizer._device.parts([128] * count)
        assert len(parts) <= most
        assert [index for part in parts for index in range(count)[part]] == list(range(count))
