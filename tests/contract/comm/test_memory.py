"""Tensors in sealed shared segments: by reference, read-only for others, never used again while somebody reads."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
from collections.abc import Callable

import pytest
import torch

from elastrain.comm.shm.liveness import Beacon
from elastrain.comm.shm.segments import SharedMemory
from elastrain.comm.shm.shared_memory import HUGE_PAGE_BYTES, create_sealed, open_sealed, use_huge_pages
from elastrain.comm.wire.addresses import Frame
from elastrain.comm.wire.mesh import Mesh
from tests.support.comm_tools import Cast, cast


def _send_and_take(made: Cast, tensor: torch.Tensor) -> torch.Tensor:
    made.meshes["a"].send("b", 1, b"take", [tensor])
    made.until(lambda: bool(made.frames("b")))
    frame = made.events["b"].pop()
    assert isinstance(frame, Frame)
    return frame.tensors[0]


def _given_back(mesh: Mesh, member: str) -> Callable[[], bool]:
    def claim() -> bool:
        gc.collect()
        return not mesh.links.by_member[member].lending.lent

    return claim


def test_empty_is_zero_aligned_flat_and_zero_again_after_reuse() -> None:
    memory = SharedMemory(1 << 20)
    for _ in range(3):
        tensors = [memory.empty(n, torch.float32) for n in (1, 17, 1000, 300_000)]
        for tensor in tensors:
            assert tensor.data_ptr() % 64 == 0 and tensor.dim() == 1
            assert not tensor.any()
            tensor.fill_(1)
        for tensor in tensors:
            memory.free(tensor)
    memory.close()


def test_a_large_tensor_begins_where_a_huge_page_can_also_for_its_readers() -> None:
    with cast("unix", "ab") as made:
        before = made.meshes["a"].memory.empty(100, torch.float32)
        large = made.meshes["a"].memory.empty(1 << 20, torch.float32)
        assert before.data_ptr() != large.data_ptr() and large.data_ptr() % HUGE_PAGE_BYTES == 0
        assert _send_and_take(made, large).data_ptr() % HUGE_PAGE_BYTES == 0


def test_memory_without_huge_pages_is_held_when_it_is_used_and_not_before() -> None:
    def held_bytes() -> int:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssShmem:"))

    memory = SharedMemory(1 << 20, huge_pages=False)
    before = held_bytes()
    tensor = memory.empty(16 * HUGE_PAGE_BYTES, torch.uint8)
    assert held_bytes() - before < HUGE_PAGE_BYTES
    tensor.fill_(1)
    # The kernel counts in batches per thread: some pages of the last batch may not be in it yet.
    assert held_bytes() - before > 15 * HUGE_PAGE_BYTES
    del tensor
    memory.close()


def test_what_lies_in_memory_stays_when_its_pages_become_huge() -> None:
    size_bytes = 3 * HUGE_PAGE_BYTES
    fd, mapping = create_sealed("test", size_bytes)
    reader = open_sealed(fd)
    os.close(fd)
    written = torch.frombuffer(mapping.view(0, size_bytes), dtype=torch.int32)
    read = torch.frombuffer(reader.view(0, size_bytes), dtype=torch.int32)
    expected = torch.arange(size_bytes // 4, dtype=torch.int32)
    written.copy_(expected)
    use_huge_pages(mapping.address + 4096, size_bytes - 4096)
    assert torch.equal(written, expected) and torch.equal(read, expected)
    written.neg_()
    assert torch.equal(read, -expected)


def test_a_reference_is_a_view_of_the_senders_memory() -> None:
    with cast("unix", "ab") as made:
        tensor = made.meshes["a"].memory.empty(100, torch.float32)
        taken = _send_and_take(made, tensor.view(10, 10)[3:5])
        tensor[30:50] = 9.0
        assert torch.equal(taken, torch.full((2, 10), 9.0))


def test_between_nodes_the_same_tensor_is_copied() -> None:
    with cast("tcp", "ab") as made:
        tensor = made.meshes["a"].memory.empty(100, torch.float32)
        taken = _send_and_take(made, tensor)
        tensor.fill_(9)
        assert torch.equal(taken, torch.zeros(100))


def test_a_segment_crosses_a_link_once() -> None:
    with cast("unix", "ab") as made:
        a = made.meshes["a"]
        taken = [_send_and_take(made, a.memory.empty(10, torch.float32)) for _ in range(20)]
        assert len(made.meshes["b"].links.by_member["a"].imports._mappings) == 1
        assert len({tensor.data_ptr() for tensor in taken}) == 20


def test_freed_memory_is_not_used_again_while_a_receiver_reads_it() -> None:
    with cast("unix", "ab") as made:
        a = made.meshes["a"]
        tensor = a.memory.empty(16, torch.float32)
        tensor.fill_(5)
        address = tensor.data_ptr()
        taken = _send_and_take(made, tensor)[2:4]
        a.memory.free(tensor)
        other = a.memory.empty(16, torch.float32)
        assert other.data_ptr() != address
        assert torch.equal(taken, torch.full((2,), 5.0))
        del taken
        made.until(_given_back(a, "b"))
        assert a.memory.empty(16, torch.float32).data_ptr() == address


def test_a_collected_tensor_is_freed_when_its_receivers_let_go() -> None:
    with cast("unix", "ab") as made:
        a = made.meshes["a"]
        address = a.memory.empty(16, torch.float32).data_ptr()
        tensor = a.memory.empty(16, torch.float32)
        assert tensor.data_ptr() == address
        taken = _send_and_take(made, tensor)
        del tensor
        assert a.memory.empty(16, torch.float32).data_ptr() != address
        del taken
        made.until(_given_back(a, "b"))
        assert a.memory.empty(16, torch.float32).data_ptr() == address


def test_memory_lent_to_a_lost_member_comes_back_with_the_edit_that_removes_it() -> None:
    with cast("unix", "ab") as made:
        a = made.meshes["a"]
        tensor = a.memory.empty(16, torch.float32)
        address = tensor.data_ptr()
        taken = _send_and_take(made, tensor)
        a.memory.free(tensor)
        made.leave("b")
        made.until(lambda: bool(made.lost("a")))
        # It may be alive and reading: only the next view ends that.
        assert a.memory.empty(16, torch.float32).data_ptr() != address
        a.edit(2, made.peers("a"))
        assert a.memory.empty(16, torch.float32).data_ptr() == address
        del taken


def test_memory_lent_to_a_member_whose_process_has_ended_comes_back_when_that_is_known() -> None:
    beacon = Beacon()
    with cast("unix") as made:
        a = made.add("a")
        made.add("b", beacon=beacon)
        made.together(1, "ab")
        tensor = a.memory.empty(16, torch.float32)
        address = tensor.data_ptr()
        taken = _send_and_take(made, tensor)
        a.memory.free(tensor)
        assert a.memory.empty(16, torch.float32).data_ptr() != address
        beacon.close()  # as the kernel does it at a process's end
        made.until(lambda: bool(made.lost("a")))
        assert a.memory.empty(16, torch.float32).data_ptr() == address
        del taken


def test_memory_on_its_way_by_stream_is_not_used_again_before_it_has_left() -> None:
    with cast("tcp", "ab") as made:
        a = made.meshes["a"]
        tensor = a.memory.empty(4_000_000, torch.float32)
        tensor.fill_(3)
        a.send("b", 1, b"large", [tensor])
        a.memory.free(tensor)
        assert a.links.by_member["b"].outbox
        a.memory.empty(4_000_000, torch.float32).fill_(8)
        made.until(lambda: bool(made.frames("b")))
        assert torch.equal(made.frames("b")[0].tensors[0], torch.full((4_000_000,), 3.0))


def test_a_discarded_frame_gives_its_references_back() -> None:
    with cast("unix", "ab") as made:
        a, b = made.meshes["a"], made.meshes["b"]
        b.edit(2, made.peers("ab"))
        a.send("b", 1, b"old", [a.memory.empty(16, torch.float32)])
        assert a.links.by_member["b"].lending.lent
        made.until(_given_back(a, "b"))
        assert made.frames("b") == []


def test_a_large_tensor_has_its_own_segment_and_mappings_go_with_it() -> None:
    with cast("unix", "ab", segment_bytes=1 << 20) as made:
        a, b = made.meshes["a"], made.meshes["b"]
        large = a.memory.empty(2 << 20, torch.float32)
        taken = _send_and_take(made, large)
        assert len(a.memory.segments()) == 1
        del large, taken
        made.until(lambda: a.memory.segments() == () and not b.links.by_member["a"].imports._mappings)


def test_idle_segments_are_used_again_but_only_so_many_are_kept() -> None:
    memory = SharedMemory(1 << 20)
    first = memory.empty(300_000, torch.float32)
    first.fill_(1)
    address = first.data_ptr()
    memory.free(first)
    again = memory.empty(250_000, torch.float32)
    assert again.data_ptr() == address and not again.any()
    tensors = [again, *(memory.empty(300_000, torch.float32) for _ in range(9))]
    assert len(memory.segments()) == 10
    for tensor in tensors:
        memory.free(tensor)
    assert len(memory.segments()) == 3  # of 1.2 MB each: within four times 1 MiB
    assert len(memory.take_gone()) == 7
    memory.close()


def test_pages_that_were_used_are_used_again_before_fresh_ones() -> None:
    """In whatever order the kernel placed the segments, members' memory grows by no byte."""
    memory = SharedMemory(8 << 20, huge_pages=False)
    tensors = [memory.empty(3 << 19, torch.uint8) for _ in range(11)]
    kept = tensors[0::5]  # one in each of three segments, and nothing else in the last
    held_bytes = memory.resident_bytes()
    assert held_bytes == 3 * 11 << 19
    del tensors
    memory.trim()
    again = [memory.empty(3 << 19, torch.uint8) for _ in range(8)]
    assert memory.resident_bytes() == held_bytes
    del kept, again
    memory.close()


def test_received_tensors_outlive_link_and_mesh() -> None:
    with cast("unix", "ab") as made:
        tensor = made.meshes["a"].memory.empty(16, torch.float32)
        tensor.fill_(4)
        taken = _send_and_take(made, tensor)
        made.close()
        del tensor
        gc.collect()
        assert torch.equal(taken, torch.full((16,), 4.0))


def test_only_tensors_of_empty_can_be_freed() -> None:
    memory = SharedMemory(1 << 20)
    tensor = memory.empty(100, torch.float32)
    for other in (torch.ones(3), tensor[50:]):
        with pytest.raises(ValueError, match="only a tensor that came from empty"):
            memory.free(other)
    with pytest.raises(ValueError, match="at least one element"):
        memory.empty(0, torch.float32)
    memory.close()


def test_nobody_else_can_write_shrink_or_grow_a_segment() -> None:
    fd, mapping = create_sealed("test", 8192)
    mapping.view(0, 4)[:] = b"mine"
    with pytest.raises(PermissionError):
        mmap.mmap(fd, 8192)
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", 0)
    for size_bytes in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size_bytes)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert bytes(mmap.mmap(fd, 8192, prot=mmap.PROT_READ)[:4]) == b"mine"
    os.close(fd)


def test_a_member_that_is_left_out_sees_that_what_it_copied_may_be_torn() -> None:
    """It has heard nothing yet: it was stopped. All are in one process here, and each has a page of its own."""
    made = Cast("unix")
    beacons = {name: Beacon() for name in "abc"}
    try:
        for name, beacon in beacons.items():
            made.add(name, beacon=beacon)
        made.together(1, "abc")
        made.until(lambda: all(link.proven_dead is False and link._watcher for link in made.meshes["c"].links))
        assert not made.meshes["c"].links.may_be_torn()
        made.meshes["a"].edit(2, made.peers("ab"))
        assert made.meshes["c"].links.may_be_torn(), "before it polls"
        made.until(lambda: "a" in made.lost("c"))
        assert made.meshes["c"].links.may_be_torn(), "after the link has gone, too"
        assert made.meshes["b"].links.may_be_torn(), "until it is in that view itself"
        made.meshes["b"].edit(2, made.peers("ab"))
        assert not made.meshes["b"].links.may_be_torn()
    finally:
        made.close()
        for beacon in beacons.values():
            beacon.close()


def test_memory_is_pinned_at_both_ends_as_long_as_it_is_mapped() -> None:
    pinned: dict[int, tuple[int, bool]] = {}

    def pin(memory: memoryview, read_only: bool) -> Callable[[], object]:
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        assert memory[0] == 0 and memory.nbytes % mmap.PAGESIZE == 0  # its pages are there
        pinned[address] = (memory.nbytes, read_only)
        return lambda: pinned.pop(address)

    with cast("unix", segment_bytes=1 << 20) as made:
        for name in "ab":
            made.add(name)
            made.meshes[name].pin(pin)
        made.together(1, "ab")
        tensor = made.meshes["a"].memory.empty(1000, torch.float32)
        assert list(pinned.values()) == [(1 << 20, False)] and min(pinned) <= tensor.data_ptr()
        taken = _send_and_take(made, tensor)
        assert sorted(pinned.values()) == [(1 << 20, False), (1 << 20, True)]
        large = made.meshes["a"].memory.scratch(1 << 20, torch.float32)
        assert (4 << 20, False) in pinned.values()
        del taken, tensor, large
        gc.collect()
    made.meshes.clear()
    made.events.clear()
    gc.collect()
    assert not pinned


def test_memory_that_is_not_pinned_is_used_all_the_same() -> None:
    memory = SharedMemory(1 << 20)
    memory.pin = lambda *_: None
    assert not memory.empty(1000, torch.float32).any()
    memory.close()
