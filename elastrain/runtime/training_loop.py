"""The loop over a job's steps: joins the job, yields the steps one by one, and ends together with the other members."""

from __future__ import annotations

import dis
import gc
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict
from functools import partial
from types import FrameType, TracebackType
from typing import Any

import torch

from elastrain import protocol as p
from elastrain.base.processes import say
from elastrain.base.resume import LAYERS
from elastrain.base.thread_status import Station
from elastrain.decisions.agreed_speeds import speeds_of
from elastrain.device import device_of
from elastrain.errors import ConfigError, ElastrainError, StoppedError
from elastrain.integrity.audits import duties
from elastrain.integrity.checks import Due, neighbour, probes
from elastrain.job.run_plan import plan
from elastrain.job.values import Record
from elastrain.offload.activations.hooks import tell_moved
from elastrain.protocol import agent_messages as am
from elastrain.runtime.assembly import Prepared
from elastrain.runtime.broadcast import BROADCASTS
from elastrain.runtime.evaluation import Evaluator
from elastrain.runtime.io.agent_link import ChannelClosedError
from elastrain.runtime.io.loop_channel import LoopOver, StepBegun
from elastrain.runtime.io.member_connections import Connections
from elastrain.runtime.loggers.job_lines import JobLines
from elastrain.runtime.loop.exit_report import NOT_THE_SCRIPTS_FAULT, ExitReport
from elastrain.runtime.loop.step import Step
from elastrain.runtime.loop_state.device_reads import DeviceReads
from elastrain.runtime.loop_state.loaded_state import LoadedState
from elastrain.runtime.loop_state.loop_numbers import LoopNumbers
from elastrain.runtime.loop_state.loop_state import LoopSnapshot, LoopState
from elastrain.runtime.loop_state.randomness import BEFORE
from elastrain.runtime.model.kernels import compute_device, warm_up
from elastrain.runtime.settings import Settings


class TrainingLoop:
    """The one loop of a script over the job's steps. Only the main thread uses it."""

    def __init__(
        self,
        prepared: Prepared,
        settings: Settings,
        connections: Connections,
        last_words: ExitReport,
        registered: Mapping[str, Any],
        lines: JobLines,
    ) -> None:
        self._prepared = prepared
        self._parts = prepared.parts
        self._settings = settings
        self._connections = connections
        # That of the memory, which stays where it is when the script moves its parameters.
        self._device = max(prepared.parts.model.memory.values(), key=lambda whole: whole.nbytes).device
        self._last_words = last_words
        prepared.parts.layers.begin()
        self._lines = lines
        self.evaluator = Evaluator(connections.agent.me, prepared, registered, lambda: last_words.step)
        layers, things = prepared.parts.layers, {**registered, **prepared.parts.loader.carried()}
        things[BROADCASTS] = self.evaluator.sent
        self._carried = LoopState(prepared.facade.optimizer, things, prepared.model, layers, lines.book)
        self._carried.counted = prepared.optimizer.counted
        self._loaded = LoadedState(prepared, registered.values())
        self._reads = DeviceReads()
        self._numbers = LoopNumbers(registered.values())

    def steps(self, until: int) -> Iterator[Step]:
        """Join the job, and yield the steps up to `until` (exclusive) from the one that the other members are in."""
        number, threads = self._join(), torch.get_num_threads()
        self._connections.agent.begin_work(until)
        self._lines.join(until, self._is_first, self._connections.whereabouts.known_stretch)
        self._connections.whereabouts.enter(Station.BETWEEN, number)
        while True:
            taken = self._begin(number)
            if number >= until:
                self._enter(number, taken)
                break
            self._settings.check_threads(threads, self._device)
            step = Step(number, self._parts, taken, partial(self._enter, number, taken), self._prepared.pipelines)
            step.committed = self._committed
            self._last_words.step = self._lines.step = step
            try:
                yield step
            except GeneratorExit:
                self._left_early(step, taken, raised=_is_raising(sys._getframe(1)))
                raise
            if step.is_overruled:
                self._end_before(step, taken)
                return
            if not step.is_committed:
                raise ConfigError(
                    f"step {number} was left before it was committed: iterate over it to its end, `for batch in step`"
                )
            number += 1
        tell_moved(self._parts.log)
        self._wait_for_all(number)
        self._end(number)

    def _is_first(self) -> bool:
        """Return True if this member has rank 0 in the current view."""
        view = self._prepared.engine.view
        return view is not None and view.ids[:1] == (self._connections.agent.me,)

    def _committed(self, record: Record) -> None:
        self._prepared.optimizer.committed(record)
        self._loaded.forget()
        self._lines.committed(record)
        self._numbers.look(within=True)

    def give_back_model(self) -> None:
        """Remove all hooks and stubs from the model, unless blocks are absent: then uses of these are still refused."""
        self._parts.layers.close()
        if self._parts.model.blocks.missing() is None:
            if self._prepared.pipelines is not None:
                self._prepared.pipelines.close()
            self._parts.model.close()
            self._parts.randomness.close()

    def _check_device(self) -> None:
        """Raise ConfigError if the script has moved the model to another device since `prepare`."""
        now = compute_device(self._prepared.model)
        if now != self._device:
            raise ConfigError(
                f"the model was on {self._device} in job.prepare and is on {now} now: call model.to({str(now)!r}) "
                "before the optimizer is made and before prepare"
            )

    def _serve_state(self) -> None:
        """Let the optimizer and the model return the whole state from now on."""
        prepared = self._prepared
        prepared.whole.step = lambda: self._last_words.step
        prepared.facade.enter_loop(prepared.whole.of_optimizer)
        if prepared.pipelines is not None:
            self._parts.model.blocks.fetch = prepared.whole.of_model

    def _join(self) -> int:
        """Announce that this member is ready, wait until it is admitted, and return the step to begin with."""
        parts = self._parts
        self._check_device()
        # All slow work is done before the announcement, because other members wait for this one from then on.
        self._loaded.take()
        self._serve_state()
        parts.loader.start(self._prepared.first_step, self._expected_micro_batches, self._loader_died, self._device)
        warm_up(self._prepared.model)
        spec = {
            **self._prepared.describe(),
            LAYERS: parts.layers.digest(),
            **self._carried.describe(self._prepared.optimizer.hyperparameters()),
        }
        spec |= self._loaded.settings(has_moved=self._carried.has_moved)
        if (checkpoints := self._prepared.checkpoints) is not None:
            checkpoints.spec = spec
        if not (port := device_of(self._device)).is_host:
            self._connections.journal.write("device", **asdict(port.describe()))
        self._prepared.engine.start({**spec, **self._loaded.told})  # not in checkpoints, which have the state itself
        entered = parts.handover.wait()
        if isinstance(entered, LoopOver):
            raise StoppedError("the job ended before this worker had joined: there is nothing left to do")
        assert isinstance(entered, p.Enter)
        self._loaded.entered(entered.step, self._is_first)
        if entered.state is not None:
            self._carried.load(entered.state, entered.payload or ())
            self._say_numbers(entered.step)
        elif (stored := self._prepared.stored) is not None and not self._loaded.told:
            parts.layers.load_state_dict(stored.buffers(parts.layers.state_dict()))
            if (loop := stored.loop()) is not None:
                self._carried.load(*loop, stored.changed(spec))
                if (view := self._prepared.engine.view) is not None and view.ids[0] == self._connections.agent.me:
                    self._say_numbers(entered.step)
                if not stored.accepts_changes:
                    self._carried.course.resume(loop[0])
        parts.model.statistics.refresh()
        parts.untouched.begin()
        return entered.step

    def _say_numbers(self, step: int) -> None:
        """Say which numbers of the script's loop differ from the job's; in a resumed job, rank 0 says it for all."""
        if sentence := self._numbers.difference(self._carried.numbers):
            say(f"{self._connections.agent.me} begins with step {step}: {sentence}")
            self._connections.journal.write("numbers_differ", step=step, reason=sentence)

    def _begin(self, number: int) -> LoopSnapshot:
        """Return the loop state for newcomers, taken at the start of the step before the loop's body changes it."""
        self._check_device()
        self._parts.untouched.check_settled(self._reads)
        self._parts.model.statistics.check_settled(self._reads.ask)
        self._connections.whereabouts.hear_compiler()
        self._prepared.facade.check()
        self._connections.turns.begin(number)
        self._numbers.look()
        taken = self._take()
        self._parts.randomness.begin(number, BEFORE)
        return taken

    def _take(self) -> LoopSnapshot:
        self._parts.layers.note()
        self._carried.numbers = self._numbers.told()
        if self._prepared.checkpoints is not None:
            self._prepared.checkpoints.at_step.use_buffers(self._parts.layers.state_dict())
        return self._carried.take(self._prepared.optimizer.hyperparameters())

    def _enter(self, number: int, taken: LoopSnapshot) -> None:
        """Tell the engine that the loop's body has reached its micro-batches. Settings made before that count."""
        self._check_device()
        self._lines.write()  # before this step can be committed, which says that the lines of the last one are written
        self._parts.untouched.check_settled(self._reads)
        self._parts.model.statistics.check_settled(self._reads.ask)
        self._parts.layers.enter()
        self._numbers.look()
        hyper = self._prepared.optimizer.hyperparameters()
        self._carried.course.enter(hyper, self._carried.counted)
        settings = taken.settings(number, hyper, self._parts.layers, self._reads, self._loaded.told)
        began = p.Began(step=number, settings=settings, state=taken.text)
        begun = StepBegun(event=began, hyper=hyper, payload=taken.payload)
        # Behind what the checks have read on a device: the engine may write there without any run of this member.
        self._parts.handover.tell_landed(lambda: begun)

    def _end_before(self, step: Step, taken: LoopSnapshot) -> None:
        """End the loop before an overruled step: restore schedulers and registered objects as they were before it."""
        self._carried.load(taken.text, step.undo)
        self._end(step.number)

    def _left_early(self, step: Step, taken: LoopSnapshot, *, raised: bool) -> None:
        """End the loop after `break` or an exception. The job ends well if most members leave after the same step."""
        if step.is_overruled:
            self._end_before(step, taken)
            return
        if self._last_words.has_left or not step.is_committed:
            return
        try:
            self._enter(step.number + 1, self._take())  # a newcomer may need this state before the others can go on
            self._wait_for_all(step.number + 1)
        except ElastrainError as error:  # not raised: an exception of the script may be leaving the loop
            if not self._connections.agent.is_there and not isinstance(error, NOT_THE_SCRIPTS_FAULT):
                say(str(error))
            self._last_words.report(error)
            self._last_words.go()
        else:
            self._end(step.number + 1, raised=raised)

    def _wait_for_all(self, number: int) -> None:
        """Wait until every member has reached the end of its loop. Raises StoppedError if most members go on."""
        self._connections.faults.reach(number, "shutdown")
        checkpoints = self._prepared.checkpoints
        with nullcontext() if checkpoints is None else checkpoints.hurried():
            self._parts.handover.tell_landed(lambda: p.LoopEnded(step=number))
            self._parts.handover.wait()
        self._lines.end()

    def _end(self, step: int, *, raised: bool = False) -> None:
        """Report the end of the loop, and close the engine and all other parts. The model stays for the script."""
        self._last_words.step = None
        if self._prepared.pipelines is not None:  # blocks came back after the last step
            self._parts.model.statistics.refresh()
        model, memory = self._parts.model, self._prepared.memory
        model.blocks.fetch = None
        is_left_partial = memory is not None and not memory.work.has_room_for_all and model.blocks.leave()
        digest = "" if is_left_partial else model.parameters_digest()
        self._connections.journal.write("finished", step=step, digest=digest)
        with suppress(ChannelClosedError):  # the launcher may have ended first, which does no harm here
            self._connections.agent.say(am.Finished(step=step, digest=digest, raised=raised))
        self._prepared.engine.close()
        if self._prepared.checkpoints is not None:
            self._prepared.checkpoints.close()
        if self._prepared.memory is not None:
            self._prepared.memory.close()
        if self._prepared.pipelines is not None:
            self._prepared.pipelines.close()
        self._parts.loader.close()
        self._last_words.give_hook_back(raised=raised)

    def _expected_micro_batches(self, step: int) -> Sequence[int]:
        """Return the micro-batches that this member computes in an undisturbed step, for the loader to prefetch."""
        pipelines, me = self._prepared.pipelines, self._connections.agent.me
        if pipelines is not None and pipelines.has_plan:
            return pipelines.expected(me)
        view = self._prepared.engine.view
        if view is None or me not in view:
            return ()
        length, total = self._settings.run_length, self._parts.loader.micro_batches
        runs = plan(view.ids, -(-total // length), speeds_of(self._prepared.engine.record))
        mine = [m for run in runs[me] for m in range(run * length, min(total, (run + 1) * length))]
        if Due(self._prepared.first_step, self._settings.cross_check_every).is_in(step):
            firsts = probes(runs)
            owner = neighbour(me, view.ids, firsts)
            mine += [] if owner is None else [firsts[owner] * length]
        audited = duties(self._settings.audit_plan, step, runs, me)
        return [*mine, *(m for run in audited for m in range(run * length, min(total, (run + 1) * length)))]

    def _loader_died(self, sentence: str) -> None:
        self._connections.journal.write("loader_died", reason=sentence)
        say(f"{self._connections.agent.me}: {sentence}")


_RAISE_AGAIN = {dis.opmap["RAISE_VARARGS"], dis.opmap["RERAISE"]}
"""Bytecode instructions that always raise. No traceback need begin at them, because a re-raised exception brings its
own older traceback."""


def _is_raising(frame: FrameType | None) -> bool:
    """Return True if an exception is what made the calling code close a generator.

    The frame's last instruction is then the one that raised. A frame that caught the exception has gone on since.

    Args:
        frame: Caller of the generator; other generators may lie between.
    """
    while frame is not None and frame.f_code.co_flags & inspect.CO_GENERATOR:
        frame = frame.f_back
    if frame is None:
        return False
    at = frame.f_lasti
    begun = (each for each in gc.get_referrers(frame) if isinstance(each, TracebackType))
    return frame.f_code.co_code[at] in _RAISE_AGAIN or any(each.tb_lasti == at for each in begun)
