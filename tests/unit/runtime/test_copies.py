"""Copies and files of a model that trains are ordinary models, and so is the model once its training has ended."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastrain.errors import ConfigError
from elastrain.pipeline.stubs.placeholders import Entries
from elastrain.runtime.loop_state.randomness import BlockRandomness
from elastrain.runtime.model.flat_model import ModelState
from elastrain.runtime.model.partition import describe

torch.set_num_threads(1)


class Net(nn.Module):
    """Everything on which the runtime hangs something: blocks, statistics, a tied weight, a parameter of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.head, self.out = nn.Linear(8, 8), nn.Linear(8, 64)
        self.head.weight = self.emb.weight
        self.scale = nn.Parameter(torch.ones(4))
        self.none = nn.Parameter(torch.ones(0))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.drop(self.head(self.norm(self.emb(x))))) * self.scale.sum()
        return out


def _prepared(model: nn.Module, *, apart: bool = False) -> tuple[ModelState, BlockRandomness]:
    layout = describe(model, torch.optim.SGD(model.parameters()))
    state = ModelState(model, layout, lambda numel, dtype: torch.zeros(numel, dtype=dtype), apart=apart)
    return state, BlockRandomness(model, layout.blocks, 0, torch.device("cpu"))


def _saved(thing: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    return buffer.getvalue()


def _hooks(model: nn.Module) -> int:
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_state_dict_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    on_modules = sum(len(getattr(each, kind)) for each in model.modules() for kind in kinds)
    return on_modules + sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())


@pytest.mark.parametrize("apart", [False, True])
def test_a_copy_and_a_file_of_a_model_that_trains_compute_by_themselves(*, apart: bool) -> None:
    model = Net()
    plain = copy.deepcopy(model)
    state, randomness = _prepared(model, apart=apart)
    randomness.begin(0, 0)
    read = torch.load(io.BytesIO(_saved(model)), weights_only=False)
    for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), read, copy.deepcopy(model.head)):  # noqa: S301
        slot = state.new_slot()
        slot.begin_run(range(5))
        state.attach(slot)
        drawn = torch.get_rng_state()
        each(torch.ones(2, 8)).sum().backward()
        state.detach()
        assert not slot.touched
        if isinstance(each, Net):
            assert not torch.equal(torch.get_rng_state(), drawn), "it draws on, where the model would begin anew"
            assert each.head.weight is each.emb.weight and each.emb.weight.grad is not None
            assert [tuple(p.shape) for p in each.parameters()] == [tuple(p.shape) for p in plain.parameters()]
    assert torch.default_generator.initial_seed() != 0


def test_files_are_no_larger_than_those_of_plain_torch() -> None:
    model = Net()
    sizes = [len(_saved(thing)) for thing in (model.scale, model.state_dict(), model.out.bias.data)]
    _prepared(model)
    assert [len(_saved(thing)) for thing in (model.scale, model.state_dict(), model.out.bias.data)] == sizes
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())


def test_a_file_names_nothing_of_ours() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    _prepared(model)
    assert b"elastrain" not in pickle.dumps(model) and b"elastrain" not in _saved(model)


def test_once_it_has_ended_the_model_is_an_ordinary_one() -> None:
    model = Net().to(torch.bfloat16)
    state, randomness = _prepared(model)
    assert _hooks(model)
    with pytest.raises(AttributeError, match="script a copy that was made before"):
        torch.jit.script(model)
    state.close()
    randomness.close()
    assert _hooks(model) == 0
    assert {p.grad_dtype for p in model.parameters()} == {torch.bfloat16}
    torch.jit.script(model)
    model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
    assert all(p.grad is not None and p.grad.dtype is torch.bfloat16 for p in model.parameters() if p.numel())
    before = state.parameters_digest()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert state.parameters_digest() != before


@pytest.mark.parametrize("save", [copy.deepcopy, _saved, lambda model: copy.deepcopy(model.out)])
def test_a_copy_without_all_blocks_is_refused(save: Any) -> None:
    model = Net()
    state, _ = _prepared(model, apart=True)
    state.hold([state.layout.blocks.index("head")])
    with pytest.raises(ConfigError, match="this member of a pipeline"):
        save(model)


def test_a_copy_made_where_entries_stand_does_not_lead_into_the_blocks_of_the_model() -> None:
    model = Net()
    entered: list[int] = []

    def enter(place: int, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        entered.append(place)
        return forward(*args, **kwargs)

    entries = Entries(model, ["emb", "out"], enter)
    for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301
        with pytest.raises(ConfigError, match="copied in the loop of a job with --stages"):
            each(torch.ones(2, 8))
    assert not entered
    model(torch.ones(2, 8))
    assert entered == [0, 1]
    entries.close()
    copy.deepcopy(model)(torch.ones(2, 8))
