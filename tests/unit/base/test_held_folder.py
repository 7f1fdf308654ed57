"""Temporary folders of commands that were killed are removed by the next one; those of living ones stay."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from elastrain.base.held_folder import held_folder

_HOLDER = """
import sys
from elastrain.base.held_folder import held_folder
with held_folder("elastrain-trial-") as folder:
    (folder / "file").touch()
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_a_folder_goes_with_its_block(tmp_path: Path) -> None:
    with held_folder("elastrain-trial-") as folder:
        assert folder.parent == tmp_path
        (folder / "file").touch()
    assert list(tmp_path.iterdir()) == []


def test_those_of_the_dead_go_with_the_next_and_those_of_the_living_stay(tmp_path: Path) -> None:
    (tmp_path / "elastrain-other-1").mkdir()
    (tmp_path / "elastrain-trial-file").touch()
    (tmp_path / "elastrain-trial-link").symlink_to(tmp_path / "elastrain-other-1")
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDER],
        env={"TMPDIR": str(tmp_path), "PYTHONPATH": ":".join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        theirs = Path(process.stdout.readline().strip())
        with held_folder("elastrain-trial-"):
            assert (theirs / "file").exists()
        process.kill()
        process.wait()
    assert theirs.exists()
    with held_folder("elastrain-trial-") as ours:
        names = {path.name for path in tmp_path.iterdir()}
        assert names == {ours.name, "elastrain-other-1", "elastrain-trial-file", "elastrain-trial-link"}
