"""GPT, BERT-like encoder and T5-like encoder-decoder, plain PyTorch, small enough to read. Nothing knows of offload."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Run = Callable[..., Tensor]
KINDS = ("gpt", "bert", "t5")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """`layers` counts all blocks; T5 has half of them on each side. `dropout` is of GPT and T5; BERT always has 0.1."""

    width: int
    layers: int
    tokens: int
    batch: int
    heads: int = 8
    vocabulary: int = 1024
    dropout: float = 0.0


def plainly(block: nn.Module, *inputs: Tensor) -> Tensor:
    """How a model runs its blocks unless told otherwise (recomputation passes another)."""
    found: Tensor = block(*inputs)
    return found


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class Attention(nn.Module):
    """Self-attention with one fused projection, or cross-attention over `memory`."""

    def __init__(self, shape: Shape, *, causal: bool, cross: bool = False) -> None:
        super().__init__()
        self.heads, self.causal, self.cross = shape.heads, causal, cross
        self.first = nn.Linear(shape.width, shape.width if cross else 3 * shape.width)
        self.memory = nn.Linear(shape.width, 2 * shape.width) if cross else None
        self.out = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        if self.memory is not None and memory is not None:
            q, (k, v) = self.first(x), self.memory(memory).chunk(2, dim=-1)
        else:
            q, k, v = self.first(x).chunk(3, dim=-1)
        q, k, v = (z.unflatten(-1, (self.heads, -1)).transpose(1, 2) for z in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        merged: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return merged


class Block(nn.Module):
    """One layer: pre-norm (GPT, T5) or post-norm (BERT); gated ReLU for T5, GELU otherwise."""

    def __init__(self, shape: Shape, kind: str, *, causal: bool, cross: bool = False) -> None:
        super().__init__()
        norm = RMSNorm if kind == "t5" else nn.LayerNorm
        self.post = kind == "bert"
        self.dropout = 0.1 if kind == "bert" else shape.dropout
        self.attention = Attention(shape, causal=causal)
        self.norm1, self.norm2 = norm(shape.width), norm(shape.width)
        self.cross = Attention(shape, causal=False, cross=True) if cross else None
        self.norm3 = norm(shape.width) if cross else None
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.gate = nn.Linear(shape.width, 4 * shape.width) if kind == "t5" else None
        self.down = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        if self.post:
            x = self.norm1(x + self._drop(self.attention(x)))
            return self.norm2(x + self._drop(self._feed(x)))  # type: ignore[no-any-return]
        x = x + self._drop(self.attention(self.norm1(x)))
        if self.cross is not None and self.norm3 is not None:
            x = x + self._drop(self.cross(self.norm3(x), memory))
        return x + self._drop(self._feed(self.norm2(x)))

    def _feed(self, x: Tensor) -> Tensor:
        inner = F.gelu(self.up(x)) if self.gate is None else F.relu(self.gate(x)) * self.up(x)
        fed: Tensor = self.down(inner)
        return fed

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout) if self.dropout else x


class Model(nn.Module):
    """Embeddings, blocks, head; the loss is a cross entropy against the input itself."""

    def __init__(self, kind: str, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.place = nn.Parameter(torch.randn(shape.tokens, shape.width) * 0.02)
        encoders = {"gpt": 0, "bert": shape.layers, "t5": shape.layers // 2}[kind]
        self.encoder = nn.ModuleList(Block(shape, kind, causal=False) for _ in range(encoders))
        self.decoder = nn.ModuleList(
            Block(shape, kind, causal=True, cross=kind == "t5") for _ in range(shape.layers - encoders)
        )
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor, run: Run = plainly) -> Tensor:
        start = self.embed(tokens) + self.place
        x = start
        for block in self.encoder:
            x = run(block, x)
        if self.decoder:
            memory = x
            x = start
            for block in self.decoder:
                x = run(block, x, memory) if len(self.encoder) else run(block, x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.flatten())


def build(kind: str, shape: Shape, dtype: torch.dtype = torch.float32) -> tuple[Model, Tensor]:
    """The model and one batch of tokens, `(batch, tokens)` int64, always the same."""
    torch.manual_seed(0)
    model = Model(kind, shape).to(dtype)
    return model, torch.randint(0, shape.vocabulary, (shape.batch, shape.tokens))
