"""Real jobs of several nodes with a real etcd: workers and whole nodes are killed and come back; no bit differs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from elastrain.launcher.shared import rundir
from elastrain.launcher.simulated.embedded_etcd import EmbeddedEtcd
from elastrain.launcher.store.etcd import EtcdStore
from elastrain.launcher.store.etcd_config import EtcdConfig
from elastrain.launcher.store.registry import LEASE_S
from tests.support import warm
from tests.support.etcd_tools import add_users, make_certificates, respawn, tls_server
from tests.support.nodes_harness import ELASTRAIN, NodesJob
from tests.support.processes import in_sessions
from tests.support.training import SCRIPT, assert_equal_to_undisturbed, environment
from tests.support.waiting import until

pytestmark = pytest.mark.slow
ARGUMENTS = ("--steps", "28", "--backups", "1")


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where an etcd of nobody's job listens."""
    server = EmbeddedEtcd(tmp_path_factory.mktemp("etcd"), host="127.0.0.1")
    yield server.endpoint
    server.close()


@pytest.fixture
def own_etcd(tmp_path: Path) -> Iterator[EmbeddedEtcd]:
    """One that the test may end."""
    server = EmbeddedEtcd(tmp_path / "etcd", host="127.0.0.1")
    yield server
    server.close()


def kill_and_forget(server: EmbeddedEtcd, data: Path) -> None:
    """Its machine is gone, with the disk."""
    os.kill(server.pid, signal.SIGKILL)
    os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)
    shutil.rmtree(data)


def test_worker_killed_then_a_node_killed_then_both_return_and_nothing_is_left(tmp_path: Path) -> None:
    with NodesJob(tmp_path, "--local-nodes", "3", "--inject", arguments=ARGUMENTS) as job:
        job.wait_step(3)
        first = job.status()
        assert [m["node"] for m in first["members"]] == ["node0", "node1", "node2"]
        job.inject("kill --target member:m1")
        generation = job.wait_members("node0", "node1", "node2", after=1)
        job.wait_copied()
        job.inject("kill --target node:node2")
        generation = job.wait_members("node0", "node1", after=generation)
        generation = job.wait_members("node0", "node1", "node2", after=generation)
        members = [m["id"] for m in job.status()["members"]]
        assert members == ["m0", "m3", "m4"]
        run = job.finish()
        assert_equal_to_undisturbed(run, *ARGUMENTS)
        assert set(run.digests) == {"m0", "m3", "m4"}
        job.assert_nothing_left()
    left = job.status()
    assert (left["state"], left["exit_code"], left["steps_lost"]) == ("finished", 0, 0)
    assert [m["id"] for m in left["members"]] == members


def test_worker_and_another_node_killed_at_the_same_time(tmp_path: Path) -> None:
    arguments = ("--steps", "28", "--backups", "3")
    options = ("--local-nodes", "3", "--nproc-per-node", "2", "--max-restarts", "0")
    with NodesJob(tmp_path, *options, arguments=arguments) as job:
        job.wait_step(3)
        victim = next(e["pid"] for e in job.events("worker_start", source="agent:node0") if e["slot"] == 1)
        os.kill(victim, signal.SIGKILL)
        job.kill_node("node1")
        run = job.finish()
        assert_equal_to_undisturbed(run, *arguments)
        assert len(run.digests) == 3
        job.assert_nothing_left()


@pytest.mark.parametrize("when", ["worker_start", "view"])
def test_a_node_killed_before_the_first_commit_is_started_again_and_no_bit_differs(tmp_path: Path, when: str) -> None:
    with NodesJob(tmp_path, "--local-nodes", "3", arguments=ARGUMENTS) as job:
        for node in ("node0", "node1", "node2"):
            job.wait(when, source=f"agent:{node}")
        job.kill_node("node0")
        job.wait("node_dead", node="node0")
        job.wait_step(1)
        job.wait_members("node0", "node1", "node2", after=1)
        run = job.finish()
        assert_equal_to_undisturbed(run, *ARGUMENTS)
        assert "node0 was lost; it is started again (1 of 10)" in job.text()
        job.assert_nothing_left()


def test_a_node_that_is_lost_right_before_the_end_is_not_waited_for_when_it_comes_back(tmp_path: Path) -> None:
    """Started again, it found no job any more, waited two minutes for the others, and the command ended with 1."""
    (tmp_path / "faults").write_text("kill --target node:node2 --at step=26,phase=commit\n")
    options = ("--local-nodes", "3", "--faults", str(tmp_path / "faults"))
    with NodesJob(tmp_path, *options, arguments=ARGUMENTS) as job:
        job.wait_step(2)
        job.hurry()
        assert job.process.wait(180) == 0, job.text()
        assert "node2 was lost; it is started again (1 of 10)" in job.text()
        job.assert_nothing_left()


def test_two_nodes_lose_their_only_workers_one_after_the_other_and_the_third_has_everything(tmp_path: Path) -> None:
    with NodesJob(tmp_path, "--local-nodes", "3", arguments=ARGUMENTS) as job:
        job.wait_step(2)
        for node, member in (("node0", "m0"), ("node1", "m1")):
            (start,) = job.events("worker_start", member=member)
            begun = job.status()["step"]
            os.kill(start["pid"], signal.SIGKILL)
            job.wait("death", source=f"agent:{node}", member=member)
            job.wait_step(begun + 4)  # what was held by it has a new holder, if it had not left everything to the third
        job.wait_members("node0", "node1", "node2", after=2)
        run = job.finish()
        assert_equal_to_undisturbed(run, *ARGUMENTS)
        job.assert_nothing_left()


def test_node_of_the_last_holder_dies_while_newcomers_are_all_that_is_left(tmp_path: Path) -> None:
    arguments = ("--steps", "28", "--backups", "0")
    with NodesJob(tmp_path, "--local-nodes", "2", arguments=arguments) as job:
        job.wait_step(2)
        starts = [start for member in ("m0", "m1") for start in job.events("worker_start", member=member)]
        for start in starts:
            with suppress(ProcessLookupError):  # the job may have ended for the loss of the first
                os.kill(start["pid"], signal.SIGKILL)
        job.kill_node("node0")
        assert job.process.wait(180) == 1
        # By whoever finds it first: an agent, or newcomers who have become a view of their own.
        assert any(words in job.text() for words in ("state is gone", "with them the state", "bring its state back"))
        job.assert_nothing_left()


def test_node_that_is_started_again_when_all_were_lost_ends_with_a_sentence_and_does_not_wait_for_the_dead(
    tmp_path: Path, etcd: str
) -> None:
    def node(name: str, again: str = "") -> NodesJob:
        options = node_options(etcd, tmp_path, name, nodes="2", job="again")
        return NodesJob(tmp_path, *options, arguments=ARGUMENTS, name=name + again)

    store = EtcdStore(EtcdConfig(endpoints=(etcd,)))
    with node("a") as a, node("b") as b:
        a.wait_step(2)
        key = f"/elastrain/again-{os.getpid()}/nodes/b"
        b_was = store.get(key)
        assert b_was is not None
        a.kill_node("a")
        b.kill_node("b")
        # The first comes back before the key of the other has gone, however slow this machine is.
        lease = store.grant(60.0)
        store.commit(expect={}, put={key: b_was.value}, lease=lease)
        with node("a", "-again") as again:
            again.wait("start")
            store.revoke(lease)
            assert again.process.wait(180) == 1
            assert "every member of the view is gone, and with them the state" in again.text()
    store.close()


@pytest.mark.timeout(900)  # outages take as long as they take, also where the machine is busy
def test_etcd_outage_longer_than_the_leases_stops_no_step_and_ends_nobody_and_a_loss_during_it_waits(
    tmp_path: Path,
) -> None:
    with NodesJob(tmp_path, "--local-nodes", "3", "--inject", arguments=ARGUMENTS) as job:
        job.wait_step(2)
        job.signal_etcd(signal.SIGSTOP)
        stopped_at = job.status()["step"]
        for node in ("node0", "node1", "node2"):
            # Calls wait longer than a lease lives: all leases have ended by now.
            job.wait("store_away", source=f"agent:{node}")
        job.wait_step(stopped_at + 4)
        job.inject("kill --target member:m1")
        parked = job.wait("parked")
        assert parked["lost"] == ["m1"]
        state = job.status()
        assert state["parked"].startswith("m1 lost, and the store does not answer")
        assert state["store_away_s"] >= state["parked_s"] >= 0
        assert state["generation"] == 1
        job.signal_etcd(signal.SIGCONT)
        job.wait("view", generation=2)
        assert job.wait("unparked")["t"] > parked["t"]
        job.wait("store_back")
        job.wait_members("node0", "node1", "node2", after=1)
        run = job.finish()
        assert_equal_to_undisturbed(run, *ARGUMENTS)
        assert reasons(job) == {1: "all 3 workers are ready", 2: "m1 lost", 3: "m3 joined"}
        assert job.text().count("elastrain: finished after step 27\n") == 1
        assert job.text().count("elastrain: the store does not answer") == 1
        job.assert_nothing_left()


@pytest.mark.timeout(900)
def test_the_first_commit_waits_for_an_etcd_that_stands_still_and_no_other_does(tmp_path: Path) -> None:
    faults = tmp_path / "faults"
    faults.write_text("hang --target member:m0 --at step=0,phase=forward --for 4 --how forward\n")
    with NodesJob(tmp_path, "--local-nodes", "2", "--faults", str(faults), arguments=ARGUMENTS) as job:
        job.wait_all("view", count=2)  # a proposal that is under way would park the job for another reason
        job.signal_etcd(signal.SIGSTOP)  # while the first step is computed
        parked = job.wait("parked")
        assert parked["reason"] == "the first commit of the job waits for the store, which does not answer"
        assert job.status()["step"] is None
        job.signal_etcd(signal.SIGCONT)
        assert job.wait("unparked")["t"] > parked["t"]
        job.wait_step(1)
        assert_equal_to_undisturbed(job.finish(), *ARGUMENTS)
        assert reasons(job) == {1: "all 2 workers are ready"}


def test_an_etcd_of_the_launcher_that_is_killed_is_started_again_and_members_come_and_go(tmp_path: Path) -> None:
    with NodesJob(tmp_path, "--local-nodes", "3", "--inject", arguments=ARGUMENTS) as job:
        job.wait_step(2)
        job.signal_etcd(signal.SIGKILL)
        job.inject("kill --target member:m1")
        job.wait("view", generation=2)
        job.wait_members("node0", "node1", "node2", after=2)
        assert_equal_to_undisturbed(job.finish(), *ARGUMENTS)
        assert job.text().count("elastrain: etcd has ended: it is started again") == 1
        job.assert_nothing_left()


def reasons(job: NodesJob) -> dict[int, str]:
    """Generation -> why it came."""
    return {e["generation"]: e["reason"] for e in job.events("view")}


@pytest.mark.timeout(900)  # outages take as long as they take, also where the machine is busy
def test_external_etcd_killed_and_back_without_its_data_ends_nobody_but_a_lost_worker(
    tmp_path: Path, own_etcd: EmbeddedEtcd
) -> None:
    def node(name: str) -> NodesJob:
        options = node_options(own_etcd.endpoint, tmp_path, name, nodes="3")
        return NodesJob(tmp_path, *options, arguments=ARGUMENTS, name=name)

    with node("a") as a, node("b") as b, node("c") as c:
        a.wait_step(2)
        kill_and_forget(own_etcd, tmp_path / "etcd" / "data")
        for job in (a, b, c):
            job.wait("store_away")
        a.wait_step(a.status()["step"] + 3)
        lost = b.events("worker_start")[0]
        os.kill(lost["pid"], signal.SIGKILL)
        for job in (a, b, c):  # b's agent cannot judge, and says so, too
            assert job.wait("parked")["lost"] == [lost["member"]]
        respawn(own_etcd)
        for job in (a, b, c):
            job.wait("unparked")
        a.wait_members("a", "b", "c", after=1)
        # Nobody takes the job's keys along while a missing key may be that of a node which has not come back yet.
        trusted_s = max(job.wait("store_back")["t"] for job in (a, b, c)) + 2 * LEASE_S
        until(lambda: time.monotonic() > trusted_s, 60, "the end of the distrust")
        runs = [job.finish() for job in (a, b, c)]
        assert [run.exit_code for run in runs] == [0, 0, 0]
        assert_equal_to_undisturbed(runs[0], *ARGUMENTS)
        assert len({digest for run in runs for digest in run.digests.values()}) == 1
        # Two views may follow one another so soon that some agents see only the second.
        seen = reasons(a) | reasons(b) | reasons(c)
        first, left = {1: "all 3 workers are ready"}, f"{lost['member']} lost"
        # The replacement may be ready before the store is trusted again: then one view does both.
        assert seen in ({**first, 2: left, 3: "m3 joined"}, {**first, 2: f"{left}; m3 joined"})
    store = EtcdStore(EtcdConfig(endpoints=(own_etcd.endpoint,)))
    wait_until_no_key_is_left(store)
    store.close()


def wait_until_no_key_is_left(store: EtcdStore) -> None:
    """But how the job ended, which etcd forgets by itself."""

    def left() -> list[str]:
        return [item.key for item in store.list("/elastrain/").items if not item.key.startswith("/elastrain/.ended/")]

    until(lambda: not left(), 40, f"no key left: {left()}")


def node_options(etcd: str, tmp_path: Path, name: str, nodes: str = "2:3", job: str = "separate") -> tuple[str, ...]:
    job = f"{job}-{os.getpid()}"  # names are the machine's: these tests may run several times at once
    secret = ("--secret-file", str(tmp_path / "secret"))
    return ("--nnodes", nodes, "--rdzv-endpoint", etcd, "--rdzv-id", job, "--node-name", name, *secret)


AN_HOUR_AHEAD = """
import sys, time
from elastrain.launcher.cli.main import main
from elastrain.launcher.shared import clocks
clocks.wall_s = lambda: time.time() + 3600
sys.argv[:] = sys.argv[3:]  # without the words that start this Python
main()
"""


def test_a_node_whose_clock_is_an_hour_ahead_is_refused_in_one_sentence(tmp_path: Path, own_etcd: EmbeddedEtcd) -> None:
    """The clock of one process is another one: its reader is replaced there."""
    with NodesJob(
        tmp_path, *node_options(own_etcd.endpoint, tmp_path, "a", job="clock"), arguments=ARGUMENTS, name="a"
    ) as first:
        until(lambda: "run folder" in first.text(), 120, "the first node's start")
        late = NodesJob(
            tmp_path,
            *node_options(own_etcd.endpoint, tmp_path, "b", job="clock"),
            arguments=ARGUMENTS,
            name="b",
            inside=(sys.executable, "-c", AN_HOUR_AHEAD),
        )
        with late:
            end = late.end(180)
            assert end.exit_code == 1, end.output
            told = [line for line in end.output.splitlines() if "the clock of" in line]
            assert len(told) == 1 and "s ahead of that of node a: set both by NTP" in told[0], end.output
        assert first.process.poll() is None, first.text()


def test_nodes_of_separate_commands_one_of_them_late_one_killed_leave_no_key(tmp_path: Path, etcd: str) -> None:
    def node(name: str) -> NodesJob:
        options = (*node_options(etcd, tmp_path, name), "--last-call", "0.5", "--inject")
        return NodesJob(tmp_path, *options, arguments=ARGUMENTS, name=name)

    with node("a") as a, node("b") as b:
        a.wait_step(2)
        with node("c") as c:
            generation = a.wait_members("a", "b", "c", after=1)
            b.kill_node("b")
            a.wait_members("a", "c", after=generation)
            b.process.wait(5)
            at_a, at_c = a.finish(), c.finish()
            assert_equal_to_undisturbed(at_a, *ARGUMENTS)
            assert (sorted(at_a.digests), at_c.exit_code) == (["m0"], 0)
            assert set(at_a.digests.values()) == set(at_c.digests.values())
            for job in (a, c):
                job.assert_nothing_left()
    store = EtcdStore(EtcdConfig(endpoints=(etcd,)))
    wait_until_no_key_is_left(store)
    store.close()


RAISES_ON_NODE0 = """
import os, time
import torch, elastrain
torch.set_num_threads(1)
job = elastrain.init(seed=0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = elastrain.DataLoader(torch.randn(64, 4), global_batch_size=8, micro_batch_size=2)
model, optimizer, loader = job.prepare(model, optimizer, loader)
try:
    for step in job.steps(loader, until=1000):
        for batch in step:
            step.backward(model(batch).square().mean())
        if step.number == 2 and os.environ["ELASTRAIN_NODE"] == "node0":
            raise ValueError("after a whole step")
finally:
    if os.environ["ELASTRAIN_NODE"] == "node0":
        time.sleep(2)  # it saves something, say, while the other is done
"""


def test_an_exception_that_ends_the_loop_of_half_of_the_members_is_no_nodes_success(tmp_path: Path) -> None:
    """The other node heard that the loop was left, not how, and ended with 0."""
    script = tmp_path / "raises.py"
    script.write_text(RAISES_ON_NODE0)
    with NodesJob(tmp_path, "--local-nodes", "2", arguments=(), script=script, held="") as job:
        assert job.end().exit_code == 1, job.text()
        ends = {node.path.name: node.read_state() for node in rundir.nodes_of(job.run)}
        assert {name: state["exit_code"] for name, state in ends.items()} == {"node0": 1, "node1": 1}, job.text()
        assert "elastrain: m0 ended with exit code 1 after an exception in its loop" in job.text()
        job.assert_nothing_left()


def test_separate_commands_whose_members_end_with_different_parameters_both_exit_with_1(
    tmp_path: Path, etcd: str
) -> None:
    """The node that is done first waits for what the other has: it exited with 0, and only the slower one with 1."""

    def node(name: str) -> NodesJob:
        options = node_options(etcd, tmp_path, name, nodes="2", job="parted")
        script, arguments = SCRIPT.parent / "altered_training.py", ("--alter", "m1", "--late", "4")
        return NodesJob(tmp_path, *options, arguments=arguments, name=name, script=script)

    with node("a") as a, node("b") as b:
        ended = [job.finish() for job in (a, b)]
        assert [run.exit_code for run in ended] == [1, 1]
        for run in ended:
            assert "the parameters at the end differ: m0 has the digest" in run.output
        assert a.events("await_digests", members=["m1"])
        for job in (a, b):
            job.assert_nothing_left()


def test_job_whose_lease_was_lost_writes_its_keys_again_and_etcd_forgets_it_when_all_agents_are_killed(
    tmp_path: Path, etcd: str
) -> None:
    job = f"/elastrain/orphaned-{os.getpid()}/"
    standing = {job + name for name in ("job", "lease", "nodes/a", "nodes/b", "roster", "spec", "view")}
    store = EtcdStore(EtcdConfig(endpoints=(etcd,)))

    def keys() -> dict[str, bytes]:
        return {item.key: item.value for item in store.list("/elastrain/").items if "orphaned" in item.key}

    def node(name: str) -> NodesJob:
        times = ("--key-ttl", "6", "--park-timeout", "5")
        options = node_options(etcd, tmp_path, name, nodes="2", job="orphaned")
        return NodesJob(tmp_path, *options, *times, arguments=ARGUMENTS, name=name)

    with node("a") as a, node("b") as b:
        a.wait_step(2)
        assert f"/elastrain/.secrets/orphaned-{os.getpid()}" in keys()
        lease = keys()[job + "lease"]
        store.revoke(int(lease[32:]))  # behind the seal
        until(lambda: standing <= set(keys()) and keys()[job + "lease"] != lease, 40, "the keys again")
        for agent in (a, b):
            os.kill(agent.agent(agent.run.path.name), signal.SIGKILL)
        until(lambda: not keys(), 40, "an etcd without the job")
        for agent in (a, b):
            until(lambda agent=agent: not in_sessions(set(agent.sessions())), 40, "the end of all workers")  # type: ignore[misc]
    store.close()


def test_same_exception_on_members_of_two_nodes_ends_the_job_with_its_traceback_on_every_screen(
    tmp_path: Path, etcd: str
) -> None:
    arguments = ("--steps", "8", "--backups", "all", "--raise-at", "3")

    def node(name: str) -> NodesJob:
        options = node_options(etcd, tmp_path, name, nodes="3", job="raising")
        return NodesJob(tmp_path, *options, arguments=arguments, name=name)

    with node("a") as a, node("b") as b, node("c") as c:
        ends = [job.finish() for job in (a, b, c)]
    assert [end.exit_code for end in ends] == [1, 1, 1]
    for end in ends:
        said, _, traceback = end.output.rpartition("it is a fault in the script, not in a machine")
        assert "raised the same exception at step 3, micro-batch 4" in said
        assert "a mistake in micro-batch 4" in traceback


def refused(tmp_path: Path, *options: str, name: str = "refused") -> str:
    """The one sentence that a wrong command ends with."""
    command = [*ELASTRAIN, "run", *options, "--run-dir", str(tmp_path / name), str(SCRIPT), *ARGUMENTS]
    done = warm.run(command, env=environment(), capture_output=True, text=True, timeout=270)
    assert done.returncode in (1, 2), done.stderr
    assert "Traceback" not in done.stderr
    assert "Handshake" not in done.stderr  # gRPC's own words
    said = [line for line in done.stderr.splitlines() if line.startswith("elastrain: ")]
    return said[-1].removeprefix("elastrain: ")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--nnodes", "3:2"), "--nnodes 3:2: MIN must be 1 or more, and at most MAX"),
        (("--nnodes", "0"), "--nnodes 0: MIN must be 1 or more"),
        (("--nnodes", "two"), "--nnodes 'two': write N, or MIN:MAX"),
        (("--nnodes", "2"), "several nodes find each other by --rdzv-endpoint HOST:PORT"),
        (("--local-nodes", "2", "--nnodes", "2"), "--local-nodes excludes --standalone, --nnodes and --rdzv-endpoint"),
        (("--standalone", "--nnodes", "2"), "--standalone means one node"),
        (("--key-ttl", "60"), "--key-ttl 60: it must be more than --park-timeout (3600)"),
        (("--local-ranks-filter", "one"), "--local-ranks-filter 'one': write local ranks"),
        (("--local-ranks-filter", "3,1"), "--local-ranks-filter 3,1: none of them is a local rank of this node's 1"),
    ],
)
def test_nodes_that_can_not_be_are_refused_in_one_sentence(
    tmp_path: Path, options: tuple[str, ...], sentence: str
) -> None:
    assert refused(tmp_path, *options).startswith(sentence)


def test_unreachable_etcd_and_wrong_tls_files_are_refused(tmp_path: Path, etcd: str) -> None:
    options = node_options("127.0.0.1:1", tmp_path, "a")
    assert refused(tmp_path, *options).startswith(
        "etcd at 127.0.0.1:1 does not answer (127.0.0.1:1: Connection refused): is it running"
    )
    wrong = tmp_path / "ca.pem"
    wrong.write_text("no certificate\n")
    sentence = refused(tmp_path, *node_options(etcd, tmp_path, "a"), "--etcd-ca", str(wrong))
    assert sentence.startswith(f"{wrong} is no file of CA certificates")


def test_wrong_password_is_refused_in_one_sentence(tmp_path: Path, own_etcd: EmbeddedEtcd) -> None:
    add_users(own_etcd.endpoint, {"root": "secret", "ann": "right"})
    password = tmp_path / "password"
    password.write_text("wrong\n")
    password.chmod(0o600)
    options = node_options(own_etcd.endpoint, tmp_path, "a")
    user = ("--etcd-user", "ann", "--etcd-password-file", str(password))
    assert refused(tmp_path, *options, *user).endswith("refuses: wrong user or password")
    assert refused(tmp_path, *options).endswith("it wants a user and a password, and none were given")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl program to make certificates with")
def test_wrong_certificates_are_refused_in_one_sentence(tmp_path: Path) -> None:
    certificates = make_certificates(tmp_path)
    (tmp_path / "tls").mkdir()
    with tls_server(tmp_path / "tls", certificates) as endpoint:
        other = ("--etcd-ca", str(certificates.other_ca))
        sentence = refused(tmp_path, *node_options(endpoint, tmp_path, "a"), *other)
        assert sentence.endswith("the TLS files do not fit it (unable to get local issuer certificate)")


def test_too_few_nodes_a_lacking_secret_and_a_second_job_of_the_same_id(tmp_path: Path, etcd: str) -> None:
    few = (*node_options(etcd, tmp_path, "a", nodes="2", job="few"), "--join-timeout", "8")
    with NodesJob(tmp_path, *few, arguments=ARGUMENTS, name="first") as first:
        first.wait("start")
        lacking = (*few[:-4], "--secret-file", str(tmp_path / "elsewhere"))
        sentence = refused(tmp_path, *lacking, name="second")
        assert sentence.startswith(f"this node has no secret for job few-{os.getpid()}: copy ")
        assert f"{tmp_path / 'secret'} to {tmp_path / 'elsewhere'}" in sentence
        other = node_options(etcd, tmp_path, "b", nodes="3", job="few")
        assert refused(tmp_path, *other, name="third").startswith(
            f"a job few-{os.getpid()} runs already, with nodes 2:2 (here: 3:3)"
        )
        assert first.process.wait(30) == 1
        assert "1 of at least 2 nodes came within 8 s (a): start the others" in first.text()


def test_nodes_with_fewer_members_than_stages_all_end_with_the_same_sentence(tmp_path: Path, etcd: str) -> None:
    def node(name: str) -> NodesJob:
        options = (*node_options(etcd, tmp_path, name, nodes="2", job="stages"), "--stages", "3")
        return NodesJob(tmp_path, *options, arguments=ARGUMENTS, name=name)

    with node("a") as a, node("b") as b:
        for job in (a, b):
            assert job.process.wait(180) == 1
            assert "--stages 3 asks for pipelines of 3 members, and the nodes that came (a, b) have 2" in job.text()
            assert not job.events("worker_start")
        for job in (a, b):  # both have ended: they have one job's name
            job.assert_nothing_left()
    wait_until_no_key_is_left(EtcdStore(EtcdConfig(endpoints=(etcd,))))


def test_what_scripts_are_told_about_several_nodes(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    script.write_text(
        "import json, os, pathlib, sys\n"
        f"told = {{name: os.environ[name] for name in {names!r}}}\n"
        "pathlib.Path(sys.argv[1], 'rank' + told['RANK']).write_text(json.dumps(told))\n"
    )
    command = [*ELASTRAIN, "run", "--local-nodes", "2", "--nproc-per-node", "2", "--run-dir", str(tmp_path / "run")]
    done = warm.run(
        [*command, str(script), str(tmp_path)], env=environment(), capture_output=True, text=True, timeout=360
    )
    assert done.returncode == 0, done.stderr
    told = [json.loads((tmp_path / f"rank{rank}").read_text()) for rank in range(4)]
    assert [(t["RANK"], t["LOCAL_RANK"], t["GROUP_RANK"]) for t in told] == [
        ("0", "0", "0"),
        ("1", "1", "0"),
        ("2", "0", "1"),
        ("3", "1", "1"),
    ]
    assert {(t["WORLD_SIZE"], t["GROUP_WORLD_SIZE"], t["MASTER_ADDR"], t["MASTER_PORT"]) for t in told} == {
        ("4", "2", "127.0.0.1", told[0]["MASTER_PORT"])
    }


def test_node_whose_script_ends_before_the_agents_have_met_is_not_lost(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "from elastrain.launcher.nodes.agent_links import Links\n"
        "Links._dial = lambda self, link: None  # they never meet\n"
    )
    script = tmp_path / "script.py"
    script.write_text("import os, time\ntime.sleep(2.0 * int(os.environ['GROUP_RANK']))\n")
    command = [*ELASTRAIN, "run", "--local-nodes", "2", "--nproc-per-node", "1", "--run-dir", str(tmp_path / "run")]
    paths = {**environment(), "PYTHONPATH": str(tmp_path)}
    done = warm.run([*command, str(script)], env=paths, capture_output=True, text=True, timeout=360)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("every worker's script has ended") == 2
