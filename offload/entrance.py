"""Puts saved-tensor hooks on and takes them off in one step each, so that no interrupt comes between."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from operator import call
from types import MethodType
from typing import Any

import torch

from elastrain.offload.compiling import running

Hook = Callable[..., Any]


class Entrance:
    """The hooks of one `with` block at a time. `next_block` is the block that is about to put them on, if one is."""

    def __init__(self) -> None:
        self.next_block: weakref.ref[object] | None = None
        self._block: weakref.ref[object] | None = None
        self._is_in = False

    @property
    def is_entered(self) -> bool:
        """Tell whether they are on. Those of a block that was interrupted at its very end are taken off here."""
        if self._block and self._block() is None:
            self.leave()
        return self._is_in

    def enter(self, pack: Hook, unpack: Hook, keep: running.Keep) -> None:
        """Put them on; `keep` takes what compiled programs save."""
        self._block = self.next_block if self.next_block and self.next_block() else None
        push = partial(torch._C._autograd._push_saved_tensors_default_hooks, pack, unpack)
        _at_once(push, partial(running.keeps().append, keep), partial(setattr, self, "_is_in", True))

    def leave(self) -> None:
        """Take them off if they are on."""
        if self._is_in:
            pop = torch._C._autograd._pop_saved_tensors_default_hooks
            _at_once(pop, running.keeps().pop, partial(setattr, self, "_is_in", False))
        self._block = None


class KeptByItsBlock:
    """A method `__exit__` of which each `with` block keeps an object of its own until it is left, however that is."""

    def __init__(self, method: Callable[..., None]) -> None:
        self._method = method

    def __get__(self, owner: Any, kind: type) -> Callable[..., None]:
        if owner is None:
            return self._method
        bound = MethodType(self._method, owner)
        owner.entrance.next_block = weakref.ref(bound)
        return bound


def _at_once(*calls: Callable[[], object]) -> None:
    """Call built-in functions one after the other, with no bytecode between."""
    deque(map(call, calls), maxlen=0)
