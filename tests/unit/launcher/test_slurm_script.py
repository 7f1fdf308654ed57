"""The batch script for Slurm, and what `elastrain run` takes from Slurm inside `srun`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from elastrain.errors import ConfigError
from elastrain.launcher.cli.command_line import app
from elastrain.launcher.cli.options.node_options import RendezvousFlags, SizeFlags
from elastrain.launcher.cli.options.slurm_options import from_slurm
from elastrain.launcher.schedulers.job_place import place_in, port_of
from elastrain.launcher.schedulers.slurm import SlurmWish, batch_script, task_of

SRUN = {
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "0",
    "SLURMD_NODENAME": "n2",
    "SLURM_SUBMIT_DIR": "/shared",
    "SLURM_RESTART_COUNT": "3",
}


def wish(**settings: Any) -> SlurmWish:
    return SlurmWish(**{"nodes_min": 4, "nodes_max": 4, "time": "8:00:00", "command": ("train.py",), **settings})


def test_the_script_asks_for_all_nodes_and_outlives_any_of_them() -> None:
    lines = batch_script(wish(spares=1, options=("--partition=gpu",)), "/opt/python").splitlines()
    asked = {line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")}
    assert asked >= {"--nodes=5", "--ntasks-per-node=1", "--time=8:00:00", "--no-kill", "--requeue"}
    assert asked >= {"--signal=B:USR1@60", "--partition=gpu"}
    assert any("srun --no-kill --kill-on-bad-exit=0 --wait=0" in line for line in lines)
    assert any("--nnodes 4:4 --spares 1" in line for line in lines)
    assert any("scontrol requeue" in line for line in lines)


@pytest.mark.parametrize("settings", [{}, {"join_job": "7"}, {"folder": "/a b/c'd", "nodes_min": 1}])
def test_bash_reads_every_script_and_words_stay_whole(settings: dict[str, Any]) -> None:
    text = batch_script(wish(command=("train.py", "a b", "c'd", "$HOME"), **settings), "/o pt/python")
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False, capture_output=True).returncode == 0
    assert "run --stop-grace 20 train.py 'a b' 'c'\"'\"'d' '$HOME'" in text


def test_nodes_that_join_another_slurm_job_start_no_store_and_are_not_requeued() -> None:
    text = batch_script(wish(join_job="7"), "python")
    assert "slurm-7" in text and "--no-requeue" in text
    assert "job_place" not in text and "scontrol" not in text and "--signal" not in text


def test_a_node_that_was_lost_and_comes_back_keeps_its_former_run_in_a_folder_of_its_own(tmp_path: Path) -> None:
    task = task_of(SRUN | {"ELASTRAIN_SLURM_FOLDER": str(tmp_path)})
    (tmp_path / "job.json").write_text(json.dumps(PLACE))
    for expected in ("n2", "n2.2", "n2.3"):
        found = from_slurm(SizeFlags(), RendezvousFlags(), task).run_dir
        assert found == tmp_path / "run-3" / expected
        found.mkdir(parents=True)


NODES_OF_THE_JOB = """#!/bin/bash
echo look >>looks
[ "$(wc -l <looks)" -eq 1 ] && printf 'n1\\nn2\\n' || printf 'n1\\nn3\\nn2\\n'
"""


def test_a_node_that_is_added_to_the_allocation_gets_one_task(tmp_path: Path) -> None:
    """The script runs with programs of Slurm that only say what they are asked for."""
    programs = {
        "squeue": "echo nodes",
        "scontrol": NODES_OF_THE_JOB,
        "srun": 'echo "$*" >>starts; case "$*" in *nodelist*) ;; *) sleep 5 ;; esac',
        "sleep": '[ "$1" = 5 ] && exec /bin/sleep 5 || exec /bin/sleep 0.5',
        "python": "exit 0",
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(text if text.startswith("#!") else f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "12", "SLURMD_NODENAME": "n1"}
    done = subprocess.run(
        ["bash", "-c", batch_script(wish(), str(tmp_path / "python"))],
        cwd=tmp_path, env=variables | {"SLURM_SUBMIT_DIR": str(tmp_path)}, capture_output=True, text=True, timeout=180,
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    starts = (tmp_path / "starts").read_text().splitlines()
    assert len(starts) == 2 and "--nodelist" not in starts[0]
    assert "--overlap --nodes=1 --ntasks=1 --nodelist=n3" in starts[1]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"command": ()}, "no script is named"),
        ({"time": "soon"}, "--time 'soon': write it as Slurm does"),
        ({"name": "a b"}, "--name 'a b'"),
        ({"join_job": "x"}, "--join-job 'x': write the number"),
        ({"join_job": "7", "spares": 1}, "leave --spares out"),
        ({"options": ("gpu\nrm",)}, "--sbatch takes one option"),
        ({"command": ("--nnodes", "2", "train.py")}, "--nnodes is set by the batch script"),
    ],
)
def test_wrong_options_are_one_sentence(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        wish(**settings)


def test_the_command_prints_the_script_and_refuses_more_min_than_max() -> None:
    printed = CliRunner().invoke(app, ["launch", "slurm", "--time", "10", "--nodes", "2", "--", "train.py"])
    assert printed.exit_code == 0 and printed.stdout.startswith("#!/bin/bash")
    assert CliRunner().invoke(app, ["launch", "slurm", "--time", "10", "--nodes", "3:2", "--", "x.py"]).exit_code == 2


def test_a_task_is_known_by_its_step_and_a_batch_script_is_none() -> None:
    task = task_of(SRUN)
    assert task is not None
    assert (task.job, task.node, str(task.run_dir)) == ("slurm-12", "n2", "/shared/elastrain-slurm-12/run-3/n2")
    assert task_of({name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"}) is None
    joined = task_of(SRUN | {"ELASTRAIN_SLURM_JOB": "slurm-7", "ELASTRAIN_SLURM_FOLDER": "/shared/elastrain-slurm-7"})
    assert joined is not None and (joined.job, str(joined.folder)) == ("slurm-7", "/shared/elastrain-slurm-7")


PLACE = {"hosts": {"n1": "10.0.0.1", "n2": "10.0.0.2"}, "port": 20036, "nnodes": "2:4", "spares": 1}


def test_slurm_fills_in_what_the_user_leaves_out(tmp_path: Path) -> None:
    task = task_of(SRUN | {"ELASTRAIN_SLURM_FOLDER": str(tmp_path)})
    (tmp_path / "job.json").write_text(json.dumps(PLACE))
    found = from_slurm(SizeFlags(), RendezvousFlags(), task)
    assert (found.size.nnodes, found.size.spares) == ("2:4", 1)
    assert found.rendezvous == RendezvousFlags(
        rdzv_id="slurm-12",
        join="10.0.0.1:20036,10.0.0.2:20036",
        local_addr="10.0.0.2",
        node_name="n2",
        secret_file=tmp_path / "secret",
    )
    given = RendezvousFlags(rdzv_id="mine", rdzv_endpoint="etcd:1", node_name="me", secret_file=Path("/s"))
    kept = from_slurm(SizeFlags(nnodes="3"), given, task)
    assert (kept.size.nnodes, kept.rendezvous) == ("3", given)


def test_flags_of_the_user_about_ports_and_addresses_take_precedence(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(json.dumps(PLACE))

    def found(node: str, **given: str) -> tuple[str | None, str | None]:
        task = task_of(SRUN | {"ELASTRAIN_SLURM_FOLDER": str(tmp_path), "SLURMD_NODENAME": node})
        rendezvous = from_slurm(SizeFlags(), RendezvousFlags(**given), task).rendezvous
        return rendezvous.join, rendezvous.local_addr

    assert found("n2", port_range="30000-30999") == ("10.0.0.1,10.0.0.2", "10.0.0.2")
    assert found("n2", local_addr="10.1.0.2")[1] == "10.1.0.2"
    assert found("n2", interface="ib0")[1] is None
    assert found("n9")[1] is None


def test_jobs_with_near_numbers_have_ports_of_their_own_below_those_of_the_kernel() -> None:
    ports = [port_of(number) for number in range(7, 3007)]
    assert len(set(ports)) == 3000
    assert min(ports) >= 20000 and max(ports) + 2 < 32768
    assert all(port % 3 == ports[0] % 3 for port in ports)


def test_without_a_job_one_node_runs_alone_and_several_are_refused(tmp_path: Path) -> None:
    task = task_of(SRUN | {"ELASTRAIN_SLURM_FOLDER": str(tmp_path)})
    assert from_slurm(SizeFlags(), RendezvousFlags(), task).rendezvous == RendezvousFlags()
    assert from_slurm(SizeFlags(local_nodes=2), RendezvousFlags(), task).run_dir is None
    with pytest.raises(ConfigError, match=r"--nnodes 2, and there is no job slurm-12 in .*: start it by"):
        from_slurm(SizeFlags(nnodes="2"), RendezvousFlags(), task)
    for text in ('{"hosts": ', '{"hosts": [], "port": 1}', "{}"):
        (tmp_path / "job.json").write_text(text)
        with pytest.raises(ConfigError, match="does not say where the job's hosts are"):
            place_in(tmp_path)
