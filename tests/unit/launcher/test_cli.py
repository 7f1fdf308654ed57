"""The command line as a whole: what it says of itself."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from elastrain.launcher.command_line import app
from elastrain.version import __version__


def test_the_version_is_told_without_a_command() -> None:
    told = CliRunner().invoke(app, ["--version"])
    assert (told.exit_code, told.stdout) == (0, f"elastrain {__version__}\n")


@pytest.mark.parametrize("group", [(), ("offload",), ("checkpoint",)])
def test_a_listing_of_commands_cuts_no_sentence_off(group: tuple[str, ...]) -> None:
    told = CliRunner().invoke(app, [*group, "--help"])
    listed = told.stdout.partition("Commands:")[2].strip().splitlines()
    assert len(listed) >= 2
    assert [line for line in listed if not line.endswith(".") or line.endswith("...")] == []
