"""The port to accelerators: which calls of torch's modules it makes, in which order, and where devices differ."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastrain.device import PinError, cuda_runtime, current_device, device_count
from elastrain.device.landing import LandingThread
from tests.support.noted_device import NotedModule


class NotedTensor:
    """A tensor that notes what happens to it."""

    def __init__(self, noted: NotedModule) -> None:
        self.noted = noted

    def copy_(self, _source: NotedTensor, *, non_blocking: bool) -> None:
        assert non_blocking
        self.noted.calls.append(f"copy on {self.noted.now}")

    def record_stream(self, stream: str) -> None:
        self.noted.calls.append(f"memory is kept for {stream}")


def tensors(noted: NotedModule) -> tuple[Any, Any]:
    return NotedTensor(noted), NotedTensor(noted)


COPIED = ["side waits for compute", "copy on side", "memory is kept for side", "side is reached"]


@pytest.mark.parametrize("way", ["copy_out", "copy_in"])
def test_a_copy_comes_on_a_side_stream_after_the_threads_work_and_keeps_its_memory(way: str) -> None:
    noted = NotedModule()
    getattr(noted.port(), way)(*tensors(noted)).synchronize()
    assert noted.calls == COPIED
    assert noted.now == "compute"


def test_a_copy_waits_for_the_given_event_only() -> None:
    noted = NotedModule()
    port = noted.port()
    noted.now = "engine"
    done = port.record()
    noted.now = "compute"
    port.copy_out(*tensors(noted), done)
    assert noted.calls == ["side waits for engine", *COPIED[1:3]]


@pytest.mark.parametrize(("kind", "options"), [("cuda", [True, False]), ("npu", [True, False]), ("xpu", [None, None])])
def test_events_sleep_or_spin_where_the_kind_of_device_has_both(kind: str, options: list[bool | None]) -> None:
    noted = NotedModule()
    port = noted.port(kind) if kind != "npu" else noted.port("privateuseone")
    port.record(timing=True)
    port.record(blocking=False)
    assert [made["enable_timing"] for made in noted.options] == [True, False]
    assert [made.get("blocking") for made in noted.options] == options


def test_times_are_in_seconds() -> None:
    port = NotedModule().port()
    assert port.record(timing=True).elapsed_s(port.record(timing=True)) == 1.5


class BrokenEvent:
    """An event of a device that has failed."""

    def synchronize(self) -> None:
        raise torch.AcceleratorError("planted")


def test_who_waits_for_a_device_that_fails_is_told_the_error() -> None:
    told: list[Exception | None] = []
    ended = threading.Event()
    landing = LandingThread("test")

    def note(error: Exception | None) -> None:
        told.append(error)
        ended.set()

    landing.then(BrokenEvent(), note)  # type: ignore[arg-type]
    assert ended.wait(30)
    (error,) = told
    assert isinstance(error, torch.AcceleratorError)


def test_no_thread_is_started_before_something_is_asked_of_it() -> None:
    before = threading.active_count()
    noted = NotedModule()
    noted.port().copy_out(*tensors(noted)).synchronize()
    assert threading.active_count() == before


def test_of_several_devices_only_the_ports_own_is_seeded() -> None:
    noted: Any = NotedModule()
    noted.default_generators = [torch.Generator().manual_seed(1) for _ in range(2)]
    noted.port().manual_seed(7)
    assert [each.initial_seed() for each in noted.default_generators] == [7, 1]


def test_a_module_without_generators_is_seeded_on_the_ports_device() -> None:
    noted: Any = NotedModule()

    def device(chosen: torch.device) -> AbstractContextManager[None]:
        noted.calls.append(f"on {chosen}")
        return nullcontext()

    noted.device, noted.manual_seed = device, lambda seed: noted.calls.append(f"seed {seed}")
    noted.port().manual_seed(7)
    assert noted.calls == ["on cuda:0", "seed 7"]


# CUDA's own.


class Cudart:
    """`cudaHostRegister` and its reverse."""

    def __init__(self, error: int) -> None:
        self.cudaError = SimpleNamespace(success=0)
        self.error = error
        self.calls: list[tuple[int, ...]] = []

    def cudaHostRegister(self, *arguments: int) -> int:
        self.calls.append(arguments)
        return self.error

    def cudaHostUnregister(self, *arguments: int) -> int:
        self.calls.append(arguments)
        return 0


def test_pinned_memory_is_pinned_for_all_devices_and_released(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart, memory = Cudart(0), torch.zeros(1024)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    for read_only, flags in ((False, 1), (True, 9)):
        release = NotedModule().port().pin(memory, read_only=read_only)
        assert release is not None
        assert cudart.calls.pop() == (memory.data_ptr(), 4096, flags)
        release()
        assert cudart.calls.pop() == (memory.data_ptr(),)


def test_memory_that_cuda_does_not_pin_is_named_with_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Cudart(2))
    with pytest.raises(PinError, match=r"does not pin 4096 bytes of host memory \(2\)"):
        cuda_runtime.pin(torch.device("cpu"), torch.zeros(1024), read_only=False)


def test_other_devices_pin_nothing_in_place() -> None:
    assert NotedModule().port("xpu").pin(torch.zeros(1024)) is None


@pytest.mark.parametrize(
    ("name", "partition"),
    [("NVIDIA A100-SXM4-40GB MIG 3g.20gb", "3g.20gb"), ("NVIDIA H100 80GB HBM3", None), ("NVIDIA IMIGA 2", None)],
)
def test_a_part_of_a_gpu_is_told_by_its_profile(
    name: str, partition: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    noted: Any = NotedModule()
    noted.get_device_properties = lambda device: SimpleNamespace(
        name=name, uuid="8a4c", major=9, minor=0, multi_processor_count=132
    )
    found = noted.port().describe()
    assert (found.type, found.index, found.name, found.uuid) == ("cuda", 0, name, "8a4c")
    assert (found.capability, found.multiprocessors, found.partition) == ("9.0", 132, partition)
    assert found.runtime == "CUDA 13.0"


def test_a_device_of_which_torch_knows_only_the_name_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: Any = NotedModule()
    noted.get_device_properties = lambda device: SimpleNamespace(name="Ascend910B", total_memory=64 << 30)
    found = noted.port("privateuseone").describe()
    assert (found.name, found.uuid, found.capability, found.multiprocessors) == ("Ascend910B", None, None, None)


# Which devices there are.


def test_a_torch_without_accelerators_has_the_host_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    assert device_count() == 0
    assert current_device().is_host


def test_an_accelerator_that_torch_is_built_for_and_that_is_absent_is_not_the_current_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    absent = SimpleNamespace(is_available=lambda: False, device_count=lambda: 0)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: absent)
    assert device_count() == 0
    assert current_device().is_host
