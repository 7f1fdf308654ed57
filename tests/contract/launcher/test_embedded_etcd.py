"""The job's own etcd: it is found, it starts, and nothing of it outlives its launcher."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from elastrain.errors import ConfigError
from elastrain.launcher.embedded import EmbeddedEtcd
from elastrain.launcher.etcd import EtcdStore
from elastrain.launcher.etcd_config import EtcdConfig

WAIT_S = 20.0
LAUNCHER = """
import sys, time
from pathlib import Path
from elastrain.launcher.embedded import EmbeddedEtcd
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
