"""Slots and buffers come back, foreign memory is never written, scale and clip are those of torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from elastrain import protocol as p
from elastrain.buffers.slots import Buffers
from elastrain.job.fold import Combine
from elastrain.job.scaling import Scaler
from elastrain.job.values import Contribution, Record
from elastrain.offload.drives.device import Device
from elastrain.protocol.messages import Gradient, Partial, ShardCopy
from elastrain.runtime.carrying.tensor_memory import TensorMemory
from elastrain.runtime.faults.flips import flip
from elastrain.runtime.model.flat_model import ModelState
from elastrain.runtime.model.optimizer import PieceOptimizer
from elastrain.runtime.model.partition import describe
from elastrain.runtime.tensors.executor import Executor
from elastrain.runtime.tensors.tensor_arithmetic import grad_norm, scale_and_clip
from elastrain.snapshot.digest import checksum
from elastrain.snapshot.shard_state import ShardState
from tests.support.gradients import flats_of
from tests.support.memory_engine import MemoryEngine
from tests.support.payloads import sent


def _allocate(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Shared memory has no tensors of nothing: see `Mesh.empty`."""
    assert numel > 0
    return torch.zeros(numel, dtype=dtype)


def _record(step: int = 0, *, weight: float = 4.0, square_norm: float = 9.0, skipped: bool = False) -> Record:
    told = Contribution(1.0, weight, 4, 0)
    return Record(step=step, generation=1, contribution=told, square_norm=square_norm, skipped=skipped, switch=False)


@pytest.fixture
def executor() -> Executor:
    return _executor()


def _executor(runs: int = 1, *, frozen: bool = False, apart: bool = False) -> Executor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    model[0].requires_grad_(not frozen)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    layout = describe(model, optimizer)
    pieces = PieceOptimizer(optimizer, layout)
    made = Executor(
        layout=layout,
        runs=runs,
        model=ModelState(model, layout, _allocate, apart=apart),
        optimizer=pieces,
        memory=TensorMemory(_allocate),
        max_grad_norm=1.0,
    )
    made.hyper[0] = made.hyper[1] = pieces.hyperparameters()
    made.carry_out(p.Create(shards=tuple(range(len(layout.shards))), bound=tuple(range(len(layout.shards)))))
    return made


def _compute_run(executor: Executor, run: int) -> None:
    slot = executor.books.slots.start_run()
    slot.begin_run()
    for block in range(len(executor.layout.blocks)):
        for flat in flats_of(slot, block):
            flat.fill_(float(run + 1))
        executor.books.slots.block_done(
            p.BlockDone(step=0, run=run, block=block, contribution=Contribution(), touched=0)
        )
    executor.books.slots.end_run()


def test_combining_adds_in_the_left_slot_and_frees_the_right_one(executor: Executor) -> None:
    _compute_run(executor, 0)
    _compute_run(executor, 1)
    combine = Combine(left=(0, 1), right=(1, 2), parent=(0, 2))
    for block in range(len(executor.layout.blocks)):
        executor.carry_out(p.CombineOwn(step=0, block=block, combine=combine))
    slot = executor.books.slots.start_run()
    assert all(float(f.max()) == 2.0 for b in range(2) for f in flats_of(slot, b)), "the right one came back"


def _done(executor: Executor, block: int, run: int = 0, step: int = 0) -> None:
    executor.books.slots.block_done(
        p.BlockDone(step=step, run=run, block=block, contribution=Contribution(), touched=0)
    )


def test_a_step_that_ends_within_a_backward_frees_its_slot_once_and_not_before_the_run_ends(
    executor: Executor,
) -> None:
    """Its later blocks are done when nobody needs them any more. Two runs that shared a slot would wipe each other."""
    running = executor.books.slots.start_run()
    _done(executor, 1)
    executor.carry_out(p.EndAttempt(step=0))
    assert executor.books.slots.change() is not running, "it was still written"
    executor.books.slots.end_run()
    second = executor.books.slots.start_run()
    _done(executor, 1)
    executor.carry_out(p.EndAttempt(step=1))
    _done(executor, 0)
    executor.books.slots.end_run()
    executor.carry_out(p.EndAttempt(step=2))
    slots = [executor.books.slots.start_run() for _ in range(4)]
    assert len({id(slot) for slot in slots}) == 4
    assert {id(running), id(second)} < {id(slot) for slot in slots}


@pytest.mark.parametrize("before", [(), (1,), (1, 0)])
@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("after", [(), (1,), (0, 1)])
def test_a_run_computed_again_around_the_end_of_its_step_leaves_every_slot_free_once(
    executor: Executor, before: tuple[int, ...], ended: bool, after: tuple[int, ...]
) -> None:
    slots = [executor.books.slots.start_run()]
    for block in before:
        _done(executor, block)
    if ended:
        executor.carry_out(p.EndAttempt(step=0))
    slots.append(executor.books.slots.change())
    for block in after:
        _done(executor, block)
    executor.carry_out(p.EndAttempt(step=1 if ended else 0))
    executor.books.slots.end_run()
    executor.carry_out(p.EndAttempt(step=2))
    again = [executor.books.slots.start_run() for _ in range(3)]
    assert {id(slot) for slot in slots} == {id(slot) for slot in again[:2]}, "each came back"
    assert again[2] not in slots, "and once"


def test_a_run_that_is_here_already_is_not_taken_twice(executor: Executor) -> None:
    """Others may be reading the first one."""
    first = executor.books.slots.start_run()
    flats_of(first, 0)[0].fill_(1.0)
    _done(executor, 0)
    executor.books.slots.end_run()
    second = executor.books.slots.start_run()
    flats_of(second, 0)[0].fill_(2.0)
    _done(executor, 0)
    executor.books.slots.end_run()
    assert float(_partial(executor, 0).max()) == 1.0
    assert executor.books.slots.start_run() is second


def _partial(executor: Executor, block: int) -> torch.Tensor:
    """What others get of run 0 in the block's first shard."""
    layout = executor.layout
    shard = next(n for n, s in enumerate(layout.shards) if layout.flats[s.flat].block == block)
    told = Partial(step=0, block=block, node=(0, 1), contribution=Contribution(), touched=0, lanes=((shard, 0),))
    return executor.books.payload(told)[1]


def test_a_run_computed_again_leaves_what_others_may_be_reading_and_takes_another_slot_for_the_rest(
    executor: Executor,
) -> None:
    failed = executor.books.slots.start_run()
    flats_of(failed, 1)[0].fill_(1.0)
    _done(executor, 1)
    flats_of(failed, 0)[0].fill_(7.0)  # half a gradient: the backward ends here
    again = executor.books.slots.change()
    assert again is not failed
    for block in range(2):
        flats_of(again, block)[0].fill_(2.0)
    _done(executor, 0)
    executor.books.slots.end_run()
    assert [float(_partial(executor, block).max()) for block in range(2)] == [2.0, 1.0]
    executor.carry_out(p.EndAttempt(step=1))
    free = [executor.books.slots.start_run() for _ in range(2)]
    assert {id(slot) for slot in free} == {id(again), id(failed)}, "both came back, once"


def _keep(executor: Executor, node: tuple[int, int], tensor: torch.Tensor) -> None:
    its = sent(tensor)
    executor.carry_out(p.Keep(step=0, shard=0, lane=0, node=node, payload=its, index=0, block=0, maker="m1"))


def test_a_fold_never_writes_what_belongs_to_another_member() -> None:
    executor = _executor(runs=4)
    numel = executor.layout.shards[0].numel
    parts = [torch.full((numel,), float(i)) for i in range(4)]
    for i, part in enumerate(parts):
        _keep(executor, (i, i + 1), part)
    for left, right, parent in [((0, 1), (1, 2), (0, 2)), ((2, 3), (3, 4), (2, 4)), ((0, 2), (2, 4), (0, 4))]:
        combine = Combine(left=left, right=right, parent=parent)
        executor.carry_out(p.CombineShard(step=0, shard=0, lane=0, combine=combine))
    result = executor.carry_out(p.FinishGradients(step=0, shards=(0,)))
    assert isinstance(result, p.GradientsFinished)
    assert math.isclose(result.square_norms[0], 36.0 * numel)
    assert [float(part[0]) for part in parts] == [0.0, 1.0, 2.0, 3.0]


def test_a_partial_that_covers_others_takes_their_place_and_gives_their_buffers_back() -> None:
    """A survivor that computes runs 0 to 3 in one piece covers what the dead had delivered of them."""
    executor = _executor(runs=6)
    like = torch.zeros(executor.layout.shards[0].numel)

    def combine(left: tuple[int, int], right: tuple[int, int], parent: tuple[int, int]) -> None:
        told = Combine(left=left, right=right, parent=parent)
        executor.carry_out(p.CombineShard(step=0, shard=0, lane=0, combine=told))

    _keep(executor, (0, 1), torch.full_like(like, 1.0))
    _keep(executor, (1, 2), torch.full_like(like, 1.0))
    combine((0, 1), (1, 2), (0, 2))
    made_bytes = executor.gradients_bytes()
    _keep(executor, (0, 4), torch.full_like(like, 4.0))
    _keep(executor, (4, 6), torch.full_like(like, 2.0))
    combine((0, 4), (4, 6), (0, 6))
    assert executor.gradients_bytes() == made_bytes, "the buffer of the covered sum is used again"
    result = executor.carry_out(p.FinishGradients(step=0, shards=(0,)))
    assert isinstance(result, p.GradientsFinished)
    assert math.isclose(result.square_norms[0], 36.0 * like.numel())


def test_a_finished_gradient_is_the_sum_over_all_runs_and_nothing_less() -> None:
    executor = _executor(runs=4)
    _keep(executor, (0, 2), torch.zeros(executor.layout.shards[0].numel))
    with pytest.raises(KeyError):
        executor.carry_out(p.FinishGradients(step=0, shards=(0,)))


def _finish(executor: Executor, value: float, step: int = 0) -> None:
    for shard in executor.layout.shards:
        its = sent(torch.full((shard.numel,), value))
        keep = p.Keep(
            step=step, shard=shard.index, lane=0, node=(0, 1), payload=its, index=0, block=shard.block, maker="m1"
        )
        executor.carry_out(keep)
    executor.carry_out(p.FinishGradients(step=step, shards=tuple(s.index for s in executor.layout.shards)))


def test_a_step_is_applied_as_it_was_finished_although_who_computed_it_all_has_gone_on() -> None:
    """The owner of the only partial is in its next run: a new primary has published while this one was slow."""
    disturbed, undisturbed = _executor(), _executor()
    theirs = torch.full((disturbed.layout.shards[0].numel,), 3.0)
    for executor in (disturbed, undisturbed):
        _keep(executor, (0, 1), theirs if executor is disturbed else theirs.clone())
        executor.carry_out(p.FinishGradients(step=0, shards=(0,)))
    theirs.zero_()
    for executor in (disturbed, undisturbed):
        executor.carry_out(p.Apply(record=_record(), shards=(0,), touched=_everything(executor)))
    assert disturbed.states[0].digest() == undisturbed.states[0].digest()


def test_a_frozen_block_is_folded_and_backed_up_with_nothing() -> None:
    executor = _executor(runs=2, frozen=True)
    nothing = torch.empty(0)
    for run in range(2):
        _keep(executor, (run, run + 1), nothing)
    combine = Combine(left=(0, 1), right=(1, 2), parent=(0, 2))
    executor.carry_out(p.CombineShard(step=0, shard=0, lane=0, combine=combine))
    result = executor.carry_out(p.FinishGradients(step=0, shards=(0,)))
    executor.carry_out(p.StoreGradients(step=0, shards=(0,), source="m1", payload=sent(nothing)))
    assert result == p.GradientsFinished(step=0, square_norms={0: 0.0})


def _everything(executor: Executor) -> dict[int, tuple[int, ...]]:
    mask = (1 << len(executor.layout.leaves)) - 1
    return {shard.index: (mask,) for shard in executor.layout.shards}


def test_a_backups_scratch_is_what_the_primary_computes(executor: Executor) -> None:
    _finish(executor, 3.0)
    backup = executor.states[0].clone()
    touched = _everything(executor)
    gradient = executor.books.payload(
        Gradient(step=0, shards=(0,), contribution=Contribution(), touched=((1,),), square_norms=(1.0,))
    )
    assert executor.books.is_settled(0)
    executor.carry_out(p.StoreGradients(step=0, shards=(0,), source="m1", payload=[g.clone() for g in gradient]))
    assert not executor.books.is_settled(0)
    executor.states[0], primary = backup, executor.states[0]
    executor.carry_out(p.ApplyBehind(record=_record(), shard=0, touched=touched[0]))
    (result,) = executor.books.work_behind()
    executor.states[0] = primary
    executor.carry_out(p.Apply(record=_record(), shards=tuple(touched), touched=touched))
    assert isinstance(result, p.AppliedBehind)
    assert result.digest == executor.states[0].checksum()


def test_a_new_primary_computes_with_its_own_update_and_digests_it_later() -> None:
    primary, backup = _executor(), _executor()
    backup.carry_out(p.Unbind(shard=0))
    _finish(primary, 3.0)
    touched = _everything(primary)
    told = Gradient(step=0, shards=(0,), contribution=Contribution(), touched=((1,),), square_norms=(1.0,))
    gradient = [g.clone() for g in primary.books.payload(told)]
    primary.carry_out(p.Apply(record=_record(), shards=tuple(touched), touched=touched))
    backup.carry_out(p.StoreGradients(step=0, shards=(0,), source="m1", payload=gradient))
    behind = p.ApplyBehind(record=_record(), shard=0, touched=touched[0])
    backup.carry_out(behind)
    before = backup.states[0].checksum()
    backup.carry_out(p.TakeOwnUpdate(updates=(behind,)))
    shard = backup.layout.shards[0]
    assert torch.equal(backup.model.parameters_of(shard), primary.model.parameters_of(shard))
    assert backup.states[0].checksum() == before, "the state stays until its update is verified"
    (result,) = backup.books.work_behind()
    assert isinstance(result, p.AppliedBehind)
    assert result.digest == primary.states[0].checksum(), "the update is made once"


@pytest.mark.parametrize("is_copied", [False, True])
def test_a_bit_of_a_state_that_a_backup_replaces_shows_in_the_next_one_or_goes_with_it(
    executor: Executor, is_copied: bool
) -> None:
    """`is_copied`: the next state was made of it before the bit flipped: then nobody reads it any more."""
    _finish(executor, 3.0)
    backup, touched = executor.states[0].clone(), _everything(executor)
    gradient = executor.books.payload(
        Gradient(step=0, shards=(0,), contribution=Contribution(), touched=((1,),), square_norms=(1.0,))
    )
    executor.carry_out(p.StoreGradients(step=0, shards=(0,), source="m1", payload=[g.clone() for g in gradient]))
    executor.carry_out(p.Apply(record=_record(), shards=tuple(touched), touched=touched))
    primary = executor.states[0].checksum()
    executor.carry_out(p.StoreGradients(step=0, shards=(0,), source="m1", payload=[g.clone() for g in gradient]))
    executor.states[0] = backup
    executor.carry_out(p.ApplyBehind(record=_record(), shard=0, touched=touched[0]))
    if not is_copied:
        assert flip(backup.parameters, 30) == ""
    (result,) = executor.books.work_behind()
    if is_copied:
        assert flip(backup.parameters, 30) == ""
    assert isinstance(result, p.AppliedBehind)
    assert (result.digest == primary) is is_copied
    executor.carry_out(p.Swap(step=0, shard=0))
    assert executor.states[0] is not backup and (executor.states[0].checksum() == primary) is is_copied


def test_states_on_disk_are_updated_to_the_same_bits() -> None:
    inside, outside = _executor(), _executor()
    disk = Device(MemoryEngine(), threads=0)
    shards = range(len(inside.layout.shards))
    outside.keep_outside([disk], frozenset(shards))
    for step in range(2):
        for executor in (inside, outside):
            _finish(executor, 3.0 + step, step)
            touched = _everything(executor)
            executor.carry_out(p.Apply(record=_record(step), shards=tuple(touched), touched=touched))
            executor.carry_out(p.EndAttempt(step=step))
        assert outside.model.parameters_digest() == inside.model.parameters_digest()
        assert [outside.states[s].digest() for s in shards] == [inside.states[s].digest() for s in shards]
    assert outside.states_bytes()[0] == 0
    assert disk.used_bytes > 0


def test_a_backup_on_disk_follows_its_primary_and_can_take_over() -> None:
    primary, backup = _executor(), _executor()
    disk = Device(MemoryEngine(), threads=0)
    backup.carry_out(p.Unbind(shard=0))
    backup.keep_outside([disk], frozenset({0}))
    _finish(primary, 3.0)
    touched = _everything(primary)
    told = Gradient(step=0, shards=(0,), contribution=Contribution(), touched=((1,),), square_norms=(1.0,))
    backup.carry_out(
        p.StoreGradients(step=0, shards=(0,), source="m1", payload=[g.clone() for g in primary.books.payload(told)])
    )
    primary.carry_out(p.Apply(record=_record(), shards=tuple(touched), touched=touched))
    backup.carry_out(p.ApplyBehind(record=_record(), shard=0, touched=touched[0]))
    (result,) = backup.books.work_behind()
    assert isinstance(result, p.AppliedBehind)
    assert result.digest == primary.states[0].checksum()
    backup.carry_out(p.Swap(step=0, shard=0))
    assert backup.states[0].digest() == primary.states[0].digest()
    backup.carry_out(p.Bind(step=0, shard=0))
    view = backup.model.parameters_of(backup.layout.shards[0])
    assert backup.states[0].parameters.data_ptr() == view.data_ptr()
    assert torch.equal(view, primary.model.parameters_of(primary.layout.shards[0]))
    backup.carry_out(p.Drop(shard=0))
    assert disk.used_bytes == 0


def test_a_skipped_step_moves_the_version_and_nothing_else(executor: Executor) -> None:
    _finish(executor, math.nan)
    before = executor.model.parameters_digest()
    touched = _everything(executor)
    executor.carry_out(p.Apply(record=_record(skipped=True), shards=tuple(touched), touched=touched))
    assert executor.model.parameters_digest() == before
    assert {state.version for state in executor.states.values()} == {0}


def test_a_promoted_backup_works_on_the_models_memory(executor: Executor) -> None:
    state = executor.states[0]
    executor.carry_out(p.Unbind(shard=0))
    view = executor.model.parameters_of(executor.layout.shards[0])
    assert state.parameters.data_ptr() != view.data_ptr()
    state.parameters.fill_(7.0)
    executor.carry_out(p.Bind(step=0, shard=0))
    assert state.parameters.data_ptr() == view.data_ptr()
    assert float(view.min()) == 7.0


def test_clipping_is_that_of_torch() -> None:
    gradient = torch.tensor([3.0, 4.0])
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = gradient / 2.0
    norm = torch.nn.utils.clip_grad_norm_([parameter], 1.0)
    record = _record(weight=2.0, square_norm=25.0)
    scale, clip = scale_and_clip(record, 1.0)
    assert math.isclose(grad_norm(record), float(norm))
    assert torch.allclose(gradient * scale * clip, parameter.grad)
    assert scale_and_clip(record, None) == (0.5,)
    assert scale_and_clip(record, 100.0)[1] == 1.0


def test_the_loss_scale_is_taken_out_of_norm_and_gradient_at_once() -> None:
    plain = _record(weight=2.0, square_norm=25.0)
    scaled = replace(_record(weight=2.0, square_norm=25.0 * 2.0**20), scaler=Scaler(scale=1024.0))
    assert grad_norm(scaled) == grad_norm(plain)
    assert scale_and_clip(scaled, 1.0) == (scale_and_clip(plain, 1.0)[0] / 1024.0, scale_and_clip(plain, 1.0)[1])


def test_buffers_come_back_once_and_strangers_never() -> None:
    buffers: Buffers[torch.Tensor] = Buffers(torch.zeros_like, torch.Tensor.numel)
    like = torch.zeros(4)
    first = buffers.take(like)
    buffers.give_back(first)
    buffers.give_back(first)
    buffers.give_back(like)
    assert buffers.take(like) is first
    assert buffers.take(like) is not first


@pytest.mark.parametrize(("for_good", "is_lent"), [(False, False), (True, False), (True, True)])
def test_the_memory_of_gradients_goes_when_blocks_come_for_good(for_good: bool, is_lent: bool) -> None:
    executor = _executor(runs=2, apart=True)
    _compute_run(executor, 0)
    for run in range(2):
        _keep(executor, (run, run + 1), torch.ones(executor.layout.shards[0].numel))
    executor.carry_out(
        p.CombineShard(step=0, shard=0, lane=0, combine=Combine(left=(0, 1), right=(1, 2), parent=(0, 2)))
    )
    executor.carry_out(p.FinishGradients(step=0, shards=(0,)))
    executor.carry_out(p.Apply(record=_record(), shards=(0,), touched={0: (0,)}))
    if not is_lent:
        executor.carry_out(p.EndAttempt(step=0))
    sums_bytes = executor.layout.shards[0].numel * 4
    assert executor.gradients_bytes() > 2 * sums_bytes
    blocks = tuple(range(len(executor.layout.blocks)))
    executor.carry_out(p.HoldBlocks(blocks=blocks, for_good=for_good))
    if for_good and not is_lent:
        assert executor.gradients_bytes() == 0
    else:
        assert executor.gradients_bytes() > sums_bytes


def test_where_a_state_goes_what_was_lent_for_more_of_them_goes_too() -> None:
    """Buffers and scratch are as many as the most states that a member ever had: others may hold them by now."""
    executor = _executor(apart=True)
    _finish(executor, 1.0)
    touched = _everything(executor)
    executor.carry_out(p.Apply(record=_record(), shards=tuple(touched), touched=touched))
    executor.carry_out(p.EndAttempt(step=0))
    before_bytes, scratch_bytes = executor.gradients_bytes(), executor.optimizer.scratch_bytes
    assert scratch_bytes > 0
    executor.carry_out(p.Unbind(shard=0))
    executor.carry_out(p.Drop(shard=0))
    assert executor.optimizer.scratch_bytes == 0
    assert executor.gradients_bytes() < before_bytes - scratch_bytes


def test_a_parameter_without_elements_of_its_own_dtype_needs_no_memory() -> None:
    model = nn.Linear(4, 4)
    model.none = nn.Parameter(torch.empty(0, 4, dtype=torch.float64))
    layout = describe(model, torch.optim.SGD(model.parameters(), lr=0.1))
    state = ModelState(model, layout, _allocate)
    assert {str(buffer.dtype) for buffer in state.new_slot().views.values()} == {"torch.float32", "torch.float64"}


def _damage(tensor: torch.Tensor) -> None:
    tensor.view(torch.int32)[0] ^= 1


def test_a_partial_that_has_changed_since_it_was_sent_is_not_added_unseen() -> None:
    executor = _executor(runs=2)
    left, right = (torch.full((executor.layout.shards[0].numel,), value) for value in (1.0, 2.0))
    _keep(executor, (0, 1), left)
    _keep(executor, (1, 2), right)
    _damage(right)
    combine = Combine(left=(0, 1), right=(1, 2), parent=(0, 2))
    result = executor.carry_out(p.CombineShard(step=0, shard=0, lane=0, combine=combine))
    assert result == p.PartialDamaged(step=0, shard=0, lane=0, node=(1, 2), maker="m1")


def test_a_sum_that_has_changed_since_it_was_added_up_is_not_added_unseen() -> None:
    executor = _executor(runs=4)
    for run in range(4):
        _keep(executor, (run, run + 1), torch.ones(executor.layout.shards[0].numel))
    for left in (0, 2):
        combine = Combine(left=(left, left + 1), right=(left + 1, left + 2), parent=(left, left + 2))
        assert executor.carry_out(p.CombineShard(step=0, shard=0, lane=0, combine=combine)) is None
    _damage(executor.books._folds._folds[0, 0][0, 2].tensor)
    combine = Combine(left=(0, 2), right=(2, 4), parent=(0, 4))
    result = executor.carry_out(p.CombineShard(step=0, shard=0, lane=0, combine=combine))
    assert result == p.PartialDamaged(step=0, shard=0, lane=0, node=(0, 2), maker="")


def test_a_whole_gradient_that_came_changed_is_not_taken_for_finished_unseen() -> None:
    executor = _executor()
    its = sent(torch.ones(executor.layout.shards[0].numel))
    _damage(its[1])
    keep = p.Keep(step=0, shard=0, lane=0, node=(0, 1), payload=its, index=0, block=0, maker="m1")
    assert executor.carry_out(keep) == p.PartialDamaged(step=0, shard=0, lane=0, node=(0, 1), maker="m1")


def test_a_finished_gradient_that_came_changed_is_not_kept_unseen(executor: Executor) -> None:
    _finish(executor, 3.0)
    told = Gradient(step=0, shards=(0,), contribution=Contribution(), touched=((1,),), square_norms=(1.0,))
    came = [tensor.clone() for tensor in executor.books.payload(told)]
    store = p.StoreGradients(step=0, shards=(0,), source="m1", payload=came)
    assert executor.carry_out(store) == p.GradientsKept(step=0, shards=(0,), source="m1")
    _damage(came[1])
    assert executor.carry_out(store) == p.GradientsKept(step=0, damaged=(0,), source="m1")


def test_what_was_sent_keeps_the_checksum_that_it_had_then(executor: Executor) -> None:
    """Sent again after a change of view, it must not get one that fits what has become of it."""
    flats_of(executor.books.slots.start_run(), 0)[0].fill_(2.0)
    _done(executor, 0)
    before = _partial(executor, 0)
    _damage(before)
    shard = next(n for n, s in enumerate(executor.layout.shards) if executor.layout.flats[s.flat].block == 0)
    told = Partial(step=0, block=0, node=(0, 1), contribution=Contribution(), touched=0, lanes=((shard, 0),))
    packed, tensor = executor.books.payload(told)
    assert int(packed[0]) + (1 << 63) != checksum(tensor)
    look = p.CheckPartial(step=0, block=0, node=(0, 1))
    assert executor.carry_out(look) == p.PartialChecked(step=0, block=0, is_intact=False)


def test_what_is_computed_of_an_attempt_that_was_given_up_enters_no_fold(executor: Executor) -> None:
    slot = executor.books.slots.start_run()
    _done(executor, 1)
    executor.carry_out(p.VoidAttempt(step=0))
    _done(executor, 0)
    with pytest.raises(KeyError):
        _partial(executor, 0)
    executor.books.slots.end_run()
    assert executor.books.slots.start_run() is slot, "free again"


@pytest.mark.parametrize(("runs", "is_read"), [(1, False), (2, True)])
def test_an_own_gradient_is_read_for_a_checksum_only_where_it_is_compared_later(
    runs: int, is_read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, read = _executor(runs=runs), []
    monkeypatch.setattr(executor._tensors, "checksum", lambda tensor: read.append(tensor) or checksum(tensor))
    _compute_run(executor, 0)
    kept = p.Keep(step=0, shard=0, lane=0, node=(0, 1), payload=None, index=0, block=0, maker="m0")
    executor.carry_out(kept)
    assert bool(read) == is_read


def test_only_whole_copies_of_the_gradients_are_warmed_up() -> None:
    """A member of a pipeline computes some blocks: a copy of all would lie there unused until blocks move."""
    whole, apart = _executor(), _executor(apart=True)
    for each in (whole, apart):
        each.warm_up()
    assert whole.gradients_bytes() == whole.slot_bytes > 0
    assert apart.gradients_bytes() == 0


class _Script:
    """A script that has asked for the whole state."""

    def __init__(self) -> None:
        self.shards: list[int] = []

    def gather(self, state: ShardState, is_intact: Callable[[], bool]) -> bool:
        self.shards += [state.shard] if (found := is_intact()) else []
        return found


def test_a_script_gets_verified_states_only_of_its_own_member_and_of_others(executor: Executor) -> None:
    script = _Script()
    executor.books.fetch_into(script)
    state = executor.states[0]
    digest = executor._tensors.digest(state)
    packed = [tensor.clone() for tensor in executor._tensors.pack(state)]
    for payload in (None, packed):
        for told, is_right in ((digest ^ 1, False), (digest, True)):
            script.shards.clear()
            took = executor.carry_out(p.TakeFetched(step=-1, shard=0, payload=payload, source="m1", digest=told))
            assert isinstance(took, p.TookFetched) and took.intact is is_right
            assert script.shards == [0] * is_right
    assert not flip(packed[1], 3)
    took = executor.carry_out(p.TakeFetched(step=-1, shard=0, payload=packed, source="m1", digest=None))
    assert isinstance(took, p.TookFetched) and not took.intact and script.shards == [0]


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_a_copy_in_pieces_is_the_state_and_each_piece_is_a_part_of_it(is_on_disk: bool) -> None:
    primary, holder = _executor(), _executor()
    if is_on_disk:
        primary.carry_out(p.Unbind(shard=0))
        primary.keep_outside([Device(MemoryEngine(), threads=0)], frozenset({0}))
    told = primary.states[0].checksum()
    holder.carry_out(p.Drop(shard=0))
    for number in range(3):
        piece = primary.books.payload(ShardCopy(step=0, shard=0, digest=told, part=(number, 3)))
        assert sum(tensor.nbytes for tensor in piece[1:]) <= primary.states[0].nbytes / 3 + 16
        sent = [tensor.clone() for tensor in piece]
        command = p.TakeCopy(step=0, shard=0, payload=sent, source="m0", digest=told, part=(number, 3))
        took = holder.carry_out(command)
        assert (took is None) == (number < 2)
        for tensor in sent:
            tensor.zero_()  # its sender may change the state as soon as the piece is read
    assert isinstance(took, p.TookCopy) and took.intact
    assert holder.states[0].checksum() == told


def test_a_copy_that_begins_again_does_not_go_on_with_former_pieces() -> None:
    primary, holder = _executor(), _executor()
    told = primary.states[0].checksum()

    def take(number: int) -> p.Event | None:
        piece = [t.clone() for t in primary.books.payload(ShardCopy(step=0, shard=0, digest=told, part=(number, 2)))]
        return holder.carry_out(p.TakeCopy(step=0, shard=0, payload=piece, source="m0", digest=told, part=(number, 2)))

    holder.carry_out(p.Drop(shard=0))
    assert [take(0), take(0)] == [None, None]
    took = take(1)
    assert isinstance(took, p.TookCopy) and took.intact
    assert take(0) is None
    holder.carry_out(p.EndAttempt(step=0))
    assert holder.books._pieces._coming == {}, "in the next step the copy is another one"


def test_slots_that_a_smaller_share_does_not_need_are_freed_at_the_end_of_the_attempt(executor: Executor) -> None:
    for run in range(3):
        _compute_run(executor, run)
    assert executor.model.gradients.nbytes == 3 * executor.slot_bytes
    executor.trim(2)
    assert executor.model.gradients.nbytes == 3 * executor.slot_bytes, "all slots are in use"
    executor.carry_out(p.EndAttempt(step=0))
    assert executor.model.gradients.nbytes == 2 * executor.slot_bytes
    for _ in range(3):
        executor.books.slots.start_run()
    for _ in range(3):
        executor.books.slots.end_run()
    executor.carry_out(p.EndAttempt(step=1))
    assert executor.model.gradients.nbytes == 3 * executor.slot_bytes, "later shares have what they need"
    executor.trim(1)
    assert executor.model.gradients.nbytes == executor.slot_bytes, "free slots are freed at once"
