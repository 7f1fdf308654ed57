"""Starting jobs for experiments: under `elastrain run`, and alone as the undisturbed reference.

Processes and folders only; what is measured in them lives with the experiment.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from experiments.harness import ROOT

Start = Callable[..., "subprocess.Popen[bytes]"]
"""As `subprocess.Popen`; that of `tests.support.warm` starts processes that need import nothing any more."""
TRAIN_GPT = ROOT / "experiments" / "train_gpt" / "train.py"


@dataclass(frozen=True, kw_only=True)
class Script:
    """A training script and its arguments."""

    path: Path
    args: tuple[str, ...] = ()


def unwind_on_sigterm() -> None:
    """Leave by an exception when somebody ends this program, so that the jobs that it started are ended too."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


@contextmanager
def elastic(
    folder: Path,
    script: Script,
    *,
    members: int,
    nodes: int | None = None,
    options: Sequence[str] = (),
    temporary: Path | None = None,
    inside: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    start: Start = subprocess.Popen,
) -> Iterator[subprocess.Popen[bytes]]:
    """A job under `elastrain run` in `folder`, spread evenly over simulated `nodes` if they are given.

    Its output goes to `output.log` there. Ended when the block is left. `temporary`: where its temporary files go.
    `inside`: what to write before the command, so that it runs on another host. `environment`: what its processes find
    in theirs besides.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = [
        *inside,
        *(sys.executable, "-m", "elastrain.launcher"),
        "run",
        "--nproc-per-node",
        str(members // (nodes or 1)),
    ]
    command += ["--local-nodes", str(nodes)] if nodes is not None else []
    command += ["--run-dir", str(folder), *options, str(script.path), *script.args]
    extra = {**(environment or {}), **({} if temporary is None else {"TMPDIR": str(temporary)})}
    with _started(command, folder / "output.log", extra, start) as process:
        yield process


@contextmanager
def alone(folder: Path, script: Script, *, start: Start = subprocess.Popen) -> Iterator[subprocess.Popen[bytes]]:
    """The same script as an undisturbed job of one, journal in `folder`. Ended when the block is left."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-u", str(script.path), *script.args]
    with _started(command, folder / "output.log", {"ELASTRAIN_RUN_DIR": str(folder)}, start) as process:
        yield process


def finish(process: subprocess.Popen[bytes], folder: Path, *, timeout_s: float) -> str:
    """Wait for the end; its output. Raises RuntimeError with the end of the output unless it ends well in time."""
    try:
        code: int | str = process.wait(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        code = f"nothing within {timeout_s:g} s"
    output = (folder / "output.log").read_text(errors="replace")
    if code != 0:
        raise RuntimeError(f"expected exit code 0 from the job in {folder}; got {code}:\n{output[-2000:]}")
    return output


@contextmanager
def _started(
    command: list[str], output: Path, extra: dict[str, str], start: Start
) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **extra}
    with output.open("wb") as file:
        process = start(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                process.kill()
                with suppress(subprocess.TimeoutExpired):  # a process in a driver cannot be killed
                    process.wait(timeout=15)
