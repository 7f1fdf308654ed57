"""Page images carry exactly the payload, aligned, and nothing of its neighbours."""

from __future__ import annotations

import ctypes

from hypothesis import given
from hypothesis import strategies as st

from elastrain.offload.drives.host_buffers import bytes_of, cut, fault_in, lease, page_image, shift_of
from elastrain.offload.drives.port import PAGE_BYTES, round_up


def address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


@given(st.integers(0, PAGE_BYTES - 1), st.integers(1, 5 * PAGE_BYTES), st.integers(1, 6).map(lambda n: n * PAGE_BYTES))
def test_the_image_is_aligned_and_holds_the_payload_at_its_shift(shift: int, size: int, piece: int) -> None:
    memory = lease(size_bytes=size, shift_bytes=shift)
    memory.image[:] = b"\xff" * memory.image.nbytes  # what lies beside the payload
    payload = bytes_of(memory.storage)
    payload[:] = bytes(i % 251 for i in range(size))
    views = page_image(payload, shift)
    assert all(address(view) % PAGE_BYTES == view.nbytes % PAGE_BYTES == 0 for view in views)
    image = b"".join(views)
    assert image == bytes(shift) + bytes(payload) + bytes(round_up(shift + size) - shift - size)
    assert b"".join(view for part in cut(views, piece) for view in part) == image
    assert all(sum(view.nbytes for view in part) <= piece for part in cut(views, piece))


@given(st.integers(0, PAGE_BYTES - 1), st.integers(1, 3 * PAGE_BYTES))
def test_a_lease_lies_at_the_same_place_in_its_page(shift: int, size: int) -> None:
    memory = lease(size_bytes=size, shift_bytes=shift)
    assert shift_of(memory.storage) == shift
    assert memory.storage.nbytes() == size
    assert memory.image.nbytes == round_up(shift + size)


@given(st.integers(1, 9))
def test_faulting_in_touches_each_page_once(count: int) -> None:
    memory = lease(size_bytes=count * PAGE_BYTES, shift_bytes=0)
    memory.image[:] = b"\xff" * memory.image.nbytes
    fault_in(memory.image)
    assert bytes(memory.image) == (b"\0" + b"\xff" * (PAGE_BYTES - 1)) * count
