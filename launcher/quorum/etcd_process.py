"""The etcd process of one member of the quorum, with TLS for peers and clients. It ends with the thread that starts it.

No decision is made here. The process is started, watched and stopped, and its data is removed.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from elastrain.launcher.quorum.certificates import Pair
from elastrain.launcher.simulated.embedded_etcd import find_program, last_words, start_etcd

HEARTBEAT_S = 0.05
"""Seconds between two heartbeats of etcd's leader."""
ELECTION_S = 0.5
"""Seconds without a heartbeat after which a leader is elected. A new leader adds them to every lease."""


@dataclass(frozen=True, kw_only=True)
class Ports:
    """Addresses (HOST:PORT) of one member: for clients, and for other members."""

    client: str
    peer: str


@dataclass(frozen=True, kw_only=True)
class Membership:
    """Facts with which etcd starts with an empty data folder."""

    name: str
    """Name of this member: the instance of its agent."""
    cluster: tuple[tuple[str, str], ...]
    """Name and peer address of every first member, or of every member that this one joins."""
    token: str
    is_new: bool
    """True if the quorum is being founded, False if it works already."""


class EtcdProcess:
    """One member's etcd process. All methods are called in the thread that created it."""

    def __init__(self, folder: Path, pair: Pair, ports: Ports) -> None:
        self._folder, self._pair, self._ports = folder, pair, ports
        self._program = find_program()
        self._process: subprocess.Popen[bytes] | None = None
        self._membership: Membership | None = None

    @property
    def is_started(self) -> bool:
        """True from `start` to `stop`, even if the process has ended by itself."""
        return self._process is not None

    @property
    def has_ended(self) -> bool:
        """True if the process has ended by itself."""
        return self._process is not None and self._process.poll() is not None

    @property
    def pid(self) -> int:
        """Process id of etcd, or 0."""
        return self._process.pid if self._process is not None else 0

    def start(self, membership: Membership) -> None:
        """Start etcd with an empty data folder. Raises OSError."""
        self.stop()
        self._membership = membership
        self.start_again()

    def start_again(self) -> None:
        """Start etcd with the data of its present membership. Raises OSError."""
        assert self._membership is not None
        self._process = start_etcd([self._program, *self._options(self._membership)], self._folder)

    def stop(self) -> None:
        """Stop etcd, and remove its data."""
        if self._process is not None:
            self._process.kill()  # its data goes with it, so that it need not end in good order
            self._process.wait()
            self._process = None
        shutil.rmtree(self._folder / "data", ignore_errors=True)

    def last_words(self) -> str:
        """Return the last line of etcd's log."""
        return last_words(self._folder)

    def _options(self, membership: Membership) -> list[str]:
        pair, client, peer = self._pair, f"https://{self._ports.client}", f"https://{self._ports.peer}"
        files = (str(pair.cert), str(pair.key), str(pair.ca))
        cluster = ",".join(f"{name}=https://{address}" for name, address in membership.cluster)
        return [
            *("--name", membership.name, "--data-dir", str(self._folder / "data")),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", cluster, "--initial-cluster-token", membership.token),
            *("--initial-cluster-state", "new" if membership.is_new else "existing"),
            *("--client-cert-auth", "--cert-file", files[0], "--key-file", files[1], "--trusted-ca-file", files[2]),
            *("--peer-client-cert-auth", "--peer-cert-file", files[0], "--peer-key-file", files[1]),
            *("--peer-trusted-ca-file", files[2]),
            *("--heartbeat-interval", str(round(HEARTBEAT_S * 1000))),
            *("--election-timeout", str(round(ELECTION_S * 1000))),
            # The data does not outlive the job, so that no write needs to wait for the disk.
            "--unsafe-no-fsync",
            *("--snapshot-count", "5000", "--max-wals", "1", "--max-snapshots", "1"),
            *("--auto-compaction-mode", "revision", "--auto-compaction-retention", "10000"),
            *("--quota-backend-bytes", str(256 * 2**20), "--log-level", "warn"),
        ]
