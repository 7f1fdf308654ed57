"""What all training programs share besides the model: optimizer, learning-rate schedule, held-out loss."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from experiments.train_gpt.data import Windows, batch_of, spread
from experiments.train_gpt.model import decay_groups, next_token_loss

MAX_GRAD_NORM = 1.0
FINAL_LR_FRACTION = 0.1


def adamw(model: nn.Module, *, lr: float, weight_decay: float = 0.1) -> torch.optim.AdamW:
    """Fused AdamW over two groups: matrices decay, vectors do not."""
    return torch.optim.AdamW(decay_groups(model, weight_decay=weight_decay), lr=lr, betas=(0.9, 0.95), fused=True)


def cosine_factor(step: int, *, warmup_steps: int, total_steps: int) -> float:
    """Linear up to 1 over `warmup_steps`, then half a cosine down to FINAL_LR_FRACTION at `total_steps`."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return FINAL_LR_FRACTION + (1 - FINAL_LR_FRACTION) * 0.5 * (1 + math.cos(math.pi * progress))


def cosine_with_warmup(optimizer: torch.optim.Optimizer, *, warmup_steps: int, total_steps: int) -> LambdaLR:
    """A scheduler to be stepped once per optimizer step."""
    return LambdaLR(optimizer, lambda step: cosine_factor(step, warmup_steps=warmup_steps, total_steps=total_steps))


@torch.no_grad()
def held_out_loss(model: nn.Module, *, context: int, windows: int = 64, batch_size: int = 8) -> float:
    """Mean cross-entropy in nats per byte over fixed held-out windows, in eval mode; the model's mode is put back."""
    dataset = Windows("held_out", context=context)
    chosen = spread(dataset, windows)
    was_training = model.training
    model.eval()
    total = 0.0
    for start in range(0, len(chosen), batch_size):
        part = chosen[start : start + batch_size]
        total += next_token_loss(model, batch_of(dataset, part)).item() * len(part)
    model.train(was_training)
    return total / len(chosen)
