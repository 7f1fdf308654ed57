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


def import_compiler_late() -> None:
    """From now on methods of optimizers are called as they are, as long as the compiler is not there."""
    for name, method in list(vars(Optimizer).items()):
        if getattr(getattr(method, "__code__", None), "co_filename", None) == torch._compile.__file__:
            setattr(Optimizer, name, _late(method, method.__wrapped__))
    for cls in vars(torch.optim).values():
        step = vars(cls).get("step") if isinstance(cls, type) and issubclass(cls, Optimizer) else None
        if step is not None and step.__code__.co_name == "_use_grad":  # what torch makes of each `step`
            cls.step = _late(step, functools.partial(_stepped, step.__wrapped__))


def _late(method: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def instead(*args: Any, **kwargs: Any) -> Any:
        return (method if "torch._dynamo" in sys.modules else plain)(*args, **kwargs)

    return instead


def _stepped(step: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
    with torch.set_grad_enabled(optimizer.defaults["differentiable"]):
        return step(optimizer, *args, **kwargs)
