"""The step of a member of a pipeline: traced once, forwards and backwards apart, and the gradients of a job of one."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from elastrain.errors import ConfigError
from elastrain.pipeline.stubs.passes import StubPass
from elastrain.pipeline.stubs.stubs import Stubs
from elastrain.runtime.model.flat_model import ModelState
from elastrain.runtime.model.statistics import is_statistics
from tests.support import pipeline_steps
from tests.support.pipeline_models import CASES, WORDS, Case, Stack, loss_of
from tests.support.pipeline_steps import MICRO_BATCHES, alone, chain, in_pipelines

SLOW = pytest.mark.slow


@pytest.mark.parametrize("run_length", [1, pytest.param(2, marks=SLOW)])
@pytest.mark.parametrize(
    "case", ["gpt", *(pytest.param(each, marks=SLOW) for each in ("checkpointed", "autocast-loop", "encoder-decoder"))]
)
def test_three_members_make_every_gradient_of_every_run_as_one_does(case: str, run_length: int) -> None:
    runs = -(-MICRO_BATCHES // run_length)
    plan = chain(("a", "b", "c"), CASES[case].cuts, runs)
    assert in_pipelines(CASES[case], plan, ("a", "b", "c"), run_length).found == alone(CASES[case], run_length).found


def _packed_loop(case: Case, model: nn.Module, step: Any) -> None:
    """As any loop, with hooks around the forward that give back other objects than they took: offloading has such."""
    for number, batch in enumerate(step):
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda saved: [saved.detach()], lambda kept: kept[0])
        # Offloading has none in the tracing pass.
        with hooks if number else contextlib.nullcontext():
            loss = loss_of(model, batch)
        step.backward(loss, weight=batch[0].numel())


class InPairs(Stack):
    """Two layers are computed again together, and the code before the first of them, too."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for place in (0, 2):
            x = checkpoint(self._two, x, place, use_reentrant=False)
        logits: Tensor = self.head(x)
        return logits

    def _two(self, x: Tensor, place: int) -> Tensor:
        return self.layers[place + 1](self.layers[place](x * 1.5))  # type: ignore[no-any-return]  # torch: a module


class Twice(Stack):
    """The head takes two tensors one after the other."""

    def __init__(self, *, again: bool) -> None:
        super().__init__()
        self.again = again

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.layers[0](self.embed(tokens))
        y = self.layers[1](x * 0.5)
        return self._head(x) + 2 * self._head(y)

    def _head(self, x: Tensor) -> Tensor:
        logits: Tensor = checkpoint(self.head, x, use_reentrant=False) if self.again else self.head(x)
        return logits


class Shared(Stack):
    """Each time the same layer, which a checkpoint computes again."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for _ in self.layers:
            x = checkpoint(self.layers[0], x, use_reentrant=False)
        logits: Tensor = self.head(x)
        return logits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "cut", "loop"),
    [
        pytest.param(lambda: Twice(again=False), 3, None, id="twice"),
        pytest.param(lambda: Twice(again=False), 2, None, id="twice, one from here"),
        pytest.param(lambda: Twice(again=True), 3, None, id="twice, computed again"),
        pytest.param(Shared, 1, None, id="shared"),
        pytest.param(Shared, 1, _packed_loop, id="shared, hooked"),
    ],
)
def test_a_block_that_is_entered_more_than_once_takes_another_tensor_each_time(build: Any, cut: int, loop: Any) -> None:
    case = Case(build, (cut, cut))
    members = in_pipelines(case, chain(("a", "b"), (cut,), MICRO_BATCHES), ("a", "b"), 1, loop=loop)
    assert members.found == alone(case, 1).found


@pytest.mark.slow
def test_which_of_two_tensors_a_checkpoint_means_is_not_guessed() -> None:
    case = Case(lambda: Twice(again=True), (3, 3))
    with pytest.raises(ConfigError, match=r"'head' is entered more than once .* train without --offload-dir"):
        in_pipelines(case, chain(("a", "b"), (3,), MICRO_BATCHES), ("a", "b"), 1, loop=_packed_loop)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "cut", "loop"),
    [
        pytest.param(CASES["checkpointed"], 4, _packed_loop, id="hooked", marks=SLOW),
        pytest.param(Case(InPairs, (3, 4)), 3, None, id="before"),
        pytest.param(Case(InPairs, (3, 4)), 4, None, id="within"),
        pytest.param(Case(InPairs, (3, 4)), 4, _packed_loop, id="within, hooked", marks=SLOW),
    ],
)
def test_what_a_checkpoint_computes_again_is_given_what_came_in(case: Case, cut: int, loop: Any) -> None:
    """Also where it is called with other objects than before, and other micro-batches have come in since."""
    members = in_pipelines(case, chain(("a", "b", "c"), (cut, cut + 1), MICRO_BATCHES), ("a", "b", "c"), 1, loop=loop)
    assert members.found == alone(case, 1).found


@pytest.mark.slow
def test_where_a_checkpoint_is_given_what_came_in_last_micro_batches_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule broken: what goes back is taken for the micro-batch that went forward last."""
    begin, go_back = Stubs.begin, Stubs.go_back
    newest: dict[Stubs, StubPass] = {}

    def remember(stubs: Stubs, *received: Any) -> StubPass:
        newest[stubs] = begin(stubs, *received)
        return newest[stubs]

    monkeypatch.setattr(Stubs, "begin", remember)
    monkeypatch.setattr(Stubs, "go_back", lambda stubs, _, *how: go_back(stubs, newest[stubs], *how))
    case = CASES["checkpointed"]
    members = in_pipelines(case, chain(("a", "b", "c"), (4, 5), MICRO_BATCHES), ("a", "b", "c"), 1, loop=_packed_loop)
    assert members.found != alone(case, 1).found


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


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=SLOW)])
def test_behind_absent_blocks_code_draws_what_it_draws_behind_present_ones(compiled: bool) -> None:
    """A compiled block sets its random stream inside of what was compiled, which nobody calls where it is absent."""
    case = Case(lambda: Positioned(compiled=compiled), (3, 5))
    found = in_pipelines(case, chain(("a", "b"), (3,), MICRO_BATCHES), ("a", "b"), 1)
    assert found.found == alone(case, 1).found


class Repeated(Positioned):
    """Each layer, compiled or not, is entered twice, with dropout and with noise in between."""

    def __init__(self, *, compiled: bool) -> None:
        super().__init__(compiled=compiled)
        for layer in self.layers:
            layer.dropout = nn.Dropout(0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, torch.ones(x.shape[-1]))
            x = layer(x, torch.rand(x.shape[-1]))
        logits: Tensor = self.head(x)
        return logits


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=SLOW)])
def test_blocks_that_are_entered_twice_draw_what_they_draw_in_one_worker(compiled: bool) -> None:
    case = Case(lambda: Repeated(compiled=compiled), (3, 5))
    found = in_pipelines(case, chain(("a", "b"), (3,), MICRO_BATCHES), ("a", "b"), 1)
    assert found.found == alone(case, 1).found


def test_a_pipeline_of_one_member_is_a_job_of_one() -> None:
    found = in_pipelines(CASES["gpt"], chain(("a",), (), MICRO_BATCHES), ("a",), 1)
    assert found.found == alone(CASES["gpt"], 1).found


@pytest.mark.slow
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


@pytest.mark.slow
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


def _evaluated(case: Case, model: nn.Module, step: Any) -> None:
    for layer in model.modules():
        layer.train(not isinstance(layer, nn.BatchNorm1d))
    for batch in step:
        loss = loss_of(model, batch)
        step.backward(loss, weight=batch[0].numel())


def test_a_layer_that_is_evaluated_computes_with_statistics_that_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a block that its member has got after a loss: the layer's own buffers are those of the script."""
    hold, case = ModelState.hold, Case(Normed, (1, 2))

    def come(state: ModelState, blocks: Any) -> None:
        hold(state, blocks)
        for number, shard in enumerate(state.layout.shards):
            if is_statistics(state.layout, number) and state.has(shard):
                state.parameters_of(shard).fill_(0.5)

    def build() -> Normed:
        model = Normed()
        for layer in model.modules():
            if isinstance(layer, nn.BatchNorm1d):
                layer.running_mean.fill_(0.5)
                layer.running_var.fill_(0.5)
        return model

    monkeypatch.setattr(pipeline_steps, "_loop", _evaluated)
    expected = alone(Case(build, (1, 2)), 1).found
    monkeypatch.setattr(ModelState, "hold", come)
    assert in_pipelines(case, chain(("a", "b"), (2,), MICRO_BATCHES), ("a", "b"), 1, loop=_evaluated).found == expected
