"""Tests of what adapters share: libraries that are missing or too old, and one adapter in a process."""

from __future__ import annotations

import json

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
