"""The checks before a start: what each finding means, real drives and links, and the exit code."""

from __future__ import annotations

import json
import resource
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from elastrain.launcher.cli import command_line
from elastrain.launcher.store.etcd_config import EtcdConfig
from elastrain.launcher.watch.preflight import drive_checks, host_checks, machine_facts, peer_link, store_checks
from elastrain.launcher.watch.preflight.check import StartCheck, StartVerdict

OK, WARNS, STOPS = StartVerdict.OK, StartVerdict.WARNS, StartVerdict.STOPS
SECRET = bytes(range(32))
FACTS = {"torch": "2.13.0", "kernel sum": "00ff"}


@pytest.mark.parametrize(
    ("check", "verdict"),
    [
        (host_checks.descriptors(64), STOPS),
        (host_checks.descriptors(1024), WARNS),
        (host_checks.descriptors(20_000), OK),
        (host_checks.descriptors(resource.RLIM_INFINITY), OK),
        (host_checks.locked_memory(0), WARNS),
        (host_checks.locked_memory(resource.RLIM_INFINITY), OK),
        (host_checks.shared_memory(None), STOPS),
        (host_checks.shared_memory(1 << 20), STOPS),
        (host_checks.shared_memory(64 << 20), WARNS),
        (host_checks.shared_memory(8 << 30), OK),
        (host_checks.clock_kept(False), WARNS),
        (host_checks.clock_kept(None), OK),
        (host_checks.clock_against("b", 3600.0), STOPS),
        (host_checks.clock_against("b", -3.0), WARNS),
        (host_checks.clock_against("b", 0.0002), OK),
        (drive_checks.rated("d", 100 << 30, 1e9, 1e9), OK),
        (drive_checks.rated("d", 100 << 30, 1e6, 1e9), WARNS),
        (drive_checks.rated("d", 1 << 30, 1e9, 1e9), WARNS),
        (store_checks.of_version("a:1", "3.5.1"), OK),
        (store_checks.of_version("a:1", "3.3.9"), STOPS),
        (store_checks.of_version("a:1", "nonsense"), STOPS),
        (peer_link.measured("b", 0.0002, 1e9), OK),
        (peer_link.measured("b", 0.2, 1e9), WARNS),
        (machine_facts.compared("b", FACTS, FACTS), OK),
        (machine_facts.compared("b", FACTS, {**FACTS, "kernel sum": "00fe"}), STOPS),
        (machine_facts.of_this_machine({"error": "no module named torch"})[0], STOPS),
    ],
)
def test_each_finding_has_a_verdict_and_advice_where_it_is_needed(check: StartCheck, verdict: StartVerdict) -> None:
    assert check.verdict is verdict, check
    assert bool(check.advice) == (verdict is not OK) and check.found


def test_a_difference_is_named_with_both_values() -> None:
    found = machine_facts.compared("b:1", FACTS, {**FACTS, "torch": "2.12.0"}).found
    assert found == "torch: 2.13.0 here, 2.12.0 there"


def test_this_host_and_a_real_drive_are_looked_at_without_traces(tmp_path: Path) -> None:
    assert {check.name for check in host_checks.look()} == {"descriptors", "memlock", "/dev/shm", "clock"}
    check = drive_checks.look("--checkpoint-dir", tmp_path / "not/yet")
    assert check.verdict is not STOPS and "writes" in check.found and list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_stops_a_job() -> None:
    assert drive_checks.look("--offload-dir", Path("/proc/self")).verdict is STOPS


def test_what_moves_a_devices_bytes_is_told_of_each_folder_that_is_there(tmp_path: Path) -> None:
    told = drive_checks.ways([tmp_path, tmp_path / "not there"])
    assert [(each.name, each.verdict) for each in told] == [(f"device's bytes to {tmp_path}", OK)]
    assert drive_checks.ways([tmp_path / "not there"]) == []
    failed = drive_checks.way("/ssd", {"error": "no module named torch"})
    assert (failed.verdict, failed.found) == (WARNS, "no module named torch")
    by_kvikio = {"/ssd": {"moved_by": "GPUDirect", "reason": "the probe took 0.5 s"}}
    assert drive_checks.way("/ssd", by_kvikio).found == "GPUDirect: the probe took 0.5 s"


@pytest.fixture
def peer() -> Iterator[tuple[str, int]]:
    listener = socket.create_server(("127.0.0.1", 0))
    said: list[str] = []
    threading.Thread(target=_served, args=(listener, said), daemon=True).start()
    yield listener.getsockname()[:2]
    listener.close()


def _served(listener: socket.socket, said: list[str]) -> None:
    try:
        peer_link.serve(listener, SECRET, FACTS, said.append)
    except OSError:  # the test is over
        return


def test_a_link_is_measured_and_the_machines_are_compared(peer: tuple[str, int]) -> None:
    link, clock, versions = peer_link.look(peer, SECRET, FACTS)
    assert "there and back" in link.found and link.verdict is not STOPS
    assert clock.verdict is OK and versions.verdict is OK
    *_, other = peer_link.look(peer, SECRET, {**FACTS, "torch": "1"})
    assert other.verdict is STOPS, "and one peer after the other is served"


def test_a_stranger_without_the_secret_learns_nothing(peer: tuple[str, int]) -> None:
    (link,) = peer_link.look(peer, bytes(32), FACTS)
    assert link.verdict is STOPS and "different secrets" in link.found
    with socket.create_connection(peer) as sock:
        sock.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert b"2.13" not in sock.recv(4096)
    assert len(peer_link.look(peer, SECRET, FACTS)) == 3, "the server goes on"


def test_a_peer_that_is_not_there_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = free.getsockname()[:2]
    (link,) = peer_link.look(address, SECRET, FACTS)
    assert link.verdict is STOPS and "--listen" in link.advice


class _Version(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps({"etcdserver": "3.6.1", "etcdcluster": "3.6.0"}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def test_the_version_of_each_endpoint_is_asked() -> None:
    with HTTPServer(("127.0.0.1", 0), _Version) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        check = store_checks._version(f"127.0.0.1:{server.server_port}", EtcdConfig(endpoints=("x:1",)))
        server.shutdown()
    assert (check.verdict, check.found) == (OK, "version 3.6.1")


def test_the_exit_code_says_if_something_would_stop_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_facts, "facts", lambda: FACTS)
    folders = ["--checkpoint-dir", str(tmp_path), "--offload-dir", str(tmp_path)]
    asked = CliRunner().invoke(command_line.app, ["doctor", "--json", *folders])
    told = json.loads(asked.stdout)
    assert (asked.exit_code, told["ok"]) == (0, True)
    assert f"device's bytes to {tmp_path}" in {each["name"] for each in told["checks"]}
    assert {"versions", "fixed kernels", "descriptors", f"--checkpoint-dir {tmp_path}"} <= {
        each["name"] for each in told["checks"]
    }
    asked = CliRunner().invoke(command_line.app, ["doctor", "--offload-dir", "/proc/self"])
    assert asked.exit_code == 1 and "✗ stops" in asked.stdout


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["train.py"], "--memory or --bits"),
        (["--memory"], "name the script"),
        (["--memory", "--bits", "train.py"], "or neither"),
        (["--peers", "nonsense"], "write HOST:PORT"),
        (["--peers", "a:1", "--secret-file", "/nowhere"], "cannot be read"),
    ],
)
def test_bad_input_is_one_sentence_and_code_2(words: list[str], sentence: str) -> None:
    asked = CliRunner().invoke(command_line.app, ["doctor", *words])
    assert asked.exit_code == 2 and sentence in asked.stderr


@pytest.mark.slow
def test_the_facts_of_this_machine_are_told_by_a_real_process() -> None:
    told = machine_facts.facts()
    assert "error" not in told and told["torch"] and sum(name.startswith("kernel ") for name in told) > 5
    assert machine_facts.facts() == told
