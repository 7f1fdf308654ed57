"""The sharded optimizer: which classes it takes, what it reads from the user's object, what it leaves alone."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from elastrain.errors import ConfigError
from elastrain.job.layout import Layout, ParameterSpec, cut
from elastrain.runtime.model.optimizer import PieceOptimizer
from elastrain.snapshot.shard_state import ShardState

torch.set_num_threads(1)


def _layout(*numels: int, shard_numel: int = 128) -> Layout:
    specs = [
        ParameterSpec(name=f"p{i}", block="b", shape=(n,), dtype="float32", group=0, requires_grad=True)
        for i, n in enumerate(numels)
    ]
    return cut(specs, blocks=["b"], shard_numel=shard_numel)


def _parameters(layout: Layout) -> list[Tensor]:
    return [torch.nn.Parameter(torch.ones(spec.shape)) for spec in layout.parameters]


def _pieces(make: Any, layout: Layout, **options: Any) -> PieceOptimizer:
    return PieceOptimizer(make(_parameters(layout)), layout, **options)


def _fresh(optimizer: PieceOptimizer, layout: Layout) -> list[ShardState]:
    return [optimizer.create(shard, torch.ones(shard.numel)) for shard in layout.shards]


def _apply(optimizer: PieceOptimizer, states: list[ShardState], **options: Any) -> None:
    items = [(state, torch.ones_like(state.parameters), options.get("touched")) for state in states]
    optimizer.apply(items, hyper=optimizer.hyperparameters(), factors=options.get("factors", ()))


class Vouched(torch.optim.SGD):
    """A user's own elementwise class."""


class Careless(torch.optim.SGD):
    """Writes into the gradients that it is given."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(2)
        return super().step(closure)


class Unmakeable(torch.optim.Optimizer):
    def __init__(self, params: Any, secret: int) -> None:
        super().__init__(params, {"lr": secret})


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (torch.optim.LBFGS, "LBFGS needs a closure"),
        (torch.optim.SparseAdam, "sparse gradients"),
        (torch.optim.Adafactor, "Adafactor is not known to update each element"),
        (Vouched, "vouch for it with elementwise=True"),
        (lambda p: torch.optim.SGD(p, differentiable=True), "differentiable"),
    ],
)
def test_unsuitable_optimizers_are_refused_with_one_sentence(make: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        _pieces(make, _layout(10))


def test_a_vouched_class_is_taken() -> None:
    layout = _layout(10)
    optimizer = _pieces(lambda p: Vouched(p, lr=0.5), layout, elementwise=True)
    states = _fresh(optimizer, layout)
    _apply(optimizer, states)
    assert states[0].parameters.tolist() == [0.5] * 64


def test_a_class_that_can_not_be_made_again_is_refused() -> None:
    with pytest.raises(ConfigError, match="Unmakeable could not be made again"):
        _pieces(lambda p: Unmakeable(p, 3), _layout(10), elementwise=True)


def test_hyperparameters_are_plain_and_follow_the_users_object() -> None:
    layout = _layout(10)
    user = torch.optim.AdamW(_parameters(layout), lr=torch.tensor(0.5), foreach=False)
    optimizer = PieceOptimizer(user, layout)
    (group,) = optimizer.hyperparameters()
    assert json.loads(json.dumps(group)) == group
    assert group["lr"] == 0.5 and group["betas"] == [0.9, 0.999] and "params" not in group
    user.param_groups[0]["lr"] = 0.25
    assert optimizer.hyperparameters()[0]["lr"] == 0.25
    user.param_groups[0]["lr"] = object()
    with pytest.raises(ConfigError, match="hyperparameter 'lr' must be a number"):
        optimizer.hyperparameters()


def test_names_of_parameters_are_no_hyperparameters() -> None:
    layout = _layout(10)
    user = torch.optim.SGD([("w", parameter) for parameter in _parameters(layout)])
    assert "param_names" not in PieceOptimizer(user, layout).hyperparameters()[0]


@pytest.mark.parametrize(
    ("make", "fused"),
    [
        (torch.optim.AdamW, True),
        (torch.optim.Adam, True),
        (torch.optim.SGD, True),
        (torch.optim.Adagrad, True),
        (torch.optim.RMSprop, None),
        (lambda p: torch.optim.AdamW(p, foreach=True), None),
        (lambda p: torch.optim.AdamW(p, foreach=False), None),
        (lambda p: torch.optim.AdamW(p, fused=False), False),
    ],
)
def test_fused_is_used_where_the_class_has_it_and_the_user_chose_nothing(make: Any, fused: bool | None) -> None:
    assert _pieces(make, _layout(10)).hyperparameters()[0].get("fused") is fused


def test_factors_are_multiplied_one_after_another() -> None:
    layout = _layout(64)
    states = {}
    for factors in ((), (0.1, 0.3), (0.3, 0.1), (0.1 * 0.3,)):
        optimizer = _pieces(lambda p: torch.optim.SGD(p, lr=1.0), layout)
        gradient = torch.linspace(0.1, 1, 64)
        state = optimizer.create(layout.shards[0], torch.zeros(64))
        optimizer.apply([(state, gradient, None)], hyper=optimizer.hyperparameters(), factors=factors)
        states[factors] = state.parameters
        expected = gradient.clone()
        for factor in factors:
            expected = expected * factor
        assert torch.equal(state.parameters, -expected)
    assert not torch.equal(states[(0.1, 0.3)], states[(0.1 * 0.3,)])


@pytest.mark.parametrize("cls", [torch.optim.SGD, Careless])
def test_gradients_are_neither_written_nor_kept(cls: Any) -> None:
    layout = _layout(64)
    optimizer = _pieces(lambda p: cls(p, lr=1.0, momentum=0.9, weight_decay=0.1), layout, elementwise=True)
    (state,) = _fresh(optimizer, layout)
    gradient = torch.randn(64)
    before = gradient.clone()
    for _ in range(2):
        optimizer.apply([(state, gradient, None)], hyper=optimizer.hyperparameters())
        assert torch.equal(gradient, before)
    kept = state.digest()
    gradient.zero_()
    optimizer.apply([(_fresh(optimizer, layout)[0], gradient, None)], hyper=optimizer.hyperparameters())
    assert state.digest() == kept, "the state refers to scratch"


def test_untouched_parameters_stay_as_they_are() -> None:
    layout = _layout(64, 64)
    optimizer = _pieces(lambda p: torch.optim.AdamW(p, lr=1.0, weight_decay=0.5), layout)
    (state,) = _fresh(optimizer, layout)
    _apply(optimizer, [state], touched={1})
    assert state.parameters[:64].tolist() == [1.0] * 64 and state.pieces[0] == {}
    assert (state.parameters[64:] != 1).all() and float(state.pieces[1]["step"]) == 1  # type: ignore[arg-type]


def test_one_call_steps_pieces_of_different_ages() -> None:
    """Fused SGD with a momentum refuses a list of tensors of which only some have one."""
    layout = _layout(64, 64)
    optimizer = _pieces(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), layout)
    (state,) = _fresh(optimizer, layout)
    _apply(optimizer, [state], touched={0})
    _apply(optimizer, [state])
    torch.testing.assert_close(state.parameters[0], torch.tensor(1 - 0.1 - 0.19))
    torch.testing.assert_close(state.parameters[64], torch.tensor(1 - 0.1))


def test_a_member_that_owned_nothing_can_take_over_a_state() -> None:
    layout = _layout(64)

    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(parameters, lr=0.1, initial_accumulator_value=0.5)

    first, second = _pieces(make, layout), _pieces(make, layout)
    states = _fresh(first, layout)
    assert states[0].pieces[0]["sum"].tolist() == [0.5] * 64  # type: ignore[union-attr]
    second.apply([], hyper=second.hyperparameters())
    meta, tensors = states[0].pack()
    taken = ShardState.unpack(meta, [tensor.clone() for tensor in tensors])
    for _ in range(2):
        _apply(first, states)
        _apply(second, [taken])
    assert taken.digest() == states[0].digest()


def test_the_users_object_keeps_no_state_and_its_schedulers_do_not_warn() -> None:
    layout = _layout(64)
    user = torch.optim.Adagrad(_parameters(layout))
    optimizer = PieceOptimizer(user, layout)
    assert not user.state
    scheduler = torch.optim.lr_scheduler.ExponentialLR(user, 0.5)
    states = _fresh(optimizer, layout)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            _apply(optimizer, states)
            scheduler.step()
    assert optimizer.hyperparameters()[0]["lr"] == 0.0025 and not user.state


def test_hyperparameters_given_win_over_those_of_the_users_object() -> None:
    """A backup applies with what the commit recorded, not with what its own scheduler has reached."""
    layout = _layout(64)
    optimizer = _pieces(lambda p: torch.optim.SGD(p, lr=0.5), layout)
    (state,) = _fresh(optimizer, layout)
    hyper = json.loads(json.dumps(optimizer.hyperparameters()))
    optimizer._facade.param_groups[0]["lr"] = 9.0
    optimizer.apply([(state, torch.ones(64), None)], hyper=hyper)
    assert state.parameters.tolist() == [0.5] * 64


def test_a_group_without_parameters_does_no_harm() -> None:
    specs = [ParameterSpec(name="w", block="b", shape=(64,), dtype="float32", group=1, requires_grad=True)]
    layout = cut(specs, blocks=["b"])
    groups = [{"params": []}, {"params": [torch.nn.Parameter(torch.ones(64))], "lr": 0.5}]
    optimizer = PieceOptimizer(torch.optim.SGD(groups, lr=9.0), layout)
    states = _fresh(optimizer, layout)
    _apply(optimizer, states)
    assert states[0].parameters.tolist() == [0.5] * 64


def test_a_frozen_shard_is_left_alone() -> None:
    specs = [
        ParameterSpec(name=name, block="b", shape=(64,), dtype="float32", group=0, requires_grad=name == "w")
        for name in "wf"
    ]
    layout = cut(specs, blocks=["b"])
    optimizer = PieceOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(64))], lr=0.5), layout)
    states = _fresh(optimizer, layout)
    _apply(optimizer, states)
    assert sorted(state.parameters[0].item() for state in states) == [0.5, 1.0]
