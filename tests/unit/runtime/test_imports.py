"""A job that begins with an imported state dict: what does not fit the model is refused by name, before it changes."""

from __future__ import annotations

import queue
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from elastrain import protocol as p
from elastrain.base.resume import Resume
from elastrain.errors import ConfigError
from elastrain.runtime.durable.node_disks import Reader
from elastrain.runtime.durable.stored_initial import StoredInitial
from elastrain.runtime.io.loop_channel import LoopFailed
from elastrain.runtime.model.flat_model import ModelState
from elastrain.runtime.model.optimizer import PieceOptimizer
from elastrain.runtime.model.partition import describe
from elastrain.snapshot.durable.conversion import import_files
from elastrain.snapshot.durable.errors import CheckpointError
from elastrain.snapshot.durable.places.local import LocalPlace

READER = Reader(member="m0", node="node0", scope="job", secret=None, source="")
State = dict[str, Tensor]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(3))


def values() -> State:
    torch.manual_seed(1)
    return {name: value.clone() for name, value in Tied().state_dict().items()}


def begin(folder: Path, given: State, *, accepts: bool = False) -> dict[str, Tensor]:
    """What a model has that begins with these tensors."""
    save_file(given, folder / "model.safetensors")
    made = import_files(LocalPlace(folder / "place"), [folder / "model.safetensors"])
    torch.manual_seed(0)
    model, told = Tied(), queue.SimpleQueue[Any]()
    optimizer = torch.optim.AdamW(model.parameters())
    state = ModelState(model, describe(model, optimizer, None), lambda numel, dtype: torch.zeros(numel, dtype=dtype))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    resume = Resume(place=str(folder / "place"), name=made.name, step=-1, accepts_changes=accepts)
    pieces = PieceOptimizer(optimizer, state.layout)
    stored = StoredInitial(resume, state, pieces, READER, told.put, lambda _done, _size: None)
    try:
        stored.check(model)
        stored.carry_out(p.ReadInitial(shards=tuple(range(len(state.layout.shards)))))
        came = told.get(timeout=180)
        if isinstance(came, LoopFailed):
            raise came.error
    except ConfigError:
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        raise
    state.statistics.refresh()
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("left_out", ["", "head.weight", "embedding.weight"])
def test_a_tied_weight_may_have_either_name_or_both(left_out: str, tmp_path: Path) -> None:
    given = values()
    came = begin(tmp_path, {name: value for name, value in given.items() if name != left_out})
    for name in ("embedding.weight", "head.weight", "norm.weight", "norm.bias"):
        assert torch.equal(came[name], given[name]), name


def test_a_tied_weight_that_is_not_a_number_equals_itself(tmp_path: Path) -> None:
    given = {
        **values(),
        "embedding.weight": torch.full((8, 8), torch.nan),
        "head.weight": torch.full((8, 8), torch.nan),
    }
    assert begin(tmp_path, given)["head.weight"].isnan().all()


def test_half_precision_becomes_the_models(tmp_path: Path) -> None:
    given = values()
    came = begin(
        tmp_path, {name: value.half() if value.is_floating_point() else value for name, value in given.items()}
    )
    assert torch.equal(came["head.weight"], given["head.weight"].half().float())


CASES: dict[str, tuple[Callable[[State], State], str]] = {
    "tied, different": (
        lambda given: {**given, "head.weight": given["head.weight"] + 1},
        r"'embedding.weight' and 'head.weight' are one weight in the model, and two in .*, with other values",
    ),
    "foreign name": (lambda given: {**given, "x.y": torch.ones(3)}, r"has 'x.y', and the model does not"),
    "missing": (
        lambda given: {name: value for name, value in given.items() if name != "norm.weight"},
        r"the model has 'norm.weight', and .* does not",
    ),
    "shape": (lambda given: {**given, "norm.weight": torch.ones(3)}, r"'norm.weight' is of shape \(8,\) in the model"),
    "tied name of another shape": (
        lambda given: {**given, "head.weight": torch.ones(9, 8)},
        r"'head.weight' is of shape \(8, 8\) in the model and of \(9, 8\)",
    ),
    "kind": (
        lambda given: {**given, "norm.weight": torch.ones(8, dtype=torch.int8)},
        r"'norm.weight' is float32 in the model and int8 in",
    ),
    "prefix": (
        lambda given: {f"module.{name}": value for name, value in given.items()},
        r"the model has 'embedding.weight', and .* does not \(it has module\.",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_does_not_fit_is_refused_by_name_before_anything_has_changed(case: str, tmp_path: Path) -> None:
    change, sentence = CASES[case]
    with pytest.raises(ConfigError, match=sentence):
        begin(tmp_path, change(values()))


def test_a_name_that_is_given_twice_is_refused(tmp_path: Path) -> None:
    for file in ("one", "two"):
        save_file({file: torch.ones(2), "w": torch.ones(2)}, tmp_path / f"{file}.safetensors")
    with pytest.raises(CheckpointError, match=r"'w' is in .*two\.safetensors, and in a file before it"):
        import_files(LocalPlace(tmp_path / "place"), [tmp_path / "one.safetensors", tmp_path / "two.safetensors"])
    assert not (tmp_path / "place").exists() or not list((tmp_path / "place").iterdir())


def test_optimizer_state_of_a_parameter_that_the_model_does_not_have_is_refused(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    told = {"elastrain.groups": '[{"parameters": ["w"], "hyper": {}}]', "elastrain.optimizer": "SGD"}
    state = {"w.momentum_buffer": torch.ones(2), "v.momentum_buffer": torch.ones(2)}
    save_file(state, tmp_path / "optimizer.safetensors", metadata=told)
    with pytest.raises(CheckpointError, match="has state of 'v', which the model does not have"):
        import_files(
            LocalPlace(tmp_path / "place"), [tmp_path / "model.safetensors"], tmp_path / "optimizer.safetensors"
        )
