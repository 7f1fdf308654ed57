"""The tracing pass: models whose cuts are known, what is counted, and what is left as it was."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elastrain.pipeline.stubs.fakes import AbsentBlock, Fakes
from elastrain.pipeline.stubs.naming import blocks_of, is_fake
from elastrain.pipeline.stubs.trace import TracedModel
from tests.support.pipeline_models import CASES, EncoderDecoder, Stack, autocast, batch_of, loss_of
from tests.support.traced import trace


def traced(model: nn.Module) -> TracedModel:
    return trace(model, blocks_of(model), lambda: loss_of(model, batch_of(0)))


class Odd(nn.Module):
    """Embedding, three layers, head; `odd` says what its forward does besides."""

    def __init__(self, odd: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 64)
        self.spare = nn.Linear(8, 8)
        self.shift = nn.Parameter(torch.zeros(8))
        self.odd = odd

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        if self.odd == "outside in front":
            x = x + self.shift
        middle = self.layers[0](x)
        x = self.layers[1](middle)
        if self.odd == "skip between":
            x = x + middle
        if self.odd == "outside behind":
            x = x + self.shift
        if self.odd == "again":
            x = self.layers[0](x)
        x = self.layers[2](x)
        if self.odd == "tied without registration":
            return F.linear(x, self.embed.weight)
        if self.odd == "view of an earlier one":
            x = x + middle.mT.mT
        return self.head(x)


class Noisy(nn.Module):
    """As `Odd` without oddities; code between blocks draws random numbers."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 8)
        self.layers = nn.ModuleList(
            Noise(dropout=0.5 if "behind a block that draws" in what else 0.0) for _ in range(3)
        )
        self.head = nn.Linear(8, 64)
        self.what = what

    def forward(self, tokens: Tensor) -> Tensor:
        first = torch.rand(8)
        x = self.embed(tokens)
        if self.what == "behind a dropout":
            x = F.dropout(x, 0.5)
        noise = first if self.what == "before all blocks" else self._noise()
        x = self.layers[0](x, noise)
        own = self.what in ("used at once", "behind a block that draws")
        late = 1.0
        if self.what == "read behind a block that draws":
            late = [number.item() for number in torch.rand(2)][1]
        x = self.layers[1](x, self._noise() if own else noise)
        if self.what == "used by code between":
            x = x + noise.add(1)
        elif self.what.startswith("read only") and bool(torch.rand([]) < 0.0):
            return x
        x = self.layers[2](x)
        return self.head(x) * late

    def _noise(self) -> Tensor:
        if self.what == "of its own generator":
            return torch.rand(8, generator=torch.Generator().manual_seed(3)).mul(2)
        return torch.rand(8).mul(2)


class Noise(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), dropout

    def forward(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        x = F.dropout(self.linear(x), self.dropout)
        return x if noise is None else x + noise


@pytest.mark.parametrize(
    ("what", "cuts"),
    [
        ("before all blocks", (1, 2, 3, 4)),
        ("used at once", (1, 2, 3, 4)),
        ("of its own generator", (1, 2, 3, 4)),
        ("read only", (1, 2, 3, 4)),
        ("read only behind a block that draws", (1, 2)),
        ("read behind a block that draws", (1,)),
        ("behind a dropout", (3, 4)),
        ("behind a block that draws", (1, 3, 4)),
        ("used by code between", (1, 2, 3, 4)),
    ],
)
def test_random_numbers_that_another_member_would_draw_otherwise_cross_no_cut(what: str, cuts: tuple[int, ...]) -> None:
    graph = traced(Noisy(what)).graph
    assert graph.legal_cuts == cuts
    assert all("random numbers" in each.why for each in graph.illegal)


class Drawing(nn.Module):
    """Three layers, some of which draw from a generator that is set once per micro-batch; so may code behind them."""

    def __init__(self, draw: Callable[[], float], *, inside: set[int], behind: int | None) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 8)
        self.layers = nn.ModuleList(Scaled(draw if place in inside else None) for place in range(3))
        self.head = nn.Linear(8, 64)
        self.draw, self.behind = draw, behind

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for place, layer in enumerate(self.layers):
            x = layer(x)
            if place == self.behind:
                x = x * self.draw()
        return self.head(x)


class Scaled(nn.Module):
    def __init__(self, draw: Callable[[], float] | None) -> None:
        super().__init__()
        self.linear, self.draw = nn.Linear(8, 8), draw

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * (1.0 if self.draw is None else self.draw())


@pytest.mark.parametrize("draw", [random.random, np.random.rand], ids=["python", "numpy"])
@pytest.mark.parametrize(
    ("inside", "behind", "cuts"),
    [
        ({0, 1, 2}, None, (1, 4)),
        ({0, 1}, None, (1, 3, 4)),
        ({1}, None, (1, 2, 3, 4)),
        (set(), 1, (1, 2, 3, 4)),
        ({1}, 0, (1, 2, 3, 4)),
        ({0}, 0, (1,)),
        ({0}, 1, (1,)),
    ],
)
def test_who_has_drawn_fewer_numbers_of_python_or_numpy_draws_no_more(
    draw: Callable[[], float], inside: set[int], behind: int | None, cuts: tuple[int, ...]
) -> None:
    graph = traced(Drawing(draw, inside=inside, behind=behind)).graph
    assert graph.legal_cuts == cuts
    assert all("draws random numbers of Python or NumPy" in each.why for each in graph.illegal)


def legal(odd: str) -> tuple[int, ...]:
    return traced(Odd(odd)).graph.legal_cuts


def test_a_plain_stack_can_be_cut_everywhere() -> None:
    graph = traced(Stack()).graph
    assert graph.blocks == ("embed", "layers.0", "layers.1", "layers.2", "layers.3", "head")
    assert graph.legal_cuts == (1, 2, 3, 4, 5)
    assert [len(tensors) for tensors in graph.crossings] == [0, 1, 1, 1, 1, 1, 0]


def test_code_between_blocks_that_uses_an_earlier_block_forbids_the_cuts_between() -> None:
    assert legal("") == (1, 2, 3, 4)
    assert legal("skip between") == (1, 3, 4)
    assert legal("view of an earlier one") == (1, 4)
    assert "'add' behind it uses what block 'layers.0' made" in traced(Odd("skip between")).graph.illegal[0].why


def test_a_block_that_is_entered_twice_allows_no_cut_between() -> None:
    assert legal("again") == (1, 3, 4)


def test_a_parameter_outside_of_blocks_goes_with_the_first_one() -> None:
    assert legal("outside in front") == (1, 2, 3, 4)
    assert legal("outside behind") == (3, 4)
    (first, *_) = traced(Odd("outside behind")).graph.illegal
    assert "parameter 'shift' lies outside of blocks" in first.why


def test_a_block_that_uses_the_parameter_of_another_forbids_the_cuts_between() -> None:
    found = traced(Odd("tied without registration")).graph
    assert found.legal_cuts == ()
    assert all("'embed.weight' belongs to block 'embed'" in each.why for each in found.illegal)


class Table(nn.Module):
    """Code between blocks takes values of a table, which no forward enters and which stands beside the head."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 8)
        self.layers = nn.ModuleList(Noise(dropout=0.0) for _ in range(3))
        self.table, self.head = nn.Embedding(3, 8), nn.Linear(8, 64)
        self.how = how

    def forward(self, tokens: Tensor) -> Tensor:
        source = self.embed if self.how.startswith("of the first block") else self.table
        row = self._row(source.weight)
        x = self.layers[0](self.embed(tokens))
        if self.how == "read":
            x = x * (1 + source.weight.detach()[0, 0].item())
        x = self.layers[1](x, row if "a layer" in self.how else None)
        return self.head(self.layers[2](x)) + (row.sum() if "code behind" in self.how else 0.0)

    def _row(self, weight: Tensor) -> Tensor:
        return torch.zeros_like(weight)[0] if "shape" in self.how else weight[0].detach().mul(2)


@pytest.mark.parametrize(
    ("how", "cuts"),
    [
        ("by code behind", (1, 2, 3, 4)),
        ("by a layer", (1, 2)),
        ("of the first block, by a layer", (3, 4)),
        ("of the first block, by code behind", ()),
        ("of the first block, its shape, by a layer", (1, 2, 3, 4)),
        ("read", (1,)),
    ],
)
def test_what_code_between_blocks_makes_of_a_parameter_is_where_its_block_is(how: str, cuts: tuple[int, ...]) -> None:
    """Elsewhere the parameter is not a number, and so would be the gradients. A block never entered has a neighbour."""
    graph = traced(Table(how)).graph
    assert graph.legal_cuts == cuts
    name, block = ("embed.weight", "embed") if how.startswith("of the first") else ("table.weight", "table")
    assert all(f"parameter {name!r} belongs to block {block!r} and is used" in each.why for each in graph.illegal)


COPIES: dict[str, Callable[[nn.Module], Tensor]] = {
    "deepcopy": lambda table: copy.deepcopy(table.weight),
    "deepcopy of a module": lambda table: copy.deepcopy(table).weight,
    "copy": lambda table: copy.copy(table.weight),
    "parameter": lambda table: nn.Parameter(table.weight.detach().clone()),
    "set": lambda table: torch.empty(0).set_(table.weight.detach()),
}


class Copying(Stack):
    """Code behind the last layer uses a copy of the first layer's weight."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x * COPIES[self.how](self.layers[0].down).detach().mean())


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_of_a_parameter_is_where_its_block_is(how: str) -> None:
    """No operation returns it: it is told by its memory. Elsewhere it would be a copy of what is not a number."""
    graph = traced(Copying(how)).graph
    assert graph.legal_cuts == ((1,) if how == "copy" else (1, 5)), "to copy it is to read it"
    assert all("parameter 'layers.0.down.weight' belongs to block 'layers.0'" in each.why for each in graph.illegal)


class Written(Odd):
    """Code between blocks, or a block, writes activations into a real tensor that is used further behind."""

    def forward(self, tokens: Tensor) -> Tensor:
        total, rows = torch.zeros(()), torch.zeros(3, 2, 12, 8)
        x = self.embed(tokens)
        for place, layer in enumerate(self.layers):
            x = layer(x, rows[place]) if isinstance(layer, Writing) else layer(x)
            if self.odd == "a sum":
                total += x.mean()
            elif self.odd == "an item":
                rows[place] = x
            elif self.odd == "a view" and place < 2:
                rows[place].copy_(x)
            elif self.odd == "a part for a block" and place == 0:
                start = torch.zeros(2, 12, 8)
                start[:, 1:] = x[:, :-1]
                x = start
            elif self.odd == "a value" and place == 0:
                total += x.mean()
            elif self.odd == "a value" and place == 1:
                x = x * (1.0 + total.item())
        return self.head(x) + total + rows.sum()


class Writing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor, row: Tensor) -> Tensor:
        row.copy_(x)
        made: Tensor = self.inner(x)
        return made


@pytest.mark.parametrize(
    ("odd", "cuts"),
    [("a sum", (1,)), ("an item", (1,)), ("a view", (1,)), ("a part for a block", (1, 3, 4)), ("a value", (1,))],
)
def test_a_real_tensor_that_activations_are_written_into_lives_with_their_block(
    odd: str, cuts: tuple[int, ...]
) -> None:
    """On other members it stays as it was made, and nobody would notice."""
    assert traced(Written(odd)).graph.legal_cuts == cuts


def test_a_real_tensor_that_a_block_writes_into_lives_with_that_block() -> None:
    model = Written("")
    model.layers[1] = Writing()
    graph = traced(model).graph
    assert graph.legal_cuts == (1, 2)
    assert "behind it uses what block 'layers.1' made" in graph.illegal[0].why


def test_a_registered_tie_forbids_nothing_and_an_encoders_output_crosses_beside_the_stream() -> None:
    model = EncoderDecoder()
    graph = traced(model).graph
    assert graph.legal_cuts == tuple(range(1, len(graph.blocks)))
    # The source's stream into the encoder; encoder's output alone; then with the decoder's stream; then that alone.
    assert [len(tensors) for tensors in graph.crossings] == [0, 1, 1, 1, 2, 2, 2, 2, 1, 1, 0]


def test_blocks_that_are_never_entered_go_with_their_neighbour() -> None:
    assert traced(Odd("")).graph.never_entered == (("spare", "head"),)
    assert "spare" not in traced(Odd("")).graph.blocks


def test_flops_are_those_that_torch_counts() -> None:
    graph = traced(Stack(width=24)).graph
    rows = 2 * 12
    assert graph.flops == (0, *[2 * rows * (24 * 48 + 48 * 24)] * 4, 2 * rows * 24 * 64)


def test_strides_and_dtypes_of_what_crosses_are_those_of_the_real_ones() -> None:
    crossing = traced(CASES["bfloat16"].model()).graph.crossings[3][0]
    assert (crossing.dtype, crossing.shape, crossing.requires_grad) == ("bfloat16", (2, 12, 24), True)
    real: list[Tensor] = []
    model = CASES["transposed"].model()
    traced_stride = traced(model).graph.crossings[2][0].stride
    model.layers[1].register_forward_pre_hook(lambda module, args: real.append(args[0]))
    loss_of(model, batch_of(0))
    assert traced_stride == real[0].stride()


def test_two_traces_of_one_model_agree_and_the_model_is_as_it_was() -> None:
    model = Stack()
    forwards = [module.forward for module in model.modules()]
    before = torch.random.get_rng_state()
    one, other = traced(model).graph, traced(model).graph
    assert one == other and one.digest() == other.digest() and one.difference(other) is None
    assert [module.forward for module in model.modules()] == forwards
    assert torch.equal(torch.random.get_rng_state(), before)
    assert traced(Odd("again")).graph.difference(traced(Odd("")).graph) is not None


class Routing(nn.Module):
    """Keeps what an auxiliary loss is made of, as layers of experts do; with `values` it has no fake kernel."""

    def __init__(self, *, values: bool) -> None:
        super().__init__()
        self.router, self.inner, self.values = nn.Linear(8, 4), nn.Linear(8, 8), values
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.kept.append(self.router(x))
        return self.inner(x) * float(x.sum() == 0) if self.values else self.inner(x)


class Balanced(Odd):
    """Its loss has a part that two of its layers have kept beside what they returned."""

    def __init__(self, *, values: bool) -> None:
        super().__init__("")
        self.layers[0], self.layers[1] = Routing(values=values), Routing(values=values)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = super().forward(tokens)
        return logits + torch.stack([each.kept[-1].square().mean() for each in self.layers[:2]]).sum()


@pytest.mark.parametrize("values", [False, True])
def test_what_code_behind_finds_that_a_block_has_kept_forbids_every_cut(values: bool) -> None:
    """Each member would add up what its own blocks have kept alone, and nobody would notice."""
    graph = traced(Balanced(values=values)).graph
    assert graph.blocks == ("embed", "layers.0", "layers.1", "layers.2", "head")
    assert graph.legal_cuts == ()
    assert "takes what block 'layers.1' has kept beside what it returned" in graph.illegal[0].why


class Counting(nn.Module):
    """Reads values inside of a block, which has no fake kernel, and counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        made = self.inner(x)
        return made * float(made.sum() == 0)


@pytest.mark.parametrize("is_autocast", [False, True])
def test_a_block_without_a_fake_kernel_runs_once_on_zeros_and_leaves_its_buffers(*, is_autocast: bool) -> None:
    model = Odd("")
    counting = model.layers[1] = Counting()
    with autocast(is_autocast):
        graph = traced(model).graph
    assert graph.legal_cuts == (1, 2, 3, 4)
    assert graph.flops[2] == graph.flops[1]
    assert float(counting.calls) == 0


class CalledByForward(Stack):
    """Its layers' hooks are passed by: so is what sets their random streams, and they draw on."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer.forward(x)
        logits: Tensor = self.head(x)
        return logits


def test_blocks_that_are_called_by_their_forward_and_draw_stay_with_the_block_whose_stream_they_go_on_with() -> None:
    graph = traced(CalledByForward()).graph
    assert graph.legal_cuts == (5,)
    assert "behind block 'embed' others are called by their forward" in graph.illegal[0].why
    assert traced(CalledByForward().eval()).graph.legal_cuts == (1, 2, 3, 4, 5)


def test_a_run_of_a_block_on_fakes_leaves_no_weight_to_others_that_share_it() -> None:
    layer, fakes = nn.Linear(8, 8), Fakes()
    with fakes:
        given = torch.empty(2, 8)
    with autocast(True):
        block = AbsentBlock("layer", layer, {}, fakes)
        assert is_fake(block.take(layer.forward, (given,), {}, leaves=[given], fresh=True))
        assert not is_fake(layer(torch.ones(2, 8)))


def test_members_that_trace_while_something_is_frozen_have_the_graph_of_the_others() -> None:
    """A script may freeze layers in some steps, and a newcomer traces one of these."""
    model = Odd("")
    trained = traced(model).graph
    model.embed.requires_grad_(False)
    assert traced(model).graph.digest() == trained.digest()


def test_default_blocks_open_wrappers_around_stacks_and_patterns_name_others() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Stack(layers=2)
            self.head = nn.Linear(2, 2)

    assert blocks_of(Wrapper()) == ("model.embed", "model.layers.0", "model.layers.1", "model.head", "head")
    assert blocks_of(Wrapper(), ["model.layers.*", "head"]) == ("model.layers.0", "model.layers.1", "head")
