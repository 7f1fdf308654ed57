"""Compiled models in jobs: equal bits through kills and joins, one kernel choice, and the cache that newcomers find."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest

from tests.support.training import SCRIPTS, Run, assert_equal_to_undisturbed, run_job

pytestmark = pytest.mark.slow
SCRIPT = SCRIPTS / "compiled_training.py"
STEPS = "16"
KILL = "kill --target member:m1 --at step=2,phase=backward"
CXX = shutil.which("g++")
needs_cxx = pytest.mark.skipif(CXX is None, reason="inductor needs g++ on the CPU")


@pytest.mark.parametrize(("what", "backend"), [("model", "eager"), ("blocks", "aot_eager")])
def test_on_a_device_members_are_killed_and_join_without_a_bit_of_difference(
    tmp_path: Path, what: str, backend: str
) -> None:
    arguments = ("--device", "late", "--what", what, "--backend", backend, "--steps", STEPS)
    run = run_job(tmp_path, workers=2, script=SCRIPT, arguments=arguments, faults=[KILL], slow_until="m2")
    assert_equal_to_undisturbed(run, *arguments, script=SCRIPT)
    assert "m2" in run.digests


def test_in_bfloat16_a_compiled_job_on_a_device_has_the_bits_of_the_compiled_job_on_the_cpu(tmp_path: Path) -> None:
    arguments = ("--backend", "aot_eager", "--steps", STEPS, "--autocast")
    device = ("--device", "late", *arguments)
    run = run_job(tmp_path, workers=2, script=SCRIPT, arguments=device, faults=[KILL], slow_until="m2")
    assert_equal_to_undisturbed(run, *arguments, script=SCRIPT)
    assert "m2" in run.digests


def test_graphs_per_block_are_killed_and_join_with_the_bits_of_the_plain_model(tmp_path: Path) -> None:
    arguments = ("--device", "late", "--what", "graphs", "--steps", STEPS)
    run = run_job(tmp_path, workers=2, script=SCRIPT, arguments=arguments, faults=[KILL], slow_until="m2")
    assert_equal_to_undisturbed(run, "--device", "cpu", "--what", "nothing", "--steps", STEPS, script=SCRIPT)
    assert "m2" in run.digests


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("captured", "step.backward() was called while a graph of late:0 is captured"),
        ("early graphs", "module 'blocks.0.mlp' of the model was captured in a graph before prepare"),
    ],
)
def test_a_capture_of_a_backward_or_before_prepare_is_refused_by_name(tmp_path: Path, what: str, sentence: str) -> None:
    run = run_job(tmp_path, workers=1, script=SCRIPT, arguments=("--device", "late", "--what", what))
    assert run.exit_code != 0 and sentence in run.output


def compiler(folder: Path) -> Path:
    """Make a C++ compiler that notes, in a file per node, each source that it builds."""
    made = folder / "compiler.sh"
    made.write_text(f'#!/bin/sh\necho "$*" >> "{folder}/built-$ELASTRAIN_MEMBER"\nexec {CXX} "$@"\n')
    made.chmod(made.stat().st_mode | stat.S_IXUSR)
    return made


def built(folder: Path, member: str) -> list[str]:
    """Return the command lines by which the member has built libraries; probes of headers do not count."""
    file = folder / f"built-{member}"
    lines = file.read_text().splitlines() if file.exists() else []
    return [line for line in lines if re.search(r" -o \S+\.so\b", line)]


def counts(folder: Path, member: str) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((folder / f"{member}.json").read_text())
    return told


def run_compiled(folder: Path, *options: str, faults: tuple[str, ...], newcomer: str, **inherited: str) -> Run:
    inherited = {"TORCHINDUCTOR_COMPILE_THREADS": "1", **inherited}
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:
        pytest.skip("the environment names a cache folder")
    return run_job(
        folder,
        workers=1,
        script=SCRIPT,
        arguments=("--steps", STEPS, "--counts", str(folder)),
        options=options,
        faults=faults,
        slow_until=newcomer,
        CXX=str(compiler(folder)),
        **inherited,
    )


@needs_cxx
@pytest.mark.parametrize("shares", [True, False])
def test_a_joiner_of_another_node_builds_nothing_if_caches_are_shared(tmp_path: Path, shares: bool) -> None:
    options = ("--local-nodes", "2", *(("--share-compile-cache",) if shares else ()))
    kill = "kill --target node:node1 --at step=3,phase=backward"
    run = run_compiled(tmp_path, *options, faults=(kill,), newcomer="m2")
    assert_equal_to_undisturbed(run, "--steps", STEPS, script=SCRIPT)
    told = counts(tmp_path, "m2")
    received = [e for e in run.journals["m2"] if e["event"] == "compile_cache"]
    assert counts(tmp_path, "m0")["miss"] > 0
    if shares:
        assert (told["miss"], built(tmp_path, "m2")) == (0, []) and told["hit"] > 0
        assert received[0]["node"] == "node0" and received[0]["files"] > 0
    else:
        assert told["miss"] > 0 and not received
    assert not list(tmp_path.rglob("compile-cache-*")), "the folders go with the run"


@needs_cxx
def test_a_joiner_on_a_node_finds_its_cache_and_a_named_folder_stays(tmp_path: Path) -> None:
    named = tmp_path / "named"
    (folder := tmp_path / "job").mkdir()
    run = run_compiled(
        folder, "--nproc-per-node", "2", faults=(KILL,), newcomer="m2", TORCHINDUCTOR_CACHE_DIR=str(named)
    )
    assert_equal_to_undisturbed(run, "--steps", STEPS, script=SCRIPT)
    assert (counts(folder, "m2")["miss"], built(folder, "m2")) == (0, [])
    assert any(named.rglob("*.so")) and not list(folder.rglob("compile-cache-*"))
