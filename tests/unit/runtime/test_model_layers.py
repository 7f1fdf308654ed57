"""What a loop changes in layers reaches newcomers and is compared; what forwards change is their own business."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastrain.errors import ConfigError
from elastrain.runtime.loop_state.layers import Layers


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(2, 2)
        self.drop = nn.Dropout(0.1)
        self.norm = nn.BatchNorm1d(2)
        self.temperature = 1.0
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.temperature *= 0.5
        return self.norm(self.drop(self.entry(x)))


def _freeze(net: Net) -> None:
    net.drop.p = 0.5
    net.norm.momentum = 0.3
    net.temperature = 2.0
    net.entry.requires_grad_(False)
    net.drop.eval()


def test_a_newcomer_gets_what_the_loop_has_changed_so_far() -> None:
    ours, theirs = Net(), Net()
    there, here = Layers(ours), Layers(theirs)
    there.note()
    assert there.changes == {}
    _freeze(ours)
    there.note()
    here.load(there.changes)
    assert (theirs.drop.p, theirs.norm.momentum, theirs.temperature) == (0.5, 0.3, 2.0)
    assert not theirs.drop.training
    assert theirs.norm.training
    assert [q.requires_grad for q in theirs.parameters()] == [False, False, True, True]
    assert here.changes == there.changes
    assert here.digest() == there.digest()
    here.note()
    assert here.changes == there.changes


def test_what_a_forward_changes_is_not_the_loops_doing() -> None:
    net = Net()
    layers = Layers(net)
    layers.note()
    net(torch.zeros(2, 2))
    layers.settle()
    net.calls += 1  # by an evaluation of one member, between two steps
    layers.note()
    assert layers.changes == {}


def test_an_evaluation_between_steps_leaves_no_trace() -> None:
    net = Net()
    layers = Layers(net)
    net.eval()
    net.train()
    layers.note()
    assert layers.changes == {}
    before = layers.digest()
    net.eval()
    assert layers.digest() != before


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("calls", len),
        ("calls", [torch.zeros(2)]),
        ("calls", object()),
        ("calls", ...),
        ("drop", nn.ReLU()),
        ("drop", ...),
    ],
)
def test_what_could_not_be_given_to_a_newcomer_is_refused_by_name(name: str, value: Any) -> None:
    net = Net()
    layers = Layers(net)
    if value is ...:
        delattr(net, name)
    else:
        setattr(net, name, value)
    with pytest.raises(ConfigError, match=rf"'{name}' of the model was (set to a \w+|removed) while training"):
        layers.note()


@pytest.mark.parametrize("kind", ["a backward hook", "a forward hook", "on a parameter", "on all modules"])
def test_hooks_that_the_loops_of_others_have_hung_up_must_be_there_too(kind: str) -> None:
    """They are code, and no newcomer gets them: it would train with other gradients."""

    def hang(net: Net) -> Any:
        if kind == "on all modules":
            return torch.nn.modules.module.register_module_forward_pre_hook(lambda *_: None)
        if kind == "on a parameter":
            return net.entry.weight.register_hook(lambda gradient: gradient * 2)
        register = net.entry.register_full_backward_hook if "back" in kind else net.entry.register_forward_hook
        return register(lambda *_: None)

    ours, theirs = Net(), Net()
    there, here = Layers(ours), Layers(theirs)
    before = there.digest()
    hook = hang(ours)
    there.note()
    there.check_hooks()
    hook.remove()
    assert there.digest() == before, "checkpoints of earlier versions have it without hooks"
    here.load(there.changes)
    here.note()
    with pytest.raises(ConfigError, match=r"the hooks of .* are 0 on this member and 1 .* before the loop over"):
        here.check_hooks()
    mine = hang(theirs)
    here.check_hooks()
    mine.remove()


def test_hooks_that_a_forward_hangs_up_are_its_own_business() -> None:
    net = Net()
    layers = Layers(net)
    net.entry.register_forward_hook(lambda *_: None)
    layers.settle()
    layers.note()
    assert layers.changes == {}


class Custom(nn.Module):
    """What ordinary modules keep beside their parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.register_buffer("mask", torch.ones(2))
        self.register_buffer("scale", torch.ones(()), persistent=False)
        self.register_buffer("none", None)
        self.is_narrow = False
        self.depth, self.mode, self._private = 3, "wide", 0
        self.rates = [0.1, 0.2]
        self.table = {"a": 1, 2: (3, None)}
        self.plain = torch.ones(2)
        self.config = SimpleNamespace(temperature=1.0, act=len)
        self.calls = 0
        self.held: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.held = x
        return self.first(x)


def _set_all(net: Custom) -> None:
    net.is_narrow, net.depth, net.mode, net._private = True, 1, "narrow", 7
    net.rates[0] = 0.5
    net.table["b"] = 2
    net.config.temperature = 0.5
    net.new = [1, 2]  # type: ignore[assignment]
    net.mask[0] = 0
    net.scale.mul_(2)
    net.none = torch.arange(3)
    net.plain = torch.zeros(3, dtype=torch.float64)
    net.register_buffer("late", torch.full((2,), 5.0))


def _move(there: Layers, here: Layers) -> None:
    here.load(json.loads(json.dumps(there.changes)), sorted(there.untold))
    here.load_state_dict(there.state_dict())


def _layers(net: nn.Module) -> Layers:
    layers = Layers(net)
    layers.begin()
    return layers


def _step(layers: Layers, body: Callable[[], object]) -> None:
    """One step: `body` is what the script does among the micro-batches."""
    layers.note()
    layers.enter()
    body()
    layers.settle()


def test_a_newcomer_gets_whatever_the_loop_has_set_in_modules_of_the_scripts_own() -> None:
    ours, theirs = Custom(), Custom()
    there, here = _layers(ours), _layers(theirs)
    assert list(there.told()) == ["buffers"]
    _set_all(ours)
    there.note()
    _move(there, here)
    here.note()
    assert here.told() == there.told()
    assert len(there.told()) == 14
    for name in ("is_narrow", "depth", "mode", "_private", "rates", "table", "new"):
        assert getattr(theirs, name) == getattr(ours, name), name
    assert theirs.config.temperature == 0.5
    for name in ("mask", "scale", "none", "plain", "late"):
        assert torch.equal(getattr(theirs, name), getattr(ours, name)), name
        assert getattr(theirs, name).dtype is getattr(ours, name).dtype
    ours.mask[0] = 3
    assert theirs.mask[0] == 0, "copies"


def test_members_that_differ_in_a_buffer_or_switch_tell_its_name() -> None:
    nets = Custom(), Custom()
    one, two = (_layers(net) for net in nets)
    nets[1].mask.data.mul_(2)
    nets[0].is_narrow = True
    for layers in (one, two):
        layers.note()
    told = one.told(), two.told()
    differing = {name for name in {**told[0], **told[1]} if told[0].get(name) != told[1].get(name)}
    assert differing >= {"'mask' of the model", "'is_narrow' of the model"}


def test_buffers_that_scripts_made_otherwise_differ_from_the_first_step_on() -> None:
    nets = Custom(), Custom()
    nets[1].mask.mul_(2)
    one, two = (_layers(net).told() for net in nets)
    assert one != two and list(one) == ["buffers"]


@pytest.mark.parametrize("change", ["in place", "replaced"])
def test_a_persistent_buffer_that_changes_among_the_micro_batches_is_refused_by_name(change: str) -> None:
    net = Custom()
    layers = _layers(net)

    def body() -> None:
        net(torch.ones(1, 2))
        if change == "in place":
            net.mask += 1
        else:
            net.mask = torch.zeros(2)

    with pytest.raises(ConfigError, match="the loop, among its micro-batches, changes buffer 'mask'"):
        _step(layers, body)


@pytest.mark.parametrize("where", ["forward", "body", "step"])
def test_a_number_that_counts_micro_batches_is_refused_and_one_that_counts_steps_is_not(where: str) -> None:
    net = Custom()
    layers = _layers(net)

    def count(*_: object) -> None:
        net.calls += 2

    if where == "forward":
        net.first.register_forward_hook(count)
    layers.note()

    def body() -> None:
        for _ in range(2):
            net(torch.ones(1, 2))
            if where == "body":
                count()

    if where == "step":
        for _ in range(5):
            count()
            _step(layers, body)
        assert layers.told()["'calls' of the model"]
        return
    _step(layers, body)
    with pytest.raises(ConfigError, match=r"'calls' of the model counts micro-batches \(0, 2, 4, 6\)"):
        _step(layers, body)


def test_caches_of_forwards_and_what_is_handed_to_them_part_no_members() -> None:
    nets = Custom(), Custom()
    one, two = (_layers(net) for net in nets)
    for length in (5, 9, 6):
        for net, layers, count in ((nets[0], one, 2), (nets[1], two, 0)):

            def body(net: Custom = net, count: int = count, length: int = length) -> None:
                for _ in range(count):
                    net.first.hint = torch.ones(length)
                    net.depth = length
                    net(torch.ones(length, 2))

            _step(layers, body)
            net.eval()
            net(torch.ones(1, 2))
            net.train()
    assert one.told() == two.told()
    assert one.of_forwards == {"held", "first.hint"}


def test_a_switch_that_is_set_among_the_micro_batches_is_carried_too() -> None:
    ours, theirs = Custom(), Custom()
    there, here = _layers(ours), _layers(theirs)

    def body() -> None:
        ours.is_narrow = True
        ours(torch.ones(1, 2))

    _step(there, body)
    _move(there, here)
    assert theirs.is_narrow
    assert here.told() == there.told() and list(here.told()) == ["buffers"]


def test_a_copy_of_the_model_calls_no_hook_of_the_original() -> None:
    net = Custom()
    layers = _layers(net)
    other = copy.deepcopy(net)
    layers.close()
    assert not net._forward_hooks and not net._forward_pre_hooks
    other(torch.ones(1, 2))
