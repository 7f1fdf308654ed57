"""A loop whose model and registered objects lie on a device: what is read of its state, copied out and put back."""

from __future__ import annotations

import _thread
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastrain.errors import ConfigError
from elastrain.runtime.loop.mutation_guard import MutationGuard
from elastrain.runtime.loop_state.device_reads import DeviceReads
from elastrain.runtime.loop_state.layers import Layers
from elastrain.runtime.loop_state.loop_state import LoopState
from elastrain.runtime.model.watched import sums_of
from tests.support import late


def _waits(act: Callable[[], object]) -> int:
    before = late.stats()["waits"]
    act()
    return late.stats()["waits"] - before


def _prepared(count: int = 6) -> tuple[nn.Sequential, dict[str, Tensor]]:
    """A model whose parameters are slices of two allocations, as `prepare` leaves it."""
    model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(count))).to("late")
    halves: dict[str, Tensor] = {}
    for half, layers in (("first", model[: count // 2]), ("second", model[count // 2 :])):
        own = list(layers.parameters())
        halves[half] = torch.cat([q.detach().reshape(-1) for q in own])
        for q, part in zip(own, halves[half].split([q.numel() for q in own]), strict=True):
            q.data = part.view_as(q)
    return model, halves


def _guarded() -> tuple[nn.Sequential, dict[str, Tensor], MutationGuard]:
    model, halves = _prepared()
    guard = MutationGuard(model, lambda: halves, [])
    guard.begin()
    return model, halves, guard


def test_a_step_of_the_guard_waits_once_whatever_the_number_of_allocations() -> None:
    _, _, guard = _guarded()
    reads = DeviceReads()
    assert _waits(guard.settle) == 0
    assert _waits(guard.check) == 0
    assert _waits(lambda: guard.check_settled(reads)) == 0
    assert _waits(lambda: guard.check_settled(reads)) == 0
    assert _waits(reads.fetch) == 1
    assert _waits(reads.fetch) == 0


def test_the_guards_index_is_copied_in_once() -> None:
    _, _, guard = _guarded()
    before = late.stats()["copies_in"]
    for _ in range(3):
        guard.settle()
        guard.check_settled()
    assert late.stats()["copies_in"] == before


def test_a_write_through_data_is_found_by_name_when_the_reads_are_fetched() -> None:
    model, halves, guard = _guarded()
    reads = DeviceReads()
    guard.check_settled(reads)
    reads.fetch()
    model[4].weight.data.mul_(1.5)
    guard.check_settled(reads)
    with pytest.raises(ConfigError, match=r"parameter '4\.weight' was changed outside of the optimizer \(through"):
        reads.fetch()
    guard.settle()
    halves["first"].view(torch.int32)[0] ^= 1 << 20
    with pytest.raises(ConfigError, match=r"parameter '0\.weight' was changed"):
        guard.check_settled()


def test_a_nan_that_stays_is_no_change_and_minus_zero_is_one() -> None:
    model, _, guard = _guarded()
    model[2].bias.data.fill_(float("nan"))
    model[3].bias.data.zero_()
    guard.settle()
    guard.check_settled()
    model[3].bias.data.neg_()
    with pytest.raises(ConfigError, match=r"'3\.bias'"):
        guard.check_settled()


def _loop(registered: dict[str, Any], model: nn.Module | None = None) -> LoopState:
    model = model or nn.Linear(1, 1, device="late")
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.05)
    return LoopState(optimizer, registered, model, Layers(nn.Identity()))


def _teacher(seed: int, layers: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    teacher = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)), nn.BatchNorm1d(4))
    teacher.register_buffer("cache", torch.rand(3), persistent=False)
    return teacher


LAYERS = Layers(nn.Identity())


def test_looking_at_registered_tensors_waits_once_together_with_other_reads() -> None:
    _, _, guard = _guarded()
    loop = _loop({f"teacher {number}": _teacher(number, layers=20).to("late") for number in range(3)})
    reads = DeviceReads()
    guard.check_settled(reads)
    taken = loop.take([{}])
    assert _waits(lambda: loop.take([{}])) == 0
    assert _waits(lambda: taken.settings(3, [], LAYERS, reads)) == 1


def test_damage_to_a_registered_tensor_on_a_device_is_told_as_on_the_host() -> None:
    def told(where: str, *, damaged: bool) -> list[str]:
        teacher = _teacher(1).to(where)
        if damaged:
            teacher[1].bias.data += 1.0
        return [_loop({"teacher": teacher}).take([{}]).settings(step, [], LAYERS) for step in range(3)]

    assert told("late", damaged=False) == told("late", damaged=False) != told("late", damaged=True)
    ours, theirs = ([json.loads(each) for each in told(where, damaged=False)] for where in ("late", "cpu"))
    assert [each["teacher"][-8:] for each in ours] == [each["teacher"][-8:] for each in theirs]  # the looks


@pytest.mark.parametrize("there", ["late", "cpu"])
@pytest.mark.parametrize("here", ["late", "cpu"])
def test_a_teacher_travels_between_devices_bit_for_bit(there: str, here: str) -> None:
    teacher, newcomers = _teacher(1).to(there), _teacher(2).to(here)
    taken = _loop({"teacher": teacher}).take([{}])
    payload = taken.payload()
    assert {each.device.type for each in payload} == {"cpu"}
    _loop({"teacher": newcomers}).load(taken.text, payload)
    ours = {**teacher.state_dict(), "cache": teacher.cache}
    theirs = {**newcomers.state_dict(), "cache": newcomers.cache}
    assert len(ours) > 8
    for name, value in ours.items():
        assert theirs[name].device.type == here
        assert torch.equal(value.cpu(), theirs[name].cpu()), name


def test_a_module_is_put_back_without_a_second_copy_on_the_device() -> None:
    taken = _loop({"teacher": nn.Linear(256, 256, device="late")}).take([{}])
    payload, mine = taken.payload(), nn.Linear(256, 256, device="late")
    loop = _loop({"teacher": mine})
    torch.get_device_module("late").reset_peak_memory_stats()
    before = torch.get_device_module("late").memory_allocated()
    loop.load(taken.text, payload)
    assert torch.get_device_module("late").max_memory_allocated() - before < 256 * 256 * 4


class Average:
    """An average that is made when the first value comes: a newcomer has none to copy the device from."""

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}
        self.host = torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "host": self.host}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values, self.host = state["values"], state["host"]


def test_tensors_of_other_objects_come_back_to_their_devices() -> None:
    average = Average()
    average.values["a"] = torch.arange(3.0, device="late")
    plain = {"mean": torch.ones(2, device="late"), "count": torch.ones(2)}
    taken = _loop({"average": average, "plain": plain}).take([{}])
    newcomers, theirs = Average(), dict[str, Tensor]()
    _loop({"average": newcomers, "plain": theirs}).load(taken.text, taken.payload())
    assert newcomers.values["a"].device.type == theirs["mean"].device.type == "late"
    assert newcomers.host.device.type == theirs["count"].device.type == "cpu"
    assert newcomers.values["a"].tolist() == [0.0, 1.0, 2.0]
    _loop({"average": newcomers, "plain": theirs}, nn.Linear(1, 1)).load(taken.text, taken.payload())
    assert newcomers.values["a"].device.type == "late"  # this member's own lies there
    on_host = Average()
    _loop({"average": on_host, "plain": {}}, nn.Linear(1, 1)).load(taken.text, taken.payload())
    assert on_host.values["a"].device.type == "cpu"  # a job that is resumed on the CPU


def test_the_engine_copies_out_behind_the_work_that_made_the_tensors() -> None:
    """A thread with a stream of its own gets the values of the moment of `take`, and no race is found."""
    device = torch.get_device_module("late")
    teacher, found = nn.Linear(64, 64, device="late"), list[Tensor]()
    with torch.no_grad():
        teacher.weight.fill_(3.0)
    loop = _loop({"teacher": teacher})
    taken = loop.take([{}])

    def engine() -> None:
        with device.stream(device.Stream()):
            found.extend(taken.payload())

    _in_a_thread_of_its_own(engine)
    weight = found[0].view(torch.float32)[: 64 * 64]
    assert weight.tolist() == [3.0] * 64 * 64
    assert late.races() == []


def _in_a_thread_of_its_own(run: Callable[[], None]) -> None:
    """Run a function in a thread that knows of the device's work by events only, and not because it was started."""
    raised, ended = list[BaseException](), _thread.allocate_lock()

    def running() -> None:
        try:
            run()
        except BaseException as error:  # noqa: BLE001 - the edge of a thread
            raised.append(error)
        finally:
            ended.release()

    ended.acquire()
    _thread.start_new_thread(running, ())
    ended.acquire()
    if raised:
        raise raised[0]


def test_a_registered_tensor_that_is_changed_before_the_commit_is_refused_by_name() -> None:
    teacher = nn.Linear(2, 2, device="late")
    taken = _loop({"teacher": teacher}).take([{}])
    with torch.no_grad():
        teacher.weight.mul_(0.5)
    with pytest.raises(ConfigError, match=r"teacher\['state'\]\['weight'\] was changed before its step was committed"):
        taken.payload()


def test_an_error_of_the_device_is_not_taken_for_a_state_of_another_script() -> None:
    taken = _loop({"plain": {"mean": torch.ones(2, device="late")}}).take([{}])
    payload = taken.payload()
    loop = _loop({"plain": {}})
    late.fail_at(1)
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        loop.load(taken.text, payload)


class Buffered(nn.Module):
    def __init__(self, count: int = 5) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        for number in range(count):
            self.register_buffer(f"table{number}", torch.rand(7))
        self.register_buffer("lazy", None)


def test_a_thorough_look_at_persistent_buffers_waits_once() -> None:
    model = Buffered().to("late")
    layers = Layers(model)
    layers.begin()
    assert _waits(layers.note) == 1
    model.table3.data.mul_(2.0)
    layers.note()
    assert torch.equal(layers.tensors["table3"], model.table3)


def test_buffers_that_a_loop_has_changed_reach_newcomers_and_resumed_jobs_on_their_device() -> None:
    model = Buffered().to("late")
    layers = Layers(model)
    layers.begin()
    model.table1.mul_(2.0)
    model.lazy = torch.ones(3, device="late")
    layers.note()
    state = {name: None if value is None else value.cpu() for name, value in layers.state_dict().items()}
    other = Buffered().to("late")
    others = Layers(other)
    others.begin()
    others.load_state_dict(state)
    assert torch.equal(other.table1, model.table1)
    assert other.lazy is not None and other.lazy.device.type == "late"
    told = [each.told()["'lazy' of the model"] for each in (layers, others)]  # compared in every vote
    assert told[0] == told[1]
    others.note()


def test_checksums_of_buffers_are_those_of_one_by_one() -> None:
    values = [torch.rand(5, device="late"), None, torch.rand(3), torch.zeros(0, device="late"), torch.eye(3).to("late")]
    assert sums_of(values) == [sums_of([each])[0] for each in values]
    assert len(set(sums_of(values))) == 5
