"""The steps of a job, seen by a script that iterates over the batches of a loader and calls `optimizer.step()`.

The script's body runs for each of the step's micro-batches on every member, so that all members count alike. A member
computes only its share of them. For the rest, its body gets the last batch again, and the model's forward returns what
it returned then, without computing: such a body is *played*. A member that joins later plays the bodies of all steps
before its first one. In the last body of a step, `optimizer.step()` waits until the step is committed, so that what
follows it in the body comes between two steps.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import elastrain
from elastrain.errors import ConfigError
from elastrain.runtime.job import Job
from elastrain.runtime.loop.step import Step

_NOTHING = object()


class RememberedForward:
    """A model's forward. In a body that is played it returns what the calls of the last computed body returned."""

    def __init__(self, model: nn.Module, context: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._model = model
        self._compute = context(model.forward)
        self._returned: list[Any] = []
        self._at = 0
        self.is_noted = False
        """True in a body that computes its micro-batch."""
        self.played: float | None = None
        """The loss of a body that is played, up to its `optimizer.step()`; else None."""

    def begin(self, *, played: float | None) -> None:
        """Begin a body, which is played if it is given a loss."""
        self._at, self.played, self.is_noted = 0, played, played is None
        if self.is_noted:
            self._returned.clear()

    def end(self) -> None:
        """Compute again from now on, because what follows in the body is no training."""
        self.played, self.is_noted = None, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the forward."""
        if self.played is None:
            found = self._compute(*args, **kwargs)
            if self.is_noted:
                self._returned.append(tree_map(_detached, found))
            return found
        if self._at == len(self._returned):
            self._returned.append(self._aside(*args, **kwargs))
        found = tree_map(_detached, self._returned[self._at])
        self._at += 1
        if isinstance(found, Mapping) and isinstance(found.get("loss"), Tensor):
            found["loss"] = torch.full_like(found["loss"], self.played)  # type: ignore[index]
        return found

    def _aside(self, *args: Any, **kwargs: Any) -> Any:
        """Compute a forward that changes nothing in the model."""
        modes = {module: module.training for module in self._model.modules()}
        self._model.eval()
        try:
            with torch.no_grad():
                return self._compute(*args, **kwargs)
        finally:
            for module, mode in modes.items():
                module.training = mode


@dataclass
class _Body:
    """One run of the script's body."""

    is_sync: bool = True
    """True in the last body of a step."""
    is_open: bool = False
    has_advanced: bool = False
    """True once the next micro-batch of the step was taken, or its commit was found."""
    has_stepped: bool = False


@dataclass
class _StepBatches:
    """The micro-batches of a step, as this member computes them."""

    iterator: Iterator[Any] = field(default_factory=lambda: iter(()))
    next: Any = _NOTHING
    last: Any = None
    losses: list[Tensor] = field(default_factory=list)


class ScriptLoop:
    """The one training loop of a script. Only the thread of the loop uses it."""

    def __init__(
        self, job: Job, forward: RememberedForward, loader: elastrain.DataLoader, behind: int, made: int
    ) -> None:
        self._forward, self._loader = forward, loader
        self._behind = behind
        """Steps of the script's own checkpoints that come before the job's step 0."""
        self._number = made - behind
        """The job's step that the script's loop has reached. It begins where the script believes to be.

        This may be before the job's first step. On a newcomer, it counts the steps that it plays, too.
        """
        self.epochs: dict[str, list[float]] = {}
        """By epoch, the sum of the steps' losses, and how many there were."""
        self._steps: Iterator[Step] | None = job.steps(loader, until=sys.maxsize)
        self._first = 0
        """The job's step with which this member began."""
        self._step: Step | None = None
        self._batches = _StepBatches()
        self._now = _Body()
        self.is_playing_past = False
        """True on a member that plays steps before its first one."""
        self.on_commit: Callable[[Step], None] = lambda step: None

    @property
    def is_sync(self) -> bool:
        """True in the last body of a step, which ends with `optimizer.step()`."""
        return self._now.is_sync

    @property
    def is_between(self) -> bool:
        """True where the script may log, save and evaluate: outside of bodies, and behind `optimizer.step()`."""
        return not self._now.is_open or self._now.has_stepped

    @property
    def is_shareable(self) -> bool:
        """True where the members may compute together: between two steps, on one that plays none."""
        step = self._step
        if step is None or self._steps is None or self.is_playing_past or not self.is_between:
            return False
        return not step.is_under_way and not step.is_overruled

    @property
    def step(self) -> Step | None:
        """The step that was begun last. None before the first."""
        return self._step

    @property
    def committed(self) -> int:
        """Steps that are committed, with those of the script's own checkpoint."""
        is_done = self._step is not None and self._step.is_committed
        return self._behind + self._number + (1 if is_done and self._now.is_open else 0)

    def epoch(self) -> Iterator[Any]:
        """Yield the batches from here to the end of the epoch."""
        if self._step is None and self._steps is not None:
            self._step = next(self._steps)
            self._first = self._step.number
        assert self._step is not None
        first, is_begun = self._first, False
        while not (is_begun and (self._behind + self._number) % self._loader.steps_per_epoch == 0):
            is_begun = True
            if self._steps is None:
                raise ConfigError("the job's loop has ended: this loader cannot be iterated over again")
            self.is_playing_past = self._number < first
            if self._number > self._step.number:
                self._step = next(self._steps)
            try:
                yield from self._play_past(first) if self.is_playing_past else self._compute(self._step)
            finally:  # also behind a `break`
                self._number += self.is_playing_past or self._step.is_committed
            if self._step.is_overruled:
                return

    def close(self) -> None:
        """End the job's loop, together with the other members."""
        steps, self._steps = self._steps, None
        if steps is not None:
            steps.close()  # type: ignore[attr-defined]  # a generator

    def backward(self, loss: Tensor) -> None:
        """Compute the backward of the batch. In a body that is played, the loss gets the value that was committed."""
        if not self._now.is_open or self._now.has_stepped:
            raise ConfigError(
                "accelerator.backward(loss) belongs into `for batch in loader` over the training loader, which is the "
                "first DataLoader that prepare(…) was given, before optimizer.step()"
            )
        if self._forward.played is not None:
            with torch.no_grad():
                loss.detach().fill_(self._forward.played)
            return
        assert self._step is not None
        self._batches.losses.append(loss.detach())
        self._step.backward(loss)
        self._forward.is_noted = False

    def optimizer_step(self) -> None:
        """Wait for the commit in the last body of a step. Another micro-batch may come first, after a loss."""
        if not self._now.is_open:
            raise ConfigError("optimizer.step() comes inside of `for batch in loader` over the training loader")
        if not self.is_sync or self._now.has_stepped:
            return
        if self._forward.played is None:
            self._advance()
            if self._batches.next is not _NOTHING:
                self._now.is_sync = False
                return
        self._now.has_stepped = True
        self._forward.end()

    def _advance(self) -> None:
        """Take the next micro-batch of the step, or find that it is committed."""
        self._now.has_advanced = True
        self._batches.next = next(self._batches.iterator, _NOTHING)
        step = self._step
        if self._batches.next is _NOTHING and step is not None and step.is_committed:
            told = self.epochs.setdefault(str((self._behind + step.number) // self._loader.steps_per_epoch), [0.0, 0.0])
            told[:] = told[0] + step.loss, told[1] + 1
            self.on_commit(step)

    def _compute(self, step: Step) -> Iterator[Any]:
        """Yield the step's batches: those of this member, then as many played ones as are missing."""
        count, bodies, self._batches.losses = self._loader.micro_batches, 0, []
        self._batches.iterator = iter(step)
        self._advance()
        while self._batches.next is not _NOTHING:
            self._batches.last = self._batches.next
            yield from self._body(self._batches.last, is_sync=bodies >= count - 1, played=None)
            bodies += 1
            if not self._now.has_advanced:
                self._advance()
        if step.is_overruled or bodies >= count:
            return
        rest = (step.loss * count - sum(float(loss) for loss in self._batches.losses)) / (count - bodies)
        while bodies < count:
            yield from self._body(self._any_batch(step.number), is_sync=bodies == count - 1, played=rest)
            bodies += 1

    def _play_past(self, first: int) -> Iterator[Any]:
        epoch = (self._behind + self._number) // self._loader.steps_per_epoch
        total, count = self.epochs.get(str(epoch), [0.0, 0.0])
        for micro_batch in range(last := self._loader.micro_batches):
            is_sync = micro_batch == last - 1
            yield from self._body(self._any_batch(first), is_sync=is_sync, played=total / max(count, 1))

    def _any_batch(self, step: int) -> Any:
        """Return the batch for a body that is played: the last one of this member, or any if it had none."""
        if self._batches.last is None:
            self._batches.last = self._loader.get(step, 0)
        return self._batches.last

    def _body(self, batch: Any, *, is_sync: bool, played: float | None) -> Iterator[Any]:
        self._now = _Body(is_sync=is_sync, is_open=True)
        self._forward.begin(played=played)
        try:
            yield batch
        finally:
            self._forward.end()
            self._now.is_open = False
        if self.is_sync and not self._now.has_stepped and not (self._step is not None and self._step.is_overruled):
            raise ConfigError(
                f"the script's body for batch {self._loader.micro_batches} of a step has not called optimizer.step(): "
                "if it accumulates gradients by counting batches, say Accelerator(gradient_accumulation_steps=…) "
                "instead, and do not divide the loss"
            )


def _detached(thing: Any) -> Any:
    return thing.detach() if isinstance(thing, Tensor) else thing
