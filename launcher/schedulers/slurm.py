"""The batch script of a job for Slurm, and a Slurm task's surroundings as plain values. No I/O.

The batch script runs on the first node of the allocation. It writes down the hosts of the job's quorum, and starts one
task per node by `srun`. One minute before the time limit it has the job write a last checkpoint, and then has Slurm
requeue it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath

from elastrain.errors import ConfigError

FOLDER = "ELASTRAIN_SLURM_FOLDER"
JOB = "ELASTRAIN_SLURM_JOB"
"""Variables that the batch script sets for its tasks."""
_SET_HERE = ("--nnodes", "--spares", "--standalone", "--local-nodes")
_TIME = re.compile(r"(\d+-)?\d{1,4}(:\d{1,2}){0,2}")
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_WARNING_S = 60
_GRACE_S = 20
"""Seconds for a hand-over after `scancel`, unless the user says otherwise. Slurm's KillWait is 30 by default."""
_LOOK_S = 15
"""Seconds between two looks at the nodes of the allocation."""


@dataclass(frozen=True, kw_only=True)
class SlurmWish:
    """Options of a job for Slurm. Raises ConfigError for values that Slurm or `elastrain run` would refuse."""

    nodes_min: int
    nodes_max: int
    time: str
    command: tuple[str, ...]
    """Options of `run`, the script and its arguments."""
    spares: int = 0
    name: str = "elastrain"
    folder: str = ""
    """Folder for the folders of jobs, which all nodes share; "": the folder in which `sbatch` was called."""
    join_job: str = ""
    """Number of the Slurm job whose job these nodes join, or ""."""
    options: tuple[str, ...] = ()
    """More options of `sbatch`, a line each, such as `--partition=gpu`."""

    def __post_init__(self) -> None:
        """Check the values that stand in the script."""
        if not self.command:
            raise ConfigError("no script is named: write it, and its arguments, after --")
        if not _TIME.fullmatch(self.time):
            raise ConfigError(f"--time {self.time!r}: write it as Slurm does, such as 8:00:00 or 1-12:00:00")
        if not _WORD.fullmatch(self.name):
            raise ConfigError(f"--name {self.name!r}: use up to 64 letters, digits, '.', '_' and '-'")
        if self.join_job and not self.join_job.isdigit():
            raise ConfigError(f"--join-job {self.join_job!r}: write the number of the Slurm job, as squeue shows it")
        if self.join_job and self.spares:
            raise ConfigError("--join-job takes the spares from the job that the nodes join: leave --spares out")
        if any(not word.startswith("--") or "\n" in word for word in self.options):
            raise ConfigError("--sbatch takes one option of sbatch, such as --sbatch=--partition=gpu")
        before = next((i for i, word in enumerate(self.command) if word.endswith(".py")), len(self.command))
        for word in self.command[:before]:
            if word.partition("=")[0].replace("_", "-") in _SET_HERE:
                raise ConfigError(f"{word} is set by the batch script: leave it out behind --")

    @property
    def allocated(self) -> str:
        """Nodes that Slurm is asked for, with the spares: N, or MIN-MAX."""
        least, most = self.nodes_min + self.spares, self.nodes_max + self.spares
        return str(most) if least == most else f"{least}-{most}"


def batch_script(wish: SlurmWish, python: str) -> str:
    """Return the batch script. `python` is the interpreter, at the same path on all nodes."""
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in _options(wish)), "", "set -u"]
    parent = shlex.quote(wish.folder) if wish.folder else '"$SLURM_SUBMIT_DIR"'
    number = wish.join_job or "$SLURM_JOB_ID"
    lines += [
        f"export {JOB}=slurm-{number}",
        f"export {FOLDER}={parent}/elastrain-slurm-{number}",
        f'elastrain() {{ {shlex.quote(python)} -m elastrain.launcher "$@"; }}',
        *(_joining() if wish.join_job else _place(wish, python)),
        "start() {",
        '  exec srun --no-kill --kill-on-bad-exit=0 --wait=0 --ntasks-per-node=1 "$@" \\',
        f"    {shlex.quote(python)} -m elastrain.launcher run --stop-grace {_GRACE_S} {shlex.join(wish.command)}",
        "}",
        "start &",
        "task=$!",
        *([] if wish.join_job else _follow()),
        'wait "$task"; code=$?',
    ]
    return "\n".join(lines + ([] if wish.join_job else _requeue()) + ['exit "$code"']) + "\n"


def _options(wish: SlurmWish) -> list[str]:
    found = [f"--job-name={wish.name}", f"--nodes={wish.allocated}", "--ntasks-per-node=1", f"--time={wish.time}"]
    found += ["--no-kill", "--open-mode=append"]
    found += ["--no-requeue"] if wish.join_job else ["--requeue", f"--signal=B:USR1@{_WARNING_S}"]
    return found + list(wish.options)


def _joining() -> list[str]:
    return [f'[ -s "${FOLDER}/job.json" ] || {{ echo "elastrain: there is no job in ${FOLDER}" >&2; exit 2; }}']


def _place(wish: SlurmWish, python: str) -> list[str]:
    """Return the lines that write the job's place, and have a last checkpoint written on the signal."""
    nodes = f"--nnodes {wish.nodes_min}:{wish.nodes_max} --spares {wish.spares}"
    return [
        f'rm -f "${FOLDER}/job.json"',
        f'{shlex.quote(python)} -m elastrain.launcher.schedulers.job_place --folder "${FOLDER}" {nodes} || exit 1',
        "last=",
        f'run="${FOLDER}/run-${{SLURM_RESTART_COUNT:-0}}/$SLURMD_NODENAME"',
        "# Without an agent here nobody can write a last checkpoint: the job goes on from the newest one.",
        """trap 'last=1; elastrain stop "$run" || kill "$task"' USR1""",
    ]


def _follow() -> list[str]:
    """Return the lines that start a task on every node that is added to the allocation while the job runs."""
    return [
        "nodes() {",
        '  squeue --noheader --jobs="$SLURM_JOB_ID" --format=%N | xargs --no-run-if-empty scontrol show hostnames',
        "}",
        "# A node that Slurm adds to this job gets a task, and joins.",
        "follow() {",
        "  local before now node",
        "  before=$(nodes)",
        f"  while sleep {_LOOK_S}; do",
        "    now=$(nodes)",
        '    [ -z "$now" ] || [ "$now" = "$before" ] || echo "elastrain: the nodes of job $SLURM_JOB_ID are now" $now',
        "    for node in $now; do",
        """      grep --quiet --line-regexp --fixed-strings "$node" <<<"$before" && continue""",
        '      start --overlap --nodes=1 --ntasks=1 --nodelist="$node" &',
        "    done",
        "    before=${now:-$before}",
        "  done",
        "}",
        "follow &",
        "trap 'kill \"$!\"' EXIT",
    ]


def _requeue() -> list[str]:
    return [
        "# The signal ends the first wait. The job ends once its last checkpoint is written.",
        'if [ -n "$last" ]; then wait "$task"; code=$?; fi',
        'if [ -n "$last" ] && [ "$code" -ne 0 ]; then scontrol requeue "$SLURM_JOB_ID"; fi',
    ]


@dataclass(frozen=True, kw_only=True)
class SlurmTask:
    """A task of `srun` as `elastrain run` sees it."""

    job: str
    node: str
    folder: PurePath
    """The job's folder, which all nodes share."""
    restarts: int
    """Number of times that Slurm has requeued the job."""

    @property
    def run_dir(self) -> PurePath:
        """Folder of this node's run."""
        return self.folder / f"run-{self.restarts}" / self.node


def task_of(variables: Mapping[str, str]) -> SlurmTask | None:
    """Return the task that these environment variables describe, or None outside of `srun`."""
    number, node = variables.get("SLURM_JOB_ID", ""), variables.get("SLURMD_NODENAME", "")
    if not (number and node and variables.get("SLURM_STEP_ID", "")):
        return None
    parent = PurePath(variables.get("SLURM_SUBMIT_DIR", "."))
    return SlurmTask(
        job=variables.get(JOB) or f"slurm-{number}",
        node=node,
        folder=PurePath(variables.get(FOLDER) or parent / f"elastrain-slurm-{number}"),
        restarts=int(variables.get("SLURM_RESTART_COUNT") or 0),
    )
