"""The answer of a member to `--stages auto`: the fewest members per pipeline for which it has room."""

from __future__ import annotations

from dataclasses import replace

from elastrain import protocol as p
from elastrain.base.processes import say
from elastrain.job.values import TracedGraph
from elastrain.member.member_machine import MemberMachine
from elastrain.memory import memory_budget as budget
from elastrain.memory.member_account import MemberAccount
from elastrain.memory.pipeline_memory import ModelBytes
from elastrain.memory.plan_check import fewest_stages
from elastrain.pipeline.graph import uncut
from elastrain.pipeline.open_tasks import StepShape
from elastrain.pipeline.planner.plan_vote import ToldMemory
from elastrain.runtime.memory.planned_work import bytes_of, model_sizes
from elastrain.runtime.tensors.executor import Executor


def with_stages(event: p.Traced, core: MemberMachine, executor: Executor, memory: ToldMemory) -> p.Traced:
    """Return the result of a tracing pass with the fewest stages that have room. Unchanged if a number was wished."""
    machine, model = core.machine, event.model
    pipelining = machine.shape.pipelining
    # Every later plan comes with a record.
    if pipelining is None or pipelining.stages or not machine.commit.is_initial:
        return event
    view, roles = machine.views.view, machine.commit.roles
    if view.ids[0] == machine.me and (sentence := uncut(model.graph)):
        say(sentence)
    moments = executor.states.moments()
    account = MemberAccount(
        me=machine.me,
        shape=machine.shape,
        sizes=model_sizes(executor.model),
        view=view,
        placements=(roles.live, roles.target),
        is_fresh=moments is None,
        moments=moments or budget.ASSUMED_MOMENTS,
    )
    step = StepShape(
        number=0,
        micro_batches=pipelining.micro_batches,
        run_length=pipelining.run_length,
        blocks=len(model.graph.blocks),
    )
    fewest = fewest_stages(account, _sizes(model, event.saved_bytes, executor), step, memory)
    return replace(event, model=replace(model, fewest=fewest))


def _sizes(traced: TracedGraph, saved_bytes: tuple[int, ...], executor: Executor) -> ModelBytes:
    model, blocks = executor.model, range(len(traced.places))
    return ModelBytes(
        graph=traced.graph,
        places=traced.places,
        parameters=tuple(bytes_of(model, (block,)) for block in blocks),
        gradients=tuple(model.gradients.bytes_of(block) for block in blocks),
        saved=saved_bytes,
    )
