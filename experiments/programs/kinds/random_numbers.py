"""Programs that draw random numbers in a block that is entered more than once, or between blocks."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from experiments.programs.program import CLASSES, WIDTH, Program

HIDDEN = 16


class Encoder(nn.Module):
    """Two layers, with dropout behind each."""

    def __init__(self, classes: int = CLASSES) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(HIDDEN, classes)

    def forward(self, points: Tensor) -> Tensor:
        hidden = self.drop(torch.relu(self.first(points)))
        return self.head(self.drop(torch.relu(self.second(hidden))))


class _Passes(Program):
    """Passes of one micro-batch, of which it is counted how often two drew the same."""

    random = True

    def make_model(self) -> nn.Module:
        return Encoder()

    def count(self, one: Tensor, two: Tensor) -> None:
        self.told["same"] = self.told.get("same", 0) + int(torch.equal(one, two))

    def passes(self, points: Tensor) -> tuple[Tensor, Tensor]:
        return self.model(points), self.model(points)

    def loss(self, batch: Any) -> Tensor:
        points, classes = batch
        one, two = self.passes(points)
        self.count(one, two)
        return F.cross_entropy(one, classes) + (one - two).pow(2).mean()


class TwoPasses(_Passes):
    """Two passes of one micro-batch with different dropout (SimCSE, R-Drop)."""

    reported = True


class CheckpointedPasses(_Passes):
    """Two passes, both computed again in the backward."""

    reported = True

    def passes(self, points: Tensor) -> tuple[Tensor, Tensor]:
        one, two = (checkpoint(self.model, points, use_reentrant=False) for _ in range(2))
        return one, two


class ReentrantPasses(_Passes):
    """Two passes, both computed again by a backward inside the backward."""

    def passes(self, points: Tensor) -> tuple[Tensor, Tensor]:
        points = points.requires_grad_()
        one, two = (checkpoint(self.model, points, use_reentrant=True) for _ in range(2))
        return one, two


class PassesOfTwoSizes(_Passes):
    """A pass over the micro-batch, and one over it twice, as with views of contrastive learning."""

    def passes(self, points: Tensor) -> tuple[Tensor, Tensor]:
        both = self.model(torch.cat([points, points]))
        return both[: len(points)], both[len(points) :] + 0 * self.model(points)


class PassInEvaluation(_Passes):
    """Numbers that are drawn between passes in evaluation mode."""

    reported = True

    def loss(self, batch: Any) -> Tensor:
        points, classes = batch
        self.model.eval()
        numbers = [(self.model(points), torch.rand(4))[1] for _ in range(2)]
        self.model.train()
        self.count(*numbers)
        return F.cross_entropy(self.model(points), classes)


class Rollout(_Passes):
    """Actions that are sampled one after the other from one policy (REINFORCE)."""

    reported = True

    def loss(self, batch: Any) -> Tensor:
        points, classes = batch
        logits = [self.model(points) for _ in range(3)]
        actions = [torch.distributions.Categorical(logits=one.detach()).sample() for one in logits]
        with torch.no_grad():
            same = [(self.model(points), torch.rand(4))[1] for _ in range(2)]
        self.count(*same)
        rewards = [(action == classes).float() for action in actions]
        return sum(
            (F.cross_entropy(one, action, reduction="none") * reward).mean()
            for one, action, reward in zip(logits, actions, rewards, strict=True)
        )


class NoiseBeforeEachPass(_Passes):
    """A generator that is called with fresh noise each time."""

    reported = True

    def loss(self, batch: Any) -> Tensor:
        points, classes = batch
        noises = [torch.randn_like(points) for _ in range(3)]
        made = [self.model(points + noise) for noise in noises]
        self.count(noises[1], noises[2])
        return sum(F.cross_entropy(one, classes) for one in made)


class DropoutCell(_Passes):
    """A recurrent cell with dropout, called once per moment."""

    reported = True

    def make_model(self) -> nn.Module:
        parts = {"into": nn.Linear(1, HIDDEN), "head": nn.Linear(HIDDEN, CLASSES)}
        return nn.ModuleDict({**parts, "cell": nn.Sequential(nn.Linear(2 * HIDDEN, HIDDEN), nn.Dropout(0.5))})

    def loss(self, batch: Any) -> Tensor:
        points, classes = batch
        state, masks = torch.zeros(len(points), HIDDEN), []
        for moment in range(WIDTH):
            inputs = self.model["into"](points[:, moment : moment + 1])
            state = torch.tanh(self.model["cell"](torch.cat([inputs, state], 1)))
            masks.append(state.detach() == 0)
        self.count(masks[0], masks[1])
        return F.cross_entropy(self.model["head"](state), classes)


class SharedDepth(_Passes):
    """One layer at all depths (ALBERT, universal transformers)."""

    reported = True

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.head = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, CLASSES)
            self.layer = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Dropout(0.5))
            self.masks: list[Tensor] = []

        def forward(self, points: Tensor) -> Tensor:
            hidden, masks = self.into(points), []
            for _ in range(3):
                hidden = self.layer(hidden)
                masks.append(hidden.detach() == 0)
            self.masks = masks
            return self.head(hidden)

    def make_model(self) -> nn.Module:
        return self.Deep()

    def loss(self, batch: Any) -> Tensor:
        points, classes = batch
        found = F.cross_entropy(self.model(points), classes)
        self.count(self.model.masks[0], self.model.masks[1])
        self.model.masks = []
        return found


class SharedDepthCheckpointed(SharedDepth):
    """One layer at all depths, computed again in the backward."""

    reported = False

    class Deep(SharedDepth.Deep):
        def forward(self, points: Tensor) -> Tensor:
            hidden, masks = self.into(points), []
            for _ in range(3):
                hidden = checkpoint(self.layer, hidden, use_reentrant=False)
                masks.append(hidden.detach() == 0)
            self.masks = masks
            return self.head(hidden)


class MeanTeacher(_Passes):
    """A teacher in training mode, moved behind each step, whose passes draw masks of their own."""

    reported = True

    def build(self) -> None:
        super().build()
        self.teacher = copy.deepcopy(self.model).requires_grad_(False)

    def registered(self) -> Mapping[str, Any]:
        return {"teacher": self.teacher}

    def passes(self, points: Tensor) -> tuple[Tensor, Tensor]:
        return self.model(points), self.teacher(points)

    def after(self, step: Any) -> bool | None:
        with torch.no_grad():
            now = dict(self.model.named_parameters(remove_duplicate=False))
            for name, mine in self.teacher.named_parameters():
                mine.lerp_(now[name], 0.1)
        return None

    def kept(self) -> Mapping[str, Any]:
        return {"teacher": self.teacher}


class GumbelSamples(_Passes):
    """Samples of a relaxed categorical, twice."""

    def passes(self, points: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model(points).repeat(1, 4)
        one, two = (F.gumbel_softmax(logits) for _ in range(2))
        return one[:, :CLASSES], two[:, :CLASSES]


class MonteCarloDropout(_Passes):
    """The spread of ten passes without gradients weights the loss."""

    def loss(self, batch: Any) -> Tensor:
        points, classes = batch
        with torch.no_grad():
            made = torch.stack([self.model(points).softmax(-1) for _ in range(10)])
        self.count(made[0], made[9])
        weights = 1 / (1 + made.std(0).mean(-1))
        return (F.cross_entropy(self.model(points), classes, reduction="none") * weights).mean()


class ImportanceWeighted(_Passes):
    """A variational autoencoder with several samples per point (IWAE), drawn by a layer of its own."""

    class Noise(nn.Module):
        def forward(self, mean: Tensor, spread: Tensor) -> Tensor:
            return mean + spread.exp() * torch.randn_like(mean)

    def make_model(self) -> nn.Module:
        return nn.ModuleDict(
            {"encoder": nn.Linear(WIDTH, 8), "noise": self.Noise(), "decoder": nn.Sequential(nn.Linear(4, WIDTH))}
        )

    def loss(self, batch: Any) -> Tensor:
        points, _ = batch
        mean, spread = self.model["encoder"](points).chunk(2, -1)
        samples = [self.model["noise"](mean, spread) for _ in range(3)]
        self.count(samples[0], samples[1])
        errors = torch.stack([(self.model["decoder"](one) - points).pow(2).sum(-1) for one in samples])
        return -(-errors).logsumexp(0).mean() + mean.pow(2).mean()


class Mixup(_Passes):
    """Partners by torch's generator, shares by NumPy's, both drawn in the loop."""

    def loss(self, batch: Any) -> Tensor:
        points, classes = batch
        shares = [float(np.random.beta(0.4, 0.4)) for _ in range(2)]
        self.told["same"] = self.told.get("same", 0) + int(shares[0] == shares[1])
        partners = torch.randperm(len(points))
        out = self.model(shares[0] * points + (1 - shares[0]) * points[partners])
        return shares[0] * F.cross_entropy(out, classes) + (1 - shares[0]) * F.cross_entropy(out, classes[partners])


class LayersLeftOut(_Passes):
    """Layers that Python's generator leaves out, entered twice each."""

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
            self.head = nn.Linear(WIDTH, CLASSES)

        def forward(self, hidden: Tensor) -> Tensor:
            for layer in [*self.layers, *self.layers]:
                if not self.training or random.random() < 0.6:
                    hidden = hidden + torch.tanh(layer(hidden))
            return self.head(hidden)

    def make_model(self) -> nn.Module:
        return self.Deep()

    def count(self, one: Tensor, two: Tensor) -> None:
        """Equal passes happen by chance; numbers that come after them do not."""
        super().count(torch.tensor(random.random()), torch.tensor(random.random()))
