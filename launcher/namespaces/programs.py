"""The programs that make and change networks, if they are there: `ip` and `tc` (iproute2), `nft` (nftables)."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess

from elastrain.errors import ElastrainError

_PACKAGES = {"ip": "iproute2", "tc": "iproute2", "nft": "nftables"}
_TIMEOUT_S = 10.0
_CLONE_NEWNET = 0x40000000


class NetworkError(ElastrainError):
    """A network could not be made or changed: it says what was tried, and what the kernel answered."""


def lacking() -> str | None:
    """Why there can be no hosts of network namespaces here, and what to do; None if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root: start it as root, or leave --netns out"
    missing = sorted({package for program, package in _PACKAGES.items() if shutil.which(program) is None})
    if missing:
        return f"network namespaces need the programs ip, tc and nft: install {' and '.join(missing)}"
    name = f"elastrain-{os.getpid()}-try"
    try:
        ip("netns", "add", name)
        ip("netns", "del", name)
    except NetworkError as error:
        return f"this machine does not let network namespaces be made ({error}): leave --netns out"
    return None


def ip(*words: str, namespace: str | None = None) -> None:
    """Raises NetworkError."""
    _run("ip", *(("-n", namespace) if namespace else ()), *words)


def tc(*words: str, namespace: str) -> None:
    """Raises NetworkError."""
    _run("tc", "-n", namespace, *words)


def nft(commands: str, *, namespace: str) -> None:
    """All of the commands, or none. Raises NetworkError."""
    _run("ip", "netns", "exec", namespace, "nft", "-f", "-", given=commands)


def enter(namespace: str) -> None:
    """Move the calling thread there, and all that it starts from now on. Sockets stay where they were made.

    Raises NetworkError.
    """
    try:
        descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise NetworkError(f"there is no network namespace {namespace} ({error})") from None
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET) != 0:
            raise NetworkError(f"network namespace {namespace} cannot be entered: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(descriptor)


def _run(*command: str, given: str = "") -> None:
    try:
        done = subprocess.run(
            command, input=given, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, cwd="/"
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NetworkError(f"{' '.join(command)}: {error}") from None
    if done.returncode != 0:
        raise NetworkError(f"{' '.join(command)}: {done.stderr.strip() or f'it ends with {done.returncode}'}")
