"""A small trainer whose state lies on the host: each step carries parameters in and gradients out on side streams.

`plant` breaks one of its rules.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PLANTS = {
    "gradients are copied out before they are computed": "race",
    "gradients are zeroed while they are copied out": "race",
    "a forward begins before its parameters are there": "race",
    "parameters are overwritten under a backward": "race",
    "copies run on a stream that waits for nothing": "race",
    "a gradient is freed while it is copied out": "race",
    "gradients are reported before they have landed": "digest",
    "the device's generator is not seeded": "digest",
    "parameters are not uploaded": "digest",
    "the source of an upload is used again too early": "digest",
    "launching is measured for computing": "time",
    "the host reads the device's memory": "signal",
}
"""Bugs, and how they are found."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, given: Tensor) -> Tensor:
        return self.second(F.dropout(F.gelu(self.first(given)), 0.2))


class Carrier:
    """The streams and the memory of the host between which one model's tensors travel."""

    def __init__(self, model: nn.Module, plant: str) -> None:
        self.device: Any = torch.get_device_module("late")
        self.model, self.plant = model, plant
        self.inward, self.outward, self.stray = (self.device.Stream() for _ in range(3))
        self.main = self.device.current_stream()
        self.gradients = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
        self.staged = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: self.carry_out(name, p))  # type: ignore[misc]

    def is_planted(self, plant: str) -> bool:
        assert plant in PLANTS
        return plant == self.plant

    def carry_in(self, state: dict[str, Tensor]) -> None:
        if self.is_planted("parameters are not uploaded"):
            return
        if not self.is_planted("parameters are overwritten under a backward"):
            self.inward.wait_stream(self.main)
        with torch.no_grad(), self.inward:
            for name, parameter in self.model.named_parameters():
                self.staged[name].copy_(state[name])
                parameter.copy_(self.staged[name], non_blocking=True)
        if self.is_planted("the source of an upload is used again too early"):
            for staged in self.staged.values():
                staged.zero_()
        if not self.is_planted("a forward begins before its parameters are there"):
            self.main.wait_stream(self.inward)

    def carry_out(self, name: str, parameter: Tensor) -> None:
        """Copy a gradient out as soon as the backward has submitted it."""
        stream = self.outward
        if self.is_planted("copies run on a stream that waits for nothing"):
            stream = self.stray
        elif not self.is_planted("gradients are copied out before they are computed"):
            stream.wait_event(self.main.record_event())
        assert parameter.grad is not None
        with stream:
            self.gradients[name].copy_(parameter.grad, non_blocking=True)
        if self.is_planted("a gradient is freed while it is copied out"):
            parameter.grad = None

    def land(self) -> None:
        if self.is_planted("gradients are reported before they have landed"):
            return
        self.outward.synchronize()

    def clear(self) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()


def on_device(state: dict[str, Tensor], batches: list[Tensor], plant: str = "") -> tuple[dict[str, Tensor], float]:
    """Train. Returns the parameters, and the seconds that the device is said to have computed."""
    model = Model().to("late")
    carrier = Carrier(model, plant)
    timed = carrier.device.Event(enable_timing=True), carrier.device.Event(enable_timing=True)
    timed[0].record()
    carrier.carry_in(state)
    for step, batch in enumerate(batches):
        torch.default_generator.manual_seed(step)
        if not carrier.is_planted("the device's generator is not seeded"):
            carrier.device.manual_seed(step)
        model(batch.to("late")).square().sum().backward()
        if carrier.is_planted("the host reads the device's memory"):
            ctypes.string_at(model.first.weight.data_ptr(), 4)
        if carrier.is_planted("gradients are zeroed while they are copied out"):
            carrier.clear()
        carrier.land()
        carrier.main.wait_stream(carrier.outward)
        carrier.clear()
        _update(state, carrier.gradients)
        carrier.carry_in(state)
    if plant == "parameters are overwritten under a backward":
        model(batches[0].to("late")).square().sum().backward()
        carrier.carry_in(state)
    timed[1].record()
    timed[1].synchronize()
    return state, timed[0].elapsed_time(timed[1]) / 1e3


def on_cpu(state: dict[str, Tensor], batches: list[Tensor]) -> dict[str, Tensor]:
    model = Model()
    for step, batch in enumerate(batches):
        torch.default_generator.manual_seed(step)
        model.load_state_dict(state)
        model.zero_grad()
        model(batch).square().sum().backward()
        _update(state, {name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    return state


def _update(state: dict[str, Tensor], gradients: dict[str, Tensor]) -> None:
    for name, value in state.items():
        value.add_(gradients[name], alpha=-0.01)
