"""The way of a device's bytes to a directory: by KvikIO where it is faster, else by our own pinned copies.

`python -m elastrain.offload.drives.ways DIRECTORY …` prints the way to each directory as JSON, for `elastrain doctor`.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import xxhash

from elastrain.device import DevicePort, current_device
from elastrain.offload.drives import gds
from elastrain.offload.drives.port import HOST_IO, OWN_COPIES


@dataclass(frozen=True, kw_only=True)
class DriveWay:
    """A way of a device's bytes to a directory, and the reason for it."""

    moved_by: str
    """A name of `gds.WAYS`, OWN_COPIES, or HOST_IO where there is no device."""
    reason: str

    @property
    def is_direct(self) -> bool:
        """True if KvikIO moves the bytes."""
        return self.moved_by in gds.WAYS


def faster(found: gds.Probed) -> DriveWay:
    """Return the way that the probe of a directory recommends."""
    if found.why_not is not None:
        return DriveWay(moved_by=OWN_COPIES, reason=found.why_not)
    is_direct = found.seconds <= found.own_seconds
    return DriveWay(
        moved_by=found.moved_by if is_direct else OWN_COPIES,
        reason=f"the probe took {found.seconds:.3f} s by {found.moved_by}, and {found.own_seconds:.3f} s by "
        "our own pinned copies",
    )


def way_to(directory: str, port: DevicePort, run_dir: Path | None = None) -> DriveWay:
    """Return the way of the bytes of a device to a directory. Workers of a node with a run folder probe it once."""
    if port.is_host:
        return DriveWay(moved_by=HOST_IO, reason="there is no device whose bytes would have to be copied")
    if port.device.type != "cuda" or torch.version.hip is not None:
        return DriveWay(moved_by=OWN_COPIES, reason=f"KvikIO is for CUDA only, and this device is {port.device}")
    return _found_once(directory, run_dir, lambda: faster(gds.probe(directory)))


def together(ways: Mapping[str, DriveWay]) -> dict[str, DriveWay]:
    """Return the ways that one process can use at once, because KvikIO's settings hold for a whole process."""
    first = next((way.moved_by for way in ways.values() if way.is_direct), "")
    other = DriveWay(
        moved_by=OWN_COPIES, reason=f"KvikIO moves the bytes to another directory by {first}, and not to this"
    )
    return {each: other if way.is_direct and way.moved_by != first else way for each, way in ways.items()}


def _found_once(directory: str, run_dir: Path | None, find: Callable[[], DriveWay]) -> DriveWay:
    """Return what the first worker of this node has found, which the others wait for: a probe takes seconds."""
    if run_dir is None:
        return find()
    (folder := run_dir / "offload").mkdir(mode=0o700, exist_ok=True)
    name = f"{platform.node()}-{xxhash.xxh3_64_hexdigest(os.path.realpath(directory).encode())}.way"
    with (folder / name).open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        try:
            return DriveWay(**json.loads(file.read()))
        except (ValueError, TypeError):  # this worker is the first, or the one before was killed while it wrote
            file.truncate(0)
        way = find()
        file.write(json.dumps(asdict(way)))
        return way


def main() -> None:
    """Print the way to each directory that the command line names."""
    port = current_device()
    ways = map(partial(way_to, port=port), sys.argv[1:])
    sys.stdout.write(json.dumps({each: asdict(way) for each, way in zip(sys.argv[1:], ways, strict=True)}))


if __name__ == "__main__":
    main()
