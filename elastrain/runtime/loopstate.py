"""What a newcomer's training loop needs to go on where the others are: hyperparameters, schedulers, registered objects,
and what the loop has changed in layers.

The state is taken at the start of every step, before the body of the loop runs; it is sent to newcomers as text (JSON)
and bytes, never as code. See `carried`.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from elastrain.errors import ConfigError
from elastrain.runtime.carried import Packer, Tree, unpack
from elastrain.runtime.layers import Layers
from elastrain.runtime.registered import Stateful, check_apart, stateful


class LoopSnapshot:
    """The state of a loop as it was when it came to a step."""

    def __init__(self, text: str, parts: dict[str, str], packers: dict[str, Packer]) -> None:
        self.text = text
        """What a newcomer gets, less the bytes of tensors."""
        self._parts = parts
        self._packers = packers

    def check(self) -> None:
        """Raises ConfigError, by name, if something registered was changed in place since."""
        for packer in self._packers.values():
            packer.check()

    def payload(self) -> list[Tensor]:
        """The bytes of tensors, for `LoopState.load`. Raises ConfigError as `check` does."""
        self.check()
        return [tensor for _, packer in sorted(self._packers.items()) for tensor in packer.payload()]

    def settings(self, step: int, hyper: list[dict[str, Any]], layers: Layers) -> str:
        """What members compare in every vote: a digest per name, of what has to be the same on all of them."""
        told = {"hyperparameters": settings_digest(hyper), "layers": _short(json.dumps(layers.changes, sort_keys=True))}
        looked = {name: self._parts[name] + packer.look(step) for name, packer in self._packers.items()}
        return json.dumps({**told, **looked})


class LoopState:
    """Gathers and restores; made when the training loop starts, after the user has made the schedulers."""

    def __init__(self, optimizer: Optimizer, registered: dict[str, Any], model: nn.Module, layers: Layers) -> None:
        for name, thing in registered.items():
            check_apart(name, thing, model)
        self._optimizer = optimizer
        self._layers = layers
        self._parts: dict[str, Stateful] = {name: stateful(name, thing) for name, thing in registered.items()}
        for index, scheduler in enumerate(schedulers_of(optimizer)):
            self._parts[f"scheduler {index}"] = scheduler

    def take(self, hyper: list[dict[str, Any]]) -> LoopSnapshot:
        """Raises ConfigError, with the place, for what cannot be carried."""
        packers = {name: Packer() for name in self._parts}
        trees = {name: packers[name].pack(name, dict(part.state_dict())) for name, part in self._parts.items()}
        told = {"hyper": hyper, "layers": self._layers.changes, "parts": trees}
        text = json.dumps(
            {**told, "bulk": sorted(n for n, q in packers.items() if q.size_bytes)}, separators=(",", ":")
        )
        return LoopSnapshot(text, {name: _short(json.dumps(tree)) for name, tree in trees.items()}, packers)

    def load(self, text: str, payload: Sequence[Tensor] = ()) -> None:
        """Raises ConfigError when this script made other objects than the members that are there already."""
        state = json.loads(text)
        if set(state["parts"]) != set(self._parts):
            raise ConfigError(
                f"this member has {sorted(self._parts)}, the job has {sorted(state['parts'])}: "
                "all members must run the same script"
            )
        for group, values in zip(self._optimizer.param_groups, state["hyper"], strict=True):
            group.update({name: _grouped(value) for name, value in values.items() if name in group and name != "fused"})
        self._layers.load(state["layers"])
        bulk = dict(zip(state["bulk"], payload, strict=True))
        for name, part in self._parts.items():
            own = dict(part.state_dict())
            part.load_state_dict({**own, **_unpacked(name, state["parts"][name], bulk.get(name), own)})


def _unpacked(name: str, tree: Tree, bulk: Tensor | None, own: dict[str, Any]) -> dict[str, Any]:
    try:
        found: dict[str, Any] = unpack(tree, bulk, own)
    except ConfigError as error:
        raise ConfigError(f"{name!r}: {error}") from None
    return found


def schedulers_of(optimizer: Optimizer) -> list[LRScheduler]:
    """The schedulers that drive this optimizer, in an order that is the same on every member.

    torch keeps no list of them; they are looked up once, when the loop starts. Equal ones are interchangeable then.
    """
    found = [s for s in gc.get_objects() if _is_scheduler(s) and getattr(s, "optimizer", None) is optimizer]
    return sorted(found, key=lambda s: (type(s).__qualname__, json.dumps(Packer().pack("", s.state_dict()))))


def _is_scheduler(thing: object) -> bool:
    # type() rather than isinstance(): among all objects there are proxies whose __class__ does things when asked
    return issubclass(type(thing), LRScheduler)


def settings_digest(hyper: list[dict[str, Any]]) -> str:
    """Short digest of the hyperparameters of a step, compared between members at every commit."""
    return _short(json.dumps(hyper, sort_keys=True))


def _short(text: str) -> str:
    return blake2b(text.encode(), digest_size=6).hexdigest()


def _grouped(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
