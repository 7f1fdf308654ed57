"""What the recorder costs, and what it shows: how much of memory a step really needs at a time."""

from __future__ import annotations

import statistics
import time

import torch
from torch import nn

from elastrain.offload.lifetimes.recorder import StepRecorder
from elastrain.offload.report.show import active_fraction
from experiments.offload.models import KINDS, Model, Shape, build

ROUNDS = 5


def measure_recorder(shape: Shape) -> dict[str, float]:
    """`record_price` of GPT, by the training thread's processor seconds; `active_fraction`, the mean over models."""
    torch.set_num_threads(1)
    prices, fractions = [], []
    for kind in KINDS:
        model, tokens = build(kind, shape)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        _step(model, tokens, optimizer)
        if kind == KINDS[0]:
            prices = [_price(model, tokens, optimizer) for _ in range(ROUNDS)]
        with StepRecorder(model, optimizer) as recorder:
            _step(model, tokens, optimizer)
        fractions.append(active_fraction(recorder.recording()))
    return {"record_price": statistics.median(prices), "active_fraction": statistics.fmean(fractions)}


def _price(model: Model, tokens: torch.Tensor, optimizer: torch.optim.Optimizer) -> float:
    """A recorded step over a plain one."""
    plain_s = _seconds(model, tokens, optimizer)
    with StepRecorder(model, optimizer):
        return _seconds(model, tokens, optimizer) / plain_s


def _seconds(model: Model, tokens: torch.Tensor, optimizer: torch.optim.Optimizer) -> float:
    began_s = time.thread_time()
    _step(model, tokens, optimizer)
    return time.thread_time() - began_s


def _step(model: Model, tokens: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    model(tokens).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
