"""Running statistics: as if all micro-batches had run one after another, whoever computed them."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from elastrain import protocol as p
from elastrain.errors import ConfigError
from elastrain.job.layout import STATISTICS
from elastrain.job.values import Contribution, Record
from elastrain.runtime.carrying.tensor_memory import TensorMemory
from elastrain.runtime.loop_state.layers import Layers
from elastrain.runtime.model import statistics
from elastrain.runtime.model.flat_model import ModelState
from elastrain.runtime.model.gradients import GradientSlot
from elastrain.runtime.model.optimizer import PieceOptimizer
from elastrain.runtime.model.partition import describe, named_blocks
from elastrain.runtime.tensors.executor import Executor
from tests.support.payloads import sent

torch.set_num_threads(1)


class Net(nn.Module):
    def __init__(self, momentum: float = 0.1) -> None:
        super().__init__()
        self.entry = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6, momentum=momentum)
        self.bare = nn.BatchNorm1d(6, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.bare(self.norm(self.entry(x)))
        return out


def _zeros(numel: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(numel, dtype=dtype)


def _state(model: nn.Module) -> ModelState:
    return ModelState(model, describe(model, torch.optim.SGD(model.parameters(), lr=0.0)), _zeros)


def _micro_batch(model: nn.Module, state: ModelState, slot: GradientSlot, batch: Tensor) -> None:
    state.statistics.begin()
    loss = model(batch).square().sum()
    state.statistics.give(state.statistics.take(), slot.statistics)
    state.attach(slot)
    loss.backward()
    state.detach()
    state.statistics.end()


def _batches(count: int) -> list[Tensor]:
    torch.manual_seed(3)
    return [torch.randn(5, 6) * (1 + m) + m for m in range(count)]


def _commit(state: ModelState, slot: GradientSlot) -> None:
    for shard in state.layout.shards:
        if statistics.is_statistics(state.layout, shard.index):
            statistics.apply(slot.lane(shard, 0), state.parameters_of(shard))
    state.statistics.refresh()


def _assert_like_plain_torch(model: nn.Module, plain: nn.Module, batches: Sequence[Tensor]) -> None:
    for batch in batches:
        plain(batch)
    for (name, ours), (_, theirs) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6), name
        assert ours.dtype == theirs.dtype


def test_a_step_leaves_what_the_micro_batches_would_one_after_another() -> None:
    torch.manual_seed(0)
    model = Net(momentum=0.3)
    plain = copy.deepcopy(model)
    state, batches = _state(model), _batches(4)
    slots = [state.new_slot(), state.new_slot()]
    for number, batch in enumerate(batches):
        _micro_batch(model, state, slots[number // 2], batch)
    for block in range(len(state.layout.blocks)):
        slots[0].add(slots[1], block)
    _commit(state, slots[0])
    _assert_like_plain_torch(model, plain, batches)
    assert int(model.norm.num_batches_tracked) == 4


@pytest.mark.parametrize("batch_size", [5, 1])
def test_batch_norm_in_float64_trains(batch_size: int) -> None:
    """There, what a micro-batch measured is the very tensor that the backward of the layer needs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(6, 6, 1), nn.BatchNorm1d(6), nn.InstanceNorm1d(6, track_running_stats=True))
    model = model.double()
    plain = copy.deepcopy(model)
    state, batches = _state(model), [torch.randn(batch_size, 6, 4, dtype=torch.float64) for _ in range(3)]
    slot = state.new_slot()
    for batch in batches:
        _micro_batch(model, state, slot, batch)
        plain(batch).square().sum().backward()
    _commit(state, slot)
    for (name, ours), (_, theirs) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-12), name
    gradients = {leaf.index: slot.views[leaf.index] for leaf in state.layout.leaves if leaf.index in slot.views}
    for gradient, parameter in zip(gradients.values(), plain.parameters(), strict=True):
        assert torch.allclose(gradient, parameter.grad)


def test_micro_batches_of_a_step_do_not_see_each_other() -> None:
    model = Net()
    state, slot = _state(model), None
    slot = state.new_slot()
    before = {name: value.clone() for name, value in model.named_buffers()}
    for batch in _batches(2):
        _micro_batch(model, state, slot, batch)
        assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())
    assert model.norm.momentum == 0.1


def test_maps_compose_in_order_and_alike_whatever_their_length() -> None:
    torch.manual_seed(1)
    first, second = torch.rand(2 * 70, dtype=torch.float64), torch.rand(2 * 70, dtype=torch.float64)
    values = torch.rand(70, dtype=torch.float64)
    one_by_one = values.clone()
    statistics.apply(first, one_by_one)
    statistics.apply(second, one_by_one)
    whole = statistics.compose(first, second, out=torch.empty_like(first))
    at_once = values.clone()
    statistics.apply(whole, at_once)
    assert torch.allclose(one_by_one, at_once)
    for cut in (2, 14, 66):
        parts = [
            statistics.compose(first[part].clone(), second[part], out=torch.empty_like(first[part]))
            for part in (slice(0, cut), slice(cut, None))
        ]
        assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(statistics.compose(first, second, out=first), whole), "in place too"


def test_a_layer_that_is_not_entered_keeps_its_values_and_one_entered_twice_moves_twice() -> None:
    class Twice(Net):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.norm(self.norm(self.entry(x)))
            return out

    torch.manual_seed(0)
    model = Twice()
    plain = copy.deepcopy(model)
    state, batches = _state(model), _batches(2)
    slot = state.new_slot()
    for batch in batches:
        _micro_batch(model, state, slot, batch)
    _commit(state, slot)
    _assert_like_plain_torch(model, plain, batches)
    assert (int(model.norm.num_batches_tracked), int(model.bare.num_batches_tracked)) == (4, 0)


def test_a_recomputed_forward_does_not_count() -> None:
    class Recomputed(Net):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(super().forward, x, use_reentrant=False)
            return out

    torch.manual_seed(0)
    model = Recomputed()
    plain, state, batches = Net(), _state(model), _batches(3)
    plain.load_state_dict(model.state_dict())
    slot = state.new_slot()
    for batch in batches:
        _micro_batch(model, state, slot, batch)
    _commit(state, slot)
    _assert_like_plain_torch(model, plain, batches)


def test_layers_in_evaluation_and_forwards_outside_of_a_step_are_left_alone() -> None:
    model = Net()
    state = _state(model)
    slot = state.new_slot()
    fresh = {leaf: maps.clone() for leaf, maps in slot.statistics.items()}
    model.norm.eval()
    model.bare.eval()
    _micro_batch(model, state, slot, _batches(1)[0])
    model.train()
    model(_batches(1)[0])
    assert int(model.norm.num_batches_tracked) == 1, "torch's own behaviour"
    assert all(torch.equal(maps, fresh[leaf]) for leaf, maps in slot.statistics.items())
    state.statistics.refresh()
    assert int(model.norm.num_batches_tracked) == 0


def test_a_backward_may_come_behind_the_next_refresh() -> None:
    """In a pipeline others go forward in between, each with what is there."""
    model = Net().eval()
    state = _state(model)
    loss = model(_batches(1)[0]).square().sum()
    state.statistics.refresh()
    loss.backward()


def test_instance_norm_is_folded_as_well() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(6, 6, 1), nn.InstanceNorm1d(6, affine=True, track_running_stats=True))
    plain = copy.deepcopy(model)
    state, batches = _state(model), [torch.randn(3, 6, 7) for _ in range(3)]
    slot = state.new_slot()
    for batch in batches:
        _micro_batch(model, state, slot, batch)
    _commit(state, slot)
    _assert_like_plain_torch(model, plain, batches)


def test_statistics_lie_in_the_block_of_their_layer_and_no_optimizer_moves_them() -> None:
    model = Net()
    assert named_blocks(model) == ("entry", "norm", "bare")
    layout = describe(model, torch.optim.SGD(model.parameters(), lr=0.1))
    flats = [flat for flat in layout.flats if flat.group == STATISTICS]
    assert [layout.blocks[flat.block] for flat in flats] == ["norm", "bare"]
    assert {flat.dtype for flat in flats} == {"float64"}
    for shard in layout.shards:
        if statistics.is_statistics(layout, shard.index):
            assert not layout.pieces[shard.index]
            assert len(shard.lanes) == 1


class Counting(nn.Module):
    def __init__(self, *, persistent: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("calls", torch.zeros(()), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.linear(x)
        return out


def _in_step(model: nn.Module) -> None:
    layers = Layers(model)
    layers.begin()
    layers.enter()


def test_running_statistics_that_are_moved_outside_of_the_micro_batches_are_refused_by_name() -> None:
    model = Net()
    state = _state(model)
    state.statistics.refresh()
    model.eval()
    model(_batches(1)[0])
    state.statistics.check_settled()
    model.train()
    model(_batches(1)[0])
    with pytest.raises(ConfigError, match=r"running statistic 'norm.running_mean' was changed outside"):
        state.statistics.check_settled()
    state.statistics.refresh()
    state.statistics.check_settled()
    model.bare.running_var.fill_(2.0)
    with pytest.raises(ConfigError, match=r"'bare.running_var' was changed outside"):
        state.statistics.check_settled()


def test_another_buffer_that_the_forward_changes_is_refused_by_name() -> None:
    model = nn.Sequential(Counting(persistent=True))
    state = _state(model)
    _in_step(model)
    with pytest.raises(ConfigError, match=r"the forward changes buffer '0\.calls'"):
        _micro_batch(model, state, state.new_slot(), _batches(1)[0])


def test_a_cache_that_is_not_part_of_the_state_may_change() -> None:
    model = nn.Sequential(Counting(persistent=False))
    state = _state(model)
    _in_step(model)
    _micro_batch(model, state, state.new_slot(), _batches(1)[0])


@pytest.mark.parametrize(
    ("layer", "sentence"),
    [(nn.SyncBatchNorm(6), "over members"), (nn.BatchNorm1d(6, momentum=None), "give it a momentum")],
)
def test_layers_that_cannot_be_folded_are_refused_by_name(layer: nn.Module, sentence: str) -> None:
    model = nn.Sequential(nn.Linear(6, 6), layer)
    with pytest.raises(ConfigError, match=f"'1' .*{sentence}"):
        describe(model, torch.optim.SGD(model.parameters(), lr=0.1))


def _record(*, skipped: bool) -> Record:
    told = Contribution(1.0, 1.0, 1, 0)
    return Record(step=0, generation=1, contribution=told, square_norm=1.0, skipped=skipped, switch=False)


@pytest.mark.parametrize("skipped", [False, True])
def test_the_executor_folds_and_applies_them_unless_the_step_is_skipped(skipped: bool) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    layout = describe(model, optimizer)
    state = ModelState(model, layout, _zeros)
    pieces = PieceOptimizer(optimizer, layout)
    executor = Executor(
        layout=layout, runs=2, model=state, optimizer=pieces, memory=TensorMemory(_zeros), max_grad_norm=None
    )
    executor.hyper[0] = pieces.hyperparameters()
    every = tuple(range(len(layout.shards)))
    executor.carry_out(p.Create(shards=every, bound=every))
    plain, batches = copy.deepcopy(model), _batches(2)
    slots = [state.new_slot(), state.new_slot()]
    for slot, batch in zip(slots, batches, strict=True):
        _micro_batch(model, state, slot, batch)
    before = {slot: slot.lane(layout.shards[0], 0).clone() for slot in slots}
    for shard in layout.shards:
        for run, slot in enumerate(slots):
            keep = p.Keep(
                step=0,
                shard=shard.index,
                lane=0,
                node=(run, run + 1),
                payload=sent(slot.lane(shard, 0)),
                index=0,
                block=shard.block,
                maker="m1",
            )
            executor.carry_out(keep)
        combine = p.Combine(left=(0, 1), right=(1, 2), parent=(0, 2))
        executor.carry_out(p.CombineShard(step=0, shard=shard.index, lane=0, combine=combine))
    finished = executor.carry_out(p.FinishGradients(step=0, shards=every))
    assert isinstance(finished, p.GradientsFinished)
    norms = finished.square_norms
    assert {norms[s] for s in every if statistics.is_statistics(layout, s)} == {0.0}
    assert all(torch.equal(slot.lane(layout.shards[0], 0), kept) for slot, kept in before.items())
    mask = (1 << len(layout.leaves)) - 1
    record = replace(_record(skipped=skipped))
    executor.carry_out(p.Apply(record=record, shards=every, touched=dict.fromkeys(every, (mask,))))
    state.statistics.refresh()
    if skipped:
        assert int(model.norm.num_batches_tracked) == 0
        assert float(model.norm.running_mean.abs().max()) == 0.0
    else:
        _assert_like_plain_torch(model, plain, batches)


def test_statistics_that_are_not_finite_make_the_norm_nan() -> None:
    maps = torch.ones(8, dtype=torch.float64)
    assert statistics.square_norm(maps) == 0.0
    maps[3] = math.inf
    assert math.isnan(statistics.square_norm(maps))
