"""Devices that fail, lie, fill up, slow down or vanish; limits too small; SIGKILL: never a wrong gradient."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from elastrain.offload import (
    ActivationOffload,
    CorruptSpillError,
    LimitTooSmallError,
    ModifiedInPlaceError,
    OffloadConfig,
    OffloadError,
    SpillReadError,
    SpillWriteError,
    save_on_disk,
)
from elastrain.offload.activations.arena import ReadArena
from elastrain.offload.drives.host_buffers import Lease
from elastrain.offload.drives.posix import Calls, PosixEngine
from tests.support import warm
from tests.support.faulty_engines import EngineFaults, FaultyEngine, ThrottledEngine
from tests.support.memory_engine import MemoryEngine

MIN_BYTES = 1024
DEADLINE_S = 60


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)])


def batch() -> Tensor:
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(1))


def expected() -> list[Tensor]:
    net = network()
    net(batch()).square().mean().backward()
    return [p.grad for p in net.parameters() if p.grad is not None]


def with_faults(tmp_path: Path, faults: EngineFaults, memory_limit: int | None = None) -> ActivationOffload:
    config = OffloadConfig(dirs=(str(tmp_path),), memory_limit=memory_limit, min_bytes=MIN_BYTES, deadline_s=20.0)
    return ActivationOffload(config, engines=[FaultyEngine(MemoryEngine(), faults)])


def step(net: nn.Module, offload: ActivationOffload) -> list[Tensor]:
    net.zero_grad()
    with offload:
        loss = net(batch()).square().mean()
    loss.backward()
    return [p.grad for p in net.parameters() if p.grad is not None]


def steps(net: nn.Module, offload: ActivationOffload, count: int = 3) -> None:
    for _ in range(count):
        step(net, offload)


def assert_right(found: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found, expected(), strict=True))


def drained(offload: ActivationOffload) -> None:
    """Let every write end before backward, so that backward has to read."""
    for device in offload._open().devices:
        device.queue.close()
        device.queue = type(device.queue)("again", threads=1)


READ_FAULTS = {
    "EIO": (EngineFaults(read_fails_after=2), SpillReadError, "does not give activations back"),
    "flipped bytes": (EngineFaults(flips_after=2), CorruptSpillError, "other bytes than were written"),
    "a device that vanished": (EngineFaults(vanishes_after=12), SpillReadError, "No such device|injected fault"),
}


@pytest.mark.parametrize("name", READ_FAULTS)
def test_a_read_fault_raises_in_backward_and_the_micro_batch_can_be_computed_again(tmp_path: Path, name: str) -> None:
    faults, error, message = READ_FAULTS[name]
    offload, net = with_faults(tmp_path, faults), network()
    with offload:
        loss = net(batch()).square().mean()
    drained(offload)
    with pytest.raises(error, match=message):
        loss.backward()
    assert offload.stats().faults
    del loss
    sound = with_faults(tmp_path, EngineFaults())
    assert_right(step(net, sound))


@pytest.mark.parametrize(
    "faults", [EngineFaults(write_fails_after=3), EngineFaults(vanishes_after=3)], ids=["EIO", "vanished"]
)
def test_a_write_fault_is_said_at_once_and_no_gradient_is_wrong(tmp_path: Path, faults: EngineFaults) -> None:
    offload, net = with_faults(tmp_path, faults), network()

    def until_it_is_said() -> None:
        for _ in range(100):
            assert_right(step(net, offload))

    with pytest.raises(
        OffloadError, match=r"does not take activations \(.*injected fault.*\): name another directory|does not give"
    ):
        until_it_is_said()


def test_a_full_device_without_a_limit_keeps_the_rest_in_memory(tmp_path: Path) -> None:
    offload, net = with_faults(tmp_path, EngineFaults(full_after=3)), network()
    for _ in range(3):
        net.zero_grad()
        with offload:
            loss = net(batch()).square().mean()
        drained(offload)
        loss.backward()
        assert_right([p.grad for p in net.parameters() if p.grad is not None])
    assert any("is full" in fault for fault in offload.stats().faults)


def test_a_full_device_under_a_limit_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    offload, net = with_faults(tmp_path, EngineFaults(full_after=3), memory_limit=6 * 8192), network()
    said = ""
    try:
        steps(net, offload)
    except SpillWriteError as error:
        said = str(error)  # and not the error, whose traceback holds the graph
    assert "is full" in said
    assert "free space there, or name another directory" in said
    gc.collect()
    drained(offload)
    assert offload.stats().live_bytes == 0


def test_the_quota_is_obeyed_and_named(tmp_path: Path) -> None:
    offload = save_on_disk([tmp_path], memory_limit=4 * 8192, quota=16384, min_bytes=MIN_BYTES)
    with pytest.raises(SpillWriteError, match="quota of 16384 bytes"):
        steps(network(), offload)
    assert all(device.slab_bytes <= 16384 for device in offload.stats().devices)
    offload.close()


def test_a_slow_device_only_costs_time(tmp_path: Path) -> None:
    config = OffloadConfig(dirs=(str(tmp_path),), memory_limit=6 * 8192, min_bytes=MIN_BYTES)
    offload = ActivationOffload(config, engines=[ThrottledEngine(MemoryEngine(), bytes_per_s=2e6)])
    net = network()
    for _ in range(2):
        assert_right(step(net, offload))
    assert offload.stats().save_stall_s > 0
    assert offload.stats().peak_bytes <= 6 * 8192
    offload.close()


def test_a_device_that_never_answers_is_an_error_not_a_hang(tmp_path: Path) -> None:
    config = OffloadConfig(dirs=(str(tmp_path),), memory_limit=4 * 8192, min_bytes=MIN_BYTES, deadline_s=0.2)
    offload = ActivationOffload(config, engines=[ThrottledEngine(MemoryEngine(), bytes_per_s=8192)])
    with pytest.raises(OffloadError, match=r"did not end within 0.2 s"):
        step(network(), offload)


def test_where_there_is_no_memory_to_read_into_reading_ahead_waits_and_a_need_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what could not be read is still on disk: the same backward works once there is memory."""
    there = ReadArena.lease
    asked, missing = 0, 0

    def lease(self: ReadArena, *, size_bytes: int, shift_bytes: int, capacity_bytes: int) -> Lease:
        nonlocal asked
        asked += 1
        if asked <= missing:
            raise MemoryError("no memory is left")
        return there(self, size_bytes=size_bytes, shift_bytes=shift_bytes, capacity_bytes=capacity_bytes)

    monkeypatch.setattr(ReadArena, "lease", lease)
    offload, net = save_on_disk(tmp_path, min_bytes=MIN_BYTES, deadline_s=20.0), network()
    for missing in (0, 1, 3):
        with offload:
            loss = net(batch()).square().mean()
        drained(offload)
        asked = failures = 0
        while True:
            net.zero_grad()
            try:
                loss.backward(retain_graph=True)
                break
            except MemoryError:
                failures += 1
        assert min(missing, 1) <= failures <= missing
        assert_right([p.grad for p in net.parameters() if p.grad is not None])
        del loss
    offload.close()
    assert offload.stats().live_bytes == 0


def test_a_limit_that_is_too_small_names_the_smallest_that_works(tmp_path: Path) -> None:
    net = network()
    small = save_on_disk([tmp_path], memory_limit=8192, min_bytes=MIN_BYTES)
    with pytest.raises(LimitTooSmallError, match="the smallest that works for this model and batch is") as caught:
        steps(net, small)
    small.close()
    enough = save_on_disk([tmp_path], memory_limit=caught.value.smallest_bytes, min_bytes=MIN_BYTES)
    for _ in range(3):
        assert_right(step(net, enough))
    assert enough.stats().peak_bytes <= caught.value.smallest_bytes
    enough.close()


def test_a_limit_is_kept_from_the_first_pass_on_or_refused_with_one_that_is(tmp_path: Path) -> None:
    """Storages of 8 and of 32 KiB: the large ones come when the room that is left was made for small ones."""
    torch.manual_seed(0)
    widths = (64, 64, 64, 256, 64, 64, 256, 256, 64)
    layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(widths)]
    net, kept, refused = nn.Sequential(*layers), set(), {}
    for limit_bytes in range(16 << 10, 144 << 10, 8 << 10):
        offload = save_on_disk([tmp_path], memory_limit=limit_bytes, min_bytes=MIN_BYTES)
        try:
            steps(net, offload)
        except LimitTooSmallError as error:
            refused[limit_bytes] = error.smallest_bytes
        else:
            assert offload.stats().peak_bytes <= limit_bytes
            kept.add(limit_bytes)
        offload.close()
    assert all(limit_bytes < smallest_bytes for limit_bytes, smallest_bytes in refused.items())
    assert min(kept) == refused[max(refused)]


@pytest.mark.parametrize("spilled", [True, False], ids=["after it was written", "while it is in memory"])
def test_a_change_in_place_is_refused_with_the_modules_name(tmp_path: Path, spilled: bool) -> None:
    class Spoils(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.tanh(x)
            y.mul_(2)  # backward of tanh needs y
            return y

    offload = save_on_disk([tmp_path], min_bytes=MIN_BYTES if spilled else 1 << 30)
    net = nn.Sequential(nn.Linear(64, 64), Spoils())
    with offload:
        loss = net(batch()).sum()
    with pytest.raises(ModifiedInPlaceError, match=r"saved for backward in 1 \(Spoils\) was changed in place"):
        loss.backward()
    del loss
    offload.close()


def test_backward_after_close_is_refused(tmp_path: Path) -> None:
    offload = save_on_disk([tmp_path], min_bytes=MIN_BYTES)
    with offload:
        loss = network()(batch()).square().mean()
    offload.close()
    with pytest.raises(SpillReadError, match="close it after the last backward"):
        loss.backward()


class Kernel:
    """The kernel's calls, which go wrong from the call `after` on: on real files, through the real engine."""

    def __init__(self, after: int) -> None:
        self._after = after
        self._calls = 0

    def is_due(self) -> bool:
        self._calls += 1
        return self._calls > self._after

    def full(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        if self.is_due():
            raise OSError(errno.ENOSPC, "No space left on device")
        return os.pwritev(fd, views, offset)

    def torn(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        """A write of which only the first page reached the drive, which says nothing of it."""
        if not self.is_due():
            return os.pwritev(fd, views, offset)
        os.pwritev(fd, [views[0][:4096]], offset)
        return sum(view.nbytes for view in views)

    def broken(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        if self.is_due():
            raise OSError(errno.EIO, "Input/output error")
        return os.preadv(fd, views, offset)


def on_disk(tmp_path: Path, calls: Calls, memory_limit: int | None = None) -> ActivationOffload:
    config = OffloadConfig(dirs=(str(tmp_path),), memory_limit=memory_limit, min_bytes=MIN_BYTES, deadline_s=20.0)
    return ActivationOffload(config, engines=[PosixEngine(tmp_path, calls=calls)])


def test_a_drive_that_fills_up_between_two_steps_is_said_once_and_the_step_before_was_right(tmp_path: Path) -> None:
    offload, net = on_disk(tmp_path, Calls(pwritev=Kernel(after=40).full), memory_limit=6 * 8192), network()
    right = 0
    said = ""
    for _ in range(20):
        try:
            found = step(net, offload)
        except SpillWriteError as error:
            said = str(error)
            break
        assert_right(found)
        right += 1
    assert right >= 1, "it worked before the drive was full"
    assert "is full" in said
    assert list(tmp_path.iterdir()) == []
    offload.close()


@pytest.mark.parametrize(
    ("calls", "error"),
    [(Calls(pwritev=Kernel(after=3).torn), CorruptSpillError), (Calls(preadv=Kernel(after=3).broken), SpillReadError)],
    ids=["a torn write", "EIO"],
)
def test_what_a_drive_lost_is_noticed_when_it_is_read_and_computed_again_elsewhere(
    tmp_path: Path, calls: Calls, error: type[OffloadError]
) -> None:
    offload, net = on_disk(tmp_path, calls), network()
    with offload:
        loss = net(batch()).square().mean()
    drained(offload)
    with pytest.raises(error, match="compute the micro-batch again"):
        loss.backward()
    del loss
    offload.close()
    again = save_on_disk([tmp_path], min_bytes=MIN_BYTES)
    assert_right(step(net, again))
    again.close()


KILLED = """
import itertools, os, signal, sys, time, torch
from itertools import pairwise
from pathlib import Path
from torch import nn
from elastrain.offload import save_on_disk
from elastrain.offload.activations import mover
from elastrain.offload.drives.residency import State

state = State(sys.argv[2])
torch.set_num_threads(1)
apply = mover.Mover.apply
def die_there(self, record, event):
    commands = apply(self, record, event)
    if record.state is state:
        os.kill(os.getpid(), signal.SIGKILL)
    return commands
mover.Mover.apply = die_there
net = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)])
offload = save_on_disk([sys.argv[1]], memory_limit=6 * 8192, min_bytes=1024)
until_s = time.monotonic() + 20  # some states are seen now and then only
for number in itertools.takewhile(lambda _: time.monotonic() < until_s, itertools.count()):
    with offload:
        loss = net(torch.randn(32, 64)).square().mean()
    if number % 3 < 2:  # every third graph is dropped while its tensors are on their way
        loss.backward()
    del loss
"""


@pytest.mark.parametrize("state", ["writing", "forwarded", "spilled", "reading", "reloaded", "leaving", "dropped"])
def test_nothing_is_left_on_disk_after_sigkill(tmp_path: Path, state: str) -> None:
    ran = warm.run(
        [sys.executable, "-c", KILLED, str(tmp_path), state],
        timeout=DEADLINE_S,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


TRAINS = """
import resource, sys, torch
from torch import nn
from elastrain.offload import SpillWriteError, save_on_disk

torch.set_num_threads(1)
if sys.argv[2] != "0":
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
limit = int(sys.argv[3]) or None
torch.manual_seed(0)
net = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(24)])
x = torch.randn(4096, 64)  # 1 MiB each, 24 MiB and more in all
net(x).square().mean().backward()
expected = [p.grad.clone() for p in net.parameters()]
offload = save_on_disk([sys.argv[1]], memory_limit=limit, min_bytes=1024)
try:
    for _ in range(3):
        net.zero_grad()
        with offload:
            loss = net(x).square().mean()
        for device in offload._open().devices:  # let every write end: no tensor is handed back on its way
            device.queue.close()
            device.queue = type(device.queue)("again", threads=1)
        loss.backward()
        assert all(torch.equal(p.grad, e) for p, e in zip(net.parameters(), expected))
except SpillWriteError as error:
    print("refused:", error)
else:
    assert offload.stats().spilled_bytes > 0
    print("right:", *offload.stats().faults)
"""
MB = 1 << 20


def trains(directory: Path, *, file_limit: int, memory_limit: int, under: tuple[str, ...] = ()) -> str:
    ran = warm.run(
        [*under, sys.executable, "-c", TRAINS, str(directory), str(file_limit), str(memory_limit)],
        timeout=DEADLINE_S,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_a_limit_on_the_size_of_files_is_a_full_drive(tmp_path: Path) -> None:
    """The kernel itself refuses, in a real file."""
    told = trains(tmp_path, file_limit=6 * MB, memory_limit=0)
    assert told.startswith("right:")
    assert "is full ([Errno 27] File too large" in told
    told = trains(tmp_path, file_limit=6 * MB, memory_limit=8 * MB)
    assert told.startswith("refused:")
    assert "free space there, or name another directory" in told
    assert list(tmp_path.iterdir()) == []


MOUNTED = 'mount -o loop "$0" "$1" && shift && exec "$@"'


def test_a_file_system_that_is_really_full(tmp_path: Path) -> None:
    """A small one of its own, mounted where only the process that fills it sees it."""
    image, mounted = tmp_path / "image", tmp_path / "mounted"
    mounted.mkdir()
    with image.open("wb") as file:
        file.truncate(305 * MB)  # 256 MB of it are left to others
    try:
        subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", str(image)], check=True, timeout=DEADLINE_S)
        subprocess.run(
            ["unshare", "-m", "sh", "-c", MOUNTED, str(image), str(mounted), "true"],
            check=True,
            timeout=DEADLINE_S,
            capture_output=True,
        )
    except (OSError, subprocess.CalledProcessError) as why:
        pytest.skip(f"no file system can be mounted here: {why}")
    under = ("unshare", "-m", "sh", "-c", MOUNTED, str(image), str(mounted))
    told = trains(mounted, file_limit=0, memory_limit=0, under=under)
    assert told.startswith("right:")
    assert "is full" in told
    told = trains(mounted, file_limit=0, memory_limit=8 * MB, under=under)
    assert told.startswith("refused:")
    assert "is full" in told
    assert list(mounted.iterdir()) == []
