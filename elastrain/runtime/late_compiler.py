"""Optimizers that work without torch's compiler, which is imported when something is compiled and not before.

torch keeps methods of its optimizers out of what is compiled, and imports the compiler for that when the first of them
is called, whether anybody compiles or not: 1.2 s of processor time, nearly half of a worker's start, and 70 MB.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

COMPILER = "torch._dynamo"
_INSTEAD = "__dynamo_disable"
"""Where a function has what torch calls instead of it."""
_STEPS = "_use_grad"
"""How torch calls what it makes of the `step` of its optimizers."""


def import_compiler_late() -> None:
    """From now on methods of optimizers are called as they are, as long as the compiler is not there."""
    for method in list(vars(Optimizer).values()):
        if getattr(getattr(method, "__code__", None), "co_filename", None) == torch._compile.__file__:
            vars(method.__wrapped__).setdefault(_INSTEAD, _without_compiler(method))
    for cls in vars(torch.optim).values():
        step = vars(cls).get("step") if isinstance(cls, type) and issubclass(cls, Optimizer) else None
        if step is not None and step.__code__.co_name == _STEPS:
            cls.step = _step_without_compiler(step)


def _without_compiler(method: Any) -> Callable[..., Any]:
    original = method.__wrapped__

    def instead(*args: Any, **kwargs: Any) -> Any:
        if COMPILER not in sys.modules:
            return original(*args, **kwargs)
        vars(original).pop(_INSTEAD, None)  # from now on torch asks the compiler, as ever
        return method(*args, **kwargs)

    return instead


def _step_without_compiler(step: Any) -> Callable[..., Any]:
    @functools.wraps(step)
    def instead(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if COMPILER in sys.modules:
            return step(optimizer, *args, **kwargs)
        with torch.set_grad_enabled(optimizer.defaults["differentiable"]):
            return step.__wrapped__(optimizer, *args, **kwargs)

    return instead
