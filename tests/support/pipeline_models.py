"""Models, batches and losses for tests of pipelines: a GPT, an encoder-decoder, and awkward stacks. Unmodified code."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from experiments.train_gpt.model import GPT, GPTConfig, next_token_loss

WORDS = 64
Batch = tuple[Tensor, Tensor]


class _Mixed(torch.autograd.Function):
    """The identity, whose backward multiplies matrices: its bits depend on the autocast state of the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gradient = gradients[0].float()
        return gradient @ torch.eye(gradient.shape[-1])


class Layer(nn.Module):
    """A residual layer that may hand over transposed tensors, change its input in place, or mix in its backward."""

    def __init__(self, width: int, *, transposed: bool = False, in_place: bool = False, mixing: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.1)
        self.transposed, self.in_place, self.mixing = transposed, in_place, mixing

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        if positions is not None:
            x = x + positions
        if self.transposed:
            x = x.transpose(0, 1)
        if self.in_place:
            x += 0.5
        if self.mixing:
            x = _Mixed.apply(x)  # type: ignore[no-untyped-call]  # of torch
        x = x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))
        return x.transpose(0, 1) if self.transposed else x


class Stack(nn.Module):
    """Tokens (batch, length) -> logits (batch, length, words)."""

    def __init__(self, width: int = 24, layers: int = 4, **options: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(Layer(width, **options) for _ in range(layers))
        self.head = nn.Linear(width, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


class DecoderLayer(nn.Module):
    """Attends to itself and, unless it is told otherwise, to the encoder."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_self, self.norm_cross = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attends = nn.MultiheadAttention(width, 2, dropout=0.1, batch_first=True)
        self.crosses = nn.MultiheadAttention(width, 2, dropout=0.1, batch_first=True)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, encoded: Tensor | None, mask: Tensor) -> Tensor:
        h = self.norm_self(x)
        x = x + self.attends(h, h, h, attn_mask=mask, need_weights=False)[0]
        if encoded is not None:
            x = x + self.crosses(self.norm_cross(x), encoded, encoded, need_weights=False)[0]
        return x + torch.tanh(self.out(x))


class EncoderDecoder(nn.Module):
    """One weight in three places; the encoder's output enters every decoder layer, or passes by some of them."""

    def __init__(self, width: int = 24, *, skipping: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.source = nn.Embedding(WORDS, width)
        self.encoder = nn.ModuleList(Layer(width) for _ in range(2))
        self.target = nn.Embedding(WORDS, width)
        self.decoder = nn.ModuleList(DecoderLayer(width) for _ in range(4))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, WORDS, bias=False)
        self.target.weight = self.head.weight = self.source.weight
        self.skipping = skipping

    def forward(self, tokens: Tensor) -> Tensor:
        encoded = self.source(tokens)
        for layer in self.encoder:
            encoded = layer(encoded)
        length = tokens.shape[1]
        mask = torch.triu(torch.full((length, length), float("-inf")), 1)
        x = self.target(tokens)
        for place, decoder in enumerate(self.decoder):
            x = decoder(x, None if place in self.skipping else encoded, mask=mask)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Checkpointed(GPT):
    """Each block is computed again in the backward."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.dropout(self.embedding(tokens) + self.position(torch.arange(tokens.shape[1])))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        logits: Tensor = self.head(self.norm(x))
        return logits


def partly_frozen() -> GPT:
    """The weight that embedding and head share, and one block, are not trained."""
    model = GPT(_TINY)
    model.embedding.weight.requires_grad_(False)
    model.blocks[1].requires_grad_(False)
    return model


class Positions(Stack):
    """Dropout behind the embedding, and of positions that three layers take: their numbers are drawn in this order."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.dropout(self.embed(tokens), 0.1, self.training)
        positions = F.dropout(torch.linspace(-1, 1, x.shape[-1]), 0.1, self.training)
        for place, layer in enumerate(self.layers):
            x = layer(x, positions if place < 3 else None)
        logits: Tensor = self.head(x)
        return logits


class Drawing(Stack):
    """Two layers draw from Python and NumPy; the value of a number that is drawn behind the third counts at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0], self.layers[1] = Scaling(24), Scaling(24)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](self.embed(tokens)))
        x = self.layers[2](x)
        late = torch.rand(1).item() if self.training else 1.0
        logits: Tensor = self.head(self.layers[3](x) * late)
        return logits


class Scaling(Layer):
    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        x = super().forward(x, positions)
        return x * (0.5 + random.random()) * (0.5 + np.random.rand()) if self.training else x


class Redrawing(Stack):
    """Two layers compute a part again in their backward, with other numbers of Python and NumPy than in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0], self.layers[1] = Rescaling(24), Rescaling(24)


class Rescaling(Scaling):
    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        scaled: Tensor = checkpoint(self._part, x, use_reentrant=False)
        return scaled

    def _part(self, x: Tensor) -> Tensor:
        # Before what is kept for the backward; NumPy keeps every second number itself.
        return super().forward(x * (0.5 + random.random()) * (2 + np.random.randn()))


class Unpreserved(Stack):
    """Layers that are computed again draw by the stream that is set where they are entered, and by no kept one."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False)
        logits: Tensor = self.head(x)
        return logits


class Sampling(Stack):
    """One layer is evaluated while the others are trained, and draws all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2] = Noisy(24)

    def train(self, mode: bool = True) -> Sampling:
        super().train(mode)
        self.layers[2].eval()
        return self


class Noisy(Layer):
    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        x = super().forward(x, positions)
        return x + 0.1 * torch.randn_like(x)


class Positioned(Stack):
    """Code between blocks reads from an activation how long texts are, and how many."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, places_in(x))
        logits: Tensor = self.head(x)
        return logits


def places_in(x: Tensor) -> Tensor:
    return torch.linspace(-1, 1, x.shape[1])[:, None] * x.shape[0]


class Dropped(Stack):
    """Leaves one layer out in some micro-batches."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for place, layer in enumerate(self.layers):
            if place != 1 or tokens.sum() % 2 == 0:
                x = layer(x)
        logits: Tensor = self.head(x)
        return logits


class Written(Stack):
    """Code between blocks adds what it makes of activations to a tensor of its own, in place."""

    def forward(self, tokens: Tensor) -> Tensor:
        x, total = self.embed(tokens), torch.zeros(())
        for layer in self.layers:
            x = layer(x)
            total += x.square().mean()
        logits: Tensor = self.head(x * (1 + total))
        return logits


@dataclass(frozen=True)
class Case:
    """A model, how it is called, and where it is cut over two members (the first cut) or three."""

    build: Callable[[], nn.Module]
    cuts: tuple[int, int]
    autocast: str = ""
    """`forward`: around the forward and the loss; `loop`: around the body, `step.backward` too."""
    collate: Callable[[list[Batch]], Batch] | None = None
    """Samples -> batch."""

    def model(self, device: str = "cpu") -> nn.Module:
        torch.__future__.set_swap_module_params_on_conversion(True)  # or tied weights are untied by the move
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            model = self.build().train()
        return model if device == "cpu" else model.to(device)


def ragged(samples: list[Batch]) -> Batch:
    """Each micro-batch as long as its own longest text; every third has lost a sample."""
    tokens, targets = torch.utils.data.default_collate(samples)
    seen = int(tokens.sum())
    length, size = 5 + seen % 7, 1 if seen % 3 == 0 else len(samples)
    return tokens[:size, :length].contiguous(), targets[:size, :length].contiguous()


_TINY = GPTConfig(layers=4, heads=2, width=24, context=32, vocabulary=WORDS)
CASES = {
    "gpt": Case(lambda: GPT(_TINY), (4, 6)),
    "checkpointed": Case(lambda: Checkpointed(_TINY), (4, 6)),
    "frozen": Case(partly_frozen, (4, 6)),
    "bfloat16": Case(lambda: GPT(_TINY).to(torch.bfloat16), (3, 5)),
    "autocast": Case(lambda: GPT(_TINY), (3, 6), "forward"),
    "autocast-loop": Case(lambda: GPT(_TINY), (3, 6), "loop"),
    "transposed": Case(lambda: Stack(transposed=True), (2, 4)),
    "in-place": Case(lambda: Stack(in_place=True), (2, 4)),
    "encoder-decoder": Case(EncoderDecoder, (2, 6)),
    "positions": Case(Positions, (4, 5)),
    "drawing": Case(Drawing, (1, 3)),
    "written": Case(Written, (1, 5)),
    "passing-by": Case(lambda: EncoderDecoder(skipping=(1, 2)), (5, 6)),
}

DRAWN = {
    "redrawing": Case(Redrawing, (3, 5)),
    "unpreserved": Case(Unpreserved, (2, 4)),
    "sampling": Case(Sampling, (3, 5)),
    "dropped": Case(Dropped, (2, 3)),
    "ragged": Case(Positioned, (2, 4), collate=ragged),
}
"""Of these the runtime's random streams, or its batches, are a part: stubs alone do not make their bits."""


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return next_token_loss(model, batch)


def batch_of(micro_batch: int) -> Batch:
    tokens = torch.randint(0, WORDS, (2, 13), generator=torch.Generator().manual_seed(100 + micro_batch))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def autocast(on: bool, device: str = "cpu") -> contextlib.AbstractContextManager[object]:
    return torch.autocast(device, torch.bfloat16) if on else contextlib.nullcontext()


def new_tensors_on(device: str) -> contextlib.AbstractContextManager[object]:
    """Put what models make without naming a device on this one."""
    return contextlib.nullcontext() if device == "cpu" else torch.device(device)
