"""The accelerator of a member: its choice, what is told of its errors, and deterministic algorithms."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from elastrain.base.told_devices import ToldDevices
from elastrain.device import DeviceDescription
from elastrain.errors import ConfigError
from elastrain.protocol import agent_messages as am
from elastrain.runtime.io import member_device
from elastrain.runtime.io.agent_link import AgentLink
from elastrain.runtime.io.member_device import MemberDevice
from elastrain.runtime.loop.exit_report import ExitReport


class Machine:
    """Torch with some CUDA devices, without any of them. `asked` has what would start the driver or touch a device."""

    def __init__(self, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        self.started, self.current = False, 0
        self.uuids = [f"GPU-{index}" for index in range(count)]
        module = SimpleNamespace(
            is_initialized=lambda: self.started,
            current_device=lambda: self._ask("current") or self.current,
            memory_allocated=lambda: 3 << 20,
            max_memory_allocated=lambda: 5 << 20,
        )
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
        monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: self.asked.append(f"set {index}"))
        monkeypatch.setattr(torch, "get_device_module", lambda _=None: module)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(member_device, "device_count", lambda: count)
        monkeypatch.setattr(member_device, "device_of", self._port)
        monkeypatch.setattr(member_device, "is_accelerator", lambda _device: True)

    def _ask(self, what: str) -> None:
        self.asked.append(what)

    def _port(self, device: torch.device) -> Any:
        self.asked.append(f"describe {device.index}")
        index = device.index or 0
        if not self.uuids[index]:
            raise torch.AcceleratorError("CUDA error: unknown error")
        described = DeviceDescription(type="cuda", index=index, name="H200", uuid=self.uuids[index])
        return SimpleNamespace(describe=lambda: described, mem_get_info=lambda: (1 << 20, 141 << 30))


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(2, monkeypatch)


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


def device(slot: int | None = 0, *, deterministic: bool = True, **told: tuple[str, ...]) -> MemberDevice:
    return MemberDevice(ToldDevices(**told), slot, deterministic=deterministic)


def ready(slot: int = 0, *, deterministic: bool = True) -> MemberDevice:
    """One that has described its device."""
    made = device(slot, deterministic=deterministic)
    made.choose()
    made.take(nn.Linear(2, 2), lambda _: None)
    return made


@pytest.mark.parametrize(("slot", "asked"), [(0, []), (1, ["set 1"]), (2, []), (3, ["set 1"]), (None, [])])
def test_the_device_of_the_slot_is_current_and_the_first_one_is_so_without_a_call(
    slot: int | None, asked: list[str], two: Machine
) -> None:
    device(slot).choose()
    assert two.asked == asked


def test_a_script_that_has_chosen_its_device_is_left_alone(two: Machine) -> None:
    two.started, two.current = True, 1
    device(0).choose()
    assert two.asked == ["current"]


def test_a_device_that_the_agents_leave_out_is_left_out_and_not_touched(two: Machine) -> None:
    chosen = device(1, seen=("a", "b"), left_out=("b",))
    chosen.choose()
    assert two.asked == []
    assert chosen.name == "a"


def test_a_worker_that_is_not_told_which_devices_there_are_asks_them(two: Machine) -> None:
    two.uuids[0] = ""  # broken
    device(0, left_out=("H200 (UUID GPU-1)",)).choose()
    assert two.asked == ["describe 0", "describe 1"]
    device(0, left_out=("H200 (UUID GPU-0)",)).choose()


def test_the_agent_is_told_of_the_models_device_and_of_all_that_the_process_sees(two: Machine) -> None:
    told: list[am.OnDevice] = []
    made = device()
    made.choose()
    made.take(nn.Linear(2, 2), told.append)
    assert told == [am.OnDevice(device="H200 (UUID GPU-0)", seen=("H200 (UUID GPU-0)", "H200 (UUID GPU-1)"))]


def test_a_member_on_the_cpu_tells_nothing_and_computes_as_before() -> None:
    made = device()
    made.choose()
    made.take(nn.Linear(2, 2), lambda _: pytest.fail("there is no device"))
    assert not torch.are_deterministic_algorithms_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


# ---- deterministic algorithms


def test_they_are_on_where_a_device_computes_and_cublas_is_told(two: Machine) -> None:
    ready()
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_without_deterministic_nothing_of_it_is_set(two: Machine) -> None:
    ready(deterministic=False)
    assert not torch.are_deterministic_algorithms_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


def test_a_value_with_which_cublas_is_not_deterministic_is_refused(
    two: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":8:1")
    with pytest.raises(ConfigError, match=r"CUBLAS_WORKSPACE_CONFIG is ':8:1', and cuBLAS .*:4096:8 or :16:8 only"):
        ready()


def test_cublas_that_cannot_be_told_in_time_is_refused(two: Machine) -> None:
    two.started = True
    with pytest.raises(ConfigError, match=r"CUDA had started before elastrain.init\(\), too late to set CUBLAS_"):
        ready()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "cumsum_cuda_kernel does not have a deterministic implementation, but you set 'torch.use_determin…",
            "the kernel cumsum_cuda_kernel has no deterministic form on H200 (UUID GPU-0): use another operation; "
            "elastrain.init(deterministic=False) lets it compute",
        ),
        (
            "Deterministic behavior was enabled, but this operation is not deterministic because it uses CuBLAS and "
            "you have CUDA >= 10.2. … CUBLAS_WORKSPACE_CONFIG=:4096:8",
            "cuBLAS was not told in time to compute deterministically: set CUBLAS_WORKSPACE_CONFIG; "
            "elastrain.init(deterministic=False) lets it compute",
        ),
    ],
)
def test_a_kernel_without_a_deterministic_form_is_named_with_the_way_out(
    text: str, sentence: str, two: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, shown, _ = end_with(RuntimeError(text), ready(), monkeypatch)
    assert (told.device, told.signature) == ("", f"ConfigError: {sentence}")
    assert told.traceback.endswith(f"{sentence}\n")
    assert shown == []


# ---- errors


def end_with(
    error: BaseException, made: MemberDevice, monkeypatch: pytest.MonkeyPatch
) -> tuple[am.Failed, list[str], list[object]]:
    """Return what the agent is told, what is shown, and how the process ends: with `leave`, or at once with a code."""
    told: list[am.Failed] = []
    shown: list[str] = []
    ended: list[object] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: shown.append(str(error)))
    channel: Any = SimpleNamespace(send=lambda message, fd=None: told.append(message))
    report = ExitReport(AgentLink("m1", channel), lambda: ended.append("leaves"), made, ended.append)
    report.take_hook()
    try:
        raise error
    except type(error):
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    assert report.has_left
    (failed,) = told
    return failed, shown, ended


ILLEGAL = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported"


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError(ILLEGAL),
        RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(handle)`"),
        RuntimeError("CUDA driver error: unknown error"),
        RuntimeError("Triton Error [CUDA]: device-side assert triggered"),
        RuntimeError("level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)"),
    ],
)
def test_an_error_of_the_device_names_it_and_the_process_ends_without_touching_it(
    error: RuntimeError, two: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = ready()
    two.asked.clear()
    told, shown, ended = end_with(error, made, monkeypatch)
    assert told.device == "H200 (UUID GPU-0)"
    assert told.traceback.endswith(
        "elastrain: H200 (UUID GPU-0) has failed in m1: this process does not use it any more, and ends\n"
    )
    assert shown == [str(error)]
    assert ended == [1], "closing would wait for the device"
    assert two.asked == []


def test_the_engines_error_is_told_and_the_loops_own_is_only_shown(
    two: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[am.Failed] = []
    channel: Any = SimpleNamespace(send=lambda message, fd=None: told.append(message))
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    report = ExitReport(AgentLink("m1", channel), lambda: None, ready(), lambda _code: None)
    report.take_hook()
    report.report(torch.AcceleratorError(ILLEGAL))
    own = torch.AcceleratorError(ILLEGAL)
    sys.excepthook(type(own), own, None)
    assert len(told) == 1
    assert own.__notes__[0].startswith("elastrain: H200 (UUID GPU-0) has failed in m1")


def test_a_report_says_from_where_on_the_device_may_have_failed(two: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[am.Failed] = []
    channel: Any = SimpleNamespace(send=lambda message, fd=None: told.append(message))
    report = ExitReport(AgentLink("m1", channel), lambda: None, ready(), lambda _code: None)
    report.step = SimpleNamespace(number=3, micro_batch=6, unfinished_micro_batch=4)  # type: ignore[assignment]
    report.report(torch.AcceleratorError(ILLEGAL))
    assert told[0].micro_batch == 6, "where members are compared, the place is the loop's"
    assert "the loop was ahead of its device, which may have failed in micro-batch 4" in told[0].traceback
    assert "micro-batch" not in told[0].signature


def test_the_process_does_not_end_before_the_engines_report_is_sent(
    two: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    sends, may_send = threading.Event(), threading.Event()

    def send(_message: am.FromWorker, fd: int | None = None) -> None:
        sends.set()
        assert may_send.wait(10)
        done.append("sent")

    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    channel: Any = SimpleNamespace(send=send)
    report = ExitReport(AgentLink("m1", channel), lambda: None, ready(), lambda _code: done.append("ended"))
    report.take_hook()
    own, hook = torch.AcceleratorError(ILLEGAL), sys.excepthook
    engine = threading.Thread(target=report.report, args=(torch.AcceleratorError(ILLEGAL),))
    loop = threading.Thread(target=hook, args=(type(own), own, None))
    engine.start()
    assert sends.wait(10)
    loop.start()
    loop.join(0.05)
    may_send.set()
    for thread in (engine, loop):
        thread.join(10)
    assert done == ["sent", "ended"]


def test_an_exception_that_the_device_has_caused_is_the_devices(two: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        try:
            raise torch.AcceleratorError(ILLEGAL)
        except RuntimeError as cause:
            raise ValueError("step failed") from cause
    except ValueError as error:
        told, _, ended = end_with(error, ready(), monkeypatch)
    assert told.device == "H200 (UUID GPU-0)"
    assert told.signature == "AcceleratorError: CUDA error: an illegal memory access was encountered"
    assert ended == [1]


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        RuntimeError("Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"),
        RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:94, remote process exited"),
        RuntimeError("No CUDA GPUs are available"),
        ValueError("CUDA error: of the script's own"),
    ],
)
def test_other_exceptions_are_the_scripts(error: Exception, two: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    told, _, ended = end_with(error, ready(), monkeypatch)
    assert (told.device, ended) == ("", ["leaves"])


def test_a_device_that_is_no_longer_there_is_named_as_an_earlier_worker_saw_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Machine(0, monkeypatch)
    made = device(1, seen=("a", "b"))
    made.choose()
    told, _, _ = end_with(RuntimeError("No CUDA GPUs are available"), made, monkeypatch)
    assert told.device == "b"


def test_without_memory_the_error_names_device_limit_and_what_is_held(
    two: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity …")
    told, _, ended = end_with(error, ready(), monkeypatch)
    assert told.signature == "OutOfMemoryError: CUDA out of memory"
    assert (
        "H200 (UUID GPU-0) has no memory left for m1: it has 144384 MiB, of which this process's tensors hold 3 MiB "
        "(at most 5 MiB so far), 1 MiB of it parameters and buffers"
    ) in told.traceback
    assert ended == ["leaves"], "the device is in order"


def test_one_error_has_one_signature_on_all_devices(two: Machine) -> None:
    one, other = ready(), ready()
    other.name = "H200 (UUID GPU-1)"
    text = "LATE error: an illegal memory access was encountered on {} ({}), at operation {}"
    first = torch.AcceleratorError(text.format("H200", "GPU-0", 4))
    second = torch.AcceleratorError(text.format("H200", "GPU-1", 123))
    assert one.signature(first) == other.signature(second)


def test_an_error_before_the_device_is_described_names_it_as_the_agent_does(
    two: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = device(1, seen=("a", "b"))
    made.choose()
    told, _, _ = end_with(torch.AcceleratorError(ILLEGAL), made, monkeypatch)
    assert told.device == "b"
