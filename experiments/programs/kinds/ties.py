"""Programs in which one weight has several places, or several parameters one memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from experiments.programs.program import WIDTH, Program

WORDS, LENGTH = 16, 8


class Texts(torch.utils.data.Dataset[Any]):
    """Words, and the words that follow them."""

    def __len__(self) -> int:
        return 160

    def __getitem__(self, index: int) -> Any:
        words = torch.randint(WORDS, (LENGTH + 1,), generator=torch.Generator().manual_seed(index))
        words[1::2] = (words[::2][: len(words[1::2])] + 1) % WORDS
        return words[:-1], words[1:]


class Tied(nn.Module):
    """An embedding whose weight is that of the head, and a layer of the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WORDS)
        self.body = nn.Linear(WORDS, WORDS, bias=False)
        self.head = nn.Linear(WORDS, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.embedding(words))))


class _TiedText(Program):
    """A small language model with tied weights."""

    data = Texts()

    def make_model(self) -> nn.Module:
        return Tied()

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.5)

    def loss(self, batch: Any) -> Tensor:
        words, following = batch
        return F.cross_entropy(self.model(words).flatten(0, 1), following.flatten())

    def end(self) -> None:
        self.told["tied"] = torch.equal(self.model.embedding.weight, self.model.head.weight)


class TiedHook(_TiedText):
    """A hook on the tied weight keeps some rows as they are."""

    reported = True

    def build(self) -> None:
        super().build()
        mask = torch.ones(WORDS, 1)
        mask[:4] = 0
        self.model.embedding.weight.register_hook(lambda gradient: gradient * mask)
        self.first = self.model.embedding.weight[:4].detach().clone()

    def end(self) -> None:
        super().end()
        self.told["moved"] = float((self.model.embedding.weight[:4] - self.first).abs().max())


class TiedHookOnTheHead(TiedHook):
    """The hook is registered by the weight's second place, and counts its calls."""

    reported = False

    def build(self) -> None:
        super().build()
        self.told["called"] = 0

        def count(_: Tensor) -> None:
            self.told["called"] += 1

        self.model.head.weight.register_hook(count)


class TiedFreeze(_TiedText):
    """The tied weight is frozen in the loop, by its first place."""

    reported = True

    def place(self) -> nn.Module:
        return self.model.embedding

    def before(self, step: Any) -> None:
        if step.number == 3:
            self.place().weight.requires_grad_(False)
            self.first = self.model.embedding.weight.detach().clone()
        if step.number == 7:
            self.told["moved"] = float((self.model.embedding.weight - self.first).abs().max())
            self.place().weight.requires_grad_(True)


class TiedFreezeByTheHead(TiedFreeze):
    """The tied weight is frozen in the loop, by its second place."""

    def place(self) -> nn.Module:
        return self.model.head


class TiedPenalty(_TiedText):
    """A penalty over all parameters beside the loss, with as many terms as there are parameters."""

    reported = True

    def loss(self, batch: Any) -> Tensor:
        penalty = sum(p.pow(2).sum() for p in self.model.parameters())
        self.told["terms"] = len(list(self.model.parameters()))
        return super().loss(batch) + 0.01 * penalty


class TiedNames(_TiedText):
    """Names and counts of the parameters, printed at the end."""

    def end(self) -> None:
        super().end()
        self.told["names"] = [name for name, _ in self.model.named_parameters()]
        self.told["values"] = sum(p.numel() for p in self.model.parameters())


class TiedAverage(_TiedText):
    """An average of the model, as torch keeps it: it pairs parameters by their position."""

    reported = True

    def build(self) -> None:
        super().build()
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.7))

    def registered(self) -> Mapping[str, Any]:
        return {"average": self.average}

    def after(self, step: Any) -> bool | None:
        self.average.update_parameters(self.model)
        return None

    def end(self) -> None:
        super().end()
        self.told["average"] = [float(p.detach().norm()) for p in self.average.module.parameters()]

    def kept(self) -> Mapping[str, Any]:
        return {"average": self.average}


class TiedInTwoGroups(_TiedText):
    """Groups of the optimizer that are made by name, with a decay of their own."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        named = dict(self.model.named_parameters())
        body = [p for name, p in named.items() if name.startswith("body")]
        others = [p for name, p in named.items() if not name.startswith("body")]
        return torch.optim.AdamW([{"params": body, "weight_decay": 0.0}, {"params": others, "lr": 3e-3}], lr=1e-2)


class TiedByUse(_TiedText):
    """The head is no module: it uses the embedding's weight by a function."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.body = nn.Embedding(WORDS, WORDS), nn.Linear(WORDS, WORDS)

        def forward(self, words: Tensor) -> Tensor:
            return F.linear(torch.tanh(self.body(self.embedding(words))), self.embedding.weight)

    def make_model(self) -> nn.Module:
        return self.Model()

    def end(self) -> None:
        self.told["names"] = [name for name, _ in self.model.named_parameters()]


class OneModuleTwice(Program):
    """One layer under two names."""

    def make_model(self) -> nn.Module:
        shared = nn.Linear(WIDTH, WIDTH)
        return nn.Sequential(shared, nn.Tanh(), shared, nn.Tanh(), nn.Linear(WIDTH, 4))

    def end(self) -> None:
        self.told["parameters"] = len(list(self.model.parameters()))


class _SharedMemory(Program):
    """Parameters over one memory that are not one object."""

    refused: Mapping[str, str] = dict.fromkeys(("job", "within"), "share memory without being one parameter")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.head = nn.Linear(WIDTH, 4)

        def forward(self, points: Tensor) -> Tensor:
            return self.head(torch.relu(self.second(torch.relu(self.first(points)))))

    def make_model(self) -> nn.Module:
        return self.Model()

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.1)


class TiedByData(_SharedMemory):
    """Two weights over one memory (`b.weight.data = a.weight.data`)."""

    reported = True

    def make_model(self) -> nn.Module:
        model = self.Model()
        model.second.weight.data = model.first.weight.data
        return model

    def end(self) -> None:
        self.told["equal"] = torch.equal(self.model.first.weight, self.model.second.weight)


class TiedTransposed(_SharedMemory):
    """A weight that is the other one transposed, over the same memory."""

    reported = True

    def make_model(self) -> nn.Module:
        model = self.Model()
        model.second.weight = nn.Parameter(model.first.weight.data.t())
        return model

    def end(self) -> None:
        self.told["equal"] = torch.equal(self.model.first.weight, self.model.second.weight.t())


class TiedRows(_SharedMemory):
    """A bias that is a row of a weight."""

    reported = True

    def make_model(self) -> nn.Module:
        model = self.Model()
        model.second.bias = nn.Parameter(model.first.weight.data[0])
        return model

    def end(self) -> None:
        self.told["equal"] = torch.equal(self.model.first.weight[0], self.model.second.bias)


class BufferOverAWeight(_SharedMemory):
    """A buffer over a weight's memory, which the forward uses."""

    reported = True

    class Model(_SharedMemory.Model):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("view", self.first.weight.data[0])

        def forward(self, points: Tensor) -> Tensor:
            return super().forward(points) + self.view.sum()

    def end(self) -> None:
        self.told["equal"] = torch.equal(self.model.first.weight[0], self.model.view)


class AttributeOverAWeight(BufferOverAWeight):
    """A plain attribute over a weight's memory, which the forward uses."""

    class Model(_SharedMemory.Model):
        def __init__(self) -> None:
            super().__init__()
            self.view = self.first.weight.data[0]

        def forward(self, points: Tensor) -> Tensor:
            return super().forward(points) + self.view.sum()
