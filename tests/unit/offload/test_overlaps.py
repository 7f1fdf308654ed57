"""Which tensors of a model have elements of a trained parameter, and which only lie beside it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from elastrain.offload.errors import OffloadConfigError
from elastrain.offload.lifetimes.within_inputs import check_model
from elastrain.offload.overlaps import shared_memory


class Two(nn.Module):
    """Two layers, in which a test arranges memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)


def _both(model: Two) -> None:
    model.second.weight.data = model.first.weight.data


def _transposed(model: Two) -> None:
    model.second.weight = nn.Parameter(model.first.weight.data.t())


def _rows(model: Two) -> None:
    model.second.weight = nn.Parameter(model.first.weight.data[1:3])


def _last_element(model: Two) -> None:
    model.second.bias = nn.Parameter(model.first.weight.data.view(-1)[15:])


def _half_precision(model: Two) -> None:
    model.second.weight = nn.Parameter(model.first.weight.data.view(torch.bfloat16))


def _buffer(model: Two) -> None:
    model.second.register_buffer("own", model.first.weight.data)


def _buffer_without_state(model: Two) -> None:
    model.second.register_buffer("own", model.first.weight.detach()[0], persistent=False)


def _attribute(model: Two) -> None:
    model.second.seen = model.first.weight.data


def _view_with_history(model: Two) -> None:
    model.second.seen = model.first.weight[:2]


def _expanded(model: Two) -> None:
    model.second.seen = model.first.bias.data[0].expand(3, 3)


def _in_a_list(model: Two) -> None:
    model.seen = [torch.zeros(2), model.first.weight.data]


def _in_a_dict(model: Two) -> None:
    model.seen = {"rows": model.first.weight.data[:1]}


SHARED = {
    "second.weight": (_both, _transposed, _rows, _half_precision),
    "second.bias": (_last_element,),
    "second.own": (_buffer, _buffer_without_state),
    "second.seen": (_attribute, _view_with_history, _expanded),
    "seen": (_in_a_list, _in_a_dict),
}


@pytest.mark.parametrize(("name", "arrange"), [(name, each) for name, all_ in SHARED.items() for each in all_])
def test_what_has_elements_of_a_parameter_is_named_with_it(name: str, arrange: Callable[[Two], None]) -> None:
    model = Two()
    arrange(model)
    found = shared_memory(model, lambda parameter: parameter.requires_grad)
    assert found is not None and {name} < set(found) and any(each.startswith("first.") for each in found)


def _one_parameter(model: Two) -> None:
    model.second.weight = model.first.weight


def _slices_of_one_storage(model: Two) -> None:
    whole, at = torch.randn(64), 0
    for parameter in model.parameters():
        parameter.data = whole[at : at + parameter.numel()].view(parameter.shape)
        at += parameter.numel()


def _columns_of_one_matrix(model: Two) -> None:
    whole = torch.randn(4, 8)
    model.first.weight.data, model.second.weight.data = whole[:, :4], whole[:, 4:]


def _every_other_element(model: Two) -> None:
    whole = torch.randn(32)
    model.first.weight.data, model.second.weight.data = whole[::2].view(4, 4), whole[1::2].view(4, 4)


def _buffers_among_themselves(model: Two) -> None:
    table = torch.randn(4, 4)
    model.first.register_buffer("rotary", table)
    model.second.register_buffer("rotary", table[:2], persistent=False)
    model.seen = table


def _nothing_in_it(model: Two) -> None:
    model.second.register_buffer("none", model.first.weight.data[:0])
    model.second.register_buffer("missing", None)


def _frozen(model: Two) -> None:
    model.requires_grad_(False)
    _both(model)
    _attribute(model)


def _parameter_in_a_list(model: Two) -> None:
    model.all_of_them = list(model.parameters())
    model.recurrent = nn.LSTM(4, 4, bidirectional=True)


def _spectral_norm(model: Two) -> None:
    torch.nn.utils.spectral_norm(model.first)


def _other_kinds(model: Two) -> None:
    model.first.register_buffer("sparse", torch.eye(2).to_sparse())
    model.first.register_buffer("far", torch.empty(2, 2, device="meta"))
    model.first.register_buffer("wide", torch.zeros(1).expand(1 << 40))
    torch.nn.utils.parametrizations.weight_norm(model.second)


@pytest.mark.parametrize(
    "arrange",
    [
        _one_parameter,
        _slices_of_one_storage,
        _columns_of_one_matrix,
        _every_other_element,
        _buffers_among_themselves,
        _nothing_in_it,
        _frozen,
        _parameter_in_a_list,
        _spectral_norm,
        _other_kinds,
    ],
)
def test_what_only_lies_beside_it_is_not(arrange: Callable[[Two], None]) -> None:
    model = Two()
    arrange(model)
    assert shared_memory(model, lambda parameter: parameter.requires_grad) is None


def test_it_looks_at_a_model_of_many_parameters_quickly() -> None:
    model = nn.ModuleList(nn.Linear(2, 2) for _ in range(2000))
    looked: list[Tensor] = []
    assert shared_memory(model, lambda parameter: looked.append(parameter) is None) is None
    assert len(looked) == 4000


def test_within_refuses_it_by_both_names() -> None:
    model = Two()
    check_model(model)
    _transposed(model)
    with pytest.raises(OffloadConfigError, match=r"'first\.weight' and 'second\.weight' of the model share memory"):
        check_model(model)
