"""Evaluations of a model that the members of a job share: `job.evaluate`; and `job.broadcast`, which takes their way.

The training loop's thread computes batches one after another, as the engine hands them out. What it may change in the
model and in the generators is put back, because each member has computed other batches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from elastrain import protocol as p
from elastrain.base.environment import expected_place
from elastrain.decisions.batch_shares import Shares
from elastrain.errors import ConfigError
from elastrain.job.figures import NUMBERS_MAX, Figure, read, written
from elastrain.pipeline.stubs.generators import left_as_they_were
from elastrain.protocol.evaluation_messages import EvaluationName
from elastrain.runtime.assembly import Prepared
from elastrain.runtime.broadcast import OneValue, SentValues
from elastrain.runtime.io.heartbeat import EVALUATION_TIMEOUT_S, PHASE_TIMEOUT_S, LoopHeartbeat
from elastrain.runtime.io.loop_channel import BatchAssignment, Evaluated
from elastrain.runtime.loader.loader_arguments import check_collate
from elastrain.runtime.loader.seeding import generators_kept
from elastrain.runtime.loop.evaluated_stage import Told, evaluate_stage
from elastrain.runtime.loop.step import Step
from elastrain.runtime.model.kernels import compute_device

Sums: TypeAlias = dict[str, int | float | Tensor]
"""Sums over a dataset, by name."""
_FIRST_STREAM = -3
"""Number of the random stream of batch 0, in place of a micro-batch. Those of the other batches lie below it."""
WHERE = (
    "call it between two steps in the body of the loop over job.steps(…): behind `for batch in step`, or before it, "
    "also in the first step"
)


class Evaluating(ABC):
    """The part of a job's interface for what takes long between two steps."""

    def evaluate(
        self,
        fn: Callable[[Any], Mapping[str, Any]],
        dataset: Any,
        *,
        batch_size: int,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> Sums:
        """Evaluate on a dataset that the members share, for as long as it takes, and return the sums by name.

        Call it on all members alike, between two steps. Each member computes some of the batches; those of a lost
        member are handed out again, and every sample counts once. All members get the same bits, whichever member
        computed which batch. A member that joins meanwhile begins behind the evaluation. Behind the loop each member
        computes all batches itself.

        Inside, the model is in eval mode under `torch.no_grad()`. Each batch has random streams of its own. Afterwards
        the modes and buffers of all layers and the generators are as they were before. What `fn` changes elsewhere
        stays, on the member that computed the batch. One batch may take 30 minutes; `with job.phase(…, timeout=…)`
        around the call sets another bound.

        Args:
            fn: Function of a batch that returns sums over its samples by name, the same names for each batch: numbers,
                or tensors of at most 65536 numbers together. Whole numbers are added exactly, others in float64, from
                the first batch to the last. Sums of numbers are numbers; those of tensors are tensors on the CPU.
            dataset: Map-style dataset (`__getitem__` and `__len__`), equal on all members. The script's process loads
                it.
            batch_size: Samples per batch. The last batch may have fewer.
            collate_fn: Function from a list of samples to a batch; torch's `default_collate` if None.

        Raises:
            ConfigError: An argument is not valid, the call is at another place or not alike on all members, or `fn`
                has raised on another member. What `fn` raises here comes out as it is.
        """
        return self._evaluator("job.evaluate(…)").evaluate(fn, dataset, batch_size, collate_fn)

    @contextmanager
    def phase(self, name: str, timeout: float = PHASE_TIMEOUT_S) -> Iterator[None]:
        """Declare that the code inside takes longer than a step, such as an evaluation, a checkpoint or a compilation.

        A member is taken to hang if others wait for it and it shows no sign of life for the time of some steps; inside,
        for `timeout` seconds. Use it in the thread of the training loop, anywhere in the script. The loader and
        torch.compile need no phase. Raises ConfigError if `timeout` is no valid time.
        """
        with self._whereabouts().stretch(name, timeout):
            yield

    @abstractmethod
    def _whereabouts(self) -> LoopHeartbeat:
        """Return the heartbeat of the loop. Raises ConfigError before this member has entered the job."""

    @abstractmethod
    def _evaluator(self, call: str) -> Evaluator:
        """Return the evaluator of the loop. Raises ConfigError, with the name of the `call`, before the loop."""


class Broadcasting:
    """The part of a job's interface for values that one member gives to all. `evaluator` is that of a job."""

    def __init__(self, evaluator: Callable[[str], Evaluator]) -> None:
        self._evaluator = evaluator

    def broadcast(self, thing: Any, from_rank: int = 0) -> Any:
        """Return a copy of the `thing` of one member, on all members alike.

        Call it on all members alike, between two steps. What it has sent is part of the loop state, which members
        compare. A member that joins later begins behind it: register what the loop keeps of the value. If the member is
        lost before, the member that has its rank then (in a smaller job the last one) gives its own thing.

        Args:
            thing: Plain data of at most 8 MiB: None, numbers, words, bytes, tensors, NumPy arrays, and lists, tuples,
                sets and dicts of these. The things of other members than `from_rank` may be None.
            from_rank: Rank of the member in the current view.

        Raises:
            ConfigError: The thing is no data, or the call is at another place or not alike on all members.
        """
        return self._evaluator("job.broadcast(…)").broadcast(OneValue(thing, from_rank))


@dataclass(frozen=True, kw_only=True)
class _Batches:
    """The batches of a dataset, and the script's function of a batch. Raises ConfigError on bad arguments."""

    fn: Callable[[Any], Mapping[str, Any]]
    dataset: Any
    batch_size: int
    collate: Callable[[list[Any]], Any] | None
    from_rank: int | None = None

    def __post_init__(self) -> None:
        check_collate(self.collate)
        if not callable(self.fn):
            raise ConfigError(f"fn of job.evaluate(fn, dataset, …) must be callable; got {type(self.fn).__name__}")
        if not (isinstance(self.dataset, Sized) and hasattr(self.dataset, "__getitem__")):
            raise ConfigError(
                f"job.evaluate(…) takes a dataset with __getitem__ and __len__; got {type(self.dataset).__name__}: "
                "make a list of the samples, or a dataset that reads them by index"
            )
        if not isinstance(self.batch_size, int) or isinstance(self.batch_size, bool) or self.batch_size < 1:
            raise ConfigError(
                f"batch_size of job.evaluate(…) must be a whole number from 1 on; got {self.batch_size!r}"
            )
        if not len(self.dataset):
            raise ConfigError("the dataset of job.evaluate(…) has no samples")

    @property
    def count(self) -> int:
        """Number of batches."""
        return -(-len(self.dataset) // self.batch_size)

    @property
    def plan(self) -> str:
        """Data and batches, in words; equal on all members."""
        return f"job.evaluate(…) on {len(self.dataset)} samples in batches of {self.batch_size}"

    def figures(self, batch: int) -> str:
        """Compute a batch, and return its figures as text. Raises ConfigError if they are no numbers by name."""
        first = batch * self.batch_size
        with torch.device("cpu"):  # as a loader's process does
            samples = [self.dataset[i] for i in range(first, min(first + self.batch_size, len(self.dataset)))]
            loaded = (self.collate or default_collate)(samples)
        found = self.fn(loaded)
        if not isinstance(found, Mapping) or not found or not all(isinstance(name, str) for name in found):
            raise ConfigError(
                f"fn of job.evaluate(…) must return a dict of sums by name, such as {{'correct': n}}; got "
                f"{found!r:.100} for batch {batch}"
            )
        figures = {name: _figure(name, value) for name, value in found.items()}
        if (count := sum(len(each.numbers) for each in figures.values())) > NUMBERS_MAX:
            raise ConfigError(
                f"fn of job.evaluate(…) returned {count} numbers for batch {batch}; at most {NUMBERS_MAX} travel: "
                "return sums over the samples, not a value for each"
            )
        return written(figures)


def _figure(name: str, value: Any) -> Figure:
    """Return what `fn` gave for a name as a figure. Raises ConfigError if these are no real numbers."""
    if isinstance(value, np.ndarray | np.generic):
        value = torch.as_tensor(value) if value.dtype.kind in "biuf" else value
    if isinstance(value, bool | int) and abs(value) < 1 << 63:
        return Figure(None, (int(value),))
    if isinstance(value, float):
        return Figure(None, (float(value),))
    if not isinstance(value, Tensor) or value.is_complex():
        raise ConfigError(
            f"fn of job.evaluate(…) returned {value!r:.100} as {name!r}: return real numbers, or tensors of them"
        )
    numbers = value.detach().to("cpu", torch.float64 if value.is_floating_point() else torch.int64)
    return Figure(tuple(value.shape) or None, tuple(numbers.reshape(-1).tolist()))


def _plain(figure: Figure) -> int | float | Tensor:
    if figure.shape is None:
        return figure.numbers[0]
    is_whole = figure.numbers and all(isinstance(each, int) for each in figure.numbers)
    return torch.tensor(figure.numbers, dtype=torch.int64 if is_whole else torch.float64).reshape(figure.shape)


class Evaluator:
    """The evaluations of one training loop. Only its thread uses it."""

    def __init__(
        self, me: str, prepared: Prepared, registered: Mapping[str, Any], step: Callable[[], Step | None]
    ) -> None:
        self._me, self._prepared, self._step = me, prepared, step
        self._modules = [prepared.model, *(each for each in registered.values() if isinstance(each, nn.Module))]
        self._counted: tuple[Step | None, int] = None, 0
        """The step in whose body the loop is, and its evaluations there."""
        self._is_inside = False
        self.sent = SentValues()

    def evaluate(
        self,
        fn: Callable[[Any], Mapping[str, Any]],
        dataset: Any,
        batch_size: int,
        collate_fn: Callable[[list[Any]], Any] | None,
    ) -> Sums:
        """Evaluate together with the other members, as `job.evaluate` says."""
        step = self._between_steps("job.evaluate(…)")
        batches = _Batches(fn=fn, dataset=dataset, batch_size=batch_size, collate=collate_fn)
        self._is_inside = True
        try:
            is_over = step is None or step.is_overruled or self._prepared.parts.handover.has_ended
            with self._as_it_was(is_over=is_over) as begin:
                ended = self._alone(batches, begin) if is_over else self._together(batches, begin, cast(Step, step))
        finally:
            self._is_inside = False
        if ended.problem:
            raise ConfigError(ended.problem)
        return {name: _plain(figure) for name, figure in read(ended.figures).items()}

    def broadcast(self, value: OneValue) -> Any:
        """Return a copy of one member's value, as `job.broadcast` says."""
        step = self._between_steps("job.broadcast(…)")
        if step is None:
            raise ConfigError(f"job.broadcast(…) was called behind the loop, where members are alone: {WHERE}")
        view = self._prepared.engine.view
        value.check(max(expected_place()[1], len(view.ids) if view else 1))
        if step.is_overruled:  # the loop ends before this step, and what its body does is undone
            ended = p.EvaluationEnded(figures=value.figures(0), problem="")
        else:
            ended = self._together(value, lambda _: None, step)
        if ended.problem:
            raise ConfigError(ended.problem)
        return self.sent.take(ended.figures, compute_device(self._prepared.model))

    def _between_steps(self, call: str) -> Step | None:
        """Return the step in whose body the loop is, or None behind the loop. Raises ConfigError elsewhere."""
        step, has_ended = self._step(), self._prepared.parts.handover.has_ended
        if self._is_inside:
            raise ConfigError(f"{call} was called by the fn of job.evaluate(…): call one after the other")
        if step is None and not has_ended:
            raise ConfigError(f"{call} was called before the first step: {WHERE}")
        if step is not None and step.is_under_way:
            raise ConfigError(f"{call} was called in the middle of step {step.number}: {WHERE}")
        return step

    def _together(self, batches: _Batches | OneValue, begin: Callable[[int], None], step: Step) -> p.EvaluationEnded:
        number = self._counted[1] + 1 if self._counted[0] is step else 0
        self._counted = step, number
        after = step.number if step.is_committed else step.number - 1
        name = EvaluationName(after=after, step=step.number, number=number, from_rank=batches.from_rank)
        evaluate, raised = self._prepared.parts.handover.evaluate, None
        given: Evaluated = evaluate(p.EvaluationBegun(name=name, plan=batches.plan, batches=batches.count))
        while isinstance(given, BatchAssignment):
            batch = given.compute.batch
            begin(batch)
            try:
                told = evaluate_stage(self._prepared.pipelines, given, partial(batches.figures, batch))
            except Exception as error:  # noqa: BLE001 - raised again once the other members know of it
                raised = error
                told = Told(p.BatchEvaluated(figures="", problem=self._sentence(batch, error)))
            given = evaluate(*told)
        if raised is not None:
            raise raised
        return given

    def _sentence(self, batch: int, error: Exception) -> str:
        if isinstance(error, ConfigError):
            return str(error)
        words = f"{type(error).__name__}: {error}".splitlines()[0]
        return f"fn of job.evaluate(…) raised on {self._me} for batch {batch}: {words:.300}"

    def _alone(self, batches: _Batches, begin: Callable[[int], None]) -> p.EvaluationEnded:
        """Compute all batches, in the order in which they are added."""
        shares = Shares(batches.plan, batches.count)
        for batch in range(batches.count):
            begin(batch)
            shares.take("", batch, batches.figures(batch), "")
            self._prepared.parts.whereabouts.go_on()
            if shares.problem:
                break
        found = shares.result(())
        assert found is not None
        return p.EvaluationEnded(figures=found[0], problem=found[1])

    @contextmanager
    def _as_it_was(self, *, is_over: bool) -> Iterator[Callable[[int], None]]:
        """Put the model into eval mode, and back to what it was. Yields a function that begins a batch's streams."""
        parts, model = self._prepared.parts, self._prepared.model
        modules = list({each: None for whole in self._modules for each in whole.modules()})
        kept = [_Module(each) for each in modules]
        with ExitStack() as stack:
            if not is_over:
                stack.enter_context(parts.layers.aside())
                stack.enter_context(parts.whereabouts.known_stretch("job.evaluate", EVALUATION_TIMEOUT_S))
            for each in kept:
                stack.callback(each.restore)
            stack.enter_context(left_as_they_were(compute_device(model)))
            stack.enter_context(generators_kept())
            begin = stack.enter_context(parts.randomness.aside())
            stack.enter_context(torch.no_grad())
            model.eval()
            yield lambda batch: begin(_FIRST_STREAM - batch)


class _Module:
    """Mode and buffers of a module, to be restored."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._training, self._buffers = module, module.training, dict(module._buffers)
        buffers = [b for b in self._buffers.values() if b is not None and not b.is_inference()]
        self._kept = [(buffer, buffer._version, buffer.clone()) for buffer in buffers]

    def restore(self) -> None:
        """Restore them. An attribute that is as it was is not set."""
        if self._module.training is not self._training:
            self._module.training = self._training
        there = self._module._buffers
        if there.keys() != self._buffers.keys() or any(there[name] is not b for name, b in self._buffers.items()):
            there.clear()
            there.update(self._buffers)
        for buffer, version, value in self._kept:
            if buffer._version != version:
                buffer.data.copy_(value)
