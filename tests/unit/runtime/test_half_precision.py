"""Half precision computes, float32 decides: gradients are summed and parameters updated there, then rounded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from elastrain import protocol as p
from elastrain.job.values import Contribution, Record
from elastrain.runtime.carrying.tensor_memory import TensorMemory
from elastrain.runtime.model.flat_model import ModelState
from elastrain.runtime.model.optimizer import PieceOptimizer
from elastrain.runtime.model.partition import describe
from elastrain.runtime.tensors.executor import Executor
from tests.support.payloads import sent

HALF = [torch.bfloat16, torch.float16]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.embedding(tokens)))
        return out


def _zeros(numel: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(numel, dtype=dtype)


def _executor(model: nn.Module, lr: float = 1e-5) -> Executor:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    layout = describe(model, optimizer)
    pieces = PieceOptimizer(optimizer, layout)
    made = Executor(
        layout=layout,
        runs=1,
        model=ModelState(model, layout, _zeros),
        optimizer=pieces,
        memory=TensorMemory(_zeros),
        max_grad_norm=None,
    )
    made.hyper.update(dict.fromkeys(range(100), pieces.hyperparameters()))
    every = tuple(range(len(layout.shards)))
    made.carry_out(p.Create(shards=every, bound=every))
    return made


def _step(executor: Executor, step: int, value: float) -> None:
    record = Record(
        step=step, generation=1, contribution=Contribution(1.0, 1.0, 1, 0), square_norm=1.0, skipped=False, switch=False
    )
    shards = executor.layout.shards
    for shard in shards:
        gradient = sent(torch.full((shard.numel,), value))
        for lane in range(len(shard.lanes)):
            executor.carry_out(
                p.Keep(
                    step=step,
                    shard=shard.index,
                    lane=lane,
                    node=(0, 1),
                    payload=gradient,
                    index=0,
                    block=shard.block,
                    maker="m1",
                )
            )
    executor.carry_out(p.FinishGradients(step=step, shards=tuple(s.index for s in shards)))
    mask = (1 << len(executor.layout.leaves)) - 1
    touched = {s.index: (mask,) * len(s.lanes) for s in shards}
    executor.carry_out(p.Apply(record=record, shards=tuple(touched), touched=touched))
    executor.carry_out(p.EndAttempt(step=step))


@pytest.mark.parametrize("dtype", HALF)
def test_gradients_of_micro_batches_are_added_in_float32(dtype: torch.dtype) -> None:
    model = nn.Linear(1, 1, bias=False, dtype=dtype)
    state = ModelState(model, describe(model, torch.optim.SGD(model.parameters())), _zeros)
    slot = state.new_slot()
    for value in (1.0, 2.0**-12):  # in half precision the second one would be lost
        state.attach(slot)
        model(torch.full((1, 1), value, dtype=dtype)).backward()
        state.detach()
    assert float(slot.views[0]) == 1.0 + 2.0**-12


@pytest.mark.parametrize("dtype", HALF)
def test_updates_too_small_for_the_model_add_up_in_the_masters(dtype: torch.dtype) -> None:
    executor = _executor(nn.Linear(8, 8, dtype=dtype))
    view = executor.model.parameters_of(executor.layout.shards[0])
    view.fill_(1.0)
    executor.carry_out(p.Create(shards=(0,), bound=(0,)))
    digests = set()
    for step in range(3):
        _step(executor, step, 1.0)
        digests.add(executor.states[0].digest())
        assert float(view.max()) == 1.0
    assert len(digests) == 3, "the digest covers the masters"
    assert 0.9999 < float(executor.states[0].parameters.min()) < 1.0


@pytest.mark.parametrize("dtype", HALF)
def test_the_model_holds_the_rounded_masters_after_every_step(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    executor = _executor(Tied().to(dtype), lr=0.1)
    for step in range(2):
        _step(executor, step, 0.5)
    for shard in executor.layout.shards:
        master = executor.states[shard.index].parameters
        assert master.dtype == torch.float32
        assert torch.equal(executor.model.parameters_of(shard), master.to(dtype))
        assert not torch.equal(master, master.to(dtype).float()), "a test in which rounding shows"


def test_a_shard_that_changes_hands_keeps_its_masters() -> None:
    torch.manual_seed(0)
    executor = _executor(nn.Linear(8, 8, dtype=torch.bfloat16))
    _step(executor, 0, 1.0)
    before = executor.states[0].digest()
    executor.carry_out(p.Unbind(shard=0))
    executor.model.parameters_of(executor.layout.shards[0]).zero_()
    executor.carry_out(p.Bind(step=0, shard=0))
    assert executor.states[0].digest() == before
    view = executor.model.parameters_of(executor.layout.shards[0])
    assert torch.equal(view, executor.states[0].parameters.to(torch.bfloat16))


def test_a_tied_weight_of_half_precision_has_a_float32_gradient_in_each_block() -> None:
    model = Tied().to(torch.bfloat16)
    state = ModelState(model, describe(model, torch.optim.SGD(model.parameters())), _zeros)
    slot = state.new_slot()
    state.attach(slot)
    model(torch.arange(8)).float().square().sum().backward()
    assert {view.dtype for view in slot.views.values()} == {torch.float32}
    assert slot.touched == set(slot.views)


def test_a_model_of_two_precisions_has_one_float32_slot() -> None:
    model = Tied().to(torch.bfloat16)
    model.norm.float()
    executor = _executor(model)
    assert {shard.dtype for shard in executor.layout.shards} == {"bfloat16", "float32"}
    assert {state.parameters.dtype for state in executor.states.values()} == {torch.float32}
    numel = sum(flat.numel for flat in executor.layout.flats)
    assert executor.model.new_slot().nbytes == 4 * numel
