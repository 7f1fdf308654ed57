"""A probe in processes of its own: one reads another one's device memory while that one is killed in a kernel.

The reading process must keep its device, and must read the same afterwards. The process that asks for the probe takes
part in nothing, so its device is safe.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import torch

from elastrain.device.device_sharing import DeviceMapping, DeviceSharing, SharingError, made

_READS = 32
"""Reads of the exporter's memory that are under way when it is killed."""
_LONG_CYCLES = 1 << 40
"""Cycles of a kernel that is still running when its process is killed: minutes."""
_SHORT_CYCLES = 100_000_000
"""Cycles of a kernel of the reader: some 50 ms, in which the exporter is killed."""
_ENDS_S = 5.0
"""Seconds in which a killed probe should end."""
_PR_SET_PDEATHSIG = 1
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from elastrain.device import sharing_probe as p; p.main()"
)


@dataclass(frozen=True, kw_only=True)
class ReadableDevices:
    """The result of a probe."""

    readable: tuple[int, ...] = ()
    """Numbers of the devices whose memory was read, also after the death of its owner."""
    reason: str = ""
    """Cause of the failure, if nothing is readable."""


def probe(provider: str, index: int, limit_s: float) -> ReadableDevices:
    """Run the probe for the device with this number. Returns what it found; nothing is raised.

    Args:
        provider: The device's entry in `elastrain.device.device_sharing.PROVIDERS`.
        index: Number of the device that reads.
        limit_s: Seconds after which the probe has failed.
    """
    command = [sys.executable, "-P", "-c", _START, json.dumps(sys.path), provider, str(index), str(os.getpid())]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        output, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return ReadableDevices(reason=f"the probe of shared device memory did not end within {limit_s:.0f} s")
    finally:
        _kill(process)
    if process.returncode:
        told = errors.strip().splitlines() or [f"exit code {process.returncode}"]
        return ReadableDevices(reason=f"the probe of shared device memory failed: {told[-1]}")
    return ReadableDevices(readable=tuple(json.loads(output.splitlines()[-1])))


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill what is left of the probe's process group, with the exporter. A process in a driver stays for a while."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=_ENDS_S)


def main() -> None:
    """Be the probe: fork the exporter before a device is used, and read its memory before and after its death.

    The kernel kills this process with the one that asked for the probe. The exporter ends with its socket.
    """
    provider, index, asker = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != asker:
        os._exit(1)
    ours, theirs = socket.socketpair()
    exporter = os.fork()
    if not exporter:
        ours.close()
        export(made(provider, index), theirs)
    theirs.close()

    def kill() -> None:
        os.kill(exporter, signal.SIGKILL)
        os.waitpid(exporter, 0)

    try:
        readable = read_on(made(provider, index), ours, kill)
    except SharingError as error:
        sys.exit(str(error))
    sys.stdout.write(json.dumps(readable))
    sys.stdout.flush()
    os._exit(0)  # a device's libraries may take long for their end


def export(sharing: DeviceSharing, sock: socket.socket) -> NoReturn:
    """Export memory of each device, submit kernels that do not end, and wait to be killed. Never returns.

    Args:
        sharing: Shareable memory of the device on which the kernels run.
        sock: UNIX socket to the process that reads.
    """
    shared: dict[int, tuple[int, DeviceMapping]] = {}
    for index in range(len(sharing.identities)):
        try:
            shared[index] = sharing.create(sharing.page_bytes, index)
        except SharingError:  # of another device, which this one does not reach
            if index == sharing.index:
                raise
            continue
        _numbers(shared[index][1]).copy_(_pattern(sharing, index))
    own = _numbers(shared[sharing.index][1])
    module = torch.get_device_module(own.device)
    module.synchronize()
    socket.send_fds(sock, [bytes(shared)], [fd for fd, _ in shared.values()])
    if sock.recv(1):
        private = torch.zeros_like(own)
        module._sleep(_LONG_CYCLES)
        private.add_(1)
        sock.send(b"k")
        sock.recv(1)  # until this process is killed, or the reader has ended
    os._exit(1)


def read_on(sharing: DeviceSharing, sock: socket.socket, kill: Callable[[], object]) -> list[int]:
    """Return the numbers of devices whose memory is read before, during and after the exporter's death.

    Raises SharingError if that is not so for the memory of this process's own device.

    Args:
        sharing: Shareable memory of this process's device.
        sock: UNIX socket to the process in `export`.
        kill: Kills that process, and waits for its end.
    """
    mappings = _open(sharing, sock)
    readable = [index for index, mapping in mappings.items() if _is_whole(sharing, mapping, index)]
    if sharing.index not in readable:
        raise SharingError("another process's device memory was read with wrong values")
    sock.send(b"g")
    if sock.recv(1) != b"k":
        raise SharingError("the process that exports device memory has ended")
    torch.get_device_module(_numbers(mappings[sharing.index]).device)._sleep(_SHORT_CYCLES)
    under_way = [(index, _numbers(mappings[index]).clone()) for _ in range(_READS) for index in readable]
    kill()
    under_way += [(index, _numbers(mappings[index]).clone()) for _ in range(_READS) for index in readable]
    if not all(torch.equal(made.cpu(), _pattern(sharing, index)) for index, made in under_way):
        raise SharingError("the device memory of a killed process was read with wrong values")
    return readable


def _open(sharing: DeviceSharing, sock: socket.socket) -> dict[int, DeviceMapping]:
    """Return what the exporter has shared and this process maps, by the number of the device."""
    indexes, fds, _, _ = socket.recv_fds(sock, len(sharing.identities), len(sharing.identities))
    if not fds:
        raise SharingError("the process that exports device memory has ended")
    mappings: dict[int, DeviceMapping] = {}
    for index, fd in zip(indexes, fds, strict=True):
        try:
            mappings[index] = sharing.open(fd, sharing.page_bytes)
        except SharingError:  # of another device, which this one does not reach
            if index == sharing.index:
                raise
        finally:
            os.close(fd)
    return mappings


def _numbers(mapping: DeviceMapping) -> torch.Tensor:
    return mapping.bytes_at(0, mapping.size_bytes).view(torch.int32)


def _pattern(sharing: DeviceSharing, index: int) -> torch.Tensor:
    return torch.arange(sharing.page_bytes // 4, dtype=torch.int32) * 7 + index


def _is_whole(sharing: DeviceSharing, mapping: DeviceMapping, index: int) -> bool:
    try:
        return torch.equal(_numbers(mapping).cpu(), _pattern(sharing, index))
    except SharingError:
        if index == sharing.index:
            raise
        return False  # torch does not use another device's memory as it lies
