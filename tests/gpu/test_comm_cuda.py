"""Collectives of tensors on a CUDA device, by pinned staging; skipped where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from elastrain.comm.groups.communicator import Communicator
from elastrain.comm.torch_backend.process_group import TorchWork
from tests.integration.comm.test_surviving_on_devices import train
from tests.integration.comm.test_torch import run
from tests.support.party import party

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_all_reduce_waits_for_the_callers_stream_and_its_result_is_on_the_device() -> None:
    with party("unix", 2) as made:

        def act(comm: Communicator, rank: int) -> float:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                tensor = torch.zeros(1_000_000, device="cuda")
                torch.cuda._sleep(50_000_000)  # cycles: the device is still at it when the call is made
                tensor += rank + 1
                comm.world.all_reduce(tensor).wait()
                return float((tensor - 3).abs().max())

        assert made.each(act) == [0.0, 0.0]


def test_device_and_host_tensors_may_be_mixed() -> None:
    with party("unix", 2) as made:

        def act(comm: Communicator, rank: int) -> list[float]:
            outs = [torch.empty(9), torch.empty(9, device="cuda")]
            comm.world.all_gather(outs, torch.full((9,), float(rank), device="cuda" if rank else "cpu")).wait()
            return [float(out.mean()) for out in outs]

        assert made.each(act) == [[0.0, 1.0]] * 2


def test_messages_between_devices() -> None:
    with party("unix", 2) as made:

        def act(comm: Communicator, rank: int) -> float:
            out = torch.zeros(5, device="cuda")
            comm.world.send(torch.full((5,), rank + 1.0, device="cuda"), 1 - rank)
            comm.world.recv(out, 1 - rank).wait()
            return float(out.sum())

        assert made.each(act) == [10.0, 5.0]


def test_a_future_of_torch_knows_the_device() -> None:
    with party("unix", 1) as made:
        group = made.comms["a"].world
        tensor = torch.ones(3, device="cuda")
        work = TorchWork([group.all_reduce(tensor)], [tensor], group)
        assert work.get_future().wait()[0] is tensor


@pytest.mark.parametrize("victim", [None, 1])
def test_ddp_under_surviving_keeps_equal_replicas(tmp_path: Path, victim: int | None) -> None:
    killed = () if victim is None else (victim,)
    said = run(3, tmp_path / "store", lambda rank: train(rank, "cuda", victim), expect_killed=killed)
    left = [each for each in said if each is not None]
    assert left[0][1] == 3 - len(killed)
    assert left[0] == left[-1]
