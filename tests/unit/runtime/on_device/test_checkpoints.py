"""Checkpoints of a member on a device: what is written of it, and what it reads."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastrain import protocol as p
from elastrain.device import DevicePort, device_of
from elastrain.runtime.carrying.landed_results import Landing
from elastrain.runtime.carrying.tensor_memory import TensorMemory
from elastrain.runtime.durable.checkpoint_parts import PartInWriting
from elastrain.runtime.durable.kept_loop import AtStep
from elastrain.runtime.durable.stored_initial import StoredInitial
from elastrain.runtime.io.loop_channel import LoopChannel
from elastrain.runtime.model.flat_model import ModelState
from elastrain.runtime.model.optimizer import PieceOptimizer
from elastrain.runtime.model.partition import describe
from elastrain.runtime.tensors.executor import Executor
from elastrain.snapshot.durable.places.port import place_at
from elastrain.snapshot.shard_state import ShardState
from tests.support import late
from tests.unit.runtime.test_stored_initial import READER, quiet, saved


def port_of_late() -> DevicePort:
    """Return the port: its name is known in the process that has it only."""
    return device_of(torch.device("late", 0))


@pytest.mark.parametrize("changed", [False, True])
def test_a_state_is_compared_with_the_digest_that_the_device_has_made(changed: bool) -> None:
    state = ShardState(shard=1, version=3, parameters=torch.arange(300.0), pieces=[{}])
    verified = state.on(torch.device("late")).digest()
    assert verified != state.checksum()
    if changed:
        state.parameters[7] += 1
    told: list[p.PartWritten] = []
    with tempfile.TemporaryDirectory() as folder:
        part = PartInWriting(
            p.BeginPart(step=3, shards=(1,)), place_at(folder), "c", "m0", told.append, lambda do: do()
        )
        part.write(state, verified, lambda: None)
    (outcome,) = told
    assert ("has changed in memory" in outcome.problem) == changed


def test_buffers_are_copied_behind_the_work_that_makes_them() -> None:
    """The training loop computes in a stream of its own, and the writer's thread copies in another one."""
    at, copied = AtStep(), list[Tensor]()
    with port_of_late().side_stream():
        at.use_buffers({"scale": torch.ones(50, device="late") * 3, "none": None})

    def write() -> None:
        for event in at.made:
            event.wait()
        copied.extend(buffer.cpu() for buffer in at.buffers.values() if buffer is not None)

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    assert torch.equal(copied[0], torch.full((50,), 3.0)) and late.races() == []


def executor_of(folder: Path) -> tuple[Executor, list[ShardState], StoredInitial, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(80, 80), nn.Linear(80, 80).to(torch.bfloat16)).to("late")
    optimizer = torch.optim.AdamW(model.parameters())
    layout = describe(model, optimizer, None)
    memory = TensorMemory(lambda numel, dtype: torch.zeros(numel, dtype=dtype), port=port_of_late())
    pieces, state = PieceOptimizer(optimizer, layout), ModelState(model, layout, memory.empty)
    made = Executor(layout=layout, runs=1, model=state, optimizer=pieces, memory=memory, max_grad_norm=None)
    resume, states = saved(folder, state)
    woken = threading.Event()
    channel = LoopChannel(woken.set, landing=Landing(port_of_late()))
    stored = StoredInitial(resume, state, pieces, READER, lambda told: channel.tell_landed(lambda: told), quiet)
    made.start_from(stored)

    def hear() -> Any:
        assert woken.wait(60)
        return next(channel.take())

    return made, states, stored, hear


def test_a_checkpoint_comes_onto_the_device_and_the_states_of_backups_into_host_memory() -> None:
    with tempfile.TemporaryDirectory() as folder:
        executor, states, stored, hear = executor_of(Path(folder))
        shards = tuple(range(len(states)))
        began = port_of_late().record()
        with port_of_late().side_stream():  # the engine's
            began.wait()
            stored.carry_out(p.ReadInitial(shards=shards))
            assert hear() == p.InitialRead(shards=shards)
            executor.carry_out(p.Create(shards=shards, bound=shards[:2]))
            for shard, wanted in zip(executor.layout.shards, states, strict=True):
                its = executor.states[shard.index]
                assert its.digest() == wanted.digest() and its.parameters.device == port_of_late().device
                here = executor.model.parameters_of(shard)
                assert torch.equal(here.cpu(), wanted.parameters.to(here.dtype))
            assert [shard for shard in shards if shard not in executor.states.outside] == list(shards[:2])
            assert {v.device for piece in executor.states[0].pieces for v in piece.values() if _is_long(v)} == {
                port_of_late().device
            }
    assert late.races() == []


def _is_long(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() == 1


def test_the_reader_and_the_engine_wait_for_each_others_streams() -> None:
    """A command moves the model's memory, or overwrites it, while a thread reads the checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        executor, _, stored, hear = executor_of(Path(folder))
        shard = executor.layout.shards[0]
        published = torch.full((shard.numel,), 7.0, dtype=getattr(torch, shard.dtype))
        command = p.TakeParameters(step=4, shard=0, payload=[published], index=0)
        began = port_of_late().record()
        with port_of_late().side_stream():
            began.wait()
            with stored.making_way(p.HoldBlocks(blocks=(0, 1), for_good=False)):
                executor.model.parameters_of(shard).fill_(torch.nan)
            stored.carry_out(p.ReadInitial(shards=()))
            assert hear() == p.InitialRead(shards=())
            executor.carry_out(command)
            assert torch.equal(executor.model.parameters_of(shard).cpu(), published)
    assert late.races() == []
