"""Name of the module that is running, for error messages and lifetimes; storages of parameters are marked on the way.

The name is read from the call stack, so that users need not pass in or edit their model. Hooks on all modules would be
compiled with them, and would break their graphs.
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
        """Return the name and class of the innermost module that runs in this thread."""
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
    """Return the innermost frame of a module call, at or above this frame, or None."""
    while frame is not None and frame.f_code is not _CALL:
        frame = frame.f_back
    return frame


def untraced(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Exclude a hook from compilation.

    Does nothing if the compiler is not imported, because then nothing is compiled.
    """
    if COMPILER not in sys.modules:
        return hook
    untraced: Callable[..., Any] = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
    return untraced
