"""The job's own etcd: it is found, it starts, and nothing of it outlives its launcher."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest

from elastrain.base.event_loop import EventLoop
from elastrain.errors import ConfigError
from elastrain.launcher.simulated.embedded_etcd import EmbeddedEtcd
from elastrain.launcher.store.etcd import EtcdStore
from elastrain.launcher.store.etcd_config import EtcdConfig

WAIT_S = 20.0
LAUNCHER = """
import sys, time
from pathlib import Path
from elastrain.launcher.simulated.embedded_etcd import EmbeddedEtcd
server = EmbeddedEtcd(Path(sys.argv[1]))
print(server.pid, flush=True)
sys.stdin.read()
"""


def has_ended(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], WAIT_S)[0])


def test_closed_etcd_leaves_no_process_and_no_files(tmp_path: Path) -> None:
    server = EmbeddedEtcd(tmp_path / "etcd")
    store = EtcdStore(EtcdConfig(endpoints=(server.endpoint,)))
    store.check()
    store.close()
    pidfd = os.pidfd_open(server.pid)
    server.close()
    server.close()
    assert has_ended(pidfd)
    os.close(pidfd)
    assert list(tmp_path.iterdir()) == []


def test_etcd_dies_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(tmp_path / "etcd")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert launcher.stdout is not None
    pidfd = os.pidfd_open(int(launcher.stdout.readline()))
    launcher.send_signal(signal.SIGKILL)
    launcher.communicate(timeout=WAIT_S)
    assert has_ended(pidfd)
    os.close(pidfd)


def test_etcd_that_does_not_start_is_named_with_its_last_words(tmp_path: Path) -> None:
    program = tmp_path / "etcd-stub"
    program.write_text("#!/bin/sh\necho the disk is on fire\nexit 1\n")
    program.chmod(0o700)
    with pytest.raises(ConfigError, match="the disk is on fire"):
        EmbeddedEtcd(tmp_path / "etcd", str(program))
    assert not (tmp_path / "etcd").exists()


def test_no_port_is_open_and_only_its_user_may_enter_the_folder(tmp_path: Path) -> None:
    server = EmbeddedEtcd(tmp_path / "etcd")
    assert (tmp_path / "etcd").stat().st_mode & 0o777 == 0o700
    inodes = {link.split("[")[1].rstrip("]") for link in _sockets_of(server.pid)}
    for table in ("tcp", "tcp6", "udp", "udp6"):
        rows = [line.split() for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
        assert not [row for row in rows if row[9] in inodes]
    server.close()


def _sockets_of(pid: int) -> list[str]:
    links = []
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # etcd opens and closes files meanwhile
            links.append(os.readlink(each))
    return [link for link in links if link.startswith("socket:")]


def test_a_folder_with_a_name_too_long_for_a_socket_will_do(tmp_path: Path) -> None:
    server = EmbeddedEtcd(tmp_path / ("long" * 40) / "etcd")
    store = EtcdStore(EtcdConfig(endpoints=(server.endpoint,)))
    store.check()
    store.close()
    server.close()


def test_who_watches_etcd_hears_of_each_end_that_nobody_asked_for(tmp_path: Path) -> None:
    ends: list[int] = []
    with closing(EventLoop()) as loop, closing(EmbeddedEtcd(tmp_path / "etcd")) as server:
        server.watch(loop, lambda: ends.append(server.pid))
        for _ in range(2):
            os.kill(killed := server.pid, signal.SIGKILL)
            loop.turn(time.monotonic() + WAIT_S)
            assert ends[-1] == killed
            server.start_again()
            server.kill()
            loop.turn(time.monotonic() + 0.01)
            assert ends[-1] == killed, "it was asked to"
            server.start_again()
        assert len(ends) == 2
