"""The recording of single micro-batches, which a loop makes instead of training under `elastrain doctor --bits`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from elastrain.base.doctor_wishes import BitsWish, EstimateWish
from elastrain.errors import ConfigError
from elastrain.integrity.bit_traces import DATA, LOOP, OperatorCall, Recorded, Trace
from elastrain.job.layout import Layout
from elastrain.runtime.assembly import Chosen, Request
from elastrain.runtime.bits.operator_recorder import OperatorRecorder
from elastrain.runtime.bits.value_sources import ValueSources
from elastrain.runtime.loop.computed_run import StepParts, load, scaled, went_by
from elastrain.runtime.loop.told_numbers import check_loss, check_name, figure_of, weight_of
from elastrain.runtime.memory_answer import MemoryEstimate, parts_without_job
from elastrain.runtime.model.flat_model import ModelState
from elastrain.runtime.model.flats import in_private_memory
from elastrain.runtime.model.watched import PlainAttributes

_MOST = 3
"""Number of micro-batches that are recorded. The first of them is recorded twice."""


class BitsRecording:
    """The recording of one script's first micro-batches. It takes over the model as a job does."""

    def __init__(self, wish: BitsWish, request: Request, layout: Layout, chosen: Chosen) -> None:
        self._wish, self._request, self._settings = wish, request, chosen.settings
        self._model = ModelState(request.model, layout, in_private_memory)

    def steps(self, until: int) -> Iterator[Any]:
        """Yield one step to the script's loop. Its end writes the trace and ends the process. Raises ConfigError."""
        if until < 1:
            return
        self._begin_alike()
        self._request.loader.start(0, lambda step: ())
        try:
            yield RecordedStep(self._wish, self._request, parts_without_job(self._request, self._model, self._settings))
        finally:
            self._request.loader.close()
        raise ConfigError("step 0 was left without a micro-batch: iterate over it, `for batch in step`")

    def _begin_alike(self) -> None:
        """Begin with the first process's parameters, as all members of a job do."""
        memory, place = self._model.memory, Path(self._wish.initial)
        if place.is_file():
            for name, value in load_file(place).items():
                memory[name].copy_(value)
        else:
            save_file(memory, place)


Answer = MemoryEstimate | BitsRecording
"""The kinds of answers that a script gives instead of joining a job."""


def answer_of(wish: EstimateWish | BitsWish, request: Request, layout: Layout, chosen: Chosen) -> Answer:
    """Return what `elastrain doctor` has asked for. A memory estimate without stages ends the process at once."""
    if isinstance(wish, BitsWish):
        return BitsRecording(wish, request, layout, chosen)
    estimate = MemoryEstimate(wish, request, layout, chosen)
    estimate.answer_at_once()
    return estimate


class RecordedStep:
    """The first step, as a loop sees it. It records some micro-batches in a chosen order, and applies nothing."""

    def __init__(self, wish: BitsWish, request: Request, parts: StepParts) -> None:
        self.number = self.epoch = 0
        self._wish, self._of, self._parts = wish, request.model, parts
        self._recorder = OperatorRecorder(request.model, wish.fill)
        self._attributes = PlainAttributes(request.model)
        self._is_due = False
        self._results: dict[str, int] = {}
        self._done: list[Recorded] = []

    def __iter__(self) -> Iterator[Any]:
        parts = self._parts
        numbers = list(range(min(_MOST, parts.loader.micro_batches)))
        order = numbers[::-1] if self._wish.is_reversed else numbers
        for at in (*order, order[0]):
            data = load(parts, self.number, at)
            parts.randomness.begin(self.number, at)
            torch.clear_autocast_cache()
            parts.model.statistics.begin()
            self._results, self._is_due = {}, True
            self._recorder = OperatorRecorder(self._of, self._wish.fill)
            self._recorder.note(DATA, "batch", data)
            with self._recorder, ValueSources(self._recorder.place) as sources:
                yield data
            if self._is_due:
                raise went_by(f"micro-batch {at} of step {self.number}")
            self._end(at, sources)
        trace = Trace(threads=torch.get_num_threads(), micro_batches=tuple(self._done))
        Path(self._wish.file).write_text(trace.to_json())
        raise SystemExit(0)  # the script is not to go on, because it has trained nothing

    def backward(self, loss: Tensor, *, weight: Any = 1.0) -> None:
        """Compute the backward of one micro-batch, and note what a job would use of it."""
        if not self._is_due:
            raise ConfigError("call step.backward(loss) exactly once per micro-batch, inside `for batch in step`")
        check_loss(loss)
        self._is_due = False
        factor = weight_of(weight)
        self._result(LOOP, "loss", loss)
        self._result(LOOP, "weight", factor)
        for each in self._parts.model.statistics.take():
            for name, value in each.values.items():
                self._result(self._recorder.name_of(each.layer.module), f"{name} {len(self._results)}", value)
        scaled(loss, factor).backward()  # type: ignore[no-untyped-call]
        self._parts.model.statistics.end()
        for name, parameter in self._of.named_parameters():
            gradient, parameter.grad = parameter.grad, None
            self._result(name.rpartition(".")[0] or self._recorder.root, f"gradient of {name}", gradient)

    def add(self, name: str, value: Any) -> None:
        """Note a figure of the step."""
        check_name(name)
        self._result(LOOP, f"step.add({name!r}, …) {len(self._results)}", figure_of(name, value))

    def _result(self, module: str, what: str, value: Any) -> None:
        self._results[what] = self._recorder.note(module, what, value)

    def _end(self, at: int, sources: ValueSources) -> None:
        changed = {name: _kind(value) for name, value, _ in self._attributes.changed(is_thorough=True, has_hooks=False)}
        events: tuple[OperatorCall, ...] = tuple(self._recorder.events)
        self._done.append(
            Recorded(number=at, events=events, results=self._results, changed=changed, sources=sources.by_module())
        )


def _kind(token: object) -> str:
    if isinstance(token, bool | int | float):
        return "number"
    return "tensor" if isinstance(token, tuple) and token[0] == "tensor" else "thing"
