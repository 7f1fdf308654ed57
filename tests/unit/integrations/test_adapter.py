"""Tests of what adapters share: libraries that are missing or too old, and one adapter in a process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from elastrain.errors import ConfigError
from elastrain.integrations import adapter


@pytest.fixture(autouse=True)
def _unclaimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "_claimed", None)


def test_a_library_that_is_not_installed_is_named_with_the_command_that_installs_it() -> None:
    with pytest.raises(ConfigError, match=r"needs the package nowhere: pip install 'nowhere>=2\.1'"):
        adapter.require("nowhere", "2.1")


def test_a_library_that_is_too_old_is_named_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "version", lambda library: "1.9.0")
    with pytest.raises(ConfigError, match=r"needs json 1\.10 or newer, and 1\.9\.0 is installed"):
        adapter.require("json", "1.10")


@pytest.mark.parametrize("found", ["1.10", "1.10.0", "1.11.0.dev3", "2.0.0+cpu"])
def test_a_library_that_is_new_enough_is_returned(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(adapter, "version", lambda library: found)
    assert adapter.require("json", "1.10") is json


def test_a_second_adapter_in_the_process_is_refused() -> None:
    adapter.claim("a.First")
    adapter.claim("a.First")
    with pytest.raises(ConfigError, match=r"uses a\.First already, and b\.Second would be a second job"):
        adapter.claim("b.Second")


def test_a_checkpoint_is_kept_for_members_that_join_once_the_script_has_deleted_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder, file = tmp_path / "checkpoint-4", tmp_path / "last.ckpt"
    folder.mkdir()
    for path in (folder / "state", file):
        path.write_text("first")
    assert adapter.kept_checkpoint(file) == str(file), "nobody joins a script without a launcher"
    monkeypatch.setenv("ELASTRAIN_RUN_DIR", str(tmp_path / "run"))
    first = [adapter.kept_checkpoint(path) for path in (folder, file)]
    shutil.rmtree(folder)
    newer = tmp_path / "newer"
    newer.write_text("second")
    newer.replace(file)
    later = [adapter.kept_checkpoint(path) for path in (folder, file)]
    assert later == first and [Path(path).name for path in later] == [folder.name, file.name]
    assert ((Path(later[0]) / "state").read_text(), Path(later[1]).read_text()) == ("first", "first")
    assert adapter.kept_checkpoint(tmp_path / "nowhere") == str(tmp_path / "nowhere"), "the library says that"
    assert len(list((tmp_path / "run" / "begun_from").iterdir())) == 2
