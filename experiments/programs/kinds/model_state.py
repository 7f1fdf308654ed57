"""Programs whose loop changes what a model has besides parameters: buffers, flags, numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from experiments.programs.program import CLASSES, WIDTH, Program

HIDDEN = 16


class Net(nn.Module):
    """A layer with a mask, a counter and a flag, all of which the forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, CLASSES)
        self.is_narrow = False
        self.scale = 1.0
        self.register_buffer("mask", torch.ones(HIDDEN))
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("passing", torch.ones(()), persistent=False)

    def forward(self, points: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(points)) * self.mask * (1 + self.steps / 10) * self.scale * self.passing
        return self.head(hidden * torch.linspace(0, 1, HIDDEN) if self.is_narrow else hidden)


class _Changed(Program):
    """A program that changes something of `Net`."""

    def make_model(self) -> nn.Module:
        return Net()

    def kept(self) -> Mapping[str, Any]:
        return {name: getattr(self.model, name) for name in ("is_narrow", "scale")}


class MaskOnce(_Changed):
    """A mask that is set in one step."""

    reported = True

    def before(self, step: Any) -> None:
        if step.number == 1:
            self.model.mask[:8] = 0


class MaskReplaced(_Changed):
    """A mask that is put in the other one's place in one step."""

    reported = True

    def before(self, step: Any) -> None:
        if step.number == 1:
            self.model.mask = torch.cat([torch.zeros(8), torch.ones(8)])


class CounterEach(_Changed):
    """A counter that grows behind each step."""

    reported = True

    def after(self, step: Any) -> bool | None:
        self.model.steps += 1
        return None

    def end(self) -> None:
        self.told["counter"] = float(self.model.steps)


class CountedInTheBody(_Changed):
    """Samples that are counted in a buffer in the body of the loop: no member sees all."""

    reported = True
    refused: Mapping[str, str] = {"job": "seen"}

    def make_model(self) -> nn.Module:
        model = Net()
        model.register_buffer("seen", torch.zeros(()))
        return model

    def body(self, step: Any, batch: Any) -> None:
        super().body(step, batch)
        self.model.seen += len(batch[0])

    def end(self) -> None:
        self.told["seen"] = float(self.model.seen)


class FlagOnce(_Changed):
    """A flag of the model that is set in one step."""

    reported = True

    def before(self, step: Any) -> None:
        if step.number == 1:
            self.model.is_narrow = True


class NumberEach(_Changed):
    """A number of the model that falls from step to step."""

    def after(self, step: Any) -> bool | None:
        self.model.scale *= 0.9
        return None


class PassingBuffer(_Changed):
    """A buffer that is not persistent, set in one step."""

    def before(self, step: Any) -> None:
        if step.number == 1:
            self.model.passing.fill_(0.5)

    def kept(self) -> Mapping[str, Any]:
        return {"passing": self.model.passing}


class ListOfNumbers(_Changed):
    """A list of the model that grows behind each step, and that the forward uses."""

    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.history: list[float] = []

        def forward(self, points: Tensor) -> Tensor:
            return super().forward(points) * (1 + len(self.history))

    def make_model(self) -> nn.Module:
        return self.Model()

    def after(self, step: Any) -> bool | None:
        self.model.history.append(float(step.number))
        return None

    def kept(self) -> Mapping[str, Any]:
        return {"history": self.model.history}


class _Normalised(Program):
    """Batch normalisation."""

    whole = 32
    micro = 8
    momentum: float | None = 0.1

    def make_model(self) -> nn.Module:
        norm = nn.BatchNorm1d(HIDDEN, momentum=self.momentum)
        return nn.Sequential(nn.Linear(WIDTH, HIDDEN, bias=False), norm, nn.ReLU(), nn.Linear(HIDDEN, CLASSES))

    def end(self) -> None:
        norm = self.model[1]
        self.told["batches"] = int(norm.num_batches_tracked)
        self.told["mean"], self.told["variance"] = float(norm.running_mean.norm()), float(norm.running_var.norm())


class BatchNorm(_Normalised):
    """Running statistics of all micro-batches, in order."""


class BatchNormOfAll(_Normalised):
    """Running statistics that are means of all batches (`momentum=None`)."""

    momentum = None
    refused: Mapping[str, str] = {"job": "momentum"}


class BatchNormReset(_Normalised):
    """Running statistics are reset in one step."""

    reported = True
    refused: Mapping[str, str] = {"job": "changed outside of the micro-batches"}

    def before(self, step: Any) -> None:
        if step.number == 2:
            self.model[1].reset_running_stats()


class BatchNormBetween(_Normalised):
    """A pass in training mode behind each step."""

    reported = True
    refused: Mapping[str, str] = {"job": "changed outside of the micro-batches"}

    def after(self, step: Any) -> bool | None:
        with torch.no_grad():
            self.model(torch.full((8, WIDTH), 5.0))
        return None


class BatchNormMomentum(_Normalised):
    """The momentum of the statistics falls from step to step, and they are frozen in the end."""

    def before(self, step: Any) -> None:
        self.model[1].momentum = 0.5 / (1 + step.number)
        if step.number == 6:
            self.model[1].eval()
