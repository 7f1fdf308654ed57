"""Processes of another launcher never train as several jobs: they are one, or the first call says what to start."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend "fake"

import elastrain
from elastrain.base.foreign_world import foreign_world
from elastrain.base.world_variables import hosts_of
from elastrain.errors import ConfigError

TORCHRUN = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "none"}
SLURM = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5", "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_NTASKS": "8"}
MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(("SLURM_", "OMPI_", "PMI_", "ELASTRAIN_")) or name in TORCHRUN:
            monkeypatch.delenv(name)


@pytest.fixture
def group() -> Iterator[None]:
    """A process group that says it has two ranks. The second one never comes, which Gloo would wait for."""
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("variables", "launcher", "says"),
    [
        (
            TORCHRUN | {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "h0"},
            "torchrun, or a launcher like it,",
            "no secret file /nowhere/secret.*per-node 2 --nnodes 2 --join h0",
        ),
        (
            SLURM | {"SLURM_STEP_NODELIST": "n[1-2]"},
            "srun",
            "rank 5 of 8.*secret.*-node 4 --nnodes 2 --join n1.* with SLURM_STEP_NUM_TASKS=1 if",
        ),
        (MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "mpirun", "rank 0 of 2 on 2 hosts.*--nproc-per-node 1 --nnodes 2 "),
        (MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "mpirun", "set MASTER_ADDR to it"),
        (SLURM | {"RANK": "5", "WORLD_SIZE": "8"}, "torchrun, or a launcher like it,", "rank 5 of 8 on 2 hosts"),
    ],
    ids=["torchrun", "Slurm", "MPI", "MPI without a host", "a script of Slurm that exports torchrun's names"],
)
def test_init_in_a_world_on_several_hosts_says_what_to_start(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], launcher: str, says: str
) -> None:
    for name, value in (variables | {"ELASTRAIN_HOME": "/nowhere"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=says) as caught:
        elastrain.init()
    assert str(caught.value).startswith(f"{launcher} has started this process") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        TORCHRUN | {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "RANK": "0"},
        {"WORLD_SIZE": "4"},
        {"WORLD_SIZE": "many", "RANK": "0"},
        {"SLURM_NTASKS": "8", "SLURM_PROCID": "0"},
        TORCHRUN | {"ELASTRAIN_AGENT": "elastrain/x/agent"},
    ],
    ids=["none", "one process", "no rank", "no number", "a batch script of Slurm", "a worker of our launcher"],
)
def test_other_processes_belong_to_no_foreign_world(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert foreign_world() is None


def _address(monkeypatch: pytest.MonkeyPatch, **variables: str) -> str:
    with monkeypatch.context() as told:
        for name, value in variables.items():
            told.setenv(name, value)
        world = foreign_world()
    with monkeypatch.context() as told:
        for name, value in variables.items():
            told.setenv(name, value)
        assert world is not None
        return world.address(0, 1)


def test_ranks_of_one_world_meet_at_one_address_and_other_worlds_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    first = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1", "TORCHELASTIC_RESTART_COUNT": "0"}
    others = ({"MASTER_PORT": "2"}, {"TORCHELASTIC_RESTART_COUNT": "1"}, {"WORLD_SIZE": "3"}, {"SLURM_JOB_ID": "7"})
    addresses = [_address(monkeypatch, **first | other) for other in ({}, *others)]
    assert len(set(addresses)) == len(addresses)
    assert _address(monkeypatch, **first | {"RANK": "1", "LOCAL_RANK": "1"}) == addresses[0]


def test_torchrun_under_slurm_counts_as_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (TORCHRUN | SLURM | {"SLURM_STEP_NUM_TASKS": "1"}).items():
        monkeypatch.setenv(name, value)
    assert (world := foreign_world()) is not None and (world.rank, world.size, world.per_node) == (1, 4, 4)


def test_numbers_of_slurm_may_tell_of_several_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "3,2(x2)"}).items():
        monkeypatch.setenv(name, value)
    found = foreign_world()
    assert found is not None and (found.launcher, found.rank, found.size, found.per_node) == ("srun", 5, 8, 3)
    assert isinstance(reason := hosts_of(found), str) and "8 ranks are not 3 on each" in reason


def test_a_rank_of_a_process_group_is_no_job_of_its_own(group: None) -> None:
    with pytest.raises(
        ConfigError, match=r"is rank 1 of a process group of 2 ranks.*elastrain run --nproc-per-node 2`"
    ):
        elastrain.init()
