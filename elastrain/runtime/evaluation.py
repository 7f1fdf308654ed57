"""Evaluations of a model that the members of a job share: `job.evaluate`; and `job.broadcast`, which takes their way.

The training loop's thread computes batches one after another, as the engine hands them out. What it may change in the
model and in the generators is put back, because each member has computed other batches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from elastrain import protocol as p
from elastrain.base.environment import expected_place
from elastrain.decisions.batch_shares import Shares
from elastrain.errors import ConfigError
from elastrain.job.figures import read
from elastrain.pipeline.stubs.generators import left_as_they_were
from elastrain.protocol.evaluation_messages import EvaluationName
from elastrain.runtime.assembly import Prepared
from elastrain.runtime.broadcast import OneValue, SentValues
from elastrain.runtime.evaluated_batches import OUTPUTS, SUMS, Batches, outputs_of, plain
from elastrain.runtime.io.heartbeat import EVALUATION_TIMEOUT_S, PHASE_TIMEOUT_S, LoopHeartbeat
from elastrain.runtime.io.loop_channel import BatchAssignment, Evaluated
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
        layers' modes and buffers and the generators are as before. What `fn` changes elsewhere stays, on the member
        that computed the batch. One batch may take 30 minutes; `with job.phase(…, timeout=…)` sets another bound.

        Args:
            fn: Function of a batch that returns sums over its samples by name, the same names for each batch: numbers,
                or tensors of at most 65536 numbers together. Whole numbers are added exactly, others in float64, from
                the first batch to the last. Sums of numbers are numbers; those of tensors are tensors on the CPU.
            dataset: Map-style dataset (`__getitem__`, `__len__`), equal on all members; the script's process loads it.
            batch_size: Samples per batch. The last batch may have fewer.
            collate_fn: Function from a list of samples to a batch; torch's `default_collate` if None.

        Raises:
            ConfigError: An argument is not valid, the call is at another place or not alike on all members, or `fn`
                has raised on another member. What `fn` raises here comes out as it is.
        """
        batches = Batches(call=SUMS, fn=fn, dataset=dataset, batch_size=batch_size, collate=collate_fn)
        return self._evaluator(batches.call).evaluate(batches)

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
    """The part of a job's interface for what all members get alike between two steps. `evaluator` is that of a job."""

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

    def predict(
        self,
        fn: Callable[[Any], Any],
        dataset: Any,
        *,
        batch_size: int,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> list[Any]:
        """Compute outputs of a dataset that the members share, and return those of each batch in the dataset's order.

        Everything else is as in `evaluate`: all members get the same bits, every batch once, whichever member computed
        it and whichever was lost. All members keep all outputs, so return no more than is needed.

        Args:
            fn: Function of a batch that returns plain data of at most 8 MiB: tensors, numbers, words, None, and lists,
                tuples and dicts of these.
            dataset: As in `evaluate`.
            batch_size: As in `evaluate`.
            collate_fn: As in `evaluate`.

        Raises:
            ConfigError: As in `evaluate`; or `fn` returned something that is no data, or too much of it.
        """
        batches = Batches(call=OUTPUTS, fn=fn, dataset=dataset, batch_size=batch_size, collate=collate_fn)
        return self._evaluator(batches.call).predict(batches)


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

    def evaluate(self, batches: Batches) -> Sums:
        """Evaluate together with the other members, as `job.evaluate` says."""
        return {name: plain(figure) for name, figure in read(self._figures(batches)).items()}

    def predict(self, batches: Batches) -> list[Any]:
        """Return the outputs of all batches, as `job.predict` says."""
        found, largest_bytes, device = list[Any](), 0, compute_device(self._prepared.model)
        while len(found) < batches.count:
            more, bytes_ = outputs_of(self._figures(batches.part(len(found), largest_bytes)), device)
            found, largest_bytes = found + more, max(largest_bytes, bytes_)
        return found

    def _figures(self, batches: Batches) -> str:
        """Compute batches together with the other members, and return what they come to as text."""
        step = self._between_steps(batches.call)
        self._is_inside = True
        try:
            is_over = step is None or step.is_overruled or self._prepared.parts.handover.has_ended
            with self._as_it_was(is_over=is_over) as begin:
                ended = self._alone(batches, begin) if is_over else self._together(batches, begin, cast(Step, step))
        finally:
            self._is_inside = False
        if ended.problem:
            raise ConfigError(ended.problem)
        return ended.figures

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

    def _together(self, batches: Batches | OneValue, begin: Callable[[int], None], step: Step) -> p.EvaluationEnded:
        number = self._counted[1] + 1 if self._counted[0] is step else 0
        self._counted = step, number
        after = step.number if step.is_committed else step.number - 1
        name = EvaluationName(after=after, step=step.number, number=number, from_rank=batches.from_rank)
        evaluate, raised = self._prepared.parts.handover.evaluate, None
        given: Evaluated = evaluate(p.EvaluationBegun(name=name, plan=batches.plan, batches=batches.count))
        while isinstance(given, BatchAssignment):
            batch = given.compute.batch
            begin(batches.first + batch)
            try:
                told = evaluate_stage(self._prepared.pipelines, given, partial(batches.figures, batch))
            except Exception as error:  # noqa: BLE001 - raised again once the other members know of it
                raised = error
                told = Told(
                    p.BatchEvaluated(figures="", problem=self._sentence(batches.call, batches.first + batch, error))
                )
            given = evaluate(*told)
        if raised is not None:
            raise raised
        return given

    def _sentence(self, call: str, batch: int, error: Exception) -> str:
        if isinstance(error, ConfigError):
            return str(error)
        words = f"{type(error).__name__}: {error}".splitlines()[0]
        return f"fn of {call} raised on {self._me} for batch {batch}: {words:.300}"

    def _alone(self, batches: Batches, begin: Callable[[int], None]) -> p.EvaluationEnded:
        """Compute all batches, in the order in which they are added."""
        shares = Shares(batches.plan, batches.count)
        for batch in range(batches.count):
            begin(batches.first + batch)
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
