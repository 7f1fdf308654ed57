"""The estimate of a job's memory, which `prepare` makes instead of joining a job under `elastrain doctor`.

Without stages it answers at once. With stages the loop runs up to its tracing pass, which shows what tasks need.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any, NoReturn

import torch

from elastrain.base.doctor_wishes import EstimateWish
from elastrain.device import DevicePort, device_of
from elastrain.errors import ConfigError
from elastrain.job.layout import Layout
from elastrain.memory.held_shards import MemoryKind
from elastrain.memory.member_account import Limit
from elastrain.memory.memory_estimate import ScriptNeeds, state_memory, with_stages_found
from elastrain.memory.pipeline_memory import ModelBytes
from elastrain.runtime.assembly import Chosen, Request
from elastrain.runtime.carrying.tensor_memory import TensorMemory
from elastrain.runtime.io.loop_channel import LoopChannel
from elastrain.runtime.loop.computed_run import StepParts
from elastrain.runtime.loop.mutation_guard import MutationGuard
from elastrain.runtime.loop.pipelined import Pipelines, PipelineWish
from elastrain.runtime.loop.step import Step
from elastrain.runtime.loop_state.layers import Layers
from elastrain.runtime.loop_state.loop_state import LoopSnapshot
from elastrain.runtime.loop_state.randomness import BlockRandomness
from elastrain.runtime.memory.planned_work import model_bytes, model_sizes
from elastrain.runtime.memory.process_memory import PeakMeter
from elastrain.runtime.memory.spill_places import outside_of
from elastrain.runtime.model.flat_model import ModelState
from elastrain.runtime.model.flats import in_private_memory
from elastrain.runtime.model.kernels import compute_device
from elastrain.runtime.model.optimizer import PieceOptimizer
from elastrain.runtime.settings import Settings


class MemoryEstimate:
    """The memory estimate of one script. It takes over the model and the optimizer as a job does."""

    def __init__(self, wish: EstimateWish, request: Request, layout: Layout, chosen: Chosen) -> None:
        """Measure the model and optimizer of the script. Raises ConfigError as `prepare` does."""
        self._wish, self._request, self._chosen = wish, request, chosen
        self._port = port = device_of(compute_device(request.model))
        pieces = PieceOptimizer(request.optimizer, layout, elementwise=request.elementwise)
        self._model = model = ModelState(request.model, layout, TensorMemory(in_private_memory, port=port).private)
        # Measured after the script's own parameters were freed; the allocator may still keep their memory.
        self._host_bytes = PeakMeter(lambda: 0).now_bytes
        held_bytes = self._host_bytes if port.is_host else port.memory_allocated()[0]
        shape = chosen.settings.shape(layout, model.lanes(), request.loader.micro_batches)
        if wish.backups is not None:
            shape = replace(shape, backups=wish.backups)
        limit = chosen.limit
        self._needs = ScriptNeeds(
            shape=shape,
            sizes=replace(model_sizes(model), memory=MemoryKind.ONE if port.is_host else MemoryKind.DEVICE),
            moments=_moments(pieces, layout, port),
            base_bytes=max(0, held_bytes - model.nbytes),
            landing_bytes=max((p.nbytes for p in request.model.parameters() if p.requires_grad), default=0),
            all_write=None if chosen.checkpoints is None else chosen.checkpoints.is_local,
            limit=None
            if limit is None or limit.limit_bytes is None
            else Limit(
                limit_bytes=limit.limit_bytes,
                has_disk=bool(limit.directories or limit.host_tier_bytes),
                outside=outside_of(limit),
            ),
        )

    def answer_at_once(self) -> None:
        """Answer, unless the estimate needs a tracing pass of the training loop, as with stages."""
        if self._needs.shape.pipelining is None:
            self.answer()

    def answer(self, traced: ModelBytes | None = None) -> NoReturn:
        """Write the bytes that each member will hold, and end the process. Raises SystemExit."""
        needs = self._needs if traced is None else with_stages_found(self._needs, self._wish.members, traced)
        told = {
            "backups": needs.shape.backups,
            "stages": needs.fewest or self._chosen.settings.stages,
            **self._stated(needs, traced),
        }
        if not self._port.is_host:
            told["host"] = self._stated(self._host_needs(needs), traced)
        self._wish.answer(json.dumps(told))
        raise SystemExit(0)

    def _stated(self, needs: ScriptNeeds, traced: ModelBytes | None) -> dict[str, Any]:
        """Return the bytes of all members in one memory."""
        stated = state_memory(needs, self._wish.members, traced)
        members = [{**asdict(each), **each.worst.told, "moments": [at.told for at in each.moments]} for each in stated]
        limit_bytes = None if needs.limit is None else needs.limit.limit_bytes
        return {"memory": str(needs.sizes.memory), "limit": limit_bytes, "members": members}

    def _host_needs(self, needs: ScriptNeeds) -> ScriptNeeds:
        """Return the needs in host memory, for a model on a device."""
        limit = self._chosen.limit
        host = None
        if limit is not None and limit.host_limit_bytes is not None:
            host = Limit(limit_bytes=limit.host_limit_bytes, has_disk=bool(limit.directories))
        return replace(
            needs,
            sizes=replace(needs.sizes, memory=MemoryKind.HOST),
            base_bytes=self._host_bytes,
            limit=host,
            tier_bytes=0 if limit is None else limit.host_tier_bytes,
        )

    def steps(self, until: int) -> Iterator[Step]:
        """Yield one step to the script's loop. Its first micro-batch is the tracing pass, after which it answers."""
        if until < 1:
            return
        request, settings = self._request, self._chosen.settings
        parts = parts_without_job(request, self._model, settings)
        wish = PipelineWish(
            model=request.model,
            stages=settings.least_stages,
            allocate=in_private_memory,
            traced=lambda traced, places: self.answer(model_bytes(self._model, traced, places)),
        )
        request.loader.start(0, lambda step: ())
        try:
            yield Step(0, parts, LoopSnapshot("", {}, {}), lambda: None, Pipelines(wish, parts))
        finally:
            request.loader.close()
        raise ConfigError("step 0 was left without a micro-batch: iterate over it, `for batch in step`")


def parts_without_job(request: Request, state: ModelState, settings: Settings) -> StepParts:
    """Return the parts that a micro-batch needs. They report to no engine, agent or journal."""
    model, layout = request.model, state.layout
    return StepParts(
        handover=LoopChannel(lambda: None),
        model=state,
        loader=request.loader,
        randomness=BlockRandomness(model, layout.blocks, settings.seed, compute_device(model)),
        untouched=MutationGuard(model, lambda: state.memory, [s.name for s in layout.parameters if not s.trained]),
        layers=Layers(model),
        run_length=settings.run_length,
        reach=lambda step, phase: None,
        log=lambda event, **values: None,
    )


def _moments(pieces: PieceOptimizer, layout: Layout, port: DevicePort) -> tuple[float, ...]:
    """Return, per shard, the bytes of optimizer state per byte of parameters, measured by one update with zeros."""
    hyper = pieces.hyperparameters()
    found = []
    # One shard at a time, so that this process never holds the states that all members of a job share.
    for shard in layout.shards:
        parameters = torch.zeros(shard.numel, dtype=getattr(torch, shard.master_dtype), device=port.device)
        state = pieces.create(shard, parameters)
        if layout.pieces[shard.index]:
            pieces.apply([(state, torch.zeros_like(parameters), None)], hyper=hyper)
        found.append((state.nbytes - parameters.nbytes) / max(1, parameters.nbytes))
    return tuple(found)
