"""Collectives of tensors on a device: they come to the host and back, and have the results of host tensors."""

from __future__ import annotations

import threading

import pytest
import torch

from elastrain.comm.groups.communicator import Communicator
from elastrain.comm.groups.works import Work
from elastrain.comm.torch_backend.process_group import TorchWork
from elastrain.device import DevicePort
from tests.contract.device.conftest import NAMED
from tests.support import late
from tests.support.comm_points import COLLECTIVES, run
from tests.support.party import party

if NAMED is late:
    late.handing_over(Work, gives=["finish"], takes=["wait"])  # by a lock, which the test device does not watch


@pytest.mark.parametrize("transport", ["unix", "tcp"])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_every_collective_gives_through_host_copies_what_it_gives_without(
    name: str, transport: str, port: DevicePort
) -> None:
    with party(transport, 3) as made:  # type: ignore[arg-type]
        assert made.each(lambda comm, rank: run(name, comm.world, port.device)) == [""] * 3


def test_a_group_of_one_gets_its_results_too(port: DevicePort) -> None:
    with party("unix", 1) as made:
        out, tensor = torch.zeros(7, device=port.device), torch.arange(7.0, device=port.device)
        made.comms["a"].world.all_gather([out], tensor).wait()
        assert torch.equal(out, tensor)


def test_a_tensor_that_is_not_contiguous_comes_back_in_its_own_layout(port: DevicePort) -> None:
    with party("unix", 2) as made:

        def act(comm: Communicator, rank: int) -> torch.Tensor:
            tensor = torch.arange(12.0, device=port.device).view(3, 4).t()
            comm.world.all_reduce(tensor).wait()
            return tensor

        for result in made.each(act):
            assert torch.equal(result.cpu(), 2 * torch.arange(12.0).view(3, 4).t()) and not result.is_contiguous()


def test_only_what_is_written_is_copied_back(port: DevicePort) -> None:
    with party("unix", 2) as made:

        def act(comm: Communicator, rank: int) -> float:
            given, out = torch.full((5,), float(rank), device=port.device), torch.empty(5, device=port.device)
            before = given._version
            comm.world.reduce_scatter(out, [given, given]).wait()
            comm.world.broadcast(given, root=rank).wait() if rank == 0 else comm.world.broadcast(out, root=0).wait()
            assert given._version == before
            return float(out[0])

        assert made.each(act)[0] == 1.0


def test_an_operation_begins_after_what_the_callers_stream_has_made(port: DevicePort) -> None:
    with party("unix", 2) as made:

        def act(comm: Communicator, rank: int) -> float:
            with port.side_stream():
                tensor = torch.ones(1 << 16, device=port.device)
                for _ in range(20):
                    tensor.mul_(2.0)
                comm.world.all_reduce(tensor).wait()
                return float(tensor.sum())

        assert made.each(act) == [float(1 << 37)] * 2


def test_a_message_lands_behind_what_the_receivers_stream_still_does(port: DevicePort) -> None:
    with party("unix", 2) as made:

        def act(comm: Communicator, rank: int) -> float:
            with port.side_stream():
                outs = torch.zeros(2, 1 << 10, device=port.device)
                outs += 5
                comm.world.send(torch.full((1 << 10,), rank + 1.0, device=port.device), 1 - rank)
                comm.world.recv(outs[0], 1 - rank).wait()
                comm.world.broadcast(outs[1], root=0).wait()
                return float(outs.sum()) / (1 << 10)

        assert made.each(act) == [7.0, 6.0]


@pytest.mark.skipif(NAMED is not late, reason="only the test device counts waits")
def test_the_caller_does_not_wait_for_the_device_and_copies_are_behind_its_stream_on_others(port: DevicePort) -> None:
    with party("unix", 2) as made:

        def act(comm: Communicator, rank: int) -> tuple[int, float]:
            tensor, bystander = (torch.ones(1 << 12, device=port.device) for _ in range(2))
            work = comm.world.all_reduce(tensor)
            for _ in range(4):
                bystander.mul_(2.0)  # the backward goes on
            work.wait()
            tensor.add_(bystander)
            waits = late.stats(threading.current_thread().name)["waits"]
            return waits, float(tensor.sum()) / (1 << 12)

        assert made.each(act) == [(0, 18.0)] * 2


@pytest.mark.parametrize("is_waited", [False, True])
def test_a_future_gives_results_to_the_stream_of_the_caller(port: DevicePort, is_waited: bool) -> None:
    with party("unix", 1) as made:
        group, tensor = made.comms["a"].world, torch.ones(1 << 10, device=port.device)
        work = TorchWork([group.all_reduce(tensor)], [tensor], group)
        if is_waited:
            work.wait()
        (found,) = work.get_future().wait()
        assert found is tensor
        assert float(found.add_(1).sum()) == 2 << 10


def test_a_tensor_without_memory_is_refused_by_name() -> None:
    with party("unix", 1) as made, pytest.raises(ValueError, match="got one on meta"):
        made.comms["a"].world.all_reduce(torch.empty(3, device="meta"))
