"""What `job.register` takes, brought to one form: a state that is read, and put back in place. Refused by name else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from elastrain.errors import ConfigError


class Stateful(Protocol):
    """What has a state of its own: schedulers, averages, counters."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> object: ...


class InPlace:
    """A thing that is changed in place, such as a tensor: its state is all of it."""

    def __init__(self, thing: Any, put: Callable[[Any], object]) -> None:
        self._thing, self._put = thing, put

    def state_dict(self) -> dict[str, Any]:
        return {"value": self._thing}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._put(state["value"])


class OfModule:
    """A module that a script moves itself: its state, and the buffers that `state_dict` leaves out."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def state_dict(self) -> dict[str, Any]:
        return {"state": dict(self._module.state_dict()), "caches": self._caches()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._module.load_state_dict(state["state"])
        for name, buffer in self._caches().items():
            _fill(buffer, state["caches"][name])

    def _caches(self) -> dict[str, Tensor]:
        return {
            f"{path}.{name}" if path else name: buffer
            for path, module in self._module.named_modules()
            for name, buffer in module.named_buffers(recurse=False)
            if name in module._non_persistent_buffers_set
        }


def stateful(name: str, thing: Any) -> Stateful:
    """Raises ConfigError for what could not be put back in place on a member that joins later."""
    match thing:
        case nn.Module():
            return OfModule(thing)
        case Tensor():
            return InPlace(thing, lambda value: _fill(thing, value))
        case np.ndarray():
            return InPlace(thing, lambda value: np.copyto(thing, value, casting="no"))
        case dict():
            return InPlace(thing, lambda value: _replace(thing, value))
        case list():
            return InPlace(thing, lambda value: thing.__setitem__(slice(None), value))
    if callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None)):
        return thing  # type: ignore[no-any-return]  # a Protocol, just checked
    raise ConfigError(
        f"job.register({name!r}, …) takes what can be changed in place on a member that joins later: a module, tensor, "
        f"NumPy array, dict or list, or an object with state_dict and load_state_dict; got {type(thing).__name__}"
    )


def check_apart(name: str, thing: Any, model: nn.Module) -> None:
    """Raises ConfigError for a module that shares parameters with the job's model, which travels by itself."""
    if isinstance(thing, nn.Module | Tensor):
        theirs = {id(q) for q in (thing.parameters() if isinstance(thing, nn.Module) else [thing])}
        shared = next((path for path, q in model.named_parameters() if id(q) in theirs), None)
        if shared is not None:
            raise ConfigError(
                f"job.register({name!r}, …) got parameter {shared!r} of the model, which the optimizer moves and the "
                "job carries by itself: register a copy, as in copy.deepcopy(model), made before prepare"
            )


def _replace(mine: dict[Any, Any], value: dict[Any, Any]) -> None:
    mine.clear()
    mine.update(value)


@torch.no_grad()
def _fill(mine: Tensor, value: Tensor) -> None:
    if mine.shape != value.shape or mine.dtype != value.dtype:
        raise ConfigError(
            f"a registered tensor is {mine.dtype} of shape {tuple(mine.shape)} here and {value.dtype} of shape "
            f"{tuple(value.shape)} in the job: run the same script on all members"
        )
    mine.copy_(value)
