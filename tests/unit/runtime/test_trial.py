"""Optimizers that are vouched for with elementwise=True are tried out, and refused by name with what differs."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from elastrain.errors import ConfigError
from elastrain.job.layout import ParameterSpec, cut
from elastrain.runtime.model.optimizer import PieceOptimizer

SHAPES = ((8, 40), (40,), (300, 3), (7,))


class Own(Optimizer):
    """Adam as many outside of torch write it, with one habit each."""

    def __init__(self, params: Any, lr: float = 1e-2, betas: Any = (0.9, 0.99), eps: float = 1e-8, habit: str = ""):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "habit": habit})
        self.total = 0
        self.is_flat = habit == "argument"

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        habit = self.defaults["habit"]
        if habit == "closure":
            closure()
        if habit in ("attribute", "late", "counts for nothing"):
            self.total += 1
        if habit == "table":
            self.table = {"step": self.total, "before": getattr(self, "table", None)}
        if habit == "defaults":
            self.defaults["eps"] *= 2
        if habit == "another key":
            self.state["all"]["step"] = self.state["all"].get("step", 0) + 1
        if habit == "norm of all":
            norm = sum(float(p.grad.square().sum()) for g in self.param_groups for p in g["params"]) ** 0.5
        for group in self.param_groups:
            if habit in ("group", "tensor", "rate"):
                key, by = ("lr", group["lr"] * -0.1) if habit == "rate" else ("step", 1)
                group[key] = group.get(key, torch.zeros(()) if habit == "tensor" else 0) + by
            if habit == "estimate":
                group["d"] = max(group.get("d", 0.0), *(float(p.grad.max()) for p in group["params"]))
            for p in group["params"]:
                if p.grad is not None:
                    self._move(p, p.grad, group, habit, norm if habit == "norm of all" else 1.0)

    def _move(self, p: Tensor, gradient: Tensor, group: dict[str, Any], habit: str, norm: float) -> None:
        state = self.state[p]
        if not state:
            state["m"], state["count"] = torch.zeros_like(p), 0
        state["count"] += 1
        if habit == "centralised" and p.ndim > 1:
            gradient = gradient - gradient.mean(dim=tuple(range(1, p.ndim)), keepdim=True)
        if habit == "layerwise":
            gradient = gradient / gradient.norm()
        if habit == "blocks":  # as 8-bit states
            gradient = gradient / gradient.abs().max() if p.numel() >= 4096 else gradient
        if habit == "noise":
            gradient = gradient + torch.randn_like(gradient)
        if habit == "position":
            gradient = gradient * torch.linspace(1, 2, p.numel()).view(p.shape)
        state["m"].lerp_(gradient / norm, 1 - group["betas"][0])
        count = {"group": group.get("step"), "attribute": self.total}.get(habit, state["count"])
        rate = group["lr"] * (group["d"] if habit == "estimate" else 1.0)
        rate *= 2 if habit == "late" and self.total > 1000 else 1
        if habit == "ndim" and p.ndim > 1:
            p.mul_(1 - rate)
        if habit == "Lion":
            p.add_(state["m"].sign(), alpha=-rate)
        else:
            p.add_(state["m"], alpha=-float(rate / (1 - group["betas"][1] ** count)))


class Renamed(torch.optim.AdamW):
    """A class of torch's, with a step of its own."""

    def step(self, closure: Any = None) -> Any:
        for p in (p for group in self.param_groups for p in group["params"]):
            p.grad.div_(p.grad.norm())
        return super().step(closure)


class Ahead(Optimizer):
    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner


def _parameters() -> list[torch.nn.Parameter]:
    torch.manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]


def _layout() -> Any:
    specs = [
        ParameterSpec(name=f"w{i}", block="b", shape=shape, dtype="float32", group=0, requires_grad=True)
        for i, shape in enumerate(SHAPES)
    ]
    return cut(specs, blocks=["b"])


def _prepared(habit: str, cls: Any = Own) -> PieceOptimizer:
    optimizer = cls(_parameters(), habit=habit) if cls is Own else cls(_parameters())
    return PieceOptimizer(optimizer, _layout(), elementwise=True)


@pytest.mark.parametrize("habit", ["", "group", "tensor", "rate", "Lion", "counts for nothing"])
def test_an_elementwise_optimizer_comes_to_the_values_of_plain_training(habit: str) -> None:
    plain, layout = Own(_parameters(), habit=habit), _layout()
    pieces = _prepared(habit)
    flat = torch.cat([torch.nn.functional.pad(p.detach().view(-1), (0, -p.numel() % 64)) for p in _parameters()])
    states = [pieces.create(s, flat[s.start : s.stop].clone()) for s in layout.shards]
    for number in range(5):
        own = torch.Generator().manual_seed(number)
        for group in plain.param_groups:
            for p in group["params"]:
                p.grad = torch.randn(p.shape, generator=own)
        whole = torch.cat([torch.nn.functional.pad(p.grad.view(-1), (0, -p.numel() % 64)) for p in _all(plain)])
        plain.step()
        for state, shard in zip(states, layout.shards, strict=True):  # each by itself, as on several members
            item = (state, whole[shard.start : shard.stop], None)
            pieces.apply([item], hyper=pieces.hyperparameters())
        pieces.committed(SimpleNamespace(skipped=False))  # type: ignore[arg-type]
    after = torch.cat([state.parameters for state in states])
    wanted = torch.cat([torch.nn.functional.pad(p.detach().view(-1), (0, -p.numel() % 64)) for p in _all(plain)])
    assert torch.allclose(after, wanted, rtol=1e-6, atol=1e-7)
    (group,), (mine,) = pieces.hyperparameters(), plain.param_groups
    assert {name: group.get(name) for name in pieces.counted} == {n: pytest.approx(mine[n]) for n in pieces.counted}
    assert pieces.counted == ({"lr"} if habit == "rate" else {"step"} if habit in ("group", "tensor") else set())


def _all(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


@pytest.mark.parametrize(
    ("habit", "why"),
    [
        ("attribute", "counts in its attribute 'total'"),
        ("late", "counts in its attribute 'total'"),
        ("table", "changes its attribute 'table'"),
        ("defaults", "changes its attribute 'defaults'"),
        ("another key", "keeps a state that belongs to no parameter"),
        ("estimate", "keeps 'd' in its groups, which depends on the parameters"),
        ("ndim", "looks at the shapes of parameters"),
        ("centralised", "looks at the shapes of parameters"),
        ("layerwise", "lets elements or parameters depend on one another"),
        ("norm of all", "lets elements or parameters depend on one another"),
        ("blocks", "lets elements or parameters depend on one another"),
        ("position", "lets elements or parameters depend on one another"),
        ("noise", "draws random numbers"),
        ("closure", "cannot step pieces of parameters by itself"),
    ],
)
def test_what_was_vouched_for_and_is_not_elementwise_is_refused_by_name(habit: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"Own was vouched for with elementwise=True, but it {why}"):
        _prepared(habit)


def test_a_class_derived_from_torchs_is_tried_too() -> None:
    with pytest.raises(ConfigError, match=r"Renamed was vouched for .* depend on one another"):
        _prepared("", Renamed)
    with pytest.raises(ConfigError, match="Renamed is not known to update each element by itself"):
        PieceOptimizer(Renamed(_parameters()), _layout())


def test_a_wrapper_and_a_step_that_was_replaced_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"Ahead could not be made again .*not so a wrapper of another"):
        PieceOptimizer(Ahead(torch.optim.SGD(_parameters(), lr=0.1)), _layout(), elementwise=True)
    optimizer = torch.optim.SGD(_parameters(), lr=0.1)
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign, assignment]
    with pytest.raises(ConfigError, match=r"optimizer.step of this SGD was replaced"):
        PieceOptimizer(optimizer, _layout())


def test_the_trial_leaves_no_trace() -> None:
    optimizer = Own(_parameters(), habit="group")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    calls: list[object] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    before = [p.detach().clone() for p in _all(optimizer)]
    generators = torch.get_rng_state(), random.getstate()
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    PieceOptimizer(optimizer, _layout(), elementwise=True)
    assert [torch.equal(p, was) for p, was in zip(_all(optimizer), before, strict=True)] == [True] * 4
    assert torch.equal(torch.get_rng_state(), generators[0]) and random.getstate() == generators[1]
    assert [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups] == groups
    assert not calls and not optimizer.state and optimizer.total == 0 and scheduler.last_epoch == 0


def test_what_the_constructor_kept_beside_its_defaults_counts_in_shards_too() -> None:
    optimizer = Own(_parameters())
    optimizer.is_flat = True
    pieces = PieceOptimizer(optimizer, _layout(), elementwise=True)
    assert pieces._inner.is_flat  # type: ignore[attr-defined]
