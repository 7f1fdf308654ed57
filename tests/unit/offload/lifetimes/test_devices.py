"""A model whose parameters lie on several devices is refused before anything is done with it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from elastrain.offload.errors import OffloadConfigError
from elastrain.offload.lifetimes.within_inputs import check_model


class Elsewhere(nn.Parameter):
    """Says that it lies on a device that this machine need not have."""

    device = torch.device("cuda:1")


def test_parameters_on_two_devices_are_refused() -> None:
    model = nn.Linear(2, 2)
    model.bias = Elsewhere(torch.zeros(2))
    with pytest.raises(OffloadConfigError, match=r"on one device: these are on \['cpu', 'cuda:1'\]"):
        check_model(model)
