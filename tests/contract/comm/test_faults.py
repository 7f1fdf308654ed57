"""A peer that is authenticated but sends what no correct one sends; memory and descriptors that come to an end."""

from __future__ import annotations

import gc
import os
import struct
import threading
import time
from pathlib import Path
from typing import get_args

import pytest
import torch

from elastrain.comm.errors import Aborted, MemberLost, OutOfMemory
from elastrain.comm.groups.communicator import Communicator
from elastrain.comm.groups.members import FrameKind
from elastrain.comm.shm.segments import SharedMemory
from elastrain.comm.wire.addresses import Peer
from tests.support.comm_tools import Transport
from tests.support.party import party

both = pytest.mark.parametrize("transport", get_args(Transport))
Junk = tuple[int, bytes, tuple[torch.Tensor, ...]]

_PART = struct.Struct("<QQBq")  # group, sequence, round, fence
JUNK: dict[str, Junk] = {
    "part, cut short": (FrameKind.PART, b"\1\2\3", (torch.ones(3),)),
    "part with two tensors": (FrameKind.PART, _PART.pack(1, 2, 3, 4), (torch.ones(3), torch.ones(3))),
    "fence without a tensor": (FrameKind.FENCE, b"", ()),
    "fence of floats": (FrameKind.FENCE, b"", (torch.ones(1),)),
    "fence of none": (FrameKind.FENCE, b"", (torch.empty(0, dtype=torch.int64),)),
    "message, cut short": (FrameKind.MESSAGE, b"", (torch.ones(3),)),
    "message without a tensor": (FrameKind.MESSAGE, bytes(24), ()),
    "rings, cut short": (FrameKind.RINGS, b"\1", (torch.zeros(8, dtype=torch.uint8),)),
    "rings too small": (FrameKind.RINGS, bytes(8), (torch.zeros(8, dtype=torch.uint8),)),
    "abort, cut short": (FrameKind.ABORT, b"", ()),
    "unknown kind": (0x7777, b"what is this", ()),
}


def _send(comm: Communicator, to: str, junk: Junk) -> None:
    comm._driver.call(lambda: comm._mesh.send(to, *junk))


@both
@pytest.mark.parametrize("junk", JUNK.values(), ids=JUNK.keys())
def test_what_no_member_sends_makes_its_sender_lost_and_harms_nobody_else(transport: Transport, junk: Junk) -> None:
    with party(transport, 3) as made:

        def act(comm: Communicator, rank: int) -> None:
            if rank == 0:
                _send(comm, "b", junk)
            comm.world.recv(torch.empty(1), 0, tag=9).wait()

        for result in made.each(act):
            assert isinstance(result, MemberLost) and result.member == "a" and "broke the protocol" in result.reason
        made.view(2, "bc")
        assert made.each(lambda comm, rank: comm.world.barrier().wait(), "bc") == [None] * 2


def test_a_part_of_another_size_or_kind_than_awaited_is_named() -> None:
    with party("tcp", 2) as made:
        body = _PART.pack(made.comms["a"].world.list.number, 0, 0, 0)
        b_waits = threading.Event()
        tensor = torch.ones(4)
        words = b"all_reduce (sum) of float32[4]"

        def act(comm: Communicator, rank: int) -> None:
            if rank == 1:
                work = comm.world.all_reduce(tensor)
                b_waits.set()
                work.wait()
            else:
                b_waits.wait(20)
                _send(comm, "b", (FrameKind.PART, body + words, (torch.ones(5),)))

        _, result = made.each(act)
        assert isinstance(result, Aborted) and "float32[4] is reduced here, rank 0 gives float32[5]" in result.reason


def test_text_that_is_none_is_shown_as_it_can_be() -> None:
    with party("tcp", 2) as made:
        body = _PART.pack(made.comms["a"].world.list.number, 0, 0, 0)

        def act(comm: Communicator, rank: int) -> None:
            if rank == 1:
                comm.world.all_reduce(torch.ones(4)).wait()
            else:
                _send(comm, "b", (FrameKind.PART, body + b"\xff\xfe", (torch.ones(4),)))

        _, result = made.each(act)
        assert isinstance(result, Aborted) and "at 'b', \ufffd\ufffd at 'a'" in result.reason


# Memory and descriptors


def test_memory_that_can_not_be_had_is_named_and_what_there_was_stays_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = SharedMemory(1 << 20)
    kept = shared.empty(1000, torch.float32)

    def full(fd: int, offset_bytes: int, size_bytes: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(OutOfMemory, match="no memory is left for shared memory"):
            shared.empty(100_000, torch.float32)
        with pytest.raises(OutOfMemory):
            shared.empty(10_000_000, torch.float32)
    kept.fill_(1)
    again = shared.empty(100_000, torch.float32)
    assert bool((again == 0).all()) and bool((kept == 1).all())
    shared.close()


def test_every_page_that_is_handed_out_is_there_already() -> None:
    """A page that the kernel cannot give is an error of `empty`, not the end of the process at the first write."""
    shared = SharedMemory(8 << 20)
    tensors = [shared.empty(numel, torch.uint8) for numel in (5000, 100_000, 6 << 20)]
    wanted = sum(tensor.nbytes for tensor in tensors)
    assert shared.resident_bytes() >= wanted
    before = shared.resident_bytes()
    for tensor in tensors:
        tensor.fill_(1)
    assert shared.resident_bytes() == before
    shared.close()


@both
def test_a_member_without_memory_ends_the_collective_for_all_and_goes_on_when_there_is_some(
    transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    with party(transport, 2) as made:
        made.each(lambda comm, rank: comm.world.barrier().wait())
        poor = made.meshes["b"].memory
        sources = {name: getattr(poor, name) for name in ("scratch", "empty")}

        def none(numel: int, dtype: torch.dtype) -> torch.Tensor:
            raise OutOfMemory("no memory is left for shared memory")

        for name in sources:
            monkeypatch.setattr(poor, name, none)
        for result in made.each(lambda comm, rank: comm.world.all_reduce(torch.ones(1_000_000)).wait()):
            assert isinstance(result, Aborted | OutOfMemory) and "no memory is left" in str(result)
        for name, source in sources.items():
            monkeypatch.setattr(poor, name, source)
        made.view(2, "ab")

        def reduce(comm: Communicator, rank: int) -> float:
            tensor = torch.ones(1_000_000)
            comm.world.all_reduce(tensor).wait()
            return float(tensor.sum())

        assert made.each(reduce) == [2_000_000.0] * 2


# Nothing leaks


def _held() -> tuple[int, int, int]:
    """Descriptors, threads and mappings of shared memory of this process."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().count("memfd:elastrain")
    return len(os.listdir("/proc/self/fd")), threading.active_count(), maps


@both
def test_a_thousand_edits_leave_descriptors_threads_and_mappings_as_they_were(transport: Transport) -> None:
    with party(transport, 2) as made:
        groups = {name: [comm.group(f"g{index}", [name]) for index in range(2)] for name, comm in made.comms.items()}
        peers = [Peer(id=n, node=made.meshes[n].node, address=made.meshes[n].address) for n in "ab"]

        def live(comm: Communicator, rank: int, generations: range) -> None:
            for generation in generations:
                comm.edit(generation, peers, {f"g{generation % 2}": list("ab"), f"g{1 - generation % 2}": list("ba")})
                tensor = comm.empty(20_000, torch.float32)
                tensor.fill_(rank + 1)
                # In the caller's thread: how many threads serve calls that do not wait depends on who is quick.
                groups["ab"[rank]][generation % 2].all_reduce(tensor, inline=True).wait()
                assert float(tensor[0]) == float(tensor[-1]) == 3.0

        assert made.each(lambda comm, rank: live(comm, rank, range(2, 102))) == [None] * 2
        before = _held()
        assert made.each(lambda comm, rank: live(comm, rank, range(102, 1102))) == [None] * 2
        after = _held()
        # Fewer is what tests before have left to be collected; a leak is a thousand more.
        assert all(now <= then for now, then in zip(after, before, strict=True)), f"{before} became {after}"


def test_the_memory_of_who_was_removed_is_let_go_soon_after() -> None:
    with party("unix", 3) as made:
        made.each(lambda comm, rank: comm.world.all_reduce(torch.ones(50_000)).wait())
        before = _held()[2]  # collected: what goes from here on is c's
        made.view(2, "ab")
        deadline_s, tick = time.monotonic() + 20, threading.Event()
        while _held()[2] >= before:
            assert time.monotonic() < deadline_s, "the maps of the removed member stay"
            tick.wait(0.01)
