"""A micro-batch computed by its owner first, and by a neighbour after other ones: no difference but a real one."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import elastrain
from elastrain import protocol as p
from elastrain.integrity.checks import difference
from elastrain.job.values import Check
from elastrain.offload.errors import SpillReadError
from elastrain.runtime.carrying.landed_results import Landing
from elastrain.runtime.io.loop_channel import Assignment, LoopOver
from elastrain.runtime.loop.computed_run import READ_TRIES, StepParts
from elastrain.runtime.loop.mutation_guard import MutationGuard
from elastrain.runtime.loop.step import Step
from elastrain.runtime.loop_state.layers import Layers
from elastrain.runtime.loop_state.randomness import BlockRandomness
from elastrain.runtime.model.flat_model import ModelState
from elastrain.runtime.model.gradients import GradientSlot
from elastrain.runtime.model.partition import describe

torch.set_num_threads(1)
CPU = torch.device("cpu")


class Data:
    """As many samples as nothing divides: the last micro-batches of an epoch belong to the next one, too."""

    def __len__(self) -> int:
        return 37

    def __getitem__(self, index: int) -> Any:
        return torch.randn(6), index % 5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10)
        self.norm = nn.BatchNorm1d(10)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.drop(self.norm(self.first(x)).relu()))
        return out


class Checkpointed(Net):
    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(lambda y: self.drop(self.first(y)).tanh(), x, use_reentrant=False)
        out: Tensor = self.last(hidden)
        return out


class Tied(Net):
    """A weight in two blocks, one that is frozen, one that nothing uses and one that only some micro-batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(6, 10)
        self.again.weight = self.first.weight
        self.unused = nn.Linear(3, 3)
        self.sometimes = nn.Linear(10, 10)
        self.norm.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x)) + self.again(x)
        out: Tensor = self.last(self.sometimes(hidden) if x[0, 0] > 0 else hidden)
        return out


class Cached(Net):
    """Built by the first forward and then only read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0.0, 1.0, 10)
        out: Tensor = self.last(self.first(x) * self.table)
        return out


class OwnGenerator(Net):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0.1 * torch.randn(x.shape, generator=self.generator))


class OwnNumpyGenerator(Net):
    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * float(self.generator.random()))


class Counts(Net):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) / self.calls


class Remembers(Net):
    """A plain tensor attribute: a memory of former inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.zeros(6)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = 0.9 * self.seen + 0.1 * x.mean(0)
        return super().forward(x + self.seen)


class ChangesABuffer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x + self.calls)


class CountingData(Data):
    def __init__(self) -> None:
        self.calls = 0

    def __getitem__(self, index: int) -> Any:
        self.calls += 1
        return torch.randn(6) + self.calls, index % 5


class DrawingData(Data):
    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def __getitem__(self, index: int) -> Any:
        return torch.randn(6) * float(self.generator.random()), index % 5


class FakeHandover:
    """Gives out what a member would have to do, and keeps what is told."""

    landing = Landing()

    def __init__(self, commands: list[p.Compute | p.Recompute], new_slot: Callable[[], GradientSlot]) -> None:
        self._commands = deque(commands)
        self._new_slot = new_slot
        self.checks: list[p.Checked] = []
        self.runs: list[int] = []
        self.slots_held: list[int] = []
        """How many of those given out somebody still has, whenever work is asked for."""
        self._given: list[weakref.ref[GradientSlot]] = []

    def next_work(self) -> Any:
        self.slots_held.append(sum(given() is not None for given in self._given))
        if not self._commands:
            return LoopOver()
        slot = self._new_slot()
        self._given.append(weakref.ref(slot))
        return Assignment(self._commands.popleft(), slot)

    def tell_landed(self, *made: Callable[[], Any], **_: Any) -> None:
        for make in made:
            self.tell(make())

    def tell(self, event: p.Checked | p.BlockDone) -> None:
        if isinstance(event, p.Checked):
            self.checks.append(event)
        else:
            self.runs.append(event.run)


@dataclass
class Case:
    """A script; what it computes must not depend on which member computes it."""

    model: type[Net] = Net
    data: type[Data] = Data
    run_length: int = 1
    loss_scale: float = 1.0
    dtype: torch.dtype = torch.float32
    autocast: bool = False
    nan: bool = False
    weighted: bool = False
    carries: bool = False
    for_nothing: tuple[int, float, float] | None = None
    """A micro-batch of weight 0, and by what its inputs and its loss are multiplied."""
    backward: Callable[[], Any] = nullcontext


def member(case: Case, commands: list[p.Compute | p.Recompute]) -> tuple[FakeHandover, nn.Module]:
    """What one member's step 0 tells of these runs."""
    torch.manual_seed(0)
    model = case.model().to(case.dtype)
    optimizer = torch.optim.SGD([q for q in model.parameters() if q.requires_grad], lr=0.1)
    layout = describe(model, optimizer)
    state = ModelState(model, layout, lambda numel, dtype: torch.zeros(numel, dtype=dtype))
    loader = elastrain.DataLoader(case.data(), global_batch_size=21, micro_batch_size=3, num_workers=0)
    loader.bind(0)
    loader.start(0, lambda step: ())
    handover = FakeHandover(commands, state.new_slot)
    frozen = [spec.name for spec in layout.parameters if not spec.trained]
    parts = StepParts(
        handover=handover,  # type: ignore[arg-type]  a fake
        model=state,
        loader=loader,
        randomness=BlockRandomness(model, layout.blocks, 0, CPU),
        layers=Layers(model),
        untouched=MutationGuard(model, lambda: state.memory, frozen),
        run_length=case.run_length,
        reach=lambda step, phase: None,
        log=lambda *_, **__: None,
        backward=case.backward,
    )
    parts.untouched.begin()
    taken: Any = SimpleNamespace(check=lambda: None)
    with pytest.raises(elastrain.StoppedError):
        _loop(case, Step(0, parts, taken, lambda: None), model)
    return handover, model


def _loop(case: Case, step: Step, model: nn.Module) -> None:
    carried = torch.zeros(())
    for inputs, labels in step:
        number, spoils_inputs, spoils_loss = case.for_nothing or (-1, 1.0, 1.0)
        is_for_nothing = step.micro_batch == number
        if is_for_nothing:
            inputs = inputs * spoils_inputs
        with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
            loss = nn.functional.cross_entropy(model(inputs.to(case.dtype)).float(), labels)
        if case.carries:
            loss = loss * (1.0 + carried)
            carried = loss.detach()
        if is_for_nothing:
            loss = loss * spoils_loss
        weight = 0.0 if is_for_nothing else len(labels) if case.weighted else 1.0
        step.backward(loss * math.nan if case.nan else loss, weight=weight)


def both(case: Case) -> tuple[Check, Check]:
    """Of one micro-batch: the owner's, computed first, and that of a neighbour, after its own runs."""
    last = p.Recompute(step=0, run=0, loss_scale=case.loss_scale)
    scale = case.loss_scale
    owner, _ = member(case, [p.Compute(step=0, run=0, loss_scale=scale, probed=True)])
    other, _ = member(case, [*(p.Compute(step=0, run=run, loss_scale=scale) for run in (1, 2)), last])
    (ours,), (theirs,) = owner.checks, other.checks
    assert ours.check is not None
    assert theirs.check is not None
    assert set(other.runs) == {1, 2}, "the check is no run"
    return ours.check, theirs.check


HARMLESS = {
    "dropout and batch norm": Case(),
    "runs of three": Case(run_length=3),
    "checkpointing": Case(model=Checkpointed),
    "ties, frozen, unused and sometimes used": Case(model=Tied),
    "a cache built by the first forward": Case(model=Cached),
    "float64": Case(dtype=torch.float64),
    "bfloat16": Case(dtype=torch.bfloat16),
    "autocast": Case(autocast=True),
    "a scaled loss": Case(loss_scale=1024.0),
    "gradients that are NaN": Case(nan=True),
    "weights": Case(weighted=True),
}
HARMFUL = {
    "a generator of its own": Case(model=OwnGenerator),
    "NumPy's new generator": Case(model=OwnNumpyGenerator),
    "a counter": Case(model=Counts),
    "a tensor attribute": Case(model=Remembers),
    "a buffer that is not persistent": Case(model=ChangesABuffer),
    "what the loop carries along": Case(carries=True),
    "a counter in the dataset": Case(data=CountingData),
    "a generator in the dataset": Case(data=DrawingData),
}


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("model", [Net, Checkpointed, Tied])
def test_a_micro_batch_of_weight_0_counts_for_nothing_even_if_it_is_nan(model: type[Net], number: int) -> None:
    told = []
    for inputs, loss in ((1.0, 1.0), (1.0, math.nan), (1.0, math.inf), (math.nan, 1.0)):
        case = Case(model=model, run_length=3, for_nothing=(number, inputs, loss))
        handover, _ = member(case, [p.Compute(step=0, run=0, audited=True)])
        (checked,) = handover.checks
        assert checked.check is not None
        told.append(checked.check)
    assert (told[0].weight, math.isfinite(told[0].loss)) == (2.0, True)
    assert told[1:3] == [told[0]] * 2
    # Statistics of a forward without NaN count, as in plain PyTorch; those of one with NaN do not.
    assert told[3] == told[0] or model is not Checkpointed
    assert math.isfinite(told[3].loss)


@pytest.mark.parametrize("name", HARMLESS)
def test_a_micro_batch_is_the_same_whoever_computes_it(name: str) -> None:
    ours, theirs = both(HARMLESS[name])
    assert difference(0, {"a": [ours], "b": [theirs]}, ()) == ""


@pytest.mark.parametrize("name", HARMFUL)
def test_what_is_carried_along_shows(name: str) -> None:
    ours, theirs = both(HARMFUL[name])
    assert "came out differently on a and b" in difference(0, {"a": [ours], "b": [theirs]}, ())


def test_only_the_first_micro_batch_of_a_run_is_told_and_without_the_others() -> None:
    probed = p.Compute(step=0, run=1, probed=True)
    single, _ = member(Case(run_length=1), [p.Compute(step=0, run=3, probed=True)])
    triple, _ = member(Case(run_length=3), [probed])
    assert [check.check.micro_batch for check in triple.checks if check.check] == [3]
    assert triple.checks[0].check == single.checks[0].check


def test_a_check_leaves_the_models_statistics_alone() -> None:
    _, model = member(Case(), [p.Recompute(step=0, run=0)])
    assert isinstance(model, Net)
    assert model.norm.running_mean is not None
    assert float(model.norm.running_mean.abs().sum()) == 0.0
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_slot_of_a_check_is_gone_before_the_step_is_committed() -> None:
    handover, _ = member(Case(), [p.Compute(step=0, run=1), p.Recompute(step=0, run=0)])
    assert handover.slots_held == [0, 0, 0], "what keeps a run's slot are the books"


def _drive_that_fails(times: int) -> Callable[[], Any]:
    left = [times]

    @contextmanager
    def backward() -> Iterator[None]:
        yield
        left[0] -= 1
        if left[0] >= 0:
            raise SpillReadError("the drive gave other bytes back")

    return backward


def test_a_check_whose_activations_do_not_come_back_is_made_again() -> None:
    with pytest.warns(UserWarning, match="other bytes"):
        handover, _ = member(Case(backward=_drive_that_fails(1)), [p.Recompute(step=0, run=0)])
    undisturbed, _ = member(Case(), [p.Recompute(step=0, run=0)])
    assert handover.checks == undisturbed.checks


def test_a_check_that_no_drive_gives_back_is_given_up_and_the_member_lives() -> None:
    with pytest.warns(UserWarning, match="other bytes"):
        handover, _ = member(Case(backward=_drive_that_fails(READ_TRIES)), [p.Recompute(step=0, run=0)])
    assert handover.checks == [p.Checked(step=0, run=0, check=None)]
