"""Small programs that train on a device and return everything that they computed, on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """A block of a GPT: attention and MLP, with dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (t.view(batch, length, 2, -1).transpose(1, 2) for t in self.qkv(self.before(x)).split(width, dim=2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        x = x + F.dropout(self.out(mixed), 0.1, self.training)
        return x + self.mlp(self.between(x))


class GPT(nn.Module):
    """A language model whose head is tied to its embedding."""

    def __init__(self, width: int = 16, words: int = 37, recomputes: bool = False) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(8, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = F.dropout(self.words(tokens) + self.places(torch.arange(8, device=tokens.device)), 0.1, self.training)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


class Convolutions(nn.Module):
    """Convolutions with BatchNorm, pooling and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(8), nn.BatchNorm2d(8)])
        self.head = nn.Linear(8, 5)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        x = F.relu(self.norms[0](self.first(images)))
        x = F.max_pool2d(x + F.silu(self.norms[1](self.second(x))), 2)
        return F.cross_entropy(self.head(F.adaptive_avg_pool2d(x, 1).flatten(1)), targets)


def moved(model: nn.Module, device: str) -> nn.Module:
    """Move a model whose tied weights stay tied."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return model.to(device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


Batch = tuple[Tensor, Tensor]
Make = Callable[[], tuple[nn.Module, Callable[[], Batch]]]


def text(**given: bool) -> tuple[nn.Module, Callable[[], Batch]]:
    return GPT(**given), lambda: (torch.randint(37, (3, 8)), torch.randint(37, (3, 8)))


def images() -> tuple[nn.Module, Callable[[], Batch]]:
    return Convolutions(), lambda: (torch.randn(4, 3, 8, 8), torch.randint(5, (4,)))


def train(
    device: str,
    make: Make = text,
    *,
    optimizer: Callable[..., torch.optim.Optimizer] = lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    dtype: torch.dtype = torch.float32,
    autocast: torch.dtype | None = None,
    scaled: bool = False,
    steps: int = 3,
    compiled: str = "",
) -> list[Tensor]:
    """Train some steps. Returns losses, norms, gradients, parameters, buffers and the optimizer's state.

    `compiled`: backend of torch.compile, or empty.
    """
    torch.manual_seed(3)
    model, draw = make()
    batches = [draw() for _ in range(steps)]
    model = moved(model.to(dtype), device)
    if compiled:
        torch._dynamo.reset()
        model.compile(backend=compiled)
    stepping = optimizer(model.parameters())
    scaler = torch.amp.GradScaler(device, enabled=scaled, init_scale=2.0**20, growth_interval=1)
    shown: list[Tensor] = []
    torch.manual_seed(4)  # the CPU has drawn more by now
    for given, targets in batches:
        given = given.to(dtype) if given.is_floating_point() else given
        with torch.autocast(device, dtype=autocast, enabled=autocast is not None):
            loss = model(given.to(device), targets.to(device))
        scaler.scale(loss).backward()
        scaler.unscale_(stepping)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        shown += [loss.detach().cpu(), norm.cpu(), *(p.grad.cpu() for p in model.parameters() if p.grad is not None)]
        scaler.step(stepping)
        scaler.update()
        stepping.zero_grad()
    kept = [value for state in stepping.state.values() for value in state.values() if isinstance(value, Tensor)]
    shown += [t.detach().cpu() for t in (*model.parameters(), *model.buffers(), *kept)]
    return [*shown, torch.tensor(scaler.get_scale())]
