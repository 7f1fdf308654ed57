"""Programs whose models have state of other kinds: averages, masks, rates, codebooks, weights that are made."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

from experiments.programs.program import CLASSES, WIDTH, Program

HIDDEN = 16


class TargetNetwork(Program):
    """A copy of the model inside the model, which the loop moves (DQN, BYOL)."""

    refused: Mapping[str, str] = {"job": "register"}

    def make_model(self) -> nn.Module:
        online = super().make_model()
        return nn.ModuleDict({"online": online, "target": copy.deepcopy(online).requires_grad_(False)})

    def loss(self, batch: Any) -> Tensor:
        points, classes = batch
        made = self.model["online"](points)
        return F.cross_entropy(made, classes) + (made - self.model["target"](points)).pow(2).mean()

    def after(self, step: Any) -> bool | None:
        with torch.no_grad():
            for mine, now in zip(self.model["target"].parameters(), self.model["online"].parameters(), strict=True):
                mine.lerp_(now, 0.2)
        return None


class AverageInBuffers(Program):
    """An average of a weight in a buffer of the model, moved behind each step."""

    def make_model(self) -> nn.Module:
        model = super().make_model()
        model.register_buffer("average", model[0].weight.detach().clone())
        return model

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + (self.model[0].weight - self.model.average).pow(2).sum()

    def after(self, step: Any) -> bool | None:
        self.model.average.lerp_(self.model[0].weight.detach(), 0.1)
        return None


class Pruned(Program):
    """A weight that torch's pruning masks before the loop."""

    def make_model(self) -> nn.Module:
        model = super().make_model()
        prune.l1_unstructured(model[0], "weight", amount=0.5)
        return model

    def end(self) -> None:
        self.told["zeros"] = int((self.model[0].weight == 0).sum())


class PrunedInTheLoop(Program):
    """A weight that is pruned more and more, by its mask, in the loop."""

    def make_model(self) -> nn.Module:
        model = super().make_model()
        prune.identity(model[0], "weight")
        return model

    def before(self, step: Any) -> None:
        if step.number in (0, 1):
            kept = self.model[0].weight_orig.detach().abs().flatten().argsort(descending=True)
            mask = torch.zeros(kept.numel())
            mask[kept[: kept.numel() * (3 - step.number) // 4]] = 1
            self.model[0].weight_mask.copy_(mask.view_as(self.model[0].weight_mask))

    def end(self) -> None:
        self.told["masked"] = int((self.model[0].weight_mask == 0).sum())


class CurriculumDropout(Program):
    """A rate of dropout that falls from step to step."""

    random = True

    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Dropout(0.9), nn.Linear(HIDDEN, CLASSES))

    def before(self, step: Any) -> None:
        self.model[1].p = 0.9 / (1 + step.number)

    def kept(self) -> Mapping[str, Any]:
        return {"p": self.model[1].p}


class ProgressiveUnfreezing(Program):
    """Layers that are trained from the last to the first, one more every third step."""

    def make_model(self) -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)), nn.Linear(8, 4))

    def before(self, step: Any) -> None:
        for depth, layer in enumerate(reversed(self.model)):
            layer.requires_grad_(depth <= step.number // 3)


class StochasticDepthSchedule(Program):
    """Chances of leaving layers out that grow behind each step, kept by the layers."""

    random = True

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.chance = nn.Linear(WIDTH, WIDTH), 0.0

        def forward(self, hidden: Tensor) -> Tensor:
            kept = (torch.rand(len(hidden), 1) >= self.chance).float()
            return hidden + kept * torch.tanh(self.linear(hidden))

    def make_model(self) -> nn.Module:
        return nn.Sequential(*(self.Layer() for _ in range(3)), nn.Linear(WIDTH, CLASSES))

    def after(self, step: Any) -> bool | None:
        for depth, layer in enumerate(self.model[:3]):
            layer.chance += 0.02 * depth
        return None

    def kept(self) -> Mapping[str, Any]:
        return {"chances": [layer.chance for layer in self.model[:3]]}


class CodebookInTheForward(Program):
    """A codebook that the forward moves (VQ-VAE): refused where several compute."""

    refused: Mapping[str, str] = {"job": "codes"}

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.head = nn.Linear(WIDTH, 4), nn.Linear(4, CLASSES)
            self.register_buffer("codes", torch.randn(8, 4))

        def forward(self, points: Tensor) -> Tensor:
            hidden = self.into(points)
            nearest = torch.cdist(hidden, self.codes).argmin(-1)
            if self.training:
                with torch.no_grad():
                    self.codes[nearest] = self.codes[nearest].lerp(hidden, 0.1)
            return self.head(hidden + (self.codes[nearest] - hidden).detach())

    def make_model(self) -> nn.Module:
        return self.Model()


class QueueOfKeys(Program):
    """A queue of earlier features that the forward fills (MoCo): refused where several compute."""

    refused: Mapping[str, str] = {"job": "queue", "within": "cut into blocks"}

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into = nn.Linear(WIDTH, 4)
            self.register_buffer("queue", torch.randn(16, 4))
            self.register_buffer("place", torch.zeros((), dtype=torch.long))

        def forward(self, points: Tensor) -> Tensor:
            features = F.normalize(self.into(points), dim=-1)
            logits = features @ self.queue.clone().T
            with torch.no_grad():
                at = int(self.place)
                self.queue[at : at + len(points)] = features
                self.place.copy_((self.place + len(points)) % 16)
            return logits

    def make_model(self) -> nn.Module:
        return self.Model()

    def loss(self, batch: Any) -> Tensor:
        return self.model(batch[0]).logsumexp(-1).mean()


class SpectralNorm(Program):
    """A weight whose norm is estimated by vectors that each forward in training improves."""

    refused: Mapping[str, str] = {"job": "_u"}

    def make_model(self) -> nn.Module:
        first = parametrizations.spectral_norm(nn.Linear(WIDTH, HIDDEN))
        return nn.Sequential(first, nn.Tanh(), nn.Linear(HIDDEN, CLASSES))


class WeightNorm(Program):
    """A weight out of a direction and a length."""

    def make_model(self) -> nn.Module:
        first = parametrizations.weight_norm(nn.Linear(WIDTH, HIDDEN))
        return nn.Sequential(first, nn.Tanh(), nn.Linear(HIDDEN, CLASSES))


class SymmetricWeight(Program):
    """A weight that a parametrization of the script makes symmetric."""

    class Symmetric(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight.triu() + weight.triu(1).transpose(-1, -2)

    def make_model(self) -> nn.Module:
        first = nn.Linear(WIDTH, WIDTH)
        nn.utils.parametrize.register_parametrization(first, "weight", self.Symmetric())
        return nn.Sequential(first, nn.Tanh(), nn.Linear(WIDTH, CLASSES))

    def end(self) -> None:
        self.told["symmetric"] = torch.equal(self.model[0].weight, self.model[0].weight.T)


class LazyLayers(Program):
    """Layers that take their sizes from a first pass before `prepare`."""

    def make_model(self) -> nn.Module:
        model = nn.Sequential(nn.LazyLinear(HIDDEN), nn.Tanh(), nn.LazyLinear(CLASSES))
        model(torch.zeros(1, WIDTH))
        return model
