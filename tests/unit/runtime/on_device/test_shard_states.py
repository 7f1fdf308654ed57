"""Shard states of a member on a device: bits and texts of the CPU, backups in host memory, one wait for all scalars."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastrain import protocol as p
from elastrain.buffers.port import NoSink
from elastrain.device import device_of
from elastrain.job.values import Contribution, Record
from elastrain.runtime.carrying.tensor_memory import TensorMemory
from elastrain.runtime.model.flat_model import ModelState
from elastrain.runtime.model.optimizer import PieceOptimizer
from elastrain.runtime.model.partition import describe
from elastrain.runtime.tensors.executor import Executor
from elastrain.snapshot.shard_state import ShardState
from tests.support import late

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda q: torch.optim.AdamW(q, lr=0.1),
    "amsgrad": lambda q: torch.optim.Adam(q, lr=0.1, amsgrad=True),
    "momentum": lambda q: torch.optim.SGD(q, lr=0.1, momentum=0.9),
    "sgd": lambda q: torch.optim.SGD(q, lr=0.1),
    "adagrad": lambda q: torch.optim.Adagrad(q, lr=0.1),
    "one tensor after another": lambda q: torch.optim.NAdam(q, lr=0.1, foreach=False),
    "asgd": lambda q: torch.optim.ASGD(q, lr=0.1, foreach=False),
    "rmsprop": lambda q: torch.optim.RMSprop(q, lr=0.1, foreach=False),
}
STEPS = 3


def executor_on(
    device: str, *, optimizer: str = "adamw", dtype: torch.dtype = torch.float32, width: int = 90
) -> Executor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(width, width)).to(dtype).to(device)
    user = OPTIMIZERS[optimizer](model.parameters())
    layout = describe(model, user)
    pieces = PieceOptimizer(user, layout)
    memory = TensorMemory(lambda numel, dtype: torch.zeros(numel, dtype=dtype), port=device_of(torch.device(device)))
    state = ModelState(model, layout, memory.empty)
    made = Executor(layout=layout, runs=1, model=state, optimizer=pieces, memory=memory, max_grad_norm=1.0)
    for step in range(STEPS):
        made.hyper[step] = pieces.hyperparameters()
    return made


def record_of(step: int) -> Record:
    told = Contribution(1.0, 4.0, 4, 0)
    return Record(step=step, generation=1, contribution=told, square_norm=9.0, skipped=False, switch=False)


def touched_in(executor: Executor) -> tuple[int, ...]:
    return ((1 << len(executor.layout.leaves)) - 1,)


def gradients(executor: Executor, step: int, shards: Sequence[int]) -> p.StoreGradients:
    """What a primary sends of a step."""
    drawn = [
        torch.randn(executor.layout.shards[shard].numel, generator=torch.Generator().manual_seed(1000 * step + shard))
        for shard in shards
    ]
    checksums = [executor.memory.checksum(tensor) - (1 << 63) for tensor in drawn]
    return p.StoreGradients(step=step, shards=tuple(shards), source="m1", payload=[torch.tensor(checksums), *drawn])


def create(executor: Executor, bound: Sequence[int]) -> list[int]:
    shards = [shard.index for shard in executor.layout.shards]
    executor.carry_out(p.Create(shards=tuple(shards), bound=tuple(bound)))
    return shards


def follow(executor: Executor, step: int, shards: Sequence[int]) -> list[p.Event]:
    """Follow a step as a backup, up to the verified state."""
    kept = executor.carry_out(gradients(executor, step, shards))
    assert isinstance(kept, p.GradientsKept) and kept.shards == tuple(shards)
    for shard in shards:
        executor.carry_out(p.ApplyBehind(record=record_of(step), shard=shard, touched=touched_in(executor)))
    told = []
    while executor.books.has_work_behind:
        told += executor.books.work_behind()
    for shard in shards:
        executor.carry_out(p.Swap(step=step, shard=shard))
    return told


def digests(executor: Executor) -> dict[int, int]:
    return {shard: executor.states[shard].digest() for shard in executor.states}


def on_device_bytes() -> int:
    allocated: int = torch.get_device_module("late").memory_allocated()
    return allocated


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_backups_and_primaries_on_a_device_have_the_bits_of_the_host(optimizer: str, dtype: str) -> None:
    found = []
    for device in ("cpu", "late"):
        executor = executor_on(device, optimizer=optimizer, dtype=getattr(torch, dtype))
        shards = create(executor, bound=[0])
        before = digests(executor)
        follow(executor, 0, shards[1:])
        executor.carry_out(gradients(executor, 0, [0]))  # a primary that was taken over has the gradient only so
        executor.carry_out(p.Apply(record=record_of(0), shards=(0,), touched={0: touched_in(executor)}))
        after_one = digests(executor)
        executor.carry_out(p.Bind(step=0, shard=shards[1]))
        executor.carry_out(p.Unbind(shard=0))
        follow(executor, 1, [0, *shards[2:]])
        found.append((before, after_one, digests(executor), executor.model.parameters_digest()))
    assert found[0] == found[1]
    assert late.races() == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_of_backups_lie_in_host_memory_and_those_of_primaries_on_the_device(dtype: str) -> None:
    executor = executor_on("late", dtype=getattr(torch, dtype))
    shards = create(executor, bound=[0, 1])
    follow(executor, 0, shards[2:])
    executor.carry_out(p.Bind(step=0, shard=2))
    executor.carry_out(p.Unbind(shard=1))
    states = executor.states
    assert [shard for shard in shards if shard in states.outside] == [shard for shard in shards if shard not in (0, 2)]
    assert states.memory_bytes() == sum(
        state.nbytes - (state.parameters.nbytes if dtype == "float32" else 0) for state in (states[0], states[2])
    )
    elsewhere = [states.size_bytes(shard) for shard in shards if shard not in (0, 2)]
    assert (states.host_bytes(), states.disk_bytes()) == (sum(elsewhere), 0)


def _tensors(pieces: Sequence[dict[str, Any]]) -> list[Tensor]:
    return [value for piece in pieces for value in piece.values() if isinstance(value, Tensor) and value.dim()]


def test_a_backup_keeps_nothing_on_the_device_and_needs_room_there_for_one_shard_at_a_time() -> None:
    executor = executor_on("late", width=500)
    shards = create(executor, bound=[])
    follow(executor, 0, shards)
    device = torch.get_device_module("late")
    before = on_device_bytes()
    device.reset_peak_memory_stats()
    follow(executor, 1, shards)
    one_shard = max(executor.states.size_bytes(shard) for shard in shards)
    digests_bytes = 512 << 10
    assert on_device_bytes() == before
    assert device.max_memory_allocated() - before < 2 * one_shard + digests_bytes
    assert 2 * one_shard + digests_bytes < 0.2 * executor.states.host_bytes()


def test_the_text_and_the_digest_of_a_state_do_not_tell_where_it_lies_and_packing_waits_once() -> None:
    def made(device: str) -> ShardState:
        drawn = torch.Generator().manual_seed(0)
        pieces: list[dict[str, Any]] = [
            {
                "exp_avg": torch.randn(70, generator=drawn).to(device),
                "step": torch.tensor(float(index), device=device),
                "mu": torch.tensor(0.5, device=device),
                "lr": 0.25,
            }
            for index in range(20)
        ]
        parameters = torch.randn(1400, generator=drawn).to(device)
        return ShardState(shard=3, version=4, parameters=parameters, pieces=pieces)

    here, there = made("cpu"), made("late")
    assert here.pack()[0] == there.pack()[0]
    assert here.digest() == there.digest()
    before = late.stats()["waits"]
    there.pack()
    assert late.stats()["waits"] == before + 1


def test_a_state_that_was_copied_in_gets_its_scalars_where_the_kernels_want_them_in_one_copy() -> None:
    executor = executor_on("late")
    shards = create(executor, bound=[])
    follow(executor, 0, shards)
    state = max((executor.states[shard] for shard in shards), key=lambda its: len(its.pieces))
    assert len(state.pieces) > 1
    assert {its["step"].device.type for its in state.pieces} == {"cpu"}
    gradient = torch.ones(state.parameters.numel(), device="late")
    before = late.stats()["copies_in"]
    executor.optimizer.apply([(state, gradient, None)], hyper=executor.hyper[1])
    assert late.stats()["copies_in"] == before + 1
    assert {its["step"].device.type for its in state.pieces} == {"late"}


class Sink(NoSink):
    def __init__(self) -> None:
        self.taken: list[ShardState] = []

    def take(self, step: int, digest: int | None, state: ShardState) -> None:
        self.taken.append(state)


def test_what_a_checkpoint_takes_lies_in_host_memory_and_stays_as_it_is() -> None:
    executor, sink = executor_on("late"), Sink()
    shards = create(executor, bound=[0, 1])
    follow(executor, 0, shards[2:])
    executor.books.capture_into(sink)
    wanted = digests(executor)
    executor.carry_out(p.Capture(step=0, shards=tuple(shards), digests=(None,) * len(shards)))
    executor.carry_out(gradients(executor, 1, [0]))
    executor.carry_out(p.Apply(record=record_of(1), shards=(0,), touched={0: touched_in(executor)}))  # settled first
    executor.carry_out(gradients(executor, 1, [2]))
    executor.carry_out(p.ApplyBehind(record=record_of(1), shard=2, touched=touched_in(executor)))
    executor.books.work_behind()
    executor.carry_out(p.Swap(step=1, shard=2))  # given away
    while executor.books.has_work_behind:
        executor.books.work_behind()
    follow(executor, 1, shards[3:])
    assert {state.shard: state.digest() for state in sink.taken} == wanted
    for state in sink.taken:
        assert {tensor.device.type for tensor in (state.parameters, *_tensors(state.pieces))} == {"cpu"}
    assert late.races() == []


def test_a_copy_that_is_taken_is_one_of_a_backup_until_it_is_bound() -> None:
    sender, receiver = executor_on("late"), executor_on("late")
    create(sender, bound=[0])
    sent = sender.memory.carried(sender._tensors.pack(sender.states[0]))
    told = sender._tensors.digest(sender.states[0])
    took = receiver.carry_out(p.TakeCopy(step=-1, shard=0, payload=sent, source="m0", digest=told))
    assert isinstance(took, p.TookCopy) and took.intact
    assert 0 in receiver.states.outside
    receiver.carry_out(p.Bind(step=-1, shard=0))
    assert 0 not in receiver.states.outside
    assert (
        receiver.states[0].parameters.data_ptr() == receiver.model.parameters_of(receiver.layout.shards[0]).data_ptr()
    )
    receiver.carry_out(p.Drop(shard=0))
    assert 0 in receiver.states.outside


def test_a_doubted_update_is_made_again_with_the_same_bits_and_a_damaged_gradient_is_seen() -> None:
    executor = executor_on("late")
    create(executor, bound=[])
    executor.carry_out(gradients(executor, 0, [0]))
    executor.carry_out(p.ApplyBehind(record=record_of(0), shard=0, touched=touched_in(executor)))
    (first,) = executor.books.work_behind()
    again = executor.carry_out(p.UpdateAgain(record=record_of(0), shard=0, touched=touched_in(executor)))
    assert isinstance(first, p.AppliedBehind) and isinstance(again, p.UpdatedAgain)
    assert again.has_gradient and again.digest == first.digest != again.before
    (kept,) = executor.books.kept_gradients()
    assert kept.device.type == "cpu"
    kept[5] += 1
    assert executor.carry_out(p.CheckGradient(step=0, shard=0)) == p.GradientsKept(step=0, damaged=(0,))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_new_primary_does_not_write_parameters_that_the_loop_may_be_reading(dtype: str) -> None:
    executor = executor_on("late", dtype=getattr(torch, dtype))
    port, shard = executor.memory.port, executor.layout.shards[0]
    made = port.record()
    with port.side_stream():
        made.wait()
        create(executor, bound=[])
        follow(executor, 0, [0])
        published = executor.states[0].parameters.to(getattr(torch, dtype)).cpu()
        executor.carry_out(p.TakeParameters(step=0, shard=0, payload=[published], index=0))
        written = port.record()
    written.wait()
    there = executor.model.parameters_of(shard) * 2  # the loop has gone on
    with port.side_stream():
        executor.carry_out(p.Bind(step=0, shard=0))
        told = executor.states[0].digest()
    assert late.races() == []
    assert torch.equal(there.cpu(), published * 2)
    assert 0 in executor.states.bound and executor.states[0].digest() == told


def test_a_new_primary_writes_its_parameters_where_others_are() -> None:
    executor = executor_on("late", dtype=torch.bfloat16)
    create(executor, bound=[])
    follow(executor, 0, [0])
    here = executor.model.parameters_of(executor.layout.shards[0])
    before = here.clone()
    executor.carry_out(p.Bind(step=0, shard=0))
    assert torch.equal(here, executor.states[0].parameters.to(here.dtype)) and not torch.equal(here, before)
