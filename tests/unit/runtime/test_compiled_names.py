"""A model that was compiled before prepare has the names, blocks and digest of the model that was not."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import elastrain
from elastrain.errors import ConfigError
from elastrain.pipeline.stubs.naming import module_of, plain_name, uncompiled
from elastrain.runtime.model.flat_model import ModelState
from elastrain.runtime.model.flats import in_private_memory
from elastrain.runtime.model.partition import describe


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(3))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.norm(hidden)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.stack = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.head = nn.Linear(8, 8)
        self.head.weight = self.stack[0].weight
        self.register_buffer("scale", torch.ones(2))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.head(self.stack(self.encoder(hidden))) * self.scale.mean()


def _compiled(module: nn.Module) -> nn.Module:
    made = torch.compile(module, backend="eager")
    assert isinstance(made, nn.Module)
    return made


def _layers(model: Model) -> nn.Module:
    for index in range(3):
        model.encoder.layers[index] = _compiled(model.encoder.layers[index])
    return model


def _parts(model: Model) -> nn.Module:
    model.encoder, model.stack = _compiled(model.encoder), _compiled(model.stack)
    return model


def _parts_in_place(model: Model) -> nn.Module:
    model.encoder.compile(backend="eager")
    return model


def _in_place(model: Model) -> nn.Module:
    model.compile(backend="eager")
    return model


WAYS: dict[str, Callable[[Model], nn.Module]] = {
    "whole": _compiled,
    "layers": _layers,
    "parts": _parts,
    "parts of the whole": lambda model: _compiled(_parts(model)),
    "in place": _in_place,
    "parts in place": _parts_in_place,
}
way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())


def _made() -> Model:
    torch.manual_seed(0)
    return Model()


@way
def test_names_and_blocks_are_those_of_the_model_that_is_not_compiled(way: Callable[[Model], nn.Module]) -> None:
    plain, model = _made(), uncompiled(way(_made()))
    wanted = describe(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    found = describe(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert [spec.name for spec in found.parameters] == [spec.name for spec in wanted.parameters]
    assert (found.blocks, found.digest()) == (wanted.blocks, wanted.digest())
    digests = [
        ModelState(m, layout, in_private_memory).parameters_digest() for m, layout in ((plain, wanted), (model, found))
    ]
    assert digests[0] == digests[1]


def test_a_block_in_a_wrapper_is_found_by_its_plain_name() -> None:
    model = _compiled(_parts(_made()))
    assert isinstance(module_of(model, "encoder.layers.1.0"), nn.Linear)
    assert uncompiled(module_of(model, "encoder")) is not module_of(model, "encoder")
    assert module_of(model, "") is model
    assert plain_name("_orig_mod.encoder._orig_mod.layers.1.0.weight") == "encoder.layers.1.0.weight"
    assert plain_name("encoder.not_orig_mod.weight") == "encoder.not_orig_mod.weight"


def test_patterns_of_blocks_may_have_the_names_of_wrappers() -> None:
    model = _parts(_made())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wanted = describe(model, optimizer, ["encoder.layers.*", "stack", "head"]).blocks
    assert wanted == describe(model, optimizer, ["encoder._orig_mod.layers.*", "stack", "head"]).blocks
    with pytest.raises(ConfigError, match="no submodule that owns parameters is called 'decoder'"):
        describe(model, optimizer, ["decoder"])


def _trained(way: Callable[[Model], nn.Module]) -> tuple[str, str]:
    """Train a few steps with gradients that are clipped, and return the digest after each half."""
    job = elastrain.init(seed=3)
    model = way(_made())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    data = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    loader = elastrain.DataLoader(list(data), global_batch_size=8, micro_batch_size=4, num_workers=0)
    assert job.prepare(model, optimizer, loader, max_grad_norm=0.1)[0] is model
    before = job.digest()
    for step in job.steps(loader, until=3):
        for batch in step:
            step.backward(model(batch).square().mean())
    return before, job.digest()


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
def test_training_comes_to_the_digest_of_the_model_that_is_not_compiled(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    assert _trained(WAYS[name]) == _trained(lambda model: model)
