"""The places for what leaves a member's memory: a tier of host memory in a job on a device, and drives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import msgspec

from elastrain.device.port import DevicePort
from elastrain.errors import ConfigError
from elastrain.memory.memory_budget import Outside
from elastrain.offload.activations.hooks import ActivationOffload, OffloadConfig
from elastrain.offload.drives.device import HOLES_SHARE, Device
from elastrain.offload.drives.gds import GdsEngine
from elastrain.offload.drives.port import HOST_IO, OWN_COPIES, IoEngine
from elastrain.offload.drives.posix import PosixEngine
from elastrain.offload.drives.sharing import shared
from elastrain.offload.drives.ways import DriveWay, together, way_to
from elastrain.offload.errors import OffloadConfigError
from elastrain.offload.lifetimes.pieces.cuda import host_tier
from elastrain.offload.planning.profile import Occupancy, PassProfile, Profile
from elastrain.runtime.memory.process_memory import MemoryLimit
from elastrain.runtime.tensors.executor import Executor

TIER, DRIVES = "host memory", "disk"
"""Names of the places in sentences."""


@dataclass(frozen=True, kw_only=True)
class SpillPlaces:
    """The open places, and the offload of activations to them; None where nothing can leave.

    Activations and optimizer states share the tier. On each drive they have a slab each.
    """

    offload: ActivationOffload | None = None
    drives: tuple[Device, ...] = ()
    """Drives of optimizer states."""
    tier: Device | None = None
    told: Outside = field(default_factory=Outside)
    """The places, without their rate."""

    @property
    def is_there(self) -> bool:
        """True if activations and states can leave memory."""
        return self.offload is not None

    def outside(self) -> Outside:
        """Return the places as decisions need them. The rate is the drives', or the tier's where there are none."""
        slow = self.drives or (() if self.tier is None else (self.tier,))
        return replace(self.told, bytes_per_s=sum(each.rate_bytes_per_s() for each in slow) or 1.0)

    def last_pass(self) -> PassProfile | None:
        """Return the profile of the last forward and backward, or None before the first, and without any place."""
        return self.offload.stats().last if self.offload is not None else None

    def tell_states(self, log: Callable[..., None]) -> None:
        """Log what optimizer states have moved to each drive, and what moved the bytes."""
        for used in (stats for drive in self.drives if (stats := drive.stats()).written_bytes):
            moved = {"written_bytes": used.written_bytes, "read_bytes": used.read_bytes}
            log("states_moved", to=used.name, by=used.moved_by or HOST_IO, **moved)

    def close(self) -> None:
        """Give the space back. What lies there is lost."""
        if self.offload is not None:
            self.offload.close()
        for drive in (*self.drives, *(() if self.tier is None else (self.tier,))):
            drive.close()


def outside_of(limit: MemoryLimit) -> Outside:
    """Return the places of a limit, before any is open."""
    tier_bytes, has_drives = limit.host_tier_bytes, bool(limit.directories)
    return Outside(
        name=" and ".join([TIER] * (tier_bytes > 0) + [DRIVES] * has_drives) or DRIVES,
        room_bytes=None if has_drives or not tier_bytes else int(tier_bytes * (1 - HOLES_SHARE)),
    )


def open_places(
    limit: MemoryLimit,
    member: str,
    run_dir: Path | None,
    describe: Callable[[Profile], Profile],
    port: DevicePort,
    log: Callable[..., None],
) -> SpillPlaces:
    """Open the directories and the tier of a limit, and log what moves the bytes of the device to each directory.

    Workers of a node share drives by `run_dir`. Raises ConfigError for a directory that is unfit, and for a tier that
    the machine has no memory for.
    """
    if not limit.directories and not limit.host_tier_bytes:
        return SpillPlaces()
    try:
        config = OffloadConfig(
            dirs=limit.directories, run_dir=run_dir, member=member, has_tier=limit.host_tier_bytes > 0
        )
        ways = _ways(limit, port, run_dir)
        for directory, way in ways.items() if not port.is_host else ():
            log("drive_way", directory=directory, by=way.moved_by, reason=way.reason)
        make = partial(_engine, limit, run_dir)
        tier = host_tier(limit.host_tier_bytes) if limit.host_tier_bytes else None
        opened: list[IoEngine | Device] | None = None
        if tier is not None or limit.calls is not None or any(way.is_direct for way in ways.values()):
            opened = [*([] if tier is None else [tier]), *(make(*each) for each in ways.items())]
        offload = ActivationOffload(config, engines=opened, describe=describe)
        drives = tuple(Device(make(*each), threads=0) for each in ways.items())
    except OffloadConfigError as error:
        raise ConfigError(str(error)) from None
    return SpillPlaces(offload=offload, drives=drives, tier=tier, told=outside_of(limit))


def _ways(limit: MemoryLimit, port: DevicePort, run_dir: Path | None) -> dict[str, DriveWay]:
    """Return the way of the device's bytes to each directory of a limit."""
    if limit.calls is not None and not port.is_host:
        own = DriveWay(moved_by=OWN_COPIES, reason="faults on request strike the host's own calls")
        return dict.fromkeys(limit.directories, own)
    return together({each: way_to(each, port, run_dir) for each in limit.directories})


def _engine(limit: MemoryLimit, run_dir: Path | None, directory: str, way: DriveWay) -> IoEngine:
    if limit.calls is not None:
        return shared(PosixEngine(directory, calls=limit.calls), directory, run_dir)
    return GdsEngine(directory, way.moved_by) if way.is_direct else shared(PosixEngine(directory), directory, run_dir)


def with_other_parts(activations: Profile, executor: Executor, base_bytes: int, drives: Sequence[Device]) -> Profile:
    """Return the profile of the activations, completed by the other memory that a member holds."""
    memory_bytes, disk_bytes = executor.states_bytes()
    places = (
        Occupancy(what="parameters", memory_bytes=executor.model.nbytes, disk_bytes=0),
        Occupancy(what="gradients and sums", memory_bytes=executor.gradients_bytes(), disk_bytes=0),
        Occupancy(what="optimizer shards", memory_bytes=memory_bytes, disk_bytes=disk_bytes),
        Occupancy(what="everything else", memory_bytes=base_bytes, disk_bytes=0),
    )
    devices = (*activations.stats.devices, *(drive.stats() for drive in drives))
    stats, all_places = replace(activations.stats, devices=devices), (*activations.places, *places)
    return msgspec.structs.replace(activations, stats=stats, places=all_places)
