"""The learning rate schedulers of an optimizer, which torch keeps no list of.

Schedulers are remembered as they are made. Older ones are looked up among all objects, frozen ones too.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Collection
from typing import Any
from weakref import ref

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from elastrain.errors import ConfigError
from elastrain.runtime.carried import Packer

_made: list[ref[LRScheduler]] = []


def _remember(cls: type[LRScheduler], *_: Any, **__: Any) -> LRScheduler:
    # Some classes never call the __init__ of LRScheduler; all of them, and copies, are made by __new__.
    made = object.__new__(cls)
    _made[:] = [each for each in _made if each() is not None] + [ref(made)]
    return made


LRScheduler.__new__ = _remember  # type: ignore[assignment, method-assign]


def schedulers_of(optimizer: Optimizer) -> list[LRScheduler]:
    """Return the schedulers that drive this optimizer, in an order that is the same on every member.

    They are looked up once, when the loop starts. Equal ones are interchangeable then.
    """
    frozen = gc.get_freeze_count()
    if frozen:
        gc.unfreeze()  # the collector shows no frozen object
    # type() rather than isinstance(): among all objects there are proxies whose __class__ does things when asked
    older = [each for each in gc.get_objects() if issubclass(type(each), LRScheduler)]
    if frozen:
        gc.freeze()
    alive = {id(each): each for each in (*older, *(made() for made in _made))}
    found = [each for each in alive.values() if getattr(each, "optimizer", None) is optimizer]
    return sorted(found, key=lambda s: (type(s).__qualname__, json.dumps(Packer().pack("", s.state_dict()))))


def check_no_more(optimizer: Optimizer, known: Collection[int]) -> None:
    """Raise ConfigError for a scheduler that was made since the loop began. `known`: ids of the others."""
    for each in [made() for made in _made]:
        if each is not None and id(each) not in known and getattr(each, "optimizer", None) is optimizer:
            raise ConfigError(
                f"{type(each).__name__}, a scheduler of the optimizer, was made in the loop, and members that join "
                "later would not have it: make all schedulers before job.steps(…), such as one SequentialLR of several"
            )
