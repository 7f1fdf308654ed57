"""The decision if peers on this host read the device's memory in place, by one probe per device and run."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elastrain.base.processes import say
from elastrain.comm.shm.device_segments import DeviceShare
from elastrain.device.device_sharing import PROVIDERS, DeviceSharing, SharingError, domain_of, sharing_of
from elastrain.device.port import DevicePort
from elastrain.device.sharing_probe import probe

PROBE_S = 60.0
"""Seconds that the probe may take. Two processes start the device in it."""
Log = Callable[..., None]


def shared_device_memory(port: DevicePort, run_dir: Path | None, log: Log, *, is_limited: bool) -> DeviceShare | None:
    """Return the memory of the device that peers read, or None if everything is carried. The journal gets the reason.

    Args:
        port: Device of the model.
        run_dir: The run's folder, which keeps the probe's result. None: there are no peers.
        log: Writer of the journal.
        is_limited: Whether a limit bounds the device's memory. What peers read would be beyond it.
    """
    if port.is_host or run_dir is None:
        return None
    domain, reason = "", "the device has a memory limit"
    if not is_limited:
        try:
            sharing = sharing_of(port)
            readable, reason = _probed_once(sharing, PROVIDERS[port.device.type], run_dir)
            domain = domain_of(sharing, readable)
        except (SharingError, OSError) as error:
            reason = str(error)
    if not domain:
        log("device_memory", read_in_place=False, reason=reason)
        return None
    log("device_memory", read_in_place=True, devices=len(readable), domain=domain)
    share = DeviceShare(sharing, domain, port.mem_get_info)
    share.tell_full = lambda size_bytes: log("device_memory_full", bytes=size_bytes)
    return share


def _probed_once(sharing: DeviceSharing, provider: str, run_dir: Path) -> tuple[tuple[int, ...], str]:
    """Return the probe's result for this process's device. The first worker on the device probes, others wait.

    Later workers find the result of this run, so that all workers on a device agree.
    """
    name = hashlib.sha256(sharing.identities[sharing.index].encode()).hexdigest()[:16]
    path = run_dir / f"device-memory-{name}.json"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # it ends with its process, too
        if text := file.read():
            return _read(text)
        found = probe(provider, sharing.index, PROBE_S)
        if found.reason:
            say(f"{found.reason}: what travels between members of this host is copied through host memory")
        json.dump({"readable": found.readable, "reason": found.reason}, file)
        return found.readable, found.reason


def _read(text: str) -> tuple[tuple[int, ...], str]:
    """Return the result that another worker has written. A part of one counts as a failure."""
    try:
        told: dict[str, Any] = json.loads(text)
        return tuple(map(int, told["readable"])), str(told["reason"])
    except (ValueError, KeyError, TypeError):
        return (), "a worker was killed while it wrote the probe's result"
