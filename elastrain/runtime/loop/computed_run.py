"""One run as this member computes it: its micro-batches one after another, and the gradients of each backward.

A `Recompute` for comparison is such a run, or the first micro-batch of one. Its gradients are not added to the step.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from elastrain import protocol as p
from elastrain.base.thread_status import Station
from elastrain.errors import ConfigError, DriveFailedError
from elastrain.job.values import Check, Contribution
from elastrain.offload.errors import SpillReadError
from elastrain.runtime.carrying import refused
from elastrain.runtime.carrying.run_losses import RunLosses
from elastrain.runtime.io.heartbeat import LOADING_TIMEOUT_S, LoopHeartbeat
from elastrain.runtime.io.micro_batch_timer import MicroBatchTimer

if TYPE_CHECKING:
    from elastrain.job.batch import DataOrder
    from elastrain.job.streams import StreamOrder
    from elastrain.runtime.io.loop_channel import Assignment, LoopChannel
    from elastrain.runtime.loader.loader import DataLoader
    from elastrain.runtime.loop.mutation_guard import MutationGuard
    from elastrain.runtime.loop_state.layers import Layers
    from elastrain.runtime.loop_state.randomness import BlockRandomness
    from elastrain.runtime.model.flat_model import ModelState

Digests = tuple[Callable[[], int], ...]
"""Digests by block, each of the content at the time when it was asked for. The engine's thread calls them."""
KEPT_NAMED = 5
"""Number of values changed by forwards that are named when the results of two members differ."""
READ_TRIES = 3
"""Number of tries to compute a run whose saved activations a drive does not return. Then the member ends."""


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """The objects that steps use. They are the same for the whole job."""

    handover: LoopChannel
    model: ModelState
    loader: DataLoader
    randomness: BlockRandomness
    untouched: MutationGuard
    layers: Layers
    run_length: int
    reach: Callable[[int, str], None]
    """Called with step and phase at each place where a fault on request may strike."""
    log: Callable[..., None]
    computing: Callable[[], AbstractContextManager[None]] = nullcontext
    """Makes the context of each micro-batch."""
    backward: Callable[[], AbstractContextManager[None]] = nullcontext
    """Makes the context of each backward."""
    whereabouts: LoopHeartbeat = field(default_factory=LoopHeartbeat)
    """Heartbeat of the loop, at each micro-batch, at each block of a backward, and while the loader is waited for."""


class Run:
    """An iterator over the micro-batches of one run. Call `backward` once for each."""

    def __init__(self, step: int, assignment: Assignment, parts: StepParts) -> None:
        self.micro_batch: int | None = None
        """The micro-batch that is being computed, for error reports."""
        self._step = step
        self._assignment = assignment
        self._parts = parts
        self._untold: list[bool] = []
        """Comparisons that are still to be reported: of the first micro-batch (False), of the whole run (True)."""
        self._digests: dict[int, Callable[[], int]] = {}
        """Block -> digest of its gradient over the run, if the run is audited."""
        self._losses = RunLosses(parts.handover.landing.port)
        self._timer = MicroBatchTimer(parts.handover.landing.port, parts.whereabouts)
        self._reported: set[int] = set()
        """Blocks whose gradient was reported. A second try does not report them again, since its bits are the same."""
        self._tries_left = READ_TRIES
        self._unread: SpillReadError | None = None
        self.backward_is_due = False

    def __iter__(self) -> Iterator[Any]:
        """Yield the micro-batches of the run, and all of them again if a drive did not return activations."""
        compute = self._assignment.compute
        self._untold = (
            [compute.whole] if isinstance(compute, p.Recompute) else [False] * compute.probed + [True] * compute.audited
        )
        while self._tries_left:
            self._tries_left -= 1
            yield from self._try()
            if self._unread is None:
                break
            self._begin_again(self._unread)
        while self._is_check and self._untold:  # no try was completed, so there is nothing to compare
            self._tell_check(None, whole=self._untold.pop())
        self.micro_batch = None

    def backward(self, loss: Tensor, weight: float) -> None:
        """Compute the backward of the micro-batch that was yielded last; see `Step.backward`."""
        self._parts.untouched.check_gradients()
        refused.check_not_captured(self._parts.handover.landing.port)
        self.backward_is_due = False
        self._losses.add(loss, partial(counted, self._parts.loader.order, self._step, self._at, weight=weight))
        try:
            self._accumulate(loss, weight)
        except SpillReadError as fault:
            if not self._tries_left and not self._is_check:
                raise DriveFailedError(f"after {READ_TRIES} tries: {fault}") from fault
            self._unread = fault.with_traceback(None)  # a traceback would hold the graph

    @property
    def figures(self) -> RunLosses:
        """The collector of the figures that the script adds to; see `Step.add`."""
        return self._losses

    @property
    def _is_check(self) -> bool:
        return isinstance(self._assignment.compute, p.Recompute)

    @property
    def _at(self) -> int:
        assert self.micro_batch is not None
        return self.micro_batch

    def _micro_batches(self) -> range:
        first = self._assignment.compute.run * self._parts.run_length
        compute = self._assignment.compute
        length = 1 if isinstance(compute, p.Recompute) and not compute.whole else self._parts.run_length
        return range(first, min(first + length, self._parts.loader.micro_batches))

    def _try(self) -> Iterator[Any]:
        """Yield the micro-batches one after another, up to one whose activations did not come back."""
        self._assignment.slot.begin_run()
        self._losses = RunLosses(self._parts.handover.landing.port)
        for micro_batch in self._micro_batches():
            self.micro_batch = micro_batch
            data = load(self._parts, self._step, micro_batch)
            started_s = time.monotonic()
            self._timer.begin()
            self._prepare(micro_batch)
            with self._parts.computing():
                yield data
            if self.backward_is_due:
                raise went_by(f"micro-batch {micro_batch} of step {self._step}")
            if self._unread is not None:
                return
            self._timer.end()
            what, run = "micro_batch", self._assignment.compute.run
            if isinstance(self._assignment.compute, p.Recompute):
                what = "audit" if self._assignment.compute.whole else "cross_check"
            self._parts.log(what, step=self._step, micro_batch=micro_batch, run=run, started_s=started_s)

    def _prepare(self, micro_batch: int) -> None:
        parts = self._parts
        parts.whereabouts.enter(Station.COMPUTING, self._step, micro_batch)
        parts.randomness.begin(self._step, micro_batch)
        torch.clear_autocast_cache()  # else an autocast around the loop would use the last step's weights
        parts.model.statistics.begin()
        self.backward_is_due = True
        if not self._is_check:
            parts.reach(self._step, "forward")

    def _accumulate(self, loss: Tensor, weight: float) -> None:
        """Add the gradients of this micro-batch to the run's slot, and report the comparisons that are due."""
        model, slot = self._parts.model, self._assignment.slot
        model.statistics.give(model.statistics.take(), slot.statistics, weight)
        model.attach(slot, is_discarding=weight == 0.0)
        is_last = not self._is_check and self._at == self._micro_batches()[-1]
        try:
            self._parts.whereabouts.go_on()
            if is_last:
                model.arm(self._block_done)
            with self._parts.backward():
                scaled(loss, weight * self._assignment.compute.loss_scale).backward()  # type: ignore[no-untyped-call]
            if is_last:
                model.finish()
            self._tell_checks()
        finally:
            model.disarm()
            model.detach()
            model.statistics.end()

    def _begin_again(self, fault: SpillReadError) -> None:
        self._parts.log("computed_again", step=self._step, micro_batch=self.micro_batch, reason=str(fault))
        warnings.warn(f"micro-batch {self.micro_batch} of step {self._step}: {fault}", stacklevel=2)
        self._unread = None
        if not self._is_check:  # with a new slot, because peers may read the blocks that were reported from this one
            self._assignment = self._parts.handover.try_again(self._assignment)

    def _tell_checks(self) -> None:
        due = [whole for whole in self._untold if not whole or self._at == self._micro_batches()[-1]]
        self._untold = [whole for whole in self._untold if whole not in due]
        for whole in due:
            # For a run of this member, the digests are from when each block was reported: later the slot may hold more.
            reported = tuple(digest for _, digest in sorted(self._digests.items()))
            digests = reported if whole and not self._is_check else self._assignment.slot.digests_later()
            kept = tuple(sorted(self._parts.layers.of_forwards)[:KEPT_NAMED])
            self._tell_check(
                partial(self._check, self._at, self._losses, self._losses.count, digests, kept), whole=whole
            )

    @staticmethod
    def _check(at: int, losses: RunLosses, count: int, digests: Digests, kept: tuple[str, ...]) -> Check:
        told = losses.sum_of(count)
        made = tuple(digest() for digest in digests)
        return Check(micro_batch=at, loss=told.loss, weight=told.weight, digests=made, sums=told.sums, kept=kept)

    def _tell_check(self, check: Callable[[], Check] | None, *, whole: bool) -> None:
        step, run = self._step, self._assignment.compute.run

        def checked() -> p.Event:
            return p.Checked(step=step, run=run, check=None if check is None else check(), whole=whole)

        self._parts.handover.tell_landed(checked)

    def _block_done(self, block: int, touched: Any) -> None:
        if block in self._reported:  # an earlier try of this run reported the same bits
            return
        self._reported.add(block)
        self._parts.whereabouts.go_on()
        self._parts.reach(self._step, "backward")
        if True in self._untold:
            self._digests[block] = self._assignment.slot.digest_later(block)
        mask = sum(1 << leaf for leaf in touched)
        step, run, losses, count = self._step, self._assignment.compute.run, self._losses, self._losses.count

        def done() -> p.Event:
            return p.BlockDone(step=step, run=run, block=block, contribution=losses.sum_of(count), touched=mask)

        self._parts.handover.tell_landed(done)


def load(parts: StepParts, step: int, micro_batch: int) -> Any:
    """Return a micro-batch from the loader. The time until it comes does not count as a hang."""
    with parts.whereabouts.known_stretch(f"loading micro-batch {micro_batch}", LOADING_TIMEOUT_S):
        data = parts.loader.get(step, micro_batch)
    for mark in parts.loader.marks_found():
        parts.handover.tell(p.StreamRead(step=step, mark=mark))
    return data


def counted(order: DataOrder | StreamOrder, step: int, micro_batch: int, loss: float, *, weight: float) -> Contribution:
    """Return the contribution of one micro-batch. With weight 0 its loss counts as 0, even if it is NaN."""
    positions, fingerprint = order.positions(step, micro_batch), order.fingerprint(step, micro_batch)
    return Contribution(
        loss=loss * weight if weight else 0.0, weight=weight, samples=len(positions), fingerprint=fingerprint
    )


def went_by(what: str) -> ConfigError:
    """Return the error for a loop body that ended without a backward of `what`."""
    return ConfigError(f"{what} went by without step.backward(loss): every micro-batch needs exactly one")


def scaled(loss: Tensor, factor: float) -> Tensor:
    """Return the loss times the factor, at least in float32, because float16 may not represent the factor."""
    if factor == 1.0:
        return loss
    return (loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss) * factor
