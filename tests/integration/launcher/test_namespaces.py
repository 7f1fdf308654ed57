"""Hosts with addresses of their own and nothing but TCP between them: a cable is cut for good, a node is killed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from experiments.hosts import ETCD, Switch, impossible
from tests.support.nodes_harness import NodesJob
from tests.support.training import assert_equal_to_undisturbed

pytestmark = pytest.mark.slow
ARGUMENTS = ("--steps", "60", "--backups", "1")
HOSTS = ("a", "b", "c")


@pytest.fixture
def switch(tmp_path: Path) -> Iterator[Switch]:
    if (reason := impossible()) is not None:
        pytest.skip(reason)
    with Switch(tmp_path, HOSTS) as made:
        yield made


class Hosts:
    """An `elastrain run` on each of three hosts."""

    def __init__(self, switch: Switch, tmp_path: Path, open_: ExitStack) -> None:
        self.of = {host: open_.enter_context(self._start(switch, tmp_path, host)) for host in HOSTS}

    def _start(self, switch: Switch, tmp_path: Path, host: str) -> NodesJob:
        options = ("--nnodes", "2:3", "--rdzv-endpoint", ETCD, "--rdzv-id", "hosts", "--node-name", host)
        secret = ("--secret-file", str(tmp_path / "secret"))
        return NodesJob(
            tmp_path, *options, *secret, arguments=ARGUMENTS, name=f"run-{host}", inside=switch.inside(host)
        )


def test_members_on_three_hosts_talk_over_tcp_alone_and_go_on_when_a_node_is_killed(
    switch: Switch, tmp_path: Path
) -> None:
    with ExitStack() as open_:
        hosts = Hosts(switch, tmp_path, open_).of
        hosts["a"].wait_step(3)
        generation = hosts["a"].wait_members(*HOSTS, after=0)
        worker = hosts["a"].events("worker_start")[0]["pid"]
        own, others = switch.address("a"), {switch.address("b"), switch.address("c")}
        assert others <= {peer for here, peer in switch.connections(worker) if here == own}
        hosts["b"].kill_node("b")
        hosts["a"].wait_members("a", "c", after=generation)
        run = hosts["a"].finish()
        assert_equal_to_undisturbed(run, *ARGUMENTS)
        assert set(hosts["c"].finish().digests.values()) == set(run.digests.values())


def test_cable_cut_for_good_stops_neither_the_others_nor_changes_a_bit(switch: Switch, tmp_path: Path) -> None:
    with ExitStack() as open_:
        hosts = Hosts(switch, tmp_path, open_).of
        hosts["a"].wait_step(3)
        generation = hosts["a"].wait_members(*HOSTS, after=0)
        switch.cut("c")
        hosts["a"].wait_members("a", "b", after=generation)
        for host in ("a", "b"):
            hosts["c"].wait("link", node=host, up=False)
        hosts["c"].wait("parked")
        state = hosts["c"].status()
        assert "the others are no strict majority" in state["parked"]
        assert state["parked_s"] > 0
        run = hosts["a"].finish()
        assert_equal_to_undisturbed(run, *ARGUMENTS)
        assert set(hosts["b"].finish().digests.values()) == set(run.digests.values())
        # Nobody can tell it: it has taken no other view, and still waits.
        assert [e["generation"] for e in hosts["c"].events("view")] == [generation]
        assert hosts["c"].process.poll() is None
