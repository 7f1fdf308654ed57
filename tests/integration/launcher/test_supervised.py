"""Nodes of separate commands under a supervisor that starts an agent again when its node has died."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastrain.launcher.simulated.embedded_etcd import EmbeddedEtcd
from tests.support.nodes_harness import NodesJob
from tests.support.relay import Relay
from tests.support.training import assert_equal_to_undisturbed

pytestmark = [pytest.mark.slow, pytest.mark.on_demand]  # half a minute of leases
ARGUMENTS = ("--steps", "28", "--backups", "1")


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[str]:
    server = EmbeddedEtcd(tmp_path / "etcd", host="127.0.0.1")
    yield server.endpoint
    server.close()


@pytest.fixture
def relay(etcd: str) -> Iterator[Relay]:
    relay = Relay(etcd)
    yield relay
    relay.close()


def test_a_node_that_alone_reaches_etcd_does_not_begin_the_job_anew_beside_the_others(
    tmp_path: Path, etcd: str, relay: Relay
) -> None:
    """The keys of the others have gone with their leases; they train on, and say so to whoever asks them."""

    def node(name: str, endpoint: str, start: int = 1) -> NodesJob:
        job = ("--nnodes", "1:3", "--rdzv-endpoint", endpoint, "--rdzv-id", f"supervised-{os.getpid()}")
        options = (*job, "--last-call", "4", "--node-name", name, "--secret-file", str(tmp_path / "secret"))
        return NodesJob(tmp_path, *options, arguments=ARGUMENTS, name=f"{name}{start}")

    with node("a", relay.endpoint) as a, node("b", relay.endpoint) as b, node("c", etcd) as c:
        a.wait_step(3)
        a.wait_members("a", "b", "c", after=0)
        relay.cut()
        c.kill_node("c")
        a.wait("parked")
        with node("c", etcd, start=2) as refused:
            assert refused.end().exit_code == 1
            assert f"of job supervised-{os.getpid()} lives, and no node of it has a key" in refused.text()
        relay.mend()
        with node("c", etcd, start=3) as again:
            a.wait_members("a", "b", "c", after=1)
            runs = [job.finish() for job in (a, b, again)]
        assert [run.exit_code for run in runs] == [0, 0, 0]
        assert_equal_to_undisturbed(runs[0], *ARGUMENTS)
