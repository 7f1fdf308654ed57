"""An arena never lends the same bytes twice at a time, uses them again, and lets its pages go."""

from __future__ import annotations

from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

from elastrain.offload.activations.arena import ReadArena
from elastrain.offload.activations.deferred import DeferredLock
from elastrain.offload.drives.host_buffers import shift_of
from elastrain.offload.drives.port import PAGE_BYTES

MB = 1 << 20


def make() -> tuple[ReadArena, DeferredLock]:
    lock = DeferredLock(lambda: None)
    return ReadArena(lock), lock


def settle(lock: DeferredLock) -> None:
    """Act on what finalizers have left, as whoever needs memory does first."""
    with lock:
        pass


def lent(arena: ReadArena, size_bytes: int, shift_bytes: int, capacity_bytes: int) -> torch.Tensor:
    storage = arena.lease(size_bytes=size_bytes, shift_bytes=shift_bytes, capacity_bytes=capacity_bytes).storage
    return torch.empty(0, dtype=torch.uint8).set_(storage)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.integers(1, 5 * PAGE_BYTES), st.integers(0, PAGE_BYTES - 1)),
            st.integers(0, 20),  # let go of that one
        ),
        max_size=30,
    )
)
def test_nobody_else_writes_into_memory_that_is_lent(moves: list[tuple[int, int] | int]) -> None:
    arena, lock = make()
    held: list[tuple[torch.Tensor, int]] = []
    for number, move in enumerate(moves):
        settle(lock)
        if isinstance(move, int):
            if held:
                held.pop(move % len(held))
            continue
        size_bytes, shift_bytes = move
        tensor = lent(arena, size_bytes, shift_bytes, capacity_bytes=8 * PAGE_BYTES)
        assert tensor.nbytes == size_bytes
        assert shift_of(tensor.untyped_storage()) == shift_bytes
        held.append((tensor.fill_(number), number))
        assert all(bool((each == value).all()) for each, value in held)
    held.clear()
    tensor = torch.empty(0)
    settle(lock)
    assert arena.held_bytes == 0


def test_memory_is_lent_again_only_when_no_view_of_it_is_left() -> None:
    arena, lock = make()
    first, second = (lent(arena, MB, 0, 4 * MB) for _ in range(2))
    address, view = first.data_ptr(), first[10:20].view(torch.int8)
    del first
    settle(lock)
    assert lent(arena, MB, 0, 4 * MB).data_ptr() not in (address, second.data_ptr())
    del view
    settle(lock)
    assert lent(arena, MB, 0, 4 * MB).data_ptr() == address
    del second


def test_what_is_given_back_while_the_lock_is_held_counts_when_it_is_left() -> None:
    arena, lock = make()
    one, other = (lent(arena, MB, 0, 4 * MB) for _ in range(2))
    with lock:
        del one
        assert arena.held_bytes == 2 * MB
        del other
    assert arena.held_bytes == 0


def resident_bytes(address: int) -> int:
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        low, _, rest = line.partition("-")
        if "-" in line and ":" not in low and int(low, 16) <= address < int(rest.split()[0], 16):
            found = next(each for each in lines if each.startswith("Rss:"))
            return int(found.split()[1]) << 10
    raise AssertionError(f"no mapping at {address:x}")


def test_pages_go_when_nothing_is_lent() -> None:
    arena, lock = make()
    first, second = (lent(arena, 8 * MB, 0, 64 * MB).fill_(1) for _ in range(2))
    address = first.data_ptr()
    assert resident_bytes(address) >= 16 * MB
    del first
    settle(lock)
    assert resident_bytes(address) >= 16 * MB, "it will be used again"
    del second
    settle(lock)
    assert resident_bytes(address) == 0


@given(st.lists(st.one_of(st.sampled_from([MB, 3 * MB, 8 * MB]), st.integers(0, 20)), max_size=12))
def test_trimming_leaves_what_is_lent(moves: list[int]) -> None:
    arena, lock = make()
    held: list[tuple[torch.Tensor, int]] = []
    for number, move in enumerate(moves, start=1):
        settle(lock)
        if move <= 20:
            if held:
                held.pop(move % len(held))
        else:
            each_page = lent(arena, move, 0, 32 * MB)[::PAGE_BYTES]
            held.append((each_page.fill_(number), number))
        arena.trim()
        assert all(bool((each == value).all()) for each, value in held)


def test_pages_of_holes_that_nobody_fits_into_go() -> None:
    arena, lock = make()
    tensors = [lent(arena, 3 * MB, 0, 64 * MB).fill_(number) for number in range(12)]
    address = tensors[0].data_ptr()
    del tensors[::2]
    settle(lock)
    arena.trim()
    assert arena.held_bytes == 36 * MB, "as much was lent at a time"
    tensors += [lent(arena, 4 * MB, 0, 64 * MB).fill_(number) for number in range(12, 16)]
    arena.trim()
    assert arena.held_bytes == 40 * MB, "one storage more than was lent at a time"
    assert resident_bytes(address) <= 40 * MB
    assert (
        [int(each[0]) for each in tensors] == [int(each[-1]) for each in tensors] == [1, 3, 5, 7, 9, 11, *range(12, 16)]
    )


def test_all_pages_count_as_lent_or_as_idle() -> None:
    """A huge page is there as a whole, however little of it is lent."""
    arena, lock = make()
    tensors = [lent(arena, 3 * MB, 0, 64 * MB).fill_(1) for _ in range(3)]
    assert sum(each.nbytes for each in tensors) + arena.idle_bytes == arena.held_bytes == 10 * MB
    del tensors[1]
    settle(lock)
    assert sum(each.nbytes for each in tensors) + arena.idle_bytes == arena.held_bytes


def test_an_arena_that_is_gone_leaves_its_leases_alone() -> None:
    arena, lock = make()
    tensor = lent(arena, MB, 0, 4 * MB).fill_(7)
    del arena, lock
    assert bool((tensor == 7).all())
