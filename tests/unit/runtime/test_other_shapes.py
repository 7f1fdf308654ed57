"""Micro-batches that are longer or have fewer samples than that of the tracing pass: the bits of one, or a sentence."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from elastrain.errors import ConfigError
from elastrain.pipeline.stubs import fakes
from elastrain.pipeline.stubs.fakes import AbsentBlock, Fakes
from elastrain.pipeline.stubs.naming import is_fake
from tests.support.pipeline_models import Case, DecoderLayer, Layer, Positioned, Scaling, Stack, places_in, ragged
from tests.support.pipeline_steps import MICRO_BATCHES, alone, chain, in_pipelines


def _mask(x: Tensor) -> Tensor:
    return torch.triu(torch.full((x.shape[1], x.shape[1]), float("-inf")), 1)


class Turned(Positioned):
    """Blocks hand over transposed tensors."""

    def __init__(self) -> None:
        super().__init__(transposed=True)


class Reordered(Stack):
    """Code between blocks goes by strides, which parameters have a part in."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scaled() for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, torch.full((x.shape[1], 1), x.stride(1) / 100))
        logits: Tensor = self.head(x)
        return logits


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(24, 32))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return (self.scale[:, : x.shape[1]].t() * 1.0) * (x + positions)


class Masked(Stack):
    """Attention under a mask that is made anew of each layer's output; two layers at a time are computed again."""

    def __init__(self, *, is_selective: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer(24) for _ in range(4))
        kept = [torch.ops.aten.addmm.default, torch.ops.aten.mm.default]
        self.options = {"context_fn": partial(create_selective_checkpoint_contexts, kept)} if is_selective else {}

    def pair(self, x: Tensor, first: int) -> Tensor:
        for layer in self.layers[first : first + 2]:
            x = layer(x, None, _mask(x))
        return x

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for first in (0, 2):
            x = checkpoint(self.pair, x, first, use_reentrant=False, **self.options)
        logits: Tensor = self.head(x)
        return logits


class Translating(Stack):
    """One embedding for source and target, which have other lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.ModuleList(DecoderLayer(24) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        encoded, x = self.embed(tokens[:, : 1 + int(tokens.sum()) % 4]), self.embed(tokens)
        mask = _mask(x)
        for layer in self.layers:
            encoded = layer(encoded, places_in(encoded))
        for layer in self.decoder:
            x = layer(x, encoded, mask)
        logits: Tensor = self.head(x)
        return logits


class Cropping(Layer):
    def forward(self, x: Tensor, keep: Any = None, *, mode: str = "first") -> Tensor:
        return super().forward(x[:, :keep] if mode == "first" else x[:, -keep:])


class Cropped(Stack):
    """A block is told how much of a text to keep."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Cropping(24) for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for place, layer in enumerate(self.layers):
            keep = x.shape[1] - int(tokens.sum() + place) % 2
            x = layer(x, keep, mode="last" if place == 1 else "first") * x.shape[1]
        x = nn.functional.pad(x, (0, 0, 0, tokens.shape[1] - x.shape[1]))
        logits: Tensor = self.head(x)
        return logits


class Normed(Stack):
    """Its blocks measure running statistics, and draw from all generators."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(NormedLayer(24) for _ in range(4))


class NormedLayer(Scaling):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.batch_norm = nn.BatchNorm1d(width)
        self.register_buffer("places", torch.linspace(0, 1, 32), persistent=False)
        self.kept: Tensor | None = None

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        x = self.batch_norm(super().forward(x, positions).transpose(1, 2)).transpose(1, 2)
        self.places = self.places * 1.0
        self.kept = self.places[: x.shape[1], None]
        return x + self.kept


class FrozenBelow(Positioned):
    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)
        self.layers[:2].requires_grad_(False)


def _case(build: Any, autocast: str = "") -> Case:
    return Case(build, (3, 4), autocast, collate=ragged)


def _in_pipeline(case: Case, cuts: tuple[int, ...]) -> Any:
    members = ("a", "b", "c")[: len(cuts) + 1]
    return in_pipelines(case, chain(members, cuts, MICRO_BATCHES), members, 1).found


"""Of those that are much like their neighbours."""

MODELS = [
    pytest.param(_case(Positioned), (2, 4), id="positions and sizes read between blocks"),
    pytest.param(_case(Turned), (1, 3), id="blocks that hand over transposed"),
    pytest.param(_case(Reordered), (2, 4), id="strides read between blocks"),
    pytest.param(_case(Masked), (2, 4), id="a mask in a checkpoint"),
    pytest.param(_case(lambda: Masked(is_selective=True)), (2, 4), id="a mask in a selective checkpoint"),
    pytest.param(_case(lambda: Stack(in_place=True)), (1, 3), id="blocks that begin in place"),
    pytest.param(_case(Translating), (3, 6), id="a source of another length"),
    pytest.param(Case(Translating, (3, 4)), (3, 6), id="a source of another length, texts of one"),
    pytest.param(Case(Cropped, (3, 4)), (2, 4), id="a number, texts of one length"),
    pytest.param(_case(Cropped), (2, 4), id="a number"),
    pytest.param(Case(Normed, (3, 4)), (5,), id="a gradient with strides, texts of one length"),
    pytest.param(_case(Normed), (1,), id="statistics and generators, behind"),
    pytest.param(_case(Normed), (5,), id="statistics and generators, before"),
    pytest.param(_case(Positioned, "loop"), (3,), id="autocast around the body"),
    pytest.param(_case(Positioned, "forward"), (2, 4), id="autocast"),
    pytest.param(_case(FrozenBelow), (2, 4), id="frozen blocks"),
    pytest.param(_case(FrozenBelow), (1, 2), id="frozen blocks apart"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "cuts"), MODELS)
def test_other_shapes_make_the_bits_of_one(case: Case, cuts: tuple[int, ...]) -> None:
    assert _in_pipeline(case, cuts) == alone(case, 1).found


@pytest.mark.slow
@pytest.mark.parametrize(("case", "cuts"), [each for each in MODELS if "autocast" not in str(each.id)][:9])
def test_with_the_shapes_of_the_tracing_pass_they_do_not(
    monkeypatch: pytest.MonkeyPatch, case: Case, cuts: tuple[int, ...]
) -> None:
    """The rule broken: an absent block returns what it returned in the tracing pass."""
    monkeypatch.setattr(AbsentBlock, "_find", lambda block, *_: next(iter(block._traced.values())))
    try:
        found = _in_pipeline(case, cuts)
    except (RuntimeError, ValueError) as error:
        found = str(error)
    assert found != alone(case, 1).found


class Valued(Layer):
    """It reads values, and does not run on fakes."""

    def forward(self, x: Tensor, keep: int = 0) -> Tensor:
        return super().forward(x) * (1.0 + abs(float(x.detach().sum())) % 1.0) + keep


class Reading(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = Valued(24)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.layers[0](self.embed(tokens))
        logits: Tensor = self.head(self.layers[2](self.layers[1](x, keep=int(tokens.sum()))))
        return logits


def test_a_block_that_reads_values_may_take_other_numbers() -> None:
    case = Case(Reading, (3, 4))
    assert _in_pipeline(case, (2,)) == alone(case, 1).found


@pytest.mark.parametrize("cut", [2, 3], ids=["behind", "before"])
def test_a_block_that_reads_values_is_refused_other_shapes(cut: int) -> None:
    with pytest.raises(
        ConfigError, match=r"block 'layers.1' is given \[\(\d, \d+, 24\)\], and in .* was given \[\("
    ) as refused:
        _in_pipeline(_case(Reading), (cut,))
    assert "pad them to one length" in str(refused.value)
    assert "\n" not in str(refused.value)


def _absent(module: nn.Module) -> AbsentBlock:
    return AbsentBlock("block", module, {}, Fakes())


def _entered(block: AbsentBlock, module: nn.Module, *args: object) -> Any:
    return block.take(module.forward, args, {}, leaves=list(args), fresh=False)


def test_a_run_on_fakes_leaves_nothing_behind() -> None:
    module = NormedLayer(24).train()
    buffers = {name: (buffer, buffer._version) for name, buffer in module.named_buffers()}
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    x = torch.zeros(2, 7, 24, requires_grad=True) + 0
    saved = list[Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        made = _entered(_absent(module), module, x)
    assert is_fake(made) and made.shape == (2, 7, 24) and made.requires_grad
    assert states == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    assert {name: (buffer, buffer._version) for name, buffer in module.named_buffers()}.keys() == buffers.keys()
    assert all(buffer is buffers[n][0] and buffer._version == buffers[n][1] for n, buffer in module.named_buffers())
    assert module.kept is None and saved == [] and x._version == 0


def test_what_is_known_of_a_block_does_not_grow_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fakes, "_MOST", 16)
    module = nn.Linear(24, 24)
    block = _absent(module)
    for length in range(1, 20):
        assert _entered(block, module, torch.zeros(1, length, 24)).shape == (1, length, 24)
    assert len(block._found) == 16
    assert _entered(block, module, torch.zeros(1, 19, 24)) is _entered(block, module, torch.zeros(1, 19, 24))
