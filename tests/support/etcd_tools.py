"""What the suites on a real etcd share: a proxy that cuts connections, certificates, users, a server with TLS."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
from pyetcd import etcdrpc as rpc

from elastrain.launcher.simulated.embedded_etcd import EmbeddedEtcd, find_program
from elastrain.launcher.store.etcd import EtcdStore
from elastrain.launcher.store.etcd_config import EtcdConfig
from elastrain.launcher.store.store_thread import Inbox
from tests.support.free_ports import free_ports

WAIT_S = 10.0


def serve_until(inbox: Inbox, reached: Callable[[], bool]) -> None:
    """Deliver what arrives until `reached`; fails after WAIT_S."""
    until_s = time.monotonic() + WAIT_S
    while not reached():
        readable, _, _ = select.select([inbox.fd], [], [], max(0.0, until_s - time.monotonic()))
        assert readable, f"it did not arrive within {WAIT_S} s"
        inbox.deliver()


class Proxy:
    """A TCP proxy in front of an embedded etcd. `deaf`: its answers are swallowed. `cut`: all connections end."""

    def __init__(self, target: str) -> None:
        self._target = target.removeprefix("unix:")
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.deaf = False
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for sock in pair:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.socket(socket.AF_UNIX)
                server.connect(self._target)
                with self._lock:
                    self._pairs.append((client, server))
                threading.Thread(target=self._pump, args=(client, server, False), daemon=True).start()
                threading.Thread(target=self._pump, args=(server, client, True), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if not (answers and self.deaf):
                    sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)


@dataclass(frozen=True, kw_only=True)
class Certificates:
    """One authority; a pair for the server (127.0.0.1) and one for clients. And an authority that signed neither."""

    ca: Path
    server: tuple[Path, Path]
    client: tuple[Path, Path]
    other_ca: Path


def make_certificates(folder: Path) -> Certificates:
    ca, other = _authority(folder, "ca"), _authority(folder, "other")
    return Certificates(
        ca=ca[0], server=_signed(folder, "server", ca), client=_signed(folder, "client", ca), other_ca=other[0]
    )


def _authority(folder: Path, name: str) -> tuple[Path, Path]:
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    _openssl("req", "-x509", *_NEW_KEY, "-keyout", key, "-out", cert, "-days", "2", "-subj", f"/CN={name}")
    return cert, key


def _signed(folder: Path, name: str, ca: tuple[Path, Path]) -> tuple[Path, Path]:
    cert, key, request, more = (folder / f"{name}.{end}" for end in ("pem", "key", "csr", "ext"))
    more.write_text("subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
    _openssl("req", *_NEW_KEY, "-keyout", key, "-out", request, "-subj", f"/CN={name}")
    authority = ("-CA", ca[0], "-CAkey", ca[1], "-CAcreateserial")
    _openssl("x509", "-req", "-in", request, *authority, "-out", cert, "-days", "2", "-extfile", more)
    return cert, key


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def _openssl(*args: str | Path) -> None:
    program = shutil.which("openssl")
    assert program is not None
    subprocess.run([program, *map(str, args)], check=True, capture_output=True, timeout=WAIT_S)


@contextlib.contextmanager
def tls_server(folder: Path, certificates: Certificates) -> Iterator[str]:
    """An etcd that shows a certificate and asks for the client's. Yields its endpoint."""
    endpoint, peer = (f"127.0.0.1:{port}" for port in free_ports(2))
    cert, key = certificates.server
    urls = ("--listen-client-urls", f"https://{endpoint}", "--advertise-client-urls", f"https://{endpoint}")
    peers = ("--listen-peer-urls", f"http://{peer}", "--initial-advertise-peer-urls", f"http://{peer}")
    cluster = ("--initial-cluster", f"default=http://{peer}", "--data-dir", str(folder / "data"), "--unsafe-no-fsync")
    tls = ("--cert-file", cert, "--key-file", key, "--client-cert-auth", "--trusted-ca-file", certificates.ca)
    process = subprocess.Popen(
        [find_program(), *urls, *peers, *cluster, *map(str, tls), "--log-level", "error"], stderr=subprocess.DEVNULL
    )
    try:
        store = EtcdStore(tls_config(endpoint, certificates))
        store.check()
        store.close()
        yield endpoint
    finally:
        process.kill()
        process.wait()


def tls_config(endpoint: str, certificates: Certificates) -> EtcdConfig:
    cert, key = certificates.client
    return EtcdConfig(endpoints=(endpoint,), ca=certificates.ca, cert=cert, key=key, limit_s=WAIT_S)


def add_users(endpoint: str, users: dict[str, str]) -> None:
    """Each with its password and the role root; then ask for passwords."""
    channel = grpc.insecure_channel(endpoint)
    auth = rpc.AuthStub(channel)
    auth.RoleAdd(rpc.AuthRoleAddRequest(name="root"), timeout=WAIT_S)
    for name, password in users.items():
        auth.UserAdd(rpc.AuthUserAddRequest(name=name, password=password), timeout=WAIT_S)
        auth.UserGrantRole(rpc.AuthUserGrantRoleRequest(user=name, role="root"), timeout=WAIT_S)
    auth.AuthEnable(rpc.AuthEnableRequest(), timeout=WAIT_S)
    channel.close()


def compact(endpoint: str, revision: int) -> None:
    channel = grpc.insecure_channel(endpoint)
    rpc.KVStub(channel).Compact(rpc.CompactionRequest(revision=revision, physical=True), timeout=WAIT_S)
    channel.close()


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The child stands still meanwhile, with all its threads."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def respawn(server: EmbeddedEtcd) -> None:
    """After its end: again, on the same port, with the data that is still there. Calls wait within their limit."""
    server._spawn()
