"""A block that is entered several times draws other numbers each time, and the same again under a checkpoint."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from elastrain.runtime.loop_state.randomness import AFTER, BEFORE, BlockRandomness

torch.set_num_threads(1)
SLOW = pytest.mark.slow


class Block(nn.Module):
    """A layer that draws two masks. All its numbers are whole, so that sums are the same in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randint(-1, 2, (16, 16)).double())
        self.dropout = nn.Dropout(0.5)
        self.seeds: list[int] = []
        """What its stream was set with, by entry."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            self.seeds.append(torch.initial_seed())
        out: Tensor = self.dropout(self.dropout(x) @ self.weight)
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


Enter = Callable[..., Tensor]
"""How a part of the model is entered: plainly, or under a checkpoint of some kind."""
Way = Callable[[Model, Tensor, Enter], Tensor]

non_reentrant = partial(checkpoint, use_reentrant=False)
reentrant = partial(checkpoint, use_reentrant=True)
forgetful = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


def plainly(part: Callable[..., Tensor], *given: Any) -> Tensor:
    return part(*given)


def passes(model: Model, x: Tensor, enter: Enter) -> Tensor:
    """Two passes of the whole model, as for R-Drop."""
    return enter(model, x) - 2 * enter(model, x)


def each_block(model: Model, x: Tensor, enter: Enter) -> Tensor:
    one, two = x, x
    for block in model.blocks:
        one = enter(block, one)
    for block in model.blocks:
        two = enter(block, two)
    return one - 2 * two


def cell(model: Model, x: Tensor, enter: Enter) -> Tensor:
    """A cell that is entered at each moment, with noise between the moments."""
    for _ in range(4):
        x = enter(model.blocks[0], x) + torch.randint(9, (16,))
    return enter(model.blocks[1], x)


def inside_of_one(model: Model, x: Tensor, enter: Enter) -> Tensor:
    """One checkpoint around two entries of each block."""
    return enter(lambda y: model(model(y)), x) + enter(model.blocks[1], x)


def nested(model: Model, x: Tensor, enter: Enter) -> Tensor:
    return enter(lambda y: enter(model.blocks[0], model.blocks[1](y)) + enter(model, y), x) - enter(model, x)


def seeded_alike(model: Model, x: Tensor, enter: Enter) -> Tensor:
    for block in (*model.blocks, *model.blocks):
        torch.manual_seed(3)
        x = enter(block, x)
    return x


def seeded_otherwise(model: Model, x: Tensor, enter: Enter) -> Tensor:
    for seed, block in enumerate((*model.blocks, *model.blocks)):
        torch.manual_seed(seed)
        x = enter(block, x)
    return x


def after_a_rollout(model: Model, x: Tensor, enter: Enter) -> Tensor:
    with torch.no_grad():
        noise = enter(model, x) + torch.randint(9, (16,))
    return enter(model, x + noise)


def frozen_part(model: Model, x: Tensor, enter: Enter) -> Tensor:
    """A block in eval() that samples all the same."""
    block = model.blocks[0].eval()
    block.dropout.train()
    return enter(block, x) - 2 * enter(block, enter(model, x))


def recursive(model: Model, x: Tensor, enter: Enter) -> Tensor:
    """A block that enters another one and itself, and draws on behind these."""
    block, depth = model.blocks[0], [0]

    def behind(module: nn.Module, _: object, out: Tensor) -> Tensor:
        if depth[0] < 2:
            depth[0] += 1
            try:
                out = module(model.blocks[1](out)) + torch.randint(9, (16,))
            finally:
                depth[0] -= 1
        return out

    if not block._forward_hooks:
        block.register_forward_hook(behind)
    return enter(block, x) - 2 * enter(model, x)


def with_a_copy(model: Model, x: Tensor, enter: Enter) -> Tensor:
    teacher = copy.deepcopy(model)
    return enter(model, x) * enter(teacher, x) - enter(model, enter(teacher, x))


def with_a_penalty(model: Model, x: Tensor, enter: Enter) -> Tensor:
    """A gradient penalty: a part of the backward runs within the forward."""
    out = enter(model, x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return enter(model, x) + slope


WAYS = (
    passes,
    each_block,
    cell,
    inside_of_one,
    nested,
    seeded_alike,
    seeded_otherwise,
    after_a_rollout,
    frozen_part,
    recursive,
    with_a_copy,
    with_a_penalty,
)


def _input(micro_batch: int) -> Tensor:
    made = torch.randint(-4, 5, (4, 16), generator=torch.Generator().manual_seed(micro_batch))
    return made.double().requires_grad_()


def _begun(model: nn.Module, micro_batch: int = 5) -> BlockRandomness:
    randomness = BlockRandomness(model, ("blocks.0", "blocks.1"), 7, torch.device("cpu"))
    randomness.begin(2, micro_batch)
    return randomness


def _gradients(model: nn.Module, given: Tensor) -> list[Tensor]:
    leaves = (*model.parameters(), given)
    return [torch.zeros(0) if each.grad is None else each.grad.clone() for each in leaves]


def _alone(way: Way, micro_batch: int) -> list[Tensor]:
    """What the micro-batch alone gives without checkpoints."""
    model = Model()
    _begun(model, micro_batch)
    given = _input(micro_batch)
    way(model, given, plainly).sum().backward()
    return _gradients(model, given)


def _equal(mine: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.fixture(autouse=True)
def _generators() -> Iterator[None]:
    state, python, legacy = torch.get_rng_state(), random.getstate(), np.random.get_state()
    yield
    torch.set_rng_state(state)
    random.setstate(python)
    np.random.set_state(legacy)


def test_each_entry_and_what_is_drawn_behind_it_draws_other_numbers() -> None:
    model = Model()
    randomness = _begun(model)
    made: list[Tensor] = []
    drawn = set()
    for micro_batch in (5, AFTER, BEFORE):
        randomness.begin(2, micro_batch)
        for _ in range(3):
            with torch.set_grad_enabled(len(made) % 2 == 0):
                made.append(model(_input(0)).detach())
            drawn.add(torch.rand(()).item())
    assert len(drawn) == 9
    assert not any(torch.equal(a, b) for place, a in enumerate(made) for b in made[:place])


def test_a_micro_batch_that_is_computed_again_draws_the_same() -> None:
    model = Model()
    randomness = _begun(model)
    made = []
    for _ in range(2):
        randomness.begin(2, 5)
        made.append((model(_input(5)), model(_input(5)), torch.rand(3)))
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))


@pytest.mark.parametrize(
    ("way", "enter"),
    [
        *(pytest.param(way, non_reentrant, id=f"{way.__name__}, non-reentrant") for way in WAYS),
        # Torch refuses autograd.grad through one.
        *(pytest.param(way, reentrant, id=f"{way.__name__}, reentrant") for way in WAYS if way is not with_a_penalty),
    ],
)
def test_a_checkpoint_computes_each_entry_again_with_its_numbers(way: Way, enter: Enter) -> None:
    """Also where the forward of another micro-batch comes in between."""
    model = Model()
    randomness = _begun(model, 5)
    given = _input(5)
    loss = way(model, given, enter).sum()
    if way not in (seeded_alike, seeded_otherwise):  # there the seed does not tell whose it is
        randomness.begin(3, 1)
        way(model, _input(1), enter)
    loss.backward()
    assert _equal(_gradients(model, given), _alone(way, 5))


def test_a_model_that_is_trained_in_eval_is_computed_again_with_its_numbers() -> None:
    """A reentrant checkpoint runs its forward without gradients, as if it were an evaluation."""
    model = Model().eval()
    _begun(model)
    loss = passes(model, _input(5), reentrant).sum()
    forward = [list(block.seeds) for block in model.blocks]
    loss.backward()
    for block, seeds in zip(model.blocks, forward, strict=True):
        assert len(set(seeds)) == 2
        assert block.seeds == [*seeds, *reversed(seeds)]


@pytest.mark.parametrize("way", [seeded_alike, seeded_otherwise])
def test_begin_backward_tells_whose_micro_batch_a_seed_of_the_user_is(way: Way) -> None:
    model = Model()
    randomness = _begun(model, 5)
    given = _input(5)
    loss = way(model, given, non_reentrant).sum()
    randomness.begin(2, 6)
    way(model, _input(6), non_reentrant)
    randomness.begin_backward(2, 5)
    loss.backward()
    assert _equal(_gradients(model, given), _alone(way, 5))


@pytest.mark.parametrize("way", [each_block, cell, frozen_part, with_a_copy])
@pytest.mark.parametrize("other", [None, 6])
def test_without_a_kept_state_entries_are_computed_again_from_the_last_to_the_first(
    way: Way, other: int | None
) -> None:
    model = Model()
    randomness = _begun(model, 5)
    given = _input(5)
    loss = way(model, given, forgetful).sum()
    if other is not None:
        randomness.begin(2, other)
        way(model, _input(other), forgetful)
        randomness.begin_backward(2, 5)
    for _ in range(2):
        model.zero_grad()
        given.grad = None
        loss.backward(retain_graph=True)
        assert _equal(_gradients(model, given), _alone(way, 5))


def test_who_puts_the_generator_back_gets_the_same_numbers_again() -> None:
    """As GradCache does: pieces first without gradients, then each again with them."""
    model = Model()
    _begun(model)
    states, first = [], []
    for piece in range(3):
        states.append(torch.get_rng_state())
        with torch.no_grad():
            first.append(model(_input(piece)))
    for piece in range(3):
        with torch.random.fork_rng():
            torch.set_rng_state(states[piece])
            assert torch.equal(model(_input(piece)), first[piece])
    assert not torch.equal(model(_input(0)), first[0])


def _evaluated(model: Model) -> list[Tensor]:
    """An evaluation with dropout."""
    model.eval()
    for block in model.blocks:
        block.dropout.train()
    with torch.no_grad():
        made = [model(_input(0)) for _ in range(3)]
    model.train()
    return made


@pytest.mark.parametrize("forked", [False, True])
def test_an_evaluation_draws_numbers_of_its_own_and_changes_none_of_the_training(forked: bool) -> None:
    """A loop may evaluate behind the first micro-batch that a member computes, say: others have not done so."""
    found = []
    for evaluates in (False, True):
        model = Model()
        _begun(model)
        with torch.random.fork_rng(enabled=forked):
            made = _evaluated(model) if evaluates else []
        found.append([model(_input(0)), model(_input(0))])
        made += found[-1]
        assert not any(torch.equal(a, b) for place, a in enumerate(made) for b in made[:place])
    assert _equal(*found)


def test_a_copy_draws_numbers_of_its_own_and_changes_none_of_the_model() -> None:
    found = []
    for has_teacher in (False, True):
        model = Model()
        randomness = _begun(model)
        made = []
        if has_teacher:
            teacher = copy.deepcopy(model)
            made = [teacher(_input(0)), teacher(_input(0))]
        found.append([model(_input(0)), model(_input(0))])
        made += found[-1]
        assert not any(torch.equal(a, b) for place, a in enumerate(made) for b in made[:place])
    assert _equal(*found)
    randomness.close()
    before = torch.initial_seed()
    teacher(_input(0))
    assert torch.initial_seed() == before, "once the hooks are off, those of a copy do nothing"


@SLOW
def test_what_is_compiled_draws_the_same_and_is_compiled_once() -> None:
    found = []
    for compiles in (False, True):
        model = Model()
        if compiles:
            for block in model.blocks:
                block.compile(backend="eager")
        randomness = _begun(model)
        for micro_batch in range(12):
            randomness.begin(2, micro_batch)
            with torch.compiler.set_stance("fail_on_recompile" if compiles and micro_batch else "default"):
                made = [model(_input(0)) for _ in range(3)]
        found.append([each.detach() for each in made])
        randomness.close()
    assert _equal(*found)
