"""The pool of staging memory: bounded, reused, waited for."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import pytest
import torch

from elastrain.offload.drives.port import PAGE_BYTES
from elastrain.offload.drives.transfer import StagingPool


@pytest.fixture
def allocated() -> list[int]:
    return []


@pytest.fixture
def pool(allocated: list[int]) -> StagingPool:
    def allocate(size_bytes: int) -> torch.Tensor:
        allocated.append(size_bytes)
        return torch.empty(size_bytes, dtype=torch.uint8)

    return StagingPool(4 * PAGE_BYTES, allocate)


def test_a_buffer_is_whole_pages_and_used_again(pool: StagingPool, allocated: list[int]) -> None:
    for size_bytes in (PAGE_BYTES + 1, 100, 2 * PAGE_BYTES):
        with pool.lend(size_bytes) as buffer:
            assert buffer.nbytes == 2 * PAGE_BYTES
    assert allocated == [2 * PAGE_BYTES]


def test_idle_buffers_make_room_for_a_larger_one(pool: StagingPool, allocated: list[int]) -> None:
    with ExitStack() as both:
        both.enter_context(pool.lend(2 * PAGE_BYTES))
        both.enter_context(pool.lend(2 * PAGE_BYTES))
    with pool.lend(3 * PAGE_BYTES):
        assert pool.held_bytes <= 4 * PAGE_BYTES
    assert allocated == [2 * PAGE_BYTES, 2 * PAGE_BYTES, 3 * PAGE_BYTES]


def test_what_is_larger_than_the_pool_is_lent_alone(pool: StagingPool) -> None:
    with pool.lend(9 * PAGE_BYTES) as buffer:
        assert buffer.nbytes == 9 * PAGE_BYTES


def test_who_finds_the_pool_lent_out_waits_until_a_buffer_comes_back(pool: StagingPool) -> None:
    got = threading.Event()

    def want() -> None:
        with pool.lend(2 * PAGE_BYTES):
            got.set()

    waiting = threading.Thread(target=want)
    with pool.lend(3 * PAGE_BYTES):
        waiting.start()
        assert not got.wait(0.2)
    assert got.wait(10)
    waiting.join()


def test_a_buffer_comes_back_after_an_exception(pool: StagingPool) -> None:
    with pytest.raises(OSError, match="planted"), pool.lend(4 * PAGE_BYTES):
        raise OSError("planted")
    with pool.lend(4 * PAGE_BYTES) as buffer:
        assert buffer.nbytes == 4 * PAGE_BYTES
