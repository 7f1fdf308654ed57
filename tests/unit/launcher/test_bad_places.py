"""A `--checkpoint-dir` in which nothing can be written is refused before a worker starts."""

from __future__ import annotations

import errno
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from unittest.mock import ANY

import pytest
from typer.testing import CliRunner

from elastrain.base.checkpoint_settings import EVERY, KEEP_FOR, CheckpointOptions, parse_every
from elastrain.errors import ConfigError
from elastrain.launcher.agent.worker_start import Script
from elastrain.launcher.cli.command_line import app
from elastrain.launcher.cli.options.checkpoint_options import CheckpointFlags
from elastrain.launcher.start.run_options import RunOptions, StartWish
from elastrain.launcher.start.start_checkpoint import held_place
from elastrain.snapshot.durable.errors import CheckpointError
from elastrain.snapshot.durable.owner import OWNER, Owner, claim, owner_of
from elastrain.snapshot.durable.places.local import LocalPlace
from elastrain.snapshot.durable.publishing import try_out
from tests.support.checkpoints import save
from tests.support.crashing_files import CrashingFiles


def run(*flags: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["run", *flags, __file__])
    return done.exit_code, done.stderr


def options(folder: Path | str) -> RunOptions:
    script = Script.of("train.py", ())
    return RunOptions(job="job", script=script, target="train.py", checkpoints=CheckpointOptions(place=str(folder)))


@pytest.mark.parametrize(
    "nodes", [[], ["--local-nodes", "2"], ["--nnodes", "2", "--rdzv-id", "j", "--rdzv-endpoint", "127.0.0.1:1"]]
)
def test_a_place_that_cannot_be_made_ends_the_command_at_once_with_one_sentence(nodes: list[str]) -> None:
    code, told = run("--checkpoint-dir", "/proc/nothing", *nodes)
    assert code == 2
    assert told.startswith("elastrain: --checkpoint-dir /proc/nothing: no checkpoint can be written: ")
    assert told.endswith("no folder can be made in /proc: name another directory\n")
    assert len(told.splitlines()) == 1


@pytest.mark.parametrize("time", ["30s", "5m", "12d", "1000001s", "99999999999d"])
def test_a_time_comes_to_the_workers_as_it_was_written(time: str) -> None:
    _, seconds = parse_every(time)
    told = CheckpointOptions(place="/c", every_s=seconds, keep_for_s=seconds).environment()
    assert parse_every(told[EVERY]) == (0, seconds)
    assert float(told[KEEP_FOR]) == seconds


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--checkpoint-every", "0"], "write a number of steps, or a time"),
        (["--checkpoint-every", "-5"], "write a number of steps, or a time"),
        (["--checkpoint-every", ""], "write a number of steps, or a time"),
        (["--checkpoint-every", "5q"], "write a number of steps, or a time"),
        (["--checkpoint-every", "9" * 400 + "d"], "write a number of steps, or a time"),
        (["--keep-for", "9" * 400 + "d"], "write a time such as"),
        (["--keep", "0"], "--keep"),
        (["--keep-for", "3"], "write a time such as"),
        (["--keep-for", "-1d"], "write a time such as"),
        (["--checkpoint-layout", "striped"], "it is one of shared, local"),
        (["--checkpoint-layout", "local", "--checkpoint-dir", "memory://x"], "no local disk is at an address"),
        (["--checkpoint-dir", "memory://x"], "each process has its own: name a folder"),
        (["--checkpoint-dir", ""], "it is empty"),
        (["--checkpoint-dir", " "], "it is empty"),
        (["--checkpoint-dir", "nowhere://x"], "names no place"),
        (["--checkpoint-dir", "file://"], "it is no URL: write PROTOCOL://PATH"),
        (["--checkpoint-dir", "://x"], "it is no URL: write PROTOCOL://PATH"),
        (["--checkpoint-dir", "~nobody-of-this-name/x"], "no user here has that name"),
        (["--checkpoint-dir", "two\nlines"], "a control character, or a byte that is no UTF-8"),
        (["--checkpoint-dir", os.fsdecode(b"latin-\xe9")], "a control character, or a byte that is no UTF-8"),
        (["--resume", "/nowhere"], "there is no such folder"),
        (["--resume", __file__], "it is a file"),
    ],
)
def test_values_that_mean_nothing_are_refused(tmp_path: Path, flags: list[str], words: str) -> None:
    code, told = run("--checkpoint-dir", str(tmp_path), *flags)
    assert code == 2
    assert words in told


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("file", "/file is no folder"),
        ("file/below/it", "/file is no folder"),
        ("dangling", "/dangling is a symbolic link to nowhere"),
        ("dangling/below", "/dangling is a symbolic link to nowhere"),
        ("around", "/around is a symbolic link to nowhere"),
    ],
)
def test_a_path_that_is_a_file_or_leads_through_one_is_refused(place: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "around").symlink_to("around")
    with pytest.raises(ConfigError) as refused, held_place(options(tmp_path / place)):
        pass
    assert str(refused.value).endswith(f"no checkpoint can be written: {tmp_path}{words}: name another directory")


@pytest.mark.parametrize(
    ("written", "meant"),
    [("~/x", "/home/me/x"), ("x", "{}/x"), ("file://x", "file://{}/x"), ("s3://bucket/x", "s3://bucket/x")],
)
def test_a_place_is_the_same_for_a_script_that_changes_its_directory(
    written: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell leaves the `~` of `--checkpoint-dir=~/x` as it is."""
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.chdir(tmp_path)
    flags = CheckpointFlags(checkpoint_dir=written).checkpoints()
    assert flags is not None
    assert flags.place == meant.format(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system, which root may")
def test_a_full_disk_is_refused(tmp_path: Path) -> None:
    made = ["mount", "-t", "tmpfs", "-o", "size=16k", "elastrain-disks", str(tmp_path)]
    if subprocess.run(made, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        with pytest.raises(OSError, match="No space left"):
            (tmp_path / "much").write_bytes(bytes(64 << 10))
        with pytest.raises(ConfigError, match="there is no room"), held_place(options(tmp_path)):
            pass
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_whichever_call_fails_it_is_said_and_nothing_is_left() -> None:
    calls = CrashingFiles()
    try_out(LocalPlace("/checkpoints", calls))
    for call in range(1, calls.calls + 1):
        files = CrashingFiles()
        files.faults = {call: errno.EROFS}
        with pytest.raises(CheckpointError, match="the file system is read-only"):
            try_out(LocalPlace("/checkpoints", files))


def test_a_place_that_is_good_stays_as_it_was(tmp_path: Path) -> None:
    with held_place(options(tmp_path / "new")):
        assert [path.name for path in (tmp_path / "new").iterdir()] == [OWNER]


def test_a_job_that_is_refused_leaves_nothing_behind(tmp_path: Path) -> None:
    new, folder = tmp_path / "above" / "new", tmp_path / "run"
    code, told = run("--checkpoint-dir", str(new), "--run-dir", str(folder), "--resume", "/nowhere")
    assert (code, told.count("\n")) == (2, 1)
    assert "there is no such folder" in told
    assert not new.exists()
    assert not folder.exists()


def test_a_job_that_has_written_nothing_leaves_a_place_as_it_was(tmp_path: Path) -> None:
    with held_place(options(tmp_path)):
        with held_place(options(tmp_path)):  # another node of it, which ends first
            pass
        assert owner_of(LocalPlace(tmp_path)) is not None
    assert list(tmp_path.iterdir()) == []


def test_checkpoints_of_another_job_that_this_one_does_not_go_on_from_are_no_place_for_its_own(tmp_path: Path) -> None:
    claim(LocalPlace(tmp_path), "other").release()
    save(LocalPlace(tmp_path), 10)
    before = owner_of(LocalPlace(tmp_path))
    code, told = run("--checkpoint-dir", str(tmp_path), "--resume", "none")
    assert (code, told.count("\n")) == (2, 1)
    assert "holds checkpoints of job other" in told
    assert owner_of(LocalPlace(tmp_path)) == before


@pytest.mark.slow
def test_a_place_that_a_living_job_holds_is_refused_with_its_name_and_free_when_that_job_is_gone(
    tmp_path: Path,
) -> None:
    one, other = (replace(options(tmp_path), job=name) for name in ("one", "other"))
    with held_place(one):
        with held_place(one):  # another node of it
            pass
        with pytest.raises(ConfigError, match="is in use by job one, which is alive: end it first"), held_place(other):
            pass
    with held_place(other):
        assert owner_of(LocalPlace(tmp_path)) == Owner(job="other", claim=ANY)
        save(LocalPlace(tmp_path), 10)
    with held_place(one):  # what it may do here depends on what it starts from
        assert owner_of(LocalPlace(tmp_path)) == Owner(job="other", claim=ANY)


def test_checkpoints_that_the_job_would_not_see_do_not_make_it_begin_anew(tmp_path: Path) -> None:
    """Simulated nodes have folders of their own on local disks; a job that looks elsewhere has to say so."""

    def held(folder: Path, layout: str, *, is_of_simulated: bool, resume: str = "auto") -> None:
        told = CheckpointOptions(place=str(folder), layout=layout)
        wish = StartWish(source=resume)
        with held_place(replace(options(folder), checkpoints=told, resume=wish), is_of_simulated=is_of_simulated):
            pass

    plain, simulated = tmp_path / "plain", tmp_path / "simulated"
    save(LocalPlace(plain), 3)
    for node in ("node0", "node1"):
        save(LocalPlace(simulated / node), 3)
    of_nodes = r"those of simulated nodes \(node0, node1\): go on with --local-nodes"
    for layout, is_of_simulated in (("local", False), ("shared", False), ("shared", True)):
        with pytest.raises(ConfigError, match=of_nodes):
            held(simulated, layout, is_of_simulated=is_of_simulated)
        held(plain, layout, is_of_simulated=is_of_simulated)
    with pytest.raises(ConfigError, match="the checkpoints lie beside these: move them into one of these folders"):
        held(plain, "local", is_of_simulated=True)
    held(simulated, "local", is_of_simulated=True)
    held(simulated, "local", is_of_simulated=False, resume="none")
