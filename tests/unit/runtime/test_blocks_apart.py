"""Blocks that come and go: what is absent takes no memory and shows when it is used, what stays keeps its bits."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor, nn

from elastrain.comm.shm.segments import SharedMemory
from elastrain.errors import ConfigError
from elastrain.pipeline.stubs.placeholders import AbsentParameter
from elastrain.runtime.loop.mutation_guard import MutationGuard
from elastrain.runtime.loop_state.layers import Layers
from elastrain.runtime.model.flat_model import ModelState
from elastrain.runtime.model.partition import describe

torch.set_num_threads(1)
EMBED, FIRST, SECOND, HEAD = range(4)
ALL = range(4)


@pytest.fixture(autouse=True)
def _nothing_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stubs of other tests may have been left in the middle of a forward."""
    monkeypatch.setattr(AbsentParameter, "computing", set())


def _zeros(numel: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(numel, dtype=dtype)


class Normed(nn.Module):
    """A layer that keeps running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.linear(x))
        return out


class Tied(nn.Module):
    """The head shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList([Normed(), nn.Linear(8, 8)])
        self.head = nn.Linear(8, 11)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out


def _made(*, frozen: bool = False, apart: bool = True) -> tuple[Tied, ModelState]:
    torch.manual_seed(0)
    model = Tied()
    model.embed.weight.requires_grad_(not frozen)
    return model, ModelState(model, describe(model, torch.optim.SGD(model.parameters())), _zeros, apart=apart)


def _values(model: nn.Module) -> dict[str, Tensor]:
    with torch._C.DisableTorchFunctionSubclass():
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters(remove_duplicate=False)}


def _absent(model: nn.Module) -> set[str]:
    named = model.named_parameters(remove_duplicate=False)
    with torch._C.DisableTorchFunctionSubclass():
        found = {name: parameter for name, parameter in named if bool(parameter.isnan().all())}
    assert all(isinstance(each, AbsentParameter) for each in found.values())
    return set(found)


def _loss(model: nn.Module) -> Tensor:
    words = torch.arange(11)
    return nn.functional.cross_entropy(model(words), words)


def test_what_goes_is_one_nan_and_what_stays_keeps_its_bits() -> None:
    model, state = _made()
    before, whole_bytes = _values(model), state.nbytes
    state.hold([FIRST])
    assert _absent(model) == {name for name in before if not name.startswith("layers.0")}
    assert model.layers[1].weight.untyped_storage().nbytes() == 4
    assert all(torch.equal(value, before[name]) for name, value in _values(model).items() if name not in _absent(model))
    mine = [flat for flat in state.layout.flats if flat.block == FIRST]
    assert state.nbytes == sum(flat.numel * getattr(torch, flat.dtype).itemsize for flat in mine) < whole_bytes


def test_what_comes_back_is_nan_until_it_is_written_and_the_digest_is_that_of_the_whole() -> None:
    model, state = _made()
    whole = _made(apart=False)[1]
    kept = {shard.index: state.parameters_of(shard).clone() for shard in state.layout.shards}
    assert state.parameters_digest() == whole.parameters_digest()
    state.hold([HEAD])
    gone = [shard for shard in state.layout.shards if not state.has(shard)]
    state.hold(ALL)
    assert "layers.1.weight" in _absent(model) and "head.weight" not in _absent(model)
    for shard in gone:
        state.take_parameters(shard.index, kept[shard.index])
    assert state.parameters_digest() == whole.parameters_digest()
    assert not _absent(model)


def test_a_block_that_comes_is_not_here_before_all_of_its_values_are() -> None:
    _, state = _made()
    kept = {shard.index: state.parameters_of(shard).clone() for shard in state.layout.shards}
    state.hold([HEAD])
    gone = [shard.index for shard in state.layout.shards if not state.has(shard)]
    state.hold(ALL)
    blocks_of = {shard: state.lanes()[shard] for shard in gone}
    for shard in gone:
        assert not any(state.blocks.has(block) for block in blocks_of[shard])
        with pytest.raises(ConfigError, match="does not have block"):
            state.blocks.check_are_all("state_dict()")
        assert state.blocks.leave()
        with pytest.raises(ConfigError, match="the whole model is on rank 0, so use it there"):
            state.blocks.check_are_all("state_dict()")
        state.blocks.are_left_partial = False
        state.take_parameters(shard, kept[shard])
    assert all(state.blocks.has(block) for block in ALL)
    state.blocks.check_are_all("state_dict()")


def test_values_that_come_while_somebody_asks_are_here(monkeypatch: pytest.MonkeyPatch) -> None:
    _, state = _made()
    kept = {shard.index: state.parameters_of(shard).clone() for shard in state.layout.shards}
    state.hold([HEAD])
    gone = [shard.index for shard in state.layout.shards if not state.has(shard)]
    state.hold(ALL)
    has = state.blocks.has

    def asked_by_the_main_thread(block: int) -> bool:
        for shard in gone:
            state.take_parameters(shard, kept[shard])
        return has(block)

    monkeypatch.setattr(state.blocks, "has", asked_by_the_main_thread)
    state.blocks.check_are_all("state_dict()")


def test_a_block_that_goes_before_its_values_came_is_awaited_no_more() -> None:
    _, state = _made()
    state.hold([HEAD])
    state.hold([HEAD, FIRST])
    state.hold([HEAD])
    assert state.blocks.has(HEAD) and not state.blocks.has(FIRST)
    assert state.blocks.coming() == set()


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("held", [EMBED, HEAD])
def test_a_tied_weight_is_here_where_any_block_reads_it(held: int, frozen: bool) -> None:
    model, state = _made(frozen=frozen)
    state.hold([held])
    assert "embed.weight" not in _absent(model) and "head.weight" not in _absent(model)
    assert model.embed.weight.data_ptr() == model.head.weight.data_ptr()
    assert ("head.bias" in _absent(model)) == (held == EMBED)
    tied = next(shard for shard in state.layout.shards if shard.block == EMBED)
    assert state.lanes()[tied.index] == (EMBED, HEAD)
    state.hold([FIRST])
    assert {"embed.weight", "head.weight", "head.bias"} <= _absent(model)


def test_its_gradients_are_those_of_the_whole_model_in_slots_of_the_blocks_alone() -> None:
    (plain, whole), (model, state) = _made(apart=False), _made()
    expected = whole.new_slot()
    _backward(whole, expected, plain, ALL)
    slot = state.new_slot()
    assert slot.nbytes == 0
    slot.begin_run(ALL)
    _backward(state, slot, model, ALL)
    assert slot.digests() == expected.digests()
    slot.begin_run([HEAD])
    assert slot.nbytes < expected.nbytes / 3 and not slot.touched
    slot.release()
    assert slot.nbytes == 0


def test_what_an_earlier_run_has_left_in_a_part_counts_for_nothing_in_the_next() -> None:
    (plain, whole), (model, state) = _made(apart=False), _made()
    expected = whole.new_slot()
    _backward(whole, expected, plain, ALL)
    slot = state.new_slot()
    for _ in range(2):
        slot.begin_run(ALL)
        _backward(state, slot, model, ALL)
        assert slot.digests() == expected.digests()
        for view in slot.views.values():
            view.fill_(torch.nan)
        slot.release()


def _backward(state: ModelState, slot: object, model: nn.Module, blocks: object) -> None:
    state.attach(slot)  # type: ignore[arg-type]
    state.arm(lambda *_: None, blocks)  # type: ignore[arg-type]
    _loss(model).backward()
    state.finish()
    state.detach()


def test_a_gradient_for_a_block_that_is_not_in_the_slot_is_refused_by_name() -> None:
    model, state = _made()
    slot = state.new_slot()
    slot.begin_run([SECOND, HEAD])
    state.attach(slot)
    with pytest.raises(ConfigError, match=r"got a gradient on a member that computes other blocks"):
        _loss(model).backward()


def test_free_gradients_of_blocks_that_went_are_given_up() -> None:
    _, state = _made()
    slots = [state.new_slot(), state.new_slot()]
    for slot in slots:
        slot.begin_run()
    whole_bytes = state.gradients.copy_bytes
    assert state.gradients.nbytes == 2 * whole_bytes
    slots[0].release()
    state.hold([SECOND])
    held_bytes = state.gradients.nbytes - slots[1].nbytes
    assert held_bytes < whole_bytes / 4
    slots[1].release()
    assert state.gradients.nbytes == 2 * held_bytes
    slots[0].begin_run([SECOND])
    slots[1].begin_run([SECOND])
    assert state.gradients.nbytes == slots[0].nbytes + slots[1].nbytes == 2 * held_bytes


def test_memory_goes_back_to_the_kernel() -> None:
    memory = SharedMemory(1 << 20, huge_pages=False)
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))
    state = ModelState(model, describe(model, torch.optim.SGD(model.parameters())), memory.empty, apart=True)
    slot = state.new_slot()
    slot.begin_run()
    assert memory.resident_bytes() >= 8 << 20
    slot.release()
    state.hold([1])
    memory.trim()
    assert memory.resident_bytes() <= 2 << 20
    memory.close()


def test_reads_of_all_parameters_end_in_a_sentence_and_the_runtime_may_read_buffers() -> None:
    model, state = _made()
    model.state_dict()
    state.hold([EMBED, FIRST])
    for read in (state.parameters_digest, model.state_dict, model.layers[1].state_dict, model.layers.state_dict):
        with pytest.raises(ConfigError, match=r"does not have block 'layers\.1' now: use it behind the loop"):
            read()
    assert "layers.0.norm.running_mean" in model.state_dict(keep_vars=True)
    state.close()
    model.layers[0].state_dict()
    with pytest.raises(ConfigError, match=r"parameter 'layers.1.weight' is not on this member"):
        model.state_dict()


def test_what_comes_and_goes_is_no_change_of_the_scripts_and_what_the_script_changes_is() -> None:
    model, state = _made()
    untouched = MutationGuard(model, lambda: state.memory, [])
    layers = Layers(model)
    untouched.begin()
    state.hold([SECOND])
    untouched.check_settled()
    state.hold([FIRST, SECOND])
    untouched.check_settled()
    untouched.settle()
    layers.note()
    assert not layers.changes
    model.layers[1].weight.data[0, 0] += 1
    with pytest.raises(ConfigError, match=r"parameter 'layers\.1\.weight' was changed outside of the optimizer"):
        untouched.check_settled()


def test_values_that_come_after_a_step_has_ended_are_no_change_of_the_scripts() -> None:
    model, state = _made()
    kept = {shard.index: state.parameters_of(shard).clone() for shard in state.layout.shards}
    untouched = MutationGuard(model, lambda: state.memory, [])
    untouched.begin()
    state.hold([SECOND])
    gone = [shard.index for shard in state.layout.shards if not state.has(shard)]
    state.hold(ALL)
    untouched.settle()
    for shard in gone:
        state.take_parameters(shard, kept[shard])
        untouched.check_settled()
    untouched.settle()
    model.layers[0].linear.weight.data[0, 0] += 1
    with pytest.raises(ConfigError, match=r"'layers\.0\.linear\.weight' was changed outside of"):
        untouched.check_settled()


def test_running_statistics_of_a_block_that_came_back_are_what_was_written() -> None:
    model, state = _made()
    norm = model.layers[0].norm
    state.hold([HEAD])
    state.statistics.refresh()
    assert not bool(norm.running_mean.isnan().any())
    state.hold(ALL)
    shard = next(each for each in state.layout.shards if each.dtype == "float64")
    state.parameters_of(shard).fill_(3.0)
    state.statistics.refresh()
    assert bool((norm.running_mean == 3.0).all())


USES = {
    "norm": lambda p: p.detach().norm(),
    "data": lambda p: p.data.mean(),
    "foreach": lambda p: torch._foreach_norm([p]),
    "float": lambda p: float(p.sum()),
    "numpy": lambda p: p.numpy(force=True),
    "show": repr,
    "save": lambda p: torch.save(p, io.BytesIO()),
    "copy": copy.deepcopy,
    "read by another": lambda p: torch.zeros(p.shape).lerp_(p, 0.5),
    "write": lambda p: p.detach().zero_(),
    "init": nn.init.zeros_,
    "vector": lambda p: nn.utils.parameters_to_vector([p]),
    "replace": lambda p: setattr(p, "data", torch.zeros(p.shape)),
}


@pytest.mark.parametrize("how", USES)
def test_values_that_are_not_here_are_refused_by_name(how: str) -> None:
    model, state = _made()
    state.hold([FIRST])
    with pytest.raises(ConfigError, match=r"parameter 'layers.1.weight' is not on this member .* behind the loop"):
        USES[how](model.layers[1].weight)
    USES[how](model.layers[0].linear.weight)


def test_what_asks_for_no_values_of_what_is_not_here() -> None:
    model, state = _made()
    state.hold([FIRST])
    weight = model.layers[1].weight
    assert (weight.numel(), weight.shape, weight.dtype, weight.grad, weight.is_leaf, len(weight)) is not None
    assert torch.zeros_like(weight).sum() == 0 and hash(weight) and weight.device.type == "cpu"
    model.zero_grad()
    torch.optim.SGD(model.parameters(), lr=0.1)
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) and isinstance(weight, nn.Parameter)
    model.requires_grad_(False).train()


def test_values_that_are_still_to_come_are_refused_and_those_that_came_are_as_any() -> None:
    model, state = _made()
    kept = {shard.index: state.parameters_of(shard).clone() for shard in state.layout.shards}
    state.hold([FIRST])
    gone = [shard.index for shard in state.layout.shards if not state.has(shard)]
    state.hold(ALL)
    with pytest.raises(ConfigError, match="is not on this member"):
        model.layers[1].weight.norm()
    for shard in gone:
        state.take_parameters(shard, kept[shard])
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    assert not any(p.__dict__ for p in model.parameters()) and model.layers[1].weight.norm().isfinite()


def test_what_is_warmed_up_is_marked_as_present_only_meanwhile() -> None:
    model, state = _made()
    state.hold([EMBED, FIRST])
    state.hold([EMBED, FIRST, SECOND])
    weight = model.layers[1].weight
    assert isinstance(weight, AbsentParameter), "it has memory, and no values"
    state.blocks.show([SECOND])
    assert type(weight) is nn.Parameter
    state.blocks.show(())
    assert isinstance(weight, AbsentParameter)
    state.blocks.show([SECOND])
    for shard in state.layout.shards:
        if SECOND in state.readers[shard.flat]:
            its = state.parameters_of(shard)
            state.take_parameters(shard.index, its.fill_(2.0))
    state.blocks.show(())
    assert type(weight) is nn.Parameter, "its values have come meanwhile"
