from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastrain.offload.lifetimes import update_parts
from elastrain.offload.lifetimes.update_parts import can_be_cut, cut
from elastrain.offload.lifetimes.within_inputs import ELEMENTWISE

Made = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

OPTIONS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in sorted(ELEMENTWISE)),
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("AdamW", {"amsgrad": True, "maximize": True}),
    ("AdamW", {"lr": torch.tensor(0.01)}),
    ("Adam", {"weight_decay": 0.1}),
    ("RMSprop", {"centered": True, "momentum": 0.9}),
    ("Adagrad", {"lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    ("NAdam", {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    ("ASGD", {"lambd": 0.1, "t0": 1}),
]
FORMS: list[tuple[tuple[int, ...], torch.dtype, torch.memory_format]] = [
    ((3 * update_parts.PART_ELEMENTS,), torch.float32, torch.contiguous_format),
    ((7, update_parts.PART_ELEMENTS // 5), torch.float32, torch.contiguous_format),
    ((4, 9, 64, 31), torch.float32, torch.channels_last),
    ((5, update_parts.PART_ELEMENTS // 3), torch.bfloat16, torch.contiguous_format),
    ((11, update_parts.PART_ELEMENTS // 7), torch.float64, torch.contiguous_format),
]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def made(name: str, options: dict[str, Any]) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    generator = torch.Generator().manual_seed(3)
    found = [
        nn.Parameter(torch.randn(shape, generator=generator).to(dtype, memory_format=form))
        for shape, dtype, form in FORMS
    ]
    return found, getattr(torch.optim, name)(found, **options)


def give_gradients(parameters: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for each in parameters:
        each.grad = torch.empty_like(each).copy_(torch.randn(each.shape, generator=generator))


def values(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = [value for each in parameters for value in optimizer.state[each].values()]
    return [*parameters, *(value for value in states if isinstance(value, Tensor))]


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def step_in_parts(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> int:
    """Returns how many tensors the optimizer was given."""
    group = optimizer.param_groups[0]
    with cut(parameters, optimizer.state, group) as found:
        group["params"] = found
        optimizer.step()
    group["params"] = parameters
    return len(found)


@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=str)
def test_an_update_in_parts_has_the_bits_of_one_in_one_go(name: str, options: dict[str, Any]) -> None:
    ours, theirs = made(name, options), made(name, options)
    counts = []
    for seed in range(4):
        for parameters, _ in (ours, theirs):
            give_gradients(parameters, seed)
        counts.append(step_in_parts(*ours))
        theirs[1].step()
    assert counts[0] in (len(FORMS), counts[-1])  # without states yet, or with those that are there from the beginning
    assert (name == "SGD" and not options) or counts[-1] > 2 * len(FORMS)
    for mine, other in zip(values(*ours), values(*theirs), strict=True):
        assert torch.equal(bits(mine), bits(other))
    assert set(ours[1].state) == set(ours[0])


def test_autograd_sees_that_a_parameter_has_changed() -> None:
    parameters, optimizer = made("AdamW", {})
    for seed in range(2):
        give_gradients(parameters, seed)
        before = [each._version for each in parameters]
        step_in_parts(parameters, optimizer)
    assert all(each._version > version for each, version in zip(parameters, before, strict=True))


def test_what_was_raised_in_an_update_leaves_no_part_in_the_states() -> None:
    parameters, optimizer = made("AdamW", {})
    give_gradients(parameters, 0)
    optimizer.step()
    entered = cut(parameters, optimizer.state, {})
    entered.__enter__()
    assert len(optimizer.state) > len(parameters)
    stopped = KeyboardInterrupt()
    assert not entered.__exit__(KeyboardInterrupt, stopped, None)
    assert set(optimizer.state) == set(parameters)


@pytest.mark.parametrize("option", ["foreach", "fused", "differentiable"])
def test_ways_of_updating_that_gain_nothing_by_parts_get_the_whole(option: str) -> None:
    parameters, optimizer = made("AdamW", {})
    give_gradients(parameters, 0)
    optimizer.step()
    assert can_be_cut(parameters[0], optimizer.state[parameters[0]], {option: None})
    assert not can_be_cut(parameters[0], optimizer.state[parameters[0]], {option: True})


def test_several_threads_get_the_whole() -> None:
    """They begin their parts elsewhere, and what a kernel does at an end may have other bits."""
    parameters, optimizer = made("AdamW", {})
    give_gradients(parameters, 0)
    optimizer.step()
    torch.set_num_threads(2)
    assert not can_be_cut(parameters[0], optimizer.state[parameters[0]], {})


def test_a_state_in_another_form_keeps_the_whole() -> None:
    parameters, optimizer = made("AdamW", {})
    give_gradients(parameters, 0)
    optimizer.step()
    conv, state = parameters[2], optimizer.state[parameters[2]]
    assert can_be_cut(conv, state, {})
    state["exp_avg"] = state["exp_avg"].contiguous()
    assert not can_be_cut(conv, state, {})
