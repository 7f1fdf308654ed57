"""States that were on disk are the states that were put there; what cannot be read is never used."""

from __future__ import annotations

import pytest
import torch

from elastrain.errors import DriveFailedError
from elastrain.offload.drives.device import Device
from elastrain.runtime.tensors.spilled_states import StateSpill
from elastrain.snapshot.shard_state import ShardState
from elastrain.snapshot.store import SnapshotStore
from tests.support.faulty_engines import EngineFaults, FaultyEngine
from tests.support.memory_engine import MemoryEngine

NUMEL = 192
MODEL = [torch.zeros(NUMEL) for _ in range(4)]


def device(*, capacity_bytes: int = 1 << 30, faults: EngineFaults | None = None) -> Device:
    engine = FaultyEngine(MemoryEngine(capacity_bytes=capacity_bytes), faults or EngineFaults())
    return Device(engine, threads=0)


def state(shard: int, *, bound: bool = False) -> ShardState:
    drawn = torch.Generator().manual_seed(shard)
    moments = {"exp_avg": torch.randn(100, generator=drawn), "step": torch.tensor(3.0), "lr": 0.1}
    parameters = MODEL[shard] if bound else torch.randn(NUMEL, generator=drawn)
    return ShardState(shard=shard, version=7, parameters=parameters, pieces=[moments, {}])


def store() -> SnapshotStore[int]:
    return SnapshotStore(lambda shard: MODEL[shard])


@pytest.mark.parametrize("bound", [False, True], ids=["a backup's", "a primary's"])
def test_a_state_comes_back_from_disk_as_it_was(bound: bool) -> None:
    kept = store()
    disk = device()
    kept.use(StateSpill([disk]), frozenset({1}))
    wanted = state(1, bound=bound).digest()
    kept[0], kept[1] = state(0), state(1, bound=bound)
    assert kept[1].digest() == wanted
    assert (kept[1].parameters.data_ptr() == MODEL[1].data_ptr()) == bound
    assert kept.disk_bytes() == (0 if bound else 4 * NUMEL) + 448  # 400 bytes of moments, rounded up
    assert kept.memory_bytes() == state(0).nbytes
    copied = kept.copy(1)
    copied.parameters.add_(1)
    assert kept[1].digest() == wanted
    del kept[1]
    assert disk.used_bytes == 0
    assert list(kept) == [0]


def test_moving_states_out_and_back_changes_no_bit() -> None:
    kept, disk = store(), device()
    for shard in range(4):
        kept[shard] = state(shard, bound=shard == 2)
    digests = {shard: each.digest() for shard, each in kept.items()}
    for outside in ({0, 2}, {2, 3}, set(), {0, 1, 2, 3}, set()):
        kept.use(StateSpill([disk]), frozenset(outside))
        assert {shard: each.digest() for shard, each in kept.items()} == digests
        assert bool(disk.used_bytes) == bool(outside)
    assert kept.memory_bytes() == sum(state(shard).nbytes for shard in range(4)) - MODEL[2].nbytes


def test_what_was_changed_is_there_once_it_is_put_back() -> None:
    kept, disk = store(), device()
    kept.use(StateSpill([disk]), frozenset({0}))
    kept[0] = state(0)
    changed = kept[0]
    changed.parameters.mul_(2)
    assert kept[0].digest() == state(0).digest()
    kept[0] = changed
    assert kept[0].digest() == changed.digest() != state(0).digest()


def test_a_state_moves_between_stores_without_being_read() -> None:
    kept, behind, disk = store(), store(), device(faults=EngineFaults(read_fails_after=0))
    for each in (kept, behind):
        each.use(StateSpill([disk]), frozenset({0}))
    kept[0], behind[1] = state(0), state(0)
    kept.adopt(0, behind, 1)
    assert list(behind) == []
    assert disk.used_bytes == 4096


def test_a_state_that_comes_back_changed_is_refused() -> None:
    kept = store()
    kept.use(StateSpill([device(faults=EngineFaults(flips_after=0))]), frozenset({0}))
    kept[0] = state(0)
    with pytest.raises(DriveFailedError, match=r"shard 0 .other bytes came back"):
        kept[0]


def test_a_device_that_gives_nothing_back_is_named() -> None:
    kept = store()
    kept.use(StateSpill([device(faults=EngineFaults(read_fails_after=0))]), frozenset({0}))
    kept[0] = state(0)
    with pytest.raises(DriveFailedError, match=r"does not give back the optimizer state of shard 0 .*injected fault"):
        kept[0]


def test_a_full_device_is_said_and_the_old_state_stays() -> None:
    kept, disk = store(), device(capacity_bytes=4096)
    kept.use(StateSpill([disk]), frozenset({0, 1}))
    kept[0] = state(0)
    with pytest.raises(DriveFailedError, match="does not take the optimizer state of shard 1"):
        kept[1] = state(1)
    assert kept[0].digest() == state(0).digest()
    assert disk.used_bytes == 4096


def test_states_are_spread_over_several_devices() -> None:
    kept, disks = store(), [device(), device()]
    kept.use(StateSpill(disks), frozenset({0, 1, 2, 3}))
    for shard in range(4):
        kept[shard] = state(shard)
    assert [disk.used_bytes for disk in disks] == [8192, 8192]


def test_the_size_of_the_optimizers_own_state_is_told_in_units_of_parameters() -> None:
    kept = store()
    kept[0] = ShardState(shard=0, parameters=torch.zeros(NUMEL), pieces=[{}])
    assert kept.moments() is None
    kept[0] = ShardState(shard=0, parameters=torch.zeros(NUMEL), pieces=[{"m": torch.zeros(2 * NUMEL)}])
    assert kept.moments() == 2.0
