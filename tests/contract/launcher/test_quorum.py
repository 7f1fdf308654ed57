"""The job's own etcd members: who gets in, what a lost member changes, and what is left behind."""

from __future__ import annotations

import http.client
import os
import signal
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastrain.launcher.quorum.certificates import Pair, authority_key, make_pair
from elastrain.launcher.quorum.etcd_admin import EtcdAdmin
from elastrain.launcher.quorum.muster import Greeting, Muster, StrangerError, UnreachableError, ask
from elastrain.launcher.store.etcd import EtcdStore
from elastrain.launcher.store.port import Broken, StoreError, StoreUnavailableError
from tests.contract.launcher.test_store import Seen
from tests.support.quorum_members import SECRET, WAIT_S, LocalQuorum
from tests.support.waiting import until

OTHER = bytes(32)
REFUSED = r"(?i)certificate|reset|alert|unknown"


@pytest.fixture
def quorum(tmp_path: Path) -> Iterator[LocalQuorum]:
    """One whose members a test may end."""
    made = LocalQuorum(tmp_path)
    yield made
    made.close()


def strange_pair(folder: Path, secret: bytes = OTHER) -> Pair:
    folder.mkdir()
    return make_pair(folder, secret, "127.0.0.1")


def version(connection: http.client.HTTPSConnection) -> bytes:
    connection.request("GET", "/version")
    return connection.getresponse().read()


def test_only_the_secret_decides_about_the_authority(tmp_path: Path) -> None:
    numbers = [authority_key(secret).private_numbers().private_value for secret in (SECRET, SECRET, OTHER)]
    assert numbers[0] == numbers[1] != numbers[2]
    pair = strange_pair(tmp_path / "pair")
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "pair").iterdir()} == {0o600}
    assert {pair.ca.name, pair.cert.name, pair.key.name} == {file.name for file in (tmp_path / "pair").iterdir()}


@pytest.mark.parametrize("kind", ["client", "peer"])
def test_a_connection_without_a_certificate_is_refused(local_quorum: LocalQuorum, kind: str) -> None:
    address = getattr(local_quorum.ports[0], kind)
    anyone = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anyone.check_hostname, anyone.verify_mode = False, ssl.CERT_NONE
    connection = http.client.HTTPSConnection(address, timeout=5, context=anyone)
    with pytest.raises(OSError, match=REFUSED):
        version(connection)


@pytest.mark.parametrize("kind", ["client", "peer"])
def test_a_certificate_of_another_secret_is_refused(local_quorum: LocalQuorum, tmp_path: Path, kind: str) -> None:
    pair, ours = strange_pair(tmp_path / "strange"), local_quorum.pairs[0]
    # It trusts this quorum, so that the refusal is the server's.
    mixed = Pair(ca=ours.ca, cert=pair.cert, key=pair.key)
    context = mixed.context(server=False, least=ssl.TLSVersion.TLSv1_2)
    connection = http.client.HTTPSConnection(getattr(local_quorum.ports[0], kind), timeout=5, context=context)
    with pytest.raises(OSError, match=REFUSED):
        version(connection)
    with pytest.raises(StoreError):
        EtcdAdmin(pair).members(local_quorum.endpoints)


def test_store_goes_on_when_the_leader_is_killed_and_follows_the_endpoints(quorum: LocalQuorum) -> None:
    every, leader = quorum.endpoints, quorum.admin.leader(quorum.endpoints[0])
    names = {member.id: member.name for member in quorum.admin.members(every)}
    lost = int(names[leader][1:])
    quorum.endpoints = (every[lost],)
    store = EtcdStore(quorum.config(limit_s=WAIT_S))
    before = store.commit(expect={"/a": 0}, put={"/a": b"1"})
    seen = Seen()
    store.watch("/a", before or 0, seen)
    os.kill(quorum.members[lost].pid, signal.SIGKILL)
    # The store knows no other endpoint until it asks for those of now.
    quorum.endpoints = tuple(each for index, each in enumerate(every) if index != lost)
    assert store.commit(expect={"/a": before or 0}, put={"/a": b"2"}) is not None
    item = store.get("/a")
    assert item is not None and item.value == b"2"
    assert isinstance(seen.next(), Broken)
    store.close()


def test_two_of_three_members_are_no_quorum_until_one_comes_back_with_its_data(quorum: LocalQuorum) -> None:
    store = EtcdStore(quorum.config(limit_s=2.0))
    store.commit(expect={}, put={"/a": b"1"})
    for index in (0, 1):
        os.kill(quorum.members[index].pid, signal.SIGKILL)
        until(lambda index=index: quorum.members[index].has_ended, 20, "its end")
    with pytest.raises(StoreUnavailableError):
        store.commit(expect={}, put={"/b": b"2"})
    quorum.members[0].start_again()
    patient = EtcdStore(quorum.config(limit_s=30.0))
    item = patient.get("/a")
    assert item is not None and item.value == b"1"
    store.close()
    patient.close()


def greeting(job: str = "j") -> Greeting:
    return Greeting(job=job, node="n", instance="i", wall_s=time.time())


def test_hosts_greet_each_other_and_refuse_another_job_secret_or_program(
    local_quorum: LocalQuorum, tmp_path: Path
) -> None:
    ours, theirs = local_quorum.pairs[0], strange_pair(tmp_path / "strange")
    port = int(local_quorum.ports[0].client.rpartition(":")[2])
    muster = Muster("127.0.0.1", 0, ours, greeting)
    there = muster.port
    try:
        assert ask("127.0.0.1", there, ours, greeting()).node == "n"
        with pytest.raises(StrangerError, match="belongs to job j, not to k"):
            ask("127.0.0.1", there, ours, greeting("k"))
        with pytest.raises(StrangerError, match="holds another secret"):
            ask("127.0.0.1", there, theirs, greeting())
    finally:
        muster.close()
    with pytest.raises(StrangerError, match="another program"):
        ask("127.0.0.1", port, ours, greeting())
    with pytest.raises(UnreachableError, match="does not answer"):
        ask("127.0.0.1", there, ours, greeting())
