"""Lines, folders and logs of a run: what is written, what is refused, how a run is found."""

from __future__ import annotations

import json
import os
import socket
import stat
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastrain.comm.errors import HandshakeRefused
from elastrain.comm.wire.handshake import Handshake, Role
from elastrain.comm.wire.handshake import run as run_handshake
from elastrain.errors import ConfigError
from elastrain.job.world import Member, View
from elastrain.launcher.agent import worker_limits
from elastrain.launcher.agent.run_state import describe
from elastrain.launcher.core import Core
from elastrain.launcher.shared import operator_messages, rundir
from elastrain.launcher.shared.job_values import JobConfig, NodeRecord, Roster
from elastrain.launcher.shared.line_socket import LineSocket
from elastrain.launcher.shared.rundir import EventLog, RunDir
from elastrain.launcher.start import registration
from elastrain.launcher.start.registration import Place, Terms, enter, secret_of
from elastrain.launcher.store.job_keys import JobKeys, decode_view, encode_view
from elastrain.launcher.store.port import ForgedValueError, MemoryStore, Store, StoreUnavailableError
from elastrain.launcher.store.sealed import SealedStore
from elastrain.protocol.codec import BadMessageError


def channels() -> tuple[LineSocket, socket.socket]:
    ours, theirs = socket.socketpair()
    return LineSocket(ours), theirs


def test_lines_that_come_in_pieces_are_put_together_and_descriptors_travel_with_them() -> None:
    channel, other = channels()
    read_end, write_end = os.pipe()
    socket.send_fds(other, [b'{"a":1}\n{"b"'], [write_end])
    first = channel.receive()
    assert first.lines == (b'{"a":1}',)
    os.write(first.fds[0], b"!")
    assert os.read(read_end, 1) == b"!"
    other.sendall(b":2}\n")
    assert channel.receive().lines == (b'{"b":2}',)
    assert channel.receive().lines == ()
    for fd in (read_end, write_end, *first.fds):
        os.close(fd)


def test_last_lines_are_heard_before_the_end() -> None:
    channel, other = channels()
    other.sendall(b'{"a":1}\n')
    other.close()
    received = channel.receive()
    assert (received.lines, received.closed) == ((b'{"a":1}',), True)


def test_line_without_end_is_refused_before_it_fills_the_memory() -> None:
    channel, other = channels()
    other.setblocking(False)

    def pour() -> None:
        for _ in range(100):
            other.send(b"x" * 60_000)
            channel.receive()

    with pytest.raises(BadMessageError, match="a line longer than"):
        pour()


def test_reader_that_is_slow_gets_everything_and_one_that_never_reads_is_given_up() -> None:
    channel, other = channels()
    message = b"x" * 500_000 + b"\n"
    assert channel.send(message)
    assert channel.wants_to_write
    received = 0
    while channel.wants_to_write or received < len(message):
        received += len(other.recv(1 << 20))
        channel.flush()
    assert received == len(message)
    assert not all(channel.send(message) for _ in range(20))


def test_sending_to_a_closed_end_says_so() -> None:
    channel, other = channels()
    other.close()
    assert not channel.send(b"{}\n")


def test_nodes_that_share_a_folder_make_one_secret_at_the_same_time(tmp_path: Path) -> None:
    store, file, begin = MemoryStore(), tmp_path / "home" / "secret", threading.Barrier(8)

    def read() -> bytes:
        begin.wait(10)
        return secret_of(store, "job", file)[0]

    with ThreadPoolExecutor(8) as nodes:
        found = [future.result(10) for future in [nodes.submit(read) for _ in range(8)]]
    assert len(set(found)) == 1
    assert len(found[0]) == 32
    assert [path.name for path in file.parent.iterdir()] == ["secret"]


class _Meanwhile(MemoryStore):
    """Something else happens when the first hint has been put."""

    def __init__(self, then: Callable[[Store], None]) -> None:
        super().__init__()
        self._then: Callable[[Store], None] | None = then

    def commit(self, **change: Any) -> int | None:
        revision = super().commit(**change)
        then, self._then = self._then, None
        if then is not None:
            then(self)
        return revision


def test_nodes_that_each_make_a_secret_at_once_keep_one_and_say_so(tmp_path: Path) -> None:
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"

    def come(store: Store, file: Path) -> Place:
        return enter(
            store, "job", file.name, Terms(nodes="3:3", script="x.py", layout="shared"), file=file, key_ttl_s=60.0
        )

    def too_late(store: Store, sentence: str) -> None:
        with pytest.raises(ConfigError, match=sentence):
            come(store, mine)
        assert theirs.exists() and not mine.exists()

    first = list[int]()

    def faster(store: Store) -> None:
        first.append(come(store, theirs).incarnation)

    store = _Meanwhile(then=faster)
    too_late(store, f"the one just made here is removed again: .* copy .*:{theirs} to {mine}")
    too_late(store, f"no secret for job job: copy .*:{theirs} to {mine}")
    mine.write_bytes(theirs.read_bytes())
    mine.chmod(0o600)
    assert come(store, mine).incarnation > first[0]


def test_a_secret_that_was_there_before_is_never_removed(tmp_path: Path) -> None:
    store, terms = MemoryStore(), Terms(nodes="2:2", script="x.py", layout="shared")
    enter(store, "other", "a", terms, file=tmp_path / "old", key_ttl_s=60.0)
    enter(store, "job", "b", terms, file=tmp_path / "job's", key_ttl_s=60.0)
    with pytest.raises(ForgedValueError, match="copy the secret file"):
        enter(store, "job", "a", terms, file=tmp_path / "old", key_ttl_s=60.0)
    assert (tmp_path / "old").exists()


def test_run_folder_is_private_and_holds_a_secret_of_32_bytes(tmp_path: Path) -> None:
    run = rundir.create(tmp_path / "a" / "run", "job")
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
    assert stat.S_IMODE(run.secret.stat().st_mode) == 0o600
    assert len(run.secret.read_bytes()) == 32


def test_folder_of_another_run_is_not_written_over(tmp_path: Path) -> None:
    run = rundir.create(tmp_path / "run", "job")
    run.write_state({"exit_code": 0})
    with pytest.raises(ConfigError, match="already holds a run"):
        rundir.create(tmp_path / "run", "job")


def test_folder_in_use_keeps_its_mode_and_must_not_be_open_to_others(tmp_path: Path) -> None:
    (tmp_path / "notes").touch()
    tmp_path.chmod(0o755)
    assert stat.S_IMODE(rundir.create(tmp_path, "job").path.stat().st_mode) == 0o755
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="others may write into"):
        rundir.create(tmp_path, "job")


def test_folder_that_can_not_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be made"):
        rundir.create(tmp_path / "file" / "run", "job")


def test_newest_run_is_found_or_one_by_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTRAIN_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="there is no run in"):
        rundir.find(None)
    for job in ("one", "two"):
        log = EventLog(rundir.create(None, job).events, "test")
        log.write("start")
        log.close()
    log = EventLog(tmp_path / "runs" / "one" / "events.jsonl", "test")
    log.write("an event later than the start of the other")
    log.close()
    assert rundir.find(None).path == tmp_path / "runs" / "two"
    assert rundir.find("one").path == rundir.find(str(tmp_path / "runs" / "one")).path == tmp_path / "runs" / "one"
    with pytest.raises(ConfigError, match="there is no run 'three'"):
        rundir.find("three")


def test_operators_socket_is_private_and_its_path_may_be_long(tmp_path: Path) -> None:
    run = rundir.create(tmp_path / ("d" * 120) / "run", "job")
    assert rundir.connect(run, 1.0) is None
    listener = rundir.listen(run)
    assert stat.S_IMODE(run.control.stat().st_mode) == 0o600
    sock = rundir.connect(run, 1.0)
    assert sock is not None
    sock.close()
    listener.close()
    assert rundir.connect(run, 1.0) is None


def test_state_is_read_back_or_refused(tmp_path: Path) -> None:
    run = RunDir(path=tmp_path)
    with pytest.raises(ConfigError, match="holds no readable run"):
        run.read_state()
    run.write_state({"job": "j"})
    assert run.read_state() == {"job": "j"}
    run.state.write_text("[]")
    with pytest.raises(ConfigError, match="is not a run's state"):
        run.read_state()


def test_event_log_appends_lines_with_both_times_that_nobody_can_forge(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for member in ("m0", "m1"):
        log = EventLog(path, "agent:n0")
        log.write("death", member=member, source="somebody else")
        log.close()
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert (first["event"], first["member"], first["source"]) == ("death", "m0", "agent:n0")
    assert second["t"] >= first["t"] > 0 < second["wall"]


def test_full_disk_costs_lines_and_says_how_many(tmp_path: Path) -> None:
    log = EventLog(Path("/dev/full"), "test")
    log.write("first")
    log.write("second")
    os.dup2(os.open(tmp_path / "events.jsonl", os.O_WRONLY | os.O_CREAT), log._log._fd)
    log.write("third")
    log.write("fourth")
    log.close()
    third, fourth = (json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines())
    assert (third["event"], third["lines_lost"]) == ("third", 2)
    assert "lines_lost" not in fourth


def view(generation: int, *ids: str) -> View:
    members = tuple(Member(id=m, node="n", address=f"unix:{m}") for m in ids)
    return View(generation=generation, members=members, reason="r")


def test_view_is_decoded_as_it_was_encoded() -> None:
    assert decode_view(encode_view(view(3, "a", "b"))) == view(3, "a", "b")


def test_slower_of_two_agents_gets_the_faster_ones_view_and_may_then_propose_again() -> None:
    store = MemoryStore()
    one, two = JobKeys(store, "j"), JobKeys(store, "j")
    assert one.put_view(view(1, "a", "b")).generation == 1
    assert two.put_view(view(1, "b")) == view(1, "a", "b")
    assert two.put_view(view(2, "b")) == view(2, "b")
    assert one.put_view(view(2, "a")) == view(2, "b")


def test_one_agent_alone_puts_view_after_view() -> None:
    keys = JobKeys(MemoryStore(), "j")
    assert [keys.put_view(view(n, "a")).generation for n in (1, 2, 3)] == [1, 2, 3]


def test_spec_is_put_once() -> None:
    store = MemoryStore()
    JobKeys(store, "j").put_spec({"seed": 0})
    JobKeys(store, "j").put_spec({"seed": 1})
    item = store.get("/elastrain/j/spec")
    assert item is not None
    assert json.loads(item.value) == {"seed": 0}


class SkippedTime:
    """A clock that jumps ahead; what happens meanwhile is done at the first wait."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        self.now_s, self.meanwhile = 0.0, [meanwhile]

    def monotonic(self) -> float:
        return self.now_s

    def time(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        while self.meanwhile:
            self.meanwhile.pop()()


def test_nodes_that_start_together_after_a_dead_job_clear_its_keys_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store, terms = (
        SealedStore(MemoryStore(), b"s" * 32),
        registration.Terms(nodes="2:2", script="train.py", layout="shared"),
    )
    dead = JobKeys(store, "j")
    dead.put_once("job", vars(terms))
    dead.put_roster(Roster(nodes=(NodeRecord(name="a", incarnation=1, workers=1),)))
    dead.put_view_again(View(generation=7, members=(Member(id="m0", node="a", incarnation=1),)))
    starts: dict[str, int] = {}

    def start(name: str) -> None:
        starts[name] = registration.enrol(JobKeys(store, "j"), store, "j", name, terms)

    monkeypatch.setattr(registration, "time", SkippedTime(lambda: start("b")))
    start("a")
    assert len(set(starts.values())) == 2
    assert store.get(dead.prefix + "view") is None


@pytest.mark.parametrize("has_view", [False, True])
def test_keys_of_a_job_whose_nodes_only_do_not_reach_the_store_are_not_cleared(
    monkeypatch: pytest.MonkeyPatch, has_view: bool
) -> None:
    """With fewer nodes than that job has, a node could begin it anew beside them."""
    secret = b"s" * 32
    store, terms = (
        SealedStore(MemoryStore(), secret),
        registration.Terms(nodes="1:3", script="train.py", layout="shared"),
    )
    keys, a = JobKeys(store, "j"), NodeRecord(name="a", incarnation=1, workers=1)
    listener, name = socket.create_server(("127.0.0.1", 0)), "m0" if has_view else a.signature
    endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
    keys.put_once("job", vars(terms))
    keys.put_roster(Roster(nodes=(replace(a, endpoint=endpoint),)))
    if has_view:
        keys.put_view_again(View(generation=7, members=(Member(id="m0", node="a", address=f"unix:x,tcp:{endpoint}"),)))
    before = store.list(keys.prefix)

    def answer() -> None:
        with listener.accept()[0] as sock, suppress(HandshakeRefused):
            run_handshake(sock, Handshake(Role.ACCEPT, secret=secret, job="j", me=name), 20.0)

    monkeypatch.setattr(registration, "time", SkippedTime(threading.Thread(target=answer, daemon=True).start))
    with pytest.raises(StoreUnavailableError, match=f"{name} of job j lives, .* start this node again"):
        registration.enrol(keys, store, "j", "b", terms)
    assert store.list(keys.prefix) == before
    listener.close()
    registration.enrol(keys, store, "j", "b", terms)
    assert store.get(keys.prefix + "roster") is None, "nobody answers"


def test_number_of_a_start_is_new_also_where_the_store_has_lost_the_count() -> None:
    there = [NodeRecord(name="a", incarnation=7, workers=1)]
    assert registration.least_start([], 100.0) == 100_000
    assert registration.least_start(there, 0.0) == 8, "a clock that has gone back"


def test_priority_that_the_kernel_does_not_change_just_now_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def limited(self: Path, text: str) -> int:
        raise BlockingIOError

    assert worker_limits.restore(os.getpid())
    monkeypatch.setattr(Path, "write_text", limited)
    assert not worker_limits.restore(os.getpid())


def test_status_is_told_while_a_node_that_was_started_again_has_said_nothing_yet(tmp_path: Path) -> None:
    """Its agent's former state is gone by then, and `elastrain status` of the whole job ended with an error."""
    whole = RunDir(path=tmp_path)
    nodes = [rundir.of_node(whole, name) for name in ("node0", "node1")]
    with pytest.raises(ConfigError, match="holds no readable run"):
        operator_messages.state(whole)
    state = describe(Core(JobConfig(workers=1), (), choose=lambda members: members[0]), "job", 0.0)
    nodes[0].write_state(state)
    assert operator_messages.state(whole)["job"] == "job"


def test_the_end_of_a_run_is_that_of_the_job_and_not_of_a_node_that_was_told_to_go(tmp_path: Path) -> None:
    """`elastrain chaos` ended with 143 for a job that had ended with 0."""
    whole = RunDir(path=tmp_path)
    state = describe(Core(JobConfig(workers=1), (), choose=lambda members: members[0]), "job", 0.0)
    for name, code, over, generation in (("node0", 143, False, 7), ("node1", 0, True, 5), ("node2", 1, True, 4)):
        end = {"sentence": name, "detail": "", "job_is_over": over}
        rundir.of_node(whole, name).write_state(state | {"exit_code": code, "end": end, "generation": generation})
        if name == "node1":
            assert (operator_messages.state(whole)["exit_code"], operator_messages.state(whole)["end"]["sentence"]) == (
                0,
                "node1",
            )
    assert operator_messages.state(whole)["exit_code"] == 1, "the highest, as that of the command"
