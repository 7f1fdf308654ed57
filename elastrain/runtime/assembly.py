"""The composition root of a worker: opens a member's connections and assembles the parts that `prepare` needs.

No other module of the runtime makes an executor, an engine or a protocol core.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from elastrain.base.checkpoint_settings import CheckpointOptions
from elastrain.base.environment import Environment
from elastrain.base.resume import Resume
from elastrain.comm.shm.device_segments import DeviceShare
from elastrain.comm.shm.heartbeat_page import Lane, Trail
from elastrain.comm.wire.mesh import Mesh
from elastrain.device.finding import device_of
from elastrain.device.port import DevicePort
from elastrain.job.layout import Layout
from elastrain.job.values import Shape
from elastrain.member.member_machine import MemberMachine
from elastrain.runtime.carrying.in_place import shared_device_memory
from elastrain.runtime.carrying.landed_results import Landing
from elastrain.runtime.carrying.tensor_memory import TensorMemory
from elastrain.runtime.durable.manifests import Described
from elastrain.runtime.durable.member_checkpoints import Bearings, Checkpoints
from elastrain.runtime.durable.node_disks import reader_of
from elastrain.runtime.durable.stored_initial import StoredInitial, initial_of
from elastrain.runtime.durable.whole_state import WholeState
from elastrain.runtime.engine.engine import Engine, EngineParts
from elastrain.runtime.faults.broken_parts import altered
from elastrain.runtime.faults.flips import MemberMemory, WrittenFiles
from elastrain.runtime.io.agent_link import AgentLink
from elastrain.runtime.io.heartbeat import LoopHeartbeat
from elastrain.runtime.io.loop_channel import LoopChannel
from elastrain.runtime.io.member_connections import Connections
from elastrain.runtime.io.member_mesh import open_mesh
from elastrain.runtime.loader.loader import DataLoader
from elastrain.runtime.loop.computed_run import StepParts
from elastrain.runtime.loop.mutation_guard import MutationGuard
from elastrain.runtime.loop.pipelined import Pipelines, PipelineWish
from elastrain.runtime.loop_state.layers import Layers
from elastrain.runtime.loop_state.randomness import BlockRandomness
from elastrain.runtime.memory.memory_keeper import MemoryKeeper
from elastrain.runtime.memory.process_memory import MemoryLimit, held_bytes
from elastrain.runtime.model.flat_model import ModelState
from elastrain.runtime.model.kernels import compute_device
from elastrain.runtime.model.optimizer import PieceOptimizer
from elastrain.runtime.model.optimizer_proxy import OptimizerProxy
from elastrain.runtime.settings import Settings
from elastrain.runtime.tensors.executor import Executor


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The values that are fixed once a script calls `init`, given by the launcher, the script, or both."""

    environment: Environment
    settings: Settings
    limit: MemoryLimit | None
    resume: Resume | None = None
    """The checkpoint that the job starts from."""
    checkpoints: CheckpointOptions | None = None
    place: tuple[int, int] = (0, 1)
    """Rank and world size that this member is expected to have in its first view."""

    def on(self, port: DevicePort) -> Chosen:
        """Return the values for a model on this device. Raises ConfigError for a memory limit that it cannot have."""
        return self if self.limit is None else replace(self, limit=self.limit.on(port))


@dataclass(frozen=True, kw_only=True)
class Request:
    """The arguments that the script passes to `prepare`."""

    model: nn.Module
    """The model without a wrapper of torch.compile around all of it."""
    optimizer: torch.optim.Optimizer
    loader: DataLoader
    max_grad_norm: float | None
    elementwise: bool


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The parts that `prepare` made. They are the same objects for the whole job."""

    engine: Engine
    parts: StepParts
    optimizer: PieceOptimizer
    facade: OptimizerProxy
    model: nn.Module
    memory: MemoryKeeper | None
    checkpoints: Checkpoints | None
    first_step: int
    """First step of the job; above 0 if the job starts from a checkpoint."""
    stored: StoredInitial | None
    """The checkpoint that the job starts from, if any."""
    describe: Callable[[], dict[str, Any]]
    """Returns the values that must be equal on all members; see `Settings.describe`."""
    whole: WholeState
    pipelines: Pipelines | None = None
    """None if every member computes whole runs."""


def seed_generators(seed: int) -> None:
    """Seed Python, NumPy and torch, so that every member builds the same model."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed)


def assemble(
    request: Request, layout: Layout, chosen: Chosen, connections: Connections, report: Callable[[Exception], None]
) -> Prepared:
    """Make all parts of a worker and connect them. Raises ConfigError if something cannot be prepared."""
    port = device_of(compute_device(request.model))
    mesh = open_mesh(chosen.environment, connections, port, are_blocks_apart=chosen.settings.is_pipelined)
    pieces = PieceOptimizer(request.optimizer, layout, elementwise=request.elementwise)
    memory = TensorMemory(mesh.memory.empty, mesh.memory.scratch, port, _share(chosen, connections, mesh, port))
    state = ModelState(request.model, layout, memory.empty, apart=chosen.settings.is_pipelined)
    shape = _shape(request, layout, chosen, state)
    handover = _handover(connections, mesh, port)
    norm = request.max_grad_norm
    executor = Executor(
        layout=layout, runs=shape.runs, model=state, optimizer=pieces, memory=memory, max_grad_norm=norm
    )
    executor.books.fetch_into(handover)
    described = Described(layout, request.model, request.optimizer)
    if (checkpoints := _checkpoints(described, chosen, connections, handover)) is not None:
        executor.write_checkpoints(checkpoints)
    parts = _engine_parts(chosen, connections, mesh, executor, report, handover)
    stored = _stored(request.model, chosen, executor, parts, connections.agent)
    executor.warm_up()
    step_parts = _step_parts(request, layout, chosen.settings, parts, connections.whereabouts)
    me = chosen.environment.member
    core = MemberMachine(me=me, shape=shape, checkpoints=None if checkpoints is None else checkpoints.plan)
    connections.faults.tools.memory = MemberMemory(me=me, executor=executor, holders=lambda: core.holders)
    return Prepared(
        engine=Engine(core, parts),
        parts=step_parts,
        pipelines=_pipelines(request, chosen.settings, step_parts, parts),
        optimizer=pieces,
        facade=OptimizerProxy(request.optimizer),
        model=request.model,
        memory=parts.memory,
        checkpoints=checkpoints,
        first_step=shape.initial.step + 1,
        stored=stored,
        whole=WholeState(layout, described, request.model, handover, chosen.environment.life),
        describe=_describing(request, layout, chosen, connections),
    )


def _share(chosen: Chosen, connections: Connections, mesh: Mesh, port: DevicePort) -> DeviceShare | None:
    """Return the device memory that peers on this host read in place, or None if everything is carried."""
    is_limited = chosen.limit is not None and chosen.limit.limit_bytes is not None
    run_dir = chosen.environment.run_dir if chosen.place[1] > 1 else None  # a job of one has nobody to read
    share = shared_device_memory(port, run_dir, connections.journal.write, is_limited=is_limited)
    if share is not None:
        mesh.share(share)
    return share


def _handover(connections: Connections, mesh: Mesh, port: DevicePort) -> LoopChannel:
    """Return the channel from the loop to the engine, whose landings the agent sees on a lane of their own."""
    whereabouts = connections.whereabouts
    whereabouts.device.watch(port, Trail(connections.beacon.page, Lane.DEVICE))
    return LoopChannel(mesh.wake, whereabouts, Landing(port, whereabouts.device))


def _shape(request: Request, layout: Layout, chosen: Chosen, state: ModelState) -> Shape:
    shape = chosen.settings.shape(layout, state.lanes(), request.loader.micro_batches)
    return replace(shape, initial=initial_of(chosen.resume))


def _pipelines(request: Request, settings: Settings, parts: StepParts, engine: EngineParts) -> Pipelines | None:
    if not settings.is_pipelined:
        return None
    memory, mesh = engine.executor.memory, engine.mesh

    def outgoing(numel: int, dtype: torch.dtype) -> torch.Tensor:
        return memory.outgoing(numel, dtype, in_place=mesh.links.all_read_device())

    wish = PipelineWish(
        model=request.model,
        stages=settings.least_stages,
        allocate=mesh.memory.scratch if memory.port.is_host else outgoing,
        traced=None if engine.memory is None else engine.memory.work.trace,
    )
    return Pipelines(wish, parts)


def _describing(
    request: Request, layout: Layout, chosen: Chosen, connections: Connections
) -> Callable[[], dict[str, Any]]:
    """Return a function that collects, when this member joins, the values that must be equal on all members."""
    device, settings = compute_device(request.model), chosen.settings
    return lambda: altered(
        settings.describe(layout, request.loader, request.optimizer, request.max_grad_norm, device),
        chosen.environment.wrong,
        connections.journal,
    )


def _stored(
    model: nn.Module, chosen: Chosen, executor: Executor, parts: EngineParts, agent: AgentLink
) -> StoredInitial | None:
    """Return the checkpoint that the job starts from, if any, and let initial states come from it.

    Raises ConfigError if it does not fit the model.
    """
    if chosen.resume is None:
        return None
    source = chosen.checkpoints.source if chosen.checkpoints is not None else None
    reader = reader_of(chosen.environment, source or "")
    stored = StoredInitial(
        chosen.resume,
        executor.model,
        executor.optimizer,
        reader,
        lambda told: parts.handover.tell_landed(lambda: told),
        agent.has_read,
    )
    stored.check(model)
    executor.start_from(stored)
    return stored


def _checkpoints(
    described: Described, chosen: Chosen, connections: Connections, handover: LoopChannel
) -> Checkpoints | None:
    """Open the writer of checkpoints, if the job writes any. Raises ConfigError if their place is another job's."""
    if chosen.checkpoints is None:
        return None
    environment, agent = chosen.environment, connections.agent
    bearings = Bearings(
        options=chosen.checkpoints,
        me=environment.member,
        job=environment.job,
        life=environment.life + (chosen.resume.lives_before if chosen.resume is not None else 0),
        resume=chosen.resume,
        tell=handover.tell,
        wake=handover.wake,
        say=agent.say,
        has_agent=agent.is_there,
        log=connections.journal.write,
    )
    made = Checkpoints(bearings, described)
    made.open()
    connections.faults.tools.files = WrittenFiles(me=environment.member, place=chosen.checkpoints.place)
    return made


def _engine_parts(
    chosen: Chosen,
    connections: Connections,
    mesh: Mesh,
    executor: Executor,
    report: Callable[[Exception], None],
    handover: LoopChannel,
) -> EngineParts:
    environment, journal = chosen.environment, connections.journal
    memory, limit = None, chosen.limit
    if limit is not None:
        memory = MemoryKeeper(
            replace(limit, calls=connections.faults.tools.drives.take_over()) if environment.armed else limit,
            me=environment.member,
            run_dir=environment.run_dir,
            executor=executor,
            mesh=mesh,
            journal=journal,
        )
    keeper = memory
    connections.agent.measure_memory(
        lambda: held_bytes(mesh.memory.resident_bytes()) if keeper is None else keeper.held.peak_bytes,
        None if limit is None else limit.limit_bytes,
    )
    return EngineParts(
        mesh=mesh,
        beacon=connections.beacon,
        agent=connections.agent,
        executor=executor,
        handover=handover,
        faults=connections.faults,
        journal=journal,
        memory=memory,
        report=report,
        trail=Trail(connections.beacon.page, Lane.ENGINE),
    )


def _step_parts(
    request: Request, layout: Layout, settings: Settings, engine: EngineParts, whereabouts: LoopHeartbeat
) -> StepParts:
    model, memory, tools = request.model, engine.memory, engine.faults.tools
    state = engine.executor.model
    frozen = [spec.name for spec in layout.parameters if not spec.trained]
    return StepParts(
        handover=engine.handover,
        model=state,
        loader=request.loader,
        randomness=BlockRandomness(model, layout.blocks, settings.seed, compute_device(model)),
        layers=Layers(model),
        untouched=MutationGuard(model, lambda: state.memory, frozen),
        run_length=settings.run_length,
        reach=engine.faults.reach,
        log=engine.journal.write,
        whereabouts=whereabouts,
        computing=tools.slowness.around(nullcontext if memory is None else memory.computing),
        backward=tools.device.around(nullcontext if memory is None else memory.named_errors),
    )
