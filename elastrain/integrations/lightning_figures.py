"""Values that `training_step` logs, folded over the whole batch, so that all members log the same numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from elastrain.errors import ConfigError
from elastrain.runtime.loop.step import Step

_SUM, _COUNT = "log", "logs"
_FLAGS = ("prog_bar", "logger", "on_step", "on_epoch")


@contextmanager
def captured(module: Any, step: Step) -> Iterator[None]:
    """Add what the module logs inside to the figures of the step. The names carry the options of `self.log`.

    Not every member computes a micro-batch in each step, so that it may not know these options otherwise.
    """

    def log(name: str, value: Any, **options: Any) -> None:
        reduction = options.get("reduce_fx", "mean")
        reduction = getattr(reduction, "__name__", reduction)
        if reduction not in ("mean", "sum") or not isinstance(value, int | float | Tensor):
            raise ConfigError(
                f"self.log({name!r}, …) in training_step takes a number or a tensor of one element, with reduce_fx "
                f"'mean' or 'sum', under ElastrainStrategy; got {type(value).__name__} with {reduction!r}"
            )
        flags = "".join({None: "-", True: "1", False: "0"}[options.get(flag)] for flag in _FLAGS)
        step.add(f"{_SUM}:{reduction}:{flags}:{name}", value.detach() if isinstance(value, Tensor) else value)
        step.add(f"{_COUNT}:{name}", 1)

    module.__dict__["log"] = log
    try:
        yield
    finally:
        del module.__dict__["log"]


def log_sums(module: Any, step: Step) -> None:
    """Log the means and sums over the whole batch once the step is committed, as if `training_step` did it."""
    sums = step.sums
    name_before = module._current_fx_name
    module._current_fx_name = "training_step"
    try:
        for key in sorted(sums):
            kind, _, rest = key.partition(":")
            if kind != _SUM:
                continue
            reduction, flags, name = rest.split(":", 2)
            value = sums[key] / (sums[f"{_COUNT}:{name}"] if reduction == "mean" else 1)
            options = {flag: told == "1" for flag, told in zip(_FLAGS, flags, strict=True) if told != "-"}
            module.log(name, torch.tensor(value), batch_size=step.samples, reduce_fx=reduction, **options)
    finally:
        module._current_fx_name = name_before
