"""The environment is read in one file per kind of process, and changed in one: settings travel as values."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from elastrain.base import environment as of_a_worker
from elastrain.base.checkpoint_settings import CheckpointOptions
from elastrain.base.resume import NodeDisk, Resume, as_text
from elastrain.launcher.agent.worker_start import WorkerWish
from elastrain.launcher.shared import process_environment as of_the_launcher
from tests.support.sources import product

READERS = {
    "elastrain.base.environment": "a worker",
    "elastrain.base.foreign_world": "a rank of another launcher",
    "elastrain.launcher.shared.process_environment": "the launcher and its agents",
    "elastrain.launcher.agent.standby_worker": "a waiting worker, which takes the variables of the one that it becomes",
    "elastrain.integrations.process_state": "an adapter, which hides the job's ranks from accelerate",
    "elastrain.integrations.transformers": "an adapter, for the library's own variables",
    "elastrain.offload.drives.gds": "KvikIO's own variables, for the library and its probe",
    "elastrain.runtime.loggers.wandb_run": "a logger, for the library's own variable",
    "elastrain.runtime.bits.value_sources": "no variable: it notes that the script reads some",
}
NAMES = {"environ", "environb", "getenv", "putenv", "unsetenv"}


def uses_of_environ(tree: ast.AST) -> list[int]:
    """The lines with `os.environ`, `os.getenv`, `os.putenv` or a name imported for it."""
    of_os = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in NAMES and ast.unparse(node.value) == "os"
    ]
    imported = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "os" and {a.name for a in node.names} & NAMES
    ]
    return of_os + imported


def test_one_file_per_reader_touches_the_environment() -> None:
    found = {source.module: uses_of_environ(source.tree) for source in product() if source.says(NAMES)}
    assert {module: lines for module, lines in found.items() if lines and module not in READERS} == {}
    assert all(found[module] for module in READERS), "one that reads it no more: strike it"


def test_a_plant_is_found() -> None:
    assert uses_of_environ(ast.parse("import os\nos.environ.get('X')")) == [2]
    assert uses_of_environ(ast.parse("from os import getenv")) == [1]


def test_a_worker_reads_back_what_its_launcher_was_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    dirs = (tmp_path, tmp_path / "other")
    memory = WorkerWish(
        bytes_per_worker=5 << 30,
        host_bytes_per_worker=6 << 30,
        host_tier_bytes=1 << 30,
        offload_dirs=dirs,
        stages=4,
        has_standing_shadows=True,
    )
    for name, value in memory.environment().items():
        monkeypatch.setenv(name, str(value))
    read = of_a_worker.read_environment()
    assert of_a_worker.stages() == 4
    assert of_a_worker.standing_shadows()
    assert of_a_worker.host_memory() == (6 << 30, 1 << 30)
    assert (read.memory_limit_bytes, read.offload_dirs) == (5 << 30, tuple(map(str, dirs)))


def test_what_a_launcher_says_is_for_the_worker_and_not_for_its_children(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told = {"AGENT": "a", "MEMBER": "m3", "JOB": "j", "RUN_DIR": str(tmp_path), "STAGES": "2", "CHECKPOINT_DIR": "/c"}
    for name, value in told.items():
        monkeypatch.setenv(f"ELASTRAIN_{name}", value)
    monkeypatch.setenv("ELASTRAIN_PROCESS", "")  # so that it is taken away again
    monkeypatch.setenv("RANK", "3")
    of_a_worker.claim()
    read = of_a_worker.read_environment()
    assert (read.agent, read.member, of_a_worker.parent_worker()) == ("a", "m3", None)
    code = (
        "from elastrain.base import environment as e; read = e.read_environment(); print(read.agent, read.member, "
        "read.job[:6], read.run_dir, e.stages(), e.checkpoint_options(), e.expected_place(), e.parent_worker())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    alone = f"None m0 alone- None None None (0, 1) m3 of job j (process {os.getpid()})"
    assert done.stdout.strip() == alone


def test_a_launcher_that_a_worker_starts_forgets_the_workers_job(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"AGENT": "a", "CHECKPOINT_DIR": "/c", "PROCESS": "1 2", "HOME": "/h", "AGENT_MARK": "m"}
    for name, value in there.items():
        monkeypatch.setenv(f"ELASTRAIN_{name}", value)
    of_the_launcher.leave_outer_job()
    left = {name for name in os.environ if name.startswith("ELASTRAIN_")} - {"ELASTRAIN_TESTS_PADDING"}
    assert left == {"ELASTRAIN_HOME", "ELASTRAIN_AGENT_MARK"}
    monkeypatch.setenv("ELASTRAIN_MEMORY_LIMIT", "5")  # of the user's own, for this job
    of_the_launcher.leave_outer_job()
    assert os.environ["ELASTRAIN_MEMORY_LIMIT"] == "5"


def test_a_place_is_gone_on_from_where_the_job_starts_from_what_lies_in_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "one")

    def goes_on(place: str, source: str = "", nodes: tuple[str, ...] = ()) -> bool:
        disks = tuple(NodeDisk(node=node, door="", endpoint="") for node in nodes)
        resume = Resume(place=str(tmp_path / "one"), name="life-0001-step-0000000003", step=3, disks=disks)
        monkeypatch.setenv("ELASTRAIN_RESUME", as_text(resume))
        for name, value in CheckpointOptions(place=place, source=source).environment().items():
            monkeypatch.setenv(name, value)
        options = of_a_worker.checkpoint_options()
        assert options is not None
        return options.resumes

    monkeypatch.setenv("ELASTRAIN_NODE", "node1")
    one, other = str(tmp_path / "one"), str(tmp_path / "other")
    assert goes_on(one) and goes_on(f"{tmp_path}/link/")
    assert not goes_on(other)
    assert not goes_on("memory://one")
    assert goes_on(other, other, ("node0", "node1")), "each node has its own part of it there"
    assert not goes_on(other, other, ("node0",))
    assert not goes_on(other, one, ("node1",))


def test_whose_checkpoint_it_is_counts_where_all_nodes_have_disks_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def resumed_job(source: str, nodes: tuple[str, ...]) -> str:
        disks = tuple(NodeDisk(node=node, door="", endpoint="") for node in nodes)
        resume = Resume(place="the disks", name="life-0001-step-0000000003", step=3, job="before", disks=disks)
        monkeypatch.setenv("ELASTRAIN_RESUME", as_text(resume))
        for name, value in CheckpointOptions(place=str(tmp_path), source=source).environment().items():
            monkeypatch.setenv(name, value)
        options = of_a_worker.checkpoint_options()
        assert options is not None
        return options.resumed_job

    assert resumed_job(str(tmp_path), ("node0",)) == "before"
    assert resumed_job(str(tmp_path / "copies"), ("node0",)) == ""
    assert resumed_job(str(tmp_path), ()) == ""


def test_a_variable_for_a_moment_is_what_it_was_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ELASTRAIN_A_NAME", raising=False)
    with of_the_launcher.set_for_a_moment("ELASTRAIN_A_NAME", "x") as before:
        assert (before, os.environ["ELASTRAIN_A_NAME"]) == (None, "x")
        with of_the_launcher.set_for_a_moment("ELASTRAIN_A_NAME", "y") as outer:
            assert (outer, os.environ["ELASTRAIN_A_NAME"]) == ("x", "y")
        assert os.environ["ELASTRAIN_A_NAME"] == "x"
    assert "ELASTRAIN_A_NAME" not in os.environ
