"""A check for models that count in their own attributes: each member would count only the micro-batches it computes."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import nn

from elastrain.errors import ConfigError

Numbers = dict[tuple[str, str], float]
"""(path of a module, name of its attribute) -> value."""


def numbers_of(model: nn.Module) -> Numbers:
    """Return the numbers in attributes of all modules of the model."""
    return {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if type(value) in (int, float)
    }


def changed(before: Numbers, after: Numbers) -> dict[tuple[str, str], tuple[float, float]]:
    """Return (before, after) of each number that differs. A number that was not there before counts as 0."""
    return {key: (before.get(key, 0), value) for key, value in after.items() if before.get(key, 0) != value}


class Counters:
    """A check, before each micro-batch, of the numbers that the tracing pass changed, as long as they keep changing."""

    def __init__(self, model: nn.Module, traced: Mapping[tuple[str, str], tuple[float, float]]) -> None:
        """Keep the model, and in `traced` the changes that the forward of the tracing pass made."""
        self._model = model
        self._traced = dict(traced)
        self._last: Numbers | None = None
        """The numbers before the last micro-batch that was checked."""
        self._is_next_as_traced = True
        """True before the first micro-batch: it repeats what the tracing pass did, and may be the only one."""

    def look(self) -> None:
        """Compare the numbers with those of the last look. Raises ConfigError if one changed as in the tracing pass."""
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
    """Return True if both changes add the same difference, or multiply by the same factor."""
    (a, b), (c, d) = one, other
    return math.isclose(b - a, d - c) or (a != 0 != c and math.isclose(b / a, d / c))
