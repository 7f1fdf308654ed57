"""Ranks that another launcher starts on several hosts are one job: its digest, deaths and hosts lost, and refusals."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import pytest

from elastrain.launcher.namespaces.switch import lacking
from tests.support import slurm, warm
from tests.support.quorum_harness import QuorumHosts, quorum_hosts
from tests.support.training import SCRIPT, Run, environment, undisturbed
from tests.support.waiting import until
from tests.unit.base.test_world_variables import hydra, open_mpi, srun, torchrun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
in_namespaces = pytest.mark.skipif(lacking() is not None, reason=str(lacking()))
HOSTS, WAIT_S = ("h0", "h1"), 150.0
Tells = Callable[..., Mapping[str, str]]


class Host:
    """What runs on one host of a world: torchrun, or the ranks themselves."""

    def __init__(self, hosts: QuorumHosts, name: str) -> None:
        self.hosts, self.name = hosts, name
        self.home = hosts.folder / name
        self.home.mkdir()
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *command: str, **told: str) -> None:
        env = environment(PYTHONHASHSEED="0", ELASTRAIN_HOME=str(self.home), **told)
        with (self.home / f"{len(self.started)}.txt").open("w") as output:
            words = [*self.hosts.switch.inside(self.name), *command]
            self.started.append(warm.Popen(words, env=env, stdout=output, stderr=output, text=True))

    def text(self) -> str:
        return "".join(path.read_text() for path in sorted(self.home.glob("*.txt")))

    @property
    def run(self) -> Run:
        [folder] = (self.home / "runs").iterdir()
        return Run(max((abs(each.poll() or 0) for each in self.started), default=0), self.text(), folder)

    def reached(self, step: int) -> bool:
        with suppress(ValueError, OSError):
            return any(e["event"] == "passed" and e["step"] >= step for of in self.run.journals.values() for e in of)
        return False

    def event(self, kind: str) -> bool:
        with suppress(ValueError, OSError):
            return any(each["event"] == kind for each in self.run.events)
        return False

    def worker(self, member: str) -> int:
        return int(next(e["pid"] for e in self.run.events if e["event"] == "worker_start" and e["member"] == member))

    def end(self) -> list[int]:
        return [each.wait(WAIT_S) for each in self.started]

    def wait_gone(self) -> None:
        until(lambda: not self.hosts.pids(self.name), 60, f"the end of all processes of {self.name}")


def start_torchrun(hosts: QuorumHosts, *arguments: str, options: tuple[str, ...] = ()) -> list[Host]:
    first = hosts.switch.address("h0")
    made = [Host(hosts, name) for name in HOSTS]
    for number, host in enumerate(made):
        place = ("--nnodes", "2", "--nproc-per-node", "2", "--node-rank", str(number))
        master = options or ("--master-addr", first, "--master-port", "29500")
        command = (sys.executable, "-m", "torch.distributed.run", *place, *master, str(SCRIPT), *arguments)
        host.start(*command, ELASTRAIN_SECRET_FILE=str(hosts.secret))
    return made


def start_ranks(
    hosts: QuorumHosts, tells: Tells, *arguments: str, here: int = 2, **told: Mapping[str, str]
) -> list[Host]:
    """Plain processes, which nobody ends if one of them dies. `told`: more variables of a host."""
    made = [Host(hosts, name) for name in HOSTS]
    names = {"MASTER_ADDR": hosts.switch.address("h0"), "ELASTRAIN_SECRET_FILE": str(hosts.secret)}
    for number, host in enumerate(made):
        for local in range(here):
            variables = {**tells(number, local, here=here), **names, **told.get(host.name, {})}
            host.start(sys.executable, str(SCRIPT), *arguments, **variables)
    return made


def digest(*arguments: str) -> str:
    [alone] = set(undisturbed(*arguments).digests.values())
    return alone


@in_namespaces
@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_torchrun_on_two_hosts_starts_one_job(tmp_path: Path, backend: str) -> None:
    with quorum_hosts(tmp_path, *HOSTS) as hosts:
        at = f"{hosts.switch.address('h0')}:29400"
        c10d = ("--rdzv-backend", "c10d", "--rdzv-endpoint", at, "--rdzv-id", "x", "--local-addr")
        options = () if backend == "static" else c10d
        made = start_torchrun(hosts, "--steps", "6") if not options else _with_addresses(hosts, options)
        for host, members in zip(made, ({"m0", "m1"}, {"m2", "m3"}), strict=True):
            assert host.end() == [0], host.text()
            assert set(host.run.digests) == members
            assert set(host.run.digests.values()) == {digest("--steps", "6")}
            host.wait_gone()
            assert not (host.run.folder / "quorum").exists()
        assert hosts.secret.exists()


def _with_addresses(hosts: QuorumHosts, options: tuple[str, ...]) -> list[Host]:
    made = [Host(hosts, name) for name in HOSTS]
    for number, host in enumerate(made):
        # In a namespace the host's name has another address, by which torchrun would look for the store's host.
        own = (hosts.switch.address(host.name), "--rdzv-conf", f"is_host={number == 0}")
        place = ("--nnodes", "2", "--nproc-per-node", "2", *options, *own)
        command = (sys.executable, "-m", "torch.distributed.run", *place, str(SCRIPT), "--steps", "6")
        host.start(*command, ELASTRAIN_SECRET_FILE=str(hosts.secret))
    return made


@in_namespaces
@pytest.mark.parametrize("struck", [0, 1])
def test_torchrun_ends_one_host_for_a_killed_rank_and_the_other_goes_on(tmp_path: Path, struck: int) -> None:
    with quorum_hosts(tmp_path, *HOSTS) as hosts:
        hosts.slow.touch()
        arguments = ("--steps", "18")
        made = start_torchrun(hosts, *arguments, "--slow-while", str(hosts.slow))
        until(lambda: made[struck].reached(3), WAIT_S, "step 3")
        os.kill(made[struck].worker(f"m{2 * struck}"), 9)
        assert made[struck].end() != [0]
        other = made[1 - struck]
        until(lambda: _gone_on(other), WAIT_S, "a view of the other host")
        hosts.slow.unlink()
        until(lambda: len(other.run.digests) == 2, WAIT_S, f"the end of the job\n{other.text()}")
        assert set(other.run.digests.values()) == {digest(*arguments)}
        until(lambda: other.event("end"), WAIT_S, "the end of the node")
        if struck == 1:  # torchrun on the host of its store waits five minutes for the other one
            other.started[0].terminate()
        else:
            assert other.end() == [0], other.text()
        for host in made:
            host.wait_gone()


def _gone_on(host: Host) -> bool:
    views = [each for each in host.run.events if each["event"] == "view"]
    return len(views[-1]["members"]) == 2


@in_namespaces
@pytest.mark.parametrize("tells", [open_mpi, hydra, srun], ids=["open mpi", "hydra", "srun"])
def test_ranks_of_other_launchers_on_two_hosts_are_one_job(tmp_path: Path, tells: Tells) -> None:
    with quorum_hosts(tmp_path, *HOSTS) as hosts:
        more = {}
        if tells is srun:  # without a Slurm that could tell the addresses
            listed = ",".join(hosts.switch.address(name) for name in HOSTS)
            more = {
                name: {"SLURM_STEP_NODELIST": listed, "SLURMD_NODENAME": hosts.switch.address(name)} for name in HOSTS
            }
        for host in start_ranks(hosts, tells, "--steps", "6", **more):
            assert host.end() == [0, 0], host.text()
            assert set(host.run.digests.values()) == {digest("--steps", "6")}
            host.wait_gone()


@in_namespaces
def test_survivors_of_killed_ranks_and_of_a_lost_host_go_on(tmp_path: Path) -> None:
    with quorum_hosts(tmp_path, *HOSTS) as hosts:
        hosts.slow.touch()
        arguments = ("--steps", "18")
        first, _ = start_ranks(hosts, torchrun, *arguments, "--slow-while", str(hosts.slow))
        until(lambda: first.reached(3), WAIT_S, "step 3")
        first.started[0].kill()
        until(lambda: first.reached(7), WAIT_S, "step 7")
        hosts.lose("h1")
        until(lambda: first.reached(10), WAIT_S, "step 10")
        hosts.slow.unlink()
        assert first.end() == [-9, 0], first.text()
        assert set(first.run.digests.values()) == {digest(*arguments)}
        first.wait_gone()


@in_namespaces
def test_first_host_without_ranks_keeps_the_etcd_member_for_the_next_loss(tmp_path: Path) -> None:
    with quorum_hosts(tmp_path, *HOSTS) as hosts:
        hosts.slow.touch()
        arguments = ("--steps", "18")
        first, other = start_ranks(hosts, torchrun, *arguments, "--slow-while", str(hosts.slow))
        until(lambda: other.reached(3), WAIT_S, "step 3")
        for rank in first.started:
            rank.kill()
        until(lambda: other.reached(12), WAIT_S, "step 12")
        assert "this process stays" in first.text()
        other.started[1].kill()
        until(lambda: other.reached(14), WAIT_S, "step 14")
        hosts.slow.unlink()
        assert other.end() == [0, -9], other.text()
        assert set(other.run.digests.values()) == {digest(*arguments)}
        first.wait_gone()


@in_namespaces
def test_loss_of_the_host_of_the_only_etcd_member_parks_with_a_reason(tmp_path: Path) -> None:
    with quorum_hosts(tmp_path, *HOSTS) as hosts:
        _, other = start_ranks(hosts, torchrun, "--steps", "1000", here=1)
        until(lambda: other.reached(2), WAIT_S, "step 2")
        hosts.lose("h0")
        until(lambda: other.event("parked"), WAIT_S, "the wait")
        assert "one etcd member" in hosts.folder.joinpath("h0", "0.txt").read_text()


@in_namespaces
def test_without_a_secret_every_rank_says_what_to_do(tmp_path: Path) -> None:
    with quorum_hosts(tmp_path, *HOSTS) as hosts:
        hosts.secret.unlink()
        for host in start_ranks(hosts, torchrun, "--steps", "6"):
            assert [each.wait(180) for each in host.started] == [1, 1], host.text()
            assert host.text().count(f"has no secret file {hosts.secret}") == 2
            assert "Traceback" not in host.text() and not (host.home / "runs").exists()


@in_namespaces
def test_host_with_another_secret_is_refused_and_the_first_one_leaves_nothing(tmp_path: Path) -> None:
    with quorum_hosts(tmp_path, *HOSTS) as hosts:
        stranger = tmp_path / "stranger"
        stranger.write_bytes(secrets.token_bytes(32))
        stranger.chmod(0o600)
        told = {"h1": {"ELASTRAIN_SECRET_FILE": str(stranger)}}
        first, other = start_ranks(hosts, torchrun, "--steps", "6", **told)
        assert [each.wait(WAIT_S) for each in other.started] == [1, 1], other.text()
        assert other.text().count("holds another secret") >= 2 and "Traceback" not in other.text()
        other.wait_gone()
        first.started[1].kill()  # as a launcher does
        assert first.started[0].wait(WAIT_S) == 1
        assert "rank 1 has ended before the ranks on the other hosts came" in first.text()
        first.wait_gone()


@in_namespaces
def test_ranks_that_are_dealt_out_in_turns_are_refused_at_once(tmp_path: Path) -> None:
    def in_turns(node: int, local: int, **_: object) -> Mapping[str, str]:
        return {**open_mpi(node, local), "OMPI_COMM_WORLD_RANK": str(2 * local + node)}

    with quorum_hosts(tmp_path, *HOSTS) as hosts:
        for host in start_ranks(hosts, in_turns, "--steps", "6"):
            assert [each.wait(180) for each in host.started] == [1, 1], host.text()
            assert "deal them out host by host" in host.text()


@pytest.mark.skipif(bool(slurm.lacking()), reason=slurm.lacking())
def test_srun_on_two_nodes_starts_one_job(tmp_path: Path) -> None:
    (secret := tmp_path / "secret").write_bytes(secrets.token_bytes(32))
    secret.chmod(0o600)
    with slurm.Slurm(tmp_path / "c") as started:
        env = started.environment | environment(
            PYTHONHASHSEED="0", ELASTRAIN_HOME=str(tmp_path / "home"), ELASTRAIN_SECRET_FILE=str(secret)
        )
        command = ["srun", "-N", "2", "--ntasks-per-node=2", sys.executable]
        done = subprocess.run(
            [*command, str(SCRIPT), "--steps", "6"],
            env=env,
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    runs = [Run(0, "", folder) for folder in (tmp_path / "home" / "runs").iterdir()]
    assert sorted(member for run in runs for member in run.digests) == ["m0", "m1", "m2", "m3"]
    assert {each for run in runs for each in run.digests.values()} == {digest("--steps", "6")}
