"""Which module is running, by name, for error messages and lifetimes; and which storages belong to parameters.

Uses the global module hooks of torch while it is active, so that no model has to be edited or passed in.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from elastrain.offload.compiled import COMPILER
from elastrain.offload.identity import mark_as_staying


class ModuleTrail(threading.local):
    """The running modules of each thread, innermost last. `meets_compiled` is called at each one that is compiled."""

    def __init__(self, meets_compiled: Callable[[], None]) -> None:
        self._meets_compiled = meets_compiled
        self._stack: list[str] = []
        self._names: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()

    def innermost(self) -> str:
        """Name and class of the innermost running module."""
        return self._stack[-1] if self._stack else "no module"

    def clear(self) -> None:
        """Forget what is running: a forward that raised inside a checkpoint may not have left its modules."""
        self._stack.clear()

    def enter(self, module: torch.nn.Module, _args: Any) -> None:
        """Forward-pre-hook."""
        if module._compiled_call_impl is not None:
            self._meets_compiled()
        if not self._stack and module not in self._names:
            self._learn(module)
        self._stack.append(self._names.get(module) or type(module).__name__)

    def leave(self, _module: torch.nn.Module, _args: Any, _output: Any) -> None:
        """Forward hook, called after exceptions too."""
        if self._stack:
            self._stack.pop()

    def _learn(self, root: torch.nn.Module) -> None:
        for name, module in root.named_modules():
            self._names[module] = f"{name or 'the model'} ({type(module).__name__})"
            for parameter in module.parameters(recurse=False):
                mark_as_staying(parameter.data)


class TrailHooks:
    """Registers a trail's hooks, and removes them."""

    def __init__(self, trail: ModuleTrail) -> None:
        self._handles = (
            register_module_forward_pre_hook(untraced(trail.enter)),
            register_module_forward_hook(untraced(trail.leave), always_call=True),
        )

    def remove(self) -> None:
        """Unregister."""
        for handle in self._handles:
            handle.remove()


def untraced(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the compiler out of a hook. Where nothing has imported it, nothing is compiled, and it is slow to import."""
    if COMPILER not in sys.modules:
        return hook
    untraced: Callable[..., Any] = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
    return untraced
