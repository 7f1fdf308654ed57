"""What cannot be a pipeline is refused in one sentence that names the operation or block, and what would do."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from elastrain.errors import ConfigError
from elastrain.pipeline.graph import check_stages
from elastrain.pipeline.planning import PlanWish, first_plan
from elastrain.pipeline.stubs.naming import blocks_of
from elastrain.pipeline.stubs.stubs import Stubs
from elastrain.pipeline.stubs.trace import TracedModel
from tests.support.block_graphs import graph_of
from tests.support.pipeline_models import Stack, batch_of, loss_of
from tests.support.traced import trace
from tests.unit.pipeline.test_tracing import Odd, traced


def test_more_stages_than_cuts_allow() -> None:
    with pytest.raises(
        ConfigError, match=r"stages=4 asks for 3 cuts, and this model has 2 legal: before 'b1', before 'b2'"
    ):
        first_plan(graph_of([1, 1, 1]), ["m0"], PlanWish(stages=4, runs=1))
    with pytest.raises(ConfigError, match=r"stages must be at least 1; got 0"):
        check_stages(graph_of([1]), 0)


def test_a_model_of_which_no_cut_is_legal_says_which_operation_forbids_them() -> None:
    graph = traced(Odd("tied without registration")).graph
    with pytest.raises(
        ConfigError, match=r"no cut of this model is legal: leave stages out, or mend what forbids"
    ) as told:
        check_stages(graph, 2)
    assert "parameter 'embed.weight' belongs to block 'embed' and is used at 'layers.2'" in str(told.value)


class Collecting(nn.Module):
    """Sums a loss of each block at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        extra = []
        for layer in self.layers:
            x = layer(x)
            extra.append(x.square().mean())
        return x.mean() + sum(extra)


def test_auxiliary_losses_that_forbid_every_cut_are_named() -> None:
    model = Collecting()
    graph = trace(model, blocks_of(model), lambda: model(torch.ones(2, 8))).graph
    with pytest.raises(ConfigError, match=r"'add' behind it uses what block 'layers.0' made"):
        check_stages(graph, 2)


class Reading(Stack):
    """Looks at a value between two blocks."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        if x.abs().max() > 0:
            x = self.layers[0](x)
        return self.head(x)


def test_a_forward_that_looks_at_values_between_blocks() -> None:
    with pytest.raises(ConfigError, match=r"looks at values that are not on this member.*move it into a block"):
        traced(Reading())


READS: dict[str, Callable[[Tensor], object]] = {
    "numpy": lambda x: x.detach().numpy(),
    "asarray": lambda x: np.asarray(x.detach()),
    "format": lambda x: f"{x.mean():.3f}",
    "tolist": lambda x: x.tolist(),
    "float": lambda x: float(x.mean()),
    "in": lambda x: x.mean() in (1.0, 2.0),
    "pickle": lambda x: pickle.dumps(x.detach()),
    "save": lambda x: torch.save(x.detach(), io.BytesIO()),
    "tensor of a list": lambda x: torch.tensor([x.mean().detach(), x.sum().detach()]),
}


@pytest.mark.parametrize("how", READS)
def test_whatever_reads_a_value_ends_with_what_to_do_instead(how: str) -> None:
    model = Stack()

    def body() -> None:
        READS[how](model(batch_of(0)[0]))

    with pytest.raises(ConfigError, match=r"looks at values that are not on this member.*move it into a block"):
        trace(model, blocks_of(model), body)


def test_what_has_no_value_can_be_shown_and_copied() -> None:
    model = Stack()

    def body() -> None:
        x = model(batch_of(0)[0])
        assert "FakeTensor" in str(x) and "FakeTensor" in f"{x}" and "FakeTensor" in repr([x])
        assert copy.deepcopy(x.detach()).shape == x.shape

    trace(model, blocks_of(model), body)


class Cache:
    """What a generating model hands from layer to layer."""

    def __init__(self) -> None:
        self.layers: list[Tensor] = []


class CachingLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(24, 24)

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        cache.layers.append(self.inner(x))
        return cache.layers[-1]


class ReadingLayer(CachingLayer):
    """Reads a value of what the cache holds, which its first run, on fakes, cannot give."""

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        x = super().forward(x, cache)
        return x * (1 if torch.cat(cache.layers).sum().item() > 0 else 2)


class Caching(Stack):
    def __init__(self, kind: type[CachingLayer] = CachingLayer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x, cache = self.embed(tokens), Cache()
        for layer in self.layers:
            x = layer(x, cache)
        return self.head(x)


@pytest.mark.parametrize("kind", [CachingLayer, ReadingLayer])
def test_caches_that_are_handed_from_block_to_block(kind: type[CachingLayer]) -> None:
    with pytest.raises(ConfigError, match=r"block 'layers.0' is handed a cache \(Cache\) that keeps its activations"):
        traced(Caching(kind))


@pytest.mark.slow
def test_a_model_that_is_compiled_as_a_whole() -> None:
    for compiled in (torch.compile(Stack()), _compiled_in_place()):
        with pytest.raises(ConfigError, match=r"the whole model is compiled.*compile each block instead"):
            trace(compiled, ["embed"], lambda: None)


def _compiled_in_place() -> nn.Module:
    model = Stack()
    model.compile()
    return model


class Reentrant(Stack):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = torch.utils.checkpoint.checkpoint(self.layers[0], x, use_reentrant=True)
        return self.head(x)


def test_reentrant_checkpointing() -> None:
    with pytest.raises(ConfigError, match=r"block 'layers.0' runs without gradients.*use_reentrant=False"):
        traced(Reentrant())


def test_patterns_that_fit_nothing_and_blocks_in_blocks() -> None:
    with pytest.raises(ConfigError, match=r"no submodule that owns parameters is called 'layer.\*'"):
        blocks_of(Stack(), ["layer.*"])
    with pytest.raises(ConfigError, match=r"block 'layers.0.up' lies in block 'layers.0'"):
        blocks_of(Stack(), ["layers.*", "layers.*.up"])


def test_a_forward_that_enters_no_block() -> None:
    model = Stack()
    with pytest.raises(ConfigError, match=r"the forward entered none of the blocks"):
        trace(model, blocks_of(model), lambda: None)


@pytest.fixture
def begun() -> tuple[Stack, TracedModel]:
    model = Stack()
    return model, traced(model)


def test_a_value_of_a_loss_that_another_member_computes(begun: tuple[Stack, TracedModel]) -> None:
    model, found = begun
    Stubs(model, found, 0, 2).begin()
    loss = loss_of(model, batch_of(0))
    with pytest.raises(ConfigError, match=r"read step\.loss once the step is committed"):
        loss.item()


def test_a_number_of_a_loss_for_people_in_a_later_micro_batch(begun: tuple[Stack, TracedModel]) -> None:
    model, found = begun
    Stubs(model, found, 0, 2).begin()
    loss = loss_of(model, batch_of(0))
    for show in (lambda: f"{loss:.4f}", lambda: loss.detach().numpy()):
        with pytest.raises(ConfigError, match=r"read step\.loss once the step is committed"):
            show()


def test_an_absent_block_outside_of_a_step(begun: tuple[Stack, TracedModel]) -> None:
    model, found = begun
    Stubs(model, found, 0, 2)
    with pytest.raises(ConfigError, match=r"block 'layers.1' is not on this member, and was called outside of a step"):
        model(batch_of(0)[0])


def test_a_cut_that_is_not_legal() -> None:
    model = Odd("skip between")
    with pytest.raises(ConfigError, match=r"cannot hold the blocks \[0, 2\): legal cuts are \(0, 1, 3, 4, 5\)"):
        Stubs(model, traced(model), 0, 2)


def test_a_block_that_takes_what_nobody_took_where_it_was_made(begun: tuple[Stack, TracedModel]) -> None:
    model, found = begun
    stubs = Stubs(model, found, 0, 2)
    assert stubs.begin().going == (None,)
    stubs.close()
    stubs = Stubs(model, found, 2, len(found.graph.blocks))
    stubs.begin([None])
    with pytest.raises(ConfigError, match=r"block 'layers.1' takes a tensor that it did not take in the tracing pass"):
        loss_of(model, batch_of(0))
    stubs.close()


class _Notes(nn.Module):
    """Leaves something in what it is given: a list that grows or shrinks, a number in a dict or an object."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner, self.how = nn.Linear(24, 24), how

    def forward(self, x: Tensor, notes: Any) -> Tensor:
        if self.how == "read" and x.sum().item() == 1:
            raise AssertionError("the first run, on fakes, has no value")
        if self.how in ("append", "read"):
            notes.append(1)
        elif self.how == "pop":
            notes.pop()
        elif self.how == "count":
            notes["calls"] = notes.get("calls", 0) + 1
        else:
            notes.calls += 1
        made: Tensor = self.inner(x)
        return made


class _Noting(Stack):
    def __init__(self, how: str, notes: Callable[[], Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Notes(how) for _ in range(2))
        self.notes = notes

    def forward(self, tokens: Tensor) -> Tensor:
        x, notes = self.embed(tokens), self.notes()
        for layer in self.layers:
            x = layer(x, notes)
        return self.head(x)


@pytest.mark.parametrize(
    ("how", "notes", "kind"),
    [
        ("append", list, "list"),
        ("read", list, "list"),
        ("pop", lambda: [[1], [2]], "list"),
        ("count", dict, "dict"),
        ("count", lambda: {"calls": 0}, "dict"),
        ("object", lambda: SimpleNamespace(calls=0), "SimpleNamespace"),
    ],
)
def test_blocks_that_change_what_they_are_given(how: str, notes: Callable[[], Any], kind: str) -> None:
    """Members that do not compute the block went on with what was there before: other bits, or torch's traceback."""
    with pytest.raises(ConfigError, match=rf"block 'layers.0' changes the {kind} that it is given"):
        traced(_Noting(how, notes))


class _Counting(Stack):
    def __init__(self, change: Callable[[float], float]) -> None:
        super().__init__()
        self.n, self.change = 1, change

    def forward(self, tokens: Tensor) -> Tensor:
        self.n = self.change(self.n)  # type: ignore[assignment]
        return super().forward(tokens)


def _micro_batches(model: nn.Module, count: int) -> None:
    """So many of a member that holds the first two blocks."""
    stubs = Stubs(model, traced(model), 0, 2)
    for micro_batch in range(count):
        stubs.begin()
        loss_of(model, batch_of(micro_batch))
    stubs.close()


@pytest.mark.parametrize("change", [lambda n: n + 1, lambda n: n * 0.9], ids=["counts", "decays"])
def test_a_model_that_counts_its_micro_batches(change: Callable[[float], float]) -> None:
    """Each member counted what it computed itself, and nobody compared: other bits."""
    with pytest.raises(ConfigError, match=r"the forward counts in 'n' of the model, from .* in one micro-batch"):
        _micro_batches(_Counting(change), 3)


@pytest.mark.parametrize("change", [lambda n: 7, lambda n: n * n + 1], ids=["set once", "varies"])
def test_a_number_that_the_forward_only_keeps_is_no_count(change: Callable[[float], float]) -> None:
    _micro_batches(_Counting(change), 5)
