"""What a running job shows to others: no secret, no readable file, no port that hears anybody unproven."""

from __future__ import annotations

import base64
import json
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from elastrain.launcher.namespaces.switch import Switch, lacking
from experiments.hosts import ETCD, hosts_with_etcd
from tests.support.nodes_harness import NodesJob
from tests.support.sources import ROOT

pytestmark = pytest.mark.slow
ARGUMENTS = ("--steps", "28", "--backups", "1")
# Connects to every TCP port of the address; tells what each open one says to a greeting with a guessed secret.
SCAN = """
import errno, json, socket, struct, sys
from elastrain.comm.errors import CommError
from elastrain.comm.wire.handshake import Handshake, Role
from elastrain.comm.wire.secure import dial

def open_ports(host):
    # A socket whose call was refused can call again: one system call per port.
    found, sock = [], None
    for port in range(1, 65536):
        if sock is None:
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 30, 0))
        error = sock.connect_ex((host, port))
        assert error != errno.EINPROGRESS, f"port {port} says nothing at all"
        if error == 0:
            found.append(port)
        if error != errno.ECONNREFUSED:
            sock.close()
            sock = None
    return found

def greeted(host, port):
    sock = socket.create_connection((host, port), 5)
    hand = Handshake(Role.DIAL, secret=b"guess" * 8, job=sys.argv[2], me="m0")
    try:
        dial(sock, hand, 5)
    except CommError as error:
        return str(error)
    return "let in"

print(json.dumps({port: greeted(sys.argv[1], port) for port in open_ports(sys.argv[1])}))
"""


@pytest.fixture
def switch(tmp_path: Path) -> Iterator[Switch]:
    if (reason := lacking()) is not None:
        pytest.skip(reason)
    with hosts_with_etcd(tmp_path, ("a", "b", "stranger")) as made:
        yield made


def test_a_scan_from_another_host_finds_only_ports_that_want_proof(switch: Switch, tmp_path: Path) -> None:
    with ExitStack() as open_:
        jobs = {host: open_.enter_context(_start(switch, tmp_path, host)) for host in ("a", "b")}
        jobs["a"].wait_step(2)
        for host in ("a", "b"):
            said = _scan(switch, host)
            # An agent and a member listen there, and nobody else: no torch store, no etcd, no web page.
            assert len(said) == 2, said
            assert all("hold different secrets for job 'scanned'" in words for words in said.values()), said
            workers = [event["pid"] for event in jobs[host].events("worker_start")]
            assert _unix_listeners(jobs[host], workers) == []
        jobs["b"].hurry()
        assert jobs["a"].finish().exit_code == 0
        assert jobs["b"].finish().exit_code == 0


def _start(switch: Switch, tmp_path: Path, host: str) -> NodesJob:
    options = ("--nnodes", "2", "--rdzv-endpoint", ETCD, "--rdzv-id", "scanned", "--node-name", host)
    secret = ("--secret-file", str(tmp_path / "secret"))
    return NodesJob(tmp_path, *options, *secret, arguments=ARGUMENTS, name=f"run-{host}", inside=switch.inside(host))


def _scan(switch: Switch, host: str) -> dict[str, str]:
    command = [*switch.inside("stranger"), sys.executable, "-c", SCAN, switch.address(host), "scanned"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=360)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


def _unix_listeners(job: NodesJob, workers: list[int]) -> list[str]:
    """Names of UNIX sockets that listen on the host of these workers, but for those known to want proof."""
    rows = [line.split() for line in Path(f"/proc/{workers[0]}/net/unix").read_text().splitlines()[1:]]
    names = [row[7] for row in rows if row[3] == "00010000" and len(row) > 7]
    known = ("@elastrain/scanned/agent", "@elastrain-")
    return [name for name in names if not name.startswith(known) and Path(name).name != job.run.control.name]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodesJob]:
    """Two simulated nodes that train, with logs, and an umask that lets everybody read."""
    folder = tmp_path_factory.mktemp("exposed")
    with NodesJob(folder, "--local-nodes", "2", "--tee", "3", "--inject", arguments=ARGUMENTS) as job:
        job.wait_step(3)
        yield job
        assert job.finish().exit_code == 0


def test_the_secret_is_in_no_command_line_no_environment_and_no_file(local: NodesJob) -> None:
    secret = local.run.secret.read_bytes()
    forms = [secret, secret.hex().encode(), secret.hex().upper().encode(), base64.b64encode(secret)]
    looked_at = 0
    for path in [*Path("/proc").glob("[0-9]*/cmdline"), *Path("/proc").glob("[0-9]*/environ"), *_files(local)]:
        data = _bytes(path)
        looked_at += bool(data)
        assert not [form for form in forms if form in data], path
    assert looked_at > 20
    # The search finds what is there.
    assert secret in _bytes(local.run.secret)


def _files(job: NodesJob) -> list[Path]:
    kept = [path for path in job.run.path.rglob("*") if path.is_file() and path != job.run.secret]
    return [*kept, job.run.path.with_suffix(".log")]


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # a process that has just ended
        return b""


def test_only_its_user_may_read_or_enter_what_a_run_writes(local: NodesJob) -> None:
    """Each by its own mode; torchelastic's logs and etcd's files by that of the folder that they lie in."""
    shut = [local.run.path / "etcd", *(path for path in (local.run.path / "logs").iterdir())]
    for path in [local.run.path, *local.run.path.rglob("*")]:
        mode = path.lstat().st_mode
        assert not stat.S_ISLNK(mode), path
        if any(folder in path.parents for folder in shut):
            continue
        allowed = 0o700 if stat.S_ISDIR(mode) else 0o600
        assert stat.S_IMODE(mode) == allowed, f"{path} has mode {stat.S_IMODE(mode):o}"


def test_simulated_nodes_open_no_port_but_to_each_other_on_loopback(local: NodesJob) -> None:
    own = _job_sockets(local)
    assert own
    for table in ("tcp", "tcp6", "udp", "udp6"):
        rows = [line.split() for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
        listening = [row[1] for row in rows if row[9] in own and (row[3] == "0A" or table.startswith("udp"))]
        assert all(address.startswith("0100007F:") for address in listening), (table, listening)


def _job_sockets(job: NodesJob) -> set[str]:
    """Inodes of the sockets that the launcher, its etcd, agents and workers hold."""
    links = [link for pid in {*job.sessions(), job.process.pid, job.etcd()} for link in _links(Path(f"/proc/{pid}/fd"))]
    return {link.split("[")[1].rstrip("]") for link in links if link.startswith("socket:")}


def _links(folder: Path) -> list[str]:
    links = []
    with suppress(OSError):  # the process has ended
        for path in folder.iterdir():
            with suppress(FileNotFoundError):  # this one was closed meanwhile; the others count
                links.append(str(path.readlink()))
    return links
