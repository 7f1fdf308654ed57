"""The conditions under which a forward ran, so that it can run again with the same result and without side effects.

Covers random numbers (torch's on the CPU and on CUDA, Python's, numpy's), autocast, whether gradients are recorded, and
what modules hold besides parameters. Changes that a forward makes elsewhere (a global, a file) are not covered.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import get_device_states, set_device_states

_AUTOCASTS = ("cpu", "cuda")
_OF_TORCH = frozenset(nn.Module().__dict__) - {"training"}


class ForwardConditions:
    """A snapshot of the conditions when a forward begins. `restored` applies it."""

    def __init__(self, module: nn.Module, inputs: object) -> None:
        self._random = _random_states()
        self._devices, self._device_states = get_device_states(inputs)
        self._autocasts = [
            (each, torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in _AUTOCASTS
        ]
        self._caches = torch.is_autocast_cache_enabled()
        self._modules = [(each, _own_attributes(each)) for each in module.modules()]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Apply the snapshot inside the `with` block. Afterwards undo all changes, also those of the modules."""
        random_now, kept = _random_states(), [_KeptModule(each) for each, _ in self._modules]
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=self._devices, enabled=bool(self._devices)))
            for device_type, enabled, dtype in self._autocasts:
                stack.enter_context(
                    torch.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=self._caches)
                )
            stack.enter_context(torch.enable_grad())
            try:
                for module, attributes in self._modules:
                    module.__dict__.update(attributes)
                _set_random_states(self._random)
                if self._devices:
                    set_device_states(self._devices, self._device_states)
                yield
            finally:
                for each in kept:
                    each.put_back()
                _set_random_states(random_now)


class _KeptModule:
    """A copy of what a module holds besides parameters and children: attributes, containers, generators and buffers."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._attributes = dict(module.__dict__)
        self._generators = [
            (each, each.get_state()) for each in module.__dict__.values() if isinstance(each, torch.Generator)
        ]
        self._contents = [(each, each.copy()) for each in module.__dict__.values() if type(each) in (list, dict, set)]
        self._buffers = [(each, each.detach().clone()) for each in module._buffers.values() if each is not None]

    def put_back(self) -> None:
        own = self._module.__dict__
        for name in [name for name in own if name not in self._attributes]:
            del own[name]
        own.update((name, value) for name, value in self._attributes.items() if own.get(name) is not value)
        for each, before in self._contents:
            if _members(each) != _members(before):
                each.clear()
                each.extend(before) if isinstance(each, list) else each.update(before)
        for generator, state in self._generators:
            generator.set_state(state)
        for buffer, values in self._buffers:
            if not torch.equal(buffer.detach(), values):
                buffer.data.copy_(values)


def _members(several: list[Any] | dict[Any, Any] | set[Any]) -> list[int]:
    """Return the identities of the container's members, since comparing them for equality could run any code."""
    members = several.items() if isinstance(several, dict) else several
    return [id(one) for each in members for one in (each if isinstance(several, dict) else (each,))]


def _own_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes that the program set on a module, such as a mask for this forward, or the training flag."""
    return {name: value for name, value in module.__dict__.items() if name not in _OF_TORCH}


def _random_states() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    return torch.get_rng_state(), random.getstate(), None if numpy is None else numpy.random.get_state()


def _set_random_states(states: tuple[Any, ...]) -> None:
    of_torch, of_python, of_numpy = states
    torch.set_rng_state(of_torch)
    random.setstate(of_python)
    if of_numpy is not None:
        sys.modules["numpy"].random.set_state(of_numpy)
