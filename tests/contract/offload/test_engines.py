"""What every engine promises, run against each of them; and what the POSIX one does when the kernel does not help."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from elastrain.offload.drives.directories import check_directory
from elastrain.offload.drives.host import HostEngine
from elastrain.offload.drives.host_buffers import lease
from elastrain.offload.drives.port import PAGE_BYTES, IoEngine
from elastrain.offload.drives.posix import Calls, PosixEngine
from elastrain.offload.errors import OffloadConfigError
from tests.support.faulty_engines import EngineFaults, FaultyEngine, ThrottledEngine
from tests.support.memory_engine import MemoryEngine

Make = Callable[[Path], IoEngine]
KEEPING: dict[str, Make] = {
    "posix": PosixEngine,
    "memory": lambda _: MemoryEngine(),
    "host": lambda _: HostEngine(1 << 20),
    "faulty without faults": lambda path: FaultyEngine(PosixEngine(path), EngineFaults()),
    "throttled": lambda path: ThrottledEngine(PosixEngine(path), bytes_per_s=1e12),
}


@pytest.fixture(params=KEEPING)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[IoEngine]:
    made = KEEPING[request.param](tmp_path)
    yield made
    made.close()


def page(fill: int, pages: int = 1) -> memoryview:
    view = lease(size_bytes=pages * PAGE_BYTES, shift_bytes=0).image
    view[:] = bytes([fill]) * view.nbytes
    return view


def test_what_was_written_is_read(engine: IoEngine) -> None:
    engine.reserve(8 * PAGE_BYTES)
    engine.write(2 * PAGE_BYTES, [page(1), page(2, 3)])
    back = [page(0, 3), page(0)]
    engine.read(2 * PAGE_BYTES, back)
    assert b"".join(back) == bytes([1]) * PAGE_BYTES + bytes([2]) * 3 * PAGE_BYTES


def test_neighbours_are_left_alone(engine: IoEngine) -> None:
    engine.reserve(3 * PAGE_BYTES)
    for index in (0, 2, 1):
        engine.write(index * PAGE_BYTES, [page(index + 1)])
    back = page(0, 3)
    engine.read(0, [back])
    assert bytes(back[::PAGE_BYTES]) == bytes([1, 2, 3])


def test_growing_keeps_what_is_there(engine: IoEngine) -> None:
    engine.reserve(PAGE_BYTES)
    engine.write(0, [page(7)])
    engine.reserve(100 * PAGE_BYTES)
    back = page(0)
    engine.read(0, [back])
    assert bytes(back) == bytes([7]) * PAGE_BYTES


def test_threads_move_disjoint_ranges_at_the_same_time(engine: IoEngine) -> None:
    engine.reserve(64 * PAGE_BYTES)

    def there_and_back(index: int) -> bool:
        engine.write(index * PAGE_BYTES, [page(index)])
        back = page(255)
        engine.read(index * PAGE_BYTES, [back])
        return bytes(back) == bytes([index]) * PAGE_BYTES

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(there_and_back, range(64)))


def test_closing_twice_is_fine(engine: IoEngine) -> None:
    engine.close()
    engine.close()


def test_memory_has_an_end() -> None:
    with pytest.raises(OSError, match="are wanted") as caught:
        MemoryEngine(capacity_bytes=PAGE_BYTES).reserve(PAGE_BYTES + 1)
    assert caught.value.errno == errno.ENOSPC


# POSIX.


def test_the_slab_has_no_name(tmp_path: Path) -> None:
    engine = PosixEngine(tmp_path)
    engine.reserve(1 << 20)
    assert list(tmp_path.iterdir()) == []
    engine.close()


def test_direct_io_is_used_where_the_file_system_has_it(tmp_path: Path) -> None:
    engine = PosixEngine(tmp_path)
    assert engine.direct == direct_works(tmp_path)
    engine.close()


def direct_works(path: Path) -> bool:
    try:
        os.close(os.open(path / "probe", os.O_CREAT | os.O_RDWR | os.O_DIRECT))
    except OSError:
        return False
    return True


def by_pages(call: Callable[[int, Sequence[memoryview], int], int]) -> Callable[[int, Sequence[memoryview], int], int]:
    """The kernel call, which never moves more than one page: every call is short."""

    def short(fd: int, views: Sequence[memoryview], offset: int) -> int:
        return call(fd, [views[0][:PAGE_BYTES]], offset)

    return short


def test_short_calls_are_continued(tmp_path: Path) -> None:
    engine = PosixEngine(tmp_path, calls=Calls(pwritev=by_pages(os.pwritev), preadv=by_pages(os.preadv)))
    engine.reserve(8 * PAGE_BYTES)
    engine.write(0, [page(1, 2), page(2, 3)])
    back = page(0, 5)
    engine.read(0, [back])
    assert bytes(back[::PAGE_BYTES]) == bytes([1, 1, 2, 2, 2])
    engine.close()


@pytest.mark.parametrize("moved", [0, 100])
def test_a_call_that_ends_within_a_page_is_an_error(tmp_path: Path, moved: int) -> None:
    engine = PosixEngine(tmp_path, calls=Calls(pwritev=lambda *_: moved))
    with pytest.raises(OSError, match="short write") as caught:
        engine.write(0, [page(1)])
    assert caught.value.errno == errno.EIO
    engine.close()


def test_reading_beyond_the_end_is_an_error(tmp_path: Path) -> None:
    engine = PosixEngine(tmp_path)
    with pytest.raises(OSError, match="short read"):
        engine.read(0, [page(1)])
    engine.close()


def test_more_than_is_free_is_refused_before_it_is_taken(tmp_path: Path) -> None:
    engine = PosixEngine(tmp_path)
    with pytest.raises(OSError, match="are free") as caught:
        engine.reserve(1 << 60)
    assert caught.value.errno == errno.ENOSPC
    engine.close()


def test_a_forked_child_does_not_hold_the_slab(tmp_path: Path) -> None:
    engine = PosixEngine(tmp_path)
    child = os.fork()
    if not child:
        os._exit(0 if engine.path() == "/proc/self/fd/-1" else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert engine.path() != "/proc/self/fd/-1"
    engine.close()


def test_memory_is_no_disk() -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("this system has no /dev/shm to refuse")
    with pytest.raises(OffloadConfigError, match="tmpfs, which is memory itself: name a directory on an SSD"):
        check_directory("/dev/shm")


def test_a_missing_directory_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(OffloadConfigError, match="is not a directory: create it on an SSD"):
        check_directory(tmp_path / "nowhere")


def test_an_unwritable_directory_is_refused_in_one_sentence() -> None:
    code = (
        "import os, sys\n"
        "from elastrain.offload.drives.directories import check_directory\n"
        "os.getuid() == 0 and os.setuid(65534)\n"
        "check_directory(sys.argv[1])"
    )
    with tempfile.TemporaryDirectory() as locked:  # not below tmp_path, which only its owner may enter
        Path(locked).chmod(0o555)
        ran = subprocess.run([sys.executable, "-c", code, locked], capture_output=True, text=True, timeout=180)
        Path(locked).chmod(0o700)
    assert "is not writable by this process" in ran.stderr


def test_a_drive_can_be_slowed_to_a_rate() -> None:
    slept: list[float] = []
    engine = ThrottledEngine(MemoryEngine(), bytes_per_s=PAGE_BYTES, clock=lambda: 100.0, sleep=slept.append)
    engine.reserve(2 * PAGE_BYTES)
    engine.write(0, [page(1), page(2)])
    engine.read(0, [page(0)])
    assert slept == [2.0, 3.0]
