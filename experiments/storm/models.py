"""The models and data of cases, built from values alone; nothing of elastrain comes in here but through the script."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LRScheduler,
    OneCycleLR,
    StepLR,
)
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

from experiments.storm.cases import Case, Model, Training

FEATURES, CLASSES, CONTEXT, PAD = 16, 31, 9, 0
CHANNELS = 8

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}

MEMBER = os.environ.get("ELASTRAIN_MEMBER", "")
"""Empty alone."""


def sleep_ms(ms: float, *, uneven: bool) -> None:
    """Wait, in members only; where times are uneven, up to three times as long."""
    if MEMBER and ms:
        time.sleep(ms / 1000 * (1 + int(MEMBER.removeprefix("m")) % 3 if uneven else 1))


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Inputs and labels, drawn from the generators that the loader seeds per sample."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def __len__(self) -> int:
        return self._model.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self._model.shape == "token":
            words = torch.randint(1, CLASSES, (CONTEXT + 1,))
            words[1 + int(torch.randint(1, CONTEXT, ())) :] = PAD
            return words[:-1], words[1:]
        label = torch.tensor(1 + index % (CLASSES - 1))
        if self._model.shape == "image":
            return torch.randn(1, self._model.image, self._model.image), label
        return torch.randn(FEATURES), label


class _Slow(torch.autograd.Function):
    """Passes on what it gets; its backward takes a while."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, ms: float, uneven: bool) -> Tensor:
        ctx.wait = ms, uneven
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        sleep_ms(ctx.wait[0], uneven=ctx.wait[1])
        return grads[0], None, None


class _Stem(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.shape = model.shape
        if model.shape == "token":
            self.embedding = nn.Embedding(CLASSES, model.width)
        elif model.shape == "image":
            self.conv = nn.Conv2d(1, CHANNELS, 7, padding=3)
            self.norm = nn.BatchNorm2d(CHANNELS) if model.norm == "batch" else nn.Identity()
            self.out = nn.Linear(CHANNELS * 4, model.width)
        else:
            self.entry = nn.Linear(FEATURES, model.width)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.shape == "token":
            return self.embedding(inputs)
        if self.shape == "image":
            seen = self.norm(self.conv(inputs)).relu()
            return self.out(nn.functional.adaptive_avg_pool2d(seen, 2).flatten(1))
        return self.entry(inputs).tanh()


class _Layer(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        norms = {"none": nn.Identity, "layer": nn.LayerNorm, "batch": nn.BatchNorm1d}
        self.norm = norms[model.norm](model.width)
        self.linear = nn.Linear(model.width, model.width)
        self.dropout = nn.Dropout(model.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        flat = hidden.flatten(0, -2)
        return hidden + self.dropout(nn.functional.gelu(self.linear(self.norm(flat)))).view_as(hidden)


class Net(nn.Module):
    """A stem, layers and a head, with what the case asks for."""

    def __init__(self, model: Model, training: Training) -> None:
        super().__init__()
        self._model, self._training = model, training
        self.stem = _Stem(model)
        self.layers = nn.ModuleList(_Layer(model) for _ in range(model.depth))
        if model.sometimes:
            self.detour = nn.Linear(model.width, model.width)
        if model.unused:
            self.unused = nn.Linear(model.width, 7)
        if model.empty:
            self.empty = nn.Parameter(torch.empty(0))
        self.head = nn.Linear(model.width, CLASSES, bias=not model.tied)
        if model.tied:
            self.head.weight = self.stem.embedding.weight
        for parameter in self._frozen():
            parameter.requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self._slowly("first", self.stem(inputs))
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False) if self._model.checkpointing else layer(hidden)
        if self._model.sometimes and float(hidden.detach().float().sum()) > 0:
            hidden = hidden + self.detour(hidden)
        return self._slowly("last", self.head(hidden))

    def _slowly(self, where: str, values: Tensor) -> Tensor:
        slow = self._training.slow in (where, "both")
        return _Slow.apply(values, self._training.slow_ms, self._training.uneven) if slow else values

    def _frozen(self) -> list[nn.Parameter]:
        if self._model.frozen == "first" and not self._model.tied:
            return list(self.stem.parameters())
        if self._model.frozen == "middle":
            return list(self.layers[len(self.layers) // 2].parameters())
        return []


def build(case: Case) -> Net:
    """Draws from the default generators, which `elastrain.init` has seeded."""
    return Net(case.model, case.training).to(DTYPES[case.model.dtype])


def build_optimizer(net: nn.Module, training: Training) -> Optimizer:
    trained = [p for p in net.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [{"params": trained}]
    if training.groups == 2:
        groups = [
            {"params": [p for p in trained if p.dim() > 1]},
            {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
        ]
    made: dict[str, Callable[[], Optimizer]] = {
        "sgd": lambda: torch.optim.SGD(groups, lr=0.02),
        "momentum": lambda: torch.optim.SGD(groups, lr=0.01, momentum=0.9, weight_decay=1e-3, nesterov=True),
        "adamw": lambda: torch.optim.AdamW(groups, lr=3e-3),
        "amsgrad": lambda: torch.optim.Adam(groups, lr=3e-3, amsgrad=True),
    }
    return made[training.optimizer]()


def build_scheduler(optimizer: Optimizer, training: Training) -> LRScheduler | None:
    made: dict[str, Callable[[], LRScheduler]] = {
        "cosine": lambda: CosineAnnealingLR(optimizer, training.steps),
        "onecycle": lambda: OneCycleLR(optimizer, 0.01, total_steps=training.steps + 1),
        "step": lambda: StepLR(optimizer, 7, 0.8),
        "warmup": lambda: LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20)),
    }
    return made[training.scheduler]() if training.scheduler in made else None


def drawn(training: Training) -> float:
    """A number from one of the default generators; the same on every member if it is asked for once per step."""
    draws: dict[str, Callable[[], float]] = {
        "python": random.random,
        "numpy": lambda: float(np.random.rand()),
        "torch": lambda: float(torch.rand(())),
    }
    return draws[training.draws]() if training.draws in draws else 1.0


def as_input(inputs: Tensor, model: Model) -> Tensor:
    """Words stay whole numbers."""
    return inputs.to(DTYPES[model.dtype]) if inputs.is_floating_point() else inputs


def loss_of(outputs: Tensor, labels: Tensor, training: Training) -> tuple[Tensor, float | Tensor]:
    """The mean loss over what counts, and the weight with which the micro-batch enters the step."""
    wanted = labels.flatten()
    loss = nn.functional.cross_entropy(_at_least_float32(outputs.flatten(0, -2)), wanted, ignore_index=PAD)
    counted = wanted.ne(PAD).sum()
    return loss, counted if training.weight == "tensor" else float(counted)


def _at_least_float32(values: Tensor) -> Tensor:
    return values.float() if values.dtype == torch.bfloat16 else values
