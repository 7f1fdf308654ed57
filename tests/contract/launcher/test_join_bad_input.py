"""Sentences of `elastrain run --join` about hosts, ports, secrets, clocks and disks that do not do."""

from __future__ import annotations

import secrets
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from elastrain.errors import ConfigError
from elastrain.launcher.cli import command_line
from elastrain.launcher.core.quorum.founding import Charter, FoundingState, Named
from elastrain.launcher.quorum import joining
from elastrain.launcher.quorum.certificates import Pair, make_pair
from elastrain.launcher.quorum.etcd_process import EtcdProcess, Ports
from elastrain.launcher.quorum.founding_round import FoundingRounds
from elastrain.launcher.quorum.join_hosts import JoinHosts, NamedHost, look_up, parse_join
from elastrain.launcher.quorum.muster import Greeting, Muster
from elastrain.launcher.quorum.node_standing import Identity, NodeStanding
from tests.support.free_ports import free_ports
from tests.support.waiting import until

HERE, THERE = "127.0.0.1", "127.0.0.2"
SECRET = bytes(range(32))


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "script.py"
    file.write_text("raise SystemExit('nothing may start')\n")
    return file


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    file = tmp_path / "secret"
    file.write_bytes(secrets.token_bytes(32))
    file.chmod(0o600)
    return file


def said(tmp_path: Path, script: Path, secret: Path, *words: str, nodes: str = "2") -> Result:
    run = ("--run-dir", str(tmp_path / "run"), "--rdzv-id", "j", "--secret-file", str(secret), "--join-timeout", "2")
    command = ["run", "--nnodes", nodes, *run, *words, str(script)]
    return CliRunner().invoke(command_line.app, command, catch_exceptions=False)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--join", "h0,h1,h0"), "names h0 twice"),
        (("--join", "h0,h1,h2,h3"), "names 4 hosts"),
        (("--join", "h0:1,h1:2"), "all hosts use one port"),
        (("--join", "h0:http"), "is not HOST or HOST:PORT"),
        (("--join", "127.0.0.1,localhost"), "are both 127.0.0.1"),
        (("--join", "127.0.0.1,127.0.0.2"), "is this host under another name"),
        (("--join", "nowhere.invalid,127.0.0.1"), "nowhere.invalid cannot be reached"),
        (("--join", "h0", "--rdzv-endpoint", "h0:2379"), "--join excludes"),
        (("--join", "h0", "--local-nodes", "2"), "--join excludes"),
        (("--join", "h0", "--etcd-user", "x"), "leave it out with --join"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_hosts_that_cannot_be_meant_are_named_in_one_sentence(
    words: tuple[str, ...], sentence: str, tmp_path: Path, script: Path, secret: Path
) -> None:
    nodes = "1" if "--local-nodes" in words else "2"
    result = said(tmp_path, script, secret, *words, nodes=nodes)
    assert result.exit_code == 2, result.output
    assert sentence in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_minimum_above_the_maximum_is_refused(tmp_path: Path, script: Path, secret: Path) -> None:
    result = said(tmp_path, script, secret, "--join", HERE, nodes="3:2")
    assert result.exit_code == 2
    assert "at most MAX" in result.stderr


def test_host_that_does_not_answer_is_named_when_the_time_is_over(tmp_path: Path, script: Path, secret: Path) -> None:
    # No host has an address of this range (RFC 5737).
    port = free_ports(3)[0]
    result = said(tmp_path, script, secret, "--join", f"{HERE}:{port},192.0.2.1:{port}")
    assert result.exit_code == 2, result.output
    assert "host 192.0.2.1 of --join cannot be reached" in result.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("offset", [0, 1, 2])
def test_taken_port_is_named(tmp_path: Path, script: Path, secret: Path, offset: int) -> None:
    with socket.create_server((HERE, 0)) as taken:
        port = taken.getsockname()[1]
        result = said(tmp_path, script, secret, "--join", f"{HERE}:{port - offset}", nodes="1")
    assert result.exit_code == 2
    assert f"port {port} of {HERE} cannot be used" in result.stderr


def test_run_folder_without_room_is_named(
    tmp_path: Path, script: Path, secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "ROOM_BYTES", 1 << 60)
    result = said(tmp_path, script, secret, "--join", f"{HERE}:{free_ports(3)[0]}", nodes="1")
    assert result.exit_code == 2
    assert "MiB left, and etcd needs" in result.stderr


def test_node_without_the_secret_is_told_where_it_is(
    tmp_path: Path, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "SECRET_S", 0.1)
    result = said(tmp_path, script, tmp_path / "none", "--join", f"192.0.2.1,{HERE}")
    assert result.exit_code == 2
    assert "this node has no secret file" in result.stderr


def test_ports_follow_the_name_and_the_default_is_the_same_everywhere() -> None:
    assert parse_join("a, b") == (("a", "b"), 29400)
    assert parse_join("a:1000,b:1000") == (("a", "b"), 1000)
    assert parse_join("[::1]:1000") == (("[::1]",), 1000)
    assert look_up(HERE).place == 0
    with pytest.raises(ConfigError, match="name each host once"):
        parse_join("a,a")


def test_names_of_pods_that_are_not_there_yet_are_no_error_in_a_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pod knows itself by its host name, also while that name still leads to the pod before it."""
    monkeypatch.setattr(socket, "gethostname", lambda: "gpt-1")
    known = {"gpt-1.gpt": "10.0.0.8"}
    monkeypatch.setattr(socket, "getaddrinfo", lambda name, port, **_: addresses(known, name))
    found = look_up("gpt-0.gpt,gpt-1.gpt", "10.0.0.9", in_a_pod=True)
    assert (found.place, [host.address for host in found.hosts]) == (1, ["", "10.0.0.9"])
    with pytest.raises(ConfigError, match=r"gpt-0\.gpt cannot be reached: it has no address here"):
        look_up("gpt-0.gpt,gpt-1.gpt", "10.0.0.9")


def addresses(known: dict[str, str], name: str) -> list[tuple[object, ...]]:
    """Answer as `getaddrinfo`."""
    if name not in known:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (known[name], 0))]


class Pairing:
    """A host with a service of its own, and the rounds of another host that asks it."""

    def __init__(self, folder: Path, name: str = "b", address: str = THERE) -> None:
        for part in ("there", "here"):
            (folder / part).mkdir()
        self.pair: Pair = make_pair(folder / "here", SECRET, HERE)
        port = free_ports(3)[0]
        self.answer = Greeting(
            job="j",
            node="there",
            instance="there.1",
            wall_s=time.time(),
            state=FoundingState(me=Named(place=1, instance="there.1", peer=f"{THERE}:1")),
        )
        self.service = Muster(THERE, port, make_pair(folder / "there", SECRET, THERE), lambda: self.answer)
        ports = Ports(client=f"{HERE}:{port + 1}", peer=f"{HERE}:{port + 2}")
        self.standing = NodeStanding(Identity(job="j", node="here", place=0, ports=ports))
        join = JoinHosts(
            hosts=(NamedHost(name="a", address=HERE), NamedHost(name=name, address=address)), port=port, place=0
        )
        etcd = EtcdProcess(folder / "here", self.pair, ports)
        self.rounds = FoundingRounds(self.standing, join, etcd, self.pair, needs_all=True)

    def __enter__(self) -> Pairing:
        return self

    def __exit__(self, *exc: object) -> None:
        self.rounds.close()
        self.service.close()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (-3600.0, r"the clock of this host is 36\d\d s ahead of that of b"),
        (3600.0, r"the clock of this host is 3\d\d\d s behind that of b"),
        ({"job": "k"}, "belongs to job k, not to j"),
        ({"node": "here"}, "has the name of this node"),
    ],
    ids=["late", "early", "job", "name"],
)
def test_host_that_does_not_fit_is_refused(tmp_path: Path, change: dict[str, object] | float, sentence: str) -> None:
    with Pairing(tmp_path) as pairing:
        assert not pairing.rounds.play()
        # Parameters are made when tests are collected, which may be minutes before.
        changed = {"wall_s": time.time() + change} if isinstance(change, float) else change
        pairing.answer = replace(pairing.answer, **changed)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=sentence):
            pairing.rounds.play()


@pytest.mark.parametrize("before", ["", "127.0.0.9"], ids=["no address yet", "another address before"])
def test_a_host_that_does_not_answer_is_asked_at_the_address_that_its_name_has_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    known: dict[str, str] = {}
    asked = socket.getaddrinfo

    def answer(name: str, *rest: object, **more: object) -> list[tuple[object, ...]]:
        return addresses(known, name) if name == "gpt-1.gpt" else asked(name, *rest, **more)  # type: ignore[arg-type,return-value]

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    with Pairing(tmp_path, "gpt-1.gpt", before) as pairing:
        assert not pairing.rounds.play()
        assert "host gpt-1.gpt of --join cannot be reached" in pairing.rounds.trouble()
        known["gpt-1.gpt"] = THERE

        def heard() -> bool:
            return not pairing.rounds.play() and "cannot be reached" not in pairing.rounds.trouble()

        until(heard, 30, "the answer of the host at its new address")


def test_quorum_that_has_lost_its_majority_is_not_joined_and_no_other_is_founded(tmp_path: Path) -> None:
    with Pairing(tmp_path) as pairing:
        state = pairing.answer.state
        assert state is not None
        charter = Charter(token="t", members=(state.me,))
        lost = replace(state, started=charter, serves=True)
        pairing.answer = replace(pairing.answer, state=lost, endpoints=(f"{HERE}:1",))
        assert not pairing.rounds.play()
        assert pairing.standing.state.promised is None and pairing.standing.state.started is None
        assert "node there is in a quorum that does not answer" in pairing.rounds.trouble()


def test_this_host_under_another_name_is_found_by_its_own_answer(tmp_path: Path) -> None:
    with Pairing(tmp_path) as pairing:
        pairing.answer = replace(pairing.answer, instance=pairing.standing.instance)
        with pytest.raises(ConfigError, match="b is this host under another name"):
            pairing.rounds.play()
