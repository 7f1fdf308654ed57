"""Jobs of hosts in network namespaces whose agents form their own etcd quorum (`--join`)."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from elastrain.launcher.namespaces.switch import Switch
from tests.support.nodes_harness import NodesJob
from tests.support.waiting import until


class QuorumHosts:
    """Hosts with a common secret. `start` runs one node on a host, and `lose` kills all processes of a host."""

    def __init__(self, folder: Path, switch: Switch, stack: ExitStack) -> None:
        self.folder, self.switch, self._stack = folder, switch, stack
        self.secret = folder / "secret"
        self.secret.write_bytes(secrets.token_bytes(32))
        self.secret.chmod(0o600)
        self.slow = folder / "slow"
        self._starts = 0

    def start(
        self, host: str, *options: str, arguments: tuple[str, ...], join: Sequence[str] | None = None
    ) -> NodesJob:
        """`join`: the hosts in --join, the first three if None. The node has the host's name."""
        named = ",".join(self.switch.address(each) for each in join or self.switch.hosts[:3])
        self._starts += 1
        given = ("--join", named, "--rdzv-id", "quorum", "--node-name", host, "--secret-file", str(self.secret))
        job = NodesJob(
            self.folder,
            *given,
            *options,
            arguments=arguments,
            name=f"{host}-{self._starts}",
            inside=self.switch.inside(host),
        )
        return self._stack.enter_context(job)

    def pids(self, host: str) -> list[int]:
        command = ["ip", "netns", "pids", self.switch.namespace(host)]
        return [int(pid) for pid in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()]

    def etcd(self, host: str) -> int | None:
        """The process of the host's etcd member."""
        for pid in self.pids(host):
            try:
                if b"--initial-cluster-token" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                    return pid
            except OSError:  # it has just ended
                continue
        return None

    def lose(self, host: str) -> None:
        """SIGKILL to all processes of the host at once, guardians too."""
        for pid in self.pids(host):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        until(lambda: not self.pids(host), 20, f"end of {host}")


@contextmanager
def quorum_hosts(folder: Path, *hosts: str) -> Iterator[QuorumHosts]:
    """Hosts h0, h1, … with cables, until the block ends."""
    name = f"q{os.getpid()}-{folder.name}"[-30:].strip("-._")
    with Switch(name, hosts) as switch, ExitStack() as stack:
        made = QuorumHosts(folder, switch, stack)
        try:
            yield made
        finally:
            for host in hosts:
                made.lose(host)
