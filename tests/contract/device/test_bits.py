"""Checks of what decides a device's bits: fixed kernels, and models that lie on one device as a whole."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from elastrain.device import DevicePort, switches
from elastrain.errors import ConfigError
from elastrain.runtime.model import partition
from elastrain.runtime.model.kernels import KERNELS, LARGER, kernel_digests
from elastrain.snapshot import digest

CPU = torch.device("cpu")
AS_THE_CPU = ("cpu", "late")
"""Devices that compute with the CPU's kernels."""


def test_fixed_kernels_come_out_alike_every_time_and_no_generator_moves(port: DevicePort) -> None:
    before = torch.get_rng_state().tolist()
    first = kernel_digests(port.device)
    assert set(first) == {*KERNELS} | ({*LARGER} if port.device != CPU else set())
    assert kernel_digests(port.device) == first
    assert torch.get_rng_state().tolist() == before


def test_the_settings_of_a_script_change_no_fixed_kernel_and_stay_as_they_are(port: DevicePort) -> None:
    plain = kernel_digests(port.device)
    torch.set_deterministic_debug_mode("error")
    try:
        with torch.autocast(port.device.type, torch.bfloat16), torch.inference_mode():
            assert kernel_digests(port.device) == plain
        assert torch.get_deterministic_debug_mode() == 2
    finally:
        torch.set_deterministic_debug_mode("default")


def test_a_device_with_the_cpus_kernels_has_the_cpus_digests(port: DevicePort) -> None:
    fixed = {**KERNELS, **LARGER}
    assert (kernel_digests(port.device, fixed) == kernel_digests(CPU, fixed)) is (port.device.type in AS_THE_CPU)


def test_what_digests_share_may_be_made_by_another_thread_and_stream(port: DevicePort) -> None:
    tensor = port.empty(3 * digest.ROW + 5, torch.int32).zero_()
    port.synchronize()
    digest._odd_numbers.cache_clear()
    with port.side_stream("first"):
        submitted = digest.digest_later(tensor)
        with port.side_stream("second"):
            found = digest.digest(tensor)
        assert submitted() == found == digest.digest(tensor.cpu())
    digest._odd_numbers.cache_clear()

    def in_a_thread() -> int:
        with port.side_stream("third"):
            return digest.digest(tensor)

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(in_a_thread).result() == digest.digest(tensor)


def test_switches_can_be_told_to_other_members(port: DevicePort) -> None:
    found = switches()
    assert json.loads(json.dumps(found)) == found


def _of_two_devices(port: DevicePort, kind: str) -> nn.Module:
    """A model of which one tensor was left behind."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2)).to(port.device)
    if kind == "parameter":
        model[2].weight = nn.Parameter(torch.zeros(2, 2))
    else:
        model[1].register_buffer("running_mean", torch.zeros(2))
    return model


@pytest.mark.parametrize(
    ("kind", "words"),
    [("parameter", "parameter '2.weight' is on cpu: "), ("buffer", "buffer '1.running_mean' is on cpu: ")],
)
def test_a_model_on_two_devices_is_refused_with_both(
    port: DevicePort, kind: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition, "DEVICES", ("cpu", "meta", port.device.type), raising=False)
    model = _of_two_devices(port, kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if port.device == CPU:
        partition.describe(model, optimizer)
        return
    with pytest.raises(ConfigError) as refused:
        partition.describe(model, optimizer)
    assert str(refused.value).startswith(
        f"parameter '0.weight' is on {port.device} and {words}call model.to('{port.device}')"
    )
