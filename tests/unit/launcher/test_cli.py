"""The command line as a whole: what it says of itself, and what follows where nobody can read it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest
from typer.testing import CliRunner

from docs import torchrun_flags
from elastrain.launcher.cli.command_line import app
from elastrain.snapshot.durable.places.local import LocalPlace
from elastrain.version import __version__
from tests.support.checkpoints import save


def test_the_version_is_told_without_a_command() -> None:
    told = CliRunner().invoke(app, ["--version"])
    assert (told.exit_code, told.stdout) == (0, f"elastrain {__version__}\n")


@pytest.mark.parametrize("group", [(), ("offload",), ("checkpoint",)])
def test_a_listing_of_commands_cuts_no_sentence_off(group: tuple[str, ...]) -> None:
    told = CliRunner().invoke(app, [*group, "--help"])
    listed = told.stdout.partition("Commands:")[2].strip().splitlines()
    assert len(listed) >= 2
    assert [line for line in listed if not line.endswith(".") or line.endswith("...")] == []


def test_the_page_on_torchrun_lists_the_flags_that_are_refused() -> None:
    assert torchrun_flags.PAGE.read_text() == torchrun_flags.page(), "run `python -m docs.torchrun_flags`"


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", [["--version"], ["--help"], ["checkpoint", "ls", "{folder}"]])
def test_output_that_cannot_be_written_ends_a_command_with_a_sentence(
    command: list[str], unbuffered: str, folder: Path
) -> None:
    with Path("/dev/full").open("w") as full:
        ran = elastrain(command, folder, full, unbuffered)
    no_room = "elastrain: standard output cannot be written: No space left on device\n"
    assert (ran.returncode, ran.stderr) == (1, no_room)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_gone_ends_a_command_in_silence(unbuffered: str, folder: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        ran = elastrain(["checkpoint", "ls", "{folder}"], folder, pipe, unbuffered)
    assert (ran.returncode, ran.stderr) == (1, "")


@pytest.mark.slow
def test_a_command_whose_output_is_closed_does_its_work(folder: Path) -> None:
    ran = elastrain(["checkpoint", "ls", "{folder}"], folder, subprocess.DEVNULL, "", shell=">&-")
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("checkpoints")
    save(LocalPlace(made), 10)
    return made


def elastrain(
    command: list[str], folder: Path, stdout: IO[str] | int, unbuffered: str, shell: str = ""
) -> subprocess.CompletedProcess[str]:
    line = f"exec {shlex.quote(sys.executable)} -m elastrain.launcher {shlex.join(command)} {shell}"
    return subprocess.run(
        ["sh", "-c", line.format(folder=folder)],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=180,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )
