"""The random streams of blocks on a device: the CPU's draws, bit for bit, whatever was drawn in between."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from elastrain.runtime.loop_state.randomness import AFTER, BEFORE, BlockRandomness
from tests.unit.runtime.test_randomness import HOWS, NAMES, Model, _input


def _gradients(where: str, how: str, *, disturbed: bool = False) -> list[list[Tensor]]:
    """Gradients of two micro-batches, whose backwards come after both forwards."""
    device = torch.device(where)
    model = Model(how).to(device)
    randomness = BlockRandomness(model, NAMES, 7, device)
    losses, found = [], []
    for micro_batch in (1, 2):
        randomness.begin(3, micro_batch)
        losses.append(model(_input(micro_batch).to(device)).sum())
        if disturbed:
            torch.rand(99, device=device)
    for loss in losses:
        model.zero_grad()
        loss.backward()
        found.append([q.grad.cpu() for q in model.parameters() if q.grad is not None])
    return found


@pytest.mark.parametrize("how", HOWS)
def test_masks_on_a_device_are_the_cpus(how: str) -> None:
    ours, theirs, disturbed = _gradients("late", how), _gradients("cpu", how), _gradients("late", how, disturbed=True)
    assert all(len(each) == 6 for each in ours)
    for mine, *others in zip(ours, theirs, disturbed, strict=True):
        for other in others:
            assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))


def test_both_the_device_and_the_cpu_are_seeded_wherever_a_loop_draws() -> None:
    model = Model().to("late")
    randomness = BlockRandomness(model, NAMES, 7, torch.device("late"))

    def drawn(step: int, micro_batch: int) -> tuple[float, float]:
        torch.rand(5, device="late")
        randomness.begin(step, micro_batch)
        return torch.rand(()).item(), torch.rand((), device="late").item()

    places = [(step, micro_batch) for step in (0, 1) for micro_batch in (BEFORE, 0, 1, AFTER)]
    once, again = ([drawn(*place) for place in places] for _ in range(2))
    assert once == again
    assert all(cpu == device for cpu, device in once)
    assert len(set(once)) == len(places)
