"""`elastrain run`: start a job on this machine and stay until it ends. torchrun's flags keep their meaning."""

from __future__ import annotations

import re
import secrets
import shutil
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from elastrain.errors import ConfigError
from elastrain.launcher import rundir, workers
from elastrain.launcher.faults import read_faults
from elastrain.launcher.values import End, JobConfig
from elastrain.launcher.workers import Logs, Script

_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def run(
    script: Annotated[
        str, typer.Argument(help="The script to run, or a module with -m, or a program with --no-python.")
    ],
    args: Annotated[list[str] | None, typer.Argument(help="Its arguments.", metavar="ARGS...")] = None,
    standalone: Annotated[bool, typer.Option("--standalone", help="One agent, on this machine (the default).")] = True,
    nproc_per_node: Annotated[
        int, typer.Option("--nproc-per-node", "--nproc_per_node", min=1, max=1024, help="Workers on this machine.")
    ] = 1,
    max_restarts: Annotated[
        int,
        typer.Option("--max-restarts", "--max_restarts", min=0, help="Workers started again within the whole run."),
    ] = 10,
    rdzv_id: Annotated[
        str | None, typer.Option("--rdzv-id", "--rdzv_id", help="The job's name; default: made from the time.")
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option("--run-dir", help="The run's folder; default: ~/.local/state/elastrain/runs/JOB."),
    ] = None,
    log_dir: Annotated[
        Path | None, typer.Option("--log-dir", "--log_dir", help="Workers' logs; default: logs in the run's folder.")
    ] = None,
    redirects: Annotated[
        str, typer.Option("--redirects", "-r", help="Output into files: 0 none, 1 out, 2 err, 3 both; or 0:3,1:2.")
    ] = "0",
    tee: Annotated[
        str, typer.Option("--tee", "-t", help="Output into files and, with [member], to the screen; as --redirects.")
    ] = "0",
    module: Annotated[bool, typer.Option("-m", "--module", help="The script is a module, as with python -m.")] = False,
    no_python: Annotated[
        bool, typer.Option("--no-python", "--no_python", help="The script is a program of its own.")
    ] = False,
    join_timeout: Annotated[
        float, typer.Option("--join-timeout", min=0.1, help="Seconds from the first worker ready to the last.")
    ] = 120.0,
    stop_grace: Annotated[
        float, typer.Option("--stop-grace", min=0.0, help="Seconds from SIGTERM to SIGKILL when the job is stopped.")
    ] = 5.0,
    inject: Annotated[bool, typer.Option("--inject", help="Arm fault injection: allow `elastrain inject`.")] = False,
    faults: Annotated[
        Path | None, typer.Option("--faults", help="Faults to inject, a line each as after `elastrain inject`; arms.")
    ] = None,
) -> int:
    """Run SCRIPT in as many workers as asked for; start again what dies; end when the work is done.

    RUN OPTIONS come before the script; all that follows it belongs to the script. OMP_NUM_THREADS is 1 in the workers
    unless it is set.
    """
    target = _checked_script(script, module=module, no_python=no_python)
    job = rdzv_id or f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    if not _JOB.fullmatch(job):
        raise ConfigError(f"--rdzv-id {job!r}: use up to 64 letters, digits, '.', '_' and '-'")
    plan = read_faults(faults) if faults is not None else ()
    output = {"redirects": _masks(redirects, "--redirects"), "tee": _masks(tee, "--tee")}
    workers.import_torch_early()
    folder = rundir.create(run_dir, job)
    # Late, and beside the import of torch that has just begun.
    from elastrain.launcher.agent import Agent, AgentConfig
    from elastrain.launcher.store import MemoryStore

    slots = range(nproc_per_node)
    masks = {name: {slot: mask.get(slot, mask.get(None, 0)) for slot in slots} for name, mask in output.items()}
    agent = Agent(
        AgentConfig(
            job=job,
            script=Script.of(target, args or [], module=module, python=not no_python),
            logs=Logs(folder=(log_dir or folder.logs).absolute(), redirects=masks["redirects"], tee=masks["tee"]),
            stop_grace_s=stop_grace,
        ),
        JobConfig(
            workers=nproc_per_node,
            max_restarts=max_restarts,
            armed=inject or faults is not None,
            join_timeout_s=join_timeout,
        ),
        folder,
        MemoryStore(),
        plan,
    )
    print(f"elastrain: job {job}, {nproc_per_node} workers; run folder {folder.path}", file=sys.stderr, flush=True)
    return _report(agent.run())


def _report(end: End) -> int:
    print(
        f"elastrain: {end.sentence}" + (f"\n{end.detail.rstrip()}" if end.detail else ""), file=sys.stderr, flush=True
    )
    return end.code


def _checked_script(script: str, *, module: bool, no_python: bool) -> str:
    if module and no_python:
        raise ConfigError("-m and --no-python exclude one another")
    if module:
        return script
    if no_python:
        program = shutil.which(script)
        if program is None:
            raise ConfigError(f"there is no program {script!r} that can be executed")
        return program
    if not Path(script).is_file():
        raise ConfigError(f"there is no script {script!r}: check the path (options of `run` come before the script)")
    return script


def _masks(text: str, option: str) -> dict[int | None, int]:
    """torchrun's form: `3` for every local rank (key None), or `0:3,1:2`. Raises ConfigError."""
    if re.fullmatch("[0-3]", text):
        return {None: int(text)}
    if re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text):
        return {int(rank): int(mask) for rank, mask in (part.split(":") for part in text.split(","))}
    raise ConfigError(f"{option} {text!r}: write 0, 1, 2 or 3, or one of these per local rank, such as 0:3,1:2")
