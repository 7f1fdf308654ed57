"""The steps of a job as the script's `for` sees them: entered, yielded one by one, left together with the others."""

from __future__ import annotations

import dis
import gc
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from types import FrameType, TracebackType
from typing import Any

import torch

from elastrain import protocol as p
from elastrain.base.processes import say
from elastrain.base.thread_status import Station
from elastrain.errors import ConfigError, ElastrainError, StoppedError
from elastrain.integrity.audits import duties
from elastrain.integrity.checks import Due, neighbour, probes
from elastrain.job.run_plan import plan
from elastrain.protocol import agent_messages as am
from elastrain.runtime.assembly import Connections, Prepared
from elastrain.runtime.io.agent_link import ChannelClosedError
from elastrain.runtime.io.loop_channel import LoopOver, StepBegun
from elastrain.runtime.loop.exit_report import NOT_THE_SCRIPTS_FAULT, ExitReport
from elastrain.runtime.loop.step import Step
from elastrain.runtime.loop_state.loop_state import LoopSnapshot, LoopState
from elastrain.runtime.loop_state.randomness import BEFORE
from elastrain.runtime.model.kernels import warm_up
from elastrain.runtime.settings import Settings


class TrainingLoop:
    """One pass of a script over the job's steps; for the main thread."""

    def __init__(
        self,
        prepared: Prepared,
        settings: Settings,
        connections: Connections,
        last_words: ExitReport,
        registered: Mapping[str, Any],
    ) -> None:
        self._prepared = prepared
        self._parts = prepared.parts
        self._settings = settings
        self._connections = connections
        self._me = connections.agent.me
        self._last_words = last_words
        prepared.parts.layers.begin()
        self._carried = LoopState(prepared.facade.optimizer, dict(registered), prepared.model, prepared.parts.layers)
        self._carried.counted = prepared.optimizer.counted

    def steps(self, until: int) -> Iterator[Step]:
        """The steps up to `until` (exclusive), from the one that the others are in."""
        number, threads = self._join(), torch.get_num_threads()
        self._connections.whereabouts.enter(Station.BETWEEN, number)
        while True:
            taken = self._begin(number)
            if number >= until:
                self._enter(number, taken)
                break
            self._settings.check_threads(threads)
            step = Step(number, self._parts, taken, partial(self._enter, number, taken), self._prepared.pipelines)
            step.committed = self._prepared.optimizer.committed
            self._last_words.step = step
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
        self._wait_for_all(number)
        self._end(number)

    def give_back_model(self) -> None:
        """Take everything off the model, which is an ordinary one from here on. It keeps what refuses absent blocks."""
        self._parts.layers.close()
        if self._parts.model.blocks.missing() is None:
            if self._prepared.pipelines is not None:
                self._prepared.pipelines.close()
            self._parts.model.close()
            self._parts.randomness.close()

    def _join(self) -> int:
        """Say that this member is ready, and wait to be let in; the step that the others are in."""
        parts = self._parts
        # Whatever takes time comes before this member says that it is ready: others wait for it from then on.
        parts.loader.start(self._prepared.first_step, self._expected_micro_batches, self._loader_died)
        warm_up(self._prepared.model)
        spec = {
            **self._prepared.describe(),
            "layers' switches and numbers": parts.layers.digest(),
            **self._carried.describe(self._prepared.optimizer.hyperparameters()),
        }
        if (checkpoints := self._prepared.checkpoints) is not None:
            checkpoints.spec = spec
        self._prepared.engine.start(spec)
        entered = parts.handover.wait()
        if isinstance(entered, LoopOver):
            raise StoppedError("the job ended before this worker had joined: there is nothing left to do")
        assert isinstance(entered, p.Enter)
        if entered.state is not None:
            self._carried.load(entered.state, entered.payload or ())
        elif (stored := self._prepared.stored) is not None:
            parts.layers.load_state_dict(stored.buffers(parts.layers.state_dict()))
            if (loop := stored.loop()) is not None:
                self._carried.load(*loop, stored.changed(spec))
                if not stored.accepts_changes:
                    self._carried.course.resume(loop[0])
        parts.model.statistics.refresh()
        parts.untouched.begin()
        return entered.step

    def _begin(self, number: int) -> LoopSnapshot:
        """What a newcomer needs to know that begins with this step; before the body of the loop changes it."""
        self._parts.untouched.check_settled()
        self._parts.model.statistics.check_settled()
        self._connections.whereabouts.hear_compiler()
        self._prepared.facade.check()
        taken = self._take()
        self._parts.randomness.begin(number, BEFORE)
        return taken

    def _take(self) -> LoopSnapshot:
        self._parts.layers.note()
        if self._prepared.checkpoints is not None:
            self._prepared.checkpoints.at_step.buffers = self._parts.layers.state_dict()
        return self._carried.take(self._prepared.optimizer.hyperparameters())

    def _enter(self, number: int, taken: LoopSnapshot) -> None:
        """The body of the loop comes to its micro-batches: what it has set before counts in this step."""
        self._parts.untouched.check_settled()
        self._parts.model.statistics.check_settled()
        self._parts.layers.enter()
        hyper = self._prepared.optimizer.hyperparameters()
        self._carried.course.enter(hyper, self._carried.counted)
        settings = taken.settings(number, hyper, self._parts.layers)
        began = p.Began(step=number, settings=settings, state=taken.text)
        self._parts.handover.tell(StepBegun(event=began, hyper=hyper, payload=taken.payload))

    def _end_before(self, step: Step, taken: LoopSnapshot) -> None:
        """Nothing of this step counts: schedulers and what is registered go back to where they are on other members."""
        self._carried.load(taken.text, step.undo)
        self._end(step.number)

    def _left_early(self, step: Step, taken: LoopSnapshot, *, raised: bool) -> None:
        """The loop was left, by `break` or an exception: fine when most members do so after the same step."""
        if step.is_overruled:
            self._end_before(step, taken)
            return
        if self._last_words.has_left or not step.is_committed:
            return
        try:
            self._enter(step.number + 1, self._take())  # else a newcomer that others wait for could never begin
            self._wait_for_all(step.number + 1)
        except ElastrainError as error:  # not raised: the script's own exception may be on its way out of the loop
            if not self._connections.agent.is_there and not isinstance(error, NOT_THE_SCRIPTS_FAULT):
                say(str(error))
            self._last_words.report(error)
            self._last_words.go()
        else:
            self._end(step.number + 1, raised=raised)

    def _wait_for_all(self, number: int) -> None:
        """Until every member is at the end. Raises StoppedError if most members go on."""
        self._connections.faults.reach(number, "shutdown")
        checkpoints = self._prepared.checkpoints
        with nullcontext() if checkpoints is None else checkpoints.hurried():
            self._parts.handover.tell(p.LoopEnded(step=number))
            self._parts.handover.wait()

    def _end(self, step: int, *, raised: bool = False) -> None:
        """The loop is over: say so, let the engine go; the rest of the script is the user's."""
        self._last_words.step = None
        if self._prepared.pipelines is not None:  # blocks have come back since the last step
            self._parts.model.statistics.refresh()
        model, memory = self._parts.model, self._prepared.memory
        is_left_partial = memory is not None and not memory.work.has_room_for_all and model.blocks.leave()
        digest = "" if is_left_partial else model.parameters_digest()
        self._connections.journal.write("finished", step=step, digest=digest)
        with suppress(ChannelClosedError):  # the launcher has gone before us: nothing depends on it any more
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
        """What this member would compute in a step that nothing disturbs: what is worth loading ahead."""
        pipelines = self._prepared.pipelines
        if pipelines is not None and pipelines.has_plan:
            return pipelines.expected(self._me)
        view = self._prepared.engine.view
        if view is None or self._me not in view:
            return ()
        length, total = self._settings.run_length, self._parts.loader.micro_batches
        runs = plan(view.ids, -(-total // length), view.quotas)
        mine = [m for run in runs[self._me] for m in range(run * length, min(total, (run + 1) * length))]
        if Due(self._prepared.first_step, self._settings.cross_check_every).is_in(step):
            firsts = probes(runs)
            owner = neighbour(self._me, view.ids, firsts)
            mine += [] if owner is None else [firsts[owner] * length]
        audited = duties(self._settings.audit_plan, step, runs, self._me)
        return [*mine, *(m for run in audited for m in range(run * length, min(total, (run + 1) * length)))]

    def _loader_died(self, sentence: str) -> None:
        self._connections.journal.write("loader_died", reason=sentence)
        say(f"{self._me}: {sentence}")


_RAISE_AGAIN = {dis.opmap["RAISE_VARARGS"], dis.opmap["RERAISE"]}
"""Instructions that only ever raise, and need not begin a traceback: that of an exception that goes on is older."""


def _is_raising(frame: FrameType | None) -> bool:
    """Whether the code that closes a generator does so because of an exception.

    It then stands at the instruction that has raised. Where it has caught and kept one, it has gone on since.
    frame: what the generator goes back to; other generators may lie between.
    """
    while frame is not None and frame.f_code.co_flags & inspect.CO_GENERATOR:
        frame = frame.f_back
    if frame is None:
        return False
    at = frame.f_lasti
    begun = (each for each in gc.get_referrers(frame) if isinstance(each, TracebackType))
    return frame.f_code.co_code[at] in _RAISE_AGAIN or any(each.tb_lasti == at for each in begun)
