"""A GPT in plain PyTorch: pre-norm, learned positions, dropout, tied embedding.

Nothing about elasticity comes in here: the same module is trained by a plain loop, DDP, ZeRO and elastrain.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256
"""One token per byte value."""


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Shape of the model. `width` must be a multiple of `heads`."""

    layers: int
    heads: int
    width: int
    context: int
    """Longest sequence, in tokens."""
    vocabulary: int = VOCABULARY
    dropout: float = 0.1

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width must be a multiple of heads; got width {self.width}, heads {self.heads}")


SIZES = {
    "tiny": GPTConfig(layers=3, heads=3, width=192, context=128),
    "small": GPTConfig(layers=6, heads=6, width=384, context=256),
    "124m": GPTConfig(layers=12, heads=12, width=768, context=1024, vocabulary=50304),
}
"""Named shapes: `tiny` for two cores, `small` for a workstation, `124m` is GPT-2's smallest.

`124m` keeps GPT-2's vocabulary (padded to a multiple of 64), of which bytes use the first 256: same cost, same memory.
"""


class SelfAttention(nn.Module):
    """Causal multi-head attention over (batch, tokens, width)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0)
        out: Tensor = self.out(y.transpose(1, 2).reshape(B, T, C))
        return out


class Block(nn.Module):
    """One pre-norm transformer layer over (batch, tokens, width)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = SelfAttention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width), nn.GELU(), nn.Linear(4 * config.width, config.width)
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        out: Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return out


class GPT(nn.Module):
    """Tokens (batch, tokens) int64 -> logits (batch, tokens, vocabulary) float32."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self._initialize()

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.embedding(tokens) + self.position(positions))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def _initialize(self) -> None:
        """GPT-2's: normal 0.02, and the projections that end in the residual stream scaled by 1/√(2·layers)."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() >= 2:
                residual = name.endswith(("attention.out.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * self.config.layers) if residual else 0.02)


def build(size: str, *, seed: int) -> GPT:
    """A freshly initialized model of a named size; the caller's default generator is left as it was.

    Raises ValueError for an unknown size.
    """
    if size not in SIZES:
        raise ValueError(f"size must be one of {', '.join(SIZES)}; got {size!r}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT(SIZES[size])


def next_token_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross-entropy in nats, a scalar, of a batch (inputs, targets), each (batch, tokens) int64."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def decay_groups(model: nn.Module, *, weight_decay: float) -> list[dict[str, object]]:
    """Optimizer groups: matrices decay, vectors (biases and norms) do not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def parameter_count(model: nn.Module) -> int:
    """Number of distinct scalar parameters: a tied weight counts once."""
    return sum(p.numel() for p in model.parameters())
