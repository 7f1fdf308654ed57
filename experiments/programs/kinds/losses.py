"""Programs with losses that are weighted, ignored, summed, or no number at times."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.programs.kinds.ties import WORDS, Texts
from experiments.programs.program import CLASSES, WIDTH, Program

HIDDEN = 16


class Ragged(Texts):
    """Texts of which the last words are no targets; of some, none is."""

    def __getitem__(self, index: int) -> Any:
        words, following = super().__getitem__(index)
        following = following.clone()
        following[len(following) - index % 9 :] = -100
        return words, following


class _Text(Program):
    """A language model without ties."""

    data = Ragged()

    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(WORDS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WORDS))

    def loss(self, batch: Any) -> Tensor:
        words, following = batch
        return F.cross_entropy(self.model(words).flatten(0, 1), following.flatten(), ignore_index=-100)


class TokenWeights(_Text):
    """Micro-batches count by their tokens."""

    def body(self, step: Any, batch: Any) -> None:
        step.backward(self.loss(batch), weight=int((batch[1] != -100).sum()))


class TensorWeights(_Text):
    """Micro-batches count by their tokens, as a tensor, and losses are float64."""

    def body(self, step: Any, batch: Any) -> None:
        step.backward(self.loss(batch).double(), weight=(batch[1] != -100).sum())


class NothingToLearn(_Text):
    """One micro-batch of a step has no target at all: its loss is NaN, and its weight is 0."""

    reported = True
    micro = 4

    class Data(Ragged):
        def __getitem__(self, index: int) -> Any:
            words, following = super().__getitem__(index)
            return words, torch.full_like(following, -100) if index // 4 % 4 == 1 else following

    data = Data()

    def body(self, step: Any, batch: Any) -> None:
        step.backward(self.loss(batch), weight=int((batch[1] != -100).sum()))

    def after(self, step: Any) -> bool | None:
        self.told["skipped"] = self.told.get("skipped", 0) + int(step.skipped)
        return None


class NothingInAWholeStep(NothingToLearn):
    """All micro-batches of one step have no target: nothing is learnt from it."""

    class Data(Ragged):
        def __getitem__(self, index: int) -> Any:
            words, following = super().__getitem__(index)
            return words, torch.full_like(following, -100) if index // 16 == 3 else following

    data = Data()

    def says(self) -> Any:
        said = dict(super().says())
        said["loss"] = sum(each for each in self.losses if each == each)
        return said


class NanStep(Program):
    """A loss that is NaN in one micro-batch of one step, which is left out."""

    class Data(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 160

        def __getitem__(self, index: int) -> Any:
            point, label = Program.data[index]
            return (point * float("nan") if index == 37 else point), label

    data = Data()

    def after(self, step: Any) -> bool | None:
        if step.skipped:
            self.told["skipped"] = step.number
        return None

    def says(self) -> Any:
        said = dict(super().says())
        said["loss"] = sum(each for each in self.losses if each == each)
        return said


class LearntWeights(Program):
    """Losses of two tasks under weights that are learnt (parameters of no layer)."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh())
            self.one, self.two = nn.Linear(HIDDEN, CLASSES), nn.Linear(HIDDEN, WIDTH)
            self.spreads = nn.Parameter(torch.zeros(2))

        def forward(self, points: Tensor, classes: Tensor) -> Tensor:
            hidden = self.body(points)
            losses = torch.stack([F.cross_entropy(self.one(hidden), classes), F.mse_loss(self.two(hidden), points)])
            return (losses * (-self.spreads).exp() + self.spreads).sum()

    def make_model(self) -> nn.Module:
        return self.Model()

    def loss(self, batch: Any) -> Tensor:
        return self.model(*batch)


class Distilled(Program):
    """A frozen teacher that is no part of the model, and smoothed labels."""

    def build(self) -> None:
        super().build()
        self.teacher = copy.deepcopy(self.model).requires_grad_(False).eval()

    def loss(self, batch: Any) -> Tensor:
        points, classes = batch
        made = self.model(points)
        with torch.no_grad():
            right = self.teacher(points).softmax(-1)
        soft = F.kl_div(made.log_softmax(-1), right, reduction="batchmean")
        return F.cross_entropy(made, classes, label_smoothing=0.1) + soft


class Connectionist(Program):
    """The loss of connectionist temporal classification."""

    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(1, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES + 1))

    def loss(self, batch: Any) -> Tensor:
        points, classes = batch
        made = self.model(points.T.unsqueeze(-1)).log_softmax(-1)
        count = len(points)
        lengths = torch.full((count,), WIDTH), torch.ones(count, dtype=torch.long)
        return F.ctc_loss(made, classes[:, None] + 1, *lengths)


class Triplets(Program):
    """Distances to the nearest and the farthest sample of a micro-batch."""

    def loss(self, batch: Any) -> Tensor:
        points, classes = batch
        features = F.normalize(self.model(points), dim=-1)
        distances = torch.cdist(features, features)
        same = classes[:, None] == classes[None]
        near = distances.masked_fill(same, 9.0).amin(-1)
        return F.relu((distances * same).amax(-1) - near + 0.5).mean()


class Siamese(Program):
    """One tower for both sides of a pair, and a margin."""

    def loss(self, batch: Any) -> Tensor:
        points, classes = batch
        one, two = self.model(points), self.model(points.flip(0))
        same = (classes == classes.flip(0)).float()
        distance = (one - two).pow(2).sum(-1)
        return (same * distance + (1 - same) * F.relu(1 - distance)).mean()


class EarlyExits(Program):
    """Exits behind each layer, of which the loss takes a part that changes from step to step."""

    def make_model(self) -> nn.Module:
        layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        return nn.ModuleDict({"layers": layers, "exits": nn.ModuleList(nn.Linear(WIDTH, CLASSES) for _ in range(3))})

    def before(self, step: Any) -> None:
        self.depth = 1 + step.number % 3

    def loss(self, batch: Any) -> Tensor:
        hidden, classes = batch
        losses = []
        for layer, leave in zip(self.model["layers"][: self.depth], self.model["exits"], strict=False):
            hidden = layer(hidden)
            losses.append(F.cross_entropy(leave(hidden), classes))
        return torch.stack(losses).sum()
