"""Masks belong to (seed, step, micro-batch, block, entry), also when a checkpoint draws them again."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from elastrain.runtime.loop_state.randomness import AFTER, BEFORE, BlockRandomness

torch.set_num_threads(1)
CPU = torch.device("cpu")


class Noisy(nn.Module):
    """Draws a mask before its weights, and another after."""

    def __init__(self, inner_checkpoint: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.inner_checkpoint = inner_checkpoint

    def _body(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(x, 0.5, training=True)
        return nn.functional.dropout(torch.tanh(self.linear(x)), 0.5, training=True)

    def forward(self, x: Tensor) -> Tensor:
        if not self.inner_checkpoint:
            return self._body(x)
        out: Tensor = checkpoint(self._body, x, use_reentrant=False)
        return out


class Model(nn.Module):
    """How each block is entered: plainly, or under a checkpoint of some kind."""

    def __init__(self, how: str = "plain") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.blocks = nn.ModuleList(Noisy(inner_checkpoint=how == "inside") for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "whole":
            out: Tensor = checkpoint(self._all, x, use_reentrant=False)
            return out
        for block in self.blocks:
            x = self._enter(block, x)
        return x

    def _all(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x * 1.0)
        return x

    def _enter(self, block: nn.Module, x: Tensor) -> Tensor:
        if self.how in ("non-reentrant", "reentrant"):
            x = checkpoint(block, x, use_reentrant=self.how == "reentrant")
        elif self.how == "wrapped":
            x = checkpoint(lambda y: block(y * 1.0), x, use_reentrant=False)
        else:
            x = block(x)
        return x


NAMES = ("blocks.0", "blocks.1", "blocks.2")
HOWS = ("plain", "inside", "non-reentrant", "reentrant", "wrapped", "whole")


def _input(micro_batch: int) -> Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(micro_batch)).requires_grad_()


def _gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def _alone(seed: int, step: int, micro_batch: int) -> list[Tensor]:
    """What a plain model gets from this micro-batch alone."""
    model = Model()
    BlockRandomness(model, NAMES, seed, CPU).begin(step, micro_batch)
    model(_input(micro_batch)).sum().backward()
    return _gradients(model)


def _equal(mine: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(mine) == len(theirs) and all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.fixture(autouse=True)
def _generators() -> Iterator[None]:
    state, python, legacy = torch.get_rng_state(), random.getstate(), np.random.get_state()
    yield
    torch.set_rng_state(state)
    random.setstate(python)
    np.random.set_state(legacy)


def test_each_of_seed_step_micro_batch_and_block_changes_the_masks() -> None:
    drawn = set()
    for seed, step, micro_batch in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]:
        model = nn.ModuleDict({"a": nn.Identity(), "b": nn.Identity()})
        randomness = BlockRandomness(model, ("a", "b"), seed, CPU)
        randomness.begin(step, micro_batch)
        drawn.add(torch.rand(()).item())
        for block in model.values():
            block(torch.zeros(1))
            drawn.add(torch.rand(()).item())
    assert len(drawn) == 12


@pytest.mark.parametrize("how", HOWS)
def test_masks_do_not_depend_on_what_was_drawn_before(how: str) -> None:
    model = Model(how)
    randomness = BlockRandomness(model, NAMES, 7, CPU)
    randomness.begin(2, 5)
    model(_input(5))
    torch.rand(1000)
    randomness.begin(3, 1)
    model(_input(1)).sum().backward()
    assert _equal(_gradients(model), _alone(7, 3, 1))


@pytest.mark.parametrize("how", HOWS)
def test_recomputation_draws_the_masks_of_its_own_micro_batch(how: str) -> None:
    """Forward 1, forward 2, backward 1, backward 2: another micro-batch comes in between."""
    model = Model(how)
    randomness = BlockRandomness(model, NAMES, 7, CPU)
    losses = []
    for micro_batch in (1, 2):
        randomness.begin(0, micro_batch)
        losses.append(model(_input(micro_batch)).sum())
    for micro_batch, loss in zip((1, 2), losses, strict=True):
        model.zero_grad()
        loss.backward()
        assert _equal(_gradients(model), _alone(7, 0, micro_batch)), f"micro-batch {micro_batch}"


def test_recomputation_after_the_next_step_began_draws_the_same_masks() -> None:
    model = Model("non-reentrant")
    randomness = BlockRandomness(model, NAMES, 7, CPU)
    randomness.begin(4, 3)
    loss = model(_input(3)).sum()
    randomness.begin(5, 0)
    model(_input(0))
    loss.backward()
    assert _equal(_gradients(model), _alone(7, 4, 3))


def test_without_a_kept_state_begin_before_backward_gives_the_masks() -> None:
    model = Model()
    model._enter = lambda block, x: checkpoint(  # type: ignore[method-assign]
        block, x, use_reentrant=False, preserve_rng_state=False
    )
    randomness = BlockRandomness(model, NAMES, 7, CPU)
    randomness.begin(0, 1)
    loss = model(_input(1)).sum()
    randomness.begin(0, 2)
    model(_input(2))
    randomness.begin(0, 1)
    loss.backward()
    assert _equal(_gradients(model), _alone(7, 0, 1))


def test_a_forward_between_two_micro_batches_changes_nothing() -> None:
    model = Model()
    randomness = BlockRandomness(model, NAMES, 7, CPU)
    randomness.begin(0, 0)
    model(_input(9))  # an evaluation of the user's own
    randomness.begin(0, 1)
    torch.manual_seed(3)  # and a seed that is not ours
    model(_input(1)).sum().backward()
    assert _equal(_gradients(model), _alone(7, 0, 1))


def test_an_evaluation_that_samples_draws_on() -> None:
    model = Model().eval()
    randomness = BlockRandomness(model, NAMES, 7, CPU)
    randomness.begin(0, 0)
    drawn = set()
    for _ in range(5):
        model(_input(0))
        drawn.add(torch.rand(()).item())
    assert len(drawn) == 5


def test_python_and_numpy_are_seeded_per_micro_batch() -> None:
    randomness = BlockRandomness(nn.Identity(), (), 0, CPU)
    drawn = []
    for step, micro_batch in [(0, 0), (0, 1), (0, 0)]:
        randomness.begin(step, micro_batch)
        drawn.append((random.random(), np.random.rand()))
    assert drawn[0] == drawn[2]
    assert drawn[0][0] != drawn[1][0] and drawn[0][1] != drawn[1][1]


def test_what_is_remembered_is_bounded() -> None:
    model = Model()
    randomness = BlockRandomness(model, NAMES, 0, CPU)
    for step in range(20):
        for micro_batch in range(4):
            randomness.begin(step, micro_batch)
            model(_input(0))
    assert len(randomness._set) <= 2 * 4 * 4
    assert len(randomness._begun) <= 2 * 4


def test_closing_leaves_the_generator_alone() -> None:
    model = Model()
    randomness = BlockRandomness(model, NAMES, 0, CPU)
    randomness.close()
    before = torch.default_generator.initial_seed()
    model(_input(0))
    assert torch.default_generator.initial_seed() == before


@pytest.mark.parametrize("when", [BEFORE, AFTER])
def test_what_the_loop_draws_between_micro_batches_is_the_same_whichever_this_member_computed(when: int) -> None:
    drawn = []
    for last_micro_batch in (0, 5):
        model = Model()
        randomness = BlockRandomness(model, [f"blocks.{i}" for i in range(3)], 7, CPU)
        randomness.begin(3, last_micro_batch)
        model(torch.ones(2, 16))
        randomness.begin(3, when)
        numbers = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        drawn.append((numbers, model(torch.ones(2, 16)).tolist()))
        randomness.close()
    assert drawn[0] == drawn[1]


def test_what_the_loop_draws_differs_before_and_after_a_step_and_from_step_to_step() -> None:
    randomness = BlockRandomness(Model(), [], 7, CPU)
    drawn = set()
    for step in range(3):
        for when in (BEFORE, 0, 1, AFTER):
            randomness.begin(step, when)
            drawn.add((random.random(), float(np.random.rand()), float(torch.rand(()))))
    assert len(drawn) == 12
