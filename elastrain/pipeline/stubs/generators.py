"""Torch's default random generators that a model draws from: the CPU's, and that of the device on which it lies."""

from __future__ import annotations

import contextlib
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn


def device_of(module: nn.Module) -> torch.device:
    """Return the device of the module's first parameter or, without parameters, buffer; the CPU if it has neither."""
    found = next(chain(module.parameters(), module.buffers()), None)
    return torch.device("cpu") if found is None else found.device


class Generators:
    """The default generators of the CPU and of one device."""

    def __init__(self, device: torch.device) -> None:
        self._all: list[torch.Generator | _ByModule] = [torch.default_generator]
        if device.type != "cpu":
            module: Any = torch.get_device_module(device)
            known, index = getattr(module, "default_generators", ()), device.index or 0
            self._all.append(known[index] if index < len(known) else _ByModule(module, device))

    def states(self) -> tuple[bytes, ...]:
        """Return the state of each generator. The device has nothing to finish for it."""
        return tuple(each.get_state().numpy().tobytes() for each in self._all)

    def seeds_and_states(self) -> tuple[tuple[int, bytes], ...]:
        """Return the seed and the state of each generator."""
        return tuple(zip((each.initial_seed() for each in self._all), self.states(), strict=True))


class _ByModule:
    """The default generator of a device whose module in torch does not show it."""

    def __init__(self, module: Any, device: torch.device) -> None:
        self._module, self._device = module, device

    def get_state(self) -> Tensor:
        state: Tensor = self._module.get_rng_state(self._device)
        return state.cpu()

    def initial_seed(self) -> int:
        with self._module.device(self._device):
            return int(self._module.initial_seed())


def left_as_they_were(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Return a context that restores both generators at its end."""
    devices = [] if device.type == "cpu" else [device]
    return torch.random.fork_rng(devices, device_type=device.type)
