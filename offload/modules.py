"""Which module is running, by name, for error messages and lifetimes; and which storages belong to parameters.

Read from the stack of calls, so that no model has to be edited or passed in: hooks on all modules would be compiled
with them, and break their graphs.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch

from elastrain.offload.compiled import COMPILER
from elastrain.offload.identity import mark_as_staying

_CALL = torch.nn.Module._call_impl.__code__


class ModuleTrail:
    """Names of modules, learned as they run."""

    def __init__(self) -> None:
        self._names: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()

    def innermost(self) -> str:
        """Name and class of the innermost running module of this thread."""
        running = _running(sys._getframe(1))
        module = next(running, None)
        if module is None:
            return "no module"
        if module not in self._names:
            *_, outermost = module, *running
            self._learn(outermost)
        return self._names.setdefault(module, type(module).__name__)

    def _learn(self, root: torch.nn.Module) -> None:
        for name, module in root.named_modules():
            self._names[module] = f"{name or 'the model'} ({type(module).__name__})"
            for parameter in module.parameters(recurse=False):
                mark_as_staying(parameter.data)


def _running(frame: FrameType | None) -> Iterator[torch.nn.Module]:
    """The modules that are being called, the innermost first."""
    while frame is not None:
        if frame.f_code is _CALL:
            yield frame.f_locals["self"]
        frame = frame.f_back


def untraced(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the compiler out of a hook. Where nothing has imported it, nothing is compiled, and it is slow to import."""
    if COMPILER not in sys.modules:
        return hook
    untraced: Callable[..., Any] = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
    return untraced
