"""Boundary tensors of a device: copied on side streams, told and used once they have landed, without a wait."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from elastrain.device import DeviceEvent, device_of
from elastrain.job.values import Contribution
from elastrain.pipeline.actions import ActionKind, TaskAction
from elastrain.pipeline.open_tasks import StepShape
from elastrain.pipeline.pipeline_plan import Task
from elastrain.runtime.carrying.landed_results import Landing
from elastrain.runtime.io.loop_channel import BoundaryMade, LoopChannel
from elastrain.runtime.loop import boundary_tensors
from elastrain.runtime.loop.boundary_tensors import ActionResult, Packed, packed, unpacked
from tests.support import late, waiting

SHAPE = StepShape(number=3, micro_batches=4, run_length=2, blocks=5)
BACKWARD = TaskAction(ActionKind.BACKWARD, 1, Task(run=0, begin=2, end=4, member="m0"))


def there() -> torch.device:
    return torch.device("late", 0)  # a process of pytest does not know its name


def allocate(numel: int, dtype: torch.dtype) -> Tensor:
    return torch.full((numel,), 7, dtype=dtype)


def waits() -> int:
    return int(late.stats("MainThread")["waits"])


def tensors() -> tuple[Tensor, ...]:
    """With gaps, transposed, without elements, and in host memory."""
    x = torch.arange(24.0).view(4, 6)
    return x.to("late")[:, :3], x.to("late").t(), torch.empty(0, 3, device="late"), torch.arange(5)


def told(result: ActionResult) -> BoundaryMade:
    """What an engine gets from a loop that does not wait."""
    channel = LoopChannel(lambda: None, landing=Landing(device_of(there())))
    assert result.made is not None
    channel.tell_landed(lambda: result.report(SHAPE), after=result.made.copied, is_boundary=True)
    waiting.until(lambda: channel.has_news, what="the results have landed")
    (made,) = channel.take()
    assert isinstance(made, BoundaryMade)
    return made


def sent(made: tuple[Tensor | None, ...], then: Callable[[], object] = lambda: None) -> BoundaryMade:
    """What is sent of these tensors, where the script does something with them meanwhile."""
    pack = packed(made, allocate)
    then()
    return told(ActionResult(action=BACKWARD, made=pack, counts=lambda: Contribution(loss=1.5)))


def received(made: BoundaryMade) -> list[Tensor | None]:
    assert made.event.made is not None
    shapes = made.event.made.tensors
    devices = [there()] * (len(shapes) - 1) + [torch.device("cpu")]
    return unpacked(shapes, made.tensors, devices, device_of(there()).record())


def test_tensors_arrive_with_their_bits_strides_and_devices_and_the_loop_waits_for_none() -> None:
    sources, before = tensors(), waits()
    pack = packed((sources[0], None, *sources[1:]), allocate)
    assert bool(pack.tensors[0].isnan().any()), "it has not landed"
    made = told(ActionResult(action=BACKWARD, made=pack, counts=lambda: Contribution(loss=1.5)))
    assert made.event.made is not None and made.event.is_last
    assert made.event.made.contribution == Contribution(loss=1.5)
    found = received(made)
    sums = [tensor.sum() for tensor in found if tensor is not None]
    assert waits() == before
    assert found[1] is None and [float(each) for each in sums] == [float(each.sum()) for each in sources]
    for tensor, source in zip([found[0], *found[2:]], sources, strict=True):
        assert tensor is not None and torch.equal(tensor.cpu(), source.cpu())
        assert (tensor.stride(), tensor.device) == (source.stride(), source.device)
    assert late.races() == []


def test_the_script_may_change_and_drop_what_is_sent() -> None:
    source = torch.arange(6.0).to("late")
    made = sent((source, torch.zeros(1)), source.zero_)
    assert made.tensors[0].tolist() == [0, 1, 2, 3, 4, 5]
    made = sent((torch.arange(6.0).to("late").requires_grad_(), torch.zeros(1)), gc.collect)
    first, _ = received(made)
    assert first is not None and first.requires_grad and first.is_leaf
    assert late.races() == []


def test_received_memory_is_held_until_it_has_been_copied_and_the_copy_until_it_was_used() -> None:
    made = sent((torch.ones(1 << 16).to("late"), torch.zeros(1)))
    gc.collect()
    before, source = torch.late.memory_allocated(), weakref.ref(made.tensors[0])
    found = received(made)
    used = found[0] * 2  # type: ignore[operator]
    del made
    assert torch.late.memory_allocated() >= before + (1 << 18)
    assert float(used.sum()) == 2 << 16
    waiting.until(lambda: source() is None, what="the source was let go")
    del found, used
    gc.collect()
    assert torch.late.memory_allocated() <= before and late.races() == []


def test_a_copy_in_does_not_wait_for_what_is_computed() -> None:
    """Where the device never ends its work, copies of what came go on."""
    made = sent((torch.arange(3.0).to("late"), torch.zeros(1)))
    late.hang_at(1)
    torch.ones(1, device="late")
    port = device_of(there())
    boundary_tensors._copied_in(made.tensors[0], there(), device_of(there()).record())
    with port.side_stream("in"):
        event = port.record()
    try:
        waiting.until(event.query, what="the copy has landed")
    finally:
        late.release()


def test_what_is_sent_while_its_source_is_used_again_is_a_race() -> None:
    source = torch.arange(6.0).to("late")
    with patch.object(Tensor, "clone", lambda self: self), pytest.raises(late.RaceError):
        sent((source, torch.zeros(1)), source.zero_)


def test_what_is_used_before_it_has_landed_is_a_race() -> None:
    made = sent((torch.arange(6.0).to("late"), torch.zeros(1)))
    with patch.object(DeviceEvent, "wait", lambda self: None), pytest.raises(late.RaceError):
        received(made)[0].sum()  # type: ignore[union-attr]


def test_what_is_told_before_it_has_landed_has_other_bits() -> None:
    pack = packed((torch.arange(6.0).to("late"),), allocate)
    early = Packed(shapes=pack.shapes, tensors=pack.tensors)
    made = told(ActionResult(action=BACKWARD, made=early))
    assert bool(made.tensors[0].isnan().any())


def _received_used_and_dropped(made: BoundaryMade) -> None:
    received(made)[0].sum()  # type: ignore[union-attr]
    gc.collect()
    torch.late.memory_allocated()


def test_a_copy_that_is_not_kept_for_what_reads_it_is_a_race() -> None:
    made = sent((torch.ones(1 << 16).to("late"), torch.zeros(1)))
    without = patch.object(type(device_of(there())), "record_stream", lambda self, tensor: None)
    with without, pytest.raises(late.RaceError):
        _received_used_and_dropped(made)
