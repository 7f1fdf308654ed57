"""What a fault of the network comes to, and what the launcher of simulated nodes does about it and when."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from elastrain.base.event_loop import EventLoop
from elastrain.errors import ConfigError
from elastrain.launcher.faults import grammar
from elastrain.launcher.namespaces.impairments import (
    Condition,
    Hearing,
    Loss,
    Policed,
    Slow,
    Unplugged,
    between,
    impairments,
)
from elastrain.launcher.shared.rundir import EventLog
from elastrain.launcher.simulated.infrastructure import Infrastructure

NODES = ("node0", "node1", "node2")
ALL = (*NODES, "switch")
GONE = Hearing(percent_lost=100.0)


def came(line: str) -> list[Any]:
    return impairments(grammar.parse(line), NODES, "switch")


def test_partition_cuts_off_from_all_or_peers_or_etcd_and_one_way() -> None:
    assert came("partition --target node:node2") == [Loss(pairs=between(["node2"], ALL))]
    assert came("partition --target node:node2 --only peers") == [Loss(pairs=between(["node2"], NODES))]
    assert came("partition --target node:node2 --only etcd --way in") == [Loss(pairs=frozenset({("switch", "node2")}))]


def test_nodes_that_are_cut_off_by_one_fault_still_reach_one_another() -> None:
    [loss] = came("partition --target node:node0,node:node1")
    assert loss == Loss(pairs=between(["node0", "node1"], ALL))
    assert ("node0", "node1") not in loss.pairs


def test_faults_of_a_link_concern_two_nodes_alone() -> None:
    pairs = between(["node0"], ["node1"])
    assert came("partition --target link:node0-node1") == [Loss(pairs=pairs)]
    assert came("loss --target link:node0-node1 --percent 2.5") == [Loss(pairs=pairs, percent=2.5)]
    assert came("slow-link --target link:node0-node1 --rate 0.5") == [Policed(pairs=pairs, bits_per_s=500_000)]


def test_faults_of_a_cable() -> None:
    assert came("flap --target node:node1") == [Unplugged(host="node1")]
    assert came("slow-link --target node:node1 --rate 2") == [Slow(host="node1", bits_per_s=2_000_000)]


class FakeSwitch:
    """What it was told to be, one after the other."""

    hosts = NODES

    def __init__(self) -> None:
        self.told: list[Condition] = []

    def apply(self, wanted: Condition) -> None:
        self.told.append(wanted)


class FakeEtcd:
    def __init__(self) -> None:
        self.done: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda: self.done.append(name)


def around(tmp_path: Path, switch: FakeSwitch | None) -> tuple[Infrastructure, FakeEtcd]:
    etcd = FakeEtcd()
    return Infrastructure(etcd, switch, EventLog(tmp_path / "events", "launcher")), etcd  # type: ignore[arg-type]


def test_each_fault_is_undone_in_its_own_time_and_leaves_the_others_alone(tmp_path: Path) -> None:
    switch = FakeSwitch()
    made, _ = around(tmp_path, switch)
    made.carry_out(grammar.parse("partition --target node:node1 --only etcd --way in --for 5"), 100.0)
    made.carry_out(grammar.parse("partition --target node:node1 --only etcd --way in --for 2"), 101.0)
    made.carry_out(grammar.parse("loss --target link:node0-node2"), 101.0)
    assert made.next_deadline_s() == 103.0
    made.on_tick(103.0)
    assert switch.told[-1].hearing["node1"] == {"switch": GONE}
    made.on_tick(105.0)
    assert "node1" not in switch.told[-1].hearing
    assert switch.told[-1].hearing["node0"] == {"node2": Hearing(percent_lost=10.0)}
    assert made.next_deadline_s() is None  # for ever


def test_faults_of_etcd_and_their_end(tmp_path: Path) -> None:
    made, etcd = around(tmp_path, None)
    made.carry_out(grammar.parse("etcd-wipe"), 0.0)
    made.on_tick(2.0)
    assert etcd.done == ["kill", "forget", "start_again"]
    made.carry_out_later(grammar.parse("etcd-stop --for 1"), 10.0)
    made.on_tick(10.0)
    made.on_tick(11.0)
    assert etcd.done[3:] == ["stop", "go_on"]


def test_an_etcd_that_ends_by_itself_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, etcd = around(tmp_path, None)
    watched: list[Callable[[], None]] = []
    monkeypatch.setattr(FakeEtcd, "watch", lambda _self, _loop, on_end: watched.append(on_end), raising=False)
    with closing(EventLoop()) as loop:
        made.watch_etcd(loop)
    [on_end] = watched
    on_end()
    due_s = made.next_deadline_s()
    assert due_s is not None
    made.on_tick(due_s)
    assert etcd.done == ["start_again"]
    assert made.next_deadline_s() is None


def test_what_cannot_be_is_said(tmp_path: Path) -> None:
    made, _ = around(tmp_path, None)
    with pytest.raises(
        ConfigError, match="partition needs nodes with networks of their own: start the job with --netns"
    ):
        made.carry_out(grammar.parse("partition --target node:node1"), 0.0)
    made, _ = around(tmp_path, FakeSwitch())
    for line in ("loss --target node:node7", "loss --target link:node1-node7"):
        with pytest.raises(ConfigError, match="there is no node node7: there are node0, node1, node2"):
            made.carry_out(grammar.parse(line), 0.0)


def test_random_nodes_are_all_different(tmp_path: Path) -> None:
    switch = FakeSwitch()
    made, _ = around(tmp_path, switch)
    made.carry_out(grammar.parse("flap --target node:random,node:random,node:node1"), 0.0)
    assert switch.told[-1].unplugged == set(NODES)
    with pytest.raises(ConfigError, match="there are only 3 nodes"):
        made.carry_out(grammar.parse("flap --target node:random,node:random,node:random,node:node1"), 0.0)


def test_faults_of_the_network_are_carried_out_only_where_there_is_a_switch(tmp_path: Path) -> None:
    etcd_only, _ = around(tmp_path, None)
    assert set(etcd_only.carries) == {"etcd-kill", "etcd-stop", "etcd-compact", "etcd-wipe"}
    (tmp_path / "switched").mkdir()
    both, _ = around(tmp_path / "switched", FakeSwitch())
    assert {"flap", "partition", "loss", "slow-link", *etcd_only.carries} == set(both.carries)
