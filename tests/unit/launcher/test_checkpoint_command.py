"""`elastrain checkpoint`: what it prints, and its exit codes."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import termios
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from elastrain.launcher.cli.command_line import app
from elastrain.snapshot.durable.manifest import name_of
from elastrain.snapshot.durable.places.local import LocalPlace
from elastrain.snapshot.durable.publishing import mark_verified
from tests.support.checkpoints import SHAPE, save, save_on_disks, state


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])


def told(*arguments: object) -> Any:
    done = run(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = LocalPlace(tmp_path / "checkpoints")
    save(place, 10)
    save(place, 20)
    mark_verified(place, name_of(0, 10))
    return tmp_path / "checkpoints"


def flip(folder: Path, name: str) -> None:
    part = next((folder / name).glob("part-m1-*"))
    data = bytearray(part.read_bytes())
    data[11] ^= 1
    part.write_bytes(data)


def test_ls_shows_the_newest_first_with_its_state(folder: Path) -> None:
    rows = told("ls", folder)["checkpoints"]
    assert [(row["step"], row["verified"], row["problems"]) for row in rows] == [(20, False, []), (10, True, [])]
    lines = run("ls", folder).stdout.splitlines()
    assert lines[0].split() == ["checkpoint", "step", "age", "bytes", "state"]
    assert lines[1].endswith("complete")
    assert lines[2].endswith("verified")


def test_ls_of_an_empty_place_says_so(tmp_path: Path) -> None:
    assert told("ls", tmp_path) == {"checkpoints": []}
    done = run("ls", tmp_path)
    assert (done.exit_code, done.stdout) == (0, "")
    assert done.stderr == f"elastrain: there is no checkpoint in {tmp_path}\n"


def test_verify_ends_with_1_and_names_what_is_damaged(folder: Path) -> None:
    assert run("verify", folder, "--all").exit_code == 0
    flip(folder, name_of(0, 20))
    done = run("verify", folder)
    assert done.exit_code == 1
    assert "frame 0 of shard 1 in part-m1-" in done.stdout
    assert run("verify", folder / name_of(0, 10)).exit_code == 0
    everything = run("verify", folder, "--all", "--json")
    assert everything.exit_code == 1
    assert [bool(problems) for problems in json.loads(everything.stdout)["problems"].values()] == [True, False]


def test_show_prints_what_a_checkpoint_is(folder: Path) -> None:
    shown = told("show", folder)
    assert (shown["step"], shown["spec"], shown["counters"]) == (20, {"seed": 0}, {"samples": 1344})
    assert shown["parameters"] == {"w0": "float32[10, 13]", "w1": "float32[10, 13]"}
    assert "step         20" in run("show", folder).stdout.splitlines()


def test_wrong_names_end_with_2_and_a_sentence(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "empty.safetensors").mkdir()
    save_file({"w": torch.ones(2)}, model := tmp_path / "model.safetensors")
    for arguments in (
        ("show", folder, "--checkpoint", "none"),
        *((command, tmp_path / "nothing") for command in ("ls", "verify", "show")),
        ("verify", tmp_path / "empty", "--all"),
        ("show", tmp_path / "empty"),
        ("show", folder / name_of(0, 30)),
        ("export", tmp_path / "nothing", "--out", tmp_path / "out"),
        ("export", folder, "--out", "/proc/nothing/out"),
        ("export", folder, "--out", tmp_path / "file" / "out"),
        ("export", folder, "--out", tmp_path / "out", "--format", "zip"),
        ("export", folder, "--out", folder),
        ("export", folder, "--out", tmp_path / "dangling"),
        ("import", tmp_path / "model.pt", "--into", tmp_path / "new"),
        ("import", tmp_path / "none.safetensors", "--into", tmp_path / "new"),
        ("import", tmp_path / "empty.safetensors", "--into", tmp_path / "new"),
        ("import", model, "--into", tmp_path / "file"),
        ("import", model, "--into", "/proc/nothing"),
        ("import", model, "--into", folder),
        ("import", model, "--optimizer", model, "--into", tmp_path / "new"),
        ("ls", "nowhere://x"),
        ("ls", ""),
        ("import", model, "--into", ""),
        ("import", model, "--into", "memory://x"),
    ):
        done = run(*arguments)
        assert done.exit_code == 2, (arguments, done.output)
        assert done.stderr.startswith("elastrain: ")
        assert len(done.stderr.strip().splitlines()) == 1, (arguments, done.stderr)
    # What cannot be asked for, for want of a permission or for its length, is no traceback.
    done = run("export", folder, "--out", tmp_path / ("n" * 300))
    assert (done.exit_code, done.stderr.splitlines()[-1].endswith("n failed: File name too long")) == (2, True)
    done = run("ls", tmp_path / "file")
    sentence = f"{tmp_path}/file is a file: name the --checkpoint-dir of a job, or a folder in it"
    assert (done.exit_code, done.stderr) == (2, f"elastrain: {sentence}\n")
    assert "it does not exist" in run("import", tmp_path / "model.pt", "--into", tmp_path / "new").stderr


def test_an_export_is_imported_again(folder: Path, tmp_path: Path) -> None:
    exported = told("export", folder, "--out", tmp_path / "out")
    assert (exported["step"], len(exported["files"])) == (20, 2)
    weights = load_file(tmp_path / "out/model.safetensors")
    assert torch.equal(weights["w1"], state(1, 20).parameters[:130].view(SHAPE))
    files = (tmp_path / "out/model.safetensors", "--optimizer", tmp_path / "out/optimizer.safetensors")
    assert told("import", *files, "--into", tmp_path / "new")["step"] == -1
    again = told("export", tmp_path / "new", "--out", tmp_path / "again")
    assert again["checkpoint"] == name_of(0, -1)
    assert torch.equal(load_file(tmp_path / "again/model.safetensors")["w1"], weights["w1"])
    assert run("import", *files, "--into", tmp_path / "new").exit_code == 2


def test_a_damaged_checkpoint_is_not_exported(folder: Path, tmp_path: Path) -> None:
    flip(folder, name_of(0, 20))
    done = run("export", folder, "--out", tmp_path / "out")
    assert done.exit_code == 1
    assert "shard 1" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_on_local_disks_is_whole_where_all_its_directories_are_named(tmp_path: Path) -> None:
    nodes = [tmp_path / f"n{number}" for number in range(3)]
    save_on_disks([LocalPlace(node) for node in nodes], 10)
    part = "3 of 4 parts are here: name the directories of the other nodes, too"
    assert run("ls", nodes[0]).stdout.splitlines()[1].endswith(part)
    assert run("ls", *nodes[:2]).stdout.splitlines()[1].endswith("complete")
    done = run("verify", nodes[0])
    assert (done.exit_code, done.stdout) == (0, f"{name_of(0, 10)}: good, {part}\n")
    assert told("show", nodes[1])["here"] == part
    assert "here" not in told("show", *nodes)
    refused = run("export", nodes[2], "--out", tmp_path / "out")
    assert (refused.exit_code, refused.stderr) == (2, f"elastrain: {name_of(0, 10)}: {part}\n")
    assert told("export", *nodes[1:], "--out", tmp_path / "out")["step"] == 10
    assert torch.equal(load_file(tmp_path / "out/model.safetensors")["w2"], state(2, 10).parameters[:130].view(SHAPE))


def test_a_damaged_copy_on_one_of_several_disks_is_told_by_verify(tmp_path: Path) -> None:
    nodes = [tmp_path / f"n{number}" for number in range(3)]
    save_on_disks([LocalPlace(node) for node in nodes], 10)
    flip(nodes[1], name_of(0, 10))
    done = run("verify", *nodes)
    assert done.exit_code == 1
    assert str(nodes[1]) in done.stdout


def on_a_terminal(*arguments: object) -> str:
    """What a terminal of 60 columns shows on standard error, without its colours."""
    reader, writer = pty.openpty()
    termios.tcsetwinsize(writer, (24, 60))
    command = [sys.executable, "-m", "elastrain.launcher", "checkpoint", *map(str, arguments)]
    around = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=writer, env={**around, "TERM": "xterm"})
    os.close(writer)
    shown = b""
    with suppress(OSError):  # the end of what was written: meanwhile, since a terminal keeps little
        while more := os.read(reader, 1 << 16):
            shown += more
    os.close(reader)
    assert process.wait(60) == 0
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())


@pytest.mark.slow
def test_a_terminal_shows_a_bar_of_one_line_and_a_file_none(folder: Path, tmp_path: Path) -> None:
    save_file({"w": torch.ones(8)}, tmp_path / "model.safetensors")
    shown = on_a_terminal("import", tmp_path / "model.safetensors", "--into", tmp_path / "a")
    assert shown.lstrip("\r").startswith("importing model.safetensors ━")
    assert "100% " in shown, "it knows how many bytes there are"
    verifying = [line for line in on_a_terminal("verify", folder).splitlines() if line.strip()]
    assert all(line.startswith(f"verifying {name_of(0, 20)} ━") for line in verifying), verifying
    assert re.search(r"━ 100% [\d.]+/[\d.]+ kB$", verifying[-1]), verifying
    assert run("import", tmp_path / "model.safetensors", "--into", tmp_path / "b").stderr == ""
