"""Tensors that travel between members, and results that the training loop tells, on every device and on the host."""

from __future__ import annotations

import inspect
import threading
from collections import Counter
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from elastrain import protocol as p
from elastrain.device.port import DevicePort
from elastrain.errors import ConfigError
from elastrain.job.values import Contribution
from elastrain.pipeline.pipeline_plan import Task
from elastrain.runtime.carrying import refused
from elastrain.runtime.carrying.landed_results import Landing
from elastrain.runtime.carrying.run_losses import RunLosses
from elastrain.runtime.carrying.tensor_memory import TensorMemory
from elastrain.runtime.io.loop_channel import Assignment, BoundaryMade, LoopChannel, LoopFailed, TaskAssignment, Told
from elastrain.runtime.model.flats import in_private_memory

NUMEL = 3000
TASK = Task(run=0, begin=0, end=1, member="m0")


def memory_of(port: DevicePort) -> TensorMemory:
    return TensorMemory(in_private_memory, port=port)


def numbers(port: DevicePort, first: float = 0.0) -> torch.Tensor:
    made = port.empty(NUMEL, torch.float32)
    memory_of(port).copy(torch.arange(NUMEL) + first, made)
    return made


def test_what_is_carried_lies_in_host_memory_and_is_complete(port: DevicePort) -> None:
    memory, source = memory_of(port), numbers(port)
    header = torch.arange(3)
    first, carried, nothing = memory.carried([header, source * 2, port.empty(0, torch.float32)])
    assert first is header
    assert carried.device.type == "cpu" and torch.equal(carried, torch.arange(NUMEL).float() * 2)
    assert nothing.device.type == "cpu" and nothing.numel() == 0


def test_the_host_carries_nothing() -> None:
    memory = TensorMemory(in_private_memory)
    tensor = torch.ones(3)
    assert memory.carried([tensor])[0] is tensor and not memory.is_far(tensor)


def test_a_payload_is_free_once_it_is_taken_in(port: DevicePort) -> None:
    memory, payload = memory_of(port), torch.arange(NUMEL).float()
    taken = memory.taken_in(payload)
    payload.fill_(-1.0)
    assert taken.device == port.device and torch.equal(taken.cpu(), torch.arange(NUMEL).float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_sender_and_reader_have_the_same_checksum(port: DevicePort, dtype: torch.dtype) -> None:
    memory = memory_of(port)
    source = memory.taken_in(torch.arange(NUMEL).to(dtype))
    (carried,) = memory.carried([source])
    sent = memory.checksum(source)
    assert sent == memory.checksum(memory.taken_in(carried)) == memory.checksum(carried)
    carried[5] += 1
    assert memory.checksum(carried) != sent


def test_memory_to_compute_with_is_zero_and_on_the_device(port: DevicePort) -> None:
    memory = memory_of(port)
    for made in (memory.empty(NUMEL, torch.float32), memory.private(NUMEL, torch.float32)):
        assert made.device == port.device and not made.any()


def contribution(value: float) -> Contribution:
    return Contribution(loss=value, weight=1.0, samples=1)


def test_losses_travel_with_their_run_and_sum_to_the_same_bits(port: DevicePort) -> None:
    values = [0.1, 3.7, 1e-8, 12345.678]
    losses, plain = RunLosses(port), RunLosses(memory_of(port).port)
    expected = [Contribution()]
    for value in values:
        loss = memory_of(port).taken_in(torch.tensor([value])).reshape(()).requires_grad_()
        losses.add(loss * 1, contribution)
        plain.add(loss * 1, contribution)
        expected.append(expected[-1] + contribution(float(torch.tensor(value))))
    assert losses.count == len(values)
    port.synchronize()
    assert [losses.sum_of(count) for count in range(len(values) + 1)] == expected
    assert plain.sum_of(2) == expected[2] and plain.sum_of(4) == expected[4] and plain.sum_of(1) == expected[1]


def test_figures_travel_with_their_micro_batch_as_they_were_when_they_were_noted(port: DevicePort) -> None:
    losses, loss = RunLosses(port), torch.tensor(2.5, requires_grad=True)
    right = memory_of(port).taken_in(torch.tensor([3]))
    losses.note("right", right if not port.is_host else 3.0)
    losses.note("right", 0.1)
    losses.note("answers", 4.0)
    right.zero_()
    losses.add(loss * 1, contribution)
    losses.add(loss * 1, contribution)
    losses.note("right", 0.2)
    losses.add(loss * 1, contribution)
    port.synchronize()
    assert losses.sum_of(1).sums == losses.sum_of(2).sums == (("answers", 4.0), ("right", 3.1))
    assert losses.sum_of(3).sums == (("answers", 4.0), ("right", 3.1 + 0.2))
    assert losses.sum_of(3).loss == 7.5


def test_a_loss_that_the_script_has_moved_to_the_host_counts(port: DevicePort) -> None:
    losses = RunLosses(port)
    losses.add(torch.tensor(2.5, requires_grad=True) * 1, contribution)
    port.synchronize()
    assert losses.sum_of(1).loss == 2.5


class Engine:
    """The engine's side of a channel, in a thread and a stream of its own."""

    def __init__(self, port: DevicePort) -> None:
        self.woken = threading.Event()
        self.channel = LoopChannel(self.woken.set, landing=Landing(port))
        self.channel.landing.begin()

    def take(self, count: int) -> list[Told]:
        taken: list[Told] = []

        def run() -> None:
            with self.channel.landing.engine_stream():
                while len(taken) < count:
                    assert self.woken.wait(20), taken
                    self.woken.clear()
                    taken.extend(self.channel.take())

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        return taken


def test_results_are_told_in_order_and_may_be_used_by_the_engine(port: DevicePort) -> None:
    engine, told = Engine(port), numbers(port)

    def made(tensor: torch.Tensor, block: int) -> Told:
        return p.BlockDone(step=0, run=0, block=block, contribution=contribution(float(tensor.sum())), touched=0)

    for block in range(3):
        engine.channel.tell_landed(partial(made, told * (block + 1), block))
    engine.channel.tell_landed(p.Ready)
    *blocks, ready = engine.take(4)
    assert isinstance(ready, p.Ready)
    total = float(torch.arange(NUMEL).float().sum())
    assert [each.contribution.loss for each in blocks] == [total, 2 * total, 3 * total]  # type: ignore[union-attr]


def test_a_boundary_is_taken_first_and_behind_its_copy(port: DevicePort) -> None:
    engine, source = Engine(port), numbers(port)
    target = port.empty_pinned(NUMEL, torch.float32)
    copied = port.copy_out(source * 3, target)
    boundary = BoundaryMade(p.Ready(), (target,))  # type: ignore[arg-type]
    engine.channel.tell_landed(lambda: p.LoopEnded(step=0))
    engine.channel.tell_landed(lambda: boundary, after=[copied], is_boundary=True)
    first, *_ = engine.take(2)
    assert first is boundary or not port.is_host  # a device may deliver them one by one
    assert torch.equal(target, torch.arange(NUMEL).float() * 3)


def test_an_outcome_comes_with_what_the_engine_had_submitted(port: DevicePort) -> None:
    engine, made = Engine(port), []

    def give() -> None:
        with engine.channel.landing.engine_stream():
            made.append(numbers(port, 7.0) * 2)
            engine.channel.give(p.Enter(step=3, state=None))

    thread = threading.Thread(target=give, daemon=True)
    thread.start()
    engine.channel.wait()
    read = made[0] + 1
    thread.join()
    assert torch.equal(read.cpu(), (torch.arange(NUMEL).float() + 7) * 2 + 1)


def test_a_loop_on_a_device_asks_for_its_next_run_while_its_present_one_lands(port: DevicePort) -> None:
    """The loop waits for its device only where it enters a step."""
    engine = Engine(port)
    run: Any = Assignment(p.Compute(step=0, run=0), "slot")  # type: ignore[arg-type]
    action: Any = TaskAssignment(p.Backward(step=0, task=TASK, micro_batch=0), "slot", None)  # type: ignore[arg-type]
    for given in (run, run, action, p.Advance(record=None)):  # type: ignore[arg-type]
        engine.channel.give(given)
        assert engine.channel.next_work() == given
    early = [] if port.is_host else [p.Submitted]
    wanted = [p.Ready, *[*early, p.Ready] * 3]
    told = [type(each) for each in engine.take(len(wanted))]
    # A device tells a `Ready` when it has come so far, perhaps behind the next request.
    assert Counter(told) == Counter(wanted) and told[-1] is p.Ready


def test_an_error_of_the_device_reaches_the_engine() -> None:
    channel = LoopChannel(lambda: None)
    channel._tell_landed((p.Ready,), False, None, RuntimeError("the device is gone"))
    (failed,) = channel.take()
    assert isinstance(failed, LoopFailed) and "gone" in str(failed.error)


class Capturing:
    is_host, device = False, torch.device("cuda", 0)

    def is_capturing(self) -> bool:
        return True


def _make_graphed_forward() -> Any:
    """Return a forward under the name that torch gives to those that replay a graph."""

    def new_fwd(*given: torch.Tensor) -> None: ...

    return new_fwd


def test_torch_names_the_forwards_of_captured_modules_so() -> None:
    assert "def make_graphed_forward(" in inspect.getsource(torch.cuda.graphs)


def test_what_is_not_done_on_a_device_is_refused_by_name(port: DevicePort) -> None:
    model, captured = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))
    captured[0].forward = _make_graphed_forward()
    refused.check(port, model)
    refused.check_not_captured(port)
    with pytest.raises(ConfigError, match="while a graph of cuda:0 is captured"):
        refused.check_not_captured(Capturing())  # type: ignore[arg-type]
    with nullcontext() if port.is_host else pytest.raises(ConfigError, match="module '0' of the model was captured"):
        refused.check(port, captured)
