"""Numbers that a model counts up or down in attributes of its own: each member would count what it computes itself."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import nn

from elastrain.errors import ConfigError

Numbers = dict[tuple[str, str], float]
"""(path of a module, name of its attribute) -> value."""


def numbers_of(model: nn.Module) -> Numbers:
    return {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if type(value) in (int, float)
    }


def changed(before: Numbers, after: Numbers) -> dict[tuple[str, str], tuple[float, float]]:
    """From what to what; what was not there counted from 0."""
    return {key: (before.get(key, 0), value) for key, value in after.items() if before.get(key, 0) != value}


class Counters:
    """Looks before each micro-batch at what the tracing pass has changed, as long as that goes on."""

    def __init__(self, model: nn.Module, traced: Mapping[tuple[str, str], tuple[float, float]]) -> None:
        """`traced`: what the forward of the tracing pass has changed."""
        self._model = model
        self._traced = dict(traced)
        self._last: Numbers | None = None
        """Before the micro-batch of the last look."""
        self._is_next_as_traced = True
        """The first micro-batch does what the tracing pass did, and may be the only one."""

    def look(self) -> None:
        """Raises ConfigError where a micro-batch has changed a number as the tracing pass did."""
        if not self._traced or self._is_next_as_traced:
            self._is_next_as_traced = False
            return
        now = numbers_of(self._model)
        if self._last is not None:
            moves = changed(self._last, now)
            for key, move in moves.items():
                if key in self._traced and _is_same(self._traced[key], move):
                    name = ".".join(filter(None, key))
                    raise ConfigError(
                        f"the forward counts in {name!r} of the model, from {move[0]} to {move[1]} in one micro-batch, "
                        "and members compute different ones: let the loop set it by step.number, before its inner loop"
                    )
            self._traced = {key: move for key, move in moves.items() if key in self._traced}
        self._last = now


def _is_same(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """The same added, or multiplied by the same."""
    (a, b), (c, d) = one, other
    return math.isclose(b - a, d - c) or (a != 0 != c and math.isclose(b / a, d / c))
