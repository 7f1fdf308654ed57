"""The learning rate schedulers of an optimizer, which torch does not list, and a check of the script's own schedules.

Schedulers are recorded when they are made. Those older than this module are found among all objects, frozen ones too.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any
from weakref import ref

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from elastrain.errors import ConfigError
from elastrain.runtime.loop_state.loop_state_codec import Packer

_COMPARED = 3
"""Number of first steps whose hyperparameters are kept."""


def _older() -> list[ref[LRScheduler]]:
    """Return the schedulers that exist when this module is imported."""
    frozen = gc.get_freeze_count()
    gc.unfreeze()  # the collector shows no frozen object
    # type() rather than isinstance(): among all objects there are proxies whose __class__ does things when asked
    found = [ref(each) for each in gc.get_objects() if issubclass(type(each), LRScheduler)]
    if frozen:
        gc.freeze()
    return found


def _remember(cls: type[LRScheduler], *_: Any, **__: Any) -> LRScheduler:
    # Some classes never call the __init__ of LRScheduler; all of them, and copies, are made by __new__.
    made = object.__new__(cls)
    _made[:] = [each for each in _made if each() is not None] + [ref(made)]
    return made


_made = _older()
LRScheduler.__new__ = _remember  # type: ignore[assignment, method-assign]


def schedulers_of(optimizer: Optimizer) -> list[LRScheduler]:
    """Return the schedulers that drive this optimizer, in an order that is the same on every member.

    Call it once, when the loop starts. Schedulers with equal state are interchangeable at that time.
    """
    found = [each for made in _made if (each := made()) is not None and getattr(each, "optimizer", None) is optimizer]
    return sorted(found, key=lambda s: (type(s).__qualname__, json.dumps(Packer().pack("", s.state_dict()))))


def check_no_more(optimizer: Optimizer, known: Collection[int]) -> None:
    """Raise ConfigError for a scheduler that was made after the loop began. `known`: ids of the older ones."""
    for each in [made() for made in _made]:
        if id(each) not in known and getattr(each, "optimizer", None) is optimizer:
            raise ConfigError(
                f"{type(each).__name__}, a scheduler of the optimizer, was made in the loop, and members that join "
                "later would not have it: make all schedulers before job.steps(…), such as one SequentialLR of several"
            )


class FirstSettings:
    """Hyperparameters of a job's first steps, and of the first steps after it was resumed.

    Their comparison finds a schedule of the script that starts afresh because its state is in no checkpoint.
    """

    def __init__(self) -> None:
        self.first: list[str] = []
        """Hyperparameters of the job's first steps."""
        self._since: list[str] | None = None
        """Hyperparameters of the steps since the job was resumed; None if it was not."""
        self._entered: Any = None

    def resume(self, loop: str) -> None:
        """Start the comparison in a resumed job.

        `loop`: the restored loop state. It has the hyperparameters with which the next step was entered before.
        """
        self._since, self._entered = [], json.loads(loop).get("entered")

    def enter(self, hyper: Sequence[Mapping[str, Any]], counted: Collection[str]) -> None:
        """Record the hyperparameters of a step. Raises ConfigError if a schedule of the script started afresh."""
        entered = json.dumps([{n: v for n, v in group.items() if n not in counted} for group in hyper])
        if len(self.first) < _COMPARED:
            self.first.append(entered)
        if self._since is not None and len(self._since) < _COMPARED:
            self._since.append(entered)
            self._check(hyper)

    def _check(self, hyper: Sequence[Mapping[str, Any]]) -> None:
        if not (since := self._since):
            return
        pairs = enumerate(zip(hyper, self._entered or hyper, strict=True))
        differing = [(i, n, g.get(n), w[n]) for i, (g, w) in pairs for n in w if g.get(n) != w[n]]
        found = [f"{name} of parameter group {i} is {now!r}, not {was!r}" for i, name, now, was in differing]
        is_enough = len(since) == len(self.first) == _COMPARED
        is_anew = is_enough and since[1:] == self.first[1:] and since[0] not in (self.first[0], since[1])
        if (found and len(since) == 1) or is_anew:
            what = found[0] if len(since) == 1 else "hyperparameters are what they were in the job's first steps"
            raise ConfigError(
                f"the loop sets other hyperparameters than before it was resumed ({what}): a schedule of the script's "
                "own has begun anew, or is another. Set them from step.number, use a scheduler of torch.optim, or "
                "job.register(…) what the schedule counts in; take a change on purpose with --accept-changes"
            )
