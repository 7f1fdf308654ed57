"""One host's node of a world: the addresses of its quorum, ranks that end early, and the stay for other hosts."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from elastrain.base.world_variables import WorldHosts
from elastrain.errors import ConfigError
from elastrain.launcher.agent.adopted import AdoptedRanks, Rank
from elastrain.launcher.quorum.candidates import Candidates
from elastrain.launcher.quorum.staying import stay_for_others
from elastrain.launcher.start import adopted_node
from elastrain.launcher.store.job_keys import JobKeys
from elastrain.launcher.store.port import MemoryStore
from elastrain.launcher.store.sealed import SealedStore

SECRET = bytes(range(32))


def hosts(node: int, first: str) -> WorldHosts:
    return WorldHosts(launcher="torchrun", nodes=2, node=node, hosts=(first,), own_name="", job="j", port=20000)


@pytest.fixture
def sleeper() -> Iterator[Rank]:
    process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    with socket.socket() as sock:
        yield Rank(number=3, sock=sock, pid=process.pid, pidfd=os.pidfd_open(process.pid))
    process.kill()
    process.wait()


def test_second_host_on_the_machine_of_the_first_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"hosts 0 and 1 of this world are one, 127\.0\.0\.1"):
        adopted_node._addresses(hosts(1, "127.0.0.1"), 20000)


def test_rank_0_elsewhere_than_at_the_first_host_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the first host of this world is 192.0.2.7.* set MASTER_ADDR"):
        adopted_node._addresses(hosts(0, "192.0.2.7"), 20000)


def test_a_loopback_name_of_the_first_host_gives_its_address_in_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adopted_node, "address_towards", lambda _: "10.9.8.7")
    assert adopted_node._addresses(hosts(0, "127.0.1.1"), 20000) == (["10.9.8.7"], "10.9.8.7")


def test_a_rank_that_ends_while_hosts_are_awaited_ends_the_wait(sleeper: Rank) -> None:
    ranks = AdoptedRanks([sleeper])
    os.kill(sleeper.pid, signal.SIGKILL)
    with pytest.raises(ConfigError, match="rank 3 has ended before"), adopted_node._ended_with([sleeper], ranks):
        time.sleep(30)
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


def test_a_wait_without_an_end_changes_nothing(sleeper: Rank) -> None:
    with adopted_node._ended_with([sleeper], AdoptedRanks([sleeper])):
        pass
    os.fstat(sleeper.pidfd)


def test_taken_ports_are_waited_for_and_then_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adopted_node, "PORTS_FREE_S", 0.5)
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 cannot be used"):
            adopted_node._wait_for_ports("127.0.0.1", port)


@pytest.mark.parametrize("text", ["1", "a-b", "-"])
def test_a_wrong_range_of_ports_is_named(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("ELASTRAIN_PORT_RANGE", text)
    with pytest.raises(ConfigError, match="ELASTRAIN_PORT_RANGE must be A-B"):
        adopted_node._ports()


def test_a_node_stays_as_long_as_another_one_has_a_key() -> None:
    store = SealedStore(MemoryStore(), SECRET)
    keys = JobKeys(store, "j")
    looks = []

    def is_member() -> bool:
        looks.append(1)
        if len(looks) == 3:
            store.commit(expect={}, delete=[keys.node("node1")])
        return True

    store.commit(expect={}, put={keys.node("node1"): b"{}", keys.node("node0"): b"{}"})
    stay_for_others(store, keys, "node0", is_member)
    assert len(looks) == 3
    stay_for_others(store, keys, "node0", lambda: False)


def test_an_agent_that_may_not_come_is_no_candidate() -> None:
    store = SealedStore(MemoryStore(), SECRET)
    for may_come, count in ((False, 0), (True, 1)):
        Candidates(store, "j", is_named=False, may_come=may_come).keep("i")
        assert len(store.list("/elastrain/.quorum/j/").items) == count
