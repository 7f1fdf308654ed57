"""The step of a member of a pipeline: traced once, forwards and backwards apart, and the gradients of a job of one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastrain.errors import ConfigError
from tests.support.pipeline_models import CASES, WORDS, Case, Stack, loss_of
from tests.support.pipeline_steps import MICRO_BATCHES, alone, chain, in_pipelines


@pytest.mark.parametrize("run_length", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", ["gpt", "checkpointed", "autocast-loop", "encoder-decoder"])
def test_three_members_make_every_gradient_of_every_run_as_one_does(case: str, run_length: int) -> None:
    runs = -(-MICRO_BATCHES // run_length)
    plan = chain(("a", "b", "c"), CASES[case].cuts, runs)
    assert in_pipelines(CASES[case], plan, ("a", "b", "c"), run_length).found == alone(CASES[case], run_length).found


def _compiled(backend: str) -> nn.Module:
    model = CASES["gpt"].build()
    for block in model.blocks:  # type: ignore[union-attr]
        block.compile(backend=backend)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.on_demand)])
def test_compiled_blocks_are_blocks_like_any(backend: str) -> None:
    case = Case(lambda: _compiled(backend), CASES["gpt"].cuts)
    found = in_pipelines(case, chain(("a", "b"), (4,), MICRO_BATCHES), ("a", "b"), 1)
    assert found.found == alone(case, 1).found


class Positioned(Stack):
    """Each layer, compiled or not, is handed random positions that are drawn behind the one before it."""

    def __init__(self, *, compiled: bool) -> None:
        super().__init__()
        for layer in self.layers:
            layer.dropout = nn.Identity()
            if compiled:
                layer.compile(backend="eager")

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, torch.rand(x.shape[-1]))
        logits: Tensor = self.head(x)
        return logits


@pytest.mark.parametrize("compiled", [False, True])
def test_behind_absent_blocks_code_draws_what_it_draws_behind_present_ones(compiled: bool) -> None:
    """A compiled block sets its random stream inside of what was compiled, which nobody calls where it is absent."""
    case = Case(lambda: Positioned(compiled=compiled), (3, 5))
    found = in_pipelines(case, chain(("a", "b"), (3,), MICRO_BATCHES), ("a", "b"), 1)
    assert found.found == alone(case, 1).found


def test_a_pipeline_of_one_member_is_a_job_of_one() -> None:
    found = in_pipelines(CASES["gpt"], chain(("a",), (), MICRO_BATCHES), ("a",), 1)
    assert found.found == alone(CASES["gpt"], 1).found


def test_several_micro_batches_are_in_flight() -> None:
    found = in_pipelines(CASES["gpt"], chain(("a", "b"), (4,), MICRO_BATCHES), ("a", "b"), 1)
    first = [(kind, micro_batch) for member, kind, micro_batch, _ in found.order if member == "a"]
    assert first[:3] == [("forward", 0), ("forward", 1), ("backward", 0)]


def _refused(loop: Any = None, *, stages: int = 2) -> str:
    with pytest.raises(ConfigError) as refused:
        in_pipelines(CASES["gpt"], chain(("a",), (), MICRO_BATCHES), ("a",), 1, stages=stages, loop=loop)
    return str(refused.value)


def test_more_stages_than_cuts_are_refused_with_the_legal_cuts() -> None:
    assert "asks for 19 cuts, and this model has" in _refused(stages=20)


def test_a_loop_that_reads_its_loss_is_told_what_to_read_instead() -> None:
    def reads(case: Any, model: Any, step: Any) -> None:
        for batch in step:
            loss = loss_of(model, batch)
            loss.item()
            step.backward(loss)

    assert "read step.loss once the step is committed" in _refused(reads)


def test_a_first_batch_without_a_backward_is_refused() -> None:
    def forgets(case: Any, model: Any, step: Any) -> None:
        for batch in step:
            loss_of(model, batch)

    assert "went by without step.backward(loss)" in _refused(forgets)


def _after(use: Any) -> str:
    """What a member is told that uses its model between two steps."""

    def uses(case: Any, model: Any, step: Any) -> None:
        batches = []
        for batch in step:
            batches.append(batch)
            step.backward(loss_of(model, batch))
        with torch.no_grad():
            use(model.eval(), batches[0])

    with pytest.raises(ConfigError) as refused:
        in_pipelines(CASES["gpt"], chain(("a", "b"), (4,), MICRO_BATCHES), ("a", "b"), 1, loop=uses)
    return str(refused.value)


def test_between_two_steps_an_absent_block_is_not_to_be_used() -> None:
    assert "is not on this member, and was called outside of a step" in _after(loss_of)
    assert "state_dict() needs all parameters" in _after(lambda model, batch: model.state_dict())


class Normed(nn.Module):
    """Its blocks keep running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(8)) for _ in range(3))
        self.head = nn.Linear(8, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x.transpose(1, 2))
        return logits


@pytest.mark.parametrize("run_length", [1, 2])
def test_running_statistics_wait_with_their_micro_batch(run_length: int) -> None:
    case = Case(Normed, (2, 3))
    runs = -(-MICRO_BATCHES // run_length)
    found = in_pipelines(case, chain(("a", "b", "c"), (2, 3), runs), ("a", "b", "c"), run_length)
    assert found.found == alone(case, run_length).found
