"""Steps that differ from their plan: other sizes, other orders, more backwards. Slower, and the same bits."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastrain.offload.lifetimes import replanning
from elastrain.offload.lifetimes.within import TrainingWithin, within
from elastrain.offload.planning import plan_search
from elastrain.offload.planning.plan_search import ChosenPlan
from experiments.offload.models import build
from tests.integration.offload.lifetimes.touching import SHAPE, tokens

pytestmark = pytest.mark.usefixtures("small_limits", "one_thread")


def train(model: nn.Module, steps: list[tuple[int, int]], folder: Path, *, limit_bytes: int | None) -> list[str]:
    """So many sequences and backwards in each step; the reasons of plans, where there is a limit."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    training: TrainingWithin | None = None
    if limit_bytes is not None:
        training = within(model, optimizer, dirs=[str(folder)], memory_limit=limit_bytes)
    reasons = []
    for number, (sequences, backwards) in enumerate(steps):
        for part in range(backwards):
            loss: Tensor = model(tokens(number + part).repeat(sequences, 1))
            loss.backward()  # type: ignore[no-untyped-call]
        if training is not None:
            training.step(max_grad_norm=0.1)
            reasons.append(training.reason)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    if training is not None:
        training.close()
    return reasons


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ([(2, 1)] * 3, "forwards save"),
        ([(1, 2)] * 3, "in another order, or as often"),
        ([(2, 1), (1, 1), (1, 2), (1, 1)], ""),
    ],
)
def test_other_steps_have_the_same_bits_and_get_a_plan_if_they_last(
    changed: list[tuple[int, int]], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seconds_or_rates in ("SECONDS_SHARE", "RATES_FACTOR"):  # of a machine that does other things, too
        monkeypatch.setattr(plan_search, seconds_or_rates, math.inf)
    steps = [(1, 1)] * 4 + changed + [(1, 1)]
    model, _ = build("gpt", SHAPE)
    plain = copy.deepcopy(model)
    reasons = train(model, steps, tmp_path, limit_bytes=3 << 20)
    train(plain, steps, tmp_path, limit_bytes=None)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, plain.get_parameter(name)), name
    renewed = [reason for reason in reasons if reason.startswith("planned anew")]
    assert bool(renewed) == bool(why) and all(why in reason for reason in renewed)


def test_a_plan_is_made_again_of_the_first_step_under_it_and_kept_while_steps_are_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seconds_or_rates in ("SECONDS_SHARE", "RATES_FACTOR"):
        monkeypatch.setattr(plan_search, seconds_or_rates, math.inf)
    model, _ = build("gpt", SHAPE)
    optimizer, made, chosen = torch.optim.AdamW(model.parameters()), list[int](), replanning.choose

    def choose(*given: Any) -> ChosenPlan:
        made[-1] += 1
        return chosen(*given)

    monkeypatch.setattr(replanning, "choose", choose)
    training = within(model, optimizer, dirs=[str(tmp_path)], memory_limit=3 << 20)
    for number in range(7):
        made.append(0)
        model(tokens(number)).backward()
        training.step()
    training.close()
    # Where updates come before forwards, the first step under a plan says nothing of updates.
    assert made in ([0, 1, 1, 0, 0, 0, 0], [0, 1, 0, 1, 0, 0, 0])


def test_a_batch_for_which_no_plan_fits_is_served_without_one(tmp_path: Path) -> None:
    model, _ = build("gpt", SHAPE)
    plain = copy.deepcopy(model)
    steps = [(1, 1)] * 3 + [(4, 1)] * 3
    reasons = train(model, steps, tmp_path, limit_bytes=1 << 20)
    train(plain, steps, tmp_path, limit_bytes=None)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, plain.get_parameter(name)), name
    assert "kept, although forwards save" in reasons[-1]
