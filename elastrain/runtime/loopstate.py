"""What a newcomer's training loop needs to go on where the others are: hyperparameters, schedulers, registered objects.

The state is taken at the start of every step and sent to newcomers as text (JSON), never as code.
"""

from __future__ import annotations

import gc
import json
from hashlib import blake2b
from typing import Any, Protocol

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from elastrain.errors import ConfigError


class Stateful(Protocol):
    """What `job.register` takes."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> object: ...


class LoopState:
    """Gathers and restores; made when the training loop starts, after the user has made the schedulers."""

    def __init__(self, optimizer: Optimizer, registered: dict[str, Stateful]) -> None:
        self._optimizer = optimizer
        self._parts: dict[str, Stateful] = dict(registered)
        for index, scheduler in enumerate(schedulers_of(optimizer)):
            self._parts[f"scheduler {index}"] = scheduler

    def take(self, hyper: list[dict[str, Any]]) -> str:
        parts = {name: _plain_dict(part.state_dict()) for name, part in self._parts.items()}
        return json.dumps({"hyper": hyper, "parts": parts}, separators=(",", ":"))

    def load(self, text: str) -> None:
        """Raises ConfigError when this script made other objects than the members that are there already."""
        state = json.loads(text)
        if set(state["parts"]) != set(self._parts):
            raise ConfigError(
                f"this member has {sorted(self._parts)}, the job has {sorted(state['parts'])}: "
                "all members must run the same script"
            )
        for group, values in zip(self._optimizer.param_groups, state["hyper"], strict=True):
            group.update({name: _grouped(value) for name, value in values.items() if name in group and name != "fused"})
        for name, part in self._parts.items():
            part.load_state_dict({**part.state_dict(), **_rebuilt(state["parts"][name])})


def schedulers_of(optimizer: Optimizer) -> list[LRScheduler]:
    """The schedulers that drive this optimizer, in an order that is the same on every member.

    torch keeps no list of them; they are looked up once, when the loop starts. Equal ones are interchangeable then.
    """
    found = [s for s in gc.get_objects() if _is_scheduler(s) and getattr(s, "optimizer", None) is optimizer]
    return sorted(found, key=lambda s: (type(s).__qualname__, json.dumps(_plain_dict(s.state_dict()))))


def _is_scheduler(thing: object) -> bool:
    # type() rather than isinstance(): among all objects there are proxies whose __class__ does things when asked
    return issubclass(type(thing), LRScheduler)


def settings_digest(hyper: list[dict[str, Any]]) -> str:
    """Short digest of the hyperparameters of a step, compared between members at every commit."""
    return blake2b(json.dumps(hyper, sort_keys=True).encode(), digest_size=6).hexdigest()


def _grouped(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _plain_dict(state: dict[str, Any]) -> dict[str, Any]:
    """The data of a state; functions and other code are left out, since every member has them from the script."""
    return {name: _plain(value) for name, value in state.items() if _is_data(value)}


def _is_data(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_data(item) for item in (*value, *value.values()))
    if isinstance(value, list | tuple):
        return all(_is_data(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {"pairs": [[_plain(key), _plain(item)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _rebuilt(value: Any) -> Any:
    if isinstance(value, dict) and set(value) == {"pairs"}:
        return {key: _rebuilt(item) for key, item in value["pairs"]}
    if isinstance(value, dict):
        return {name: _rebuilt(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_rebuilt(item) for item in value]
    return value
