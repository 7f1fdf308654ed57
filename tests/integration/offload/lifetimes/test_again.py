"""Blocks that the plan has computed again: parameters, states and buffers stay bit for bit those of plain training."""

from __future__ import annotations

import copy
import itertools
import pickle
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from elastrain.offload.activations import hooks
from elastrain.offload.drives.device import Device
from elastrain.offload.errors import SpillReadError
from elastrain.offload.lifetimes import within as module
from elastrain.offload.lifetimes.pieces.pages import PagePool
from elastrain.offload.lifetimes.recompute import BlockForward
from elastrain.offload.lifetimes.saved import SAVED_BYTES
from elastrain.offload.lifetimes.within import TrainingWithin, within
from elastrain.offload.planning import move_plan as plans
from elastrain.offload.planning import program as facts
from elastrain.offload.planning.orders import StepStage, UpdateOrder, needed_at
from elastrain.offload.planning.plan_search import Policy
from elastrain.offload.planning.plan_values import Budget, Plan, Program
from experiments.offload.models import KINDS, build
from tests.integration.offload.lifetimes.touching import SHAPE, NothingBesides, tokens
from tests.support.faulty_engines import ThrottledEngine
from tests.support.memory_engine import MemoryEngine

pytestmark = pytest.mark.usefixtures("small_limits", "one_thread")
STEPS = 6
WIDTH = 128
Loss = Callable[[nn.Module, int], Tensor]
LAST: list[BlockForward] = []
"""The blocks of who trained last."""


def all_again(program: Program, budget: Budget) -> Plan:
    """The plan that computes again whatever can be."""
    return plans._plan_within(program, budget, facts.gaps(program), recomputed=1.0)


def loss_of(model: nn.Module, step: int) -> Tensor:
    found: Tensor = model(tokens(step))
    return found


def seed() -> None:
    torch.manual_seed(7)
    random.seed(7)


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    of = [optimizer.state[each] for each in model.parameters() if each in optimizer.state]
    states = [value for state in of for value in state.values() if isinstance(value, Tensor)]
    return [each.detach().clone() for each in itertools.chain(model.parameters(), model.buffers(), states)]


def plain(model: nn.Module, loss: Loss = loss_of) -> list[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    seed()
    for step in range(STEPS):
        loss(model, step).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return held(model, optimizer)


def begun(model: nn.Module, folder: Path, **more: Any) -> tuple[TrainingWithin, torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    limit_bytes = 3 * sum(each.nbytes for each in model.parameters()) + (1 << 20)
    more = {"policy": Policy(make=all_again, improve=lambda plan, _: plan), "memory_limit": limit_bytes, **more}
    return within(model, optimizer, dirs=[str(folder)], **more), optimizer


def again(model: nn.Module, folder: Path, loss: Loss = loss_of, **more: Any) -> tuple[list[Tensor], TrainingWithin]:
    training, optimizer = begun(model, folder, **more)
    seed()
    for step in range(STEPS):
        loss(model, step).backward()  # type: ignore[no-untyped-call]
        training.step()
    LAST[:] = forwards(training)
    training.close()
    return held(model, optimizer), training


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


def forwards(training: TrainingWithin) -> list[BlockForward]:
    return [each for each in training._handles if isinstance(each, BlockForward)]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_are_those_of_plain_training(kind: str, dropout: float, tmp_path: Path) -> None:
    shape = replace(SHAPE, dropout=dropout)
    ours, training = again(build(kind, shape)[0], tmp_path)
    assert training.figures()["computed_again"] >= 4 * (STEPS - 2)
    assert same(ours, plain(build(kind, shape)[0]))


def test_a_trial_keeps_nothing_that_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of one computed storage, as queries, keys and values are, are no less to be moved than the whole."""
    staying: list[int] = []

    class Noted(hooks.StayingTensor):
        def __init__(self, tensor: Tensor, name: str) -> None:
            super().__init__(tensor, name)
            in_backward = torch._C._current_graph_task_id() != -1  # which uses it at once
            if not in_backward and not isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter):
                staying.append(tensor.untyped_storage().nbytes())

    monkeypatch.setattr(hooks, "StayingTensor", Noted)
    _, training = again(build("gpt", SHAPE)[0], tmp_path)
    assert training.figures()["computed_again"]
    assert max(staying) < SAVED_BYTES


class TwoLayers(nn.Module):
    """What lies between them is saved, and only that can be given up."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh()).tanh()


class Outside(nn.Module):
    """Its blocks run within checkpoints, or it goes on with what they return."""

    def __init__(self, *, is_checkpointed: bool) -> None:
        super().__init__()
        self.is_checkpointed = is_checkpointed
        self.layers = nn.ModuleList(TwoLayers() for _ in range(4))

    def forward(self, step: int) -> Tensor:
        x = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(step))
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.is_checkpointed else layer(x).exp().tanh()
        return x.sum()


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_what_a_block_has_not_saved_itself_stays(is_checkpointed: bool, tmp_path: Path) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        found: Tensor = model(step)
        return found

    torch.manual_seed(1)
    model = Outside(is_checkpointed=is_checkpointed)
    ours, training = again(copy.deepcopy(model), tmp_path, loss, policy=None)
    assert same(ours, plain(model, loss))
    assert training._planning._basis is not None
    inside_bytes = 0 if is_checkpointed else WIDTH * WIDTH * 4
    seen = [each for each in training._planning._basis[0].points if each.stage is StepStage.FORWARD]
    assert [max(0, each.saved_bytes - (each.needed_bytes or 0)) for each in seen] == [inside_bytes] * 4
    assert any(each.saved_bytes for each in seen)


def test_what_a_block_has_not_saved_itself_leaves_with_what_it_begins_from(tmp_path: Path) -> None:
    model = Outside(is_checkpointed=False)
    training, _ = begun(model, tmp_path)
    for step in range(STEPS):
        loss = model(step)
        if step == STEPS - 1:
            assert training._conductor.carried is not None
            places = training._conductor.carried.given_up
            assert places
            assert [training._saved._records(each) for each in places] == [[]] * len(places)
            # What came in, what the block returned, and what the model made of that.
            assert all(len(training._saved._records(needed_at(each))) >= 3 for each in places)
        loss.backward()
        training.step()
    training.close()


def test_under_autocast(tmp_path: Path) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(model, step)

    shape = replace(SHAPE, dropout=0.1)
    ours, training = again(build("gpt", shape)[0], tmp_path, loss)
    assert training.figures()["computed_again"]
    assert same(ours, plain(build("gpt", shape)[0], loss))


def test_a_graph_that_is_gone_through_twice_and_two_forwards_before_their_backwards(tmp_path: Path) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        first, second = loss_of(model, step), loss_of(model, 100 + step)
        first.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        return first + second

    ours, training = again(build("gpt", SHAPE)[0], tmp_path, loss)
    assert training.figures()["computed_again"]
    assert same(ours, plain(build("gpt", SHAPE)[0], loss))


class EachPointAMillisecond(NothingBesides):
    """By this clock computing is quick, also on a machine that is busy with others."""

    def __init__(self) -> None:
        super().__init__()
        self._looks = itertools.count()

    def clock(self) -> float:
        return next(self._looks) / 1000


def test_the_planner_prefers_it_to_a_slow_drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "memory_for", lambda _, limit_bytes: (PagePool(limit_bytes), EachPointAMillisecond()))
    device, model = Device(ThrottledEngine(MemoryEngine(), bytes_per_s=20e6)), build("gpt", SHAPE)[0]
    device.reads.recent_bytes_per_s = device.writes.recent_bytes_per_s = 20e6  # more would be moved before it is known
    limit_bytes = sum(each.nbytes for each in model.parameters()) + (256 << 10)
    ours, training = again(model, tmp_path, policy=Policy(), engines=[device], memory_limit=limit_bytes)
    assert "computed again" in training.reason and training.figures()["computed_again"]
    assert same(ours, plain(build("gpt", SHAPE)[0]))


def test_it_is_not_done_where_it_is_not_wished(tmp_path: Path) -> None:
    _, training = again(build("gpt", SHAPE)[0], tmp_path, policy=Policy(recompute=False))
    assert not training.figures()["computed_again"] and "computed again" not in training.reason


# What a forward changes.


class Blocks(nn.Module):
    """Blocks of one class between an embedding and a head."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class Block(nn.Module):
    """A block as others are."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(4 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.normed(self.up(x))))

    def normed(self, x: Tensor) -> Tensor:
        """Running means of a batch: in training each forward changes them."""
        return self.norm(x.flatten(0, 1)).view(x.shape)  # type: ignore[no-any-return]


class Counting(Block):
    """Keeps numbers, lists and buffers from forward to forward, which its values depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = 0, list[float]()
        self.register_buffer("moved", torch.zeros(1))

    def normed(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(float(x.detach().mean()))
        self.moved += 0.01
        return x * (1 + 0.1 * (self.calls % 3) + 0.01 * len(self.seen)) + self.moved


class Rolling(Block):
    """Random numbers of Python."""

    def normed(self, x: Tensor) -> Tensor:
        return x * random.random()


class OwnGenerator(Block):
    """Random numbers of its own, which nobody knows how to roll back to the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def normed(self, x: Tensor) -> Tensor:
        return x * torch.rand(x.shape, generator=self.generator)


class Overwriting(Block):
    """Changes what it is given, which nobody needs any more."""

    def forward(self, x: Tensor) -> Tensor:
        inside = self.down(F.gelu(self.up(x * 1.5)))
        x += inside
        return x


class KeepsValues(Block):
    """Somebody else holds what it saves."""

    def normed(self, x: Tensor) -> Tensor:
        self.last = F.gelu(x)
        return self.last


@pytest.mark.parametrize("block", [Block, Rolling, KeepsValues])
def test_what_a_forward_changes_is_changed_once(block: type[nn.Module], tmp_path: Path) -> None:
    ours, training = again(Blocks(block), tmp_path)
    assert training.figures()["computed_again"]
    assert [each.barred for each in LAST[1:-1]] == [""] * 3
    assert same(ours, plain(Blocks(block)))


@pytest.mark.parametrize(
    ("block", "why"),
    [(Counting, "computes other values"), (OwnGenerator, "computes other values"), (Overwriting, "changes what it is")],
)
def test_who_would_compute_other_values_is_not_asked_again(block: type[nn.Module], why: str, tmp_path: Path) -> None:
    ours, _ = again(Blocks(block), tmp_path)
    assert all(why in each.barred for each in LAST[1:-1]), [each.barred for each in LAST]
    assert same(ours, plain(Blocks(block)))


def test_other_values_are_never_used(tmp_path: Path) -> None:
    """A block that turns to other values once it is trusted."""
    factor = [1.0]

    class Turning(Block):
        def normed(self, x: Tensor) -> Tensor:
            return x * factor[0]

    model = Blocks(Turning)
    training, _ = begun(model, tmp_path)
    for step in range(STEPS):
        loss_of(model, step).backward()  # type: ignore[no-untyped-call]
        training.step()
    assert all(each.trusted for each in forwards(training)[1:-1])
    loss = loss_of(model, STEPS)
    factor[0] = 1.25
    with pytest.raises(SpillReadError, match=r"blocks\.2 computes other values .*: forget the gradients and compute"):
        loss.backward()  # type: ignore[no-untyped-call]
    # What the sentence says works at once, although all other blocks have changed their ways, too.
    model.zero_grad()
    for factor[0] in (1.5, 1.25):
        loss = loss_of(model, STEPS)
    factor[0] = 2.0
    loss.backward()  # type: ignore[no-untyped-call]
    training.step()
    training.close()


class Masked(Block):
    """A block that reads, before its forward, what the model has left in it."""

    mask = torch.ones(4 * WIDTH)

    def normed(self, x: Tensor) -> Tensor:
        return super().normed(x * self.mask)


def test_what_a_model_leaves_in_its_blocks_is_there_again_for_each_forward(tmp_path: Path) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        found = []
        for number in (2 * step, 2 * step + 1):
            mask = (torch.randn(4 * WIDTH, generator=torch.Generator().manual_seed(number)) > 0).float()
            for each in model.modules():
                if isinstance(each, Masked):
                    each.mask = mask
            found.append(loss_of(model, number))
        return found[0] + found[1]  # both forwards before their backwards

    ours, training = again(Blocks(Masked), tmp_path, loss)
    assert training.figures()["computed_again"]
    assert [each.barred for each in LAST[1:-1]] == [""] * 3
    assert same(ours, plain(Blocks(Masked), loss))


def test_a_copy_of_the_model_is_a_plain_one(tmp_path: Path) -> None:
    model = Blocks(Block)
    training, _ = begun(model, tmp_path)
    with training.whole():
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301 - our own bytes
            assert not any(isinstance(each.__dict__.get("forward"), BlockForward) for each in twin.modules())
            twin.blocks[0].down.weight.data.zero_()
            assert loss_of(twin, 0).item() != loss_of(model, 0).item()
    training.close()
    assert not any("forward" in each.__dict__ for each in model.modules())


def test_what_a_trial_keeps_leaves_before_the_next_blocks_update(tmp_path: Path) -> None:
    """Else the limit that holds where updates come after the backward is too small: which it is depends on seconds."""
    made: list[Plan] = []

    def make(program: Program, budget: Budget) -> Plan:
        made.append((all_again if made else plans.first_plan)(program, budget))  # tried while updates are due
        return made[-1]

    policy = Policy(make=make, improve=lambda plan, _: plan, orders=(UpdateOrder.BEFORE_FORWARD,))
    model = build("t5", SHAPE)[0]
    limit_bytes = sum(each.nbytes for each in model.parameters()) + (256 << 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    training = within(model, optimizer, dirs=[str(tmp_path)], memory_limit=limit_bytes, policy=policy)
    for step in range(6):
        loss_of(model, step).backward()
        training.step(max_grad_norm=1.0)
    training.close()
