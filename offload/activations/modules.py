"""Which module is running, by name, for error messages and lifetimes; and which storages belong to parameters.

Read from the stack of calls, so that no model has to be edited or passed in: hooks on all modules would be compiled
with them, and break their graphs.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from elastrain.offload.activations.compiled import COMPILER
from elastrain.offload.activations.identity import mark_as_staying

_CALL = torch.nn.Module._call_impl.__code__


class ModuleTrail:
    """Names of modules, learned as they run."""

    def __init__(self) -> None:
        self._names: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()

    def innermost(self) -> str:
        """Name and class of the innermost running module of this thread."""
        call = _innermost_call(sys._getframe(1))
        if call is None:
            return "no module"
        module: torch.nn.Module = call.f_locals["self"]
        if module not in self._names:
            while (outer := _innermost_call(call.f_back)) is not None:
                call = outer
            self._learn(call.f_locals["self"])
        return self._names.setdefault(module, type(module).__name__)

    def _learn(self, root: torch.nn.Module) -> None:
        for name, module in root.named_modules():
            for parameter in module.parameters(recurse=False):
                mark_as_staying(parameter.data)
            self._names[module] = f"{name or 'the model'} ({type(module).__name__})"


def _innermost_call(frame: FrameType | None) -> FrameType | None:
    """Return the innermost call of a module at or above this one."""
    while frame is not None and frame.f_code is not _CALL:
        frame = frame.f_back
    return frame


def untraced(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the compiler out of a hook. Where nothing has imported it, nothing is compiled, and it is slow to import."""
    if COMPILER not in sys.modules:
        return hook
    untraced: Callable[..., Any] = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
    return untraced
