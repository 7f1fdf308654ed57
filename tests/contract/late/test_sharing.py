"""Device memory that peers read in place, on a sealed memfd: segments, links, races at both ends, the probe."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from elastrain.comm.errors import OutOfMemory, ProtocolError
from elastrain.comm.shm.device_segments import DeviceSegments, DeviceShare, adopted
from elastrain.comm.shm.imports import Imports, Reference
from elastrain.comm.wire.addresses import Frame, Peer
from elastrain.comm.wire.mesh import Mesh
from elastrain.device import device_of
from elastrain.device.device_sharing import domain_of, sharing_of
from elastrain.device.sharing_probe import probe
from elastrain.runtime.carrying.tensor_memory import TensorMemory
from elastrain.runtime.loop import boundary_tensors
from elastrain.runtime.model.flats import in_private_memory
from tests.support import late, waiting, warm
from tests.support.late import sharing

NUMEL = 1000
PORT = "late"
LIMIT_S = 120.0
"""Seconds that a probe has on a busy machine."""


def share(free_bytes: int = 1 << 30) -> DeviceShare:
    sharing.set_up()
    made = sharing_of(device_of(torch.device(PORT)))
    return DeviceShare(made, domain_of(made, [0]), lambda: (free_bytes, 1 << 30))


def numbers(first: float = 0.0) -> torch.Tensor:
    return (torch.arange(NUMEL) + first).to(PORT)


def filled(exporter: DeviceShare, first: float = 0.0) -> torch.Tensor:
    made = exporter.scratch(NUMEL, torch.float32)
    assert made is not None
    device_of(made.device).copy_out(numbers(first), made).synchronize()
    return made


def imported(reader: DeviceShare, exporter: DeviceShare, tensor: torch.Tensor) -> tuple[Imports, Reference]:
    place = exporter.memory.find(tensor)
    assert place is not None
    imports, segment = Imports(share=reader), place.region.segment
    imports.add(segment.number, segment.fd, segment.mapping.size_bytes)
    shape = tuple(tensor.shape)
    where = {"segment": segment.number, "offset_bytes": place.offset_bytes, "token": 7}
    return imports, Reference(dtype=tensor.dtype, shape=shape, **where)


def test_a_reader_sees_the_numbers_after_their_owner_is_gone() -> None:
    exporter = share()
    made = filled(exporter)
    imports, reference = imported(share(), exporter, made)
    seen = imports.tensor(reference)
    exporter.memory.close()
    del made, exporter
    gc.collect()
    assert torch.equal(seen.cpu(), torch.arange(NUMEL).float())
    assert not imports.returned
    part = seen[5:]
    del seen
    gc.collect()
    assert not imports.returned and float(part[0]) == 5
    del part
    assert imports.take_returned() == [7]


def test_own_and_foreign_memory_are_told_apart() -> None:
    exporter, reader = share(), share()
    made = filled(exporter)
    imports, reference = imported(reader, exporter, made)
    seen = imports.tensor(reference)
    assert exporter.is_own(made[3:]) and not exporter.is_foreign(made)
    assert reader.is_foreign(seen[3:]) and not reader.is_own(seen)
    for other in (numbers(), torch.arange(3), torch.empty(0, device=PORT)):
        assert not reader.is_foreign(other) and not exporter.is_own(other)


def test_a_reference_outside_of_a_segment_is_refused() -> None:
    exporter = share()
    imports, reference = imported(share(), exporter, filled(exporter))
    wide = Reference(dtype=torch.float32, shape=(1 << 20,), segment=reference.segment, offset_bytes=0, token=1)
    with pytest.raises(ProtocolError, match="a reference to bytes 0 to"):
        imports.tensor(wide)
    imports.drop(reference.segment)
    with pytest.raises(ProtocolError, match="which was not passed"):
        imports.tensor(reference)
    with pytest.raises(ProtocolError, match="which this process does not read"):
        Imports().add(reference.segment, 0, 1)


def test_memory_is_used_again_only_after_its_reader_has_given_it_back() -> None:
    exporter = share()
    made = filled(exporter)
    place, address = exporter.memory.find(made), made.data_ptr()
    assert place is not None
    exporter.memory.hold(place.region)
    del made
    assert filled(exporter, 1.0).data_ptr() != address
    exporter.memory.release(place.region)
    assert filled(exporter, 2.0).data_ptr() == address


def test_without_room_on_the_device_nothing_is_allocated() -> None:
    assert share(free_bytes=1 << 20).scratch(NUMEL, torch.float32) is None
    made = share()
    with pytest.raises(OutOfMemory, match="the device has 5 free bytes, too few"):
        DeviceSegments(made._sharing, lambda: (5, 100)).create(4096)
    late.configure(capacity_bytes=1 << 20)
    full: list[int] = []
    made.tell_full = full.append
    assert made.scratch(1 << 19, torch.float32) is None
    assert made.scratch(1 << 19, torch.float32) is None and full == [1 << 21]


def test_empty_segments_make_room_before_something_is_carried() -> None:
    free = [1 << 30]
    exporter = share()
    exporter.memory._kind._free_and_total = lambda: (free[0], 1 << 30)  # type: ignore[attr-defined]
    small = exporter.scratch(NUMEL, torch.float32)
    del small
    free[0] = 0
    assert exporter.scratch(1 << 20, torch.float32) is None
    assert exporter.memory.segments() == () and len(exporter.memory.take_gone()) == 1


def test_peers_that_are_told_of_memory_before_it_has_landed_are_a_race() -> None:
    exporter = share()
    made = exporter.scratch(NUMEL, torch.float32)
    assert made is not None
    copied = device_of(made.device).copy_out(numbers(), made)
    with pytest.raises(late.RaceError, match="peers are told of memory that aten::copy_ on stream"):
        sharing._check_told(made[4:])
    copied.synchronize()
    sharing._check_told(made)


def test_memory_that_is_given_back_before_it_is_read_is_a_race() -> None:
    exporter = share()
    imports, reference = imported(share(), exporter, filled(exporter))
    port, out = device_of(torch.device(PORT)), torch.empty(NUMEL, device=PORT)
    seen = imports.tensor(reference)
    port.copy_in(seen, out).synchronize()
    del seen
    assert late.races() == []
    seen = imports.tensor(reference)
    port.copy_in(seen, out)
    del seen
    (race,) = late.races(forget=True)
    assert race.startswith("a peer's memory was given back while aten::copy_ on stream")


def test_a_kernel_that_writes_a_peers_memory_ends_its_process() -> None:
    code = """if True:
        from tests.support import late
        from tests.contract.late import test_sharing as its

        late.install()
        exporter = its.share()
        imports, reference = its.imported(its.share(), exporter, its.filled(exporter))
        imports.tensor(reference).fill_(1)"""
    done = warm.run([sys.executable, "-c", code], env={**os.environ, **warm.THERE}, timeout=360)
    assert done.returncode == -signal.SIGSEGV


# ---------------------------------------------------------------------------------------------- meshes, and carrying


@contextmanager
def meshes(*shares: DeviceShare | None) -> Iterator[list[Mesh]]:
    made = [Mesh(me=name, node="n", job="j", secret=None) for name, _ in zip("ab", shares, strict=True)]
    try:
        for mesh, its in zip(made, shares, strict=True):
            if its is not None:
                mesh.share(its)
        peers = [Peer(id=mesh.me, node="n", address=mesh.address) for mesh in made]
        for mesh in made:
            mesh.edit(1, peers, links="all")
        yield made
    finally:
        for mesh in made:
            mesh.close()


def received(made: list[Mesh], count: int = 1) -> list[Frame]:
    frames: list[Frame] = []
    for _ in range(200):
        for mesh in made:
            frames += [event for event in mesh.poll(0.02) if isinstance(event, Frame)]
        if len(frames) >= count:
            return frames
    raise AssertionError("nothing came")


def test_a_mesh_sends_device_memory_by_reference_and_gets_it_back() -> None:
    a, b = share(), share()
    with meshes(a, b) as (one, two):
        assert one.links.reads_device("b") and one.links.reads_device("a") and one.links.all_read_device()
        made = filled(a)
        one.send("b", 1, tensors=[made[10:20], torch.arange(3)])
        (frame,) = received([one, two])
        assert [each.tolist() for each in frame.tensors] == [list(range(10, 20)), [0, 1, 2]]
        assert b.is_foreign(frame.tensors[0]) and one.links.by_member["b"].lending.lent == 1
        del frame
        for _ in range(50):
            one.poll(0.02)
            two.poll(0.02)
        assert one.links.by_member["b"].lending.lent == 0
        address = made.data_ptr()
        del made
        assert filled(a).data_ptr() == address


def test_a_mesh_sends_device_memory_only_to_members_of_its_domain() -> None:
    a, other = share(), share()
    other.domain = "another"
    for theirs in (None, other):
        with meshes(a, theirs) as (one, two):
            reading = one.links.reads_device("b"), two.links.reads_device("a"), one.links.all_read_device()
            assert reading == (False, False, False)
            with pytest.raises(ValueError, match="if they lie in memory that the receiver reads"):
                one.send("b", 1, tensors=[filled(a)])
    with meshes(a, share()) as (one, _), pytest.raises(ValueError, match="if they lie in memory that the receiver"):
        one.send("b", 1, tensors=[numbers()])


def test_what_goes_to_a_peer_that_reads_in_place_stays_on_the_device() -> None:
    exporter, port = share(), device_of(torch.device(PORT))
    memory = TensorMemory(in_private_memory, port=port, share=exporter)
    header, source = torch.arange(3), numbers()
    before = late.stats()
    first, made, nothing = memory.carried([header, source, torch.empty(0, device=PORT)], in_place=True)
    assert first is header and exporter.is_own(made) and nothing.numel() == 0
    (again,) = memory.carried([made], in_place=True)
    assert again is made and late.stats()["bytes_out"] == before["bytes_out"]
    (carried,) = memory.carried([made])
    assert carried.device.type == "cpu" and torch.equal(carried, torch.arange(NUMEL).float())
    full = TensorMemory(in_private_memory, port=port, share=share(free_bytes=0))
    (carried,) = full.carried([source], in_place=True)
    assert carried.device.type == "cpu" and torch.equal(carried, torch.arange(NUMEL).float())


def test_a_peers_memory_is_copied_before_it_is_given_back() -> None:
    exporter, reader, port = share(), share(), device_of(torch.device(PORT))
    memory = TensorMemory(in_private_memory, port=port, share=reader)
    imports, reference = imported(reader, exporter, filled(exporter))
    seen = imports.tensor(reference)
    assert memory.is_far(seen) and not memory.is_far(numbers())
    sent = memory.checksum(seen)
    taken, kept = memory.taken_in(seen), torch.empty(NUMEL)
    memory.copy(seen, kept)
    del seen
    assert imports.take_returned() == [7] and late.races() == []
    assert torch.equal(kept, torch.arange(NUMEL).float()) and memory.checksum(taken) == sent
    assert not memory.is_far(taken)


def test_a_boundary_tensor_is_kept_until_its_copy_has_landed() -> None:
    exporter, reader = share(), share()
    imports, reference = imported(reader, exporter, filled(exporter))
    seen, device = imports.tensor(reference), torch.device(PORT)
    copy = boundary_tensors._copied_in(seen, device, device_of(device).record())
    del seen
    waiting.until(lambda: bool(imports.returned), what="the peer's memory was given back")
    assert late.races() == [] and torch.equal(copy.cpu(), torch.arange(NUMEL).float())


def test_a_member_reads_its_own_boundary_tensor_behind_the_copy_that_made_it() -> None:
    port, own = device_of(torch.device(PORT)), share().scratch(NUMEL, torch.float32)
    assert own is not None
    nothing, made = port.record(), port.copy_out(numbers(), own)
    copy = boundary_tensors._copied_in(own, torch.device(PORT), made)
    assert torch.equal(copy.cpu(), torch.arange(NUMEL).float())
    port.copy_out(numbers(1.0), own)
    with pytest.raises(
        late.RaceError, match=r"aten::copy_ on stream . reads memory that aten::copy_ on stream . writes"
    ):
        boundary_tensors._copied_in(own, torch.device(PORT), nothing)


# --------------------------------------------------------------------------------------------------------- the probe


def test_the_probe_reads_on_when_the_exporter_is_killed() -> None:
    sharing.set_up()
    assert probe(sharing.PROVIDER, 0, LIMIT_S).readable == (0,)


@pytest.mark.parametrize("settings", ['{"shared": "one", "unreadable": true}', "{}"])
def test_a_probe_that_cannot_read_says_why(settings: str) -> None:
    before, os.environ["LATE"] = os.environ.get("LATE", "{}"), settings
    try:
        found = probe(sharing.PROVIDER, 0, LIMIT_S)
    finally:
        os.environ["LATE"] = before
    assert found.readable == () and found.reason.startswith("the probe of shared device memory failed: ")


def test_a_probe_that_does_not_end_is_given_up() -> None:
    found = probe(sharing.PROVIDER, 0, limit_s=0.05)
    assert found.readable == () and "did not end within 0 s" in found.reason


def test_bytes_of_a_peer_are_counted_where_they_are_mapped_only() -> None:
    exporter, reader = share(), share()
    made, device = filled(exporter), torch.get_device_module(PORT)
    before = device.memory_allocated()
    imports, reference = imported(reader, exporter, made)
    seen = imports.tensor(reference)
    assert device.memory_allocated() == before and float(seen[1]) == 1
    assert adopted(imports._on_device[reference.segment], 0, 4, bool).numel() == 4
