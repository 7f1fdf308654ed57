"""What a loop changes in layers reaches newcomers and is compared; what forwards change is their own business."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastrain.errors import ConfigError
from elastrain.runtime.layers import Layers


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


@pytest.mark.parametrize("value", [torch.tensor(0.5), [0.5], torch.zeros(3)])
def test_what_could_not_be_given_to_a_newcomer_is_refused_by_name(value: Any) -> None:
    net = Net()
    layers = Layers(net)
    net.drop.p = value
    with pytest.raises(ConfigError, match=r"'drop.p' of the model was set to a (Tensor|list) while training"):
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
