"""Ranks of another launcher are one job: the digest of a job of one, deaths survived, an end in every case."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.free_ports import free_ports
from tests.support.training import SCRIPT, Run, assert_equal_to_undisturbed, environment, undisturbed
from tests.support.waiting import until

pytestmark = pytest.mark.slow

TELLS = {
    "torchrun": lambda rank, size, port: {"RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port},
    "srun": lambda rank, size, port: {
        "SLURM_PROCID": rank,
        "SLURM_STEP_NUM_TASKS": size,
        "SLURM_STEP_TASKS_PER_NODE": size,
        "SLURM_JOB_ID": port,
        "SLURM_STEP_ID": 0,
    },
    "mpirun": lambda rank, size, port: {
        "OMPI_COMM_WORLD_RANK": rank,
        "OMPI_COMM_WORLD_SIZE": size,
        "OMPI_COMM_WORLD_LOCAL_SIZE": size,
        "PMIX_NAMESPACE": port,
    },
}


class World:
    """Plain processes that are told of one another, as srun and mpirun start them: nobody kills them for a death."""

    def __init__(self, ranks: list[subprocess.Popen[str]], home: Path) -> None:
        self.ranks, self._home = ranks, home

    @property
    def run(self) -> Run:
        [folder] = (self._home / "runs").iterdir()
        return Run(max((max(0, rank.poll() or 0) for rank in self.ranks), default=0), self.text(), folder)

    def text(self) -> str:
        return "".join(path.read_text() for path in sorted(self._home.glob("rank*.txt")))

    def reached(self, step: int) -> bool:
        with suppress(ValueError, OSError):
            return any(e["event"] == "passed" and e["step"] >= step for of in self.run.journals.values() for e in of)
        return False

    def end(self) -> list[int]:
        return [rank.wait(90) for rank in self.ranks]

    def helper(self) -> int:
        """The process that runs the job."""
        return int(next(e for e in self.run.events if e["event"] == "start")["pid"])


@contextmanager
def world(folder: Path, size: int, *arguments: str, launcher: str = "torchrun", says: int = 0) -> Iterator[World]:
    """`says`: the size that the ranks are told, if it is another one."""
    port, ranks = free_ports()[0], []
    for rank in range(size):
        told: Mapping[str, object] = TELLS[launcher](rank, says or size, port)
        env = environment(PYTHONHASHSEED="0", ELASTRAIN_HOME=str(folder), **{k: str(v) for k, v in told.items()})
        with (folder / f"rank{rank}.txt").open("w") as output:
            ranks.append(
                warm.Popen([sys.executable, str(SCRIPT), *arguments], env=env, stdout=output, stderr=output, text=True)
            )
    try:
        yield World(ranks, folder)
    finally:
        for each in ranks:
            each.kill()
            each.wait()


def _is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("launcher", list(TELLS))
def test_ranks_of_a_launcher_train_as_one_job(tmp_path: Path, launcher: str) -> None:
    with world(tmp_path, 2, "--steps", "6", launcher=launcher) as started:
        assert started.end() == [0, 0], started.text()
        assert_equal_to_undisturbed(started.run, "--steps", "6")
        assert set(started.run.digests) == {"m0", "m1"}
        until(lambda: _is_gone(started.helper()), 30, "the job's process ends with its last rank")
        assert not (started.run.folder / "secret").exists()


def test_survivors_go_on_under_a_launcher_that_lets_them(tmp_path: Path) -> None:
    (slow := tmp_path / "slow").touch()
    arguments = ("--steps", "18")
    with world(tmp_path, 4, *arguments, "--slow-while", str(slow)) as started:
        for rank, step in ((0, 3), (2, 7), (3, 11)):  # rank 0 has started the job's process
            until(lambda step=step: started.reached(step), 60, f"step {step}")
            started.ranks[rank].kill()
            started.ranks[rank].wait()
        slow.unlink()
        assert started.end() == [-9, 0, -9, -9], started.text()
        assert_equal_to_undisturbed(started.run, *arguments)
        assert "not started again: this job replaces no workers" in started.text()
        until(lambda: _is_gone(started.helper()), 30, "the job's process ends with its last rank")


def test_ranks_stop_with_a_sentence_if_the_process_of_their_job_is_killed(tmp_path: Path) -> None:
    (slow := tmp_path / "slow").touch()
    with world(tmp_path, 2, "--steps", "40", "--slow-while", str(slow)) as started:
        until(lambda: started.reached(2), 60, "step 2")
        os.kill(started.helper(), signal.SIGKILL)
        assert all(code not in (0, None) for code in started.end()), started.text()
        assert "the launcher is gone" in started.text()
        until(lambda: not (started.run.folder / "secret").exists(), 30, "the guardian has removed the secret")


def test_a_rank_that_dies_while_the_others_are_awaited_ends_the_wait(tmp_path: Path) -> None:
    with world(tmp_path, 2, "--steps", "4", says=3) as started:
        until(lambda: _connected(tmp_path) == 2, 60, "both wait for the third")
        started.ranks[1].kill()
        assert started.ranks[0].wait(180) == 1, started.text()
        assert "rank 1 has ended before all 3 ranks called elastrain.init()" in started.text()
        assert "Traceback" not in started.text()


def _connected(home: Path) -> int:
    """Number of ranks that are connected to the meeting of the world with this home."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            if b"adoption" not in (process / "cmdline").read_bytes():
                continue
            if f"ELASTRAIN_HOME={home}".encode() not in (process / "environ").read_bytes().split(b"\0"):
                continue
            own = {os.readlink(fd) for fd in (process / "fd").iterdir()}
            sockets = [
                line.split() for line in Path("/proc/net/unix").read_text().splitlines() if "@elastrain/ranks/" in line
            ]
            return sum(state == "03" and f"socket:[{inode}]" in own for *_, state, inode, _ in sockets)
    return 0


def _command(*script: str, options: tuple[str, ...] = ()) -> list[str]:
    port = str(free_ports()[0])
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port),
        *(*options, str(SCRIPT), *script),
    ]


def _torchrun(home: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in environment(ELASTRAIN_HOME=str(home)).items() if k != "PYTHONHASHSEED"} | extra
    command = _command("--steps", "6")
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=360, check=False)


def test_torchrun_starts_one_job(tmp_path: Path) -> None:
    ran = _torchrun(tmp_path, PYTHONHASHSEED="0")
    assert ran.returncode == 0, ran.stderr
    [alone] = set(undisturbed("--steps", "6").digests.values())
    assert ran.stderr.count(f"digest {alone}") == 2


def test_a_restart_of_torchrun_begins_the_job_anew_and_leaves_nothing_of_the_first(tmp_path: Path) -> None:
    (slow := tmp_path / "slow").touch()
    command = _command("--steps", "6", "--slow-while", str(slow), options=("--max-restarts", "1"))
    env = environment(ELASTRAIN_HOME=str(tmp_path / "home"), PYTHONHASHSEED="0")
    output = tmp_path / "rank0.txt"
    with output.open("w") as file, subprocess.Popen(command, env=env, stdout=file, stderr=file) as process:
        try:
            first = World([], tmp_path / "home")
            until(lambda: first.reached(1), 90, "step 1 of the first job")
            helper = first.helper()
            victim = next(int(e["pid"]) for e in first.run.events if e["event"] == "worker_start")
            os.kill(victim, signal.SIGKILL)
            until(lambda: len(list((tmp_path / "home/runs").iterdir())) == 2, 90, "the second job")
            slow.unlink()
            assert process.wait(120) == 0, output.read_text()
        finally:
            process.kill()
    [alone] = set(undisturbed("--steps", "6").digests.values())
    assert output.read_text().count(f"digest {alone}") == 2
    until(lambda: _is_gone(helper), 30, "the process of the first job has ended")
    assert not list((tmp_path / "home/runs").glob("*/secret"))


def test_ranks_with_random_hashes_are_refused_before_anything_is_started(tmp_path: Path) -> None:
    ran = _torchrun(tmp_path)
    assert ran.returncode == 1 and "set PYTHONHASHSEED=0 in the environment of all ranks" in ran.stderr
    assert not list(tmp_path.iterdir())
