"""Whatever the cutting and whoever owns what, pieces get the bits of the padded whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from elastrain.job.layout import ALIGN, Layout, ParameterSpec, cut, round_up
from elastrain.runtime.model.optimizer import PieceOptimizer
from elastrain.snapshot.shard_state import ShardState

torch.set_num_threads(1)

CLASSES: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "foreach": False}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "foreach": True}),
    ("Adam", {"lr": 0.01, "amsgrad": True}),
    ("Adam", {"lr": 0.01, "weight_decay": 0.1, "foreach": False}),
    ("AdamW", {"lr": 0.01, "weight_decay": 0.1}),
    ("AdamW", {"lr": 0.01, "maximize": True, "foreach": True}),
    ("Adamax", {"lr": 0.01}),
    ("NAdam", {"lr": 0.01}),
    ("RAdam", {"lr": 0.01}),
    ("Adagrad", {"lr": 0.01, "lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    ("Adagrad", {"lr": 0.01, "foreach": False}),
    ("Adadelta", {"lr": 0.5}),
    ("RMSprop", {"lr": 0.01, "momentum": 0.9, "centered": True}),
    ("Rprop", {"lr": 0.01}),
    ("ASGD", {"lr": 0.01, "t0": 1.0}),
]
IDS = [f"{name}-{'-'.join(map(str, kwargs.values()))}" for name, kwargs in CLASSES]


@st.composite
def plans(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "numels": draw(st.lists(st.integers(1, 700), min_size=1, max_size=5)),
        "shard_numel": ALIGN * draw(st.integers(1, 8)),
        "owners": draw(st.lists(st.integers(0, 2), min_size=1, max_size=7)),
        "untouched": draw(st.lists(st.sets(st.integers(0, 4)), min_size=3, max_size=3)),
        "lr_scales": draw(st.lists(st.sampled_from([1.0, 0.5, 0.1]), min_size=3, max_size=3)),
        "moves_at": draw(st.integers(0, 3)),
        "seed": draw(st.integers(0, 2**31)),
    }


def _layout(numels: list[int], shard_numel: int) -> Layout:
    specs = [
        ParameterSpec(
            name=f"p{i}",
            block="b",
            shape=(n,),
            dtype="float32",
            group=i % 2 if len(numels) > 1 else 0,
            requires_grad=True,
        )
        for i, n in enumerate(numels)
    ]
    return cut(specs, blocks=["b"], shard_numel=shard_numel)


def _optimizer(name: str, kwargs: dict[str, Any], parameters: list[Tensor]) -> torch.optim.Optimizer:
    """Two groups with different learning rates (one where there is one parameter)."""
    cls = getattr(torch.optim, name)
    groups: list[dict[str, Any]] = [{"params": parameters[0::2]}]
    if len(parameters) > 1:
        groups.append({"params": parameters[1::2], "lr": kwargs["lr"] / 3})
    made = cls(groups, **kwargs)
    assert isinstance(made, torch.optim.Optimizer)
    return made


def _padded(numel: int, generator: torch.Generator) -> Tensor:
    whole = torch.zeros(round_up(numel))
    whole[:numel] = torch.randn(numel, generator=generator)
    return whole


class Job:
    """Members that own shards; after `moves_at` steps every state is packed, sent and unpacked at another member."""

    def __init__(
        self, name: str, kwargs: dict[str, Any], layout: Layout, values: list[Tensor], owners: list[int]
    ) -> None:
        self.layout = layout
        facade = [torch.nn.Parameter(v.clone()) for v in values]
        self.facades = [_optimizer(name, kwargs, list(facade)) for _ in range(3)]
        self.members = [PieceOptimizer(facade, layout) for facade in self.facades]
        self.owners = [owners[s.index % len(owners)] for s in layout.shards]
        flats = _flats(layout, values)
        self.states = [
            self.members[self.owners[s.index]].create(s, flats[s.flat][s.start : s.stop].clone()) for s in layout.shards
        ]

    def step(self, gradients: list[Tensor], touched: set[int], factors: tuple[float, ...]) -> None:
        flats = _flats(self.layout, gradients)
        for index, member in enumerate(self.members):
            mine = [s for s in self.layout.shards if self.owners[s.index] == index]
            items = [(self.states[s.index], flats[s.flat][s.start : s.stop], touched) for s in mine]
            member.apply(items, hyper=member.hyperparameters(), factors=factors)

    def move(self) -> None:
        self.owners = [(owner + 1) % 3 for owner in self.owners]
        self.states = [_sent(state) for state in self.states]

    def values(self) -> list[Tensor]:
        flats = {f.index: torch.zeros(f.numel) for f in self.layout.flats}
        for shard, state in zip(self.layout.shards, self.states, strict=True):
            flats[shard.flat][shard.start : shard.stop] = state.parameters
        homes = {leaf.parameter: leaf for leaf in self.layout.leaves}
        return [
            flats[homes[i].flat][homes[i].start :][: round_up(spec.numel)]
            for i, spec in enumerate(self.layout.parameters)
        ]


def _sent(state: ShardState) -> ShardState:
    meta, tensors = state.pack()
    return ShardState.unpack(meta, [tensor.clone() for tensor in tensors])


def _flats(layout: Layout, values: list[Tensor]) -> dict[int, Tensor]:
    flats = {f.index: torch.zeros(f.numel) for f in layout.flats}
    for leaf in layout.leaves:
        padded = values[leaf.parameter]
        flats[leaf.flat][leaf.start : leaf.start + padded.numel()] = padded
    return flats


@pytest.mark.parametrize(("name", "kwargs"), CLASSES, ids=IDS)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(plan=plans())
def test_pieces_equal_the_padded_whole_bit_for_bit(name: str, kwargs: dict[str, Any], plan: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(plan["seed"])
    values = [_padded(n, generator) for n in plan["numels"]]
    layout = _layout(plan["numels"], plan["shard_numel"])
    job = Job(name, kwargs, layout, values, plan["owners"])
    parameters = [torch.nn.Parameter(v.clone()) for v in values]
    fused = name in {"SGD", "Adam", "AdamW", "Adagrad"} and "foreach" not in kwargs
    whole = _optimizer(name, {**kwargs, **({"fused": True} if fused else {})}, list(parameters))
    factors = (0.5, 1.0 / 3.0)
    for step, (untouched, scale) in enumerate(zip(plan["untouched"], plan["lr_scales"], strict=True)):
        if step == plan["moves_at"]:
            job.move()
        for optimizer in (whole, *job.facades):
            for group in optimizer.param_groups:
                group["lr"] *= scale
        gradients = [_padded(n, generator) for n in plan["numels"]]
        touched = set(range(len(parameters))) - untouched
        given_gradients = [g.clone() for g in gradients]
        job.step(gradients, touched, factors)
        for mine, was in zip(gradients, given_gradients, strict=True):
            assert torch.equal(mine, was), "a given gradient was written"
        _whole_step(whole, list(parameters), gradients, touched, factors)
        for mine, theirs in zip(job.values(), parameters, strict=True):
            assert torch.equal(mine.view(torch.int32), theirs.detach().view(torch.int32))


def _whole_step(
    whole: torch.optim.Optimizer,
    parameters: list[Tensor],
    gradients: list[Tensor],
    touched: set[int],
    factors: tuple[float, ...],
) -> None:
    """One call per parameter: fused SGD refuses a list in which only some have a momentum."""
    groups = whole.param_groups
    members = [list(group["params"]) for group in groups]
    for index, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
        parameter.grad = gradient * factors[0] * factors[1] if index in touched else None
        for group, params in zip(groups, members, strict=True):
            group["params"] = [p for p in params if p is parameter]
        whole.step()
    for group, params in zip(groups, members, strict=True):
        group["params"] = params
