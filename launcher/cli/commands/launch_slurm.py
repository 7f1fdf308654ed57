"""Command `elastrain launch slurm`: write, print or submit the batch script of a job."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from elastrain.base import line_files
from elastrain.errors import ConfigError
from elastrain.launcher.cli.options.grouped import grouped
from elastrain.launcher.cli.options.node_options import node_range
from elastrain.launcher.schedulers.slurm import SlurmWish, batch_script
from elastrain.launcher.shared.console import say

_SUBMIT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class SlurmFlags:
    """Options for the job's size and place."""

    heading: ClassVar = "Job"

    nodes: Annotated[str, typer.Option("--nodes", help="Nodes that compute: N, or MIN:MAX.")] = "2"
    spares: Annotated[int, typer.Option("--spares", min=0, help="Nodes beyond these that wait for a lost one.")] = 0
    time: Annotated[str, typer.Option("--time", help="Limit, such as 8:00:00; the job is requeued when it passes.")]
    name: Annotated[str, typer.Option("--name", help="The job's name in Slurm.")] = SlurmWish.name
    folder: Annotated[
        Path | None, typer.Option("--folder", help="A folder that all nodes share; default: that of the submission.")
    ] = None
    partition: Annotated[str | None, typer.Option("--partition", help="Slurm's partition.")] = None
    join_job: Annotated[str, typer.Option("--join-job", help="Nodes for the job of this Slurm job number.")] = ""
    sbatch: Annotated[
        list[str] | None, typer.Option("--sbatch", help="One more option of sbatch: --sbatch=--gpus-per-node=8.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class BatchFlags:
    """Options for what becomes of the batch script."""

    heading: ClassVar = "Batch script"

    out: Annotated[Path | None, typer.Option("--out", help="A new file for it; default: the screen.")] = None
    submit: Annotated[bool, typer.Option("--submit", help="Submit it by sbatch.")] = False


@grouped
def slurm(
    job: SlurmFlags,
    batch: BatchFlags,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN-OPTIONS] SCRIPT ARGS...", help="After --: as for `run`.")
    ] = None,
) -> int:
    """Write the batch script of a job, or submit it: one task per node, requeued when the time limit passes."""
    text = batch_script(_wish(job, tuple(command or ())), sys.executable)
    if batch.out is not None:
        _write(text, batch.out)
    if batch.submit:
        say(_submit(text))
    elif batch.out is None:
        print(text, end="")
    else:
        say(f"{batch.out} is written: sbatch {batch.out}")
    return 0


def _wish(job: SlurmFlags, command: tuple[str, ...]) -> SlurmWish:
    least, most = node_range(job.nodes, "--nodes")
    partition = (f"--partition={job.partition}",) if job.partition else ()
    return SlurmWish(
        nodes_min=least,
        nodes_max=most,
        spares=job.spares,
        time=job.time,
        command=command,
        name=job.name,
        folder=str(job.folder.absolute()) if job.folder is not None else "",
        join_job=job.join_job,
        options=(*partition, *(job.sbatch or ())),
    )


def _write(text: str, out: Path) -> None:
    try:
        with open(line_files.create(out), "w") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written: {error}") from None


def _submit(text: str) -> str:
    """Submit the script, and return a sentence with the job's number. Raises ConfigError."""
    try:
        done = subprocess.run(
            ["sbatch", "--parsable"], input=text, capture_output=True, text=True, timeout=_SUBMIT_S, check=False
        )
    except FileNotFoundError:
        raise ConfigError("--submit: there is no sbatch here: write the script by --out, and submit it there") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"--submit: Slurm has not answered within {_SUBMIT_S:.0f} s") from None
    if done.returncode:
        why = "; ".join(line.removeprefix("sbatch: error: ") for line in done.stderr.strip().splitlines())
        raise ConfigError(f"--submit: Slurm refuses the job: {why}")
    number = done.stdout.strip().partition(";")[0]
    return f"Slurm job {number} is submitted: squeue --job {number}"
