"""torchrun's rendezvous in an etcd v3: a node is killed, a node joins, etcd is restarted; real torchrun, real etcd."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastrain.launcher.simulated.embedded_etcd import EmbeddedEtcd
from tests.support.processes import in_sessions, kill_group
from tests.support.training import environment
from tests.support.waiting import until

pytestmark = pytest.mark.slow

SCRIPT = """
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
here = Path(sys.argv[1])
summed = torch.zeros(1)
while summed.item() < 1:
    summed = torch.ones(1) * (here / "finish").exists()
    dist.all_reduce(summed)
    (here / f"world-{os.environ['GROUP_RANK']}").write_text(f"{dist.get_world_size()} {time.monotonic()}")
    time.sleep(0.05)
dist.destroy_process_group()
"""
CONF = "join_timeout=60,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EmbeddedEtcd]:
    made = EmbeddedEtcd(tmp_path / "etcd", host="127.0.0.1")
    yield made
    made.close()


@pytest.fixture
def plugin(tmp_path: Path) -> dict[str, str]:
    """An environment in which torchrun finds the handler, also where this project was installed before it had one."""
    (tmp_path / "site" / "told-0.dist-info").mkdir(parents=True)
    told = tmp_path / "site" / "told-0.dist-info"
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: told\nVersion: 0\n")
    (told / "entry_points.txt").write_text(
        "[torchrun.handlers]\netcd-v3 = elastrain.integrations.torchrun_rendezvous:handler\n"
    )
    return environment() | {"PYTHONPATH": str(tmp_path / "site"), "ELASTRAIN_HOME": str(tmp_path / "home")}


@contextmanager
def node(
    tmp_path: Path, etcd: EmbeddedEtcd, env: dict[str, str], name: str, *conf: str
) -> Iterator[subprocess.Popen[bytes]]:
    (tmp_path / "train.py").write_text(SCRIPT)
    options = ("--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "etcd-v3")
    place = ("--rdzv-endpoint", etcd.endpoint, "--rdzv-id", "job", "--local-addr", "127.0.0.1")
    told = ("--rdzv-conf", ",".join((CONF, *conf)), str(tmp_path / "train.py"), str(tmp_path))
    command = [sys.executable, "-m", "torch.distributed.run", *options, *place, *told]
    with (tmp_path / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        yield process
    finally:
        for pid in _workers_of(process):
            kill_group(pid)
        kill_group(process.pid)
        process.wait()


def _workers_of(process: subprocess.Popen[bytes]) -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(pid) for pid in children.read_text().split()] if children.exists() else []


def lose(process: subprocess.Popen[bytes]) -> None:
    """Kill a node: its agent and its workers."""
    workers = _workers_of(process)
    os.kill(process.pid, signal.SIGKILL)
    for pid in workers:
        kill_group(pid)


def wait_for_world(tmp_path: Path, size: int, of: int = 0) -> None:
    """Until the workers of a node report a world of this size anew."""
    there = tmp_path / f"world-{of}"
    there.unlink(missing_ok=True)

    def logs() -> str:
        return "\n".join(log.read_text(errors="replace")[-3000:] for log in tmp_path.glob("*.log"))

    try:
        until(lambda: there.exists() and there.read_text().split()[:1] == [str(size)], 90, f"a world of {size}")
    except AssertionError as error:
        raise AssertionError(f"{error}\n{logs()}") from None


def test_a_node_is_killed_a_node_joins_and_etcd_is_restarted(
    tmp_path: Path, etcd: EmbeddedEtcd, plugin: dict[str, str]
) -> None:
    with node(tmp_path, etcd, plugin, "a") as first, node(tmp_path, etcd, plugin, "b") as second:
        wait_for_world(tmp_path, 2)
        lose(second)
        wait_for_world(tmp_path, 1)
        etcd.kill()
        etcd.start_again()
        wait_for_world(tmp_path, 1)
        # The first agent stays rank 0: a newcomer needs its address in the round that it joins.
        with node(tmp_path, etcd, plugin, "c") as third:
            wait_for_world(tmp_path, 2)
            (tmp_path / "finish").touch()
            assert (first.wait(60), third.wait(60)) == (0, 0), (tmp_path / "a.log").read_text()


def test_without_the_jobs_secret_torchrun_ends_with_a_sentence(
    tmp_path: Path, etcd: EmbeddedEtcd, plugin: dict[str, str]
) -> None:
    with node(tmp_path, etcd, plugin, "a"):
        wait_for_world(tmp_path, 1)
        with node(tmp_path, etcd, plugin, "b", f"secret_file={tmp_path / 'other'}") as second:
            assert second.wait(60) == 2
            assert "this node has no secret for job" in (tmp_path / "b.log").read_text()
            assert not in_sessions([second.pid])
