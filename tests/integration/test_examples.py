"""The scripts in examples/ run as they stand: alone, in workers, after a loss. They import elastrain and torch only."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

from tests.support.training import ROOT, assert_equal_to_undisturbed, run_job

pytestmark = pytest.mark.slow

EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_imports_torch_and_elastrain_only(script: Path) -> None:
    imported = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(script.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    assert imported - set(sys.stdlib_module_names) <= {"torch", "elastrain"}


@pytest.mark.parametrize(("name", "steps"), [("plain_loop.py", "12"), ("finetune.py", "8")])
def test_a_worker_is_killed_and_the_result_is_that_of_the_script_alone(name: str, steps: str, tmp_path: Path) -> None:
    arguments = ("--steps", steps)
    run = run_job(
        tmp_path,
        workers=2,
        arguments=arguments,
        faults=["kill --target member:m1 --at step=3,phase=backward"],
        script=EXAMPLES / name,
    )
    assert_equal_to_undisturbed(run, *arguments, script=EXAMPLES / name)
    (digest,) = set(run.digests.values())
    assert f"digest {digest}" in run.output


def sums(output: str) -> list[tuple[str, str, str]]:
    """(rank, size, sum of the parameters) as ranks print them, two lines perhaps without a break."""
    return re.findall(r"rank (\d+) of (\d+): parameters add up to ([\d.e+-]+)", output)


def test_a_ddp_script_trains_equal_replicas(tmp_path: Path) -> None:
    run = run_job(
        tmp_path,
        workers=2,
        arguments=("--steps", "5"),
        options=("--max-restarts", "0"),
        script=EXAMPLES / "ddp.py",
    )
    assert run.exit_code == 0, run.output
    found = sums(run.output)
    assert sorted(rank for rank, _, _ in found) == ["0", "1"]
    assert len({total for _, _, total in found}) == 1, found


def test_a_ddp_script_goes_on_without_a_rank_that_died(tmp_path: Path) -> None:
    run = run_job(
        tmp_path,
        workers=3,
        arguments=("--steps", "6", "--die-at", "2"),
        options=("--max-restarts", "0"),
        script=EXAMPLES / "ddp.py",
    )
    found = sums(run.output)
    assert sorted((rank, size) for rank, size, _ in found) == [("0", "2"), ("1", "2")], run.output
    assert len({total for _, _, total in found}) == 1, found
