"""The forward of an evaluation's batch through the blocks of one member, with stubs in place of all others.

`fn` runs on each member of the chain. The last one has the figures. What `fn` does on the others behind their blocks
works on tensors without values, and counts for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from elastrain import protocol as p
from elastrain.device.landing import DeviceEvent
from elastrain.errors import ConfigError
from elastrain.pipeline.pipeline_plan import Task
from elastrain.protocol.evaluation_messages import boundary_name
from elastrain.protocol.messages import Boundary
from elastrain.runtime.io.loop_channel import BatchAssignment, BoundaryMade
from elastrain.runtime.loop.pipelined import Pipelines


class Told(NamedTuple):
    """Result of a batch or a stage of it, and the events to be reached before the engine gets it."""

    result: p.BatchEvaluated | BoundaryMade
    after: Sequence[DeviceEvent] = ()


def evaluate_stage(pipelines: Pipelines | None, given: BatchAssignment, figures: Callable[[], str]) -> Told:
    """Compute a batch, or a stage of it.

    Raises what `figures` raises, unless the stage has made all that the next one takes by then.
    """
    command, received = given.compute, given.received
    if command.stage is None or pipelines is None:
        return Told(p.BatchEvaluated(figures=figures(), problem=""))
    member, begin, end = command.stage
    # Blocks that came since the last step have running statistics, too.
    pipelines.parts.model.statistics.refresh()
    stubs = pipelines.stubs_for(Task(0, begin, end, member))
    passed = stubs.begin(() if received is None else pipelines.received(received, begin))
    is_last, found = end == pipelines.graph_blocks, ""
    try:
        found = figures()
    except Exception:
        if is_last or not passed.is_complete:
            raise
    finally:
        stubs.finish()
    if is_last:
        return Told(p.BatchEvaluated(figures=found, problem=""))
    if not passed.entries:
        raise ConfigError("fn of job.evaluate(…) has to call the model in each batch, as with --stages all members do")
    made = pipelines.packed(passed.going)
    name = boundary_name(command.name, command.batch, end)
    boundary = Boundary(name=name, tensors=made.shapes, contribution=None)
    event = p.BatchEvaluated(figures="", problem="", made=boundary)
    return Told(BoundaryMade(event=event, tensors=made.tensors), made.copied)
