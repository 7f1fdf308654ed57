"""Three real etcd members of the job's own quorum on this machine, with TLS from a job's secret."""

from __future__ import annotations

from pathlib import Path

from elastrain.launcher.quorum.certificates import Pair, make_pair
from elastrain.launcher.quorum.etcd_admin import EtcdAdmin
from elastrain.launcher.quorum.etcd_process import EtcdProcess, Membership, Ports
from elastrain.launcher.store.etcd import EtcdStore
from elastrain.launcher.store.etcd_config import EtcdConfig
from tests.support.free_ports import free_ports

SECRET = bytes(range(32))
WAIT_S = 30.0


class LocalQuorum:
    """All members listen on loopback. `endpoints` may be replaced, and the stores of `config` follow."""

    def __init__(self, folder: Path, members: int = 3) -> None:
        self._folder = folder
        self.ports = [_ports() for _ in range(members)]
        self.pairs = [self._pair(str(index)) for index in range(members)]
        self.members = [
            EtcdProcess(folder / str(index), pair, ports)
            for index, (pair, ports) in enumerate(zip(self.pairs, self.ports, strict=True))
        ]
        cluster = tuple((f"n{index}", ports.peer) for index, ports in enumerate(self.ports))
        for index, member in enumerate(self.members):
            member.start(Membership(name=f"n{index}", cluster=cluster, token="local", is_new=True))
        self.endpoints = tuple(ports.client for ports in self.ports)
        store = EtcdStore(self.config(limit_s=WAIT_S))
        store.check()
        store.close()

    @property
    def admin(self) -> EtcdAdmin:
        return EtcdAdmin(self.pairs[0])

    def config(self, *, pair: Pair | None = None, limit_s: float = 5.0) -> EtcdConfig:
        files = pair or self.pairs[0]
        return EtcdConfig(
            endpoints=self.endpoints,
            ca=files.ca,
            cert=files.cert,
            key=files.key,
            limit_s=limit_s,
            current=lambda: self.endpoints,
        )

    def close(self) -> None:
        for member in self.members:
            member.stop()

    def _pair(self, name: str) -> Pair:
        (self._folder / name).mkdir(mode=0o700)
        return make_pair(self._folder / name, SECRET, "127.0.0.1")


def _ports() -> Ports:
    client, peer = (f"127.0.0.1:{port}" for port in free_ports(2))
    return Ports(client=client, peer=peer)
