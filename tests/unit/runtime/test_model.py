"""The user's model in flat buffers: values and forward unchanged, gradients in slots, blocks reported when final."""

from __future__ import annotations

import copy
import math
import pickle
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from elastrain.errors import ConfigError
from elastrain.job.layout import FROZEN
from elastrain.offload import within
from elastrain.runtime.model.flat_model import ModelState
from elastrain.runtime.model.gradients import GradientSlot
from elastrain.runtime.model.optimizer import PieceOptimizer
from elastrain.runtime.model.optimizer_proxy import OptimizerProxy
from elastrain.runtime.model.partition import check_device, describe, named_blocks
from tests.support.gradients import flats_of

torch.set_num_threads(1)


def _zeros(numel: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(numel, dtype=dtype)


def _state(model: nn.Module, blocks: tuple[str, ...] | None = None) -> ModelState:
    return ModelState(model, describe(model, torch.optim.SGD(model.parameters()), blocks), _zeros)


class Body(nn.Module):
    """A residual block."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


class Tied(nn.Module):
    """Token embedding tied to the head, a position table held by the root."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(4, 8))
        self.emb = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(Body() for _ in range(layers))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.emb(tokens) + self.position
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(self.norm(x))
        return out


def _loss(model: nn.Module, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(11, (3, 4), generator=generator)
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def _tied() -> Tied:
    torch.manual_seed(0)
    return Tied()


def _run(state: ModelState, slot: GradientSlot, loss: Callable[[], Tensor]) -> list[tuple[int, frozenset[int]]]:
    """One armed backward; the reports in their order."""
    reports: list[tuple[int, frozenset[int]]] = []
    state.attach(slot)
    value = loss()
    state.arm(lambda block, leaves: reports.append((block, leaves)))
    value.backward()
    state.finish()
    return reports


def _second_run(state: ModelState, slot: GradientSlot, loss: Callable[[], Tensor]) -> list[tuple[int, frozenset[int]]]:
    """The first one only learns."""
    _run(state, state.new_slot(), loss)
    return _run(state, slot, loss)


# --- blocks


def test_named_blocks_are_the_children_with_containers_opened() -> None:
    assert named_blocks(Tied()) == ("", "emb", "layers.0", "layers.1", "norm", "head")


def test_named_blocks_of_a_sequential_skip_children_without_parameters() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2)])))
    assert named_blocks(model) == ("0", "2.0", "2.1.0")


def test_a_child_with_a_stack_of_layers_at_any_depth_is_opened() -> None:
    model = nn.Module()
    model.wrapped = nn.Module()
    model.wrapped.inner = Tied()
    model.wrapped.scale = nn.Linear(2, 2)
    model.head = nn.Linear(2, 2)
    inner = [f"wrapped.inner.{name}" for name in ("emb", "layers.0", "layers.1", "norm", "head")]
    assert named_blocks(model) == ("", *inner, "wrapped.scale", "head")


def test_a_module_registered_twice_is_one_block() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(2, 2)
            self.b = self.a

    model = Twice()
    layout = describe(model, torch.optim.SGD(model.parameters()))
    assert layout.blocks == ("a",)
    assert [spec.name for spec in layout.parameters] == ["a.weight", "a.bias"]


def test_what_lies_in_no_named_block_is_left_to_the_root() -> None:
    model = Tied()
    layout = describe(model, torch.optim.SGD(model.parameters()), ["layers.*"])
    assert layout.blocks == ("", "layers.0", "layers.1")
    owner = {spec.name: spec.block for spec in layout.parameters}
    assert owner["layers.0.up.weight"] == "layers.0" and owner["layers.1.up.weight"] == "layers.1"
    assert owner["emb.weight"] == "" and owner["norm.bias"] == ""


@pytest.mark.parametrize(
    ("blocks", "sentence"),
    [(["nope"], "nope"), (["layers", "layers.1"], "lies in block"), (["emb", "norm", "act"], "owns parameters")],
)
def test_wrong_block_names_are_refused(blocks: list[str], sentence: str) -> None:
    model = Tied()
    model.act = nn.ReLU()
    with pytest.raises(ConfigError, match=sentence):
        describe(model, torch.optim.SGD(model.parameters()), blocks)


# --- what cannot be cut


def _linear() -> nn.Linear:
    return nn.Linear(2, 2)


def test_an_optimizer_of_another_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="2 of the optimizer's parameters are not the model's"):
        describe(_linear(), torch.optim.SGD(_linear().parameters()))


def test_an_optimizer_that_has_stepped_keeps_its_state_for_the_job() -> None:
    for make in (torch.optim.AdamW, lambda p: torch.optim.SGD(p, momentum=0.9)):
        model = _linear()
        optimizer = make(model.parameters())
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        pieces = PieceOptimizer(optimizer, describe(model, optimizer))
        assert set(OptimizerProxy(optimizer).take_loaded()) == set(model.parameters())
        assert not optimizer.state
        assert pieces.loaded is None


OF_STATE: list[Callable[[torch.optim.Optimizer, Tensor], object]] = [
    lambda optimizer, _: optimizer.state.clear(),
    lambda optimizer, parameter: optimizer.state.pop(parameter, None),
    lambda optimizer, parameter: optimizer.state[parameter]["exp_avg"].zero_(),
    lambda optimizer, _: copy.deepcopy(optimizer),
    lambda optimizer, _: pickle.dumps(optimizer),
]


@pytest.mark.parametrize("of_state", OF_STATE)
def test_what_a_script_does_with_the_sharded_state_in_the_loop_is_refused(
    of_state: Callable[[torch.optim.Optimizer, Tensor], object],
) -> None:
    model = _linear()
    optimizer = torch.optim.AdamW(model.parameters())
    proxy = OptimizerProxy(optimizer)
    state = {"step": torch.tensor(3.0), "exp_avg": torch.ones(2)}
    proxy.enter_loop(lambda: {model.weight: state})
    with pytest.raises(ConfigError, match=r"optimizer\.state is empty in the loop"):
        of_state(optimizer, model.weight)
    assert optimizer.state_dict()["state"] == {0: state}
    proxy.check()


def test_another_state_in_the_loop_is_refused() -> None:
    optimizer = torch.optim.AdamW(_linear().parameters())
    proxy = OptimizerProxy(optimizer)
    proxy.enter_loop(dict)
    optimizer.state = defaultdict(dict)
    with pytest.raises(ConfigError, match="state was put into the optimizer in the loop"):
        proxy.check()


@pytest.mark.parametrize("is_prepared", [False, True])
def test_an_optimizer_in_within_is_refused_by_that_name_and_pointed_to_the_limit(
    tmp_path: Path, is_prepared: bool
) -> None:
    model = nn.Sequential(_linear(), _linear())
    optimizer = torch.optim.SGD(model.parameters())
    proxy = OptimizerProxy(optimizer) if is_prepared else None
    training = within(model, optimizer, dirs=tmp_path, memory_limit=1 << 30)
    with pytest.raises(ConfigError, match=r"in elastrain\.offload\.within, which steps it .* --memory-limit"):
        OptimizerProxy(optimizer) if proxy is None else proxy.check()
    training.close()


def test_state_that_the_constructor_made_is_no_step() -> None:
    model = _linear()
    assert describe(model, torch.optim.Adagrad(model.parameters())).shards


def test_a_model_without_anything_to_train_is_refused() -> None:
    model = _linear().requires_grad_(False)
    with pytest.raises(ConfigError, match="nothing to train"):
        describe(model, torch.optim.SGD(model.parameters()))


def test_a_trainable_parameter_that_is_in_no_group_is_refused() -> None:
    model = _linear()
    with pytest.raises(ConfigError, match="'bias' requires a gradient but is not in the optimizer"):
        describe(model, torch.optim.SGD([model.weight]))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: nn.Linear(2, 2, dtype=torch.complex64), "convert the model first"),
        (lambda: nn.Linear(2, 2, device="meta"), "meta device"),
        (lambda: _with_parameter(torch.eye(2).to_sparse()), "only dense"),
        (lambda: _with_parameter(_Subclass(torch.eye(2))), "tensor subclasses"),
        (lambda: _with_parameter(torch.ones(1).expand(3)), "one memory for several elements"),
    ],
)
def test_parameters_of_an_unsuitable_kind_are_refused(make: Callable[[], nn.Module], sentence: str) -> None:
    model = make()
    with pytest.raises(ConfigError, match=sentence):
        describe(model, torch.optim.SGD(model.parameters()))


class _Subclass(nn.Parameter):
    pass


def _with_parameter(tensor: Tensor) -> nn.Module:
    model = nn.Module()
    model.weight = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor)
    return model


@pytest.mark.parametrize("persistent", [True, False])
def test_a_buffer_without_data_is_refused_by_name(*, persistent: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].register_buffer("table", torch.empty(2, device="meta"), persistent=persistent)
    with pytest.raises(ConfigError, match=r"buffer '1\.table' has no data \(meta device\): initialise the model"):
        describe(model, torch.optim.SGD(model.parameters()))
    model[1] = nn.LazyBatchNorm1d(affine=False)
    with pytest.raises(ConfigError, match=r"buffer '1\.running_mean' has no size before the first forward"):
        describe(model, torch.optim.SGD(model.parameters()))


@pytest.mark.parametrize("what", ["parameter", "buffer", "attribute"])
def test_another_tensor_over_a_parameters_memory_is_refused_by_both_names(what: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    if what == "parameter":
        model[1].weight.data = model[0].weight.data
    elif what == "buffer":
        model[1].register_buffer("seen", model[0].weight.data)
    else:
        model[1].seen = model[0].weight.detach()
    other = "1.weight" if what == "parameter" else "1.seen"
    with pytest.raises(ConfigError, match=f"'0.weight' and '{other}' of the model share memory without being one"):
        describe(model, torch.optim.SGD(model.parameters()))


def test_a_frozen_parameter_may_share_its_memory() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[:2].requires_grad_(False)
    model[1].weight.data = model[0].weight.data
    assert describe(model, torch.optim.SGD(model[2].parameters())).shards


def test_a_lazy_module_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2))
    with pytest.raises(ConfigError, match="lazy"):
        describe(model, torch.optim.SGD(model.parameters()))


# --- flat buffers


def test_values_names_and_forward_stay_as_they_were() -> None:
    model, reference = _tied(), _tied()
    _state(model)
    mine, theirs = model.state_dict(), reference.state_dict()
    assert list(mine) == list(theirs)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert torch.equal(_loss(model), _loss(reference))


def test_writing_a_shard_changes_what_the_model_computes_with() -> None:
    model = _linear()
    state = _state(model)
    (shard,) = state.layout.shards
    state.parameters_of(shard).fill_(2.0)
    assert torch.equal(model.weight, torch.full((2, 2), 2.0)) and torch.equal(model.bias, torch.full((2,), 2.0))
    assert torch.equal(state.memory["float32"], torch.full((128,), 2.0))


def test_a_module_with_cached_weights_follows_a_split_tie() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.LSTM(4, 4), nn.LSTM(4, 4)
            self.second.weight_hh_l0 = self.first.weight_hh_l0

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.second(self.first(x)[0])[0].sum()
            return out

    model = Recurrent()
    state = _state(model)
    reports = _run(state, state.new_slot(), lambda: model(torch.ones(3, 1, 4)))
    assert [len(leaves) for _, leaves in reports] == [4, 4]


def test_gradients_equal_those_of_plain_torch_and_add_up_over_a_run() -> None:
    model, reference = _tied(), _tied()
    reference.head.weight = nn.Parameter(reference.emb.weight.detach().clone())
    state = _state(model)
    slot = state.new_slot()
    for seed in range(3):
        state.attach(slot)
        _loss(model, seed).backward()
        _loss(reference, seed).backward()
    layout = state.layout
    for name, parameter in reference.named_parameters():
        home = "head" if name == "head.weight" else next(s.block for s in layout.parameters if s.name == name)
        spec = "emb.weight" if name == "head.weight" else name
        leaves = (each for each in layout.leaves if layout.parameters[each.parameter].name == spec)
        leaf = next(each.index for each in leaves if layout.blocks[each.block] == home)
        assert torch.equal(slot.views[leaf], parameter.grad), name


def test_a_frozen_parameter_lies_in_a_shard_without_lanes() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    state = _state(model)
    frozen, trained = state.layout.shards
    assert frozen.lanes == () and state.layout.flats[frozen.flat].group == FROZEN
    assert torch.equal(state.parameters_of(frozen)[:4].view(2, 2), model[0].weight)
    reports = _run(state, state.new_slot(), lambda: model(torch.ones(1, 2)).sum())
    assert reports == [(0, frozenset()), (1, frozenset(leaf.index for leaf in state.layout.leaves_of(1)))]
    assert trained.lanes


def test_dtypes_lie_in_flats_of_their_own() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2, dtype=torch.float64)})
    state = _state(model)
    assert [whole.dtype for whole in state.memory.values()] == [torch.float32, torch.float64]
    assert state.new_slot().nbytes == 128 * 4 + 128 * 8


def test_slots_are_separate() -> None:
    model = _tied()
    state = _state(model)
    first, second = state.new_slot(), state.new_slot()
    _run(state, first, lambda: _loss(model))
    assert all(flat.abs().sum() == 0 for block in range(6) for flat in flats_of(second, block))
    assert any(flat.abs().sum() > 0 for flat in flats_of(first, 1)) and first.touched


def _bits(slot: GradientSlot, blocks: int) -> list[list[int]]:
    return [flat.view(torch.int32).tolist() for block in range(blocks) for flat in flats_of(slot, block)]


@pytest.mark.parametrize("is_check", [False, True])
def test_what_an_earlier_run_has_left_in_a_slot_counts_for_nothing_in_the_next(*, is_check: bool) -> None:
    """Of leaves that get no gradient, too: sums and digests read whole blocks."""
    model = Shared()
    state = _state(model)
    slot, fresh = state.new_slot(), state.new_slot()
    for view in slot.views.values():
        view.fill_(torch.nan)
    x = torch.randn(2, 3)
    for each in (slot, fresh):
        each.begin_run()
        if is_check:  # of no run of this member's: nothing is reported
            state.attach(each)
            model(x).sum().backward()
            state.detach()
        else:
            _run(state, each, lambda: model(x).sum())
    assert slot.digests() == fresh.digests()
    assert _bits(slot, 3) == _bits(fresh, 3)
    assert len(slot.touched) < len(slot.views)


def test_a_reported_block_has_zeros_where_no_gradient_came() -> None:
    model = Shared()
    state = _state(model)
    slot, at_report = state.new_slot(), dict[int, bool]()
    for view in slot.views.values():
        view.fill_(torch.nan)
    state.attach(slot)
    state.arm(lambda block, _: at_report.update({block: any(f.isnan().any() for f in flats_of(slot, block))}))
    model(torch.randn(2, 3)).sum().backward()
    state.finish()
    assert at_report == dict.fromkeys(range(3), False)


def test_the_first_gradient_of_a_run_has_the_bits_of_one_that_is_added_to_zeros() -> None:
    state = _state(nn.Linear(7, 77, bias=False))
    slot = state.new_slot()
    odd = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-45, 3.4e38, -1.0, 0.1, 1e-38])
    odd[-1:].view(torch.int32).fill_(-0x3FFFFF)  # a NaN with a sign and a payload
    gradient = odd.repeat(49).view(77, 7)
    slot.views[0].fill_(7.0)
    slot.land(0, gradient)
    expected = torch.zeros(77, 7).add_(gradient)
    assert slot.views[0].view(torch.int32).tolist() == expected.view(torch.int32).tolist()
    slot.land(0, gradient.to_sparse())
    assert torch.equal(slot.views[0].nan_to_num(), expected.nan_to_num())


def test_flats_hold_every_gradient_once() -> None:
    state = _state(_tied())
    slot = state.new_slot()
    counts = [sum(flat.numel() for flat in flats_of(slot, block)) for block in range(6)]
    assert sum(counts) * 4 == slot.nbytes
    assert counts[1] == counts[5] == 128  # the embedding and its alias in the head


# --- completion


def test_blocks_are_reported_during_backward_last_layer_first() -> None:
    model = _tied()
    state = _state(model)
    seen_before_end: list[int] = []
    _run(state, state.new_slot(), lambda: _loss(model))
    slot = state.new_slot()
    state.attach(slot)
    state.arm(lambda block, leaves: seen_before_end.append(block))
    _loss(model).backward()
    assert seen_before_end[:4] == [5, 4, 3, 2] and set(seen_before_end) == {0, 1, 2, 3, 4, 5}
    state.finish()
    assert len(seen_before_end) == 6


def test_reported_gradients_are_final() -> None:
    model = _tied()
    state = _state(model)
    _run(state, state.new_slot(), lambda: _loss(model))
    slot, at_report = state.new_slot(), dict[int, list[Tensor]]()
    state.attach(slot)
    state.arm(lambda block, _: at_report.update({block: [flat.clone() for flat in flats_of(slot, block)]}))
    _loss(model).backward()
    state.finish()
    for block, flats in at_report.items():
        assert all(torch.equal(then, now) for then, now in zip(flats, flats_of(slot, block), strict=True))


def test_only_an_armed_backward_reports() -> None:
    model = _tied()
    state = _state(model)
    reports: list[int] = []
    state.attach(state.new_slot())
    _loss(model).backward()
    state.arm(lambda block, _: reports.append(block))
    state.disarm()
    _loss(model).backward()
    assert reports == []
    with pytest.raises(RuntimeError, match="without arm"):
        state.finish()


class Shared(nn.Module):
    """`first` is entered twice, and lends its weight to the root's forward."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self._enter(self.first, x)
        x = self._enter(self.second, x)
        x = self._enter(self.first, x)
        return nn.functional.linear(x, self.first.weight)

    def _enter(self, block: nn.Module, x: Tensor) -> Tensor:
        if self.reentrant is None:
            out: Tensor = block(x)
            return out
        result: Tensor = checkpoint(block, x, use_reentrant=self.reentrant)
        return result


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_a_block_that_is_entered_twice_is_reported_once_and_final(reentrant: bool | None) -> None:
    torch.manual_seed(0)
    model = Shared(reentrant)
    state = _state(model)
    x = torch.randn(2, 3, requires_grad=True)
    for _ in range(3):
        slot, at_report = state.new_slot(), list[tuple[int, Tensor]]()

        def report(block: int, _: Any, slot: GradientSlot = slot, seen: list[tuple[int, Tensor]] = at_report) -> None:
            seen.append((block, flats_of(slot, block)[0].clone()))

        state.attach(slot)
        loss = model(x).square().sum()
        state.arm(report)
        loss.backward()
        state.finish()
        assert sorted(block for block, _ in at_report) == [0, 1, 2]
        assert all(torch.equal(then, flats_of(slot, block)[0]) for block, then in at_report)


def test_a_block_that_turns_reentrant_later_is_refused_with_a_sentence() -> None:
    model = Shared()
    state = _state(model)
    x = torch.randn(2, 3, requires_grad=True)
    _run(state, state.new_slot(), lambda: model(x).sum())
    model.reentrant = True
    model.forward = lambda x: model._enter(model.first, model._enter(model.first, x))  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=r"'first' got a gradient after its last.*use_reentrant=False"):
        _run(state, state.new_slot(), lambda: model(x).sum())
    state.disarm()


def test_leaves_without_a_gradient_are_not_reported_as_touched() -> None:
    model = Shared()
    state = _state(model)
    reports = dict(_second_run(state, state.new_slot(), lambda: model(torch.randn(2, 3)).sum()))
    assert reports[2] == frozenset()
    touched = state.layout.touched_parameters(reports[0] | reports[1] | reports[2])
    assert {state.layout.parameters[p].name.split(".")[0] for p in touched} == {"first", "second"}


def test_a_leaf_touched_in_an_earlier_micro_batch_of_the_run_counts() -> None:
    model = Shared()
    state = _state(model)
    slot = state.new_slot()
    state.attach(slot)
    model.unused(torch.randn(2, 3)).sum().backward()
    reports = dict(_run(state, slot, lambda: model(torch.randn(2, 3)).sum()))
    assert reports[2] == frozenset(leaf.index for leaf in state.layout.leaves_of(2))


# --- what user code does to .grad


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_between_micro_batches_does_no_harm(set_to_none: bool) -> None:
    model, reference = _tied(), _tied()
    state, undisturbed = _state(model), _state(reference)
    slot, expected = state.new_slot(), undisturbed.new_slot()
    for seed in range(3):
        model.zero_grad(set_to_none=set_to_none)
        state.attach(slot)
        _loss(model, seed).backward()
        state.detach()
        undisturbed.attach(expected)
        _loss(reference, seed).backward()
    for block in range(6):
        pairs = zip(flats_of(slot, block), flats_of(expected, block), strict=True)
        assert all(torch.equal(mine, theirs) for mine, theirs in pairs)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_gradient_that_lands_elsewhere_is_refused() -> None:
    model = _tied()
    state = _state(model)
    slot = state.new_slot()
    for _ in range(2):
        state.attach(slot)
        loss = _loss(model)
        model.zero_grad()
        if slot.touched:
            break
        loss.backward()  # nothing was there that it could have taken away
    with pytest.raises(ConfigError, match="did not land in its buffer"):
        loss.backward()
    state.attach(state.new_slot())
    with pytest.raises(ConfigError, match="create_graph"):
        _loss(model).backward(create_graph=True)


def test_a_parameter_that_was_moved_is_refused() -> None:
    model = _tied()
    state = _state(model)
    model.norm.double()
    with pytest.raises(ConfigError, match=r"'norm.weight' was replaced after prepare"):
        state.attach(state.new_slot())


def test_a_backward_of_the_users_own_leaves_the_slot_alone() -> None:
    model = _tied()
    state = _state(model)
    slot = state.new_slot()
    state.attach(slot)
    state.detach()
    _loss(model).backward()
    assert not slot.touched
    state.attach(slot)
    assert all(flat.abs().sum() == 0 for block in range(6) for flat in flats_of(slot, block))


def test_closing_takes_the_hooks_off() -> None:
    model = _tied()
    state = _state(model)
    slot = state.new_slot()
    state.attach(slot)
    state.close()
    _loss(model).backward()
    assert not slot.touched
    state.arm(lambda *_: None)
    with pytest.raises(RuntimeError, match="attach"):
        state.finish()


# --- digest


def test_the_parameters_digest_tells_bits_and_names() -> None:
    first, same = _state(_tied()), _state(_tied())
    assert first.parameters_digest() == same.parameters_digest()
    same.memory["float32"][3] = torch.nextafter(same.memory["float32"][3], torch.tensor(9.0))
    assert first.parameters_digest() != same.parameters_digest()
    named = [nn.Sequential(), nn.Sequential()]
    for model, name in zip(named, "ab", strict=True):
        model.add_module(name, nn.Linear(2, 2))
        nn.init.ones_(model[0].weight)
        nn.init.ones_(model[0].bias)
    assert len({_state(model).parameters_digest() for model in named}) == 2


@pytest.mark.parametrize("kind", ["mps", "vulkan", "fpga"])
def test_a_device_without_streams_is_refused_by_name(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"'head.weight' is on {kind}:0, and models train on CPUs and on"):
        check_device("head.weight", torch.device(kind, 0))


@pytest.mark.parametrize("what", ["weight", "running_mean"])
def test_devices_of_parameters_and_buffers_are_looked_at(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.BatchNorm1d(4, affine=what == "weight", track_running_stats=what != "weight")
    model = nn.Sequential(nn.Identity(), layer)
    looked_at: list[str] = []
    monkeypatch.setattr("elastrain.runtime.model.partition.check_device", lambda name, _: looked_at.append(name))
    with suppress(ConfigError):
        describe(model, torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))
    assert f"1.{what}" in looked_at
