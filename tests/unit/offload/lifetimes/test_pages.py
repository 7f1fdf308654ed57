"""Pages that move under addresses that stay: what arrives has memory, what is out is protected, children get none."""

from __future__ import annotations

import ctypes
import errno
import faulthandler
import mmap
import os
import signal
import sys
from collections.abc import Callable

import pytest
import torch

from elastrain.offload.lifetimes.pieces import pages
from elastrain.offload.lifetimes.pieces.pages import PagedRange, PagePool
from elastrain.offload.lifetimes.pieces.piece_memory import Access

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pages move by mremap, which is Linux'")
MIB = 1 << 20


def resident_bytes() -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def huge_bytes() -> int:
    with open("/proc/self/smaps_rollup") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("AnonHugePages"))


def in_child(act: Callable[[], None]) -> int:
    """The child's wait status."""
    pid = os.fork()
    if pid == 0:
        act()
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def test_pages_move_from_a_leaving_piece_to_an_arriving_one_and_no_memory_is_added() -> None:
    pool = PagePool(64 * MIB)
    first, second = PagedRange(16 * MIB), PagedRange(16 * MIB)
    address = first.tensor.data_ptr()
    pool.take_from(second)
    first.tensor.fill_(7)
    before = resident_bytes()
    for _ in range(4):
        pool.take_from(first)
        pool.give_to(second)
        second.allow(Access.WRITE)
        second.tensor.fill_(9)
        pool.take_from(second)
        pool.give_to(first)
        first.allow(Access.WRITE)
        first.tensor.fill_(7)
    grown = resident_bytes() - before  # before anything is compared, which takes 16 MiB that the heap may keep
    assert grown < 4 * MIB
    assert first.tensor.data_ptr() == address
    assert bool((first.tensor == 7).all())


def test_pieces_of_other_sizes_share_pages() -> None:
    pool = PagePool(64 * MIB)
    large, small, other = PagedRange(10 * MIB + 5), PagedRange(3 * MIB + 4096), PagedRange(8 * MIB)
    for each in (large, small, other):
        each.tensor.fill_(1)
        pool.take_from(each)
    assert pool.parked_bytes == sum(each.size_bytes for each in (large, small, other))
    for round_ in range(1, 4):
        for each in (small, large, other):
            pool.give_to(each)
            each.allow(Access.WRITE)
            each.tensor.fill_(round_)
        for each in (other, small, large):
            assert bool((each.tensor == round_).all())
            pool.take_from(each)


def test_huge_pages_stay_huge_wherever_they_are() -> None:
    before, pool = huge_bytes(), PagePool(64 * MIB)
    pieces = [PagedRange(7 * MIB + 4096 * odd) for odd in (1, 2, 3)]
    for each in pieces:
        each.tensor.fill_(1)
    if huge_bytes() - before < 18 * MIB:
        pytest.skip("this kernel has no huge pages to give")
    for _ in range(2):
        for each in pieces:
            pool.take_from(each)
        for each in reversed(pieces):
            pool.give_to(each)
            each.allow(Access.READ)
            each.allow(Access.WRITE)
            each.tensor.fill_(2)
    assert huge_bytes() - before >= 18 * MIB


@pytest.mark.parametrize("access", [Access.NONE, Access.READ])
def test_who_does_more_than_is_allowed_is_stopped_by_the_kernel(access: Access) -> None:
    # A child has no such memory at all: its parent's protection is seen by a child that makes its own.
    def touch() -> None:
        faulthandler.disable()
        own = PagedRange(MIB)
        own.allow(access)
        if access is Access.READ:
            own.tensor.sum().item()
            own.tensor.fill_(1)
        own.tensor.sum().item()

    assert os.WTERMSIG(in_child(touch)) == signal.SIGSEGV


def test_what_was_written_is_there_after_every_change_of_what_is_allowed() -> None:
    piece = PagedRange(3 * MIB)
    piece.tensor.fill_(5)
    for access in (Access.READ, Access.NONE, Access.READ, Access.WRITE, Access.NONE, Access.WRITE):
        piece.allow(access)
        if access is not Access.NONE:
            assert bool((piece.tensor == 5).all())


def test_pages_that_came_in_parts_move_on_kernels_that_move_one_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    real, ends = pages._libc.mremap, 4096 * 3

    class OldKernel:
        def mremap(self, source: int, size: int, new: int, flags: int, target: int) -> int:
            if size > ends:
                ctypes.set_errno(errno.EFAULT)
                return -1
            return int(real(source, size, new, flags, target))

        mprotect = pages._libc.mprotect

    monkeypatch.setattr(pages, "_libc", OldKernel())
    piece = PagedRange(4096 * 7)
    piece.tensor.copy_(torch.arange(4096 * 7) % 251)
    piece.allow(Access.NONE)
    piece.allow(Access.READ)
    assert torch.equal(piece.tensor, (torch.arange(4096 * 7) % 251).to(torch.uint8))


def test_parked_pages_go_back_to_the_kernel_when_they_are_trimmed() -> None:
    pool, piece = PagePool(64 * MIB), PagedRange(32 * MIB)
    piece.tensor.fill_(1)
    before = resident_bytes()
    pool.take_from(piece)
    assert before - resident_bytes() < 4 * MIB
    pool.trim(0)
    assert pool.parked_bytes == 0 and before - resident_bytes() > 28 * MIB


def test_what_the_pool_has_no_addresses_for_goes_to_the_kernel() -> None:
    pool, piece = PagePool(8 * MIB), PagedRange(32 * MIB)
    piece.tensor.fill_(1)
    before = resident_bytes()
    pool.take_from(piece)
    assert pool.parked_bytes == 8 * MIB and before - resident_bytes() > 20 * MIB
    pool.give_to(piece)
    piece.allow(Access.WRITE)
    piece.tensor.fill_(2)
    assert int(piece.tensor.sum(dtype=torch.int64)) == 2 * 32 * MIB


def test_a_forked_child_finds_no_memory_of_its_own_where_a_piece_was() -> None:
    piece = PagedRange(MIB)

    def look() -> None:
        faulthandler.disable()
        mine = [mmap.mmap(-1, MIB) for _ in range(64)]
        piece.tensor.sum().item()
        del mine

    assert os.WTERMSIG(in_child(look)) == signal.SIGSEGV


def test_a_forked_child_keeps_its_memory_when_it_frees_what_the_parent_had() -> None:
    """Addresses behind pieces, and of parked pages, are not copied: its own memory would be unmapped with them."""
    pieces, pool = [PagedRange(16 * MIB) for _ in range(4)], PagePool(64 * MIB)

    def free() -> None:
        faulthandler.disable()
        mine = [mmap.mmap(-1, 4 * MIB) for _ in range(64)]
        pieces.clear()
        del pool._huge, pool._small
        for each in mine:
            each[0] = 1

    assert in_child(free) == 0


def test_a_forked_child_gets_none_of_the_pages() -> None:
    piece = PagedRange(64 * MIB)
    piece.tensor.fill_(1)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write, str(resident_bytes()).encode())
        os._exit(0)
    told = int(os.read(read, 32))
    os.waitpid(pid, 0)
    assert resident_bytes() - told > 60 * MIB
