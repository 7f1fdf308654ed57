"""Models of many forms, trained in the plainest loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from experiments.programs.kinds.ties import LENGTH, WORDS, Texts
from experiments.programs.program import CLASSES, WIDTH, Program

HIDDEN = 16


class _Module(Program):
    """A program whose model is the class `Model` in it."""

    Model: type[nn.Module]

    def make_model(self) -> nn.Module:
        return self.Model()


class Recurrent(_Module):
    """Two layers of torch's LSTM in both directions, without dropout."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.LSTM(1, 8, num_layers=2, bidirectional=True, batch_first=True)
            self.head = nn.Linear(16, CLASSES)

        def forward(self, points: Tensor) -> Tensor:
            return self.head(self.cell(points[..., None])[0][:, -1])


class RecurrentDropout(_Module):
    """Torch's GRU with dropout between its layers."""

    random = True

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRU(1, 8, num_layers=2, batch_first=True, dropout=0.5)
            self.head = nn.Linear(8, CLASSES)

        def forward(self, points: Tensor) -> Tensor:
            return self.head(self.cell(points[..., None])[0][:, -1])


class CellByHand(_Module):
    """An LSTM cell that the model calls once per moment."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.LSTMCell(1, 8), nn.Linear(8, CLASSES)

        def forward(self, points: Tensor) -> Tensor:
            state = None
            for moment in points.T:
                state = self.cell(moment[:, None], state)
            return self.head(state[0])


class Adversarial(_Module):
    """A generator and a critic in one model, each of which the other's loss passes by."""

    random = True

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator = nn.Sequential(nn.Linear(4, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH))
            self.critic = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.LeakyReLU(), nn.Linear(HIDDEN, 1))

        def forward(self, points: Tensor) -> Tensor:
            made = self.generator(torch.randn(len(points), 4))
            wrong = F.softplus(self.critic(made.detach())) + F.softplus(-self.critic(points))
            fixed = {name: p.detach() for name, p in self.critic.named_parameters()}
            return wrong.mean() + F.softplus(-functional_call(self.critic, fixed, (made,))).mean()

    def loss(self, batch: Any) -> Tensor:
        return self.model(batch[0])


class AdversarialByTurns(Adversarial):
    """Generator and critic are trained in turns, by freezing one of them."""

    random = True

    class Model(Adversarial.Model):
        def forward(self, points: Tensor) -> Tensor:
            made = self.generator(torch.randn(len(points), 4))
            if self.critic[0].weight.requires_grad:
                return (F.softplus(self.critic(made)) + F.softplus(-self.critic(points))).mean()
            return F.softplus(-self.critic(made)).mean()

    def before(self, step: Any) -> None:
        self.model.critic.requires_grad_(step.number % 2 == 0)
        self.model.generator.requires_grad_(step.number % 2 == 1)


class Experts(_Module):
    """Experts of which a micro-batch uses some, and one that nothing ever uses."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(WIDTH, 5)
            self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
            self.head = nn.Linear(WIDTH, CLASSES)

        def forward(self, points: Tensor) -> Tensor:
            shares = self.gate(points).softmax(-1)
            chosen, hidden = shares.argmax(-1), torch.zeros_like(points)
            for number in chosen.unique().tolist():
                at = (chosen == number).nonzero().flatten()
                made = self.experts[number](points[at]) * shares[at, number, None]
                hidden = hidden.index_add(0, at, made)
            return self.head(hidden)


class Autoencoder(_Module):
    """A decoder whose weights are the encoder's, transposed by a function."""

    refused: Mapping[str, str] = {"within": "cut into blocks"}

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.bias = nn.Linear(WIDTH, 3), nn.Parameter(torch.zeros(WIDTH))

        def forward(self, points: Tensor) -> Tensor:
            return F.linear(torch.tanh(self.encoder(points)), self.encoder.weight.T, self.bias)

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self.model(batch[0]), batch[0])


class UNet(_Module):
    """Convolutions down and up, with connections across and batch normalisation."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.Sequential(nn.Conv1d(1, 4, 3, padding=1, bias=False), nn.BatchNorm1d(4), nn.ReLU())
            self.middle = nn.Sequential(nn.Conv1d(4, 8, 3, padding=1, bias=False), nn.GroupNorm(2, 8), nn.ReLU())
            self.up, self.out = nn.ConvTranspose1d(8, 4, 2, 2), nn.Conv1d(8, 1, 1)

        def forward(self, points: Tensor) -> Tensor:
            across = self.down(points[:, None])
            low = self.middle(F.max_pool1d(across, 2))
            return self.out(torch.cat([across, self.up(low)], 1))[:, 0]

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self.model(batch[0]), batch[0].roll(1, -1))


class TorchTransformer(_Module):
    """Torch's encoder layers, which take a fast path in evaluation unless a module has hooks, and round differently."""

    data = Texts()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(WORDS, HIDDEN)
            self.place = nn.Parameter(torch.zeros(LENGTH, HIDDEN))
            layer = nn.TransformerEncoderLayer(HIDDEN, 2, 32, dropout=0.0, batch_first=True)
            self.layers, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(HIDDEN, WORDS)

        def forward(self, words: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
            return self.head(self.layers(self.embedding(words) + self.place, mask=mask, is_causal=True))

    def loss(self, batch: Any) -> Tensor:
        words, following = batch
        return F.cross_entropy(self.model(words).flatten(0, 1), following.flatten())

    def after(self, step: Any) -> bool | None:
        self.model.eval()
        with torch.no_grad():
            words, following = self.data[150]
            self.told["evaluated"] = round(float(self.loss((words[None], following[None]))), 5)
        self.model.train()
        return None


class Graph(_Module):
    """Messages along the edges of a graph that follows from the data."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.message, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

        def forward(self, nodes: Tensor) -> Tensor:
            source, target = (torch.cdist(nodes, nodes) < 4).nonzero().T
            for _ in range(2):
                sums = torch.zeros_like(nodes).index_add(0, target, torch.tanh(self.message(nodes[source])))
                nodes = nodes + sums / len(nodes)
            return self.head(nodes)


class DepthByTheData(_Module):
    """A layer that is entered until the values settle: how often follows from the data."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

        def forward(self, points: Tensor) -> Tensor:
            hidden = points
            for _ in range(2 + int(points.abs().max() * 2) % 4):
                hidden = points + 0.5 * torch.tanh(self.layer(hidden))
            return self.head(hidden)


class Hypernetwork(_Module):
    """A network that makes the weights of another one, which has none."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.maker = nn.Sequential(nn.Linear(2, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES * WIDTH))
            self.bias = nn.ParameterDict({"bias": nn.Parameter(torch.zeros(CLASSES))})

        def forward(self, points: Tensor) -> Tensor:
            weight = self.maker(torch.ones(2)).view(CLASSES, WIDTH)
            return F.linear(points, weight, self.bias["bias"])


class BagOfWords(_Module):
    """Sparse use of a dense table: sums of embeddings, with an index for padding."""

    data = Texts()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(WORDS, HIDDEN, mode="mean", padding_idx=0)
            self.head = nn.Bilinear(HIDDEN, HIDDEN, CLASSES)

        def forward(self, words: Tensor) -> Tensor:
            hidden = self.bag(words)
            return self.head(hidden, hidden.flip(-1))

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1][:, 0] % CLASSES)


class OneLayer(Program):
    """Linear regression: a single layer, which training within memory cannot cut."""

    refused: Mapping[str, str] = {"within": "cut into blocks"}

    def make_model(self) -> nn.Module:
        return nn.Linear(WIDTH, 1)

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self.model(batch[0])[:, 0], batch[1].float())


class HalfPrecision(Program):
    """A model in bfloat16 with a normalisation in float32."""

    random = True  # plain PyTorch has no float32 masters

    def make_model(self) -> nn.Module:
        layers = [nn.Linear(WIDTH, HIDDEN), nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, CLASSES)]
        model = nn.Sequential(*layers).to(torch.bfloat16)
        model[1].float()
        return model

    def loss(self, batch: Any) -> Tensor:
        points, classes = batch
        hidden = self.model[1](self.model[0](points.bfloat16()).float())
        return F.cross_entropy(self.model[2](hidden.bfloat16()).float(), classes)


class MixedPrecision(Program):
    """Autocast around the forward."""

    random = True  # rounds at other places once gradients are added up in another order

    def loss(self, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().loss(batch)


class DoublePrecision(Program):
    """A model in float64."""

    def make_model(self) -> nn.Module:
        return super().make_model().double()

    def loss(self, batch: Any) -> Tensor:
        points, classes = batch
        return F.cross_entropy(self.model(points.double()), classes)
