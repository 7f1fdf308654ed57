"""Memory limits of a job on a device: the device's meter, states that leave it, and limits that are refused."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from elastrain.device import device_of
from elastrain.device.port import DevicePort
from elastrain.device.same_memory import HOST
from elastrain.errors import ConfigError
from elastrain.offload.drives.device import Device
from elastrain.offload.drives.host import HostEngine
from elastrain.offload.drives.ways import DriveWay
from elastrain.runtime.memory import spill_places
from elastrain.runtime.memory.device_meter import DeviceMeter
from elastrain.runtime.memory.process_memory import MemoryLimit
from elastrain.runtime.model.kernels import kernel_digests
from elastrain.runtime.tensors.spilled_states import StateSpill
from elastrain.snapshot.shard_state import ShardState
from elastrain.snapshot.states_on_host import StatesOnHost
from elastrain.snapshot.store import SnapshotStore
from tests.support.memory_engine import MemoryEngine

NUMEL = 192


def late_port() -> DevicePort:
    return device_of(torch.device("late"))


def _states() -> tuple[SnapshotStore[int], dict[int, int]]:
    """Return a store in which shards 0 and 1 are a primary's, and 2 and 3 a backup's, and the digest of each."""
    port, digests = late_port(), dict[int, int]()
    model = [torch.linspace(shard, shard + 1, NUMEL).to(port.device) for shard in range(4)]
    kept: SnapshotStore[int] = SnapshotStore(lambda shard: model[shard])
    kept.keep_backups_in(StatesOnHost(port))
    kept.bound.update((0, 1))
    for shard, home in enumerate(model):
        moments = {"exp_avg": torch.linspace(0, shard + 1, 100).to(port.device), "step": torch.tensor(3.0)}
        parameters = home if shard in kept.bound else home.clone()
        state = ShardState(shard=shard, version=7, parameters=parameters, pieces=[moments])
        digests[shard] = state.digest()
        kept[shard] = state
    return kept, digests


def _device(capacity_bytes: int) -> Device:
    return Device(MemoryEngine(capacity_bytes=1 << 20), quota_bytes=capacity_bytes, threads=0)


def test_states_leave_the_device_for_the_tier_first_and_then_for_a_drive() -> None:
    kept, digests = _states()
    tier, drive = Device(HostEngine(6000), quota_bytes=6000, threads=0), _device(1 << 20)
    before = kept.memory_bytes()
    kept.use(StateSpill([drive], port=late_port(), tier=tier), frozenset({0, 1}))
    assert kept.memory_bytes() == 0 < before
    assert (tier.used_bytes > 0, drive.used_bytes > 0) == (True, True)  # the tier has room for one state only
    assert {shard: kept[shard].digest() for shard in kept} == digests
    assert kept[0].parameters.device.type == "late" and kept[0].parameters.data_ptr() == kept._home(0).data_ptr()
    kept[0] = kept[0]
    assert {shard: kept[shard].digest() for shard in kept} == digests
    kept.use(StateSpill([drive], port=late_port(), tier=tier), frozenset())
    assert (kept.memory_bytes(), tier.used_bytes, drive.used_bytes) == (before, 0, 0)
    assert {shard: kept[shard].digest() for shard in kept} == digests


class LateEngine(MemoryEngine):
    """Takes tensors of the device, as KvikIO takes those of CUDA."""

    moved_by = "GPUDirect"

    def __init__(self) -> None:
        super().__init__(capacity_bytes=1 << 20)
        self.moves: list[tuple[str, int]] = []

    def write_cuda(self, offset_bytes: int, memory: torch.Tensor) -> None:
        assert memory.device.type == "late"
        self.moves.append(("write", memory.nbytes))
        self.write(offset_bytes, [memoryview(memory.cpu().numpy())])

    def read_cuda(self, offset_bytes: int, memory: torch.Tensor) -> None:
        host = torch.empty(memory.nbytes, dtype=torch.uint8)
        self.read(offset_bytes, [memoryview(host.numpy())])
        self.moves.append(("read", memory.nbytes))
        memory.copy_(host)


def test_a_limit_opens_kvikio_for_activations_and_states_where_the_probe_recommends_it() -> None:
    told: list[tuple[str, dict[str, str]]] = []
    engines: list[LateEngine] = []

    def opened(directory: str, moved_by: str) -> LateEngine:
        engines.append(LateEngine())
        return engines[-1]

    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory(dir=Path.cwd()) as one:
        patch.setattr(spill_places, "way_to", lambda *_: DriveWay(moved_by="GPUDirect", reason="the probe took 0.5 s"))
        patch.setattr(spill_places, "GdsEngine", opened)
        places = spill_places.open_places(
            MemoryLimit(limit_bytes=1 << 30, directories=(one,)),
            "m0",
            None,
            lambda profile: profile,
            late_port(),
            lambda event, **values: told.append((event, values)),
        )
        assert places.offload is not None
        opened_for_activations = [each.engine for each in places.offload._open_devices()]
        places.close()
    assert told == [("drive_way", {"directory": one, "by": "GPUDirect", "reason": "the probe took 0.5 s"})]
    assert [*opened_for_activations, *(each.engine for each in places.drives)] == engines


def test_backups_leave_host_memory_for_a_drive_and_their_roles_may_change_there() -> None:
    kept, digests = _states()
    drive, far = _device(1 << 20), _device(1 << 20)
    before = kept.host_bytes()
    kept.use(StateSpill([far], port=late_port()), frozenset({0}))
    kept.use(StateSpill([drive], port=late_port()), frozenset({2}), backups=True)
    assert 0 < kept.host_bytes() < before and drive.used_bytes > 0
    assert {shard: kept.copy_to_host(shard).digest() for shard in kept} == digests
    kept.bound.add(2)
    kept[2] = kept[2]
    assert drive.used_bytes == 0  # a primary's state lies on the device
    kept.bound.discard(0)
    kept[0] = kept.copy(0)
    assert far.used_bytes == 0  # a backup's state lies in host memory
    assert {shard: kept[shard].digest() for shard in kept} == digests


def test_the_meter_of_a_device_counts_its_tensors_and_no_host_memory() -> None:
    meter = DeviceMeter(late_port())
    before = meter.now_bytes
    held = torch.zeros(1 << 20, device="late")
    del held
    torch.zeros(1 << 22)
    peak = meter.take()
    assert peak.least_bytes == peak.most_bytes == before + (4 << 20)
    assert meter.take().most_bytes == before


def test_accounted_bytes_that_are_freed_within_a_step_are_not_taken_for_something_else() -> None:
    states = [torch.zeros(1 << 20, device="late")]
    meter = DeviceMeter(late_port(), lambda: sum(each.nbytes for each in states))
    meter.take()
    states.clear()
    states.append(torch.zeros(1 << 18, device="late"))
    besides = meter.take().besides_bytes
    passing = torch.zeros(1 << 19, device="late")
    meter.mark()
    del passing
    assert besides is not None
    assert meter.take().besides_bytes == besides + (2 << 20)
    assert meter.take().besides_bytes == besides


def test_the_fixed_kernels_of_a_start_leave_room_for_small_limits() -> None:
    meter = DeviceMeter(late_port())
    kernel_digests(late_port().device)
    assert meter.take().most_bytes < 20e6


def test_a_limit_larger_than_the_device_is_refused() -> None:
    port = late_port()
    with pytest.raises(ConfigError, match=r"--memory-limit allows 1,152,\S+ bytes of device memory, and late:0 has"):
        MemoryLimit(limit_bytes=1 << 60).on(port)
    assert MemoryLimit(limit_bytes=1 << 20).on(port).limit_bytes == 1 << 20
    assert MemoryLimit(limit_bytes=None, host_limit_bytes=1 << 40).on(port).limit_bytes == port.mem_get_info()[1]


def test_a_tier_without_a_device_is_refused_and_both_limits_bound_one_memory() -> None:
    with pytest.raises(ConfigError, match="--host-tier is host memory for what leaves a device, and the model is on"):
        MemoryLimit(limit_bytes=1 << 30, host_tier_bytes=1 << 20).on(HOST)
    with pytest.raises(ConfigError, match="give --memory-limit too"):
        MemoryLimit.of(None, (), (None, 1 << 20))
    both = MemoryLimit(limit_bytes=1 << 30, host_limit_bytes=1 << 20).on(HOST)
    assert (both.limit_bytes, both.host_limit_bytes) == (1 << 20, None)
