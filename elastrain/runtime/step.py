"""One step as the training loop sees it: an iterator over the micro-batches that this member computes.

It goes on until the step is committed; when somebody is lost it yields what they left undone.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, SupportsFloat

import torch
from torch import Tensor

from elastrain import protocol as p
from elastrain.errors import ConfigError, DriveFailedError, StoppedError
from elastrain.offload.errors import SpillReadError
from elastrain.runtime.arithmetic import grad_norm
from elastrain.runtime.losses import check_loss, weight_of
from elastrain.runtime.randomness import AFTER
from elastrain.values import Check, Contribution, Record

if TYPE_CHECKING:
    from elastrain.runtime.engine import Engine, Work
    from elastrain.runtime.layers import Layers
    from elastrain.runtime.loader import DataLoader
    from elastrain.runtime.loopstate import Taken
    from elastrain.runtime.model import GradientSlot, ModelState
    from elastrain.runtime.randomness import BlockRandomness
    from elastrain.runtime.untouched import Untouched

READ_TRIES = 3
"""So often a run is computed whose saved activations a drive does not give back; then the member ends."""


class Parts:
    """What a step works with; the same objects for the whole job."""

    def __init__(
        self,
        *,
        engine: Engine,
        model: ModelState,
        loader: DataLoader,
        randomness: BlockRandomness,
        untouched: Untouched,
        layers: Layers,
        run_length: int,
        reach: Callable[[int, str], None],
        log: Callable[..., None],
        computing: Callable[[], AbstractContextManager[None]] = nullcontext,
        backward: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.engine = engine
        self.model = model
        self.loader = loader
        self.randomness = randomness
        self.untouched = untouched
        self.layers = layers
        self.run_length = run_length
        self.reach = reach
        self.log = log
        self.computing = computing
        self.backward = backward


class Step:
    """`number` counts from 0. `loss`, `samples`, `skipped` and `grad_norm` are known once the step is committed."""

    def __init__(self, number: int, parts: Parts, taken: Taken, entering: Callable[[], None]) -> None:
        self.number = number
        self._taken = taken
        self._entering = entering
        self._entered = False
        self.micro_batch: int | None = None
        """The one being computed, for error reports."""
        self._parts = parts
        self._record: Record | None = None
        self.is_overruled = False
        """Most members have left their loops before this step: nothing of it counts, and the job has ended."""
        self._last_record: Record | None = None
        self._contribution = Contribution()
        self._last_of_run = False
        self._run = -1
        self._slot: GradientSlot | None = None
        self._loss_scale = 1.0
        self._backward_due = False
        self._reported: set[int] = set()
        self._tries_left = 0
        self._unread: SpillReadError | None = None
        self._probed = False
        """Whether what the next backward leaves is compared with what another member has."""
        self._is_check = False

    # --------------------------------------------------------------------------------------------- for the user's loop

    def __iter__(self) -> Iterator[Any]:
        if self._record is not None:
            raise ConfigError(f"step {self.number} is committed already: iterate over each step once")
        if not self._entered:
            self._entered = True
            self._entering()
        while self._record is None:
            self._parts.untouched.check()
            self._taken.check()
            work = self._parts.engine.next_work()
            if isinstance(work, p.Advance):
                self._record = work.record
                self._parts.model.statistics.refresh()
                self._parts.randomness.begin(self.number, AFTER)
                self._parts.untouched.settle()
                self._parts.layers.settle()
            elif isinstance(work, p.Leave):
                if not work.overruled:
                    raise StoppedError("the job has ended")
                self._end_uncommitted()
                return
            else:
                yield from self._compute(work)

    def backward(self, loss: Tensor, *, weight: SupportsFloat = 1.0) -> None:
        """Backward of one micro-batch; `loss` is its mean, `weight` what it counts (e.g. its number of tokens):
        a number or a tensor of one element, finite and not negative.

        The applied gradient is `Σ weight·gradient / Σ weight` over the global batch, whoever computed what. Where a
        drive does not give saved activations back, the iterator yields the micro-batch (and those summed with it)
        again; after `READ_TRIES` times DriveFailedError is raised.
        """
        if not self._backward_due:
            raise ConfigError("call step.backward(loss) exactly once per micro-batch, inside `for batch in step`")
        check_loss(loss)
        counts = weight_of(weight)
        self._parts.untouched.check_gradients()
        self._backward_due = False
        value = float(loss.detach())
        self._contribution += self._told(value, counts)
        assert self._slot is not None
        model = self._parts.model
        model.statistics.give(self._slot.statistics)
        model.attach(self._slot)
        try:
            if self._last_of_run:
                model.arm(self._block_done)
            with self._parts.backward():
                self._scaled(loss, counts * self._loss_scale).backward()  # type: ignore[no-untyped-call]
            if self._last_of_run:
                model.finish()
            if self._probed:
                self._tell_check(value, counts)
        except SpillReadError as fault:
            if not self._tries_left and not self._is_check:
                raise DriveFailedError(f"after {READ_TRIES} tries: {fault}") from fault
            self._unread = fault.with_traceback(None)  # a traceback would hold the graph
        finally:
            model.disarm()
            model.detach()
            model.statistics.end()

    def _end_uncommitted(self) -> None:
        """Most members have left their loops before this step: the one before was the last."""
        self.is_overruled = True
        self._last_record = self._parts.engine.core.record
        self._parts.model.statistics.refresh()
        self._parts.untouched.settle()

    @property
    def is_committed(self) -> bool:
        return self._record is not None

    @property
    def loss(self) -> float:
        """Weighted mean over the global batch."""
        told = self._committed.contribution
        return told.loss / told.weight if told.weight else math.nan

    @property
    def samples(self) -> int:
        return self._committed.contribution.samples

    @property
    def skipped(self) -> bool:
        """Whether the step was committed without moving anything, because of a NaN or an overflow."""
        return self._committed.skipped

    @property
    def grad_norm(self) -> float:
        """Global norm of the averaged gradient, before clipping; the loss scale is taken out."""
        return grad_norm(self._committed)

    @property
    def loss_scale(self) -> float:
        """What the losses of this step were multiplied by, beside their weights."""
        return self._committed.scaler.scale

    @property
    def _committed(self) -> Record:
        """Of the step itself; where it is overruled, of the last one that counts."""
        record = self._last_record if self.is_overruled else self._record
        if record is None:
            raise ConfigError(f"step {self.number} is not committed yet: this is known after `for batch in step`")
        return record

    # --------------------------------------------------------------------------------------------------------- inside

    def _compute(self, work: Work) -> Iterator[Any]:
        compute = work.compute
        self._run = compute.run
        self._loss_scale = compute.loss_scale
        if isinstance(compute, p.Recompute):
            yield from self._check(work)
            return
        self._probed = compute.probed
        self._reported.clear()
        for self._tries_left in reversed(range(READ_TRIES)):
            yield from self._try(work)
            if self._unread is None:
                break
            self._tell_unread(self._unread)
            self._unread = None
            work = self._parts.engine.compute_again(work)
        self.micro_batch = None

    def _check(self, work: Work) -> Iterator[Any]:
        """The first micro-batch of another member's run, once more: what comes out is compared, and counts nowhere."""
        self._is_check = True
        for self._tries_left in reversed(range(READ_TRIES)):
            self._probed = True
            yield from self._try(work)
            if self._unread is None:
                break
            self._tell_unread(self._unread)
            self._unread = None
        if self._probed:  # the drive did not give it back: nothing is compared
            self._probed = False
            self._parts.engine.checked(p.Checked(step=self.number, run=self._run, check=None))
        self._is_check = False
        self._slot = self.micro_batch = None

    def _micro_batches(self) -> range:
        first = self._run * self._parts.run_length
        length = 1 if self._is_check else self._parts.run_length
        return range(first, min(first + length, self._parts.loader.micro_batches))

    def _try(self, work: Work) -> Iterator[Any]:
        """Its micro-batches one after another, up to one whose activations did not come back."""
        parts = self._parts
        work.slot.zero()
        self._slot = work.slot
        self._contribution = Contribution()
        micro_batches = self._micro_batches()
        for micro_batch in micro_batches:
            self._last_of_run = micro_batch == micro_batches[-1] and not self._is_check
            self.micro_batch = micro_batch
            data = parts.loader.get(self.number, micro_batch)
            started_s = parts.engine.now_s()
            parts.randomness.begin(self.number, micro_batch)
            torch.clear_autocast_cache()  # else an autocast around the loop computes with the last step's weights
            parts.model.statistics.begin()
            self._backward_due = True
            if not self._is_check:
                parts.reach(self.number, "forward")
            with parts.computing():
                yield data
            if self._backward_due:
                raise ConfigError(
                    f"micro-batch {micro_batch} of step {self.number} went by without step.backward(loss): "
                    "every micro-batch needs exactly one"
                )
            if self._unread is not None:
                return
            what = "cross_check" if self._is_check else "micro_batch"
            parts.log(what, step=self.number, micro_batch=micro_batch, run=self._run, started_s=started_s)

    def _tell_check(self, loss: float, weight: float) -> None:
        assert self.micro_batch is not None
        assert self._slot is not None
        self._probed = False
        check = Check(micro_batch=self.micro_batch, loss=loss, weight=weight, digests=self._slot.digests())
        self._parts.engine.checked(p.Checked(step=self.number, run=self._run, check=check))

    def _tell_unread(self, fault: SpillReadError) -> None:
        self._parts.log("computed_again", step=self.number, micro_batch=self.micro_batch, reason=str(fault))
        warnings.warn(f"micro-batch {self.micro_batch} of step {self.number}: {fault}", stacklevel=2)

    @staticmethod
    def _scaled(loss: Tensor, factor: float) -> Tensor:
        """In float32 at the least: the factor alone may be out of float16's range."""
        if factor == 1.0:
            return loss
        return (loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss) * factor

    def _told(self, loss: float, weight: float) -> Contribution:
        assert self.micro_batch is not None
        order = self._parts.loader.order
        return Contribution(
            loss=loss * weight,
            weight=weight,
            samples=len(order.positions(self.number, self.micro_batch)),
            fingerprint=order.fingerprint(self.number, self.micro_batch),
        )

    def _block_done(self, block: int, touched: Any) -> None:
        if block in self._reported:  # by an earlier try of this run, with the same bits
            return
        self._reported.add(block)
        self._parts.reach(self.number, "backward")
        mask = sum(1 << leaf for leaf in touched)
        self._parts.engine.block_done(
            p.BlockDone(step=self.number, run=self._run, block=block, contribution=self._contribution, touched=mask)
        )


def compute_device(model: torch.nn.Module) -> torch.device:
    return next(iter(model.parameters()), torch.empty(0)).device


_THRESHOLD_BYTES = 30 << 20
_HEAP_PIECE_BYTES, _HEAP_PIECES = 14 << 20, 4


def warm_up(device: torch.device) -> None:
    """Let torch set up its matrix products, its autograd engine and its heap now; draws no random numbers."""
    if device.type == "cpu":
        _warm_heap()
    weight = torch.ones(64, 64, device=device, requires_grad=True)
    hidden = torch.nn.functional.gelu(torch.ones(64, 64, device=device) @ weight)
    torch.nn.functional.layer_norm(hidden, (64,)).sum().backward()  # type: ignore[no-untyped-call]


def _warm_heap() -> None:
    """Take from the kernel now what the first micro-batch would take page by page, while others wait for this member.

    glibc keeps freed memory below twice the largest mapped piece that it has seen freed (at most 32 MiB; see
    `M_MMAP_THRESHOLD` in mallopt(3)): after the first line, what the second one touches stays in the heap.
    """
    torch.empty(_THRESHOLD_BYTES, dtype=torch.uint8)
    [torch.zeros(_HEAP_PIECE_BYTES, dtype=torch.uint8) for _ in range(_HEAP_PIECES)]
