"""What the variables of torchrun, mpirun and srun tell of a world, and of its hosts as the nodes of a job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from elastrain.base.foreign_world import RanksHere, ranks_here
from elastrain.base.world_variables import (
    FIRST_PORT,
    PLACES,
    PORTS,
    ForeignWorld,
    WorldHosts,
    expand_hosts,
    hosts_of,
    world_in,
)

Variables = Mapping[str, str]


def torchrun(node: int, local: int, *, nodes: int = 2, here: int = 2, **more: str) -> Variables:
    told = {
        "RANK": node * here + local,
        "WORLD_SIZE": nodes * here,
        "LOCAL_RANK": local,
        "LOCAL_WORLD_SIZE": here,
        "GROUP_RANK": node,
        "GROUP_WORLD_SIZE": nodes,
        "MASTER_ADDR": "h0",
        "MASTER_PORT": 29500,
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": 0,
    }
    return {name: str(value) for name, value in told.items()} | more


def srun(node: int, local: int, *, nodes: int = 2, here: int = 2, **more: str) -> Variables:
    told = {
        "SLURM_PROCID": node * here + local,
        "SLURM_STEP_NUM_TASKS": nodes * here,
        "SLURM_STEP_TASKS_PER_NODE": f"{here}(x{nodes})",
        "SLURM_LOCALID": local,
        "SLURM_NODEID": node,
        "SLURM_STEP_NUM_NODES": nodes,
        "SLURM_STEP_NODELIST": f"n[1-{nodes}]",
        "SLURMD_NODENAME": f"n{node + 1}",
        "SLURM_JOB_ID": 17,
        "SLURM_STEP_ID": 0,
    }
    return {name: str(value) for name, value in told.items()} | more


def open_mpi(node: int, local: int, *, nodes: int = 2, here: int = 2, **more: str) -> Variables:
    told = {
        "OMPI_COMM_WORLD_RANK": node * here + local,
        "OMPI_COMM_WORLD_SIZE": nodes * here,
        "OMPI_COMM_WORLD_LOCAL_SIZE": here,
        "OMPI_COMM_WORLD_LOCAL_RANK": local,
        "PMIX_NAMESPACE": "prterun-h0-4711@1",
        "MASTER_ADDR": "h0",
    }
    return {name: str(value) for name, value in told.items()} | more


def hydra(node: int, local: int, *, nodes: int = 2, here: int = 2, **more: str) -> Variables:
    told = {
        "PMI_RANK": node * here + local,
        "PMI_SIZE": nodes * here,
        "MPI_LOCALNRANKS": here,
        "MPI_LOCALRANKID": local,
        "MASTER_ADDR": "h0",
        "MASTER_PORT": 29500,
    }
    return {name: str(value) for name, value in told.items()} | more


LAUNCHERS = {"torchrun": torchrun, "srun": srun, "open mpi": open_mpi, "hydra": hydra}


def world(variables: Variables) -> ForeignWorld:
    found = world_in(variables)
    assert found is not None
    return found


def hosts(variables: Variables) -> WorldHosts:
    found = hosts_of(world(variables))
    assert isinstance(found, WorldHosts), found
    return found


def ranks(tells: str, nodes: int = 2, here: int = 2) -> Iterator[tuple[int, int, ForeignWorld]]:
    for node in range(nodes):
        for local in range(here):
            yield node, local, world(LAUNCHERS[tells](node, local, nodes=nodes, here=here))


@pytest.mark.parametrize("tells", LAUNCHERS)
@pytest.mark.parametrize(("nodes", "here"), [(2, 2), (2, 1), (4, 8)])
def test_all_ranks_find_one_job_with_a_node_for_each_host(tells: str, nodes: int, here: int) -> None:
    jobs, addresses = set(), dict[int, set[str]]()
    for node, local, found in ranks(tells, nodes, here):
        plan = hosts_of(found)
        assert isinstance(plan, WorldHosts)
        assert (found.rank, found.first_rank, found.size) == (node * here + local, node * here, nodes * here)
        assert (plan.node, plan.nodes) == (node, nodes)
        jobs.add((plan.job, plan.port, plan.hosts))
        addresses.setdefault(node, set()).add(found.address(0, 1))
    assert len(jobs) == 1
    assert all(len(found) == 1 for found in addresses.values())


def test_the_first_host_is_that_of_rank_0_and_slurm_names_three() -> None:
    assert hosts(torchrun(1, 0)).hosts == hosts(open_mpi(1, 0)).hosts == hosts(hydra(1, 0)).hosts == ("h0",)
    assert hosts(srun(3, 0, nodes=4)).hosts == ("n1", "n2", "n3")
    assert hosts(srun(1, 0)).hosts == ("n1",)  # of two etcd members none could be lost
    assert hosts(srun(1, 0)).own_name == "n2"


def test_two_hosts_of_a_launcher_on_one_machine_meet_apart() -> None:
    for tells in (torchrun, srun):
        assert world(tells(0, 0)).address(0, 1) != world(tells(1, 0)).address(0, 1)


def test_a_master_on_this_host_makes_all_ranks_those_of_one_host() -> None:
    for name in ("localhost", "127.0.0.1", "127.0.1.1", "::1"):
        found = [world(torchrun(node, local, MASTER_ADDR=name)) for node in range(2) for local in range(2)]
        assert {(each.nodes, each.per_node, each.first_rank) for each in found} == {(1, 4, 0)}
        assert len({each.address(0, 1) for each in found}) == 1


@pytest.mark.parametrize(
    ("first", "other"),
    [
        (torchrun(0, 0), torchrun(0, 0, MASTER_PORT="29501")),
        (torchrun(0, 0), torchrun(0, 0, TORCHELASTIC_RUN_ID="17")),
        (torchrun(0, 0), torchrun(0, 0, nodes=3)),
        (srun(0, 0), srun(0, 0, SLURM_JOB_ID="18")),
        (srun(0, 0), srun(0, 0, SLURM_STEP_ID="1")),
        (srun(0, 0), srun(0, 0, SLURM_RESTART_COUNT="1")),
        (open_mpi(0, 0), open_mpi(0, 0, PMIX_NAMESPACE="prterun-h0-4712@1")),
    ],
)
def test_another_world_is_another_job(first: Variables, other: Variables) -> None:
    assert hosts(first).job != hosts(other).job


def test_restarts_which_each_host_counts_for_itself_leave_the_job_alike() -> None:
    once = torchrun(1, 0, TORCHELASTIC_RESTART_COUNT="1")
    assert hosts(once).job == hosts(torchrun(0, 0)).job
    assert world(once).address(0, 1) != world(torchrun(1, 0)).address(0, 1)


def test_the_steps_of_one_torchrun_per_host_do_not_tell_its_hosts_apart() -> None:
    inside = {"SLURM_JOB_ID": "17", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
    plans = [hosts(torchrun(node, 0, **inside, SLURM_STEP_ID=str(node))) for node in range(2)]
    assert plans[0].job == plans[1].job and [plan.hosts for plan in plans] == [("h0",), ("h0",)]


def test_ports_are_never_the_launchers_own() -> None:
    seen = set()
    for port in range(FIRST_PORT - 10, FIRST_PORT + PORTS * PLACES + 10):
        first = hosts(torchrun(0, 0, MASTER_PORT=str(port))).port
        assert not first <= port < first + PORTS
        assert FIRST_PORT <= first <= FIRST_PORT + PORTS * (PLACES - 1) and (first - FIRST_PORT) % PORTS == 0
        seen.add(first)
    assert len(seen) > PLACES // 2


def test_daemons_that_srun_started_for_mpirun_do_not_count() -> None:
    daemons = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    for tells in (open_mpi, hydra):
        found = world({**tells(1, 1, here=4), **daemons})
        assert (found.launcher, found.rank, found.size, found.per_node) == ("mpirun", 5, 8, 4)


def test_srun_with_pmi_is_srun() -> None:
    assert world({**srun(1, 1), "PMI_RANK": "3", "PMI_SIZE": "4"}).launcher == "srun"


def test_a_script_of_slurm_that_exports_torchruns_names_has_slurms_hosts() -> None:
    plan = hosts({**srun(1, 1), "RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"})
    assert (plan.node, plan.nodes, plan.hosts, plan.own_name) == (1, 2, ("n1",), "n2")


def test_uneven_hosts_are_those_that_slurm_tells() -> None:
    uneven = {"SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "3,2(x2)", "SLURM_STEP_NUM_NODES": "3"}
    found = world({**srun(2, 1), **uneven, "SLURM_PROCID": "6"})
    assert (found.per_node, found.first_rank, found.nodes) == (2, 5, 3)
    plan = hosts_of(found)
    assert isinstance(plan, WorldHosts) and plan.node == 2


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({**open_mpi(0, 0), "OMPI_COMM_WORLD_SIZE": "5"}, "which of the hosts this is, and 5 ranks are not 2 on each"),
        ({k: v for k, v in open_mpi(0, 0).items() if k != "MASTER_ADDR"}, "set MASTER_ADDR to it"),
        ({k: v for k, v in hydra(1, 0).items() if k != "MASTER_ADDR"}, "set MASTER_ADDR to it"),
        ({k: v for k, v in torchrun(1, 0).items() if k != "MASTER_ADDR"}, "set MASTER_ADDR to it"),
    ],
)
def test_a_world_whose_hosts_are_not_known_has_a_reason(variables: Variables, reason: str) -> None:
    found = hosts_of(world(variables))
    assert isinstance(found, str) and reason in found


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ("", ()),
        ("a", ("a",)),
        ("a,b,c,d", ("a", "b", "c")),
        ("n[08-11]", ("n08", "n09", "n10")),
        ("n[1,7],m", ("n1", "n7", "m")),
        ("r[1-2]n[1-2]-ib", ("r1n1-ib", "r1n2-ib", "r2n1-ib")),
        ("n[1-", ()),
        ("n[x-2]", ()),
    ],
)
def test_slurms_list_of_hosts_is_expanded(listed: str, expected: tuple[str, ...]) -> None:
    assert expand_hosts(listed) == expected


def test_ranks_of_a_host_travel_as_text() -> None:
    here = RanksHere(address="a", first=2, count=2, size=4, hosts=hosts(srun(1, 0)))
    assert ranks_here(here.as_text()) == here and list(here.numbers) == [2, 3]
    alone = RanksHere(address="a", first=0, count=2, size=2)
    assert ranks_here(alone.as_text()) == alone
