"""What a training loop changes in the model's layers at some step: train and eval, freezing, a dropout's p.

A newcomer's loop never was in that step: it gets them. What a forward changes by itself is no business of this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import torch
from torch import nn

from elastrain.errors import ConfigError

Changes = dict[str, Any]
"""`path.attribute` -> the value that the loop gave it."""
_KINDS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_post_accumulate_grad_hooks",
)
_HOOKS = tuple(f"{of}{kind}" for of in ("", "_global") for kind in _KINDS)
_PLAIN = (bool, int, float, str, type(None))


class Layers:
    """Watches requires_grad and `training` everywhere, all plain numbers and words of torch's layers, and the floats of
    other modules, whose whole numbers and switches are often no more than counters and caches of a forward.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [(f"{name}.requires_grad", q) for name, q in model.named_parameters()]
        self._values = [
            (f"{path}.{name}" if path else name, vars(module), name)
            for path, module in model.named_modules()
            for name in vars(module)
            if _is_watched(module, name)
        ]
        self._hooked: list[tuple[str, object]] = [
            (f"hooks of {path or 'the model'!r}", each) for path, each in model.named_modules()
        ]
        self._hooked += [(f"hooks of parameter {name!r}", each) for name, each in model.named_parameters()]
        self._hooked.append(("hooks of all modules", torch.nn.modules.module))
        self.changes: Changes = {}
        self._before = self._look()

    def digest(self) -> str:
        """Of all values as they are now: what members must begin with alike."""
        values = self._look()[: -len(self._hooked)]
        told = [name for name, _, _ in self._values], [name for name, _ in self._parameters], values
        return blake2b(repr(told).encode(), digest_size=6).hexdigest()

    def settle(self) -> None:
        """Whatever has changed since `note` was the doing of forwards."""
        self._before = self._look()

    def note(self) -> None:
        """Whatever has changed since `settle` was the doing of the loop. Raises ConfigError for what is not plain."""
        now = self._look()
        if now == self._before:
            return
        watched = (self._values, self._parameters, self._hooked)
        names = [str(each[0]) for kind in watched for each in kind]
        for name, value, before in zip(names, now, self._before, strict=True):
            if value is not before and value != before:
                self.changes[name] = value
        for name, of, attribute in self._values:
            if name in self.changes and type(of.get(attribute)) not in _PLAIN:
                raise ConfigError(
                    f"{name!r} of the model was set to a {type(of.get(attribute)).__name__} while training, and "
                    "members that join later could not get it: set a number, or make it a registered tensor"
                )
        self._before = now

    def load(self, changes: Mapping[str, Any]) -> None:
        """On a newcomer: what the others' loops have done so far."""
        for name, of, attribute in self._values:
            if name in changes:
                of[attribute] = changes[name]
        for name, parameter in self._parameters:
            if name in changes:
                parameter.requires_grad_(changes[name])
        self.changes = dict(changes)
        self.settle()

    def check_hooks(self) -> None:
        """Raises ConfigError where the loops of others, or of the job before, have hung up hooks that are not here."""
        for name, hooked in self._hooked:
            count = _hooks_on(hooked)
            if self.changes.get(name, count) != count:
                raise ConfigError(
                    f"the {name} are {count} on this member and {self.changes[name]} where training comes from: "
                    "register and remove hooks before the loop over job.steps(…), where members that join later do, too"
                )

    def _look(self) -> list[Any]:
        values = [value if type(value := of.get(name)) in _PLAIN else ... for _, of, name in self._values]
        return values + [q.requires_grad for _, q in self._parameters] + [_hooks_on(each) for _, each in self._hooked]


def _hooks_on(hooked: object) -> int:
    return sum(len(getattr(hooked, kind, None) or ()) for kind in _HOOKS)


def _is_watched(module: nn.Module, name: str) -> bool:
    if name.startswith("_") or type(vars(module)[name]) not in _PLAIN:
        return False
    torchs_own = type(module).__module__.startswith("torch.nn.")
    return torchs_own or name == "training" or type(vars(module)[name]) is float
