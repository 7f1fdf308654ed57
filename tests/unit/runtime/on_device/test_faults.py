"""Faults on request in a job on a device: bits that flip there, errors that stay, no room, a kernel that never ends."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from elastrain.device import device_of
from elastrain.launcher.faults import grammar
from elastrain.launcher.faults.table import lasts_s, settings
from elastrain.protocol.agent_messages import ArmFault
from elastrain.runtime.faults.armed import ArmedFaults
from elastrain.runtime.faults.fault_actions import Tools
from elastrain.runtime.faults.flips import MemberMemory, flip
from elastrain.runtime.io.journal import Journal
from tests.support import late


def _armed(line: str) -> tuple[ArmedFaults, list[str]]:
    fault = grammar.parse(line)
    executor: Any = type("Executor", (), {})()
    executor.memory = type("Memory", (), {"port": device_of(torch.device("late"))})()
    memory = MemberMemory(me="m1", executor=executor, holders=lambda: None)  # type: ignore[arg-type, return-value]
    journal, problems = Journal(None, "m1"), list[str]()
    journal.write = lambda event, **values: problems.append(values.get("reason", ""))  # type: ignore[method-assign]
    faults = ArmedFaults(journal, lambda number: None, Tools(memory=memory))
    place = fault.place
    faults.arm(
        ArmFault(kind=fault.kind, step=place.step, phase=place.phase, for_s=lasts_s(fault), options=settings(fault))
    )
    return faults, problems


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("bit", [0, 5, 15, 63])
def test_a_flip_changes_one_bit_on_a_device_and_torch_does_not_know(dtype: str, bit: int) -> None:
    values = torch.arange(9, dtype=getattr(torch, dtype)).to("late")[1:]
    before, version = values.cpu(), values._version
    assert flip(values, bit) == ""
    changed = values.cpu().view(torch.uint8) ^ before.view(torch.uint8)
    size, at = values.element_size(), bit % (8 * values.element_size())
    assert changed.nonzero().reshape(-1).tolist() == [7 * size + at // 8]  # in the largest
    assert int(changed.max()) == 1 << at % 8
    assert values._version == version


def test_a_flip_while_other_streams_work_is_no_race() -> None:
    device = torch.get_device_module("late")
    values = torch.ones(64, device="late")
    side = device.Stream()
    side.wait_stream(device.current_stream())
    with device.stream(side):
        values.mul_(2.0)
    assert flip(values, 3) == ""
    device.current_stream().wait_stream(side)
    assert int((values.cpu() != 2.0).sum()) == 1
    assert late.races() == []


def _trains(faults: ArmedFaults) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to("late")
    faults.reach(0, "forward")
    for _ in range(20):
        loss = model(torch.ones(2, 3, device="late")).sum()
        with faults.tools.device.around(nullcontext)():
            loss.backward()


@pytest.mark.parametrize("after", [0, 7, 40])
def test_an_error_of_the_device_stays_with_the_process_and_is_seen_by_every_thread(after: int) -> None:
    faults, _ = _armed(f"device-error --target member:m1 --after {after}")
    kept = torch.ones(2, device="late")
    with pytest.raises(torch.AcceleratorError, match=r"device-side assert triggered on Late Test Device"):
        _trains(faults)
    seen: list[type[BaseException]] = []

    def use() -> None:
        try:
            kept + 1
        except RuntimeError as error:
            seen.append(type(error))

    for thread in [threading.Thread(target=use) for _ in range(2)]:
        thread.start()
        thread.join()
    assert seen == [torch.AcceleratorError] * 2


def test_a_device_without_room_raises_once_and_works_on() -> None:
    faults, _ = _armed("device-error --target member:m1 --how memory --after 5")
    with pytest.raises(torch.OutOfMemoryError, match=r"LATE out of memory\. Tried to allocate 1125899906842624 bytes"):
        _trains(faults)
    _trains(faults)


def test_a_kernel_that_never_ends_holds_up_the_device_and_not_the_loop() -> None:
    faults, _ = _armed("hang --target member:m1 --how device")
    _trains(faults)
    event = torch.get_device_module("late").Event()
    event.record()
    assert not any(event.query() for _ in range(5))
    late.release()
    event.synchronize()


def test_the_duration_of_a_kernel_that_never_ends_is_refused() -> None:
    faults, problems = _armed("hang --target member:m1 --how device --for 2")
    faults.reach(0, "forward")
    assert problems[-1] == "a kernel cannot be ended: leave out --for"
