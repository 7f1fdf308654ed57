"""Collectives of tensors that have to be copied to the host and back. Here they only seem to be far: see tests/gpu."""

from __future__ import annotations

import pytest
import torch

from elastrain.comm.collectives import devices
from elastrain.comm.groups.communicator import Communicator
from tests.support.comm_points import COLLECTIVES, run
from tests.support.party import party


@pytest.fixture(autouse=True)
def far(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Every tensor counts as one of another device; what was copied back."""
    monkeypatch.setattr(devices, "is_far", lambda tensor: True)
    written: list[torch.Tensor] = []
    wanted = devices.PinnedTensors.wanted

    def note(self: devices.PinnedTensors, tensor: torch.Tensor) -> torch.Tensor:
        written.append(tensor)
        return wanted(self, tensor)

    monkeypatch.setattr(devices.PinnedTensors, "wanted", note)
    return written


@pytest.mark.parametrize("name", [name for name in COLLECTIVES if name not in ("barrier", "ring of messages")])
def test_every_collective_gives_through_host_copies_what_it_gives_without(name: str, far: list[torch.Tensor]) -> None:
    for transport in ("unix", "tcp"):
        with party(transport, 3) as made:  # type: ignore[arg-type]
            assert made.each(lambda comm, rank: run(name, comm.world)) == [""] * 3
    assert far


def test_a_group_of_one_gets_its_results_too() -> None:
    with party("unix", 1) as made:
        out, tensor = torch.zeros(7), torch.arange(7.0)
        made.comms["a"].world.all_gather([out], tensor).wait()
        assert torch.equal(out, tensor)


def test_a_tensor_that_is_not_contiguous_comes_back_in_its_own_layout() -> None:
    with party("unix", 2) as made:

        def act(comm: Communicator, rank: int) -> torch.Tensor:
            tensor = torch.arange(12.0).view(3, 4).t()
            comm.world.all_reduce(tensor).wait()
            return tensor

        for result in made.each(act):
            assert torch.equal(result, 2 * torch.arange(12.0).view(3, 4).t()) and not result.is_contiguous()


def test_only_what_is_written_is_copied_back() -> None:
    with party("unix", 2) as made:

        def act(comm: Communicator, rank: int) -> torch.Tensor:
            given, out = torch.full((5,), float(rank)), torch.empty(5)
            before = given._version
            comm.world.reduce_scatter(out, [given, given]).wait()
            comm.world.broadcast(given, root=rank).wait() if rank == 0 else comm.world.broadcast(out, root=0).wait()
            assert given._version == before
            return out

        assert float(made.each(act)[0][0]) == 1.0


def test_other_devices_are_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with party("unix", 1) as made, pytest.raises(ValueError, match="got one on meta"):
        made.comms["a"].world.all_reduce(torch.empty(3, device="meta"))
