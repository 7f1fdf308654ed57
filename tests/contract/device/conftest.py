"""The devices of this folder's suites: the host, the accelerator that is present, and the one that a module registers.

`ELASTRAIN_TEST_DEVICE` names the module (`torch_npu`, or one of a device that exists in tests only). The module
registers the device when it is imported, or by its function `install`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import import_module

import pytest
import torch

from elastrain.device import DevicePort, current_device, device_of

NAMED = import_module(os.environ.get("ELASTRAIN_TEST_DEVICE", "torch"))
getattr(NAMED, "install", bool)()
PORTS = list(dict.fromkeys([device_of(torch.device("cpu")), current_device()]))


@pytest.fixture(params=PORTS, ids=lambda port: str(port.device))
def port(request: pytest.FixtureRequest) -> Iterator[DevicePort]:
    made: DevicePort = request.param
    yield made
    made.synchronize()
    assert getattr(NAMED, "races", list)() == []
