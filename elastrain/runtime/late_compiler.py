"""Optimizers that work without torch's compiler, which is imported when something is compiled and not before.

torch keeps methods of its optimizers out of what is compiled, and imports the compiler for that when the first of them
is called, whether anybody compiles or not: 1.2 s of processor time, nearly half of a worker's start, and 70 MB.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

# By what they do, since torch gives these wrappers no public name. Another torch's may do more: such a one stays.
_KEEPS_OUT = frozenset(("torch", "torch._dynamo", "_dynamo", "getattr", "__dynamo_disable", "disable"))
_SETS_GRAD = frozenset(("torch", "torch._dynamo", "_dynamo", "graph_break", "cast", "Optimizer", "defaults"))
_SETS_GRAD |= {"is_grad_enabled", "set_grad_enabled"}


def import_compiler_late() -> None:
    """From now on methods of optimizers are called as they are, as long as the compiler is not there."""
    unwrap(Optimizer, [each for each in vars(torch.optim).values() if isinstance(each, type)])


def unwrap(base: type, classes: Iterable[type]) -> None:
    """Of `base` the methods that are kept out of what is compiled, of `classes` each `step`, where they are known."""
    for name, method in list(vars(base).items()):
        if _does_only(method, _KEEPS_OUT):
            setattr(base, name, _late(method, method.__wrapped__))
    for cls in classes:
        step: Any = vars(cls).get("step")
        if issubclass(cls, base) and _does_only(step, _SETS_GRAD):
            setattr(cls, "step", _late(step, functools.partial(_stepped, step.__wrapped__)))  # noqa: B010  mypy wants no assignment


def _does_only(method: Any, names: frozenset[str]) -> bool:
    """Whether it is a wrapper that imports the compiler, and uses nothing besides that is not among these names."""
    code: Any = getattr(method, "__code__", None)
    is_wrapper = callable(getattr(method, "__wrapped__", None)) and "torch._dynamo" in getattr(code, "co_names", ())
    return is_wrapper and names.issuperset(code.co_names)


def _late(method: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def instead(*args: Any, **kwargs: Any) -> Any:
        return (method if "torch._dynamo" in sys.modules else plain)(*args, **kwargs)

    return instead


def _stepped(step: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
    with torch.set_grad_enabled(optimizer.defaults["differentiable"]):
        return step(optimizer, *args, **kwargs)
