"""What only a store behind a network can do wrong: silence, lost answers, lost data, and not being let in."""

from __future__ import annotations

import os
import queue
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastrain.errors import ConfigError
from elastrain.launcher.simulated.embedded_etcd import EmbeddedEtcd
from elastrain.launcher.store.etcd import EtcdStore
from elastrain.launcher.store.etcd_config import EtcdConfig, parse_endpoints
from elastrain.launcher.store.port import Broken, Change, LeaseLostError, StoreRefusedError, StoreUnavailableError
from tests.contract.launcher.test_store import WAIT_S, Seen, put
from tests.support.etcd_tools import (
    Certificates,
    Proxy,
    add_users,
    compact,
    make_certificates,
    respawn,
    stopped,
    tls_config,
    tls_server,
)


def store_at(*endpoints: str, limit_s: float = WAIT_S, attempt_s: float = 1.0) -> EtcdStore:
    return EtcdStore(EtcdConfig(endpoints=endpoints, limit_s=limit_s, attempt_s=attempt_s))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedEtcd]:
    """One that a test may stop, kill, empty or lock."""
    made = EmbeddedEtcd(tmp_path / "etcd")
    yield made
    made.close()


@pytest.fixture
def store(etcd_server: EmbeddedEtcd) -> Iterator[EtcdStore]:
    made = store_at(etcd_server.endpoint)
    yield made
    made.close()


@pytest.fixture
def proxy(etcd_server: EmbeddedEtcd) -> Iterator[Proxy]:
    made = Proxy(etcd_server.endpoint)
    yield made
    made.close()


def kill(server: EmbeddedEtcd) -> None:
    """Until the kernel has closed its port."""
    os.kill(server.pid, signal.SIGKILL)
    os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)


class Committing:
    """A commit in a thread of its own."""

    def __init__(self, store: EtcdStore, expect: dict[str, int], value: bytes) -> None:
        self._outcome: queue.Queue[int | StoreUnavailableError | None] = queue.Queue()
        threading.Thread(target=self._run, args=(store, expect, value), daemon=True).start()

    def outcome(self) -> int | StoreUnavailableError | None:
        return self._outcome.get(timeout=WAIT_S)

    def _run(self, store: EtcdStore, expect: dict[str, int], value: bytes) -> None:
        try:
            self._outcome.put(store.commit(expect=expect, put={"/lost/key": value}))
        except StoreUnavailableError as error:
            self._outcome.put(error)


# ---- answers that are lost


def test_commit_whose_answer_was_lost_is_not_repeated_and_returns_its_revision(proxy: Proxy, store: EtcdStore) -> None:
    cut_off = store_at(proxy.endpoint)
    old = put(cut_off, "/lost/key", b"old")
    seen = Seen()
    store.watch("/lost/", old, seen)
    proxy.deaf = True
    committing = Committing(cut_off, {"/lost/key": old}, b"new")
    change = seen.next()
    assert isinstance(change, Change)
    proxy.deaf = False
    proxy.cut()
    assert committing.outcome() == change.revision
    assert seen.empty()
    cut_off.close()


def test_commit_whose_answer_was_lost_does_not_undo_what_others_wrote_after_it(proxy: Proxy, store: EtcdStore) -> None:
    cut_off = store_at(proxy.endpoint)
    seen = Seen()
    store.watch("/lost/", put(cut_off, "/lost/key", b"old"), seen)
    proxy.deaf = True
    committing = Committing(cut_off, {}, b"mine")
    change = seen.next()
    assert isinstance(change, Change)
    put(store, "/lost/key", b"theirs")
    proxy.deaf = False
    proxy.cut()
    assert committing.outcome() == change.revision
    item = store.get("/lost/key")
    assert item is not None
    assert item.value == b"theirs"
    cut_off.close()


def test_commit_whose_request_was_lost_is_carried_out_when_the_connection_is_back(proxy: Proxy) -> None:
    cut_off = store_at(proxy.endpoint)
    old = put(cut_off, "/lost/key", b"old")
    proxy.cut()
    revision = cut_off.commit(expect={"/lost/key": old}, put={"/lost/key": b"new"})
    assert revision is not None
    assert revision > old
    cut_off.close()


def test_marks_of_commits_are_gone_when_the_store_is_closed(etcd_server: EmbeddedEtcd, store: EtcdStore) -> None:
    before = [item.key for item in store.list(".elastrain/").items]
    other = store_at(etcd_server.endpoint)
    put(other, "/marked", b"1")
    assert len(store.list(".elastrain/").items) == len(before) + 1
    other.close()
    assert [item.key for item in store.list(".elastrain/").items] == before


# ---- outages


def test_calls_end_within_their_limit_while_etcd_stands_still_and_succeed_afterwards(server: EmbeddedEtcd) -> None:
    store = store_at(server.endpoint, limit_s=0.6, attempt_s=0.3)
    lease = store.grant(60)
    put(store, "/a", b"1")
    with stopped(server.pid):
        for call in (
            lambda: store.get("/a"),
            lambda: store.keep_alive(lease),
            lambda: store.commit(expect={}, put={"/a": b"2"}),
        ):
            began_s = time.monotonic()
            with pytest.raises(StoreUnavailableError):
                call()
            assert time.monotonic() - began_s < 10  # fifteen times as long: the machine may be busy
    patient = store_at(server.endpoint)
    # Unconditional: the commit above may be carried out only now, between a read and a write that depends on it.
    assert patient.commit(expect={}, put={"/a": b"3"}) is not None
    patient.keep_alive(lease)
    patient.close()
    store.close()


def test_killed_and_restarted_etcd_has_kept_keys_and_leases_and_breaks_watches(server: EmbeddedEtcd) -> None:
    store = store_at(server.endpoint)
    lease = store.grant(60)
    revision = store.commit(expect={}, put={"/a": b"1"}, lease=lease)
    assert revision is not None
    seen = Seen()
    store.watch("/", revision, seen)
    # The watch is known to be open once it has reported something.
    put(store, "/b", b"1")
    assert seen.pairs(1) == [("/b", b"1")]
    kill(server)
    assert isinstance(seen.next(), Broken)
    respawn(server)
    store.keep_alive(lease)
    assert [item.key for item in store.list("/").items] == ["/a", "/b"]
    assert put(store, "/a", b"2") > revision
    store.close()


def test_etcd_that_comes_back_empty_breaks_watches_and_has_lost_leases(server: EmbeddedEtcd, tmp_path: Path) -> None:
    store = store_at(server.endpoint)
    lease = store.grant(60)
    for value in (b"1", b"2", b"3", b"4", b"5", b"6"):
        last = put(store, "/a", value)
    kill(server)
    shutil.rmtree(tmp_path / "etcd" / "data")
    respawn(server)
    with pytest.raises(LeaseLostError):
        store.keep_alive(lease)
    # A watch from a revision that the new store has not reached would be silent for ever.
    seen = Seen()
    store.watch("/", last + 1000, seen)
    assert isinstance(seen.next(), Broken)
    assert store.get("/a") is None
    # Its own mark's lease was lost, too: that is nobody else's affair.
    assert store.commit(expect={"/a": 0}, put={"/a": b"new"}) is not None
    with pytest.raises(LeaseLostError):
        store.commit(expect={}, put={"/a": b"newer"}, lease=lease)
    store.close()


def test_second_endpoint_is_asked_when_the_first_is_silent_and_its_watches_break(
    etcd_server: EmbeddedEtcd, server: EmbeddedEtcd
) -> None:
    # Two servers of one cluster look the same to a client as a server and a way around to it.
    way_around = Proxy(server.endpoint)
    store = EtcdStore(EtcdConfig(endpoints=(way_around.endpoint, server.endpoint), limit_s=WAIT_S, attempt_s=0.3))
    revision = put(store, "/a", b"1")
    seen = Seen()
    store.watch("/", revision, seen)
    way_around.deaf = True
    item = store.get("/a")
    assert item is not None
    assert item.value == b"1"
    assert isinstance(seen.next(), Broken)
    store.close()
    way_around.close()


def test_watch_from_a_compacted_revision_says_so_and_ends(etcd_server: EmbeddedEtcd, store: EtcdStore) -> None:
    start = put(store, "/compacted/a", b"1")
    put(store, "/compacted/a", b"2")
    newest = put(store, "/compacted/a", b"3")
    compact(etcd_server.endpoint, newest)
    seen = Seen()
    store.watch("/compacted/", start, seen)
    broken = seen.next()
    assert isinstance(broken, Broken)
    assert "compacted" in broken.reason
    assert seen.empty()


def test_expired_lease_takes_its_keys(store: EtcdStore) -> None:
    kept, left = store.grant(1.0), store.grant(1.0)
    seen = Seen()
    start = store.list("/leased/").revision
    store.commit(expect={}, put={"/leased/left": b""}, lease=left)
    store.commit(expect={}, put={"/leased/kept": b""}, lease=kept)
    store.watch("/leased/", start, seen)
    assert seen.pairs(2) == [("/leased/left", b""), ("/leased/kept", b"")]
    gone: list[tuple[str, bytes | None]] = []
    expired = threading.Thread(target=lambda: gone.extend(seen.pairs(1)))
    expired.start()
    while expired.is_alive():  # ends with the wait of `Seen`
        store.keep_alive(kept)
        expired.join(0.3)
    assert gone == [("/leased/left", None)]
    with pytest.raises(LeaseLostError):
        store.keep_alive(left)


# ---- not being let in


def test_unreachable_etcd_is_named() -> None:
    store = store_at("127.0.0.1:1", limit_s=0.3)
    with pytest.raises(StoreUnavailableError, match=r"127\.0\.0\.1:1 does not answer .* is it running"):
        store.check()
    store.close()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl program to make certificates with")
    return make_certificates(tmp_path_factory.mktemp("certificates"))


def test_tls_with_the_right_files_works_and_wrong_ones_are_named(certificates: Certificates, tmp_path: Path) -> None:
    with tls_server(tmp_path, certificates) as endpoint:
        right = EtcdStore(tls_config(endpoint, certificates))
        put(right, "/a", b"1")
        right.close()
        cert, key = certificates.client
        wrong_ca = EtcdStore(EtcdConfig(endpoints=(endpoint,), ca=certificates.other_ca, cert=cert, key=key))
        with pytest.raises(StoreRefusedError, match="TLS files"):
            wrong_ca.check()
        no_certificate = EtcdStore(EtcdConfig(endpoints=(endpoint,), ca=certificates.ca))
        with pytest.raises(StoreRefusedError, match="TLS files"):
            no_certificate.check()
        no_tls = EtcdStore(EtcdConfig(endpoints=(endpoint,), limit_s=0.5))
        with pytest.raises(StoreUnavailableError, match="does it want TLS"):
            no_tls.check()
        for store in (wrong_ca, no_certificate, no_tls):
            store.close()


def test_tls_against_an_etcd_without_it_is_named(certificates: Certificates, etcd_server: EmbeddedEtcd) -> None:
    store = EtcdStore(EtcdConfig(endpoints=(etcd_server.endpoint,), ca=certificates.ca, limit_s=0.5))
    with pytest.raises(StoreUnavailableError, match="does it speak TLS"):
        store.check()
    store.close()


def test_right_password_is_let_in_also_after_etcd_forgot_its_tokens_and_wrong_ones_are_named(
    server: EmbeddedEtcd,
) -> None:
    add_users(server.endpoint, {"root": "secret", "ann": "hers"})

    def as_user(user: str | None, password: str | None) -> EtcdStore:
        return EtcdStore(EtcdConfig(endpoints=(server.endpoint,), user=user, password=password))

    ann = as_user("ann", "hers")
    revision = put(ann, "/a", b"1")
    seen = Seen()
    ann.watch("/", revision, seen)
    put(ann, "/a", b"2")
    assert seen.pairs(1) == [("/a", b"2")]
    wrong, nobody = as_user("ann", "his"), as_user(None, None)
    with pytest.raises(StoreRefusedError, match="wrong user or password"):
        wrong.check()
    with pytest.raises(StoreRefusedError, match="wants a user and a password"):
        nobody.check()
    kill(server)
    respawn(server)
    put(ann, "/a", b"3")
    for store in (ann, wrong, nobody):
        store.close()


def test_password_for_an_etcd_without_users_is_named(etcd_server: EmbeddedEtcd) -> None:
    store = EtcdStore(EtcdConfig(endpoints=(etcd_server.endpoint,), user="ann", password="hers"))
    with pytest.raises(StoreRefusedError, match="leave user and password out"):
        store.check()
    store.close()


def test_configuration_that_can_not_serve_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("no certificate")
    for wrong in (
        {"ca": tmp_path / "missing"},
        {"ca": text},
        {"ca": text, "cert": text},
        {"user": "ann"},
        {"endpoints": ()},
    ):
        with pytest.raises(ConfigError):
            EtcdConfig(**{"endpoints": ("localhost:2379",), **wrong})  # type: ignore[arg-type]


def test_endpoints_are_read_as_torchrun_reads_them() -> None:
    assert parse_endpoints("a:1,b") == ("a:1", "b:2379")
    assert parse_endpoints("[::1]:7, [::2]") == ("[::1]:7", "[::2]:2379")
    for wrong in ("", "a:x", "a:0", "a:70000", "http://a:1", "a:1,,b", "::1"):
        with pytest.raises(ConfigError):
            parse_endpoints(wrong)
