"""Options for a run's folders, for the output of its workers, and for how the script is started."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from elastrain.errors import ConfigError
from elastrain.launcher.agent.worker_start import Script
from elastrain.launcher.shared.rundir import is_file
from elastrain.launcher.start.run_options import OutputPlan


def _folder(text: str) -> Path:
    # An empty path is the working directory. An empty text more likely comes from an unset shell variable.
    if not text:
        raise typer.BadParameter("it is empty: name a folder")
    return Path(text)


@dataclass(frozen=True, kw_only=True)
class OutputFlags:
    """Options for folders, and for which parts of each worker's output go into files."""

    heading: ClassVar = "Output"

    run_dir: Annotated[
        Path | None,
        typer.Option(
            "--run-dir",
            parser=_folder,
            metavar="<path>",
            help="The run's folder; default: ~/.local/state/elastrain/runs/JOB.",
        ),
    ] = None
    log_dir: Annotated[
        Path | None,
        typer.Option(
            "--log-dir",
            "--log_dir",
            parser=_folder,
            metavar="<path>",
            help="Workers' logs, in a new folder JOB_…; default: logs in the run's folder.",
        ),
    ] = None
    redirects: Annotated[
        str, typer.Option("--redirects", "-r", help="Output into files: 0 none, 1 out, 2 err, 3 both; or 0:3,1:2.")
    ] = "0"
    tee: Annotated[
        str, typer.Option("--tee", "-t", help="Output into files and, with [member], to the screen; as --redirects.")
    ] = "0"

    def output(self, workers: int, script: ScriptFlags) -> OutputPlan:
        """Return where the output of each worker goes. Raises ConfigError."""
        slots = range(workers)
        tees, redirected = _masks(self.tee, "--tee", slots), _masks(self.redirects, "--redirects", slots)
        shown = _ranks(script.local_ranks_filter, slots)
        return OutputPlan(
            run_dir=self.run_dir,
            log_dir=self.log_dir,
            # A worker whose output is not shown writes it into files instead.
            redirects={slot: mask if slot in shown else 3 for slot, mask in redirected.items()},
            tee={slot: mask if slot in shown else 0 for slot, mask in tees.items()},
        )


@dataclass(frozen=True, kw_only=True)
class ScriptFlags:
    """Options for the kind of script, and for the workers whose output is shown."""

    heading: ClassVar = "Script"

    module: Annotated[bool, typer.Option("-m", "--module", help="The script is a module, as with python -m.")] = False
    no_python: Annotated[
        bool, typer.Option("--no-python", "--no_python", help="The script is a program of its own.")
    ] = False
    local_ranks_filter: Annotated[
        str | None,
        typer.Option("--local-ranks-filter", "--local_ranks_filter", help="On the screen only these local ranks: 0,1."),
    ] = None

    def script(self, target: str, args: Sequence[str]) -> Script:
        """Return the command that workers run. Raises ConfigError."""
        return Script.of(self._found(target), args, module=self.module, python=not self.no_python)

    def check_standby(self, output: OutputPlan) -> None:
        """Raise ConfigError if a waiting worker cannot take the place of another one."""
        if self.no_python:
            raise ConfigError("--standby imports the libraries of a Python script: leave it or --no-python out")
        if any(output.redirects.values()) or any(output.tee.values()):
            raise ConfigError(
                "--standby leaves the output of workers on the screen: leave it out, or --redirects, --tee and "
                "--local-ranks-filter"
            )

    def _found(self, target: str) -> str:
        if self.module and self.no_python:
            raise ConfigError("-m and --no-python exclude one another")
        if self.module:
            return target
        if self.no_python:
            program = shutil.which(target)
            if program is None:
                raise ConfigError(f"there is no program {target!r} that can be executed")
            return program
        if not is_file(Path(target)):
            raise ConfigError(
                f"there is no script {target!r}: check the path (options of `run` come before the script)"
            )
        return target


def _ranks(text: str | None, slots: range) -> set[int]:
    if text is None:
        return set(slots)
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise ConfigError(f"--local-ranks-filter {text!r}: write local ranks, such as 0,1")
    shown = {int(part) for part in text.split(",")}
    if shown.isdisjoint(slots):
        raise ConfigError(
            f"--local-ranks-filter {text}: none of them is a local rank of this node's {len(slots)} (from 0): "
            "nothing would be shown"
        )
    return shown


def _masks(text: str, option: str, slots: range) -> dict[int, int]:
    """Return a bit mask per slot from torchrun's form: `3` for every local rank, or `0:3,1:2`. Raises ConfigError."""
    if re.fullmatch("[0-3]", text):
        return dict.fromkeys(slots, int(text))
    if not re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text):
        raise ConfigError(f"{option} {text!r}: write 0, 1, 2 or 3, or one of these per local rank, such as 0:3,1:2")
    named = {int(rank): int(mask) for rank, mask in (part.split(":") for part in text.split(","))}
    return {slot: named.get(slot, 0) for slot in slots}
