"""Stubs within one process: members one after another, their gradients against the whole model's."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from elastrain.pipeline.stubs.fakes import Fakes, copy_of
from elastrain.pipeline.stubs.naming import blocks_of, is_fake
from elastrain.pipeline.stubs.passes import StubPass
from elastrain.pipeline.stubs.stubs import Stubs
from elastrain.pipeline.stubs.trace import TracedModel
from tests.support.absent_blocks import bring_back, let_go
from tests.support.pipeline_members import untie
from tests.support.pipeline_models import CASES, Case, Stack, autocast, batch_of, loss_of, new_tensors_on
from tests.support.traced import trace

AT_ONCE = ("gpt", "checkpointed", "in-place", "positions", "transposed", "written")
"""Cases that `make check` looks at."""


class Chain:
    """A copy of the model for each member, which hold consecutive blocks. The whole model lies on the CPU."""

    def __init__(self, case: Case, cuts: tuple[int, ...], device: str = "cpu") -> None:
        model = case.model().eval()
        untie(model)
        self.case, self.device = case, device
        self.whole = copy.deepcopy(model)
        model.to(device)
        with self.autocast(bool(case.autocast)):
            self.traced: TracedModel = trace(model, blocks_of(model), lambda: self.loss_of(model, 0))
        points = (0, *cuts, len(self.traced.graph.blocks))
        self.stretches = list(pairwise(points))
        self.models = [copy.deepcopy(model) for _ in self.stretches]
        self.stubs = []
        for each, (begin, end) in zip(self.models, self.stretches, strict=True):
            blocks = self.traced.graph.blocks
            let_go(each, [*blocks[:begin], *blocks[end:]], blocks[begin:end])
            self.stubs.append(Stubs(each, self.traced, begin, end))

    def forward(self, micro_batch: int) -> tuple[list[StubPass], Tensor]:
        passes: list[StubPass] = []
        loss = torch.zeros(())
        for model, stubs in zip(self.models, self.stubs, strict=True):
            came = [copied(t) for t in passes[-1].going] if passes else []
            passes.append(stubs.begin(came))
            with self.autocast(bool(self.case.autocast)):
                loss = self.loss_of(model, micro_batch)
            stubs.loss_is_made()
            with self.autocast(self.case.autocast == "loop"):
                passes[-1].backward_is_called(loss.device.type)
        return passes, loss

    def loss_of(self, model: torch.nn.Module, micro_batch: int) -> Tensor:
        tokens, targets = (each.to(self.device) for each in batch_of(micro_batch))
        with new_tensors_on(self.device):
            return loss_of(model, (tokens, targets))

    def autocast(self, on: bool) -> AbstractContextManager[object]:
        return autocast(on, self.device)

    def backward(self, passes: list[StubPass], loss: Tensor) -> None:
        with self.autocast(self.case.autocast == "loop"):
            self.stubs[-1].go_back(passes[-1], loss.backward)
        for place, (above, below) in reversed(list(enumerate(pairwise(passes)))):
            whole = partial(above.backward, above.ends(below.gradients))
            self.stubs[place].go_back(above, partial(above.under_autocast, whole))

    def gradients(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for model in self.models:
            found |= {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        return found

    def gradients_of_the_whole(self, micro_batches: list[int]) -> dict[str, Tensor]:
        for micro_batch in micro_batches:
            torch.clear_autocast_cache()
            with autocast(bool(self.case.autocast)):
                loss = loss_of(self.whole, batch_of(micro_batch))
            with autocast(self.case.autocast == "loop"):
                loss.backward()
        return {n: p.grad for n, p in self.whole.named_parameters() if p.grad is not None}


def copied(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else copy_of(tensor).requires_grad_(tensor.requires_grad)


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize(
    "name", [*AT_ONCE, *(pytest.param(name, marks=pytest.mark.slow) for name in sorted(CASES.keys() - AT_ONCE))]
)
def test_gradients_of_a_chain_are_those_of_the_whole_model(name: str) -> None:
    chain = Chain(CASES[name], CASES[name].cuts)
    passes, loss = chain.forward(0)
    chain.backward(passes, loss)
    assert_equal(chain.gradients(), chain.gradients_of_the_whole([0]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "checkpointed", "encoder-decoder"])
def test_several_micro_batches_may_be_in_flight(name: str) -> None:
    """Also where a backward computes blocks again after other micro-batches have gone forward."""
    chain = Chain(CASES[name], CASES[name].cuts)
    under_way = [chain.forward(micro_batch) for micro_batch in range(3)]
    for passes, loss in under_way:
        chain.backward(passes, loss)
    assert_equal(chain.gradients(), chain.gradients_of_the_whole([0, 1, 2]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["checkpointed", "transposed", "encoder-decoder"])
def test_whoever_computes_a_task_again_makes_the_same_tensors_in_whatever_order(name: str) -> None:
    """The middle of three is lost after its backwards; a newcomer has what its neighbours keep."""
    chain, newcomer = Chain(CASES[name], CASES[name].cuts), Chain(CASES[name], CASES[name].cuts)
    kept = []
    for micro_batch in range(3):
        passes, loss = chain.forward(micro_batch)
        chain.backward(passes, loss)
        middle = passes[1]
        kept.append((middle.received, middle.going, passes[2].gradients, middle.gradients))
    for micro_batch, (received, going, of_going, of_received) in reversed(list(enumerate(kept))):
        again = newcomer.stubs[1].begin([copied(t) for t in received])
        loss_of(newcomer.models[1], batch_of(micro_batch))
        newcomer.stubs[1].loss_is_made()
        again.backward_is_called()
        assert all(torch.equal(one, other) for one, other in zip(again.going, going, strict=True))
        whole = partial(again.backward, again.ends(of_going))
        newcomer.stubs[1].go_back(again, partial(again.under_autocast, whole))
        assert all(torch.equal(one, other) for one, other in zip(again.gradients, of_received, strict=True))


@pytest.mark.slow
def test_where_a_fake_stands_for_what_came_in_before_micro_batches_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule broken: fakes are made once for all micro-batches, and so is what is known of them."""
    begin, given = Stubs.begin, {}

    def begin_with_shared_fakes(stubs: Stubs, *received: Any) -> StubPass:
        passed = begin(stubs, *received)
        passed._given = given.setdefault(stubs, {})
        return passed

    monkeypatch.setattr(Stubs, "begin", begin_with_shared_fakes)
    with pytest.raises(AssertionError):
        test_several_micro_batches_may_be_in_flight("gpt")


def test_where_a_received_tensor_is_not_copied_a_block_changes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule broken: what is kept for others is handed to a block that begins in place."""
    monkeypatch.setattr("elastrain.pipeline.stubs.passes.copy_of", lambda tensor: tensor.detach())
    with pytest.raises(AssertionError):
        test_a_received_tensor_is_left_as_it_came_by_a_block_that_begins_in_place()


@pytest.mark.slow
def test_cuts_may_change_between_two_micro_batches() -> None:
    chain = Chain(CASES["gpt"], (4, 6))
    passes, loss = chain.forward(0)
    chain.backward(passes, loss)
    values = {name: parameter.data for name, parameter in chain.whole.named_parameters()}
    for model, stubs, stretch in zip(chain.models, chain.stubs, [(0, 2), (2, 3), (3, 8)], strict=True):
        names = chain.traced.graph.blocks[slice(*stretch)]
        bring_back(model, {n: v for n, v in values.items() if any(n.startswith(f"{b}.") for b in names)})
        stubs.hold(*stretch)
    for model in chain.models:
        model.zero_grad()
    passes, loss = chain.forward(1)
    chain.backward(passes, loss)
    assert_equal(chain.gradients(), chain.gradients_of_the_whole([1]))


def test_a_received_tensor_is_left_as_it_came_by_a_block_that_begins_in_place() -> None:
    chain = Chain(CASES["in-place"], (2, 4))
    passes, _ = chain.forward(0)
    came = passes[0].going[0]
    assert torch.equal(passes[1].received[0], came)


@pytest.mark.slow
def test_a_repeated_backward_under_another_autocast_state_gives_other_gradients() -> None:
    """And under that of the call the same: whoever repeats it computes outside of the loop."""
    case = Case(lambda: Stack(mixing=True), (2, 4), "loop")
    chain = Chain(case, case.cuts)
    passes, loss = chain.forward(0)
    chain.backward(passes, loss)
    expected = chain.gradients_of_the_whole([0])
    assert_equal(chain.gradients(), expected)

    broken = Chain(case, case.cuts)
    passes, loss = broken.forward(0)
    for each in passes:
        each.backward_is_called()
    broken.backward(passes, loss)
    found = broken.gradients()
    assert any(not torch.equal(found[name], expected[name]) for name in found)


def test_absent_parameters_take_no_memory_and_show_when_they_are_used() -> None:
    model = CASES["gpt"].model()
    freed = let_go(model, ["blocks.0", "embedding"], ["head"])
    weight = model.blocks[0].mlp[0].weight
    assert weight.untyped_storage().nbytes() == 4 and bool(weight.isnan().all())
    assert "embedding.weight" not in freed, "the head shares it and stays"
    bring_back(model, freed)
    assert not any(bool(parameter.isnan().any()) for parameter in model.parameters())


def test_fakes_of_an_absent_block_are_made_once_unless_a_forward_enters_it_again() -> None:
    fakes: list[object] = []
    chain = Chain(CASES["gpt"], (4, 6))
    model, stubs = chain.models[0], chain.stubs[0]
    for _ in range(2):
        stubs.begin()
        fakes += [model.norm(torch.ones(2, 12, 24)) for _ in range(2)]
    first, again, *other = fakes
    assert first is other[0], "one object will do for all micro-batches"
    assert len({id(each) for each in (first, again, other[1])}) == 3, "a second tensor is another one"


def test_what_code_between_blocks_makes_of_fakes_and_real_tensors_is_worked_out_once() -> None:
    mode = Fakes()
    with mode:
        logits = torch.empty(2, 5, 7, requires_grad=True)
    labels = [torch.randint(0, 7, (2, 6))[:, 1:] for _ in range(2)]  # a view, as scripts cut labels off
    losses = [F.cross_entropy(logits.flatten(0, 1), labels[0].flatten())]
    before = dict(FakeTensorMode.cache_bypasses)
    losses.append(F.cross_entropy(logits.flatten(0, 1), labels[1].flatten()))
    assert FakeTensorMode.cache_bypasses == before
    assert all(is_fake(loss) and loss.shape == () and loss.requires_grad for loss in losses)


def test_a_real_tensor_that_meets_fakes_promotes_them_as_it_would_real_ones() -> None:
    mode = Fakes()
    for real in (torch.tensor(2.0, dtype=torch.float64), torch.ones(3, dtype=torch.float64), torch.ones(4, 3).t()):
        plain = torch.ones(3, 1, dtype=torch.bfloat16)
        with mode:
            fake = torch.ones(3, 1, dtype=torch.bfloat16)
        expected, found = plain * real, fake * real
        assert is_fake(found)
        assert (found.dtype, found.shape, found.stride()) == (expected.dtype, expected.shape, expected.stride())
